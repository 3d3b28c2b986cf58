"""What happens in a cluster, as data: the run's rules, the learners' speeds, and the faults, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from geo_diloco.manifest import EvalSpec, StopSpec, SyncSpec

FOR_GOOD_MS = 10**9
FaultKind = Literal["crash", "freeze", "cut", "leave", "crash_syncer"]


KINDS: tuple[FaultKind, ...] = ("crash", "crash", "freeze", "cut", "leave")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that befalls one learner (or the syncer) for a while."""

    kind: FaultKind
    at_ms: int
    for_ms: int
    learner: int = 0


@dataclass(frozen=True, kw_only=True)
class Odds:
    """Chances of small mishaps, in [0, 1], while faults are on."""

    update_lost: float = 0.0
    apply_failed: float = 0.0
    upload_failed: float = 0.0
    bad_frame: float = 0.0
    merge_failed: float = 0.0
    twice: float = 0.0
    """A message is given to the core twice."""
    shrink: float = 0.0
    """An adoption scales the carry by less than one; stays on when faults are over."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about one simulated run. The same plan gives the same run."""

    seed: int = 0
    sync: SyncSpec = field(default_factory=SyncSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    evaluation: EvalSpec = field(default_factory=lambda: EvalSpec(every_seconds=5.0))
    num_elements: tuple[int, ...] = (100, 300)
    step_ms: tuple[int, ...] = (100, 100)
    """One learner each: how long an inner step takes."""
    tokens_per_step: int = 24
    """What the manifest says; 1 makes the plausibility limits bite."""
    num_followers: int = 1
    save_every_ms: int = 4_000
    delay_ms: tuple[int, int] = (1, 40)
    """One way, of a control message."""
    transfer_ms: tuple[int, int] = (5, 300)
    """Of a blob."""
    faults: tuple[Fault, ...] = ()
    odds: Odds = field(default_factory=Odds)
    faults_until_ms: int = 0
    """Small mishaps end then, as do the faults above."""
    forgets_uploads: bool = False
    """Whether an upload whose blob is forgotten ends without a word."""
    has_liar: bool = False


def quiet_plan(seed: int, **changes: object) -> Plan:
    """No faults: three learners of different speeds."""
    chance = random.Random(seed)
    num_fragments = chance.choice((1, 2, 4))
    sync = SyncSpec(
        interval_steps=chance.choice((4, 8, 12)),
        num_fragments=num_fragments,
        overlap_steps=chance.choice((0, 1, 2)),
        quorum=chance.choice((1, 1, 2, 3)),
        grace=chance.random() < 0.8,
        kappa=chance.choice((1.0, 1.0, 0.0)),
        rounds_in_flight_max=chance.choice((1, 2, 8)),
        staleness_max=chance.choice((1, 3, 8)),
    )
    plan = Plan(
        seed=seed,
        sync=sync,
        stop=StopSpec(minutes=0.6),
        num_elements=tuple(chance.choice((64, 100, 256)) for _ in range(num_fragments)),
        step_ms=tuple(chance.choice((60, 100, 150, 400)) for _ in range(chance.choice((3, 4)))),
        num_followers=chance.choice((0, 1)),
        transfer_ms=chance.choice(((5, 100), (5, 600), (300, 2_500))),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def stormy_plan(seed: int, **changes: object) -> Plan:
    """Everything that can go wrong, for a while; then the run must recover and come to its end."""
    chance = random.Random(f"storm {seed}")
    plan = quiet_plan(seed)
    faults = []
    for learner in range(len(plan.step_ms)):
        for _ in range(chance.choice((0, 1, 1, 2))):
            kind: FaultKind = chance.choice(KINDS)
            at_ms = chance.randrange(1_000, 22_000)
            longest_ms = 20_000 if kind == "freeze" and chance.random() < 0.3 else 7_000
            for_ms = chance.randrange(longest_ms // 70, longest_ms)
            faults.append(Fault(kind=kind, at_ms=at_ms, for_ms=for_ms, learner=learner))
    for _ in range(chance.choice((0, 0, 1, 2))):
        faults.append(Fault(kind="crash_syncer", at_ms=chance.randrange(1_000, 25_000), for_ms=chance.randrange(5_000)))
    odds = Odds(
        update_lost=chance.choice((0.0, 0.05)),
        apply_failed=chance.choice((0.0, 0.02)),
        upload_failed=chance.choice((0.0, 0.1)),
        bad_frame=chance.choice((0.0, 0.1)),
        merge_failed=chance.choice((0.0, 0.1)),
        twice=chance.choice((0.0, 0.1)),
        shrink=chance.choice((0.0, 0.0, 0.2)),
    )
    plan = replace(
        plan,
        stop=StopSpec(minutes=1.2),
        save_every_ms=chance.choice((1_500, 4_000, 9_000)),
        faults=tuple(faults),
        odds=odds,
        faults_until_ms=max([32_000, *(fault.at_ms + fault.for_ms + 3_000 for fault in faults)]),
        forgets_uploads=chance.random() < 0.5,
        has_liar=chance.random() < 0.3,
        tokens_per_step=chance.choice((24, 24, 1)),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def loss_plan(seed: int = 0) -> Plan:
    """One of three learners dies and never comes back; K = 2."""
    sync = SyncSpec(interval_steps=8, num_fragments=2, overlap_steps=2, quorum=2)
    return Plan(
        seed=seed,
        sync=sync,
        stop=StopSpec(minutes=0.6),
        step_ms=(100, 120, 150),
        faults=(Fault(kind="crash", at_ms=5_000, for_ms=FOR_GOOD_MS, learner=1),),
        faults_until_ms=5_001,
    )


def lockstep_plan(*, num_fragments: int, overlap_steps: int, num_learners: int = 3, rounds: int = 10) -> Plan:
    """K = M, exact order: a run that is a function of its rules alone."""
    sync = SyncSpec(
        interval_steps=8,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        quorum=num_learners,
        lockstep=True,
        kappa=0.0,
        merge="mean",
    )
    return Plan(
        seed=num_fragments * 10 + overlap_steps,
        sync=sync,
        stop=StopSpec(commits=rounds * num_fragments),
        num_elements=tuple(100 + p for p in range(num_fragments)),
        step_ms=(30, 70, 110)[:num_learners],
        save_every_ms=0,
    )
