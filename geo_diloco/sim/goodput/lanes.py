"""Groups under failures, many at a time: the event simulation itself, over arrays.

A group's memory is short beside a month (a slice is back after minutes), so a month is cut into *lanes* that run side
by side, each with a time before it that is simulated and not counted. A lane's whole state is a clock and the number
of slices that are away: failures and returns are exponential, so what is still to come depends on nothing else.

    train --(failure)--> stop for the downscale --> train without the slice
    train --(a slice is back)--> stop for the upscale --> train with it

A stop takes in every slice that comes back before it is over, so at high rates one stop serves several. A group that is
not elastic stands still until the slice is back, and starts again. While a group stands still none of its chips fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from geo_diloco.sim.goodput.model import Group, Times

Floats = NDArray[np.float64]

LANES_MAX = 512
"""Of a group and seed."""
WARM_UP = 6.0
"""Counted in mean times of what a group remembers: its returns and its stops."""
LANE_TO_WARM_UP = 20.0
"""A lane is this much longer than the time before it that is not counted."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One row for each group, means over its lanes."""

    work: Floats
    """Share of what all its slices would do in all the time."""
    training: Floats
    """Share of the time in which it trains."""
    failures_per_s: Floats
    """Of its slices, per second of all the time."""


def watch(group: Group, times: Times, *, groups: int, seconds: float, random: np.random.Generator) -> Watched:
    """`groups` of a kind, independent of each other, for `seconds` each."""
    lanes, warm_up = _cut(times, seconds)
    counted = seconds / lanes
    state = _Lanes(lanes=groups * lanes, begin=warm_up, end=warm_up + counted)
    advance = _elastic_event if group.elastic else _rigid_event
    while not state.is_over():
        advance(state, group, times, random)

    def share(amounts: Floats) -> Floats:
        return np.asarray(amounts.reshape(groups, lanes).mean(axis=1) / counted, dtype=np.float64)

    return Watched(work=share(state.work), training=share(state.training), failures_per_s=share(state.failures))


def events_of_a_lane(group: Group, times: Times, *, seconds: float) -> float:
    """Failures and returns that have to be followed one after another, at most about that many."""
    lanes, warm_up = _cut(times, seconds)
    return 2 * (warm_up + seconds / lanes) / (1.0 / group.rate + times.downscale_s)


def _cut(times: Times, seconds: float) -> tuple[int, float]:
    """How many lanes, and the time before each that does not count."""
    warm_up = WARM_UP * (times.return_s + times.downscale_s + times.upscale_s)
    lanes = min(LANES_MAX, max(1.0, seconds / (LANE_TO_WARM_UP * warm_up))) if warm_up else LANES_MAX
    return int(lanes), warm_up


class _Lanes:
    """Clocks and sums of all lanes."""

    def __init__(self, *, lanes: int, begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        self.clock = np.zeros(lanes)
        self.away = np.zeros(lanes, dtype=np.int64)
        self.work = np.zeros(lanes)
        self.training = np.zeros(lanes)
        self.failures = np.zeros(lanes)

    def is_over(self) -> bool:
        return bool(self.clock.min() >= self.end)

    def train(self, duration: Floats, share: Floats) -> None:
        """Go on for that long with that share of the slices; what lies in the counted time counts."""
        until = np.minimum(self.clock + duration, self.end)
        counted = np.maximum(until - np.maximum(self.clock, self.begin), 0.0)
        self.training += np.where(share > 0, counted, 0.0)
        self.work += counted * share
        self.clock += duration

    def fail(self, failed: NDArray[np.bool_], duration: Floats, share: Floats, lost_s: float) -> None:
        """Count a failure; what was done in the last `lost_s` is done again (at most what was done since the last)."""
        counts = failed & (self.clock >= self.begin) & (self.clock < self.end)
        self.failures += counts
        if lost_s:
            self.work -= np.where(counts, np.minimum(duration, lost_s) * share, 0.0)


def _elastic_event(state: _Lanes, group: Group, times: Times, random: np.random.Generator) -> None:
    """Each lane's next failure or return, and the stop that it causes."""
    lanes = len(state.clock)
    present = group.slices - state.away
    fail_rate = present * group.slice_rate
    return_rate = state.away / times.return_s if times.return_s else np.zeros(lanes)
    rate = fail_rate + return_rate
    duration = random.standard_exponential(lanes) / rate
    share = present / group.slices
    state.train(duration, share)
    failed = random.random(lanes) * rate < fail_rate
    state.fail(failed, duration, share, times.lost_s)
    stop = np.where(failed, times.downscale_s, times.upscale_s)
    state.away += np.where(failed, 1, -1)
    state.away -= random.binomial(state.away, _back_by(stop, times.return_s))
    state.clock += stop


def _back_by(stop: Floats, return_s: float) -> Floats:
    """Probability that a slice which is away comes back within a stop."""
    return np.ones_like(stop) if not return_s else -np.expm1(-stop / return_s)


def _rigid_event(state: _Lanes, group: Group, times: Times, random: np.random.Generator) -> None:
    """Each lane's next failure, and the wait until the slice is back and everybody has started again."""
    lanes = len(state.clock)
    duration = random.standard_exponential(lanes) / group.rate
    whole = np.ones(lanes)
    state.train(duration, whole)
    state.fail(np.ones(lanes, dtype=np.bool_), duration, whole, times.lost_s)
    state.clock += times.return_s * random.standard_exponential(lanes) + times.upscale_s
