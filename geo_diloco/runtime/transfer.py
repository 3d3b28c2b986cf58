"""Moving blobs over plain HTTP, from the side that dials.

A transfer has no time limit, only a progress deadline: it may take a night, but it may not stand still. It resumes
piece by piece, and within a piece, from what the other side (or the store here) already holds, over as many streams as
help and from as many donors as there are (`flow.py`). It fails in one of two ways: `TransferError`, try later and it
goes on where it stopped, or `TransferRefused`, this will never work.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Literal

from geo_diloco.errors import BlobError, TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.board import Direction, Line
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.flow import Flow
from geo_diloco.runtime.pieces import (
    COMPLETE_HEADER,
    HELD_HEADER,
    INDEX_BROUGHT_HEADER,
    INDEX_BROUGHT_PIECES_MAX,
    PIECE_BYTES,
    PIECE_DIGEST_BYTES,
    BlobStatus,
    by_piece,
    check_size,
    num_pieces,
    piece_range,
    status_from_headers,
)
from geo_diloco.runtime.ranges import num_bytes
from geo_diloco.runtime.routes import Route
from geo_diloco.runtime.runs import NotYetError, Way
from geo_diloco.runtime.session import (
    STALL_S,
    Body,
    Deadline,
    Response,
    TransferRefused,
    asking,
    raise_for_status,
    read_bounded,
)
from geo_diloco.runtime.spans import Missing, Report, Span
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.streams import STREAMS_MAX

ANNOUNCE_WAIT_S = 10.0
"""How long an upload waits for its announcement, sent on another connection, to be heard."""
ROUNDS_MAX = 5
"""So often is gone on if all of a blob was moved and it is not there: a piece was wrong, or gave way to others."""
_CHUNK_BYTES = 64 << 10
There = Literal["none", "maybe", "likely"]


class NobodyLeftError(TransferError):
    """No donor is left that could give the rest; why, by address."""

    def __init__(self, failures: Mapping[str, TransferError]) -> None:
        super().__init__("; ".join(str(failure) for failure in failures.values()) or "nobody is known who has it")
        self.failures = failures

    @property
    def is_final(self) -> bool:
        """All of them won't ever give it."""
        return bool(self.failures) and all(isinstance(each, TransferRefused) for each in self.failures.values())


@dataclass(frozen=True, slots=True)
class Source:
    """A donor for a fetch."""

    url: str
    delay_s: float = 0.0
    """A reserve: asked when the others were of little use for so long."""
    patience_s: float = 0.0
    """How long it is waited for what it hasn't got yet."""


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
    move = _Move(bulk, ref, store, stall_s, Missing(ref.size, [(0, ref.size)]), on_sent=on_sent)
    way = _Upload(move, base_url, there)
    for _ in range(ROUNDS_MAX):
        failures = await move.run([(way, 0.0)], "up", what)
        for failure in failures.values():
            raise _final(failure)
        if way.is_complete:
            return move.upload_bytes_per_s(bulk.routes.to(base_url))
    raise TransferError(f"{move.url(base_url)} was sent all of it {ROUNDS_MAX} times and is not complete")


async def fetch_blob(
    bulk: Bulk,
    sources: Sequence[Source],
    ref: BlobRef,
    store: BlobStore,
    *,
    stall_s: float = STALL_S,
    what: str = "",
) -> int:
    """Have a blob in the store, from peers that hold it or parts of it; returns the rate in bytes per second.

    Raises NobodyLeftError with each donor's failure: TransferRefused if it doesn't have the blob or sends wrong bytes
    for it, else TransferError. TransferRefused by itself is for a blob that nobody can have.
    """
    try:
        check_size(ref)
    except BlobError as exc:
        raise TransferRefused(str(exc)) from exc
    with _own_store():
        status = await asyncio.to_thread(store.status, ref)
    if status.complete:
        return 0
    lacking = status.lacking(ref.size)
    move = _Move(bulk, ref, store, stall_s, Missing(ref.size, lacking))
    move.held = ref.size - num_bytes(lacking)
    begun = {i for begin, end in status.unverified for i in Span(begin, end).pieces()}
    job = _FetchJob(move, has_index=status.has_index, begun=begun)
    ways = [(_Fetch(job, source), source.delay_s) for source in sources]
    failures: Mapping[str, TransferError] = {}
    for _ in range(ROUNDS_MAX):
        failures = await move.run(ways, "down", what)
        if failures or store.has(ref):
            break
        with _own_store():
            move.missing.know(await job.look())
    if failures or not store.has(ref):
        raise NobodyLeftError({url: _final(failure) for url, failure in failures.items()})
    return move.bytes_per_s()


def _final(failure: TransferError) -> TransferError:
    """What was waited for and did not come is refused."""
    return TransferRefused(str(failure)) if isinstance(failure, NotYetError) else failure


