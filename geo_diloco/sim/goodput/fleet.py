"""Machines of one's own under failures, hours and thin lines: what they come to, and what rules suit them.

Every machine is a learner. It trains while it is on and has not failed, after it has fetched Theta; a failure costs it
that again. How rounds go while all are on is timed elsewhere, by the production core (`timing.py`). As machines come
and go that changes with their rates: rounds open at the pace of the median machine that trains (each of P fragments
once in H of its steps) and need the deltas of K, and a machine sends one delta at a time. Nobody waits.

Time is a grid of minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geo_diloco.sim.plans import ShellTimes

Booleans = NDArray[np.bool_]
Floats = NDArray[np.floating[Any]]

MINUTE_S = 60.0
SHELL = ShellTimes(disk=(4, 15), fold=(8, 23), check=(2, 9), merge=(19, 44))
"""The middle eight tenths of what the tape of a real run has: `bench fleet examples/fleets/equal.toml`, fragments of
150,000 elements, two cores of an AMD EPYC of which other programs use most, at a lower priority, on 2026-12-01. With
other programs at the same priority the same cores took twice to three times as long."""
DAY_MINUTES = 24 * 60
STEP_SPREAD = 0.05
CELLS_AT_ONCE = 1 << 20
"""Minutes of machines; each takes some hundred bytes while it is looked at."""
START_S = 15.0
"""A process, its libraries and its way into the run, before it fetches anything."""
THETA_BITS = 32.0
CODEC_BITS = {"none": 32.0, "bf16": 11.0, "int8": 7.5, "int4": 3.7}
"""A parameter's on the line, zstd included, as measured (numerics/README.md)."""


BLOB_S = 0.005
"""An upload takes so much longer than its line needs: read from one disk, verified, and written to the other. Of the
same run as `SHELL`."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    name: str
    step_s: float
    up_mbit: float
    down_mbit: float
    fails_every_s: float
    back_after_s: float
    on_from: float = 0.0
    """Hour of the day; equal to `on_until`: on all day."""
    on_until: float = 0.0
    rtt_s: float = 0.04
    """From it to the syncer and back."""
    held_up: float = 0.0
    """Share of the time in which it is on and takes no step, because others use it."""

    @property
    def pace_s(self) -> float:
        """From one inner step to the next, on average."""
        return self.step_s / (1.0 - self.held_up)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    machines: tuple[Machine, ...]
    params: float
    tokens_per_step: int
    interval_steps: int = 24
    fragments: int = 24
    quorum: int = 1
    codec: str = "int4"
    step_spread: float = STEP_SPREAD
    """An inner step takes its machine's time, give or take that share. Without, equal machines would stand to each
    other all the time as they did when they started, and that alone would decide who is in the merges."""
    shell: ShellTimes = SHELL
    """Beside steps and lines: disks, encoding, checking, merging."""

    def model_up_s(self, machine: Machine, codec: str | None = None) -> float:
        """Every fragment once, on that machine's uplink."""
        return self.params * CODEC_BITS[codec or self.codec] / (machine.up_mbit * 1e6)

    def model_down_s(self, machine: Machine) -> float:
        """An update of every fragment once, on its way down."""
        return self.params * CODEC_BITS[self.codec] / (machine.down_mbit * 1e6)

    def rejoin_s(self, machine: Machine) -> float:
        return START_S + self.params * THETA_BITS / (machine.down_mbit * 1e6)


@dataclass(frozen=True, kw_only=True)
class FleetOutcome:
    """Means over all the time."""

    goodput: float
    """Of the compute of machines that are on, the share that trains."""
    uptime: float
    """Share of the time in which at least one trains."""
    quorum_time: float
    """Share of the time in which at least K train: rounds close."""
    tokens_per_hour: float
    in_merges: float
    """Share of those tokens that is in the merge of its own round; the rest rides with a later one."""
    rounds_per_hour: float
    participants: float
    """In a round, on average."""
    training: float
    """Machines that train, on average."""
    five_percent: int
    """So many or more train in 95 % of the time."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Rounds of a fleet whose machines are all on and train."""

    rounds_per_s: float
    joins: tuple[float, ...]
    """Of each machine: the share of rounds that it is in, be that with late work."""
    fresh: tuple[float, ...]
    """The same, with work on the version before."""
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """The median of each phase of a round (`relived.Phase`); empty where the core was not followed."""

    @property
    def participants(self) -> float:
        """In a round, on average."""
        return sum(self.joins)


def by_rates(fleet: Fleet) -> Timing:
    """What step times and lines allow, if nothing else took any time and nobody was ever late."""
    all_on = np.ones((len(fleet.machines), 1), dtype=np.bool_)
    pace = _pace(fleet, all_on)
    joins = tuple(float(share) for share in _joins(fleet, all_on, pace)[:, 0])
    return Timing(rounds_per_s=float(pace[0]), joins=joins, fresh=joins)


