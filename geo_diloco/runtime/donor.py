"""The syncer as the donor of everything: entries, update blobs, snapshots. (Mirrors will be donors too.)

It also is the one place that knows where the syncer is: whoever needs the address waits here until somebody, the
control connection or the directory, has found it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from geo_diloco.errors import RemoteProtocolError, TransferError
from geo_diloco.manifest import PeerId, RunId
from geo_diloco.protocol.messages import BlobRef, Snapshot
from geo_diloco.runtime.session import ByteCounters, Session, fetch_entries, fetch_snapshot
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.transfer import fetch_blob, upload_blob
from geo_diloco.runtime.wire import Signed, open_snapshot, url_from_address


class SyncerDonor:
    """Implements `following.Donor`, and uploads the other way."""

    def __init__(
        self, session: Session, store: BlobStore, *, run: RunId, signer: PeerId, counters: ByteCounters
    ) -> None:
        self._session = session
        self._store = store
        self._run = run
        self._signer = signer
        self._counters = counters
        self._url = ""
        self._is_known = asyncio.Event()

    def found_at(self, base_url: str) -> None:
        self._url = base_url
        self._is_known.set()

    async def base_url(self) -> str:
        """Waits until it is known."""
        await self._is_known.wait()
        return self._url

    async def entries(self, from_seq: int, limit: int) -> Sequence[Signed]:
        url = await self.base_url()
        return await fetch_entries(self._session, url, from_seq, limit=limit, counters=self._counters)

    async def blob(self, blob: BlobRef) -> None:
        if not self._store.has(blob):
            await fetch_blob(self._session, await self.base_url(), blob, self._store, counters=self._counters)

    async def snapshot(self) -> Snapshot:
        return (await self.signed_snapshot())[1]

    async def signed_snapshot(self) -> tuple[Signed, Snapshot]:
        signed = await fetch_snapshot(self._session, await self.base_url(), counters=self._counters)
        if signed is None:
            raise TransferError("the syncer has no snapshot yet")
        snapshot = open_snapshot(signed)
        if signed.signer != self._signer or snapshot.run != self._run:
            raise RemoteProtocolError("a snapshot that is not of this run's syncer", peer=signed.signer)
        if not len(snapshot.heads) == len(snapshot.theta) == len(snapshot.momentum) == len(snapshot.num_elements):
            raise RemoteProtocolError("a snapshot whose parts don't fit together", peer=signed.signer)
        return signed, snapshot

    async def upload(self, blob: BlobRef, collect_at: str) -> int:
        """Push a blob to the collector, by default the syncer; bytes per second."""
        url = url_from_address(collect_at) if collect_at else await self.base_url()
        return await upload_blob(self._session, url, blob, self._store, counters=self._counters)
