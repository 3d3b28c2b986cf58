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
from typing import Final

import torch
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError
from geo_diloco.numerics.merge import quick_norm

PPM: Final = 1_000_000
"""s = 1."""


def shrink_to_carry_(delta: Tensor, d_hat: Tensor | None, *, kappa: float, rbar: float, cap: float = 2.0) -> int:
    """Makes a replica's delta (theta - anchor_old, float32) what it carries over, s * carry, in place; returns s in
    parts per million. Where that is 0 nothing is carried, and what is left in `delta` is void.

    `d_hat`: the decoded delta if this commit merged it, already multiplied by the product of the s of adoptions
    since it was sampled; else None. A replica with NaN or infinity is healed: it carries nothing.
    """
    for tensor in (delta, d_hat):
        if tensor is not None and (tensor.shape != delta.shape or tensor.dtype != torch.float32):
            raise LayoutError(f"adoption of {tuple(tensor.shape)} {tensor.dtype} into {tuple(delta.shape)} float32")
    if d_hat is not None:
        delta.sub_(d_hat)
    scale_ppm = carry_scale_ppm(quick_norm(delta), kappa=kappa, rbar=rbar, cap=cap)
    if scale_ppm not in (0, PPM):
        delta.mul_(scale_ppm / PPM)
    return scale_ppm


def carry_scale_ppm(norm: float, *, kappa: float, rbar: float, cap: float = 2.0) -> int:
    """s for a carry of this norm, floored to whole parts per million: kappa if it is 0, 0 if it isn't finite."""
    if not (0.0 <= kappa <= 1.0 and math.isfinite(rbar) and rbar >= 0.0):
        raise LocalProtocolError(f"kappa = {kappa}, rbar = {rbar}: 0 <= kappa <= 1 and a finite rbar >= 0 are wanted")
    if not math.isfinite(norm):
        return 0
    if norm > cap * rbar:
        kappa = kappa * (cap * rbar / norm)
    return math.floor(kappa * PPM)
