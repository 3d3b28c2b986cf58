"""Moving blobs over plain HTTP, from the side that dials.

A transfer has no time limit, only a progress deadline: it may take a night, but it may not stand still. It resumes
piece by piece, and within a piece, from what the other side (or the store here) already holds, over as many streams as
help and from as many donors as there are (`flow.py`). It fails in one of two ways: `TransferError`, try later and it
goes on where it stopped, or `TransferRefused`, this will never work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from geo_diloco.errors import BlobError, TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.board import Direction, Line
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.flow import Flow, NotYetError, Way
from geo_diloco.runtime.pieces import (
    HELD_HEADER,
    PIECE_BYTES,
    PIECE_DIGEST_BYTES,
    BlobStatus,
    GapError,
    by_piece,
    check_size,
    num_pieces,
    piece_size,
    status_from_headers,
)
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
from geo_diloco.runtime.spans import Missing, Span
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.streams import STREAMS_MAX

ANNOUNCE_WAIT_S = 10.0
"""How long an upload waits for its announcement, sent on another connection, to be heard."""
_CHUNK_BYTES = 64 << 10


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
    ask_first: bool = False,
    what: str = "",
) -> int:
    """Push a held blob to a peer that has heard its announcement; returns once every piece is confirmed. `ask_first`:
    ask what is missing even where one request would do, because the peer may well have it.

    Returns the rate in bytes per second. Raises TransferRefused or TransferError.
    """
    move = _Move(bulk, ref, store, stall_s, Missing(ref.size, range(num_pieces(ref.size))))
    failures = await move.run([(_Upload(move, base_url, ask_first=ask_first), 0.0)], "up", what)
    for failure in failures.values():
        raise _final(failure)
    return move.bytes_per_s()


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
    rest = [i for i in range(num_pieces(ref.size)) if i not in status.held]
    move = _Move(bulk, ref, store, stall_s, Missing(ref.size, rest, status.open_offsets))
    move.held = _num_bytes(ref, status)
    job = _FetchJob(move, has_index=status.has_index, begun=status.open_offsets)
    ways = [(_Fetch(job, source), source.delay_s) for source in sources]
    failures = await move.run(ways, "down", what)
    if failures or not store.has(ref):
        raise NobodyLeftError({url: _final(failure) for url, failure in failures.items()})
    return move.bytes_per_s()


def _final(failure: TransferError) -> TransferError:
    """What was waited for and did not come is refused."""
    return TransferRefused(str(failure)) if isinstance(failure, NotYetError) else failure


def _num_bytes(ref: BlobRef, status: BlobStatus) -> int:
    return sum(piece_size(ref.size, i) for i in status.held) + sum(status.open_offsets.values())


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
    began_at: float = field(default_factory=time.monotonic)

    async def run(self, ways: Sequence[tuple[Way, float]], direction: Direction, what: str) -> dict[str, TransferError]:
        board = self.bulk.lanes.board
        self.line: Line = board.begin(what or f"blob {self.ref.digest[:12]}", direction, self.ref.size, done=self.held)
        lanes = self.bulk.lanes
        streams_max = lanes.fetching_streams_max if direction == "down" else STREAMS_MAX
        self.flow = Flow(self.missing, self.ref.size, routes=self.bulk.routes, streams_max=streams_max)
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

    def bytes_per_s(self) -> int:
        return int(self.num_moved / max(time.monotonic() - self.began_at, 1e-6))

    def url(self, base_url: str) -> str:
        return f"{base_url}/v1/blobs/{self.ref.digest}"

    def url_of(self, base_url: str, span: Span) -> str:
        run = str(span.first) if span.first == span.last else f"{span.first}-{span.last}"
        return f"{self.url(base_url)}/{run}"


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

    def __init__(self, move: _Move, base_url: str, *, ask_first: bool) -> None:
        self.url = base_url
        self.confirmed = 0
        self.patience_s = ANNOUNCE_WAIT_S
        self._m = move
        self._asks_first = ask_first
        self._is_first = not ask_first

    async def open(self) -> None:
        """One round trip, or none where one request does for all of it: whoever takes an index says in the same breath
        what it holds."""
        m, total = self._m, num_pieces(self._m.ref.size)
        if total == 1 and self._is_first:
            self._is_first = False
            return
        status = await self._head() if total == 1 or self._asks_first else await self._put_index()
        if not status.has_index and total != 1:
            status = await self._put_index()
        m.missing.know(status.held, status.open_offsets)
        self.confirmed = max(self.confirmed, _num_bytes(m.ref, status))
        m.line.done = max(m.line.done, self.confirmed) if m.line.whom else self.confirmed

    async def move(self, span: Span) -> None:
        m = self._m
        size = span.num_bytes(m.ref.size)
        headers = {"Content-Range": f"bytes {span.offset}-{span.offset + size - 1}/{span.offset + size}"}
        await self._put(m.url_of(self.url, span), size, headers, span)
        self.confirmed += size

    async def left(self, span: Span) -> tuple[Sequence[int], Mapping[int, int]]:
        """The other side knows, and is asked before anything is sent again."""
        return span.pieces(), {}

    async def _head(self) -> BlobStatus:
        m, url = self._m, self._m.url(self.url)
        async with asking(url), Deadline(m.stall_s), m.bulk.session.head(url, allow_redirects=False) as response:
            await _check(response)
            return status_from_headers(response.headers, m.ref)

    async def _put_index(self) -> BlobStatus:
        m = self._m
        with _own_blob():
            index = await asyncio.to_thread(m.store.index, m.ref)
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
        offset = sent.offset
        for i in sent.pieces():
            with _own_blob():
                data = await asyncio.to_thread(self._m.store.read_piece, self._m.ref, i)
            yield memoryview(data)[offset:]
            offset = 0


class _FetchJob:
    """What all donors of one fetch share."""

    def __init__(self, move: _Move, *, has_index: bool, begun: Collection[int]) -> None:
        self.move = move
        self.has_index = has_index or num_pieces(move.ref.size) == 1
        self.keeping_index = asyncio.Lock()
        self.brought_by: dict[int, set[str]] = {i: {"before"} for i in begun}
        """Whose bytes an unfinished piece has: if it turns out wrong, who sent all of it is to blame."""
        self.alone: set[int] = set()
        """Pieces that were wrong with bytes of several: each of them is sent by one donor now, from its begin."""

    def begins(self, i: int, url: str) -> None:
        self.brought_by.setdefault(i, set()).add(url)

    def is_held(self, i: int) -> None:
        self.brought_by.pop(i, None)
        self.move.missing.moved(i)

    def is_to_blame(self, i: int, url: str) -> bool:
        """Piece `i` was wrong. It begins again."""
        brought_by = self.brought_by.pop(i, {url})
        if brought_by == {url}:
            return True
        self.alone.add(i)
        return False


class _Fetch:
    """The way from one donor."""

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
        async with asking(url), Deadline(m.stall_s), m.bulk.session.head(url, allow_redirects=False) as response:
            await _check(response)
            return self._having(response)

    def _having(self, response: Response) -> Collection[int] | None:
        status = status_from_headers(response.headers, self._m.ref)
        return None if len(status.held) == num_pieces(self._m.ref.size) else status.held

    async def _get_index(self) -> Collection[int] | None:
        m, url = self._m, self._m.url(self.url)
        wanted = num_pieces(m.ref.size) * PIECE_DIGEST_BYTES
        async with (
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
        headers = {"Range": f"bytes={span.offset}-"} if span.offset else {}
        async with (
            asking(url),
            Deadline(m.stall_s) as deadline,
            m.bulk.session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            await _check(response)
            offset = 0 if response.status == 200 else span.offset
            expected = Span(span.first, span.last, offset).num_bytes(m.ref.size)
            if response.content_length != expected:
                raise TransferRefused(f"{url} answers {response.content_length} bytes, wanted {expected}")
            at = span.first * PIECE_BYTES + offset
            async for chunk in response.content.iter_any():
                deadline.touch()
                await m.bulk.lanes.down.take(len(chunk), touch=partial(self._held_back, span, deadline))
                m.bulk.counters.bulk_in += len(chunk)
                m.moved(self, len(chunk), span)
                at = await self._keep(at, chunk)

    def _held_back(self, span: Span, deadline: Deadline) -> None:
        deadline.touch()
        self._m.flow.held_back(self, span)

    async def _keep(self, at: int, chunk: bytes) -> int:
        """Bytes from `at` within the blob on, into the pieces they belong to; returns where the next ones go."""
        for i, offset, part, is_last in by_piece(self._m.ref.size, at, chunk):
            self._job.begins(i, self.url)
            await self._append(i, offset, part, is_last=is_last)
            self.confirmed += len(part)
        return at + len(chunk)

    async def _append(self, i: int, offset: int, part: memoryview, *, is_last: bool) -> None:
        m = self._m
        try:
            if not is_last:
                is_held = m.store.append_piece(m.ref, i, offset, part)
            else:  # hashed and written now, which is no work for the event loop
                is_held = await asyncio.to_thread(m.store.append_piece, m.ref, i, offset, part)
        except (GapError, StoreFullError) as exc:
            raise TransferError(str(exc)) from exc
        except BlobError as exc:
            if self._job.is_to_blame(i, self.url):
                if self._was_wrong:
                    raise TransferRefused(f"{self.url}: {exc}") from exc
                self._was_wrong = True
            raise TransferError(f"{self.url}: {exc}") from exc
        if is_held:
            self._job.is_held(i)

    async def left(self, span: Span) -> tuple[Sequence[int], Mapping[int, int]]:
        m = self._m
        try:
            for i in self._job.alone.intersection(span.pieces()):
                await asyncio.to_thread(m.store.drop_open, m.ref, i)
                self._job.brought_by.pop(i, None)
            status = await asyncio.to_thread(m.store.status, m.ref)
        except BlobError:
            return span.pieces(), {}
        for i in status.held:
            m.missing.moved(i)
        return [i for i in span.pieces() if i not in status.held], status.open_offsets


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
