"""A peer that did not found the run, in its node thread: follows the chain, and if it is a learner, hands in work.

The first half (`enter`) needs only the invite; the second (`follow`) needs the model's layout, which a script brings
late. What a learner resumes from is its own checkpoint: Theta at its anchors, its books, and by its own tape the count
of steps that died with the process before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from geo_diloco.config import PeerConfig
from geo_diloco.errors import DigestMismatch, RefusedError, RunDirError, TapeError
from geo_diloco.manifest import FragmentId, Seq
from geo_diloco.node.carrying import limits_text
from geo_diloco.node.joining import (
    Lobby,
    Position,
    blobs_at_hand,
    catch_up,
    chain_of,
    check_same_layout,
    joined_blobs,
)
from geo_diloco.node.keeping import SnapshotKeeper
from geo_diloco.node.learning import Learning, LearningParts, blobs_to_keep
from geo_diloco.node.machine import hello_facts
from geo_diloco.node.rundir import disk_failure
from geo_diloco.node.station import UPDATES_BYTES_KEPT, Station, StationParts, directory_status
from geo_diloco.numerics.fragments import Layout, bytes_from_vector, fragment_digest
from geo_diloco.protocol.effects import PersistAccounts, ReadyToLeave, RefusedForGood, RunFinished
from geo_diloco.protocol.events import Resumed, SnapshotLoaded
from geo_diloco.protocol.messages import Snapshot
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.driver import Worker
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.snapshots import SnapshotShelf, loaded_from, snapshots_in
from geo_diloco.runtime.store import BlobStore
from geo_diloco.tape import from_json, tokens_lost_after
from geo_diloco.training.checkpoint import LearnerCheckpoint, load_learner

LEAVE_S = 1.5
SAVE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What the training thread begins with."""

    theta: list[Tensor]
    """Per fragment, as of the versions that the core takes for adopted."""
    checkpoint: LearnerCheckpoint | None


