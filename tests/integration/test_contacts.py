"""A run whose bootstraps are gone: whoever was here before comes back, the founder too, and a new peer is let in by a
contact."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_diloco.node import amend, fetch_status
from geo_diloco.node.asking import visited_directory
from geo_diloco.protocol.messages import Commit, Participant
from geo_diloco.runtime.contacts import read_contacts
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.session import fetch_contacts, make_session

from .test_run import LIMIT_S, Run, check_agreement, check_nothing_left

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.slow]


class BootstrappedRun(Run):
    """Its invite names nothing but a bootstrap."""

    def start_bootstrap(self) -> None:
        flags = ["--port", "0", "--json", "--state-dir", str(self.root / "bootstrap")]
        self.bootstrap = self._start("bootstrap", "bootstrap", *flags)
        self.wait(lambda: self.log_of("bootstrap").startswith("{"), "the bootstrap")
        self.maddrs = tuple(json.loads(self.log_of("bootstrap").splitlines()[0])["maddrs"])

    @property
    def invite(self) -> Invite:
        return Invite(run=self._ready["run"], bootstraps=self.maddrs)

    @property
    def address(self) -> str:
        return str(self._ready["http"])

    def join(self, number: int, *more: str, machine: str = "") -> None:
        """`machine`: one that has seen nothing of the run."""
        flags = ["--run-dir", str(self.learner_dir(number)), "--threads", "1", "--device", "cpu", "--save-every-s", "1"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if machine:
            environment["XDG_STATE_HOME"] = str(self.root / machine)
        with (self.root / f"learner-{number}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "geo_diloco", "join", self.invite.to_string(), *flags, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.learners[number] = process
        self.started.append(process)

    def log_of(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def commits(self) -> list[Commit]:
        return [entry for entry in self.entries() if isinstance(entry, Commit)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[BootstrappedRun]:
    made = BootstrappedRun(tmp_path, num_commits=10_000)
    yield made
    made.close()


async def num_in_the_directory(run: BootstrappedRun) -> int:
    """As one sees it who comes by the founder's own DHT side."""
    session = make_session()
    try:
        known = await fetch_contacts(session, f"http://{run.address}")
    finally:
        await session.close()
    async with visited_directory(run.invite, known, lambda status: None) as directory:
        return len(await directory.find(run.invite.run))


def test_with_no_bootstrap_left_one_comes_back_by_what_it_remembers_and_a_new_one_by_a_contact(
    run: BootstrappedRun,
) -> None:
    run.start_bootstrap()
    run.start_founder("--bootstrap", run.maddrs[0])
    run.join(1)
    run.wait(lambda: run.status()["commits"] >= 2, "the first commits")
    remembered = run.learner_dir(1) / "contacts.json"
    run.wait(lambda: run.address in read_contacts(remembered).addresses, "the learner to remember the founder")
    assert run.status()["bootstraps"] == {"count": 1, "silent_since": None}
    for process in (run.bootstrap, run.learners[1]):
        process.kill()
        process.wait()
    before = run.status()["commits"]

    run.join(1)
    run.wait(lambda: f"joining through {run.address}, known from an earlier time" in run.log_of("learner-1"), "a way")
    run.join(2, machine="elsewhere")
    run.wait(lambda: "--contact HOST:PORT names one" in run.log_of("learner-2"), "the reason why it waits")
    run.learners[2].kill()
    run.learners[2].wait()
    run.join(2, "--contact", run.address, machine="elsewhere")
    run.wait(lambda: f"joining through {run.address}, given by --contact" in run.log_of("learner-2"), "the contact")
    run.wait(lambda: len({each.peer for each in participants_since(run, before)}) == 2, "work of both")
    run.wait(lambda: asyncio.run(num_in_the_directory(run)) == 3, "all of them in the directory")

    run.wait(lambda: run.status()["bootstraps"]["silent_since"] is not None, "the founder to notice")
    assert run.log_of("founder").count("the run goes on, new peers need a contact") == 1
    run.founder.kill()
    run.founder.wait()
    run.start_founder()
    before = run.status()["commits"]
    run.wait(
        lambda: len({each.peer for each in participants_since(run, before)}) == 2, "work of both for its next term"
    )
    assert fetch_status(run.invite)["role"] == "syncer", "by what is remembered on this machine"
    amend(str(run.root / "founder"), [f"commits={run.status()['commits'] + 4}"])
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    run.founder.terminate()
    assert run.founder.wait(LIMIT_S) == 0
    check_agreement(run)
    check_nothing_left(run)


def participants_since(run: BootstrappedRun, number: int) -> list[Participant]:
    return [participant for commit in run.commits()[number:] for participant in commit.participants]
