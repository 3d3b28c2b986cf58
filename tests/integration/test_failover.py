"""Runs whose syncer goes: another one is elected, nobody stops training, and what was merged stays merged."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.config import load_manifest
from geo_diloco.errors import ConfigError
from geo_diloco.manifest import ElectionSpec
from geo_diloco.node import export, hand_over, replay
from geo_diloco.protocol.messages import Commit, Entry, Found, Open, RosterChange
from geo_diloco.runtime.chain import read_entries
from geo_diloco.tape import summarize_tokens

from .test_run import LIMIT_S, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.slow]

LEASE_S = 3.0


class ElectedRun(Run):
    """A founder, two standbys and learners on one machine."""

    def __init__(self, root: Path, *, num_commits: int) -> None:
        super().__init__(root, num_commits=num_commits)
        manifest = replace(
            load_manifest(root / "run.toml"),
            admission="token",
            election=ElectionSpec(lease_seconds=LEASE_S, electors=3, one_machine=True),
        )
        (root / "run.toml").write_text(toml_from_manifest(manifest), "utf-8")
        self.standbys: dict[int, subprocess.Popen[bytes]] = {}

    def start_standby(self, number: int) -> None:
        flags = ["--no-train", "--announce", "127.0.0.1", "--port", "0", "--run-dir", str(self.standby_dir(number))]
        flags += ["--keep-contributions"]
        self.standbys[number] = self._start(f"standby-{number}", "join", self._ready["invite"], *flags)

    def standby_dir(self, number: int) -> Path:
        return self.root / f"standby-{number}"

    def start_learner(self, number: int, *more: str) -> None:
        flags = ("--run-dir", str(self.learner_dir(number)), "--threads", "1", "--device", "cpu", "--save-every-s", "1")
        more = more or ("--no-elector",)
        self.learners[number] = self._start(f"learner-{number}", "join", self._ready["invite"], *flags, *more)

    def http_of(self, folder: Path) -> str:
        try:
            return f"127.0.0.1:{json.loads((folder / 'ports.json').read_text())['http']}"
        except OSError:
            return ""

    def status_of(self, folder: Path) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{self.http_of(folder)}/v1/status", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError):
            return {}

    def folders(self) -> list[Path]:
        return [self.root / "founder", *(self.standby_dir(number) for number in self.standbys)]

    def syncer(self) -> tuple[Path | None, dict[str, Any]]:
        """The folder of whoever serves, and its status; of the highest term if several say so."""
        claims = [(self.status_of(folder), folder) for folder in self.folders()]
        serving = [(status, folder) for status, folder in claims if status.get("role") == "syncer"]
        if not serving:
            return None, {}
        status, folder = max(serving, key=lambda claim: claim[0]["term"])
        return folder, status

    def commits(self) -> int:
        return max((self.status_of(folder).get("commits", -1) for folder in self.folders()), default=-1)

    def process_of(self, folder: Path) -> subprocess.Popen[bytes]:
        if folder.name == "founder":
            return self.founder
        return self.standbys[int(folder.name.rpartition("-")[2])]

    def begin(self, *, num_learners: int = 2) -> None:
        """All are here, three of them are electors, and something is merged."""
        self.start_founder()
        for number in (1, 2):
            self.start_standby(number)
        for number in range(1, num_learners + 1):
            self.start_learner(number)
        self.wait(lambda: len(self.status_of(self.root / "founder")["election"]["roster"]) == 3, "three electors")
        self.wait(lambda: self.commits() >= 3, "the first commits")

    def entries_of(self, folder: Path) -> list[Entry]:
        return read_entries(folder / "chain.jsonl")

    def end(self) -> None:
        """Whoever is still here is told to leave."""
        for process in (self.founder, *self.standbys.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self.founder, *self.standbys.values()):
            process.wait(LIMIT_S)

    def check(self) -> None:
        """One chain, one Theta, every token somewhere, on all who lived to the end."""
        chains = {folder.name: self.entries_of(folder) for folder in self.folders()}
        finished = [entries for entries in chains.values() if entries[-1].kind == "finished"]
        assert finished, {name: entries[-1].kind for name, entries in chains.items()}
        entries = finished[0]
        for other in chains.values():
            assert other == entries[: len(other)] or other[-1].kind != "finished"
        heads = {entry.fragment: (entry.version, entry.state_digest) for entry in entries if isinstance(entry, Commit)}
        for number in self.learners:
            summary = json.loads((self.learner_dir(number) / "summary.json").read_text())
            assert dict(enumerate(zip(summary["versions"], summary["state_digests"], strict=True))) == heads
        found = entries[0]
        assert isinstance(found, Found)
        tokens = summarize_tokens(self.tapes(), entries, found.num_elements)
        assert tokens.balances, tokens
        assert tokens.merged > 0


def told_in(folder: Path) -> list[str]:
    """What that peer told whoever started it."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [f"{line['topic']}: {line['text']}" for line in lines]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElectedRun]:
    made = ElectedRun(tmp_path, num_commits=60)
    yield made
    made.close()


