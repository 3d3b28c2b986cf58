"""A founder that lets go of what it does not need: peers come late, it comes back, and everything is still checked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.config import PeerConfig
from geo_diloco.manifest import ModelSpec, RunManifest, StopSpec, SyncSpec
from geo_diloco.node import Founder, export, fetch_status, reachable, replay, station
from geo_diloco.protocol.messages import Commit
from geo_diloco.runtime import snapshots
from geo_diloco.runtime.chain import read_entries
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.snapshots import snapshots_in
from geo_diloco.training.presets import demo_manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LIMIT_S = 200.0
NUM_COMMITS = 60


def small_run() -> RunManifest:
    demo = demo_manifest()
    assert demo.model.config is not None
    small = dict(demo.model.config) | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return replace(
        demo,
        model=ModelSpec(config=small),
        data=replace(demo.data, sequence_length=64, batch_size=4),
        sync=SyncSpec(interval_steps=4, num_fragments=1, overlap_steps=1, staleness_max=1),
        stop=StopSpec(commits=NUM_COMMITS),
        evaluation=replace(demo.evaluation, every_seconds=0.0, sequences=16),
    )


class Peers:
    """Peers as a person would start them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.started: list[subprocess.Popen[bytes]] = []

    def join(self, invite: str, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self.root / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "geo_diloco", "join", invite, "--run-dir", str(self.root / name), *flags]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self.started.append(process)
        return process


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


def lines(chain: Path) -> int:
    return len(chain.read_bytes().splitlines()) if chain.exists() else 0


def test_what_was_pruned_is_missed_by_nobody(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "UPDATES_BYTES_KEPT", 0)
    monkeypatch.setattr(station, "ENTRIES_KEPT", 0)
    monkeypatch.setattr(reachable, "LOOK_AFTER_S", 0.2)
    monkeypatch.setattr(snapshots, "SAVE_EVERY_COMMITS", 4)
    root = peers.root / "founder"
    learning = ("--threads", "1", "--device", "cpu", "--save-every-s", "1")
    config = PeerConfig(run_dir=root, port=0)
    with Founder(small_run(), config) as founder:
        learner = peers.join(founder.invite, "learner", *learning)
        wait(lambda: founder.status()["commits"] >= 30 or learner.poll() is not None, "thirty commits")
        assert learner.poll() is None, (peers.root / "learner.log").read_text()
        assert fetch_status(Invite.parse(founder.invite))["disk_bytes"] > 0
    # The founder comes back to a disk that lacks the older updates, and a standby to a chain that is older than memory.
    with Founder(root, config) as founder:
        invite = founder.invite
        standby = peers.join(invite, "standby", "--no-train", "--announce", "127.0.0.1", "--port", "0")
        follower = peers.join(invite, "follower", "--no-train")
        wait(lambda: lines(peers.root / "standby" / "chain.jsonl") >= 30, "the standby to have the chain")
        state = peers.root / "follower" / "state"
        wait(lambda: any(state.glob("snapshot-*.json")), "the follower's own snapshot, without which it can't prune")
        follower.send_signal(signal.SIGTERM)
        assert follower.wait(LIMIT_S) == 0
        follower = peers.join(invite, "follower", "--no-train")
        wait(lambda: learner.poll() is not None, "the end of the run")
        assert learner.returncode == 0
        wait(lambda: lines(peers.root / "standby" / "chain.jsonl") == lines(root / "chain.jsonl"), "the standby")
        standby.send_signal(signal.SIGTERM)
        assert standby.wait(LIMIT_S) == 0
        assert follower.wait(LIMIT_S) == 0
        # Everything from the first entry on is still told, though the memory has let go of it.
        chain = founder._node._p.chain
        assert len(chain.entries()) < chain.num_entries
    entries = read_entries(root / "chain.jsonl")
    assert read_entries(peers.root / "standby" / "chain.jsonl") == entries
    commits = [entry for entry in entries if isinstance(entry, Commit)]
    held = [commit.version for commit in commits if (root / "blobs" / commit.update.digest).exists()]
    assert len(commits) == NUM_COMMITS and 9 <= len(held) < 30, "S_max and some, and what came after the last snapshots"
    assert held == list(range(NUM_COMMITS - len(held) + 1, NUM_COMMITS + 1))
    result = replay(root / "tape.jsonl")
    assert result.divergence is None
    older = min(snapshot.heads[0].version for snapshot in snapshots_in(root / "state"))
    assert result.updates_checked == NUM_COMMITS - older, "from the older snapshot that is held"
    assert replay(peers.root / "learner" / "tape.jsonl").divergence is None
    export(root, peers.root / "model")
    summary = json.loads((peers.root / "learner" / "summary.json").read_text())
    assert summary["state_digests"] == [commits[-1].state_digest]
    assert "going on after entry" in (peers.root / "follower.log").read_text(), "nothing is fetched that it had"
    summary = json.loads((peers.root / "follower" / "summary.json").read_text())
    assert summary["state_digests"] == [commits[-1].state_digest]
    assert replay(peers.root / "follower" / "tape.jsonl").divergence is None
