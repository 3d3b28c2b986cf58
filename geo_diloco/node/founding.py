"""Founding a run, or taking one up again from its folder: everything before the first event.

A new run's manifest gets the founder's key and a nonce, which make its id. What resumes stands at the newest snapshot
on disk, and the core has the updates after it folded in once they are durable again; if no snapshot can be used,
Theta_0 is built again from the manifest's seed.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from geo_diloco.config import PeerConfig, changed_manifest, load_manifest
from geo_diloco.errors import (
    BlobError,
    ConfigError,
    DigestMismatch,
    FrameError,
    LayoutError,
    RunDirError,
)
from geo_diloco.manifest import BranchId, Digest, FragmentId, RunId, RunManifest, Version
from geo_diloco.node.rundir import RunDir, default_root, disk_failures, hold, joined_snapshot, read_manifest
from geo_diloco.numerics.fragments import Layout, fragment_digest, gather, layout_from_module, named_trainable
from geo_diloco.observability import EventLog, stderr_log
from geo_diloco.protocol.election.ballots import Opened
from geo_diloco.protocol.events import SnapshotLoaded
from geo_diloco.protocol.messages import Commit, Found, FragmentHead, Reform, RosterChange
from geo_diloco.runtime.chain import ChainCopy, counting_chain
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.replacing import apply_of
from geo_diloco.runtime.snapshots import SnapshotShelf, load_snapshot, loaded_from
from geo_diloco.runtime.store import BlobStore, ChainStore
from geo_diloco.runtime.wire import Signed
from geo_diloco.training.models import build_model, with_config

_REPAIR = "restore a backup of this folder, but for its vote.json"


@dataclass
class NodeParts:
    """What the process of a founder or a standby holds before it goes on the air."""

    run_dir: RunDir
    manifest: RunManifest
    run: RunId
    identity: Identity
    token: str
    model: nn.Module
    """With Theta_0's shapes; the evaluator's own from here on."""
    layout: Layout
    outer: OuterState
    store: BlobStore
    chain: ChainCopy
    snapshots: SnapshotShelf
    log: EventLog
    snapshot: SnapshotLoaded | None = None
    """Where `outer` stands; none while the run is not founded."""
    kept_blobs: frozenset[Digest] = frozenset()
    """Named neither on the chain nor on the shelf, and to be kept."""


def prepare_founder(source: Path | RunManifest, config: PeerConfig, *, quiet: bool = False) -> NodeParts:
    """Found (from a manifest or its file) or take up (from a run directory). Raises UserError of some kind."""
    if isinstance(source, Path) and source.is_dir():
        if config.run_dir is not None and config.run_dir.resolve() != source.resolve():
            raise ConfigError(f"--run-dir {config.run_dir}: {source} is a run's folder already and resumes where it is")
        return take_up(source, config, quiet=quiet)
    if isinstance(source, Path):
        manifest = load_manifest(source)
    else:  # a script's own: what no file could say nobody could read back, the founder included
        manifest = changed_manifest(source, {}, source="the manifest given")
    return _found(manifest, config, quiet=quiet)


def take_up(root: Path, config: PeerConfig, *, quiet: bool = False, at_rest: bool = False) -> NodeParts:
    """Hold a founder's folder and restore a state that its chain can go on from; `at_rest`, only to look at: then a
    standby's will do, too. Raises RunDirError if it can't be."""
    _check_can_resume(RunDir(root), at_rest=at_rest)
    run_dir = hold(root)
    try:
        with disk_failures(root):
            return _take_up(run_dir, config, quiet=quiet, at_rest=at_rest)
    except BaseException:
        run_dir.release()
        raise


def _check_can_resume(folder: RunDir, *, at_rest: bool) -> None:
    """Before anything is written there."""
    if not folder.root.is_dir():
        raise RunDirError(f"{folder.root} is no folder; give the run directory that `geo-diloco start` named")
    if not folder.manifest.exists():
        raise RunDirError(f"{folder.root} is not a run directory: no manifest.json")
    if folder.key.exists():
        return
    if not at_rest:
        raise RunDirError(
            f"{folder.root} has no key.pem: only the founder's folder can be resumed; a standby joins again"
        )
    if not folder.state.is_dir():
        raise RunDirError(f"{folder.root} is neither a founder's folder nor a standby's: only those can be exported")


def _found(manifest: RunManifest, config: PeerConfig, *, quiet: bool) -> NodeParts:
    model = build_model(manifest.model, with_weights=True)
    layout_from_module(model, num_fragments=manifest.sync.num_fragments)  # what can't be cut leaves no folder behind
    manifest = replace(manifest, model=with_config(manifest.model), nonce=secrets.token_hex(16))
    run_dir, manifest = _new_run_dir(manifest, config)
    try:
        with disk_failures(run_dir.root):
            for stale in (run_dir.manifest, run_dir.layout, run_dir.token, run_dir.tape):  # of a founding that failed
                stale.unlink(missing_ok=True)
            if manifest.admission == "token":
                atomic_write(run_dir.token, secrets.token_urlsafe(24).encode(), mode=0o600)
            run_dir.appear_as(manifest.founder)
            parts = _parts(run_dir, manifest, model, config, quiet=quiet)
            atomic_write(run_dir.layout, parts.layout.to_json().encode())
            _start_from_theta_0(parts)
            atomic_write(run_dir.manifest, manifest.canonical_bytes())
    except BaseException:
        run_dir.release()
        raise
    return parts


def _new_run_dir(manifest: RunManifest, config: PeerConfig) -> tuple[RunDir, RunManifest]:
    """The folder with the founder's key in it, and the manifest with that key. Where the folder is named after the
    run, the key comes first: the run's id depends on it."""
    if config.run_dir is not None:
        run_dir = hold(config.run_dir)
        try:
            _check_is_free(run_dir)
            return run_dir, replace(manifest, founder=Identity.load_or_create(run_dir.key).peer_id)
        except BaseException:
            run_dir.release()
            raise
    draft = default_root(RunId(f".founding-{secrets.token_hex(8)}.pem"))
    try:
        manifest = replace(manifest, founder=Identity.load_or_create(draft).peer_id)
        run_dir = hold(default_root(manifest.run_id()))
        with disk_failures(run_dir.root):
            draft.rename(run_dir.key)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return run_dir, manifest


