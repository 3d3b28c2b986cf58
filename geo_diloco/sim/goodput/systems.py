"""Data-parallel, elastic data-parallel and Decoupled DiLoCo under the same failures.

They differ in what stands still when a slice fails: everything until it is back; everything while it is taken out; one
learner's chips while it is taken out. A learner of M is an elastic group of a M-th of the chips, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from geo_diloco.sim.goodput.lanes import watch
from geo_diloco.sim.goodput.model import DAY_S, HOUR_S, Outcome, System, World
from geo_diloco.sim.goodput.rounds import draw_rounds, slowest_step

KIND_NUMBERS = {"data-parallel": 1, "elastic data-parallel": 2, "decoupled": 3}
"""Part of the seed: two systems never see the same chance, so their differences are not by luck the same."""


def simulate(system: System, world: World) -> Outcome:
    """The same system and world give the same outcome."""
    by_seed = [_one_seed(system, world, seed) for seed in world.seeds]
    return Outcome(
        system=system,
        goodput=fmean(each.goodput for each in by_seed),
        goodput_by_seed=tuple(each.goodput for each in by_seed),
        uptime=fmean(each.uptime for each in by_seed),
        interruptions_per_hour=fmean(each.interruptions_per_hour for each in by_seed),
        participants=fmean(each.participants for each in by_seed),
        in_time=fmean(each.in_time for each in by_seed),
    )


def _one_seed(system: System, world: World, seed: int) -> Outcome:
    random = np.random.default_rng([seed, KIND_NUMBERS[system.kind], system.chips, system.learners])
    group = system.group(world)
    watched = watch(group, world.times, groups=system.learners, seconds=world.days * DAY_S, random=random)
    steps = slowest_step(world, groups=system.learners, slices=group.slices, random=random)
    goodput = float((watched.work / steps).mean())
    rounds = draw_rounds(world, training=watched.training, steps=steps, random=random)
    return Outcome(
        system=system,
        goodput=goodput,
        goodput_by_seed=(goodput,),
        uptime=share_of_time_with(world.quorum if system.kind == "decoupled" else 1, list(watched.training)),
        interruptions_per_hour=float(watched.failures_per_s.sum()) * HOUR_S,
        participants=rounds.participants,
        in_time=rounds.in_time,
    )


def share_of_time_with(least: int, training: Sequence[float]) -> float:
    """At least that many train at once, each its own share of the time and independently of the others (exactly: a
    learner neither waits for another nor fails with it)."""
    number = [1.0]
    for share in training:
        number = [
            (number[i] * (1 - share) if i < len(number) else 0.0) + (number[i - 1] * share if i else 0.0)
            for i in range(len(number) + 1)
        ]
    return math.fsum(number[least:])
