"""Whole runs that only the founder serves: learners of different speeds and a follower, with every checker watching.

What is asserted at every event is in `geo_diloco/sim/checkers.py` and, at the end, in `geo_diloco/sim/run.py`.
`-m slow` runs hundreds of seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.manifest import StopSpec
from geo_diloco.protocol import crediting
from geo_diloco.protocol.effects import Adopt, Effect, TakeSample, TokensDropped
from geo_diloco.protocol.events import Adopted, Event, SampleTaken
from geo_diloco.protocol.messages import Commit
from geo_diloco.protocol.schedule import first_due_steps
from geo_diloco.sim.plans import Plan
from geo_diloco.sim.process import Process
from geo_diloco.sim.run import Run, simulate
from geo_diloco.sim.world import Watch
from tests.support.plans import hosts, lockstep_plan, loss_plan, quiet_plan, stormy_plan


@pytest.mark.parametrize("seed", range(4))
def test_a_run_without_faults_keeps_every_invariant_and_ends_by_itself(seed: int) -> None:
    outcome = simulate(quiet_plan(seed))
    assert outcome.num_commits >= 5


@pytest.mark.parametrize("seed", range(5))
def test_a_run_recovers_from_everything_that_goes_wrong(seed: int) -> None:
    outcome = simulate(stormy_plan(seed))
    assert outcome.num_commits >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_no_seed_of_hundreds_breaks_an_invariant(seed: int) -> None:
    simulate(quiet_plan(1_000 + seed))
    simulate(stormy_plan(1_000 + seed))


def test_tokens_balance_where_the_syncer_believes_only_a_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crashes included; what was merged and not counted is dropped as `implausible`, by the learner's own books."""
    monkeypatch.setattr(crediting, "credit_max", lambda *args, **kwargs: 150)
    run = Run(stormy_plan(3))
    run.go()
    reasons = {
        said.reason for book in run.tokens.books.values() for said in book.booked if isinstance(said, TokensDropped)
    }
    assert "implausible" in reasons


def test_a_learner_that_dies_for_good_blocks_nobody() -> None:
    outcome = simulate(loss_plan())
    assert outcome.num_commits > 20
    assert set(outcome.participants[-6:]) == {2}


def test_a_learner_five_times_slower_does_not_slow_the_others() -> None:
    """Rounds of the fast keep their pace; the slow one's work rides along late and is merged."""
    sync = replace(quiet_plan(0).sync, interval_steps=10, num_fragments=2, quorum=1, kappa=1.0, staleness_max=8)
    plan = Plan(seed=3, sync=sync, stop=StopSpec(minutes=0.6), num_elements=(100, 100), hosts=hosts(100, 100, 100))
    with_slow = replace(plan, hosts=hosts(100, 100, 500))
    fast, run = simulate(plan), Run(with_slow)
    outcome = run.go()
    assert outcome.num_commits > 0.9 * fast.num_commits
    slow = run.learners[2].peer
    commits = [signed.entry for signed in run.chain.chain if isinstance(signed.entry, Commit)]
    assert sum(any(each.peer == slow for each in commit.participants) for commit in commits) > len(commits) // 4


def test_equal_learners_are_nearly_all_in_every_round_even_where_transfers_take_steps() -> None:
    """Grace with K = 1: on slow links Eq. 3 alone would merge one learner a round (numerics.md, 7)."""
    sync = replace(quiet_plan(0).sync, interval_steps=24, num_fragments=4, overlap_steps=2, quorum=1, grace=True)
    plan = Plan(
        seed=5,
        sync=replace(sync, kappa=1.0, rounds_in_flight_max=8, staleness_max=8),
        stop=StopSpec(minutes=0.5),
        num_elements=(100,) * 4,
        hosts=hosts(*(100,) * 4),
        transfer_ms=(250, 450),
    )
    outcome = simulate(plan)
    assert sum(outcome.participants) / len(outcome.participants) >= 0.9 * 4


def test_no_fragment_is_merged_more_often_than_every_interval_of_the_median_learner() -> None:
    plan = replace(quiet_plan(0), hosts=hosts(100, 100, 100), stop=StopSpec(minutes=1.0))
    run = Run(plan)
    run.go()
    steps = sorted(learner.learn.training.step for learner in run.learners if learner.learn is not None)[1]
    syncer = run.world.syncer()
    assert syncer is not None
    for state in syncer.chain.outer:
        assert 0 < state.version <= steps // plan.sync.interval_steps + 1


