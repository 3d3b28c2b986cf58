"""Runs that only the founder serves, drawn from a seed: rules, learners of different speeds, and faults.

Who may be syncer otherwise is the business of `geo_diloco.sim.drawn`; here the founder is the only elector, so that
what is between a syncer and its learners is tested, in short runs. The one exception is `fickle_plan`.
"""

from __future__ import annotations

import random
from dataclasses import replace

from geo_diloco.manifest import ElectionSpec, StopSpec, SyncSpec
from geo_diloco.sim.plans import FOR_GOOD_MS, FOUNDER, Fault, FaultKind, HostPlan, Odds, Plan, learners

FOUNDER_ALONE = ElectionSpec(electors=1, lease_seconds=3.0)
KINDS: tuple[FaultKind, ...] = ("crash", "crash", "freeze", "cut", "leave")


def hosts(*step_ms: int, num_followers: int = 1) -> tuple[HostPlan, ...]:
    """The founder, one learner each, and peers that only follow."""
    return (FOUNDER, *learners(*step_ms), *(HostPlan() for _ in range(num_followers)))


def quiet_plan(seed: int, **changes: object) -> Plan:
    """No faults: three learners or four of different speeds."""
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
    num_elements = tuple(chance.choice((64, 100, 256)) for _ in range(num_fragments))
    step_ms = tuple(chance.choice((60, 100, 150, 400)) for _ in range(chance.choice((3, 4))))
    plan = Plan(
        seed=seed,
        hosts=hosts(*step_ms, num_followers=chance.choice((0, 1))),
        sync=sync,
        stop=StopSpec(minutes=0.6),
        election=FOUNDER_ALONE,
        num_elements=num_elements,
        transfer_ms=chance.choice(((5, 100), (5, 600), (300, 2_500))),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def stormy_plan(seed: int, **changes: object) -> Plan:
    """Everything that can go wrong, for a while; then the run must recover and come to its end."""
    chance = random.Random(f"storm {seed}")
    plan = quiet_plan(seed)
    faults = []
    for learner in plan.learners:
        for _ in range(chance.choice((0, 1, 1, 2))):
            kind: FaultKind = chance.choice(KINDS)
            at_ms = chance.randrange(1_000, 22_000)
            longest_ms = 20_000 if kind == "freeze" and chance.random() < 0.3 else 7_000
            for_ms = chance.randrange(longest_ms // 70, longest_ms)
            faults.append(Fault(kind=kind, at_ms=at_ms, for_ms=for_ms, host=learner))
    for _ in range(chance.choice((0, 0, 1, 2))):
        at_ms, for_ms = chance.randrange(1_000, 25_000), chance.randrange(5_000)
        faults.append(Fault(kind="crash", at_ms=at_ms, for_ms=for_ms, host=0))
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
        snapshot_every_ms=chance.choice((2_000, 5_000)),
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
        hosts=hosts(100, 120, 150),
        sync=sync,
        stop=StopSpec(minutes=1.0),
        election=FOUNDER_ALONE,
        faults=(Fault(kind="crash", at_ms=5_000, for_ms=FOR_GOOD_MS, host=2),),
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
        hosts=hosts(*(30, 70, 110)[:num_learners]),
        sync=sync,
        stop=StopSpec(commits=rounds * num_fragments),
        election=FOUNDER_ALONE,
        num_elements=tuple(100 + p for p in range(num_fragments)),
        save_every_ms=0,
    )


def fickle_plan(seed: int) -> Plan:
    """Syncers are cut off with commits that nobody has, and soon serve again: many fragments, so that few commits come
    between."""
    chance = random.Random(f"fickle {seed}")
    faults = []
    for at_ms in range(15_000, 100_000, 14_000):
        cut_at = at_ms + chance.randrange(1_500)
        faults.append(Fault(kind="cut", at_ms=cut_at, for_ms=7_000))
        faults.append(Fault(kind="hand over", at_ms=cut_at + chance.randrange(7_500, 9_500), for_ms=0))
    standby = HostPlan(serves=True, elects=True)
    return Plan(
        seed=seed,
        hosts=(FOUNDER, standby, standby, *learners(300, 400)),
        sync=SyncSpec(interval_steps=12, num_fragments=6, overlap_steps=2, quorum=1, kappa=1.0),
        stop=StopSpec(minutes=2.2),
        election=ElectionSpec(electors=3, lease_seconds=3.0),
        num_elements=(100,) * 6,
        delay_ms=(100, 250),
        transfer_ms=(5, 100),
        faults=tuple(faults),
        faults_until_ms=112_000,
    )
