"""Whose folder is whose: nothing of a run is written over, and a mistake leaves nothing behind that misleads."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from geo_diloco.config import PeerConfig, manifest_from_bytes
from geo_diloco.errors import ConfigError, InviteError, ManifestError, ModelError, RunDirError, UserError
from geo_diloco.manifest import EvalSpec, ModelSpec, PeerId, RunManifest, SyncSpec
from geo_diloco.node import export, found, join
from geo_diloco.node.doubles import Presence
from geo_diloco.node.founding import discard_if_never_founded, prepare_founder
from geo_diloco.node.rundir import disk_failure, hold, hold_slot
from geo_diloco.node.starting import _settings
from geo_diloco.node.thread import NodeThread
from geo_diloco.runtime.invite import Invite
from geo_diloco.training.models import model_factory


@model_factory
def build_small(*, width: int = 2) -> nn.Module:
    return nn.Linear(width, 2)


FACTORY = f"{__name__}:build_small"
MANIFEST = RunManifest(model=ModelSpec(factory=FACTORY), sync=SyncSpec(num_fragments=1))
PEER = PeerId("12" * 32)
FOUNDED = replace(MANIFEST, founder=PeerId("ab" * 32), nonce="cd" * 16)


def prepare(source: Any, folder: Path | None) -> Any:
    parts = prepare_founder(source, PeerConfig(run_dir=folder), quiet=True)
    parts.log.close()
    parts.chain.close()
    parts.run_dir.release()
    return parts


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def joined_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_bytes(FOUNDED.canonical_bytes())
    (folder / "identity.key").write_text("a key")
    return folder


def test_a_founding_that_failed_can_be_tried_again_in_the_same_folder_with_another_model(tmp_path: Path) -> None:
    parts = prepare(MANIFEST, tmp_path / "run")
    discard_if_never_founded(parts)
    other = replace(MANIFEST, model=ModelSpec(factory=FACTORY, factory_arguments={"width": 5}))
    again = prepare(other, tmp_path / "run")
    assert again.layout.num_elements == (12,)
    assert again.identity.peer_id == parts.identity.peer_id


def test_a_founding_that_failed_leaves_no_folder_where_we_chose_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    discard_if_never_founded(prepare(MANIFEST, None))
    assert names(tmp_path) == ["geo_diloco", "runs"]


def test_a_model_that_can_not_be_cut_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_fragments is 9"):
        prepare(replace(MANIFEST, sync=SyncSpec(num_fragments=9)), tmp_path / "run")
    assert names(tmp_path) == []


def test_a_scripts_own_manifest_is_checked_and_kept_as_a_file_would_say_it(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"the manifest given: sync\.quorum = 0; allowed"):
        prepare(replace(MANIFEST, sync=SyncSpec(num_fragments=1, quorum=0)), tmp_path / "wrong")
    assert names(tmp_path) == []
    parts = prepare(replace(MANIFEST, evaluation=EvalSpec(every_seconds=0)), tmp_path / "run")  # 0.0 in a file
    written = (tmp_path / "run" / "manifest.json").read_bytes()
    assert manifest_from_bytes(written) == parts.manifest


def test_a_copied_folder_does_not_start_beside_its_original(tmp_path: Path) -> None:
    at_work = prepare_founder(MANIFEST, PeerConfig(run_dir=tmp_path / "run"), quiet=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(
        RunDirError, match=rf"copy and the folder of process {os.getpid()} are copies of each other, and that one"
    ):
        prepare(tmp_path / "copy", None)
    at_work.log.close()
    at_work.chain.close()
    at_work.run_dir.release()
    prepare(tmp_path / "copy", None)


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda token: token.write_text("\n"), lambda token: token.write_bytes(b"\xff")]
)
def test_a_run_whose_token_is_lost_does_not_open_to_everybody(tmp_path: Path, harm: Any) -> None:
    prepare(replace(MANIFEST, admission="token"), tmp_path)
    prepare(tmp_path, None)
    harm(tmp_path / "token")
    with pytest.raises(RunDirError, match=r"token is (missing or empty|damaged).* in every invite of this run"):
        prepare(tmp_path, None)


def test_drafts_of_a_killed_process_are_gone_once_its_folder_is_held_again(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    for draft in (tmp_path / ".identity.key.0123.tmp", tmp_path / "state" / ".snapshot-000000000001.json.0123.tmp"):
        draft.write_text("half of it")
    (tmp_path / "vote.json").write_text("{}")
    hold(tmp_path).release()
    assert names(tmp_path) == ["lock", "state", "vote.json"]


def test_a_disk_that_knows_no_locks_is_not_called_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunDirError, match="can't be locked: No locks available; give a folder on another disk"):
        hold(tmp_path)


def test_a_fork_of_a_peer_that_is_gone_does_not_stand_for_it(tmp_path: Path) -> None:
    presence, (told, tell), (began, begin) = Presence(PEER, tmp_path), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.write(begin, b".")
        os.read(told, 1)  # until the parent has looked
        os._exit(0)
    os.read(began, 1)
    presence.end()
    Presence(PEER, tmp_path).end()
    os.close(tell)
    assert os.waitpid(child, 0)[1] == 0
    for handle in (told, began, begin):
        os.close(handle)


def test_a_folder_with_a_run_in_it_is_not_founded_in_again(tmp_path: Path) -> None:
    prepare(MANIFEST, tmp_path)
    (tmp_path / "chain.jsonl").write_text("an entry\n")
    with pytest.raises(RunDirError, match="already holds a run; resume it with `geo-diloco start"):
        prepare(MANIFEST, tmp_path)


def test_a_peer_that_joins_keeps_out_of_a_founders_folder_and_of_another_runs(tmp_path: Path) -> None:
    prepare(MANIFEST, tmp_path / "founder")
    with pytest.raises(RunDirError, match="is a founder's folder"):
        hold_slot(FOUNDED.run_id(), tmp_path / "founder")
    folder = joined_folder(tmp_path / "learner")
    before = names(folder)
    with pytest.raises(RunDirError, match="the invite is for"):
        hold_slot(replace(FOUNDED, nonce="ef" * 16).run_id(), folder)
    assert names(folder) == before
    hold_slot(FOUNDED.run_id(), folder).release()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda folder: export(folder, folder.parent / "out"), "neither a founder's folder nor a standby's"),
        (lambda folder: found(folder), r"has no key\.pem: only the founder's folder can be resumed"),
    ],
)
def test_a_learners_folder_is_neither_resumed_nor_exported_and_stays_untouched(
    act: Any, said: str, tmp_path: Path
) -> None:
    folder = joined_folder(tmp_path / "learner")
    with pytest.raises(RunDirError, match=said):
        act(folder)
    with pytest.raises(RunDirError, match="is the folder of a peer that joined"):
        found(MANIFEST, run_dir=folder)
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunDirError, match=r"is not a run directory: no manifest\.json"):
        act(tmp_path / "mine")
    assert names(tmp_path) == ["identity.key", "learner", "lock", "manifest.json", "mine"]


def test_export_says_what_is_wrong_with_its_arguments_before_the_long_part(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="is no folder"):
        export(tmp_path / "none", tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunDirError, match="is no folder"):
        export(tmp_path / "file", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--to .*not an empty folder"):
        export(tmp_path, tmp_path / "file")


def test_a_run_resumes_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--run-dir .*resumes where it is"):
        found(tmp_path, run_dir=tmp_path / "elsewhere")


def test_damaged_files_of_a_run_are_named(tmp_path: Path) -> None:
    prepare(MANIFEST, tmp_path)
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(RunDirError, match=r"layout\.json is damaged"):
        prepare(tmp_path, None)
    (tmp_path / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(RunDirError, match=r"manifest\.json: the run's manifest"):
        prepare(tmp_path, None)


def test_what_the_disk_says_becomes_one_line_with_the_folder_and_what_to_do(tmp_path: Path) -> None:
    full = disk_failure(tmp_path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "tape.jsonl")))
    assert str(full) == (
        f"run directory {tmp_path}: no space left on device ({tmp_path / 'tape.jsonl'}); free some space and go on, "
        "or give another --run-dir"
    )


@pytest.mark.parametrize("given", [None, 3, {"invite": 1}])
def test_a_script_that_passes_something_else_is_told_what_is_wanted(given: Any) -> None:
    with pytest.raises(UserError, match="give the invite"):
        join(given)
    with pytest.raises(UserError, match="give a manifest"):
        found(given)
    with pytest.raises(UserError, match="give a PeerConfig"):
        _settings({}, {})  # type: ignore[arg-type]


def test_settings_given_by_name_are_checked_and_win_over_a_config() -> None:
    assert _settings(PeerConfig(threads=1, port=5), {"threads": 2}) == PeerConfig(threads=2, port=5)
    with pytest.raises(ConfigError, match="typo = 1 is no known key"):
        join(Invite(run=FOUNDED.run_id(), bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",)), typo=1)
    with pytest.raises(InviteError):
        join("gd1-x")


def test_a_closed_node_says_so_and_leaves_no_coroutine_behind() -> None:
    thread = NodeThread("test")
    thread.stop()

    async def ask() -> None:
        raise AssertionError("never runs")

    with pytest.raises(UserError, match="has left the run"):
        thread.wait(ask())
