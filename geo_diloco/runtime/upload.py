"""Blobs pushed to a peer that has heard their announcement.

Stands apart because only the other side knows what has arrived, and each question costs a round trip; what is common
to both directions is in `transfer.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Literal

from geo_diloco.errors import BlobError, TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.pieces import (
    COMPLETE_HEADER,
    INDEX_BROUGHT_HEADER,
    INDEX_BROUGHT_PIECES_MAX,
    BlobStatus,
    header_from_index,
    num_pieces,
    piece_range,
    status_from_headers,
)
from geo_diloco.runtime.ranges import num_bytes
from geo_diloco.runtime.session import STALL_S, Body, Deadline, TransferRefused, asking
from geo_diloco.runtime.spans import Missing, Report, Span
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.transfer import ROUNDS_MAX, Move, check, final

ANNOUNCE_WAIT_S = 10.0
"""How long an upload waits for its announcement, sent on another connection, to be heard."""
_CHUNK_BYTES = 64 << 10
There = Literal["none", "maybe", "likely"]


async def upload_blob(
    bulk: Bulk,
    base_url: str,
    ref: BlobRef,
    store: BlobStore,
    *,
    stall_s: float = STALL_S,
    there: There = "maybe",
    what: str = "",
    on_sent: Callable[[], None] = lambda: None,
) -> int:
    """Push a held blob to a peer that has heard its announcement; returns once every piece is confirmed. `there`:
    whether the peer has some of it. What is likely there is asked for first, even where one request would do. `on_sent`
    is called when all that was missing is on its way, so that the next upload may begin, and again if some of it has to
    be sent again.

    Returns the rate in bytes per second. Raises TransferRefused or TransferError.
    """
    move = Move(bulk, ref, store, stall_s, Missing(ref.size, [(0, ref.size)]), on_sent=on_sent)
    way = _Upload(move, base_url, there)
    for _ in range(ROUNDS_MAX):
        failures = await move.run([(way, 0.0)], "up", what)
        for failure in failures.values():
            raise final(failure)
        if way.is_complete:
            return move.upload_bytes_per_s(bulk.routes.to(base_url))
    raise TransferError(f"{move.url(base_url)} was sent all of it {ROUNDS_MAX} times and is not complete")


class _Upload:
    """The way to the peer that collects it."""

    is_towards_us = False

    def __init__(self, move: Move, base_url: str, there: There) -> None:
        self.url = base_url
        self.confirmed = 0
        self.is_complete = False
        """By the other side's word."""
        self.patience_s = ANNOUNCE_WAIT_S
        self._m = move
        self._asks_first = there == "likely"
        self._unasked_max = {"none": INDEX_BROUGHT_PIECES_MAX, "maybe": 1, "likely": 0}[there]
        """Pieces of a blob that is begun without a question."""
        self._brought = ""
        """The index, as it goes along with bytes until an answer shows that it is there."""

    async def open(self) -> None:
        """One round trip: whoever takes an index says in the same breath what it holds. None where the first bytes
        bring the index along."""
        m, total = self._m, num_pieces(self._m.ref.size)
        unasked_max, self._unasked_max, self._brought = self._unasked_max, 0, ""
        if 1 <= total <= unasked_max:
            self._brought = header_from_index(await self._index()) if total > 1 else ""
            return
        moved_before = m.missing.moved_so_far
        status = await self._m.status_there(self.url) if total == 1 or self._asks_first else await self._put_index()
        if not status.has_index and total != 1:
            status = await self._put_index()
        self.is_complete = self.is_complete or status.complete
        lacking = status.lacking(m.ref.size)
        m.missing.know(Report(lacking, moved_before))
        self.confirmed = max(self.confirmed, m.ref.size - num_bytes(lacking))
        m.line.done = max(m.line.done, self.confirmed) if m.line.whom else self.confirmed

    async def move(self, span: Span) -> None:
        m = self._m
        first, last, size = m.within(span)
        headers = {"Content-Range": f"bytes {first}-{last}/{size}"}
        if self._brought:
            headers[INDEX_BROUGHT_HEADER] = self._brought
        answer = await self._put(m.url_of(self.url, span), span.num_bytes, headers, span)
        self._brought = ""
        self.is_complete = self.is_complete or answer.get(COMPLETE_HEADER) == "1"
        self.confirmed += span.num_bytes

    async def left(self) -> Report | None:
        """The other side knows, and is asked before anything is sent again."""
        return None

    async def _index(self) -> bytes:
        with _own_blob():
            return await asyncio.to_thread(self._m.store.index, self._m.ref)

    async def _put_index(self) -> BlobStatus:
        m, index = self._m, await self._index()
        return status_from_headers(await self._put(f"{m.url(self.url)}/index", len(index), {}, index), m.ref)

    async def _put(self, url: str, size: int, headers: dict[str, str], sent: Span | bytes) -> Mapping[str, str]:
        """The answer's headers."""
        m = self._m
        deadline = Deadline(m.stall_s)
        body = Body(self._chunks(sent, deadline), size, deadline)
        put = m.bulk.session.put(url, data=body, headers=headers, allow_redirects=False)
        try:
            async with asking(url), deadline, put as response:
                await check(response)
                if body.written_at:  # else it did not wait for all of it
                    m.bulk.routes.to(self.url).answered(monotonic() - body.written_at)
                return response.headers
        except TransferError as exc:
            if body.failure is None:
                raise
            raise body.failure from exc

    async def _chunks(self, sent: Span | bytes, deadline: Deadline) -> AsyncIterator[memoryview]:
        m, up = self._m, self._m.bulk.lanes.up
        portion = up.portion(_CHUNK_BYTES)
        span = sent if isinstance(sent, Span) else None
        async for data in self._parts(sent):
            for begin in range(0, len(data), portion):
                chunk = data[begin : begin + portion]
                await up.take(len(chunk), touch=deadline.touch)
                yield chunk
                deadline.touch()
                m.bulk.counters.bulk_out += len(chunk)
                m.moved(self, len(chunk), span)

    async def _parts(self, sent: Span | bytes) -> AsyncIterator[memoryview]:
        if isinstance(sent, bytes):
            yield memoryview(sent)
            return
        for i in sent.pieces():
            begin, end = piece_range(self._m.ref.size, i)
            with _own_blob():
                data = await asyncio.to_thread(self._m.store.read_piece, self._m.ref, i)
            yield memoryview(data)[max(begin, sent.begin) - begin : min(end, sent.end) - begin]


@contextmanager
def _own_blob() -> Iterator[None]:
    """What we are to push is not here or damaged: trying again does not help."""
    try:
        yield
    except BlobError as exc:
        raise TransferRefused(str(exc)) from exc
