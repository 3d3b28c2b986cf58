"""What `bench star` is to measure, and the run's rules that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from geo_diloco.config.quantities import bytes_per_s
from geo_diloco.errors import ConfigError
from geo_diloco.manifest import CodecSpec, DataSpec, ElectionSpec, EvalSpec, ModelSpec, RunManifest, StopSpec, SyncSpec
from geo_diloco.runtime.bulk import CONTROLS

NUM_TENSORS = 48
"""Packed whole into fragments: 2, 4, 8, 12, 16, 24 or 48 of them are of one size."""
ROW = 256
ROOM, ROUND_TRIPS = 1.5, 3
"""Where no interval is given, a link has so many times as long for a fragment as its bytes need, and so many round
trips: an upload is announced, begun and confirmed before the next one begins."""
ROOM_OF_SLOW = 1.2
"""At least that much has the slow one: whoever can't take every update as it comes is soon too far behind to hand in
anything, whatever becomes of its uploads."""
_BYTES_PER_PARAM = 0.47
"""Of int4 with blocks of 64, to find an interval."""
_FACTORY = "geo_diloco.cli.bench_star_learner:noise"
_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where one learner is: how fast it steps, and its link."""

    pace_ms: int
    spread: float = 0.0
    """Share of it that a step may be longer or shorter."""
    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float


@dataclass(frozen=True, kw_only=True)
class RigPlan:
    """Who takes part in what, and for how long."""

    run: RunManifest
    sites: tuple[Site, ...]
    """Of the learners, which are counted from 1."""
    warm_up_s: float
    """All are at work for so long before it counts."""
    seconds: float
    """What counts."""
    mirrors: int = 0
    congestion: str = "auto"


@dataclass(frozen=True, kw_only=True)
class StarPlan:
    """What is measured."""

    learners: int
    parameters: int
    bytes_per_s: float
    """Of a learner's link, each way."""
    round_trip_s: float
    pace_ms: int
    quorum: int
    fragments: int
    interval: int
    """0: as much as the links need, with some room."""
    slow_one: float
    """The last learner's link is so many times slower; 1: like the others'."""
    mirrors: int
    choices: bool
    """Learners may choose their codec."""
    congestion: str
    warm_up_s: float
    seconds: float

    def link_bytes_per_s(self, number: int) -> float:
        """Of learner `number`, counted from 1."""
        return self.bytes_per_s / (self.slow_one if number == self.learners else 1.0)

    @property
    def sites(self) -> tuple[Site, ...]:
        rates = [self.link_bytes_per_s(number) for number in range(1, self.learners + 1)]
        return tuple(
            Site(pace_ms=self.pace_ms, up_bytes_per_s=rate, down_bytes_per_s=rate, round_trip_s=self.round_trip_s)
            for rate in rates
        )

    @property
    def interval_steps(self) -> int:
        if self.interval:
            return self.interval
        bytes_ms = 1000 * self.parameters * _BYTES_PER_PARAM / (self.fragments * self.bytes_per_s)
        wanted_ms = max(ROOM, ROOM_OF_SLOW * self.slow_one) * bytes_ms + ROUND_TRIPS * 1000 * self.round_trip_s
        return max(1, math.ceil(wanted_ms / self.pace_ms)) * self.fragments


def num_rows_for(num_parameters: int) -> int:
    return max(1, round(num_parameters / (NUM_TENSORS * ROW)))


def parameters_from(text: str) -> int:
    """Of `30.8M` or `200k`. Raises ConfigError."""
    factor = _FACTORS.get(text[-1:], 1)
    try:
        number = float(text.removesuffix(text[-1:]) if factor > 1 else text) * factor
    except ValueError:
        number = 0.0
    if not NUM_TENSORS * ROW <= number <= 1e9:
        raise ConfigError(f"--parameters {text[:40]!r}: wanted a number from {NUM_TENSORS * ROW} to 1G, such as 30.8M")
    return round(number)


def link_from(rate: str, round_trip: str) -> tuple[float, float]:
    """(bytes per second, seconds) of `50mbit` and `80ms`. Raises ConfigError."""
    try:
        per_s = bytes_per_s(rate)
        if not per_s:
            raise ValueError("a rate is wanted, such as 50mbit")
    except ValueError as exc:
        raise ConfigError(f"--rate: {exc}") from exc
    try:
        wait_ms = float(round_trip.removesuffix("ms")) if round_trip.endswith("ms") else -1.0
    except ValueError:
        wait_ms = -1.0
    if not 0.0 <= wait_ms <= 10_000.0:
        raise ConfigError(f"--rtt {round_trip[:40]!r}: wanted milliseconds up to 10000ms, such as 80ms")
    return per_s, wait_ms / 1000


def rig_plan(plan: StarPlan) -> RigPlan:
    """Raises ConfigError."""
    return RigPlan(
        run=star_run(plan),
        sites=plan.sites,
        warm_up_s=plan.warm_up_s,
        seconds=plan.seconds,
        mirrors=plan.mirrors,
        congestion=plan.congestion,
    )


def check_fragments(number: int, named: str) -> None:
    """Raises ConfigError."""
    if NUM_TENSORS % number:
        fit = ", ".join(str(n) for n in range(1, NUM_TENSORS + 1) if NUM_TENSORS % n == 0)
        raise ConfigError(f"{named} {number}: wanted fragments of one size: {fit}")


def star_run(plan: StarPlan) -> RunManifest:
    """Raises ConfigError."""
    check_fragments(plan.fragments, "--fragments")
    if plan.slow_one > 1.0 and plan.learners < 2:
        raise ConfigError("--slow-one: wanted two learners or more, of which one is slow")
    if plan.congestion not in CONTROLS:
        raise ConfigError(f"--congestion {plan.congestion!r}; allowed are {', '.join(CONTROLS)}")
    return paced_run(
        "star",
        plan.parameters,
        SyncSpec(interval_steps=plan.interval_steps, num_fragments=plan.fragments, quorum=plan.quorum),
        num_learners=plan.learners,
        codec_up_choices=(CodecSpec(name="int8"), CodecSpec(name="int4", block=256)) if plan.choices else (),
    )


def paced_run(
    name: str,
    num_parameters: int,
    sync: SyncSpec,
    *,
    num_learners: int,
    codec: CodecSpec | None = None,
    codec_up_choices: tuple[CodecSpec, ...] = (),
) -> RunManifest:
    """The rules of a run whose compute is simulated: the defaults, but for what is given. All that train may be
    electors, as they would be on machines of their own. `codec`: of both legs."""
    return RunManifest(
        name=name,
        model=ModelSpec(factory=_FACTORY, factory_arguments={"num_parameters": num_parameters}),
        data=DataSpec(num_shares=num_learners),
        sync=sync,
        codec_up=codec or CodecSpec(),
        codec_down=codec or CodecSpec(),
        codec_up_choices=codec_up_choices,
        stop=StopSpec(minutes=600.0),
        evaluation=EvalSpec(every_seconds=0.0),
        election=ElectionSpec(one_machine=True),
    )
