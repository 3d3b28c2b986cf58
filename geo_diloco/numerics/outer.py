"""The outer step, written so that the run's state is a fold over its updates.

Apart from the merge because everyone does this part and must get the same bits: `apply_update` is all that turns
(Theta, b) and the bytes of an update into the next (Theta, b), here and on every other machine. Nesterov SGD, as in
DiLoCo (arXiv 2311.08105), with b' = mu*b + G and u = eta*(G + mu*b'); the update is then *encoded*, and what it
decodes to, u_hat, is what counts for all, the syncer included:

    u      = eta*(G + mu*(mu*b + G)) + r        outer_update     syncer only
    r      = u - u_hat                          residual_after   syncer only
    Theta  = Theta - u_hat                      apply_update     everyone
    b      = (mu*b + u_hat*c1) * c2             apply_update     who holds the momentum; c1 = 1/eta, c2 = 1/(1+mu)

The last line recovers mu*b + G exactly when encoding is exact. Its constants are computed in float64 and rounded once
to float32; every operation is a pass of its own with a single rounding: no fused multiply-add, no `alpha=`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError


def outer_update(
    gradient: Tensor, momentum: Tensor | None, residual: Tensor | None, *, eta: float, mu: float
) -> Tensor:
    """u, before encoding: what the syncer would subtract from Theta. None for momentum or residual means zero."""
    _check(eta, mu, gradient, momentum, residual)
    if momentum is None:
        update = torch.mul(gradient, _float32(1.0 + mu))
    else:
        update = torch.mul(momentum, _float32(mu)).add_(gradient).mul_(_float32(mu)).add_(gradient)
    update.mul_(_float32(eta))
    return update if residual is None else update.add_(residual)


def residual_after(update: Tensor, update_hat: Tensor) -> Tensor:
    """r: what this encoding lost, added to the fragment's next update. Private to the syncer."""
    return torch.sub(update, update_hat)


def apply_update(
    theta: Tensor, momentum: Tensor | None, update_hat: Tensor, *, eta: float, mu: float
) -> tuple[Tensor, Tensor | None]:
    """(Theta, b) after the decoded update, as new tensors; the same bits on every machine. b stays None if it is.

    eta and mu are those written in the commit.
    """
    _check(eta, mu, theta, momentum, update_hat)
    theta_next = torch.sub(theta, update_hat)
    if momentum is None:
        return theta_next, None
    momentum_next = torch.mul(momentum, _float32(mu))
    step = torch.mul(update_hat, _float32(1.0 / eta))
    momentum_next.add_(step)
    momentum_next.mul_(_float32(1.0 / (1.0 + mu)))
    return theta_next, momentum_next


def _float32(value: float) -> float:
    """Rounded once: torch then multiplies by exactly this float32."""
    return float(np.float32(value))


def _check(eta: float, mu: float, first: Tensor, *others: Tensor | None) -> None:
    if not (math.isfinite(eta) and eta > 0.0 and 0.0 <= mu < 1.0):
        raise LocalProtocolError(f"eta = {eta}, mu = {mu}: eta > 0 and 0 <= mu < 1 are wanted")
    for tensor in (first, *others):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.dim() != 1 or tensor.shape != first.shape:
            raise LayoutError(
                f"a vector of {tuple(tensor.shape)} {tensor.dtype} beside one of {tuple(first.shape)}: "
                "flat torch.float32 of one length are wanted"
            )
