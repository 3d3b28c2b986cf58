"""The hands of a peer that keeps the chain: entries and updates onto its disk, and updates into the outer state.

Fetches are tried for as long as the core wants them: a broken connection is waited out, and only the word of a syncer
that has the chain and not the blob makes an update lost. An update may also be brought by an elector while we wait.
Theta of every version that was reached is kept until the training thread has adopted it or a later one, so an adoption
gets exactly the version it names.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from geo_diloco.errors import (
    BlobError,
    DigestMismatch,
    FrameError,
    LocalProtocolError,
    RemoteProtocolError,
    RunDirError,
    TransferError,
)
from geo_diloco.manifest import Digest, FragmentId, Version
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import (
    ApplyUpdate,
    FetchEntries,
    FetchFragment,
    KeepEntry,
    Prune,
)
from geo_diloco.protocol.events import (
    Applied,
    ApplyFailed,
    EntryArrived,
    EntryStored,
    FragmentReplaced,
    UpdateLost,
)
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.driver import Driver, Interpreter, Worker
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.session import TransferRefused
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed

FETCHES_MAX = 4
"""Updates fetched at once."""
ENTRIES_PER_FETCH = 256
BACKOFF_S = 0.2
BACKOFF_S_MAX = 5.0
DISK_RETRY_S = 1.0


class Donor(Protocol):
    """Where a follower gets things from. Every method waits for a donor to be reachable, however long that takes;
    TransferError says that one try broke off."""

    async def entries(self, from_seq: int, limit: int) -> Sequence[Signed]: ...
    async def blob(self, blob: BlobRef) -> None:
        """Have it in the store. Raises TransferRefused if the donor has the chain and no such blob."""


class Replacing(Protocol):
    """Brings a fragment to a version by other means than the next update (`replacing.py`)."""

    async def replace(self, fragment: FragmentId, version: Version) -> FragmentReplaced: ...


@dataclass(frozen=True, kw_only=True)
class FollowingParts:
    """What a follower works with."""

    driver: Driver
    worker: Worker
    outer: OuterState
    chain: ChainCopy
    store: BlobStore
    donor: Donor
    replacing: Replacing
    log: EventLog
    is_elector: bool = False
    """Entries are synced before they count as stored."""


class Following:
    """Interprets what the core asks of everybody who keeps the chain."""

    def __init__(self, parts: FollowingParts) -> None:
        self._p = parts
        self._slots = asyncio.Semaphore(FETCHES_MAX)
        self._wanted_from: int | None = None
        self._is_fetching = False
        self._asked = asyncio.Event()
        self._awaited: dict[Digest, tuple[BlobRef, asyncio.Event]] = {}
        """Updates that are on their way, by their own digest; set when somebody has brought it."""
        self._reached: dict[FragmentId, OrderedDict[Version, Tensor]] = {}

    def interpreters(self) -> Mapping[type, Interpreter]:
        driver = self._p.driver
        return {
            FetchEntries: self._fetch_entries,
            KeepEntry: self._keep,
            ApplyUpdate: lambda effect: driver.start(self._apply(effect), name="apply update"),
            FetchFragment: lambda effect: driver.start(self._fetch_fragment(effect), name="fetch fragment"),
            Prune: self._prune,
        }

    # ---- entries

    def take_entry(self, signed: Signed) -> None:
        """An entry came, from anyone. Raises RemoteProtocolError if it is not what it claims."""
        p = self._p
        if p.driver.core.election.knows(signed.digest):
            return
        entry = p.chain.verify(signed)
        p.chain.arrives(signed, entry)
        p.driver.feed(EntryArrived(entry, signed.digest, signed.signer))
        p.chain.passes(signed.digest)

    def _fetch_entries(self, effect: FetchEntries) -> None:
        wanted = self._wanted_from
        self._wanted_from = effect.from_seq if wanted is None else min(wanted, effect.from_seq)
        self._asked.set()
        if not self._is_fetching:
            self._is_fetching = True
            self._p.driver.start(self._fetch_wanted_entries(), name="fetch entries")

    async def _fetch_wanted_entries(self) -> None:
        backoff = Backoff()
        while self._wanted_from is not None:
            from_seq, self._wanted_from = self._wanted_from, None
            try:
                await self._fetch_entries_once(from_seq)
                backoff.reset()
            except (TransferError, RemoteProtocolError):
                again = self._wanted_from
                self._wanted_from = from_seq if again is None else min(again, from_seq)
                if again is None:
                    await self._pause(backoff)
        self._is_fetching = False

    async def _pause(self, backoff: Backoff) -> None:
        """After a fetch that broke off; ended by being asked again, because somebody else may serve now."""
        self._asked.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(backoff.next_s()):
                await self._asked.wait()

    async def _fetch_entries_once(self, from_seq: int) -> None:
        while True:
            batch = await self._p.donor.entries(from_seq, ENTRIES_PER_FETCH)
            for signed in batch:
                self.take_entry(signed)
            if not batch:
                return
            from_seq += len(batch)

    # ---- onto the disk

    def _keep(self, effect: KeepEntry) -> None:
        self._p.chain.take(effect.digest)
        self._p.driver.start(self._store(effect), name="keep entry")

    async def _store(self, effect: KeepEntry) -> None:
        """Record and update. A full disk is waited out."""
        await self._write(effect.digest)
        if effect.update is not None and not self._p.store.has(effect.update):
            try:
                await self._fetch_update(effect.update)
            except TransferRefused as exc:
                self._p.driver.feed(UpdateLost(effect.digest, str(exc)))
                return
        self._p.driver.feed(EntryStored(effect.digest))

    async def _write(self, digest: Digest) -> None:
        p = self._p
        while not p.chain.is_written(digest):
            try:
                await p.chain.write(digest, sync=p.is_elector)
            except RunDirError as exc:
                p.log.note("chain", f"an entry can't be written, trying again: {exc}", level="error")
                await asyncio.sleep(DISK_RETRY_S)

    async def _fetch_update(self, update: BlobRef) -> None:
        """By a fetch of ours, or by whoever brings it meanwhile. Raises TransferRefused if it can't be had."""
        _, brought = self._awaited.setdefault(update.digest, (update, asyncio.Event()))
        arriving = asyncio.ensure_future(brought.wait())
        try:
            while not self._p.store.has(update):
                fetching = asyncio.ensure_future(self._fetch_once(update))
                try:
                    await asyncio.wait({fetching, arriving}, return_when=asyncio.FIRST_COMPLETED)
                    if fetching.done():
                        fetching.result()
                finally:
                    fetching.cancel()
                    await asyncio.gather(fetching, return_exceptions=True)
                if brought.is_set() and not self._p.store.has(update):
                    brought.clear()
                    arriving = asyncio.ensure_future(brought.wait())
        finally:
            arriving.cancel()
            self._awaited.pop(update.digest, None)

    async def _fetch_once(self, update: BlobRef) -> None:
        backoff = Backoff()
        while not self._p.store.has(update):
            try:
                async with self._slots:
                    await self._p.donor.blob(update)
            except TransferRefused:
                raise
            except (TransferError, BlobError):
                await backoff.wait()

    def accepts(self, digest: Digest) -> BlobRef | None:
        """The update of that digest, if it is awaited: an elector may bring it."""
        awaited = self._awaited.get(digest)
        return None if awaited is None else awaited[0]

    def blob_arrived(self, blob: BlobRef) -> None:
        awaited = self._awaited.get(blob.digest)
        if awaited is not None:
            awaited[1].set()

    # ---- into the outer state

    async def _apply(self, effect: ApplyUpdate) -> None:
        p = self._p
        try:
            theta = await p.worker.call(lambda: p.outer.apply(effect, p.store.get(effect.update)))
        except (FrameError, BlobError, DigestMismatch, LocalProtocolError) as exc:
            p.driver.feed(ApplyFailed(effect.fragment, effect.version, str(exc)))
            return
        self.keep_theta(effect.fragment, effect.version, theta)
        p.driver.feed(Applied(effect.fragment, effect.version, effect.state_digest))

    async def _fetch_fragment(self, effect: FetchFragment) -> None:
        event = await self._p.replacing.replace(effect.fragment, effect.version)
        theta = await self._p.worker.call(self._p.outer.theta, effect.fragment)
        self.keep_theta(effect.fragment, event.version, theta)
        self._p.driver.feed(event)

    # ---- what is not needed any more

    def _prune(self, effect: Prune) -> None:
        self._p.chain.let_go(effect.entries, effect.updates)
        if effect.updates:
            self._p.driver.start(self._delete(effect.updates), name="prune")

    async def _delete(self, updates: Sequence[BlobRef]) -> None:
        def delete() -> None:
            for update in updates:
                self._p.store.delete(update)

        try:
            await asyncio.to_thread(delete)
        except BlobError as exc:
            self._p.log.note("prune", f"updates that are not needed any more stay: {exc}", level="warning")

    # ---- reached versions

    def keep_theta(self, fragment: FragmentId, version: Version, theta: Tensor) -> None:
        self._reached.setdefault(fragment, OrderedDict())[version] = theta

    def theta(self, fragment: FragmentId, version: Version) -> Tensor:
        """Theta_p at that version, for an adoption; earlier ones are let go of. Raises LocalProtocolError."""
        reached = self._reached.get(fragment, OrderedDict())
        theta = reached.get(version)
        if theta is None:
            raise LocalProtocolError(f"version {version} of fragment {fragment} is not at hand")
        for older in [each for each in reached if each < version]:
            del reached[older]
        return theta


class Backoff:
    """Waits that double, with jitter, up to a bound."""

    def __init__(self, first_s: float = BACKOFF_S, max_s: float = BACKOFF_S_MAX) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(self._max_s, 2 * self._next_s)
        return wait_s * random.uniform(0.5, 1.5)

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s())
