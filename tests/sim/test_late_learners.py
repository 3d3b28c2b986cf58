"""Learners that come while a run goes on, as real ones do: a snapshot first, which takes its time, then rounds."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from geo_diloco.config import Fault, FaultPlan
from geo_diloco.manifest import CodecSpec, StopSpec
from geo_diloco.protocol.messages import Commit
from geo_diloco.sim.train.arms import Arm, ArmKind
from geo_diloco.sim.train.comparing import run_arm
from geo_diloco.sim.train.run import RunOutcome, Simulation

from .runs import TOKENS_PER_STEP, fleet, small_manifest

STEPS = 90
JOIN_AT = 30 * TOKENS_PER_STEP


def went(simulation: Simulation) -> tuple[RunOutcome, list[Commit]]:
    outcome = simulation.go()
    assert outcome.tokens.balances
    return outcome, [link.entry for link in outcome.syncer.chain if isinstance(link.entry, Commit)]


def first_step_at(simulation: Simulation, index: int) -> int:
    """When the core of a learner that came later heard of its first inner step."""
    records = simulation.world.tapes[simulation.members[index].peer][0].events
    return next(record.at for record in records if type(record.event).__name__ == "StepDone")


def test_a_learner_that_comes_later_takes_part_from_then_on() -> None:
    late = fleet(100, 100, 100, joins=(JOIN_AT,))
    simulation = Simulation(small_manifest(tokens=STEPS * TOKENS_PER_STEP, interval_steps=4), late, 3, num_points=4)
    assert len(simulation.members) == 2
    outcome, commits = went(simulation)
    newcomer = simulation.members[2]
    parts = [any(each.peer == newcomer.peer for each in commit.participants) for commit in commits]
    assert not any(parts[:4]) and mean(parts[-6:]) > 0.6
    assert newcomer.num_steps == pytest.approx(20, abs=4), "a third of the tokens that were left"
    assert outcome.tokens.trained == STEPS * TOKENS_PER_STEP
    assert simulation.members[0].num_steps > 30


def test_its_snapshot_takes_its_time_on_the_link() -> None:
    manifest = small_manifest(tokens=STEPS * TOKENS_PER_STEP, interval_steps=4)
    began = []
    for mbit in (100.0, 0.4):
        simulation = Simulation(manifest, fleet(100, 100, 100, joins=(JOIN_AT,), down_mbit=mbit), 3, num_points=1)
        went(simulation)
        began.append(first_step_at(simulation, 2))
    snapshot_bytes = 4 * sum(simulation.world.layout.num_elements)
    assert began[1] - began[0] == pytest.approx(8 * snapshot_bytes / 400, abs=400)


def test_who_comes_late_may_crash_and_come_back_or_have_been_meant_by_a_fault_before() -> None:
    faults = (
        Fault(learner=3, kind="freeze", from_s=0.2, until_s=0.4),
        Fault(learner=3, kind="cut", from_s=0.2, until_s=0.5),
        Fault(learner=3, kind="crash", from_s=0.2, until_s=0.4),
        Fault(learner=3, kind="crash", from_s=4.0, until_s=4.5),
    )
    late = fleet(100, 100, 100, joins=(JOIN_AT,), faults=faults)
    simulation = Simulation(small_manifest(tokens=2 * STEPS * TOKENS_PER_STEP, interval_steps=4), late, 3, num_points=1)
    went(simulation)
    assert len(simulation.world.tapes[simulation.members[2].peer]) == 2
    assert simulation.members[2].num_steps > 10


@pytest.mark.parametrize("kind", ["diloco", "data-parallel", "elastic-data-parallel"])
def test_baselines_take_it_in_too(kind: ArmKind) -> None:
    manifest = small_manifest(tokens=STEPS * TOKENS_PER_STEP, interval_steps=5)
    arm = Arm(text=kind, kind=kind, manifest=manifest)
    late = run_arm(arm, fleet(100, 100, 100, joins=(JOIN_AT,)), 3)
    assert late.tokens_trained == STEPS * TOKENS_PER_STEP
    assert 2.0 < late.participants_mean < 3.0
    assert late.heldout < late.curve[0][2] - 0.2  # type: ignore[operator]


# ---- seconds, stops


def test_seconds_end_a_run_whatever_was_trained() -> None:
    manifest = replace(small_manifest(tokens=1, interval_steps=4), stop=StopSpec(minutes=6 / 60))
    outcome, _ = went(Simulation(manifest, fleet(100, 200), 3, num_points=4))
    assert outcome.tokens.trained / TOKENS_PER_STEP == pytest.approx(60 + 30, abs=4)
    assert [point.virtual_ms for point in outcome.curve[:4]] == pytest.approx([0, 1500, 3000, 4500], abs=210)
    assert 5_800 <= outcome.curve[-1].virtual_ms <= 7_000
    assert outcome.curve[-1].heldout < outcome.curve[0].heldout - 0.2  # type: ignore[operator]


def test_seconds_end_a_run_in_which_nobody_is_left() -> None:
    manifest = replace(small_manifest(tokens=1), stop=StopSpec(minutes=0.5))
    gone = fleet(100, faults=(Fault(learner=1, kind="crash", from_s=2.0),))
    outcome, _ = went(Simulation(manifest, gone, 3, num_points=2))
    assert outcome.tokens.trained / TOKENS_PER_STEP == pytest.approx(20, abs=3)


def test_a_freeze_costs_its_whole_length_however_short() -> None:
    """Ten of a quarter of a step each: two and a half steps less."""
    manifest = replace(small_manifest(tokens=1), stop=StopSpec(minutes=20 / 60))
    short = tuple(Fault(learner=1, kind="freeze", from_s=1.5 * i + 1, until_s=1.5 * i + 1.25) for i in range(12))
    calm, frozen = (Simulation(manifest, fleet(1000, faults=faults), 3, num_points=1) for faults in ((), short))
    went(calm)
    went(frozen)
    assert calm.members[0].num_steps - frozen.members[0].num_steps in (2, 3, 4)


def test_a_learner_of_slices_stands_still_while_it_is_reshaped() -> None:
    slices = tuple(
        Fault(learner=1, kind="slice", slice=i + 1, from_s=2.0 * i + 1, until_s=2.0 * i + 2.0) for i in range(5)
    )
    plan = FaultPlan(faults=slices, slices=50, downscale_s=0.5, upscale_s=0.5, repeat_s=10.0)
    manifest = replace(small_manifest(tokens=1, interval_steps=4), stop=StopSpec(minutes=20 / 60))
    simulation = Simulation(manifest, fleet(100, 100, plan=plan), 3, num_points=1)
    outcome, _ = went(simulation)
    hit, other = (member.num_steps for member in simulation.members)
    assert other == pytest.approx(200, abs=5)
    assert hit == pytest.approx(100, abs=8), "half of its time, in both turns of the plan"
    assert outcome.tokens.merged > 0.5 * outcome.tokens.trained


def test_reasons_to_stand_still_add_up() -> None:
    """A stop that ends while its learner is frozen besides does not thaw it."""
    faults = (
        Fault(learner=1, kind="freeze", from_s=2.0, until_s=12.0),
        Fault(learner=1, kind="slice", slice=1, from_s=3.0, until_s=3.5),
    )
    plan = FaultPlan(faults=faults, slices=9, downscale_s=1.0, upscale_s=1.0)
    manifest = replace(small_manifest(tokens=1), stop=StopSpec(minutes=15 / 60), codec_up=CodecSpec(name="none"))
    simulation = Simulation(manifest, fleet(100, 100, plan=plan), 3, num_points=1)
    went(simulation)
    assert simulation.members[0].num_steps == pytest.approx(50, abs=4)
