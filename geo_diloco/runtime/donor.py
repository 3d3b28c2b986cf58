"""Where a peer gets entries, update blobs and snapshots from, and how it spreads itself over those who have them.

Entries come from the syncer, who makes them. Its uplink must not carry every update to every learner, so blobs come
from mirrors, drawn by the rate that was measured, and the syncer is the reserve; who can be reached himself gets them
from the syncer, because the others wait for him. Nobody has to be told of any of this: a mirror that hasn't got a blob
yet says so, and may have it a moment later.

It also is the one place that knows where things are: addresses as the roster, the directory and the peers' own Hellos
say them. Whoever needs the syncer's waits here until the control connection has found it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from geo_diloco.errors import RemoteProtocolError, TransferError
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.fetch import NobodyLeftError, Source, fetch_blob
from geo_diloco.runtime.session import TransferRefused, fetch_entries, fetch_snapshot
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.upload import There, upload_blob
from geo_diloco.runtime.wire import Signed, url_from_address

KNOWN_MAX = 1024
"""Addresses remembered of what peers say in Hello."""
MIRRORS_AT_ONCE = 3
HEAD_START_S = 1.0
"""Mirrors are fetching an update themselves when it is new."""
PATIENCE_S = 3.0
"""So long a mirror is asked again for what it hasn't got yet."""