def _check_is_free(run_dir: RunDir) -> None:
    """No run is here. One whose chain has no entry never was: its founding failed, and may be tried again."""
    root = run_dir.root
    if run_dir.identity_key.exists():
        raise RunDirError(f"{root} is the folder of a peer that joined a run; give the founder one of its own")
    has_entries = run_dir.chain.exists() and run_dir.chain.stat().st_size > 0
    if has_entries:
        raise RunDirError(f"{root} already holds a run; resume it with `geo-diloco start {root}`")


def discard_if_never_founded(parts: NodeParts) -> None:
    """A start that failed before the run's first entry leaves nothing to resume: what can mislead is taken away, and
    the whole folder where we chose its name."""
    if parts.chain.num_entries:
        return
    parts.run_dir.manifest.unlink(missing_ok=True)
    if parts.run_dir.root == default_root(parts.run):
        shutil.rmtree(parts.run_dir.root, ignore_errors=True)


def _take_up(run_dir: RunDir, config: PeerConfig, *, quiet: bool, at_rest: bool) -> NodeParts:
    manifest = read_manifest(run_dir)
    if not at_rest:
        run_dir.appear_as(_identity_of(run_dir).peer_id)
        _check_token(run_dir, manifest)
    model = build_model(manifest.model)
    parts = _parts(run_dir, manifest, model, config, quiet=quiet)
    is_founders = parts.identity.peer_id == manifest.founder
    if not is_founders and not at_rest:
        raise RunDirError(f"{run_dir.key} is not the founder's key: only the founder can resume this run")
    entries = parts.chain.load()
    if restore_state(parts):
        return parts
    if not is_founders:
        raise RunDirError(f"{run_dir.root} holds no state: neither a snapshot of its own nor the one it joined with")
    _start_from_theta_0(parts)
    if entries:
        signed, found = entries[0]
        if not isinstance(found, Found):
            raise RunDirError(f"{run_dir.chain} does not begin with `found`; {_REPAIR}")
        _check_theta_0(parts, found)
        parts.snapshot = loaded_from_found(found, signed)
    return parts


def _check_token(run_dir: RunDir, manifest: RunManifest) -> None:
    """Without it everybody would be admitted."""
    if manifest.admission == "token" and not _read_token(run_dir):
        raise RunDirError(
            f"{run_dir.token} is missing or empty, and the run admits only who knows the token: restore the "
            "file; the token is in every invite of this run"
        )


def _as_far_as_held(commits: list[Commit], parts: NodeParts) -> list[Commit]:
    """Each fragment's, up to the first whose update is not here."""
    held: list[Commit] = []
    ended: set[FragmentId] = set()
    for commit in commits:
        contained = commit.version <= parts.outer.version(commit.fragment)
        if not contained and not parts.store.has(commit.update):
            ended.add(commit.fragment)
        if commit.fragment not in ended:
            held.append(commit)
    return held


def restore_state(parts: NodeParts) -> bool:
    """From this disk: its newest snapshot, or the one it joined with. False if there is none that can be used."""
    snapshot = parts.snapshots.restore()
    joined = None if snapshot is not None else joined_snapshot(parts.run_dir)
    if joined is not None and joined.run == parts.run:
        try:
            load_snapshot(joined, parts.outer, parts.store.get)
            snapshot = joined
        except (BlobError, DigestMismatch) as exc:
            parts.log.note("join", f"the snapshot this peer joined with can't be used: {exc}", level="warning")
    if snapshot is None:
        return False
    parts.snapshot = loaded_from(snapshot, whole_chain=True)
    return True


