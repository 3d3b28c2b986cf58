"""Whole runs with real processes on loopback: they train, agree bit for bit, lose no token, leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.manifest import EvalSpec, ModelSpec, StopSpec, SyncSpec
from geo_diloco.node import replay
from geo_diloco.protocol.messages import Commit, Entry, Found, Open
from geo_diloco.runtime.chain import read_entries
from geo_diloco.tape import summarize_tokens
from geo_diloco.training.presets import demo_manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LIMIT_S = 150.0
"""For a busy machine that imports torch several times at once; a quiet one needs a tenth."""


class Run:
    """A founder and its learners, as a person would start them."""

    def __init__(self, root: Path, *, num_commits: int) -> None:
        self.root = root
        self.founder: subprocess.Popen[bytes]
        self.learners: dict[int, subprocess.Popen[bytes]] = {}
        self.started: list[subprocess.Popen[bytes]] = []
        self.daemons: set[tuple[int, str]] = set()
        """(pid, start time) of every p2pd seen below our processes."""
        self._ready: dict[str, Any] = {}
        demo = demo_manifest()
        manifest = replace(
            demo,
            model=ModelSpec(factory="tests.support.tiny_language:tiny_language", factory_arguments={"width": 64}),
            data=replace(demo.data, sequence_length=64, batch_size=4),
            sync=SyncSpec(interval_steps=8, num_fragments=2, overlap_steps=2),
            stop=StopSpec(commits=num_commits),
            evaluation=EvalSpec(every_seconds=0, sequences=16),
        )
        (root / "run.toml").write_text(toml_from_manifest(manifest), "utf-8")

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "geo_diloco", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
        self.started.append(process)
        return process

    def start_founder(self, *more: str) -> None:
        """Found the run, or resume it at the same port."""
        again = bool(self._ready)
        source = self.root / ("founder" if again else "run.toml")
        port = self._ready["http"].rpartition(":")[2] if again else "0"
        flags = ["--json", "--port", port, *more]
        if not again:
            flags += ["--run-dir", str(self.root / "founder")]
        seen = len(self._founder_lines())
        self.founder = self._start("founder", "start", str(source), *flags)
        self.wait(lambda: len(self._founder_lines()) > seen, "the founder to be ready")
        self._ready = json.loads(self._founder_lines()[-1])

    def _founder_lines(self) -> list[str]:
        log = self.root / "founder.log"
        return [line for line in log.read_text().splitlines() if line.startswith("{")] if log.exists() else []

    def start_learner(self, number: int) -> None:
        flags = ("--run-dir", str(self.learner_dir(number)), "--threads", "1", "--device", "cpu", "--save-every-s", "1")
        self.learners[number] = self._start(f"learner-{number}", "join", self._ready["invite"], *flags)

    def learner_dir(self, number: int) -> Path:
        return self.root / f"learner-{number}"

    def status(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{self._ready['http']}/v1/status", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return {"commits": -1, "finished": False, "learners": []}

    def wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            self._look_for_daemons()
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self._logs()}"
            time.sleep(0.1)

    def wait_ended(self) -> None:
        self.wait(lambda: all(each.poll() is not None for each in self.learners.values()), "the learners to leave")

    def _logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.root.glob("*.log")))

    def _look_for_daemons(self) -> None:
        for process in self.started:
            for child in _children(process.pid):
                command, began = _process(child)
                if "p2pd" in command:
                    self.daemons.add((child, began))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()

    # ---- afterwards

    def entries(self) -> list[Entry]:
        return read_entries(self.root / "founder" / "chain.jsonl")

    def tapes(self) -> list[Path]:
        return sorted(self.root.glob("learner-*/tape.jsonl"))


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _process(pid: int) -> tuple[str, str]:
    """(command line, start time); empty if there is no such process."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        return command, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "", ""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, num_commits=14)
    yield made
    made.close()


def check_agreement(run: Run) -> None:
    """Every learner ended with the digests of the chain's head, and all tokens are somewhere."""
    entries = run.entries()
    heads = {entry.fragment: (entry.version, entry.state_digest) for entry in entries if isinstance(entry, Commit)}
    assert entries[-1].kind == "finished"
    for number in run.learners:
        summary = json.loads((run.learner_dir(number) / "summary.json").read_text())
        ended = dict(enumerate(zip(summary["versions"], summary["state_digests"], strict=True)))
        assert ended == heads
    found = entries[0]
    assert isinstance(found, Found)
    tokens = summarize_tokens(run.tapes(), entries, found.num_elements)
    assert tokens.balances, tokens
    assert len(tokens.learners) == len(run.learners)
    assert tokens.merged > 0


def check_tapes(run: Run) -> None:
    """Every tape gives the same effects again. A learner that came back to a run as good as over has no update to redo,
    the founder has them all."""
    for tape in [run.root / "founder" / "tape.jsonl", *run.tapes()]:
        result = replay(tape)
        assert result.divergence is None
        assert result.updates_checked > 0 or tape.parent.name != "founder"


def check_nothing_left(run: Run) -> None:
    assert run.daemons, "the test saw no p2pd at all, so it can't tell that none is left"
    run.wait(lambda: not any(_process(pid)[1] == began for pid, began in run.daemons), "every p2pd to end")


def test_learners_leave_and_come_back_train_agree_and_leave_nothing_behind(run: Run) -> None:
    run.start_founder()
    run.start_learner(1)
    run.wait(lambda: run.status()["commits"] >= 2, "the first commits")
    run.learners[1].send_signal(signal.SIGINT)
    run.wait_ended()
    assert run.learners[1].returncode == 0
    run.wait(lambda: not any(learner["connected"] for learner in run.status()["learners"]), "the goodbye")
    run.start_learner(1)
    run.start_learner(2)
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    status = run.status()
    run.founder.send_signal(signal.SIGTERM)
    assert run.founder.wait(LIMIT_S) == 0
    assert status["finished"] and status["commits"] >= 14
    assert status["heldout"][-1][1] < status["heldout"][0][1]
    check_agreement(run)
    check_tapes(run)
    check_nothing_left(run)


def test_killed_processes_come_back_from_their_own_disks_and_the_books_still_balance(run: Run) -> None:
    run.start_founder()
    run.start_learner(1)
    run.start_learner(2)
    run.wait(lambda: run.status()["commits"] >= 3, "the first commits")
    run.learners[1].kill()
    run.learners[1].wait()
    run.start_learner(1)
    run.wait(lambda: run.status()["commits"] >= 6, "commits without the killed learner")
    run.founder.kill()
    run.founder.wait()
    run.start_founder()
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    run.founder.send_signal(signal.SIGINT)
    assert run.founder.wait(LIMIT_S) == 0
    assert [entry.header.term for entry in run.entries() if isinstance(entry, Open)] == [1, 2]
    check_agreement(run)
    check_tapes(run)
    check_nothing_left(run)