class Donors:
    """For the event loop's thread."""

    def __init__(self, bulk: Bulk, store: BlobStore, *, own: PeerId, is_mirror: bool = False) -> None:
        """`is_mirror`: others fetch from here what we fetched."""
        self._bulk = bulk
        self._store = store
        self._own = own
        self._is_mirror = is_mirror
        self._url = ""
        self._is_known = asyncio.Event()
        self._serving_url = ""
        self._serving = asyncio.Event()
        self._uploading: set[asyncio.Future[int]] = set()
        self._said: dict[PeerId, str] = {}
        self.roster_addresses: Callable[[], Sequence[tuple[PeerId, str]]] = lambda: ()
        """The chain's word: whoever serves, then the electors that could."""
        self.directory_addresses: Callable[[], Sequence[tuple[PeerId, str]]] = lambda: ()
        self.no_mirrors: Callable[[], Collection[PeerId]] = lambda: ()
        """Who is known to give no blobs to others."""

    # ---- places

    def found_at(self, base_url: str) -> None:
        """Whom we take for the syncer: the chain may be fetched there."""
        self._url = base_url
        self._is_known.set()

    def serves_at(self, base_url: str) -> None:
        """It does serve: what waits to be handed in goes there, and what was on its way elsewhere is turned round."""
        self._serving.set()
        if base_url != self._serving_url:
            self._serving_url = base_url
            for uploading in self._uploading:
                uploading.cancel()

    def lost(self) -> None:
        """Nobody is known to serve. An upload that is under way goes on: it may be the link alone that broke."""
        self._is_known.clear()
        self._serving.clear()

    async def base_url(self) -> str:
        """The syncer's; waits until it is known."""
        await self._is_known.wait()
        return self._url

    def says(self, peer: PeerId, address: str) -> None:
        """A peer's own word, in Hello."""
        self._said.pop(peer, None)
        if address:
            self._said[peer] = address
        while len(self._said) > KNOWN_MAX:
            del self._said[next(iter(self._said))]

    def address_of(self, peer: PeerId) -> str:
        """`host:port`; empty if that peer can't be dialed."""
        for known in (self.directory_addresses(), self.roster_addresses(), tuple(self._said.items())):
            for each, address in known:
                if each == peer and address:
                    return address
        return ""

    def url_of(self, peer: PeerId) -> str | None:
        address = self.address_of(peer)
        with suppress(RemoteProtocolError):
            return url_from_address(address, peer=peer) if address else None
        return None

    def _others(self, *, without: Collection[PeerId] = ()) -> list[str]:
        """Everybody else whom the chain or the directory names."""
        urls: dict[str, None] = {}
        for peer, address in (*self.roster_addresses(), *self.directory_addresses()):
            with suppress(RemoteProtocolError):
                if peer != self._own and address and peer not in without:
                    urls[url_from_address(address, peer=peer)] = None
        return [url for url in urls if url != self._syncer]

    @property
    def _syncer(self) -> str:
        """Its URL; empty while nobody is known to serve."""
        return self._url if self._is_known.is_set() else ""

    # ---- fetching

    async def entries(self, from_seq: int, limit: int) -> Sequence[Signed]:
        """From whoever is syncer. Raises TransferError if one try breaks off."""
        return await fetch_entries(
            self._bulk.session, await self.base_url(), from_seq, limit=limit, counters=self._bulk.counters
        )

    async def blob(self, blob: BlobRef) -> None:
        """Have it in the store. Waits until somebody is known who may have it.

        Raises TransferRefused if the syncer has no such blob and nobody else who answers has it, TransferError if it
        may come later.
        """
        if not self._syncer and not self._others():
            await self._is_known.wait()
        syncer = self._syncer
        failures: dict[str, TransferError] = {}
        sources = self._sources() or [Source(url) for url in self._others()]
        while sources:
            try:
                await fetch_blob(self._bulk, sources, blob, self._store)
                return
            except NobodyLeftError as exc:
                failures |= {source.url: exc.failures.get(source.url, exc) for source in sources}
            rest = [url for url in self._others() if url not in failures]
            sources = [Source(url) for url in self._bulk.routes.ordered(rest)[:MIRRORS_AT_ONCE]]
        refusal = failures.get(syncer)
        raise refusal if isinstance(refusal, TransferRefused) else NobodyLeftError(failures)

    def _sources(self) -> list[Source]:
        """Whom to ask for a blob first, whom to wait for, and who is the reserve."""
        routes, syncer = self._bulk.routes, self._syncer
        others = routes.ordered(self._others(without=self.no_mirrors()))[:MIRRORS_AT_ONCE]
        if not syncer:
            return [Source(url) for url in others]
        if self._is_mirror:
            return [Source(syncer, has_all=True), *(Source(url, delay_s=PATIENCE_S) for url in others)]
        hopeful = {url for url in others if routes.to(url).is_worth_waiting_for and not routes.is_resting(url)}
        mirrors = [Source(url, patience_s=PATIENCE_S if url in hopeful else 0.0) for url in others]
        return [*mirrors, Source(syncer, delay_s=HEAD_START_S if hopeful else 0.0, has_all=True)]

    async def signed_snapshots(self) -> list[Signed]:
        """Newest of whoever answers, not verified; the syncer's first. Raises TransferError if there is none."""
        found: list[Signed] = []
        why = "nobody is known who has one"
        for url in [await self.base_url(), *self._others()]:
            try:
                signed = await fetch_snapshot(self._bulk.session, url, counters=self._bulk.counters)
            except (TransferError, RemoteProtocolError) as exc:
                why = str(exc)
                continue
            if signed is not None:
                found.append(signed)
        if not found:
            raise TransferError(f"no snapshot: {why}")
        return found

    # ---- giving

    async def upload(
        self,
        blob: BlobRef,
        collect_at: str,
        *,
        is_new: bool = False,
        on_sent: Callable[[], None] = lambda: None,
    ) -> int:
        """Push a blob to the collector, by default the syncer; bytes per second. `is_new`: nobody can have any of it.
        `on_sent`: as of `upload_blob`.

        Raises TransferError also when another syncer is found meanwhile.
        """
        await self._serving.wait()
        url = url_from_address(collect_at) if collect_at else self._serving_url
        there: There = "none" if is_new else "likely"
        push = upload_blob(self._bulk, url, blob, self._store, there=there, on_sent=on_sent)
        uploading = asyncio.ensure_future(push)
        self._uploading.add(uploading)
        try:
            await asyncio.wait({uploading})
        finally:
            uploading.cancel()
            self._uploading.discard(uploading)
        if uploading.cancelled():
            raise TransferError("another syncer serves now")
        return uploading.result()

    async def push(self, blob: BlobRef, url: str, *, ask_first: bool = False) -> int:
        """`ask_first`: it may well be there already."""
        there: There = "likely" if ask_first else "maybe"
        return await upload_blob(self._bulk, url, blob, self._store, there=there)
