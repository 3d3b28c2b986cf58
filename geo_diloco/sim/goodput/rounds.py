"""Who is in a round's merge when it closes: what quorum, grace and unequal step times make of learners that don't wait.

Learners never stop for a round, so none of this costs goodput. It decides how much of the work is merged in its own
round; the rest rides with a later one (or, with kappa = 0, the paper's overwrite, is lost for that fragment). Rounds
are drawn, not followed: in each, a learner trains with its share of the time, and samples at its next step's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from geo_diloco.sim.goodput.model import World

Floats = NDArray[np.float64]

ROUNDS = 4000
"""Drawn for each seed."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    participants: float
    """In the merge of a round that closes, on average; 0 if none does."""
    in_time: float
    """Share of the work of those who train that is merged in its own round."""


def slowest_step(world: World, *, groups: int, slices: int, random: np.random.Generator) -> Floats:
    """Each group's step time beside an average slice's: the longest of its slices', which are lognormal with mean 1."""
    if not world.step_spread:
        return np.ones(groups)
    sigma = float(np.sqrt(np.log1p(world.step_spread**2)))
    quantiles = random.random(groups) ** (1.0 / slices)
    largest = np.array([NormalDist().inv_cdf(min(q, 1.0 - 1e-15)) for q in quantiles])
    return np.asarray(np.exp(sigma * largest - sigma**2 / 2), dtype=np.float64)


def draw_rounds(world: World, *, training: Floats, steps: Floats, random: np.random.Generator) -> Rounds:
    """`training`: each learner's share of the time in which it trains; `steps`: its step time."""
    learners = len(training)
    here = random.random((ROUNDS, learners)) < training
    arrival = np.where(here, random.random((ROUNDS, learners)) * steps, np.inf)
    quorum = np.sort(arrival, axis=1)[:, min(world.quorum, learners) - 1]
    closes = np.isfinite(quorum)
    until = np.where(closes, quorum, -1.0)
    if world.grace:  # Eq. 3 of the paper, with nothing taken off for transfers
        slack = world.overlap_steps * float(np.median(steps)) - until
        cap = np.where(here, steps, 0.0).max(axis=1)
        until = until + np.where(closes, np.clip(world.grace_gamma * slack, 0.0, cap), 0.0)
    merged = here & (arrival <= until[:, None])
    speed = 1.0 / steps
    work = (here * speed).sum()
    return Rounds(
        participants=float(merged.sum() / max(1, closes.sum())),
        in_time=float((merged * speed).sum() / work) if work else 0.0,
    )
