"""A run that is over is told from a folder of this machine, when nobody is there to be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import DirectoryError, RunDirError
from geo_diloco.manifest import ModelSpec, PeerId, RunManifest, Seq
from geo_diloco.node import asking
from geo_diloco.node.founding import _REPAIR
from geo_diloco.node.joining import chain_of
from geo_diloco.node.rundir import RunDir, default_root
from geo_diloco.protocol.messages import Finished, Record
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.store import ChainStore
from geo_diloco.runtime.wire import seal_entry
from tests.unit.runtime.samples import D1, header

MODEL = ModelSpec(factory="torch.nn:Identity")
MANIFEST = RunManifest(nonce="00" * 16, founder=PeerId("44" * 32), model=MODEL)
RUN = MANIFEST.run_id()
LOCAL = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))


@pytest.fixture(autouse=True)
def _own_state_and_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(asking, "DEFAULT_HTTP_PORT", 1)

    async def start(**settings: Any) -> None:
        raise DirectoryError("the directory is asked")

    monkeypatch.setattr(Directory, "start", start)


def folder(root: Path, *, finished: bool = True, standby: bool = False, killed: bool = False) -> Path:
    """Of a peer that has left: a manifest, and a chain that may have an end."""
    root.mkdir(parents=True)
    run_dir, identity = RunDir(root), Identity.load_or_create(root / "identity.key")
    run_dir.manifest.write_bytes(MANIFEST.canonical_bytes())
    if standby:
        run_dir.state.mkdir()
    if not killed:
        run_dir.summary.write_text(json.dumps({"finished": finished}))
    chain = ChainStore(run_dir.chain)
    prev = D1
    for seq in range(1, 4):
        end = Finished(header=header(seq, prev, RUN), reason="12 commits", tokens_total=34)
        more = Record(header=header(seq, prev, RUN), measured_seq=Seq(0), heldout_loss=2.5)
        signed = seal_entry(end if finished and seq == 3 else more, identity)
        chain.append(signed)
        prev = signed.digest
    chain.close()
    return root


def test_a_folder_tells_of_the_end_at_once(tmp_path: Path) -> None:
    status = asking.folder_status(folder(tmp_path / "learner"))
    told = (status["run"], status["finished"], status["finish_reason"], status["tokens_total"], status["commits"])
    assert told == (RUN, True, "12 commits", 34, None)
    assert status["heldout"][-1][1] == 2.5
    assert (status["from_folder"], status["holds_model"]) == (str(tmp_path / "learner"), False)
    assert asking.folder_status(folder(tmp_path / "standby", standby=True))["holds_model"]


def test_a_peer_that_was_killed_at_the_end_is_believed_if_nobody_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []

    async def search(*unused: Any) -> None:
        searched.append("the directory")
        raise DirectoryError("nobody")

    monkeypatch.setattr(asking, "_from_directory", search)
    assert asking.folder_status(folder(tmp_path / "left"))["finished"] and not searched
    assert asking.folder_status(folder(tmp_path / "killed", killed=True))["finished"] and searched


def test_with_the_invite_the_run_is_found_among_this_users_state_and_the_folder_with_the_model_is_named() -> None:
    folder(default_root(RUN) / "peer-1")
    folder(default_root(RUN) / "peer-2" / "standby", standby=True)
    status = asking.fetch_status(LOCAL)
    assert status["from_folder"] == str(default_root(RUN) / "peer-2" / "standby")


def test_a_run_that_no_folder_knows_the_end_of_is_looked_for(tmp_path: Path) -> None:
    going_on = folder(tmp_path / "learner", finished=False)
    with pytest.raises(DirectoryError, match="the directory is asked"):
        asking.folder_status(going_on)
    with pytest.raises(DirectoryError, match=r"learner has not heard of its end"):
        asking.folder_status(going_on)
    with pytest.raises(DirectoryError, match=r"`geo-diloco status RUN_DIR` tells of a run that is over"):
        asking.fetch_status(LOCAL)
    (going_on / "chain.jsonl").write_bytes(b"damaged\nthroughout\n")
    with pytest.raises(DirectoryError, match="the directory is asked"):
        asking.folder_status(going_on)


def test_what_is_no_folder_of_a_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="nowhere: no such folder"):
        asking.folder_status(tmp_path / "nowhere")
    with pytest.raises(RunDirError, match="is not a run directory"):
        asking.folder_status(tmp_path)


def test_a_damaged_chain_of_a_peer_that_joined_needs_no_backup_and_a_founders_does(tmp_path: Path) -> None:
    root = folder(tmp_path / "learner")
    damaged = root / "chain.jsonl"
    damaged.write_bytes(b"damaged\n" + damaged.read_bytes())
    with pytest.raises(RunDirError, match=r"line 1 is damaged; move .*learner away, but for the keys in it, and join"):
        chain_of(RunDir(root), RUN)
    with pytest.raises(RunDirError, match=r"line 1 is damaged; restore a backup of this folder, but for its vote.json"):
        ChainStore(damaged, repair=_REPAIR)