@dataclass
class _Move:
    """What an upload and a fetch have in common."""

    bulk: Bulk
    ref: BlobRef
    store: BlobStore
    stall_s: float
    missing: Missing
    held: int = 0
    """Bytes that were there before."""
    num_moved: int = 0
    began_at: float = field(default_factory=monotonic)
    on_sent: Callable[[], None] = lambda: None
    sent_at: float = 0.0

    async def run(self, ways: Sequence[tuple[Way, float]], direction: Direction, what: str) -> dict[str, TransferError]:
        board = self.bulk.lanes.board
        self.line: Line = board.begin(what or f"blob {self.ref.digest[:12]}", direction, self.ref.size, done=self.held)
        lanes = self.bulk.lanes
        streams_max = lanes.fetching_streams_max if direction == "down" else STREAMS_MAX
        self.flow = Flow(self.missing, routes=self.bulk.routes, streams_max=streams_max, on_sent=self._sent)
        try:
            return await self.flow.run(ways)
        finally:
            board.end(self.line)

    def moved(self, way: Way, size: int, span: Span | None = None) -> None:
        """So many bytes went over the wire, of a span or of an index."""
        self.num_moved += size
        if span is not None:
            self.flow.moved(way, size, span)
            self.bulk.lanes.board.moved(self.line, size, way.url)
            self.line.resumed = max(self.line.resumed, self.flow.resumed)

    def _sent(self) -> None:
        self.sent_at = monotonic()
        self.on_sent()

    def bytes_per_s(self) -> int:
        return int(self.num_moved / max(monotonic() - self.began_at, 1e-6))

    def upload_bytes_per_s(self, route: Route) -> int:
        """What the link does for uploads that follow each other: one that began before the last had its answer is
        timed from that answer on, but for no less than it took to send; for another a round trip of waiting is none of
        the link's work."""
        now = monotonic()
        idle_s = 0.0 if route.upload_over_at > self.began_at else route.round_trip_s
        took_s = now - max(self.began_at, route.upload_over_at) - idle_s
        took_s = max(took_s, self.sent_at - self.began_at, 1e-6)
        route.upload_over_at = now
        return int(self.num_moved / took_s)

    @asynccontextmanager
    async def timed(self, base_url: str) -> AsyncIterator[None]:
        """A small question is asked, and answered by the end of this."""
        begin = monotonic()
        yield
        self.bulk.routes.to(base_url).answered(monotonic() - begin)

    def url(self, base_url: str) -> str:
        return f"{base_url}/v1/blobs/{self.ref.digest}"

    def url_of(self, base_url: str, span: Span) -> str:
        """Of the pieces that a span touches."""
        pieces = span.pieces()
        run = str(pieces[0]) if len(pieces) == 1 else f"{pieces[0]}-{pieces[-1]}"
        return f"{self.url(base_url)}/{run}"

    def within(self, span: Span) -> tuple[int, int, int]:
        """Its first and last byte as counted from the begin of the pieces that it touches, and their size."""
        pieces = span.pieces()
        base = pieces[0] * PIECE_BYTES
        return span.begin - base, span.end - 1 - base, piece_range(self.ref.size, pieces[-1])[1] - base


async def _check(response: Response) -> None:
    """As `raise_for_status`, but what isn't there may come."""
    try:
        await raise_for_status(response)
    except TransferRefused as exc:
        if response.status == 404:
            raise NotYetError(str(exc)) from exc
        raise


class _Upload:
    """The way to the peer that collects it."""

    is_towards_us = False

    def __init__(self, move: _Move, base_url: str, there: There) -> None:
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
            self._brought = b64encode(await self._index()).decode() if total > 1 else ""
            return
        moved_before = m.missing.moved_so_far
        status = await self._head() if total == 1 or self._asks_first else await self._put_index()
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

    async def _head(self) -> BlobStatus:
        m, url = self._m, self._m.url(self.url)
        async with (
            m.timed(self.url),
            asking(url),
            Deadline(m.stall_s),
            m.bulk.session.head(url, allow_redirects=False) as response,
        ):
            await _check(response)
            return status_from_headers(response.headers, m.ref)

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
                await _check(response)
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


class _FetchJob:
    """What all donors of one fetch share."""

    def __init__(self, move: _Move, *, has_index: bool, begun: Collection[int]) -> None:
        self.move = move
        self.has_index = has_index or num_pieces(move.ref.size) == 1
        self.keeping_index = asyncio.Lock()
        self.brought_by: dict[int, set[str]] = {i: {"before"} for i in begun}
        """Whose bytes an unfinished piece has: if it turns out wrong, who sent all of it is to blame."""
        self.alone: set[int] = set()
        """Pieces that were wrong with bytes of several: each of them is sent by one donor now, all of it."""

    def begins(self, i: int, url: str) -> None:
        self.brought_by.setdefault(i, set()).add(url)

    def is_held(self, i: int) -> None:
        self.brought_by.pop(i, None)
        self.move.missing.moved(piece_range(self.move.ref.size, i))

    def is_to_blame(self, i: int, url: str) -> bool:
        """Piece `i` was wrong. It begins again."""
        brought_by = self.brought_by.pop(i, {url})
        if brought_by == {url}:
            return True
        self.alone.add(i)
        self.move.missing.keep_whole(i)
        return False

    async def look(self) -> Report:
        """What the store here lacks. Raises BlobError."""
        m, moved_before = self.move, self.move.missing.moved_so_far
        status = await asyncio.to_thread(m.store.status, m.ref)
        return Report(status.lacking(m.ref.size), moved_before)