def test_when_the_syncer_is_killed_another_goes_on_and_the_killed_one_comes_back_as_a_peer(run: ElectedRun) -> None:
    run.begin()
    run.founder.kill()
    run.founder.wait()
    killed_at, before = time.monotonic(), run.commits()
    run.wait(lambda: run.syncer()[0] is not None, "another syncer")
    run.wait(lambda: run.commits() > before, "a commit by it")
    print(f"commits go on {time.monotonic() - killed_at:.1f} s after the kill")
    run.start_founder()
    run.wait(lambda: run.status_of(run.root / "founder").get("commits", -1) >= run.commits() - 4, "the founder")
    follower, (folder, syncer) = run.status_of(run.root / "founder"), run.syncer()
    assert folder is not None and follower["role"] == "follower" and follower["served_by"]["peer"] == syncer["peer"]
    assert syncer["served_by"] == {"peer": syncer["peer"], "address": run.http_of(folder)}
    assert follower["peer"] in [each["peer"] for each in syncer["election"]["standbys"] if each["here"]]
    told = [line for line in told_in(run.learner_dir(1)) if line.startswith("syncer: following ")]
    assert told[0].endswith(" in term 1") and told[-1].endswith(" again"), told
    run.wait_ended()
    for ended in (run.root / "founder", run.learner_dir(1)):
        assert any(line.startswith("finished: the run is finished (60 commits") for line in told_in(ended)), ended
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    run.end()
    run.check()
    opened = [entry for entry in run.entries_of(run.standby_dir(1)) if isinstance(entry, Open)]
    assert len({entry.syncer for entry in opened}) >= 2 and opened[1].header.term > 1
    assert export(run.standby_dir(1), run.root / "model").is_dir(), "a standby's folder is as good as the founder's"
    replays = {folder.name: replay(folder / "tape.jsonl") for folder in run.folders()}
    assert [result.divergence for result in replays.values()] == [None, None, None]
    successors = [replays["standby-1"], replays["standby-2"]]
    assert sum(each.merges_redone for each in successors) > 0, "merged on what another syncer left"
    assert sum(each.merges_missing for each in successors) == 0
    assert replays["founder"].merges_redone == 0 < replays["founder"].merges_missing, "it kept no contributions"


def test_a_syncer_that_is_told_to_leave_hands_over(run: ElectedRun) -> None:
    run.begin()
    before = run.commits()
    told_at = time.monotonic()
    run.founder.send_signal(signal.SIGTERM)
    run.wait(lambda: run.syncer()[0] not in (None, run.root / "founder"), "another syncer")
    run.wait(lambda: run.commits() > before, "a commit by it")
    gap_s = time.monotonic() - told_at
    print(f"commits go on {gap_s:.1f} s after SIGTERM")
    assert run.founder.wait(LIMIT_S) == 0
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    run.end()
    run.check()
    changes = [entry for entry in run.entries_of(run.standby_dir(1)) if isinstance(entry, RosterChange)]
    assert len(changes[0].roster) == 3


def test_an_owner_hands_over_and_the_run_is_led_by_another(run: ElectedRun) -> None:
    run.begin()
    before = run.commits()
    assert "handed over" in hand_over(run.root / "founder")
    run.wait(lambda: run.syncer()[0] not in (None, run.root / "founder"), "another syncer")
    run.wait(lambda: run.commits() > before, "a commit by it")
    with pytest.raises(ConfigError, match="not the syncer"):
        hand_over(run.root / "founder")
    run.wait_ended()
    run.end()
    run.check()
    assert run.founder.returncode == 0


def test_a_founder_whose_electors_are_learners_is_elected_again_when_it_returns(run: ElectedRun) -> None:
    """Nobody else can serve: learners wait, training, and what they trained is merged."""
    run.start_founder()
    for number in (1, 2):
        run.start_learner(number, "--elector")
    run.wait(lambda: len(run.status_of(run.root / "founder")["election"]["roster"]) == 3, "three electors")
    run.wait(lambda: run.commits() >= 3, "the first commits")
    run.founder.kill()
    run.founder.wait()
    run.start_founder()
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    run.end()
    run.check()
    votes = [len(entry.votes) for entry in run.entries_of(run.root / "founder") if isinstance(entry, Open)]
    assert votes[0] == 1 and votes[-1] >= 2
