"""A snapshot's bytes, from everybody who has them.

Who joins believes one snapshot, that of the proven syncer. Its blobs are named by digest, so they may come from
anyone: a standby that stands at the same version of a fragment holds the same bits. Each of them is asked what it has,
and blobs that the syncer's snapshot names are fetched from all that have them at once, piece by piece, as updates are.
What is here already, of an earlier snapshot or of a try that broke off, is not fetched again. A try that broke off goes
on with the snapshot that it began with, as long as that is less to fetch than the newest and is not too far behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from geo_diloco.errors import BlobError, RemoteProtocolError, TransferError
from geo_diloco.manifest import Digest
from geo_diloco.observability import EventLog
from geo_diloco.protocol.messages import BlobRef, Snapshot
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.donor import MIRRORS_AT_ONCE
from geo_diloco.runtime.fetch import Source, fetch_blob
from geo_diloco.runtime.pieces import piece_size
from geo_diloco.runtime.session import fetch_snapshot
from geo_diloco.runtime.snapshots import SAVE_EVERY_COMMITS
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed, open_snapshot

ASKED_MAX = 8
"""Peers that are asked what they have."""
BLOBS_AT_ONCE = 4
"""One of few pieces is all under way with whoever was first: the others bring another meanwhile."""
HEAD_START_S = 1.0
"""Of their answers, before the first blob is fetched from the syncer alone."""
TOLD_EVERY_S = 30.0
"""How often whoever waits reads how much is here."""
BEHIND_MAX = SAVE_EVERY_COMMITS
"""Entries after a snapshot for which everybody still has the updates."""


class Gathering:
    """For the event loop's thread."""

    def __init__(self, bulk: Bulk, store: BlobStore, *, syncer: str, others: Sequence[str], log: EventLog) -> None:
        """`syncer` and `others`: base URLs."""
        self._bulk = bulk
        self._store = store
        self._syncer = syncer
        self._others = [url for url in dict.fromkeys(others) if url != syncer][:ASKED_MAX]
        self._log = log
        self._having: dict[str, Collection[Digest]] = {}

    async def fetch(self, blobs: Iterable[BlobRef]) -> None:
        """Have them in the store. Raises NobodyLeftError if one can't be had."""
        missing = [blob for blob in dict.fromkeys(blobs) if not self._store.has(blob)]
        if not missing:
            return
        asking = [asyncio.create_task(self._ask(url), name=f"ask {url}") for url in self._others]
        try:
            if asking:
                await asyncio.wait(asking, timeout=HEAD_START_S)
            await self._fetch_all(missing)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _fetch_all(self, missing: Sequence[BlobRef]) -> None:
        """If one can't be had no other is begun, but those under way may end."""
        rest = deque(missing)

        async def fetch_in_turn() -> None:
            while rest:
                blob = rest.popleft()
                try:
                    await fetch_blob(self._bulk, self._sources(blob), blob, self._store)
                except TransferError:
                    rest.clear()
                    raise

        tasks = [asyncio.create_task(fetch_in_turn(), name="gather") for _ in range(BLOBS_AT_ONCE)]
        telling = asyncio.create_task(self._tell(missing), name="tell")
        try:
            await asyncio.wait(tasks)
            await asyncio.gather(*tasks)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell(self, missing: Sequence[BlobRef]) -> None:
        """Until cancelled: on a thin link this takes long, and silence looks like trouble."""
        total_mb = sum(blob.size for blob in missing) / 1e6
        while True:
            here_mb = total_mb - await asyncio.to_thread(bytes_left, missing, self._store) / 1e6
            self._log.note("join", f"fetching the run's state: {here_mb:.1f} of {total_mb:.1f} MB are here")
            await asyncio.sleep(TOLD_EVERY_S)

    async def _ask(self, url: str) -> None:
        """What it has, as its own snapshot of now says; it is believed in nothing else."""
        try:
            signed = await fetch_snapshot(self._bulk.session, url, counters=self._bulk.counters)
            if signed is not None:
                snapshot = open_snapshot(signed)
                self._having[url] = {blob.digest for blob in (*snapshot.theta, *snapshot.momentum)}
        except (TransferError, RemoteProtocolError) as exc:
            self._log.note("join", f"no donor: {exc}", level="debug")

    def _sources(self, blob: BlobRef) -> list[Source]:
        """Those that have it in an order drawn by their rates, and the syncer, all at once."""
        having = [url for url, digests in self._having.items() if blob.digest in digests]
        donors = self._bulk.routes.ordered(having)[:MIRRORS_AT_ONCE]
        return [Source(url) for url in (*donors, self._syncer)]


def blobs_of(snapshot: Snapshot, *, with_momentum: bool) -> tuple[BlobRef, ...]:
    return (*snapshot.theta, *snapshot.momentum) if with_momentum else snapshot.theta


def bytes_left(blobs: Iterable[BlobRef], store: BlobStore) -> int:
    """What is still to be fetched of them. Reads unfinished ones from the disk."""
    left = 0
    for blob in set(blobs):
        if store.has(blob):
            continue
        try:
            left += blob.size - sum(piece_size(blob.size, i) for i in store.status(blob).held)
        except BlobError:
            left += blob.size
    return left


def goes_on_with(begun: Snapshot, newest: Snapshot, store: BlobStore, *, with_momentum: bool) -> bool:
    """Whether what was begun is the better way to a state. Reads the disk."""
    if (begun.branch, begun.lineage) != (newest.branch, newest.lineage):
        return False
    if not 0 < newest.seq - begun.seq <= BEHIND_MAX:
        return False
    lefts = [bytes_left(blobs_of(each, with_momentum=with_momentum), store) for each in (begun, newest)]
    return lefts[0] < lefts[1]


def begun_snapshot(path: Path) -> Signed | None:
    """What a join that did not end was fetching, as signed."""
    try:
        return Signed.from_line(path.read_bytes())
    except (OSError, RemoteProtocolError):
        return None