def loaded_from_found(found: Found, signed: Signed) -> SnapshotLoaded:
    """Theta_0 as a snapshot."""
    return SnapshotLoaded(
        branch=BranchId(signed.digest),
        term=found.header.term,
        seq=found.header.seq,
        head_digest=signed.digest,
        heads=tuple(
            FragmentHead(version=Version(0), base=signed.digest, state_digest=state, momentum_digest=momentum)
            for state, momentum in zip(found.state_digests, found.momentum_digests, strict=True)
        ),
        num_elements=found.num_elements,
        layout_digest=found.layout_digest,
        tokens_per_fragment=(0,) * len(found.num_elements),
        progress=0.0,
        roster=found.roster,
        roster_seq=found.header.seq,
        opened=Opened(signed.signer, found.boot, "", ()),
        whole_chain=True,
    )


def bring_to_head(parts: NodeParts) -> None:
    """Fold in what the chain has beyond the restored state, for who looks at a folder at rest. Raises RunDirError."""
    chain = [entry for _, entry in counting_chain((signed.digest, entry) for signed, entry in parts.chain.entries())]
    commits = [entry for entry in chain if isinstance(entry, Commit)]
    rosters = [entry.roster for entry in chain if isinstance(entry, Found | RosterChange | Reform)]
    if rosters and len(rosters[-1]) > 1:
        commits = _as_far_as_held(commits, parts)  # the newest ones may not be durable, nor here
    try:
        redo_updates(parts.outer, parts.store, commits)
    except (BlobError, DigestMismatch, FrameError) as exc:
        raise RunDirError(f"{parts.run_dir.root}: the state can't be brought to the chain's head: {exc}") from exc


def _parts(run_dir: RunDir, manifest: RunManifest, model: nn.Module, config: PeerConfig, *, quiet: bool) -> NodeParts:
    identity = _identity_of(run_dir)
    run = manifest.run_id()
    layout = layout_from_module(model, num_fragments=manifest.sync.num_fragments)
    if run_dir.layout.exists():
        try:
            difference = layout.first_difference(Layout.from_json(run_dir.layout.read_text("utf-8")))
        except (LayoutError, UnicodeDecodeError) as exc:
            raise RunDirError(f"{run_dir.layout} is damaged: {exc}; remove it and start again") from exc
        if difference is not None:
            raise RunDirError(f"{run_dir.root}: the manifest builds another model here than when founded: {difference}")
    kept = manifest.sync.staleness_max if manifest.sync.late_form == "paper" else 0
    outer = OuterState(layout, with_momentum=True, with_residual=True, updates_kept=kept)
    store = BlobStore(run_dir.blobs)
    run_dir.state.mkdir(exist_ok=True)
    return NodeParts(
        run_dir=run_dir,
        manifest=manifest,
        run=run,
        identity=identity,
        token=_read_token(run_dir),
        model=model,
        layout=layout,
        outer=outer,
        store=store,
        chain=ChainCopy(ChainStore(run_dir.chain, repair=_REPAIR), run=run),
        snapshots=SnapshotShelf(run_dir.state, run=run, outer=outer, store=store, identity=identity),
        log=EventLog(run_dir.log, level=config.log_level) if quiet else stderr_log(run_dir.log, level=config.log_level),
    )


def _identity_of(run_dir: RunDir) -> Identity:
    return Identity.load_or_create(run_dir.identity_key if run_dir.identity_key.exists() else run_dir.key)


def _read_token(run_dir: RunDir) -> str:
    """Empty if there is none. `start` writes plain characters."""
    try:
        return run_dir.token.read_text("ascii").strip()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as exc:
        raise RunDirError(f"{run_dir.token} is damaged: restore it; the token is in every invite of this run") from exc


def _start_from_theta_0(parts: NodeParts) -> None:
    tensors = named_trainable(parts.model)
    for p in range(parts.layout.num_fragments):
        parts.outer.start_fragment(FragmentId(p), gather(tensors, parts.layout, p))


def _check_theta_0(parts: NodeParts, found: Found) -> None:
    """A rebuilt Theta_0 must be the one that was founded; later versions are checked by their commits."""
    if found.layout_digest != parts.layout.digest:
        raise RunDirError("the chain was founded with another layout")
    for p, digest in enumerate(found.state_digests):
        if parts.outer.version(FragmentId(p)) == 0 and fragment_digest(parts.outer.theta(FragmentId(p))) != digest:
            raise RunDirError(f"Theta_0 of fragment {p} can't be built again here; restore a snapshot")


def redo_updates(outer: OuterState, store: BlobStore, commits: list[Commit]) -> int:
    """Fold in every update that the state does not have yet; how many. Raises BlobError, FrameError, DigestMismatch."""
    redone = 0
    for commit in commits:
        if commit.version <= outer.version(commit.fragment):
            continue
        outer.apply(apply_of(commit), store.get(commit.update))
        redone += 1
    return redone


def state_digests(outer: OuterState) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
    """Of Theta and of momentum, per fragment."""
    fragments = [FragmentId(p) for p in range(outer.layout.num_fragments)]
    return (
        tuple(fragment_digest(outer.theta(p)) for p in fragments),
        tuple(fragment_digest(outer.momentum(p)) for p in fragments),
    )
