"""Five real processes whose syncer dies, stops or is cut off: one chain, nothing durable lost, all agree in the end.

Cuts are made twice: between network namespaces on slow lines (root only), and by relays on loopback. What needs no cut
runs on loopback.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cut_run import BOUND_S, HOSTS, LEASE_S, REACHABLE, CutRun
from tests.support.namespaces import Namespaces, why_no_namespaces
from tests.support.networks import Network
from tests.support.relays import Relays

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.slow]

FOUNDER, STANDBY_1, STANDBY_2, LEARNER_1, LEARNER_2 = HOSTS


@pytest.fixture
def run(tmp_path: Path) -> Iterator[CutRun]:
    made = CutRun(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["namespaces", "relays"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    if request.param == "relays":
        with Relays(len(HOSTS)) as relays:
            yield relays
        return
    if reason := why_no_namespaces():
        pytest.skip(f"{reason}; its twin with relays on loopback runs")
    with Namespaces(len(HOSTS)) as namespaces:
        for host in range(len(HOSTS)):
            namespaces.shape(host, delay_ms=15, mbit_per_s=50, loss=0.002)
        yield namespaces


@pytest.fixture
def cut_run(tmp_path: Path, network: Network) -> Iterator[CutRun]:
    made = CutRun(tmp_path, network)
    yield made
    made.close()


def check_terms(run: CutRun, *, living: tuple[str, ...] = REACHABLE, changes: int = 1) -> None:
    """All is well at the end, and commits are of as many terms as there were changes of syncer, and one more."""
    commits = run.end_and_check(living)
    terms = [commit.header.term for commit in commits]
    assert terms == sorted(terms)
    assert len(set(terms)) == changes + 1


def test_a_paused_syncer_commits_nothing_when_it_goes_on(run: CutRun) -> None:
    run.begin()
    before = run.commits_at(FOUNDER)
    run.founder.send_signal(signal.SIGSTOP)
    took_s = run.wait_commits([STANDBY_1, STANDBY_2], before + 2)
    print(f"commits go on {took_s:.1f} s after SIGSTOP")
    assert took_s < BOUND_S
    run.founder.send_signal(signal.SIGCONT)
    run.wait(lambda: run.role_of(FOUNDER) == "follower", "the paused syncer to be a peer")
    run.wait(lambda: run.commits_at(FOUNDER) >= before + 4, "the paused syncer to follow")
    check_terms(run)


def test_a_syncer_cut_off_with_a_minority_is_replaced_and_follows_when_it_is_back(cut_run: CutRun) -> None:
    cut_run.begin()
    cut_run.cut([FOUNDER, LEARNER_1], [STANDBY_1, STANDBY_2, LEARNER_2])
    before = cut_run.commits_at(FOUNDER)
    took_s = cut_run.wait_commits([STANDBY_1, STANDBY_2], before + 2)
    print(f"commits go on {took_s:.1f} s after the cut")
    assert took_s < BOUND_S
    stopped_at, steps = cut_run.commits_at(FOUNDER), cut_run.steps_of(LEARNER_1)
    cut_run.wait(lambda: cut_run.steps_of(LEARNER_1) > steps + 8, "the learner that was cut off to train on")
    assert cut_run.commits_at(FOUNDER) == stopped_at, "no commit is durable on the minority's side"
    cut_run.heal()
    cut_run.wait(lambda: cut_run.role_of(FOUNDER) == "follower", "the old syncer to be a peer")
    cut_run.wait_caught_up()
    cut_run.wait_merged(LEARNER_1)
    check_terms(cut_run)


def test_a_syncer_with_a_majority_goes_on_and_takes_the_others_back(cut_run: CutRun) -> None:
    cut_run.begin()
    cut_run.cut([FOUNDER, STANDBY_1, LEARNER_1], [STANDBY_2, LEARNER_2])
    steps = cut_run.steps_of(LEARNER_2)
    cut_at = time.monotonic()
    cut_run.wait(lambda: time.monotonic() > cut_at + 2 * LEASE_S, "two leases to pass")
    before = cut_run.commits_at(FOUNDER)
    assert cut_run.wait_commits([FOUNDER], before + 2) < BOUND_S
    assert cut_run.steps_of(LEARNER_2) > steps
    cut_run.heal()
    cut_run.wait_caught_up()
    cut_run.wait_merged(LEARNER_2)
    check_terms(cut_run, changes=0)


def test_without_a_majority_there_are_no_commits_until_it_heals(cut_run: CutRun) -> None:
    cut_run.begin()
    sides = ([FOUNDER, LEARNER_1], [STANDBY_1, LEARNER_2], [STANDBY_2])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        cut_run.cut(sides[one], sides[other])
    cut_at = time.monotonic()
    cut_run.wait(lambda: time.monotonic() > cut_at + 2 * LEASE_S, "two leases to pass")
    before = [cut_run.commits_at(name) for name in REACHABLE]
    steps = cut_run.steps_of(LEARNER_2)
    cut_run.wait(lambda: cut_run.steps_of(LEARNER_2) > steps + 8, "a learner to train on")
    assert [cut_run.commits_at(name) for name in REACHABLE] == before
    assert all(cut_run.role_of(name) != "syncer" for name in REACHABLE[1:])
    cut_run.heal()
    took_s = cut_run.wait_commits(REACHABLE, max(before) + 1)
    print(f"commits go on {took_s:.1f} s after healing")
    assert took_s < BOUND_S
    cut_run.end_and_check()


def test_a_founder_killed_for_good_is_missed_by_nobody(run: CutRun) -> None:
    run.begin()
    before = run.commits_at(FOUNDER)
    run.founder.kill()
    run.founder.wait()
    took_s = run.wait_commits([STANDBY_1, STANDBY_2], before + 8)
    print(f"eight commits {took_s:.1f} s after the founder's end")
    check_terms(run, living=REACHABLE[1:])


def test_the_syncer_and_another_elector_die_at_once(run: CutRun) -> None:
    run.begin()
    before = run.commits_at(FOUNDER)
    for process in (run.founder, run.standbys[2]):
        process.kill()
    for process in (run.founder, run.standbys[2]):
        process.wait()
    took_s = run.wait_commits([STANDBY_1], before + 2)
    print(f"commits go on {took_s:.1f} s after two were killed")
    assert took_s < BOUND_S
    run.start_founder()
    run.start_standby(2)
    run.wait_caught_up()
    check_terms(run)


def test_all_are_killed_and_go_on_from_their_disks(run: CutRun) -> None:
    run.begin()
    before = run.commits_at(FOUNDER)
    everybody = [run.founder, *run.standbys.values(), *run.learners.values()]
    for process in everybody:
        process.kill()
    for process in everybody:
        process.wait()
    run.start_founder()
    for number in (1, 2):
        run.start_standby(number)
        run.start_learner(number, "--elector")
    run.wait_commits(REACHABLE, before + 4)
    check_terms(run)
