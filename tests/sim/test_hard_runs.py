"""Whole runs whose syncers come, go, are lied to and die of the end, with every checker watching.

Swarms drawn from hundreds of seeds are in `test_simulate_protocol.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import ElectionSpec, StopSpec, SyncSpec
from geo_diloco.protocol.messages import Finished
from geo_diloco.sim.drawn import drawn_plan
from geo_diloco.sim.fakes import SignedEntry
from geo_diloco.sim.plans import FOUNDER, Fault, HostPlan, Plan, learners
from geo_diloco.sim.process import Process
from geo_diloco.sim.run import Run, simulate
from geo_diloco.sim.world import Watch
from tests.support.plans import fickle_plan, stormy_plan

STANDBY = HostPlan(serves=True, elects=True)


def test_syncers_that_come_and_go_lose_nothing_that_was_durable() -> None:
    outcome = simulate(fickle_plan(0))
    assert outcome.num_elections >= 8 and outcome.num_commits > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_no_lie_and_no_fickle_syncer_of_many_seeds_breaks_an_invariant(seed: int) -> None:
    simulate(replace(drawn_plan(2_000 + seed), has_liar=True))
    simulate(fickle_plan(1_000 + seed))


@pytest.mark.parametrize("seed", range(2))
def test_a_liar_takes_no_run_and_no_term(seed: int) -> None:
    """It lies to every syncer from the beginning to the end of the faults."""
    run = Run(replace(drawn_plan(100 + seed), has_liar=True))
    assert run.go().num_commits >= 5
    honest = {host.peer for host in run.world.hosts}
    assert {signed.signer for signed in run.chain.chain} <= honest
    assert {each.peer for each in run.world.hosts[0].process.core.election.roster} <= honest  # type: ignore[union-attr]


def test_a_liar_does_not_stop_a_founder_that_serves_alone() -> None:
    outcome = simulate(stormy_plan(4, has_liar=True))
    assert outcome.num_commits >= 5


# ---- the end of a run


class DiesAtTheEnd(Watch):
    """The syncer dies so long after its disk has the last entry; it comes back ten seconds later, or never."""

    def __init__(self, run: Run, after_ms: int, *, comes_back: bool) -> None:
        self._world = run.world
        self._after_ms = after_ms
        self._comes_back = comes_back
        self.num_deaths = 0

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        if isinstance(signed.entry, Finished) and self.num_deaths == 0:
            self.num_deaths = 1
            self._world.clock.after(self._after_ms, process.crash)
            if self._comes_back:
                self._world.clock.after(10_000, lambda: self._world.start(process.host))


def short_plan(*hosts: HostPlan, electors: int) -> Plan:
    return Plan(
        seed=electors,
        hosts=(FOUNDER, *hosts, *learners(100, 120)),
        sync=SyncSpec(interval_steps=8, num_fragments=2, overlap_steps=2),
        stop=StopSpec(minutes=0.3),
        election=ElectionSpec(electors=electors, lease_seconds=3.0),
    )


@pytest.mark.parametrize("after_ms", [0, 30, 60, 300], ids=lambda ms: f"{ms} ms")
@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "lost"])
def test_everybody_hears_of_the_end_also_if_its_syncer_dies_of_it(after_ms: int, comes_back: bool) -> None:
    run = Run(short_plan(STANDBY, STANDBY, electors=3))
    dies = DiesAtTheEnd(run, after_ms, comes_back=comes_back)
    run.world.watches = (*run.world.watches, dies)
    run.go()
    assert dies.num_deaths == 1
    ends = [signed for signed in run.chain.chain if isinstance(signed.entry, Finished)]
    assert len(ends) == 1


@pytest.mark.parametrize("after_ms", [0, 30], ids=lambda ms: f"{ms} ms")
def test_a_founder_that_dies_of_the_end_tells_everybody_when_it_is_back(after_ms: int) -> None:
    run = Run(short_plan(electors=1))
    run.world.watches = (*run.world.watches, DiesAtTheEnd(run, after_ms, comes_back=True))
    outcome = run.go()
    assert outcome.num_elections == 2


def test_who_was_away_at_the_end_hears_of_it() -> None:
    faults = (
        Fault(kind="cut", at_ms=12_000, for_ms=25_000, host=3),
        Fault(kind="crash", at_ms=12_000, for_ms=25_000, host=4),
    )
    run = Run(replace(short_plan(STANDBY, STANDBY, electors=3), faults=faults, faults_until_ms=38_000))
    run.go()
    assert all(process.told_finished for process in run.world.processes())


@pytest.mark.parametrize("host", [2, 3], ids=["standby", "follower"])
def test_who_joins_after_the_end_hears_of_it(host: int) -> None:
    """It has lost its disk, and begins with a snapshot of a run that is over."""
    faults = (Fault(kind="lose disk", at_ms=12_000, for_ms=25_000, host=host),)
    plan = short_plan(STANDBY, STANDBY, HostPlan(), electors=3)
    run = Run(replace(plan, faults=faults, faults_until_ms=38_000))
    run.go()
    assert run.world.hosts[host].starts == 2
    assert all(process.told_finished for process in run.world.processes())
