"""The syncer's hands: signs and stores entries, takes contributions in, and merges.

The order on disk is the point of this file: a merged update's bytes are in the blob store before the core hears
`Merged`; an entry is signed, appended and fsynced before the core hears `Sealed`; only then does the visible state move
and anybody else learn of it. So a process that dies at any moment has shown nothing that its disk can't show again.
What the worker thread does is merge, and move the state: checks and disks don't take it, and a commit doesn't wait for
it. The move is in line there when `Sealed` is said, before whatever is asked for because of that.
Every peer that could be elected has these hands; they rest while it does not serve.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from geo_diloco.errors import BlobError, RunDirError
from geo_diloco.manifest import Digest, RunManifest, Seq
from geo_diloco.observability import Counters, EventLog
from geo_diloco.protocol.effects import (
    AcceptBlob,
    Announce,
    CheckContribution,
    ForgetBlob,
    Merge,
    Seal,
)
from geo_diloco.protocol.events import (
    BlobArrived,
    ContributionChecked,
    MergeFailed,
    Sealed,
)
from geo_diloco.protocol.messages import BlobRef, Commit, Entry
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.driver import Driver, Interpreter, Worker
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import MergeError, OuterState
from geo_diloco.runtime.snapshots import SnapshotShelf
from geo_diloco.runtime.store import BlobStore, blob_ref
from geo_diloco.runtime.wire import Signed, pack_line, seal_entry

ANNOUNCED_KEPT = 64
CHECKED_AT_ONCE = 16
"""Contributions. Each way to another thread and back waits for both threads to get a processor."""
CHECKED_BYTES = 256 << 10
"""Of contributions checked at once: larger ones are better shared out among the threads."""
DISK_RETRY_S = 1.0


class Broadcast(Protocol):
    """Whoever holds the control connections."""

    def broadcast(self, line: str | bytes) -> None:
        """Send a line, as it is or packed, to every connected peer."""


def _nothing(entry: Entry) -> None:
    """Nobody wants to be told."""


@dataclass(frozen=True, kw_only=True)
class ServingParts:
    """What a syncer works with."""

    driver: Driver
    worker: Worker
    outer: OuterState
    chain: ChainCopy
    store: BlobStore
    snapshots: SnapshotShelf
    identity: Identity
    manifest: RunManifest
    links: Broadcast
    counters: Counters
    log: EventLog
    keep_contributions: bool = False


class Serving:
    """Interprets a syncer's effects."""

    def __init__(self, parts: ServingParts, *, on_sealed: Callable[[Entry], None] = _nothing) -> None:
        """`on_sealed` is told every entry that is on disk."""
        self._p = parts
        self._on_sealed = on_sealed
        self._accepted: dict[Digest, BlobRef] = {}
        self._sealed: OrderedDict[Seq, str | bytes] = OrderedDict()
        """As sent to everybody."""
        self._updates: set[Digest] = set()
        """Made here, on the chain or about to be."""
        self._merged: set[Digest] = set()
        """Contributions that are kept: of commits sealed here, and of those on the chain when we started."""
        if parts.keep_contributions:
            for _, entry in parts.chain.entries():
                self._keep_merged(entry)
        self._to_delete: dict[Digest, BlobRef] = {}
        """Forgotten, and still on the disk or just being deleted."""
        self._to_check: deque[CheckContribution] = deque()
        self._num_checking = 0

    def interpreters(self) -> Mapping[type, Interpreter]:
        return {
            Seal: lambda effect: self._p.driver.start(self._seal(effect), name=f"seal {effect.entry.header.seq}"),
            Announce: self._announce,
            AcceptBlob: self._accept,
            ForgetBlob: self._forget,
            CheckContribution: self._check_soon,
            Merge: lambda effect: self._p.driver.start(self._merge(effect), name=f"merge {effect.fragment}"),
        }

    # ---- the chain

    async def _seal(self, effect: Seal) -> None:
        p = self._p
        signed, line = await asyncio.to_thread(self._sign, effect.entry)  # tens of ms with a thousand participants
        await self._append(signed, effect.entry)
        if p.keep_contributions:
            self._keep_merged(effect.entry)
        advanced = p.worker.begin(self._advance, effect.entry)  # behind what merges now; who asks later finds it done
        self._sealed[effect.entry.header.seq] = line
        if len(self._sealed) > ANNOUNCED_KEPT:
            self._sealed.popitem(last=False)
        self._on_sealed(effect.entry)
        p.driver.feed(Sealed(effect.entry.header.term, effect.entry.header.seq, signed.digest))
        await advanced

    def _sign(self, entry: Entry) -> tuple[Signed, str | bytes]:
        signed = seal_entry(entry, self._p.identity)
        return signed, pack_line(signed.to_line())

    async def _append(self, signed: Signed, entry: Entry) -> None:
        """On disk, however long that takes: a full disk holds the run up, visibly, and doesn't end it."""
        while True:
            try:
                return await self._p.chain.append(signed, entry)
            except RunDirError as exc:
                text = f"entry {entry.header.seq} can't be written, trying again: {exc}"
                self._p.log.note("chain", text, level="error")
            await asyncio.sleep(DISK_RETRY_S)

    def _advance(self, entry: Entry) -> None:
        """Make what is committed visible. If another's commit has taken its place meanwhile, ours is of a chain that
        does not count, and the core finds that out."""
        if isinstance(entry, Commit) and self._p.outer.is_staged(entry.fragment, entry.version):
            self._p.outer.commit(entry.fragment, entry.version)

    def _announce(self, effect: Announce) -> None:
        line = self._sealed.get(effect.seq)
        if line is not None:
            self._p.links.broadcast(line)

    # ---- contributions

    def _keep_merged(self, entry: Entry) -> None:
        if isinstance(entry, Commit):
            self._merged.update(each.contribution.digest for each in entry.participants)

    def accepts(self, digest: Digest) -> BlobRef | None:
        """The announced blob of that digest, if its pieces may come."""
        return None if digest in self._to_delete else self._accepted.get(digest)

    def blob_arrived(self, blob: BlobRef) -> None:
        """Every piece of it is here; said by the HTTP side, possibly more than once."""
        if blob.digest in self._accepted:
            self._p.driver.feed(BlobArrived(blob))

    def _accept(self, effect: AcceptBlob) -> None:
        self._accepted[effect.blob.digest] = effect.blob
        if effect.blob.digest not in self._to_delete and self._p.store.has(effect.blob):
            self._p.driver.feed(BlobArrived(effect.blob))

    def _forget(self, effect: ForgetBlob) -> None:
        """A commit lets go of a thousand at once, and each takes the disk a while."""
        self._accepted.pop(effect.blob.digest, None)
        if effect.blob.digest in self._merged or self._is_ours(effect.blob):
            return
        if not self._to_delete:
            self._p.driver.start(self._delete_all(), name="forget")
        self._to_delete[effect.blob.digest] = effect.blob

    async def _delete_all(self) -> None:
        while batch := list(self._to_delete.values()):
            gone = [blob for blob in batch if blob.digest not in self._accepted]
            await asyncio.to_thread(self._delete, gone)
            for blob in batch:
                is_wanted = blob.digest in self._accepted
                if is_wanted or blob in gone:
                    del self._to_delete[blob.digest]
                if is_wanted and self._p.store.has(blob):
                    self._p.driver.feed(BlobArrived(blob))

    def _delete(self, blobs: list[BlobRef]) -> None:
        for blob in blobs:
            if self._is_ours(blob):  # it may have become that meanwhile
                continue
            try:
                self._p.store.delete(blob)
            except BlobError as exc:
                self._p.log.note("blob", f"not deleted: {exc}", level="warning")

    def _is_ours(self, blob: BlobRef) -> bool:
        """A contribution that names a blob of ours (anybody may) must not take it along when it goes."""
        p = self._p
        return blob.digest in self._updates or blob.digest in p.chain.updates or blob.digest in p.snapshots.named

    def _check_soon(self, effect: CheckContribution) -> None:
        """However many small ones arrive at once, they are one job: each thread more takes turns from the event loop.
        Large ones, whose decoding leaves the interpreter free, are as many as there are threads for them."""
        self._to_check.append(effect)
        most = self._p.worker.num_aside if effect.blob.size > CHECKED_BYTES // CHECKED_AT_ONCE else 1
        if self._num_checking < most:
            self._num_checking += 1
            self._p.driver.start(self._check_all(), name="check")

    async def _check_all(self) -> None:
        while self._to_check:
            await self._check(self._next_to_check())
        self._num_checking -= 1

    def _next_to_check(self) -> list[CheckContribution]:
        batch = [self._to_check.popleft()]
        while self._to_check and len(batch) < CHECKED_AT_ONCE:
            if sum(each.blob.size for each in batch) + self._to_check[0].blob.size > CHECKED_BYTES:
                break
            batch.append(self._to_check.popleft())
        return batch

    async def _check(self, effects: list[CheckContribution]) -> None:
        p, codecs = self._p, self._p.driver.core.codecs_up

        def check(effect: CheckContribution) -> ContributionChecked:
            try:
                frame = p.store.get(effect.blob)
            except BlobError as exc:
                return ContributionChecked(effect.id, False, str(exc), 0.0)
            return p.outer.check(effect, frame, codecs)

        for event in await p.worker.call_aside(lambda: [check(effect) for effect in effects]):
            p.counters.up_params += p.outer.layout.num_elements[event.id.fragment]
            p.driver.feed(event)
        p.counters.up_bytes += sum(effect.blob.size for effect in effects)

    async def _merge(self, effect: Merge) -> None:
        p = self._p

        try:
            outcome = await p.worker.call(p.outer.merge, effect, p.store.get, p.manifest)
            update = await p.worker.call_aside(self._put_update, outcome.frame)
        except MergeError as exc:
            p.driver.feed(MergeFailed(effect.fragment, effect.round, effect.attempt, exc.reason, exc.culprit))
            return
        except BlobError as exc:
            p.driver.feed(MergeFailed(effect.fragment, effect.round, effect.attempt, str(exc), None))
            return
        p.counters.down_bytes += update.size
        p.counters.down_params += p.outer.layout.num_elements[effect.fragment]
        p.driver.feed(outcome.answer(effect, update))

    def _put_update(self, frame: bytes) -> BlobRef:
        """From the moment it exists it is ours."""
        self._updates.add(blob_ref(frame).digest)
        return self._p.store.put(frame)