def predict(fleet: Fleet, timing: Timing, *, days: float, seeds: Sequence[int]) -> FleetOutcome:
    """`timing`: how rounds go while all are on (`timing.time_rounds`); how that changes as machines come and go is
    taken from their rates. The same fleet and seeds give the same outcome. All seeds are one long time, cut into as
    many parts."""
    minutes = max(1, round(days * DAY_MINUTES))
    totals = _Totals(number=np.zeros(len(fleet.machines) + 1, dtype=np.int64))
    piece = max(1, CELLS_AT_ONCE // len(fleet.machines))
    for seed in seeds:
        on, training = _minutes(fleet, minutes, seed)
        for begin in range(0, minutes, piece):
            _add(totals, fleet, timing, on[:, begin : begin + piece], training[:, begin : begin + piece])
    return totals.outcome(fleet)


@dataclass
class _Totals:
    """Of minutes that were looked at, a piece at a time: of a thousand machines a month is too much at once."""

    number: NDArray[np.int64]
    """Minutes in which so many train."""
    trained: float = 0.0
    """Steps, and of these: those that machines would take which nobody else uses; and those in their own round."""
    offered: float = 0.0
    in_time: float = 0.0
    pace: float = 0.0
    joined: float = 0.0

    def outcome(self, fleet: Fleet) -> FleetOutcome:
        minutes = int(self.number.sum())
        numbers = np.arange(len(self.number))
        return FleetOutcome(
            goodput=self.trained / self.offered if self.offered else 0.0,
            uptime=float(self.number[1:].sum()) / minutes,
            quorum_time=float(self.number[fleet.quorum :].sum()) / minutes,
            tokens_per_hour=self.trained / minutes * 3600 * fleet.tokens_per_step,
            in_merges=self.in_time / self.trained if self.trained else 0.0,
            rounds_per_hour=self.pace / minutes * 3600,
            participants=self.joined / self.pace if self.pace else 0.0,
            training=float((numbers * self.number).sum()) / minutes,
            five_percent=int(np.searchsorted(np.cumsum(self.number), 0.05 * (minutes - 1), side="right")),
        )


def _add(totals: _Totals, fleet: Fleet, timing: Timing, on: Booleans, training: Booleans) -> None:
    speed = np.array([1.0 / machine.pace_s for machine in fleet.machines])[:, None]
    unhindered = np.array([1.0 / machine.step_s for machine in fleet.machines])[:, None]
    rates, pace = by_rates(fleet), _pace(fleet, training)
    joins = _joins(fleet, training, pace)
    fresh = np.minimum(1.0, joins * _ratio(timing.fresh, rates.fresh)[:, None])
    joins = np.minimum(1.0, joins * _ratio(timing.joins, rates.joins)[:, None])
    pace = pace * _ratio([timing.rounds_per_s], [rates.rounds_per_s])
    totals.number += np.bincount(training.sum(axis=0), minlength=len(totals.number))
    totals.trained += float((training * speed).sum())
    totals.offered += float((on * unhindered).sum())
    totals.in_time += float((fresh * speed).sum())
    totals.pace += float(pace.sum())
    totals.joined += float((joins.sum(axis=0) * pace).sum())


def _ratio(timed: Sequence[float], rates: Sequence[float]) -> Floats:
    """Where rates allow no round at all there is nothing to correct."""
    return np.array([one / other if other else 1.0 for one, other in zip(timed, rates, strict=True)])


def _minutes(fleet: Fleet, minutes: int, seed: int) -> tuple[Booleans, Booleans]:
    """Of each machine and minute: is it on, and does it train."""
    on = np.zeros((len(fleet.machines), minutes), dtype=np.bool_)
    training = on.copy()
    clock = np.arange(minutes)
    hour = clock % DAY_MINUTES / 60.0
    for i, machine in enumerate(fleet.machines):
        random = np.random.default_rng([seed, i])
        on[i] = _is_on(machine, hour)
        here = on[i] & _works(machine, clock * MINUTE_S, random)
        wait = int(np.ceil(fleet.rejoin_s(machine) / MINUTE_S - 0.5))
        begins = np.maximum.accumulate(np.where(here & ~np.append(False, here[:-1]), clock, -1))
        training[i] = here & (clock - begins >= wait)
    return on, training


def _is_on(machine: Machine, hour: Floats) -> Booleans:
    begin, end = machine.on_from, machine.on_until
    if begin == end:
        return np.ones(len(hour), dtype=np.bool_)
    inside = (hour >= begin) & (hour < end) if begin < end else (hour >= begin) | (hour < end)
    return np.asarray(inside, dtype=np.bool_)


def _works(machine: Machine, at_s: Floats, random: np.random.Generator) -> Booleans:
    """Times to failure and to return in turn, both exponential; the first failure is as far away as any."""
    span = float(at_s[-1]) + MINUTE_S
    turns = int(span / (machine.fails_every_s + machine.back_after_s) * 1.5) + 30
    ends: Floats = np.zeros(0)
    while not len(ends) or ends[-1] <= span:
        pairs = random.standard_exponential((turns, 2)) * (machine.fails_every_s, machine.back_after_s)
        ends = np.concatenate([ends, (ends[-1] if len(ends) else 0.0) + np.cumsum(pairs)])
    return np.asarray(np.searchsorted(ends, at_s, side="right") % 2 == 0, dtype=np.bool_)


def _pace(fleet: Fleet, training: Booleans) -> Floats:
    """Rounds per second in each minute: of the schedule, which goes by the median machine (the slower of two), or of
    the K-th fastest uplink, whichever is slower."""
    steps = np.array([machine.pace_s for machine in fleet.machines])[:, None]
    sorted_steps = np.sort(np.where(training, steps, np.inf), axis=0)
    median = np.take_along_axis(sorted_steps, np.minimum(training.sum(axis=0) // 2, len(steps) - 1)[None], axis=0)[0]
    due = fleet.fragments / (fleet.interval_steps * median)
    lines = np.array([fleet.fragments / fleet.model_up_s(machine) for machine in fleet.machines])[:, None]
    enough = training.sum(axis=0) >= fleet.quorum
    fastest = -np.sort(-np.where(training, lines, 0.0), axis=0)
    kth = fastest[min(fleet.quorum, len(fastest)) - 1]
    return np.asarray(np.where(enough, np.minimum(due, kth), 0.0), dtype=np.float64)


def _joins(fleet: Fleet, training: Booleans, pace: Floats) -> Floats:
    """Of each machine and minute: the share of rounds whose merge it is in. Its line takes a delta at a time, and there
    is one for each fragment and step of its own."""
    lines = np.array([fleet.fragments / fleet.model_up_s(machine) for machine in fleet.machines])[:, None]
    steps = np.array([fleet.fragments / machine.pace_s for machine in fleet.machines])[:, None]
    share = np.minimum(1.0, np.minimum(lines, steps) / np.where(pace > 0, pace, np.inf))
    share = np.where(pace > 0, share, 0.0)
    return np.asarray(training * share, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A rule, what is suggested for it, and why."""

    rule: str
    value: str
    reason: str


INTERVALS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LINE_SHARE = 0.5
"""Of its uplink that a machine should need for its deltas; the rest is for whoever else uses the line."""
MOST = 0.9
"""Of the fleet's compute that should have a line good enough."""


def advise(fleet: Fleet, outcome: FleetOutcome) -> list[Advice]:
    """K, H and codec for these machines."""
    median = float(np.median([machine.pace_s for machine in fleet.machines]))
    slowest = _line_of_most(fleet)
    needs = {codec: fleet.model_up_s(slowest, codec) for codec in ("bf16", "int8", "int4")}
    codec = next((c for c, need in needs.items() if need <= LINE_SHARE * fleet.interval_steps * median), "int4")
    wanted = needs[codec] / (LINE_SHARE * median)
    interval = next((h for h in INTERVALS if h >= wanted), INTERVALS[-1])
    beyond = f"; even {INTERVALS[-1]} is not enough for it" if wanted > INTERVALS[-1] else ""
    quorum = max(1, min(outcome.five_percent, round(outcome.training / 2)))
    return [
        Advice(
            rule="K",
            value=str(quorum),
            reason=f"{outcome.training:.1f} train on average, and in 95 % of the time at least {outcome.five_percent}; "
            "grace brings in more where it costs nobody a step",
        ),
        Advice(
            rule="H",
            value=str(interval),
            reason=f"the line of {slowest.name} ({slowest.up_mbit:g} Mbit/s up; machines with {MOST:.0%} of the "
            f"compute have no thinner one) takes {needs[codec]:.0f} s for all fragments in {codec}; half used, that is "
            f"{wanted:.0f} steps of {median:g} s{beyond}",
        ),
        Advice(
            rule="codec",
            value=codec,
            reason=f"all fragments of {slowest.name} take "
            + ", ".join(f"{need:.0f} s in {name}" for name, need in needs.items())
            + f"; H = {fleet.interval_steps} steps take {fleet.interval_steps * median:.0f} s",
        ),
    ]


def _line_of_most(fleet: Fleet) -> Machine:
    """The thinnest uplink among the best that together have `MOST` of the compute."""
    wanted = MOST * sum(1 / machine.step_s for machine in fleet.machines)
    have = 0.0
    chosen = fleet.machines[0]
    for machine in sorted(fleet.machines, key=lambda each: (-each.up_mbit, each.name)):
        if have >= wanted * (1 - 1e-9):
            break
        chosen, have = machine, have + 1 / machine.step_s
    return chosen


def with_machines(fleet: Fleet, more: Sequence[Machine]) -> Fleet:
    return replace(fleet, machines=fleet.machines + tuple(more))
