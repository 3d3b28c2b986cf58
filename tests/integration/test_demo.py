"""The demo as a person runs it: real processes, the real DHT, real HTTP, a summary checked against the disk."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from geo_diloco.protocol.messages import Found
from geo_diloco.runtime.chain import read_entries
from geo_diloco.runtime.invite import Invite
from geo_diloco.tape import summarize_tokens

pytestmark = pytest.mark.integration

PROMISED = {
    "heldout_before",
    "heldout_after",
    "tokens_trained",
    "tokens_merged",
    "tokens_in_flight",
    "tokens_carried",
    "tokens_dropped",
    "commits",
    "participants_mean",
    "bytes_per_param_up",
    "bytes_per_param_down",
    "digests_equal",
    "run_dir",
}
LIMIT_S = 240.0
"""For a busy machine; a quiet one needs a tenth."""


class Demo:
    """A running demo, what it prints going to files."""

    def __init__(self, run_dir: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "geo_diloco", "demo", "--plain", "--json", "--run-dir", str(run_dir), *flags]
        self._out, self._err = run_dir.with_suffix(".out"), run_dir.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self.ps = psutil.Process(self._process.pid)

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.ps.terminate()
            self._process.wait(60)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, pattern: str) -> None:
        """Until it has printed a line with the pattern."""
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.out):
            assert self._process.poll() is None and time.monotonic() < deadline, self.out + self.err
            time.sleep(0.1)

    def wait_end(self, exit_status: int = 0) -> None:
        self._process.wait(LIMIT_S)
        assert self._process.returncode == exit_status, self.out + self.err

    def summary(self) -> dict[str, Any]:
        """Of a demo that ends well."""
        self.wait_end()
        assert self.err == ""
        summary: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return summary


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def chain_entries(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(signed["body"]) for signed in records(run_dir / "chain.jsonl")]


def trained_by_the_tape(learner: Path) -> int:
    """Tokens of all the inner steps on a learner's tape, added up here on their own."""
    trained = counted_from = 0
    for record in records(learner / "tape.jsonl"):
        if record["kind"] == "boot":
            counted_from = 0
        elif record.get("type") == "Resumed":
            counted_from = record["tokens"]
        elif record.get("type") == "StepDone":
            trained += record["tokens"] - counted_from
            counted_from = record["tokens"]
    return trained


def check_summary(summary: dict[str, Any], run_dir: Path, *, num_learners: int) -> None:
    """What any demo that ended by itself must come to, told by other means than the summary's own."""
    assert set(summary) >= PROMISED
    assert summary["run_dir"] == str(run_dir)
    entries = chain_entries(run_dir)
    commits = [entry for entry in entries if entry["kind"] == "commit"]
    losses = [entry["heldout_loss"] for entry in entries if entry["kind"] == "record"]
    assert entries[-1]["kind"] == "finished"
    assert summary["commits"] == len(commits) > 0
    assert (summary["heldout_before"], summary["heldout_after"]) == (losses[0], losses[-1])
    assert 5.0 < summary["heldout_before"] < 6.0
    assert summary["heldout_after"] < summary["heldout_before"] - 0.2

    learners = [run_dir / f"learner-{number}" for number in range(1, num_learners + 1)]
    outcomes = [summary[f"tokens_{outcome}"] for outcome in ("merged", "in_flight", "carried", "dropped")]
    assert summary["tokens_trained"] == sum(trained_by_the_tape(learner) for learner in learners)
    assert summary["tokens_trained"] == sum(outcomes)
    assert min(outcomes) >= 0
    assert summary["tokens_merged"] == tokens_merged(entries) > 0
    assert 1.0 <= summary["participants_mean"] <= num_learners
    for leg in ("up", "down"):
        assert 0.3 < summary[f"bytes_per_param_{leg}"] < 0.6, "four bits a parameter, a scale for 64 of them, zstd"

    assert summary["digests_equal"] is True
    last = {commit["fragment"]: commit["state_digest"] for commit in commits}
    for learner in learners:
        held = json.loads((learner / "summary.json").read_bytes())["state_digests"]
        assert all(held[fragment] == digest for fragment, digest in last.items())