class Member:
    """Everything here belongs to the node thread's loop, except where said."""

    def __init__(self, lobby: Lobby, config: PeerConfig) -> None:
        self.lobby = lobby
        self._config = config
        self._store = BlobStore(lobby.run_dir.blobs)
        self._worker = Worker("fold")
        self._chain: ChainCopy | None = None
        self._outer: OuterState | None = None
        self._shelf: SnapshotShelf | None = None
        """Of a peer that does not train; a learner has checkpoints."""
        self._station: Station | None = None
        self.learning: Learning | None = None
        self.finished = asyncio.Event()
        self.ready_to_leave = asyncio.Event()
        self.failure: BaseException | None = None

    # ---- start

    async def follow(self, layout: Layout, *, trains: bool) -> Begun:
        """Get the state and go on the air. Raises RefusedError, RunDirError or LayoutError."""
        lobby = self.lobby
        chain = self._chain = self._chain or chain_of(lobby.run_dir, lobby.invite.run)
        saved = load_learner(lobby.run_dir.checkpoint) if trains else None
        accounts = _accounts_of(saved)
        kept = [] if trains else snapshots_in(lobby.run_dir.state)
        self._sweep(chain, accounts, kept)
        outer = OuterState(layout, with_momentum=not trains, with_residual=False)
        if not trains:
            self._shelf = self._make_shelf(outer)
        if saved is not None and accounts is not None:
            at = accounts.resume_at
            await check_same_layout(lobby, lobby.url, at.layout_digest, at.num_elements, layout)
            position = self._resume_position(outer, saved, at)
        elif (position_kept := await self._own_position(outer, kept)) is not None:
            position = position_kept
        else:
            position = await catch_up(lobby, outer, self._store, self._worker, whole_chain=False)
        self._outer = position.outer
        theta = [position.outer.theta(FragmentId(p)) for p in range(layout.num_fragments)]
        resumed = None if accounts is None else self._resumed(accounts)  # reads the tape before this process writes
        station = self._build(position, chain, trains=trains)
        station.load(position.snapshot, away_ms=0, resumed=resumed)
        station.go_on_air(first=position.place or (None, lobby.url))
        station.run(station.telling.run(), name="telling")
        if self._shelf is not None:
            keeper = SnapshotKeeper(station.driver, self._worker, self._shelf, log=lobby.log)
            station.run(keeper.run(), name="snapshots")
        return Begun(theta=theta, checkpoint=saved)

    def _sweep(self, chain: ChainCopy, accounts: PersistAccounts | None, kept: Sequence[Snapshot]) -> None:
        """What came before the state that it goes on from is kept for a replay, and for others, while it is little."""
        run_dir = self.lobby.run_dir
        after = [snapshot.seq for snapshot in kept] if accounts is None else [accounts.resume_at.seq]
        updates = chain.newest_updates(UPDATES_BYTES_KEPT, after=min(after, default=Seq(2**62)))
        self._store.sweep(blobs_to_keep(updates | joined_blobs(run_dir) | blobs_at_hand(run_dir), accounts))

    def _make_shelf(self, outer: OuterState) -> SnapshotShelf:
        lobby = self.lobby
        lobby.run_dir.state.mkdir(exist_ok=True)
        return SnapshotShelf(
            lobby.run_dir.state,
            run=lobby.invite.run,
            outer=outer,
            store=self._store,
            identity=lobby.identity,
        )

    async def _own_position(self, outer: OuterState, kept: Sequence[Snapshot]) -> Position | None:
        """Where a peer that does not train stood when it kept a snapshot last: only what came after it is fetched."""
        if self._shelf is None or not kept:
            return None
        lobby = self.lobby
        await check_same_layout(lobby, lobby.url, kept[-1].layout_digest, kept[-1].num_elements, outer.layout)
        snapshot = await self._worker.call(self._shelf.restore)
        if snapshot is None:
            return None
        lobby.log.note("resume", f"going on after entry {snapshot.seq} from this peer's own snapshot")
        return Position(outer, loaded_from(snapshot, whole_chain=False))

    def _resume_position(self, outer: OuterState, saved: LearnerCheckpoint, at: SnapshotLoaded) -> Position:
        """Theta at our own anchors; the core asks for what came after."""
        try:
            for p, head in enumerate(at.heads):
                outer.load_fragment(
                    FragmentId(p),
                    head.version,
                    theta=bytes_from_vector(saved.tensors[f"anchor.{p}"]),
                    momentum=None,
                    state_digest=head.state_digest,
                    momentum_digest=head.momentum_digest,
                )
        except (DigestMismatch, KeyError) as exc:
            folder = self.lobby.run_dir.checkpoint
            raise RunDirError(f"the checkpoint in {folder} is damaged ({exc}); remove it to start afresh") from exc
        return Position(outer, at)

    def _resumed(self, accounts: PersistAccounts) -> Resumed:
        """What the process before trained after this checkpoint is lost; its tape knows how much."""
        steps, tokens = accounts.step, accounts.tokens
        try:
            lost_steps, lost_tokens = tokens_lost_after(self.lobby.run_dir.tape, steps, tokens)
        except TapeError as exc:
            self.lobby.log.note("resume", f"the tape can't tell what was lost: {exc}", level="warning")
            lost_steps = lost_tokens = 0
        self.lobby.log.note(
            "resume", f"going on after step {steps} from this peer's own checkpoint, {lost_steps} steps were lost"
        )
        return Resumed(steps, tokens, accounts.accounts, lost_steps, lost_tokens)

    def _build(self, position: Position, chain: ChainCopy, *, trains: bool) -> Station:
        lobby = self.lobby
        parts = StationParts(
            run_dir=lobby.run_dir,
            run=lobby.invite.run,
            manifest=lobby.manifest,
            identity=lobby.identity,
            token=lobby.invite.token,
            log=lobby.log,
            directory=lobby.directory,
            bulk=lobby.bulk,
            book=lobby.book,
            worker=self._worker,
            outer=position.outer,
            store=self._store,
            chain=chain,
            shelf=self._shelf,
            role="learner" if trains else "follower",
            hello=hello_facts(pace_ms=self._config.pace_ms if trains else 0, limits=limits_text(self._config)),
            may_serve=False,
            may_elect=self._config.elector,
        )
        station = self._station = Station(parts, on_failure=self._fail)
        if not trains:
            station.driver.interpret(
                {
                    RunFinished: lambda effect: self.finished.set(),
                    ReadyToLeave: lambda effect: self._ready_to_leave(),
                    RefusedForGood: lambda effect: self._fail(RefusedError(effect.reason)),
                }
            )
            return station
        self.learning = Learning(
            LearningParts(
                driver=station.driver,
                worker=self._worker,
                outer=position.outer,
                store=self._store,
                donor=station.donors,
                following=station.following,
                manifest=lobby.manifest,
                checkpoints=lobby.run_dir.checkpoint,
                log=lobby.log,
                connection=lambda: station.seeker.connection,
            )
        )
        self.finished = self.learning.finished
        station.driver.interpret(self.learning.interpreters())
        station.driver.interpret({ReadyToLeave: lambda effect: self._ready_to_leave()})
        return station

    def _ready_to_leave(self) -> None:
        if self._station is not None:
            self._station.leave()
        self.ready_to_leave.set()

    def _fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = disk_failure(self.lobby.run_dir.root, failure) if isinstance(failure, OSError) else failure
        if self.learning is not None:
            self.learning.mailbox.fail(self.failure)
            self.learning.started.set()

    # ---- end

    async def leave(self, *, last_save: int | None) -> None:
        """Hand in what is on its way, have the last checkpoint on disk, say Goodbye, close everything. Each is bounded,
        and what need not wait for another does not: a busy machine takes its time over every one of them."""
        station = self._station
        if station is not None and self.failure is None:
            station.request_stop("leaving")
            await asyncio.gather(self._wait_saved(last_save), self._wait_handed_in())
            await station.wait_links_closed(LEAVE_S)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._go_off_air())
                group.create_task(self.lobby.directory.close())
        finally:
            self._worker.close()
            if self._chain is not None:
                await asyncio.to_thread(self._chain.close)

    async def _wait_handed_in(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.ready_to_leave.wait()
        except TimeoutError:
            self.lobby.log.note("leave", "not everything was handed in", level="warning")

    async def _go_off_air(self) -> None:
        if self._station is not None:
            await self._station.close(LEAVE_S)
            self._write_summary()
        await self.lobby.bulk.close()  # not before those who fetch by it have ended

    async def _wait_saved(self, last_save: int | None) -> None:
        if self.learning is None or last_save is None:
            return
        log = self.lobby.log
        try:
            async with asyncio.timeout(SAVE_S):
                await self.learning.wait_saved(last_save)
            if self._station is not None and self._station.core.ledger.finished is None:
                log.note("leave", f"saved in {self.lobby.run_dir.root}: join with the same invite to go on from there")
        except TimeoutError:
            log.note("leave", "the last checkpoint was not written in time", level="warning")
        except RunDirError as exc:
            log.note("leave", f"the last checkpoint could not be written: {exc}", level="warning")

    def status(self) -> Mapping[str, Any]:
        """This peer's own view of the run."""
        lobby, station = self.lobby, self._station
        facts: dict[str, Any] = {
            "run": lobby.invite.run,
            "name": lobby.manifest.name,
            "peer": lobby.identity.peer_id,
            "connected": station is not None and station.seeker.connection != 0,
            "bytes_in": lobby.counters.bulk_in + lobby.counters.control_in,
            "bytes_out": lobby.counters.bulk_out + lobby.counters.control_out,
        }
        facts |= {"pace_ms": self._config.pace_ms} if self._config.pace_ms else {}
        facts |= lobby.bulk.lanes.status() | directory_status(lobby.directory)
        if station is None:
            return facts
        status = station.core.status(station.driver.now())
        if status.training is not None:
            mine = status.training
            facts |= {"step": mine.step, "tokens": mine.tokens, "loss": mine.loss}
        return facts | {
            "role": status.role,
            "term": status.term,
            "seq": status.seq,
            "finished": status.finished is not None,
            "tokens_total": status.tokens_total,
            "commits": status.num_commits,
            "progress": status.progress,
            "rounds": station.telling.num_rounds,
            "versions": list(status.versions),
            "uplink": status.uplink,
        }

    def _write_summary(self) -> None:
        """This peer's last word: where it stands, and the digests of the Theta it holds."""
        outer = self._outer
        assert outer is not None
        fragments = [FragmentId(p) for p in range(outer.layout.num_fragments)]
        summary = dict(self.status()) | {
            "versions": [outer.version(p) for p in fragments],
            "state_digests": [fragment_digest(outer.theta(p)) for p in fragments],
        }
        try:
            atomic_write(self.lobby.run_dir.summary, json.dumps(summary).encode())
        except OSError as exc:
            self.lobby.log.note("leave", f"no summary: {exc}", level="warning")


def _accounts_of(saved: LearnerCheckpoint | None) -> PersistAccounts | None:
    if saved is None:
        return None
    try:
        accounts = from_json(json.loads(saved.accounts_json), where="accounts.json")
    except (ValueError, TapeError) as exc:
        raise RunDirError(f"the checkpoint's books can't be read: {exc}") from exc
    if not isinstance(accounts, PersistAccounts):
        raise RunDirError("the checkpoint's books are something else")
    return accounts