# ---- lockstep


class Orders(Watch):
    """At which inner step each learner sampled and adopted what."""

    def __init__(self) -> None:
        self.sampled: dict[tuple[str, int], list[int]] = {}
        self.adopted: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, SampleTaken):
            self.sampled.setdefault((process.peer, event.fragment), []).append(event.step)
        elif isinstance(event, Adopted):
            self.adopted.setdefault((process.peer, event.fragment), []).append((event.step, event.version))


@pytest.mark.parametrize("num_fragments", [1, 4])
@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_lockstep_is_the_schedule_to_the_step(num_fragments: int, overlap_steps: int) -> None:
    """Ten rounds, K = M, learners of different speeds: every sample and adoption at its step, everyone in all."""
    plan = lockstep_plan(num_fragments=num_fragments, overlap_steps=overlap_steps)
    run, orders = Run(plan), Orders()
    run.world.watches = (*run.world.watches, orders)
    outcome = run.go()
    assert outcome.participants == (3,) * (10 * num_fragments)
    for learner in run.learners:
        for p in range(num_fragments):
            due = [first_due_steps(p, plan.sync) + n * plan.sync.interval_steps for n in range(10)]
            assert orders.sampled[learner.peer, p][:10] == due
            adopted = orders.adopted[learner.peer, p][:10]
            ahead = [(step + overlap_steps, n + 1) for n, step in enumerate(due)]
            # The run may end while the last adoptions wait for a step that is never made.
            assert adopted[:9] == ahead[:9]
    for signed in run.chain.chain:
        if isinstance(signed.entry, Commit):
            assert len({(each.first_step, each.last_step, each.steps) for each in signed.entry.participants}) == 1


def test_lockstep_is_the_same_whatever_the_speeds_and_delays() -> None:
    """Chain and weights are a function of the rules: only times and rounds' waits may differ."""

    def essence(plan: Plan) -> list[object]:
        run = Run(plan)
        run.go()
        return [
            (
                signed.entry.fragment,
                signed.entry.version,
                [(each.peer, each.last_step, each.weight) for each in signed.entry.participants],
            )
            for signed in run.chain.chain
            if isinstance(signed.entry, Commit)
        ]

    plan = lockstep_plan(num_fragments=4, overlap_steps=2)
    other = replace(plan, seed=99, hosts=hosts(200, 20, 20), delay_ms=(30, 200), transfer_ms=(1, 900))
    by_fragment = [sorted(map(repr, essence(each))) for each in (plan, other)]
    assert by_fragment[0] == by_fragment[1]


# ---- determinism

_PROGRAM = """
import sys
from tests.support.plans import stormy_plan
from geo_diloco.sim.run import simulate
print(simulate(stormy_plan(int(sys.argv[1]))).effects_digest)
"""


def test_the_same_seed_gives_the_same_effects_under_any_hash_seed(repository: Path) -> None:
    """A set iterated into effects would pass within one process and differ between two."""
    running = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(repository)}
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, "3"],
                env=environment,
                cwd=repository,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    digests = {simulate(stormy_plan(3)).effects_digest}
    for process in running:
        out, _ = process.communicate(timeout=120)
        digests.add(out.strip())
    assert len(digests) == 1


def test_another_seed_gives_other_effects() -> None:
    assert simulate(quiet_plan(2)).effects_digest != simulate(quiet_plan(3)).effects_digest


def test_orders_are_those_that_the_watch_counts() -> None:
    """The lockstep test would pass on empty lists."""
    run, orders = Run(quiet_plan(0)), Orders()
    seen: list[Effect] = []

    class Effects(Watch):
        def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
            seen.extend(effect for effect in effects if isinstance(effect, TakeSample | Adopt))

    run.world.watches = (*run.world.watches, orders, Effects())
    run.go()
    assert 0 < sum(map(len, orders.sampled.values())) <= sum(isinstance(each, TakeSample) for each in seen)
    assert 0 < sum(map(len, orders.adopted.values())) <= sum(isinstance(each, Adopt) for each in seen)