def tokens_merged(entries: list[dict[str, Any]]) -> int:
    num_elements = entries[0]["num_elements"]
    weighted = sum(
        num_elements[entry["fragment"]] * each["tokens_unmerged"]
        for entry in entries
        if entry["kind"] == "commit"
        for each in entry["participants"]
    )
    return int(weighted // sum(num_elements))


def test_a_demo_trains_its_summary_is_what_the_disk_says_and_a_killed_learner_returns_from_its_own(
    tmp_path: Path,
) -> None:
    """A demo without chaos, from an ordinary install, is in .ci/run."""
    run_dir = tmp_path / "demo"
    with Demo(run_dir, "--minutes", "0.6", "--learners", "2", "--chaos") as demo:
        summary = demo.summary()
    assert "chaos: killed learner-2 with SIGKILL" in demo.out
    assert "chaos: started learner-2 again" in demo.out
    check_summary(summary, run_dir, num_learners=2)
    assert summary["tokens_balance"] is True
    tape = records(run_dir / "learner-2" / "tape.jsonl")
    assert len({record["peer"] for record in tape if record["kind"] == "boot"}) == 1
    assert [record["kind"] for record in tape].count("boot") == 2
    resumed = [record for record in tape if record.get("type") == "Resumed"]
    assert len(resumed) == 1 and resumed[0]["step"] > 0, "from a checkpoint of its own"
    assert resumed[0]["lost_tokens"] > 0, "it did not die at the very moment of a save"
    assert 0 < summary["dropped_by_reason"]["crashed"] <= resumed[0]["lost_tokens"]
    assert summary["tokens_dropped"] == sum(summary["dropped_by_reason"].values())
    entries = read_entries(run_dir / "chain.jsonl")
    assert isinstance(entries[0], Found)
    calm = summarize_tokens([run_dir / "learner-1" / "tape.jsonl"], entries, entries[0].num_elements)
    assert set(calm.dropped) <= {"shrunk"}, "the other one did not crash or restart"
    peers = {records(path)[0]["peer"] for path in [run_dir / "tape.jsonl", *run_dir.glob("learner-*/tape.jsonl")]}
    assert len(peers) == 3, "a founder and two learners, each with an identity of its own"
    invite = Invite.parse((run_dir / "invite.txt").read_text().strip())
    address = next(entry["address"] for entry in chain_entries(run_dir) if entry["kind"] == "open")
    assert not [maddr for maddr in invite.bootstraps if address.rpartition(":")[2] in maddr.split("/")], (
        "learners are told addresses of the DHT alone"
    )


def test_ctrl_c_ends_a_demo_cleanly_with_the_summary_so_far(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    with Demo(run_dir, "--minutes", "10", "--learners", "1") as demo:
        demo.wait_for(r"  training .*commits [1-9]")
        children = demo.ps.children(recursive=True)
        assert len(children) >= 6, "three commands, each with a p2pd of its own"
        demo.ps.send_signal(signal.SIGINT)
        asked_at = time.monotonic()
        summary = demo.summary()
        assert time.monotonic() - asked_at < 20
    assert psutil.wait_procs(children, timeout=3)[1] == []
    assert summary["finished"] is False
    assert summary["commits"] > 0 and summary["tokens_balance"] is True and summary["digests_equal"] is True
    assert summary["tokens_trained"] == trained_by_the_tape(run_dir / "learner-1")


def test_a_child_that_dies_ends_the_demo_with_the_place_of_its_log(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    with Demo(run_dir, "--learners", "1") as demo:
        demo.wait_for("founding the run")
        children = demo.ps.children(recursive=True)
        (bootstrap,) = [child for child in demo.ps.children() if "bootstrap" in child.cmdline()[:5]]
        bootstrap.kill()
        demo.wait_end(exit_status=1)
    assert "bootstrap ended unexpectedly (killed by SIGKILL)" in demo.err
    assert str(run_dir / "logs" / "bootstrap.log") in demo.err
    assert '"maddrs"' in demo.err, "the end of its log"
    assert psutil.wait_procs(children, timeout=3)[1] == []
