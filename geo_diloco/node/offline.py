"""What can be done with a run's folder while nothing runs: replay its tape, export its model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from geo_diloco.config import PeerConfig
from geo_diloco.errors import BlobError, DigestMismatch, FrameError, RemoteProtocolError, RunDirError, TapeError
from geo_diloco.manifest import FragmentId
from geo_diloco.node.founding import bring_to_head, take_up
from geo_diloco.node.rundir import RunDir, read_manifest
from geo_diloco.numerics.fragments import fragment_digest, gather, layout_from_module, named_trainable
from geo_diloco.protocol.messages import Commit, Entry, Found
from geo_diloco.runtime.chain import read_entries
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.replacing import apply_of
from geo_diloco.runtime.snapshots import load_snapshot
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed, open_snapshot
from geo_diloco.tape import ReplayResult
from geo_diloco.tape import replay as replay_tape
from geo_diloco.training.checkpoint import check_export_folder, export_model
from geo_diloco.training.models import build_model


def export(run_dir: Path, to: Path) -> Path:
    """Write a founder's or standby's Theta, brought to the head of its chain, as a `save_pretrained` folder.

    Raises RunDirError if the folder is in use or is no founder's, ConfigError if `to` can't be written or is not empty.
    """
    check_export_folder(to)
    parts = take_up(run_dir, PeerConfig(), quiet=True, at_rest=True)
    try:
        bring_to_head(parts)
        theta = [parts.outer.theta(FragmentId(p)) for p in range(parts.layout.num_fragments)]
        return export_model(theta, parts.layout, parts.manifest, to)
    finally:
        parts.log.close()
        parts.chain.close()
        parts.run_dir.release()


def replay(tape: Path) -> ReplayResult:
    """Feed a tape to fresh cores; where it lies in a run's folder, also redo the updates held there, digest by digest.

    Only reads, so the run may be going on. Raises TapeError if the tape can't be read, or if an update can't be redone
    or does not make the state its commit says, RunDirError for a damaged folder.
    """
    result = replay_tape(tape)
    folder = RunDir(tape.parent)
    if result.divergence is None and folder.manifest.exists() and folder.chain.exists():
        result.updates_checked = check_updates(folder)
    return result


def check_updates(folder: RunDir) -> int:
    """Redo the fold from where this peer began: Theta_0, or the snapshot it joined with. How many updates agreed;
    those that are not held any more end their fragment's part."""
    manifest = read_manifest(folder)
    model = build_model(manifest.model)
    layout = layout_from_module(model, num_fragments=manifest.sync.num_fragments)
    entries = read_entries(folder.chain)
    store = BlobStore(folder.blobs, is_read_only=True)
    outer = OuterState(layout, with_momentum=folder.key.exists(), with_residual=False)
    known = _begin(outer, folder, store, model, entries)
    num_checked = 0
    for commit in entries:
        if not isinstance(commit, Commit) or commit.fragment not in known:
            continue
        if commit.version <= outer.version(commit.fragment):
            continue
        if not store.has(commit.update):
            known.discard(commit.fragment)
            continue
        try:
            outer.apply(apply_of(commit), store.get(commit.update))
        except (BlobError, FrameError, DigestMismatch) as exc:
            where = f"{folder.chain.name}:{commit.header.seq + 1}"
            said = f"entry {commit.header.seq} (fragment {commit.fragment}, version {commit.version}): {exc}"
            raise TapeError(f"{where}: {said}") from exc
        num_checked += 1
    return num_checked


def _begin(outer: OuterState, folder: RunDir, store: BlobStore, model: nn.Module, entries: list[Entry]) -> set[int]:
    """Load the first state; the fragments whose first state is known here."""
    if folder.joined.exists():
        try:
            snapshot = open_snapshot(Signed.from_line(folder.joined.read_bytes()))
            load_snapshot(snapshot, outer, store.get)
        except (OSError, RemoteProtocolError, BlobError, DigestMismatch) as exc:
            raise RunDirError(f"{folder.joined}: the snapshot this peer began with is damaged: {exc}") from exc
        return set(range(outer.layout.num_fragments))
    tensors = named_trainable(model)
    found = entries[0] if entries else None
    known = set()
    for p in range(outer.layout.num_fragments):
        outer.start_fragment(FragmentId(p), gather(tensors, outer.layout, p))
        if isinstance(found, Found) and found.state_digests[p] == fragment_digest(outer.theta(FragmentId(p))):
            known.add(p)
    return known
