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
to float32; every operation is a pass of its own with a single rounding: no fused multiply-add, no `alpha=`. The passes
are made chunk by chunk in buffers that stay in cache, so a large fragment costs no large temporary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError
from geo_diloco.manifest import Digest
from geo_diloco.numerics.fragments import FragmentDigest

_CHUNK_ELEMENTS: Final = 32_768
"""A pass over so many float32 stays in cache, and on the calling thread."""


def outer_update(
    gradient: Tensor,
    momentum: Tensor | None,
    residual: Tensor | None,
    *,
    eta: float,
    mu: float,
    out: Tensor | None = None,
) -> Tensor:
    """u, before encoding: what the syncer would subtract from Theta. None for momentum or residual means zero.

    `out` is written to and returned if given; it may be `gradient`.
    """
    _check(eta, mu, gradient, momentum, residual, out)
    update = torch.empty_like(gradient) if out is None else out
    work = _scratch(len(gradient))
    for chunk in _chunks(len(gradient)):
        g, u = gradient[chunk], work[: chunk.stop - chunk.start]
        if momentum is None:
            torch.mul(g, _float32(1.0 + mu), out=u)
        else:
            torch.mul(momentum[chunk], _float32(mu), out=u).add_(g).mul_(_float32(mu)).add_(g)
        if residual is None:
            torch.mul(u, _float32(eta), out=update[chunk])
        else:
            torch.add(u.mul_(_float32(eta)), residual[chunk], out=update[chunk])
    return update


def residual_after(update: Tensor, update_hat: Tensor, *, out: Tensor | None = None) -> Tensor:
    """r: what this encoding lost, added to the fragment's next update. Private to the syncer. `out` may be `update`."""
    return torch.sub(update, update_hat, out=out)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What an update will make of a fragment. `is_finite`: no value of Theta or b will be NaN or infinite."""

    state_digest: Digest
    momentum_digest: Digest
    is_finite: bool


def foresee_update(theta: Tensor, momentum: Tensor, update_hat: Tensor, *, eta: float, mu: float) -> Foreseen:
    """The digests that `apply_update` will lead to, without room for another Theta and b."""
    _check(eta, mu, theta, momentum, update_hat)
    theta_next, momentum_next, work = (_scratch(len(theta)) for _ in range(3))
    states, momenta, is_finite = FragmentDigest(), FragmentDigest(), True
    for chunk in _chunks(len(theta)):
        count = chunk.stop - chunk.start
        t, b, u = theta_next[:count], momentum_next[:count], update_hat[chunk]
        torch.sub(theta[chunk], u, out=t)
        _next_momentum(momentum[chunk], u, b, work[:count], eta=eta, mu=mu)
        is_finite = is_finite and bool(torch.isfinite(t).all() and torch.isfinite(b).all())
        states.add(t)
        momenta.add(b)
    return Foreseen(states.result(), momenta.result(), is_finite)


def apply_update(
    theta: Tensor,
    momentum: Tensor | None,
    update_hat: Tensor,
    *,
    eta: float,
    mu: float,
    theta_out: Tensor | None = None,
    momentum_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(Theta, b) after the decoded update; the same bits on every machine. b stays None if it is.

    eta and mu are those written in the commit. Both are new tensors, except that Theta is written to `theta_out` and b
    to `momentum_out` if given, which may be `momentum`: memory that is there costs half of what new memory does.
    """
    _check(eta, mu, theta, momentum, update_hat, theta_out, momentum_out)
    theta_next = torch.empty_like(theta) if theta_out is None else theta_out
    momentum_next = torch.empty_like(momentum) if momentum is not None and momentum_out is None else momentum_out
    work = _scratch(len(theta))
    for chunk in _chunks(len(theta)):
        u = update_hat[chunk]
        torch.sub(theta[chunk], u, out=theta_next[chunk])
        if momentum is not None and momentum_next is not None:
            part = work[: chunk.stop - chunk.start]
            _next_momentum(momentum[chunk], u, momentum_next[chunk], part, eta=eta, mu=mu)
    return theta_next, None if momentum is None else momentum_next


def _next_momentum(momentum: Tensor, update_hat: Tensor, out: Tensor, work: Tensor, *, eta: float, mu: float) -> None:
    """out = (mu*b + u_hat*c1) * c2; `work` is scratch."""
    torch.mul(momentum, _float32(mu), out=out)
    torch.mul(update_hat, _float32(1.0 / eta), out=work)
    out.add_(work).mul_(_float32(1.0 / (1.0 + mu)))


def _chunks(size: int) -> Iterator[slice]:
    for start in range(0, size, _CHUNK_ELEMENTS):
        yield slice(start, min(start + _CHUNK_ELEMENTS, size))


def _scratch(size: int) -> Tensor:
    return torch.empty(min(_CHUNK_ELEMENTS, size), dtype=torch.float32)


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
