"""A learner that can be reached brings a standby: it can take over the run, and never outlives its learner."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from geo_diloco.node import replay
from geo_diloco.protocol.messages import Commit, Open

from .test_failover import ElectedRun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GONE_S = 10.0
"""Within this a standby is gone whose learner was killed; a quiet machine takes 3."""
REACHED = ("--announce", "127.0.0.1", "--port", "0")


class AccompaniedRun(ElectedRun):
    """Learner 1 is accompanied, and there are no other standbys."""

    def __init__(self, root: Path, *, num_commits: int) -> None:
        super().__init__(root, num_commits=num_commits)
        self.companion = self.learner_dir(1) / "standby"

    def folders(self) -> list[Path]:
        return [self.root / "founder", self.companion]

    def below(self) -> list[psutil.Process]:
        """Every process that learner 1 has started: the standby, its watchdog, and both p2pd."""
        return psutil.Process(self.learners[1].pid).children(recursive=True)

    def wait_electors(self, number: int) -> None:
        def roster() -> list[str]:
            return list(self.status_of(self.root / "founder").get("election", {}).get("roster", []))

        self.wait(lambda: len(roster()) == number, "the electors")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AccompaniedRun]:
    made = AccompaniedRun(tmp_path, num_commits=10_000)  # until it is ended
    yield made
    made.close()


def gone_after(processes: list[psutil.Process]) -> float:
    began = time.monotonic()
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        assert time.monotonic() - began < GONE_S, [each for each in processes if each.is_running()]
        time.sleep(0.02)
    return time.monotonic() - began


def test_it_is_a_peer_like_any_and_is_gone_when_its_learner_is_killed(run: AccompaniedRun) -> None:
    run.start_founder()
    run.start_learner(1, *REACHED)
    run.wait(lambda: run.status_of(run.companion).get("role") == "follower", "the standby's own status")
    run.wait(lambda: run.status_of(run.companion).get("commits", -1) >= 2, "the standby to follow the run")
    log = (run.root / "learner-1.log").read_text()
    assert log.count("standby: beside this learner a standby can take over, at 127.0.0.1") == 1
    below = run.below()
    assert len(below) >= 4
    run.learners[1].kill()
    run.learners[1].wait()
    print(f"all gone {gone_after(below):.1f} s after the kill")


@pytest.mark.slow
def test_it_takes_over_and_leaves_with_its_learner(run: AccompaniedRun) -> None:
    run.start_founder()
    run.start_learner(1, *REACHED)
    run.start_learner(2, "--elector")
    run.wait_electors(3)
    run.wait(lambda: run.commits() >= 3, "the first commits")
    run.founder.kill()
    run.founder.wait()
    before = run.commits()
    run.wait(lambda: run.syncer()[0] == run.companion, "the standby to serve")
    run.wait(lambda: run.commits() > before, "a commit by it")
    below, told_at = run.below(), time.monotonic()
    run.learners[1].send_signal(signal.SIGTERM)
    try:
        assert run.learners[1].wait(GONE_S + 5.0) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("the learner did not leave")
    print(f"the learner left {time.monotonic() - told_at:.1f} s after SIGTERM")
    gone_after(below)
    entries = run.entries_of(run.companion)
    terms = {entry.header.term for entry in entries if isinstance(entry, Open)}
    assert len(terms) == 2 and any(isinstance(each, Commit) and each.header.term == max(terms) for each in entries)
    assert replay(run.companion / "tape.jsonl").divergence is None
