"""How a learner takes a new version of a fragment without losing what the merge has not seen.

Apart from the outer step because it is private to a learner: nobody else needs its bits. The paper overwrites the
replica (kappa = 0). With kappa = 1 the work that Theta doesn't hold yet is carried over: the steps since sampling,
what encoding lost (this is the learner's only error feedback), or all of it if the learner missed the round:

    carry  = theta - anchor_old - d_hat       d_hat: the learner's decoded delta, if that commit merged it
    s      = kappa * min(1, cap*Rbar / |carry|)
    theta  = Theta_new + s * carry

The cap (the manifest's `carry_cap`, in mean norms Rbar of the merged deltas) keeps a learner that is rarely merged
from drifting away. s is a whole number of parts per million, so that the ledger can scale token counts by the very
same s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError
from geo_diloco.numerics.merge import l2_norm

PPM: Final = 1_000_000
"""s = 1."""


@dataclass(frozen=True)
class Adoption:
    """`theta`: the replica's fragment after adoption. `scale_ppm`: the s that was used, in parts per million."""

    theta: Tensor
    scale_ppm: int


def adopt(
    theta: Tensor,
    anchor_old: Tensor,
    anchor_new: Tensor,
    d_hat: Tensor | None,
    *,
    kappa: float,
    rbar: float,
    cap: float = 2.0,
) -> Adoption:
    """Take `anchor_new` (Theta_new) for a replica at `theta` whose anchor was `anchor_old`; new tensors, float32.

    `d_hat`: the decoded delta if this commit merged it, already multiplied by the product of the s of adoptions
    since it was sampled; else None. A replica with NaN or infinity is healed: it takes Theta_new, with s = 0.
    """
    for tensor in (theta, anchor_old, anchor_new, d_hat):
        if tensor is not None and (tensor.shape != theta.shape or tensor.dtype != torch.float32):
            raise LayoutError(f"adoption of {tuple(tensor.shape)} {tensor.dtype} into {tuple(theta.shape)} float32")
    carry = torch.sub(theta, anchor_old)
    if d_hat is not None:
        carry.sub_(d_hat)
    scale_ppm = carry_scale_ppm(l2_norm(carry), kappa=kappa, rbar=rbar, cap=cap)
    if scale_ppm == 0:
        return Adoption(anchor_new.clone(), 0)
    if scale_ppm != PPM:
        carry.mul_(scale_ppm / PPM)
    return Adoption(carry.add_(anchor_new), scale_ppm)


def carry_scale_ppm(norm: float, *, kappa: float, rbar: float, cap: float = 2.0) -> int:
    """s for a carry of this norm, floored to whole parts per million: kappa if it is 0, 0 if it isn't finite."""
    if not (0.0 <= kappa <= 1.0 and math.isfinite(rbar) and rbar >= 0.0):
        raise LocalProtocolError(f"kappa = {kappa}, rbar = {rbar}: 0 <= kappa <= 1 and a finite rbar >= 0 are wanted")
    if not math.isfinite(norm):
        return 0
    if norm > cap * rbar:
        kappa = kappa * (cap * rbar / norm)
    return math.floor(kappa * PPM)
