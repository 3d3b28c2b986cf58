"""A fault plan for trainings: the failures of many chips, drawn by the goodput simulator's rates, in a run's time.

All times are divided by one number, so the shares of time that are lost stay what they are on the chips: rates, stops
and returns, all of them. Faults come at a constant rate in all the time, and a group of chips that stands still misses
those that fall into its stop (`sim/outages.py`): so one plan makes each way to train fail as often as it would by
itself.
"""

from __future__ import annotations

import numpy as np

from geo_diloco.config import Fault, FaultPlan
from geo_diloco.sim.goodput.model import System, World
from geo_diloco.sim.outages import Group

_NUMBER = 4
"""Part of the seed, beside those of the systems (`systems.KIND_NUMBERS`)."""


def draw_plan(system: System, world: World, *, seconds: float, scale: float) -> FaultPlan:
    """What befalls the learners of `system` in `seconds` of a run, after which the plan begins anew. The first of
    `world.seeds` counts."""
    random = np.random.default_rng([world.seeds[0], _NUMBER, system.chips, system.learners])
    group = system.group(world)
    times = world.times
    faults: list[Fault] = []
    for learner in range(1, system.learners + 1):
        number = random.poisson(group.rate * scale * seconds)
        begins = np.sort(random.random(number) * seconds)
        slices = random.integers(1, group.slices + 1, size=number)
        absences = np.maximum(times.return_s * random.standard_exponential(number) / scale, 0.002)
        faults += [
            Fault(learner=learner, kind="slice", slice=int(part), from_s=begin, until_s=round(begin + absence, 3))
            for begin, part, absence in zip(_milliseconds(begins), slices, absences, strict=True)
        ]
    return FaultPlan(
        faults=tuple(sorted(faults, key=lambda fault: fault.from_s)),
        slices=group.slices,
        downscale_s=round(times.downscale_s / scale, 6),
        upscale_s=round(times.upscale_s / scale, 6),
        repeat_s=seconds,
    )


def _milliseconds(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    """Rounded down: a fault begins before its plan is over."""
    return [float(each) for each in np.floor(times * 1000) / 1000]


def goodput_by_plan(plan: FaultPlan, learners: int, *, seconds: float) -> dict[str, float]:
    """What each way to train comes to in `seconds` of this very plan: shares of time in which it does not stand
    still."""
    everybody = range(learners)
    alone = [_share(Group(plan, {learner}, elastic=True), seconds) for learner in everybody]
    return {
        "data-parallel": _share(Group(plan, everybody, elastic=False), seconds),
        "elastic data-parallel": _share(Group(plan, everybody, elastic=True), seconds),
        "decoupled": sum(alone) / learners,
    }


def _share(group: Group, seconds: float) -> float:
    until = round(1000 * seconds)
    lost = sum((until if end is None else min(end, until)) - begin for begin, end in group.stops(until))
    return 1.0 - lost / until
