"""A peer that did not found the run, in its node thread: follows the chain, and if it is a learner, hands in work.

The first half (`enter`) needs only the invite; the second (`follow`) needs the model's layout, which a script brings
late. What a learner resumes from is its own checkpoint: Theta at its anchors, its books, and by its own tape the count
of steps that died with the process before.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from geo_diloco.config import PeerConfig
from geo_diloco.errors import (
    DigestMismatch,
    DirectoryError,
    RefusedError,
    RemoteProtocolError,
    RunDirError,
    TapeError,
    TransferError,
)
from geo_diloco.manifest import WIRE_VERSION, BootId, FragmentId
from geo_diloco.node.joining import (
    Lobby,
    Position,
    catch_up,
    chain_of,
    check_layout,
    claimed_syncers,
    entries_after,
    fetch_chain,
    joined_blobs,
)
from geo_diloco.node.learning import Learning, LearningParts, blobs_to_keep
from geo_diloco.node.machine import hello_facts
from geo_diloco.node.rundir import disk_failure
from geo_diloco.numerics.fragments import Layout, bytes_from_vector, fragment_digest
from geo_diloco.protocol.effects import PersistAccounts, ReadyToLeave, RefusedForGood, RunFinished
from geo_diloco.protocol.events import Resumed, StopRequested
from geo_diloco.protocol.messages import Commit
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.control import ControlLink, connect_control
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.donor import SyncerDonor
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.following import Backoff, Following, FollowingParts
from geo_diloco.runtime.links import DialedLink, Sealer
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.records import PeerRecord
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import url_from_address
from geo_diloco.tape import Boot, TapeWriter, from_json, tokens_lost_after
from geo_diloco.training.checkpoint import LearnerCheckpoint, load_learner

LEAVE_S = 1.5
SAVE_S = 10.0
PUBLISH_EVERY_S = 20.0


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
        self._boot = BootId(secrets.token_hex(8))
        self._store = BlobStore(lobby.run_dir.blobs)
        self._worker = Worker("fold")
        self._donor = SyncerDonor(
            lobby.session, self._store, run=lobby.invite.run, signer=lobby.manifest.founder, counters=lobby.counters
        )
        self._donor.found_at(lobby.url)
        self._chain: ChainCopy | None = None
        self._driver: Driver | None = None
        self._outer: OuterState | None = None
        self._link: DialedLink | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._first_look = True
        self.learning: Learning | None = None
        self.finished = asyncio.Event()
        self.ready_to_leave = asyncio.Event()
        self.failure: BaseException | None = None

    # ---- start

    async def follow(self, layout: Layout, *, trains: bool) -> Begun:
        """Get the state and go on the air. Raises RefusedError, RunDirError or LayoutError."""
        lobby = self.lobby
        manifest = lobby.manifest
        chain = self._chain = self._chain or chain_of(lobby.run_dir, lobby.invite.run, manifest.founder)
        saved = load_learner(lobby.run_dir.checkpoint) if trains else None
        accounts = _accounts_of(saved)
        self._sweep(chain, accounts)
        if saved is not None and accounts is not None:
            position = await self._resume_position(layout, chain, saved, accounts)
        else:
            position = await catch_up(lobby, layout, chain, self._donor, self._store, self._worker, follower=not trains)
        self._outer = position.outer
        theta = [position.outer.theta(FragmentId(p)) for p in range(layout.num_fragments)]
        resumed = None if accounts is None else self._resumed(accounts)  # reads the tape before this process writes
        driver = self._build(layout, position, trains=trains)
        driver.feed(position.snapshot)
        if resumed is not None:
            driver.feed(resumed)
        for event in position.entries:
            driver.feed(event)
        self._tasks.append(asyncio.create_task(self._stay_connected(), name="link"))
        self._tasks.append(asyncio.create_task(self._publish(trains), name="publish"))
        self._tasks.append(asyncio.create_task(self._watch(driver), name="watch"))
        for task in self._tasks:
            task.add_done_callback(self._task_done)
        return Begun(theta=theta, checkpoint=saved)

    def _sweep(self, chain: ChainCopy, accounts: PersistAccounts | None) -> None:
        updates = {entry.update.digest for _, entry in chain.entries() if isinstance(entry, Commit)}
        self._store.sweep(blobs_to_keep(updates | joined_blobs(self.lobby.run_dir), accounts))

    async def _resume_position(
        self, layout: Layout, chain: ChainCopy, saved: LearnerCheckpoint, accounts: PersistAccounts
    ) -> Position:
        """Theta at our own anchors, and the entries after where they stand."""
        outer = OuterState(layout, with_momentum=False, with_residual=False)
        await self._retry_chain(chain)
        check_layout(chain, layout)
        try:
            for p, head in enumerate(accounts.resume_at.heads):
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
        return Position(outer, accounts.resume_at, entries_after(chain, accounts.resume_at.seq))

    async def _retry_chain(self, chain: ChainCopy) -> None:
        backoff = Backoff()
        while True:
            try:
                return await fetch_chain(chain, self._donor)
            except (TransferError, RemoteProtocolError) as exc:
                self.lobby.log.note("join", f"fetching the chain, trying again: {exc}", level="warning")
                await backoff.wait()

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

    def _build(self, layout: Layout, position: Position, *, trains: bool) -> Driver:
        lobby = self.lobby
        boot = Boot(
            peer=lobby.identity.peer_id,
            boot=self._boot,
            role="learner" if trains else "follower",
            run=lobby.invite.run,
            layout_digest=layout.digest,
            hello=hello_facts(),
            rules=lobby.manifest.rules(),
        )
        assert self._chain is not None
        driver = Driver(boot.fresh_core(), log=lobby.log, tape=TapeWriter(lobby.run_dir.tape, boot))
        self._driver = driver
        parts = FollowingParts(
            driver=driver,
            worker=self._worker,
            outer=position.outer,
            chain=self._chain,
            store=self._store,
            donor=self._donor,
        )
        following = Following(parts)
        self._link = DialedLink(
            driver,
            Sealer(lobby.identity, run=lobby.invite.run, boot=self._boot, token=lobby.invite.token),
            connect=self._connect,
            locate=self._locate,
            take_entry=following.entry_announced,
            log=lobby.log,
        )
        driver.interpret(following.interpreters())
        driver.interpret(self._link.interpreters())
        if trains:
            self.learning = Learning(
                LearningParts(
                    driver=driver,
                    worker=self._worker,
                    outer=position.outer,
                    store=self._store,
                    donor=self._donor,
                    following=following,
                    manifest=lobby.manifest,
                    checkpoints=lobby.run_dir.checkpoint,
                    log=lobby.log,
                    connection=lambda: 0 if self._link is None else self._link.connection,
                )
            )
            self.finished, self.ready_to_leave = self.learning.finished, self.learning.ready_to_leave
            driver.interpret(self.learning.interpreters())
        else:
            driver.interpret(
                {
                    RunFinished: lambda effect: self.finished.set(),
                    ReadyToLeave: lambda effect: self.ready_to_leave.set(),
                    RefusedForGood: lambda effect: self._fail(RefusedError(effect.reason)),
                }
            )
        return driver

    # ---- on the air

    def _connect(self, url: str) -> AbstractAsyncContextManager[ControlLink]:
        lobby = self.lobby
        return connect_control(
            lobby.session,
            url,
            lobby.identity,
            lobby.invite.run,
            expected_peer=lobby.manifest.founder,
            counters=lobby.counters,
        )

    async def _locate(self) -> str:
        """The syncer's URL: at first where the manifest came from, afterwards as the directory says."""
        if self._first_look:
            self._first_look = False
            return self.lobby.url
        backoff = Backoff()
        while True:
            for record in await claimed_syncers(self.lobby):
                try:
                    url = url_from_address(record.address, peer=record.peer)
                except RemoteProtocolError as exc:
                    self.lobby.log.note("link", str(exc), level="warning")
                    continue
                self._donor.found_at(url)
                return url
            await backoff.wait()

    async def _stay_connected(self) -> None:
        assert self._link is not None
        await self._link.run()
        if self._link.refused is not None:
            self._fail(self._link.refused)

    async def _publish(self, trains: bool) -> None:
        lobby = self.lobby
        while True:
            assert self._driver is not None
            ledger = self._driver.core.ledger
            record = PeerRecord(
                run=lobby.invite.run,
                peer=lobby.identity.peer_id,
                roles=("learner",) if trains else ("follower",),
                address="",
                term=ledger.term,
                boot=self._boot,
                head_seq=ledger.seq,
                wire_version=WIRE_VERSION,
            )
            try:
                await lobby.directory.publish(lobby.invite.run, record)
            except DirectoryError as exc:
                lobby.log.note("directory", f"can't publish: {exc}", level="warning")
            await asyncio.sleep(PUBLISH_EVERY_S)

    async def _watch(self, driver: Driver) -> None:
        try:
            await driver.wait_closed()
        except Exception as exc:
            self._fail(exc)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """None of them ends by itself with an exception; if one does, the peer must not live on without it."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = disk_failure(self.lobby.run_dir.root, failure) if isinstance(failure, OSError) else failure
        if self.learning is not None:
            self.learning.mailbox.fail(self.failure)
            self.learning.started.set()

    # ---- end

    def request_stop(self, reason: str) -> None:
        if self._driver is not None:
            self._driver.feed(StopRequested(reason))

    async def leave(self, *, last_save: int | None) -> None:
        """Hand in what is on its way (bounded), have the last checkpoint on disk, say Goodbye, close everything."""
        lobby = self.lobby
        if self._driver is not None and self.failure is None:
            self.request_stop("leaving")
            if last_save is not None and self.learning is not None:
                try:
                    async with asyncio.timeout(SAVE_S):
                        await self.learning.wait_saved(last_save)
                except TimeoutError:
                    lobby.log.note("leave", "the last checkpoint was not written in time", level="warning")
                except RunDirError as exc:
                    lobby.log.note("leave", f"the last checkpoint could not be written: {exc}", level="warning")
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self.ready_to_leave.wait()
                    await asyncio.wait(self._tasks[:1], timeout=LEAVE_S)
            except TimeoutError:
                lobby.log.note("leave", "not everything was handed in", level="warning")
        try:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LEAVE_S)
            if self._driver is not None:
                await self._driver.close()
                self._write_summary()
        finally:
            await lobby.close()
            self._worker.close()
            if self._chain is not None:
                await asyncio.to_thread(self._chain.close)

    def status(self) -> Mapping[str, Any]:
        """This peer's own view of the run."""
        lobby = self.lobby
        facts: dict[str, Any] = {
            "run": lobby.invite.run,
            "name": lobby.manifest.name,
            "peer": lobby.identity.peer_id,
            "connected": self._link is not None and self._link.connection != 0,
            "bytes_in": lobby.counters.bulk_in + lobby.counters.control_in,
            "bytes_out": lobby.counters.bulk_out + lobby.counters.control_out,
        }
        if self._driver is None:
            return facts
        status = self._driver.core.status(self._driver.now())
        return facts | {
            "role": status.role,
            "term": status.term,
            "seq": status.seq,
            "finished": status.finished is not None,
            "tokens_total": status.tokens_total,
            "commits": status.num_commits,
            "progress": status.progress,
            "versions": list(status.versions),
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
