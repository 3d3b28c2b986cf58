"""Faults of a fleet whose learners come and go: each is there for a while, away for a while, and so on."""

from __future__ import annotations

import random

from plan import Fleet

from geo_diloco.config import Fault

AWAY_S = 9.6
"""On average: ten rounds of the whole run, of 6 steps (H / P) of 160 ms."""
SHARE_AWAY = 0.2


def faults_of(fleet: Fleet, seed: int, *, until_s: float) -> tuple[Fault, ...]:
    """Exponential times, drawn from the seed; nobody is away at the beginning."""
    if not fleet.away:
        return ()
    found = []
    for learner in range(1, fleet.learners + 1):
        chance = random.Random(f"{seed} {learner}")
        now = 0.0
        while True:
            now += chance.expovariate(SHARE_AWAY / (AWAY_S * (1 - SHARE_AWAY)))
            back = now + max(0.1, chance.expovariate(1 / AWAY_S))
            if now >= until_s:
                break
            found.append(Fault(learner=learner, kind=fleet.away, from_s=round(now, 3), until_s=round(back, 3)))
            now = back
    return tuple(found)