class _Fetch:
    """The way from one donor."""

    is_towards_us = True

    def __init__(self, job: _FetchJob, source: Source) -> None:
        self.url = source.url
        self.patience_s = source.patience_s
        self.confirmed = 0
        self._job = job
        self._m = job.move
        self._was_wrong = False

    async def open(self) -> Collection[int] | None:
        if not self._job.has_index:  # asked of all: whoever was asked first may be cut off
            return await self._get_index()
        if num_pieces(self._m.ref.size) == 1:
            return None
        m, url = self._m, self._m.url(self.url)
        async with (
            m.timed(self.url),
            asking(url),
            Deadline(m.stall_s),
            m.bulk.session.head(url, allow_redirects=False) as response,
        ):
            await _check(response)
            return self._having(response)

    def _having(self, response: Response) -> Collection[int] | None:
        status = status_from_headers(response.headers, self._m.ref)
        return None if len(status.held) == num_pieces(self._m.ref.size) else status.held

    async def _get_index(self) -> Collection[int] | None:
        m, url = self._m, self._m.url(self.url)
        wanted = num_pieces(m.ref.size) * PIECE_DIGEST_BYTES
        async with (
            m.timed(self.url),
            asking(url),
            Deadline(m.stall_s) as deadline,
            m.bulk.session.get(url, allow_redirects=False) as response,
        ):
            await _check(response)
            having = self._having(response) if HELD_HEADER in response.headers else None
            index = await read_bounded(response, wanted, deadline)
        async with self._job.keeping_index:
            if not self._job.has_index:
                await self._keep_index(index)
        return having

    async def _keep_index(self, index: bytes) -> None:
        try:
            await asyncio.to_thread(self._m.store.set_index, self._m.ref, index)
        except StoreFullError as exc:
            raise TransferError(str(exc)) from exc
        except BlobError as exc:
            raise TransferRefused(f"{self.url}: {exc}") from exc
        self._job.has_index = True

    async def move(self, span: Span) -> None:
        m, url = self._m, self._m.url_of(self.url, span)
        first, last, size = m.within(span)
        headers = {} if span.num_bytes == size else {"Range": f"bytes={first}-{last}"}
        if is_alone := not self._job.alone.isdisjoint(span.pieces()) and span.num_bytes == size:
            await asyncio.to_thread(m.store.drop_open, m.ref, span.pieces()[0])
            self._job.brought_by.pop(span.pieces()[0], None)
        async with (
            asking(url),
            Deadline(m.stall_s) as deadline,
            m.bulk.session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            await _check(response)
            at, expected = (span.begin - first, size) if response.status == 200 else (span.begin, span.num_bytes)
            if response.content_length != expected:
                raise TransferRefused(f"{url} answers {response.content_length} bytes, wanted {expected}")
            async for chunk in response.content.iter_any():
                deadline.touch()
                await m.bulk.lanes.down.take(len(chunk), touch=partial(self._held_back, span, deadline))
                m.bulk.counters.bulk_in += len(chunk)
                m.moved(self, len(chunk), span)
                at = await self._keep(at, chunk, is_alone=is_alone)

    def _held_back(self, span: Span, deadline: Deadline) -> None:
        deadline.touch()
        self._m.flow.held_back(self, span)

    async def _keep(self, at: int, chunk: bytes, *, is_alone: bool) -> int:
        """Bytes from `at` within the blob on, into the pieces they belong to; returns where the next ones go."""
        for i, offset, part in by_piece(self._m.ref.size, at, chunk):
            if is_alone or i not in self._job.alone:
                self._job.begins(i, self.url)
                await self._append(i, offset, part)
                self.confirmed += len(part)
        return at + len(chunk)

    async def _append(self, i: int, offset: int, part: memoryview) -> None:
        m = self._m
        try:
            if not m.store.is_piece_filled_by(m.ref, i, offset, len(part)):
                is_held = m.store.append_piece(m.ref, i, offset, part)
            else:  # hashed and written now, which is no work for the event loop
                is_held = await asyncio.to_thread(m.store.append_piece, m.ref, i, offset, part)
        except StoreFullError as exc:
            raise TransferError(str(exc)) from exc
        except BlobError as exc:
            if self._job.is_to_blame(i, self.url):
                if self._was_wrong:
                    raise TransferRefused(f"{self.url}: {exc}") from exc
                self._was_wrong = True
            raise TransferError(f"{self.url}: {exc}") from exc
        if is_held:
            self._job.is_held(i)

    async def left(self) -> Report | None:
        try:
            return await self._job.look()
        except BlobError:
            return None


@contextmanager
def _own_blob() -> Iterator[None]:
    """What we are to push is not here or damaged: trying again does not help."""
    try:
        yield
    except BlobError as exc:
        raise TransferRefused(str(exc)) from exc


@contextmanager
def _own_store() -> Iterator[None]:
    try:
        yield
    except BlobError as exc:
        raise TransferError(str(exc)) from exc
