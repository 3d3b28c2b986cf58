"""A standby as its owner sees it: a peer that does not train, can be reached, and takes over when the syncer is gone.

It joins with the invite as anybody, and from then on keeps what a founder keeps: the whole chain, updates,
momentum and snapshots of its own. What it resumes from is its own newest snapshot, or the one it joined with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from geo_diloco.config import PeerConfig
from geo_diloco.node.addresses import as_before
from geo_diloco.node.founder import Reachable
from geo_diloco.node.founding import NodeParts, restore_state
from geo_diloco.node.inviting import FounderInfo
from geo_diloco.node.joining import Lobby, catch_up, chain_of, enter, joined_blobs
from geo_diloco.node.reachable import ReachableNode
from geo_diloco.node.rundir import RunDir, disk_failures, hold_slot
from geo_diloco.node.thread import NodeThread
from geo_diloco.numerics.fragments import layout_from_module
from geo_diloco.observability import EventLog, stderr_log
from geo_diloco.runtime.dht import load_library
from geo_diloco.runtime.driver import Worker
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.seeking import Place
from geo_diloco.runtime.snapshots import SnapshotShelf
from geo_diloco.runtime.store import BlobStore
from geo_diloco.training.models import build_model


class Standby(Reachable):
    """A context manager. Safe from the caller's thread."""

    def __init__(
        self,
        invite: Invite,
        config: PeerConfig,
        *,
        check: Callable[[], None] = lambda: None,
        preparing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`check` is called while starting, which may wait for the run for ever; what it raises ends the start."""
        with preparing():
            load_library()
        self._held = hold_slot(invite.run, config.run_dir)
        self._log = stderr_log(self._held.log, level=config.log_level)
        super().__init__(NodeThread("geo_diloco standby"))
        try:
            with disk_failures(self._held.root):
                config = as_before(self._held, config)
                self._node = self._thread.wait(_make(invite, self._held, config, self._log), check=check)
                self.info: FounderInfo = self._thread.wait(self._node.start(), check=check)
            ready = f"ready at {self.info.http} to take over if the syncer is lost; its files: {self._held.root}"
            self._log.note("standby", ready)
        except BaseException:
            self.close()
            raise

    @property
    def run_dir(self) -> RunDir:
        return self._held

    def _let_go(self) -> None:
        self._log.close()
        self._held.release()


async def _make(invite: Invite, run_dir: RunDir, config: PeerConfig, log: EventLog) -> ReachableNode:
    identity = Identity.load_or_create(run_dir.identity_key)
    run_dir.appear_as(identity.peer_id)
    lobby = await enter(invite, run_dir, identity, config, log)
    try:
        parts, place = await _prepare(lobby)
    except BaseException:
        await lobby.close()
        raise
    await lobby.bulk.close()
    return ReachableNode(parts, config, directory=lobby.directory, first=place)


async def _prepare(lobby: Lobby) -> tuple[NodeParts, Place]:
    """The state it goes on from, and where to look for the syncer. Raises LayoutError, RunDirError."""
    run_dir, manifest, run = lobby.run_dir, lobby.manifest, lobby.invite.run
    model = await asyncio.to_thread(build_model, manifest.model)
    layout = layout_from_module(model, num_fragments=manifest.sync.num_fragments)
    kept = manifest.sync.staleness_max if manifest.sync.late_form == "paper" else 0
    outer = OuterState(layout, with_momentum=True, with_residual=True, updates_kept=kept)
    store = BlobStore(run_dir.blobs)
    run_dir.state.mkdir(exist_ok=True)
    parts = NodeParts(
        run_dir=run_dir,
        manifest=manifest,
        run=run,
        identity=lobby.identity,
        token=lobby.invite.token,
        model=model,
        layout=layout,
        outer=outer,
        store=store,
        chain=await asyncio.to_thread(chain_of, run_dir, run),
        snapshots=SnapshotShelf(run_dir.state, run=run, outer=outer, store=store, identity=lobby.identity),
        log=lobby.log,
    )
    place: Place = (None, lobby.url)
    worker = Worker("join")
    try:
        if not await worker.call(restore_state, parts):
            position = await catch_up(lobby, outer, store, worker, whole_chain=True)
            parts.snapshot, place = position.snapshot, position.place or place
    finally:
        worker.close()
    parts.kept_blobs = frozenset(joined_blobs(run_dir))
    return parts, place
