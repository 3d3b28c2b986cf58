"""A run of five processes on a network that can be cut: started, cut, killed, paused, and looked through afterwards.

Founder, two standbys and two learners, every one an elector, each on a host of its own. The run has no end of its own:
a test ends it when it has seen enough, so it does not depend on how fast a machine commits.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_gaps import digests_equal, facts_of, is_one_chain, last_word, read_seen
from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.config import load_manifest
from geo_diloco.manifest import ElectionSpec, StopSpec
from geo_diloco.node import replay
from geo_diloco.node.rundir import RunDir
from geo_diloco.protocol.events import StepDone
from geo_diloco.protocol.messages import Commit, Found
from geo_diloco.runtime.identity import Identity
from geo_diloco.tape import read_tape, summarize_tokens
from tests.integration.test_failover import ElectedRun
from tests.integration.test_run import LIMIT_S, check_nothing_left
from tests.support.networks import Network

REACHABLE = ("founder", "standby-1", "standby-2")
HOSTS = (*REACHABLE, "learner-1", "learner-2")
LEASE_S = 5.0
BOUND_S = 3 * LEASE_S
"""To the next commit once there is a majority again: what protocol/README.md promises of 95 in 100, in leases."""


class CutRun(ElectedRun):
    """`ElectedRun` on a network; without one, everything is on loopback."""

    def __init__(self, root: Path, network: Network | None = None) -> None:
        super().__init__(root, num_commits=1)
        self._network = network
        manifest = replace(
            load_manifest(root / "run.toml"),
            stop=StopSpec(minutes=600.0),
            election=ElectionSpec(lease_seconds=LEASE_S, electors=5, one_machine=True),
        )
        (root / "run.toml").write_text(toml_from_manifest(manifest), "utf-8")

    # ---- on their hosts

    def _start(self, name: str, *arguments: str) -> Any:
        if self._network is None:
            return super()._start(name, *arguments)
        host = HOSTS.index(name)
        own = () if name.startswith("learner") else self._network.flags(host)
        with self._network.inside(host):
            process = super()._start(name, *arguments, *own)
        self._network.started(host, process.pid)
        return process

    def status_of(self, folder: Path) -> dict[str, Any]:
        if self._network is None:
            return super().status_of(folder)
        with self._network.inside(HOSTS.index(folder.name)):
            return super().status_of(folder)

    def cut(self, one: Sequence[str], other: Sequence[str]) -> None:
        assert self._network is not None
        self._network.cut([HOSTS.index(name) for name in one], [HOSTS.index(name) for name in other])

    def heal(self) -> None:
        assert self._network is not None
        self._network.heal()

    # ---- what is going on

    def begin(self, *, num_learners: int = 2) -> None:
        """All five are electors, and both learners have been merged."""
        self.start_founder()
        for number in (1, 2):
            self.start_standby(number)
        for number in range(1, num_learners + 1):
            self.start_learner(number, "--elector")
        self.wait(lambda: self._num_durable_electors() == len(HOSTS), "five electors")
        self.wait(lambda: self.commits_at("founder") >= 6, "the first commits")

    def _num_durable_electors(self) -> int:
        """Of the founder's roster, 0 until a majority has what made it: before that, who is cut off from the founder
        goes by the roster before."""
        election = self._election("founder")
        if not election or (election["durable_seq"] or 0) < election["head_seq"]:
            return 0
        return len(election["roster"])

    def _election(self, name: str) -> dict[str, Any]:
        return self.status_of(self.root / name).get("election") or {}

    def commits_at(self, name: str) -> int:
        """Durable ones that a reachable peer knows of; -1 if it does not answer."""
        return int(self.status_of(self.root / name).get("commits", -1))

    def role_of(self, name: str) -> str:
        return str(self.status_of(self.root / name).get("role", ""))

    def steps_of(self, name: str) -> int:
        """Inner steps that a learner has done."""
        return max(
            record.event.step
            for boot in read_tape(self.root / name / "tape.jsonl")
            for record in boot.events
            if isinstance(record.event, StepDone)
        )

    def wait_commits(self, names: Sequence[str], number: int) -> float:
        """Until one of them serves and has so many durable commits; after how many seconds."""
        began = time.monotonic()

        def is_there() -> bool:
            said = [self.status_of(self.root / name) for name in names]
            return any(each.get("role") == "syncer" and each["commits"] >= number for each in said)

        self.wait(is_there, f"{number} commits by one of {', '.join(names)}")
        return time.monotonic() - began

    def wait_caught_up(self, names: Sequence[str] = REACHABLE) -> None:
        """Until all of them hold what one of them holds now."""
        seq = max(self.status_of(self.root / name).get("seq", -1) for name in names)
        self.wait(
            lambda: all(self.status_of(self.root / name).get("seq", -1) >= seq for name in names),
            f"{', '.join(names)} to have entry {seq}",
        )

    def wait_merged(self, learner: str) -> None:
        """Until a commit that is made from now on has work of that learner."""
        peer = Identity.load_or_create(RunDir(self.root / learner).identity_key).peer_id
        seq = max(self.status_of(self.root / name).get("seq", -1) for name in REACHABLE)

        def is_merged() -> bool:
            entries = self.entries_of(self.syncer()[0] or self.root / REACHABLE[0])
            commits = [entry for entry in entries if isinstance(entry, Commit) and entry.header.seq > seq]
            return any(each.peer == peer for commit in commits for each in commit.participants)

        self.wait(is_merged, f"work of {learner} to be merged")

    def _hold_the_same(self, names: Sequence[str]) -> bool:
        said = [self.status_of(self.root / name) for name in names]
        return all(said) and len({(each["term"], each["seq"], str(each["versions"])) for each in said}) == 1

    # ---- the end

    def end_and_check(self, living: Sequence[str] = REACHABLE) -> list[Commit]:
        """Everybody leaves; what is on the disks must be one run without a loss. `living`: reachable peers that are
        here to the end; returns the commits."""
        for learner in self.learners.values():
            learner.send_signal(signal.SIGTERM)
        self.wait_ended()
        assert [learner.returncode for learner in self.learners.values()] == [0] * len(self.learners)
        self.wait(lambda: self._hold_the_same(living), f"{', '.join(living)} to hold the same")
        for name in sorted(living, key=self.role_of):  # a follower's name comes before the syncer's
            process = self.process_of(self.root / name)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0, name
        self._check_disks(living)
        check_nothing_left(self)
        return self._commits

    def _check_disks(self, living: Sequence[str]) -> None:
        learners = [f"learner-{number}" for number in self.learners]
        chains = {name: self.entries_of(self.root / name) for name in REACHABLE if (self.root / name).exists()}
        entries = chains[living[-1]]
        for name in living:
            assert is_one_chain(*sorted((chains[name], entries), key=len)), name
        self._commits = [entry for entry in entries if isinstance(entry, Commit)]
        seen = read_seen(self.root, reachable=list(chains), learners=learners)
        assert seen.applied <= {facts_of(commit) for commit in self._commits}, "durable commits were lost"
        found = entries[0]
        assert isinstance(found, Found)
        words = [last_word(self.root / name) for name in (*living, *learners)]
        assert digests_equal(self._commits, found, words)
        tokens = summarize_tokens([self.root / name / "tape.jsonl" for name in learners], entries, found.num_elements)
        assert tokens.balances and tokens.merged > 0, tokens
        for name in (*chains, *learners):
            assert replay(self.root / name / "tape.jsonl").divergence is None, name
