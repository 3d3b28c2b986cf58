"""Blobs fetched from peers that hold them, or parts of them, several at once.

Stands apart because bytes that come must be checked, and whoever sent wrong ones found; what is common to both
directions is in `transfer.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic

from geo_diloco.errors import BlobError, TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.pieces import (
    HELD_HEADER,
    INDEX_BROUGHT_HEADER,
    INDEX_BROUGHT_PIECES_MAX,
    INDEX_WANTED_HEADER,
    PIECE_DIGEST_BYTES,
    BlobStatus,
    by_piece,
    check_size,
    index_from_header,
    num_pieces,
    piece_range,
    status_from_headers,
)
from geo_diloco.runtime.ranges import num_bytes
from geo_diloco.runtime.runs import NotYetError, UnaskedError
from geo_diloco.runtime.session import STALL_S, Deadline, Response, TransferRefused, asking, read_bounded
from geo_diloco.runtime.spans import Missing, Report, Span
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.transfer import ROUNDS_MAX, Move, check, final


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
    has_all: bool = False
    """By all we know: it is asked for bytes at once, and they bring the index along."""


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
    move = Move(bulk, ref, store, stall_s, Missing(ref.size, lacking))
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
        raise NobodyLeftError({url: final(failure) for url, failure in failures.items()})
    return move.bytes_per_s()


class _FetchJob:
    """What all donors of one fetch share."""

    def __init__(self, move: Move, *, has_index: bool, begun: Collection[int]) -> None:
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
        self._may_begin = source.has_all and num_pieces(self._m.ref.size) <= INDEX_BROUGHT_PIECES_MAX
        """Without a question, once."""
        self._is_unasked = False

    async def open(self) -> Collection[int] | None:
        self._is_unasked, self._may_begin = self._may_begin, False
        if self._is_unasked:
            return None
        if not self._job.has_index:  # asked of all: whoever was asked first may be cut off
            return await self._get_index()
        if num_pieces(self._m.ref.size) == 1:
            return None
        return self._having(await self._m.status_there(self.url))

    def _having(self, status: BlobStatus) -> Collection[int] | None:
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
            await check(response)
            has_said = HELD_HEADER in response.headers
            having = self._having(status_from_headers(response.headers, m.ref)) if has_said else None
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
        if not self._job.has_index:
            headers[INDEX_WANTED_HEADER] = "1"
        is_unasked, asked_at = self._is_unasked, monotonic()
        async with (
            asking(url),
            Deadline(m.stall_s) as deadline,
            m.bulk.session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            await self._check_bytes(response, is_unasked=is_unasked)
            m.bulk.routes.to(self.url).answered(monotonic() - asked_at)
            at, expected = (span.begin - first, size) if response.status == 200 else (span.begin, span.num_bytes)
            if response.content_length != expected:
                raise TransferRefused(f"{url} answers {response.content_length} bytes, wanted {expected}")
            async for chunk in response.content.iter_any():
                deadline.touch()
                await m.bulk.lanes.down.take(len(chunk), touch=partial(self._held_back, span, deadline))
                m.bulk.counters.bulk_in += len(chunk)
                m.moved(self, len(chunk), span)
                at = await self._keep(at, chunk, is_alone=is_alone)

    async def _check_bytes(self, response: Response, *, is_unasked: bool) -> None:
        """That they come, and can be checked."""
        try:
            await check(response)
        except NotYetError as exc:
            if is_unasked:
                raise UnaskedError(str(exc)) from exc
            raise
        if self._job.has_index:
            return
        text = response.headers.get(INDEX_BROUGHT_HEADER)
        if text is None:
            raise UnaskedError(f"{response.url} answers without the piece digests")
        index = index_from_header(text)
        async with self._job.keeping_index:
            if not self._job.has_index:
                await self._keep_index(index)

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
def _own_store() -> Iterator[None]:
    try:
        yield
    except BlobError as exc:
        raise TransferError(str(exc)) from exc
