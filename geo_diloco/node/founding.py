"""Founding a run, or taking one up again from its folder: everything before the first event.

A new run's manifest gets the founder's key and a nonce, which make its id. Theta_0 is built once and kept: what
resumes is the newest snapshot on disk and the updates after it, each checked against its commit's digests; if no
snapshot can be used, Theta_0 is built again from the manifest's seed and the whole fold is redone.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from geo_diloco.config import PeerConfig, load_manifest, manifest_from_bytes
from geo_diloco.errors import (
    BlobError,
    ConfigError,
    DigestMismatch,
    FrameError,
    LayoutError,
    ManifestError,
    RunDirError,
)
from geo_diloco.manifest import Digest, FragmentId, RunId, RunManifest
from geo_diloco.node.rundir import RunDir, default_root, disk_failures, hold
from geo_diloco.numerics.fragments import Layout, fragment_digest, gather, layout_from_module, named_trainable
from geo_diloco.observability import EventLog, stderr_log
from geo_diloco.protocol.effects import ApplyUpdate
from geo_diloco.protocol.messages import Commit, Found
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.snapshots import SnapshotShelf
from geo_diloco.runtime.store import BlobStore, ChainStore
from geo_diloco.training.models import build_model, with_config


@dataclass
class FounderParts:
    """What a founder's process holds before it goes on the air."""

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


def prepare_founder(source: Path | RunManifest, config: PeerConfig, *, quiet: bool = False) -> FounderParts:
    """Found (from a manifest or its file) or take up (from a run directory). Raises UserError of some kind."""
    if isinstance(source, Path) and source.is_dir():
        if config.run_dir is not None and config.run_dir.resolve() != source.resolve():
            raise ConfigError(f"--run-dir {config.run_dir}: {source} is a run's folder already and resumes where it is")
        return take_up(source, config, quiet=quiet)
    manifest = load_manifest(source) if isinstance(source, Path) else source
    return _found(manifest, config, quiet=quiet)


def take_up(root: Path, config: PeerConfig, *, quiet: bool = False) -> FounderParts:
    """Hold a founder's folder and bring its state to the head of its chain. Raises RunDirError if it can't be."""
    _check_is_founders(RunDir(root))
    run_dir = hold(root)
    try:
        with disk_failures(root):
            return _take_up(run_dir, config, quiet=quiet)
    except BaseException:
        run_dir.release()
        raise


def _check_is_founders(folder: RunDir) -> None:
    """Before anything is written there."""
    if not folder.root.is_dir():
        raise RunDirError(f"{folder.root} is no folder; give the run directory that `geo-diloco start` named")
    if not folder.manifest.exists():
        raise RunDirError(f"{folder.root} is not a run directory: no manifest.json")
    if not folder.key.exists():
        raise RunDirError(f"{folder.root} has no key.pem: only the founder's folder can be resumed or exported")


def _found(manifest: RunManifest, config: PeerConfig, *, quiet: bool) -> FounderParts:
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


def discard_if_never_founded(parts: FounderParts) -> None:
    """A start that failed before the run's first entry leaves nothing to resume: what can mislead is taken away, and
    the whole folder where we chose its name."""
    if parts.chain.num_entries:
        return
    parts.run_dir.manifest.unlink(missing_ok=True)
    if parts.run_dir.root == default_root(parts.run):
        shutil.rmtree(parts.run_dir.root, ignore_errors=True)


def _take_up(run_dir: RunDir, config: PeerConfig, *, quiet: bool) -> FounderParts:
    manifest = read_manifest(run_dir)
    model = build_model(manifest.model)
    parts = _parts(run_dir, manifest, model, config, quiet=quiet)
    if parts.identity.peer_id != manifest.founder:
        raise RunDirError(f"{run_dir.key} is not the founder's key: only the founder can resume this run")
    entries = parts.chain.load()
    if parts.snapshots.restore() is None:
        _start_from_theta_0(parts)
    try:
        redo_updates(parts.outer, parts.store, [entry for _, entry in entries if isinstance(entry, Commit)])
    except (BlobError, DigestMismatch, FrameError) as exc:
        raise RunDirError(f"{run_dir.root}: the state can't be brought to the chain's head: {exc}") from exc
    for signed, entry in entries:
        if isinstance(entry, Found):
            _check_theta_0(parts, entry)
        parts.snapshots.ledger.apply(entry, signed.digest)
    return parts


def _parts(
    run_dir: RunDir, manifest: RunManifest, model: nn.Module, config: PeerConfig, *, quiet: bool
) -> FounderParts:
    identity = Identity.load_or_create(run_dir.key)
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
    return FounderParts(
        run_dir=run_dir,
        manifest=manifest,
        run=run,
        identity=identity,
        token=run_dir.token.read_text("utf-8").strip() if run_dir.token.exists() else "",
        model=model,
        layout=layout,
        outer=outer,
        store=store,
        chain=ChainCopy(ChainStore(run_dir.chain), run=run, signer=manifest.founder),
        snapshots=SnapshotShelf(run_dir.state, run=run, outer=outer, store=store, identity=identity),
        log=EventLog(run_dir.log, level=config.log_level) if quiet else stderr_log(run_dir.log, level=config.log_level),
    )


def read_manifest(run_dir: RunDir) -> RunManifest:
    """The manifest of a run directory. Raises RunDirError if there is none."""
    try:
        return manifest_from_bytes(run_dir.manifest.read_bytes())
    except OSError as exc:
        raise RunDirError(f"{run_dir.root} is not a run directory: no manifest.json") from exc
    except ManifestError as exc:
        raise RunDirError(f"{run_dir.manifest}: {exc}") from exc


def _start_from_theta_0(parts: FounderParts) -> None:
    tensors = named_trainable(parts.model)
    for p in range(parts.layout.num_fragments):
        parts.outer.start_fragment(FragmentId(p), gather(tensors, parts.layout, p))


def _check_theta_0(parts: FounderParts, found: Found) -> None:
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


def apply_of(commit: Commit) -> ApplyUpdate:
    return ApplyUpdate(
        fragment=commit.fragment,
        version=commit.version,
        update=commit.update,
        state_digest=commit.state_digest,
        momentum_digest=commit.momentum_digest,
        eta=commit.eta,
        mu=commit.mu,
    )


def state_digests(outer: OuterState) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
    """Of Theta and of momentum, per fragment."""
    fragments = [FragmentId(p) for p in range(outer.layout.num_fragments)]
    return (
        tuple(fragment_digest(outer.theta(p)) for p in fragments),
        tuple(fragment_digest(outer.momentum(p)) for p in fragments),
    )
