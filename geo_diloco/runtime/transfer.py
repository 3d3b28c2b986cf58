"""Moving blobs over plain HTTP, from the side that dials.

A transfer has no time limit, only a progress deadline: it may take a night, but it may not stand still. It resumes
piece by piece from what the other side (or the store here) already holds, tries again by itself while that grows, and
fails in one of two ways: `TransferError`, try later and it goes on where it stopped, or `TransferRefused`, this will
never work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from geo_diloco.errors import BlobError, RemoteProtocolError, TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.pieces import (
    PIECE_DIGEST_BYTES,
    BlobStatus,
    GapError,
    check_size,
    num_pieces,
    piece_size,
    status_from_headers,
)
from geo_diloco.runtime.session import (
    STALL_S,
    ByteCounters,
    Deadline,
    Response,
    Session,
    TransferRefused,
    asking,
    raise_for_status,
    read_bounded,
)
from geo_diloco.runtime.store import BlobStore

STREAMS = 4
"""Parallel requests of one transfer: lossy links carry several streams far better than one (cubic)."""
FAILURES_MAX = 5
"""Tries in a row that the other side's (or our) holdings did not grow by."""
BACKOFF_S = 0.1
ANNOUNCE_WAIT_S = 10.0
"""How long an upload waits for its announcement, sent on another connection, to be heard."""
_CHUNK_BYTES = 64 << 10


class _NotAnnounced(TransferError):
    pass


async def upload_blob(
    session: Session,
    base_url: str,
    ref: BlobRef,
    store: BlobStore,
    *,
    stall_s: float = STALL_S,
    counters: ByteCounters | None = None,
    ask_first: bool = False,
) -> int:
    """Push a held blob to a peer that has heard its announcement; returns once every piece is confirmed. `ask_first`:
    ask what is missing even where one request would do, because the peer may well have it.

    Returns the rate in bytes per second. Raises TransferRefused or TransferError.
    """
    move = _Move(session, base_url, ref, store, stall_s, counters or ByteCounters())
    await _until_done(move, _Upload(move, ask_first=ask_first).attempt)
    return move.bytes_per_s()


async def fetch_blob(
    session: Session,
    base_url: str,
    ref: BlobRef,
    store: BlobStore,
    *,
    stall_s: float = STALL_S,
    counters: ByteCounters | None = None,
) -> int:
    """Have a blob in the store, from a peer that holds it; returns the rate in bytes per second.

    Raises TransferRefused if the peer doesn't have it or sends wrong bytes for it, else TransferError.
    """
    try:
        check_size(ref)
    except BlobError as exc:
        raise TransferRefused(str(exc)) from exc
    move = _Move(session, base_url, ref, store, stall_s, counters or ByteCounters())
    await _until_done(move, _Fetch(move).attempt)
    return move.bytes_per_s()


@dataclass
class _Move:
    """What an upload and a fetch have in common."""

    session: Session
    base_url: str
    ref: BlobRef
    store: BlobStore
    stall_s: float
    counters: ByteCounters
    moved: int = 0
    confirmed: int = 0
    """Most bytes that the receiving side was known to hold: only this is progress."""
    failures: int = 0
    """Tries that broke off since there was progress."""
    began_at: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        return f"{self.base_url}/v1/blobs/{self.ref.digest}"

    def bytes_per_s(self) -> int:
        return int(self.moved / max(time.monotonic() - self.began_at, 1e-6))

    def confirm(self, status: BlobStatus) -> None:
        held = sum(piece_size(self.ref.size, i) for i in status.held) + sum(status.open_offsets.values())
        if held > self.confirmed:
            self.confirmed, self.failures = held, 0


async def _until_done(move: _Move, attempt: Callable[[], Awaitable[None]]) -> None:
    not_announced_at: float | None = None
    while True:
        try:
            return await attempt()
        except TransferRefused:
            raise
        except RemoteProtocolError as exc:
            raise TransferRefused(str(exc)) from exc
        except _NotAnnounced as exc:
            not_announced_at = not_announced_at or time.monotonic()
            if time.monotonic() - not_announced_at > ANNOUNCE_WAIT_S:
                raise TransferRefused(str(exc)) from exc
            await asyncio.sleep(BACKOFF_S)
            continue
        except TransferError:
            not_announced_at = None
            move.failures += 1
            if move.failures >= FAILURES_MAX:
                raise
        await asyncio.sleep(BACKOFF_S * 2**move.failures * random.uniform(0.5, 1.5))


class _Upload:
    def __init__(self, move: _Move, *, ask_first: bool) -> None:
        self._m = move
        self._is_first = not ask_first

    async def attempt(self) -> None:
        m, total = self._m, num_pieces(self._m.ref.size)
        if total == 1 and self._is_first:
            self._is_first = False
            return await self._put_piece(0, 0)
        status = await self._head()
        m.confirm(status)
        if not status.has_index and total != 1:
            await self._put_index()
        missing = [i for i in range(total) if i not in status.held]
        await _in_streams(missing, lambda i: self._put_piece(i, status.open_offsets.get(i, 0)))

    async def _head(self) -> BlobStatus:
        m = self._m
        async with asking(m.url), Deadline(m.stall_s), m.session.head(m.url, allow_redirects=False) as response:
            await self._check(response)
            return status_from_headers(response.headers, m.ref)

    async def _put_index(self) -> None:
        m = self._m
        with _own_blob():
            index = await asyncio.to_thread(m.store.index, m.ref)
        await self._put(f"{m.url}/index", index, {})

    async def _put_piece(self, i: int, offset: int) -> None:
        m = self._m
        with _own_blob():
            data = await asyncio.to_thread(m.store.read_piece, m.ref, i)
        content_range = f"bytes {offset}-{len(data) - 1}/{len(data)}"
        await self._put(f"{m.url}/{i}", memoryview(data)[offset:], {"Content-Range": content_range})

    async def _put(self, url: str, body: bytes | memoryview, headers: dict[str, str]) -> None:
        m = self._m
        headers["Content-Length"] = str(len(body))
        headers["Content-Type"] = "application/octet-stream"
        async with (
            asking(url),
            Deadline(m.stall_s) as deadline,
            m.session.put(url, data=self._chunks(body, deadline), headers=headers, allow_redirects=False) as response,
        ):
            await self._check(response)

    async def _chunks(self, body: bytes | memoryview, deadline: Deadline) -> AsyncIterator[bytes]:
        for begin in range(0, len(body), _CHUNK_BYTES):
            chunk = bytes(body[begin : begin + _CHUNK_BYTES])
            yield chunk
            deadline.touch()
            self._m.moved += len(chunk)
            self._m.counters.bulk_out += len(chunk)

    async def _check(self, response: Response) -> None:
        try:
            await raise_for_status(response)
        except TransferRefused as exc:
            if response.status == 404:
                raise _NotAnnounced(str(exc)) from exc
            raise


class _Fetch:
    def __init__(self, move: _Move) -> None:
        self._m = move
        self._wrong: set[int] = set()
        """Pieces that came with a wrong digest once."""

    async def attempt(self) -> None:
        m, total = self._m, num_pieces(self._m.ref.size)
        with _own_store():
            status = await asyncio.to_thread(m.store.status, m.ref)
        if status.complete:
            return
        m.confirm(status)
        if not status.has_index and total != 1:
            await self._get_index()
        missing = [i for i in range(total) if i not in status.held]
        await _in_streams(missing, lambda i: self._get_piece(i, status.open_offsets.get(i, 0)))

    async def _get_index(self) -> None:
        m = self._m
        wanted = num_pieces(m.ref.size) * PIECE_DIGEST_BYTES
        async with (
            asking(m.url),
            Deadline(m.stall_s) as deadline,
            m.session.get(m.url, allow_redirects=False) as response,
        ):
            await raise_for_status(response)
            index = await read_bounded(response, wanted, deadline)
        try:
            await asyncio.to_thread(m.store.set_index, m.ref, index)
        except StoreFullError as exc:
            raise TransferError(str(exc)) from exc
        except BlobError as exc:
            raise TransferRefused(f"{m.base_url}: {exc}") from exc

    async def _get_piece(self, i: int, offset: int) -> None:
        m, url = self._m, f"{self._m.url}/{i}"
        size = piece_size(m.ref.size, i)
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        async with (
            asking(url),
            Deadline(m.stall_s) as deadline,
            m.session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            await raise_for_status(response)
            if response.status == 200:
                offset = 0
            if response.content_length != size - offset:
                raise TransferRefused(f"{url} answers {response.content_length} bytes, wanted {size - offset}")
            async for chunk in response.content.iter_any():
                deadline.touch()
                await self._keep(i, offset, chunk, size)
                offset += len(chunk)

    async def _keep(self, i: int, offset: int, chunk: bytes, size: int) -> None:
        m = self._m
        m.moved += len(chunk)
        m.counters.bulk_in += len(chunk)
        try:
            if offset + len(chunk) < size:
                m.store.append_piece(m.ref, i, offset, chunk)
            else:  # hashed and written now, which is no work for the event loop
                await asyncio.to_thread(m.store.append_piece, m.ref, i, offset, chunk)
        except (GapError, StoreFullError) as exc:
            raise TransferError(str(exc)) from exc
        except BlobError as exc:
            if i in self._wrong:
                raise TransferRefused(f"{m.base_url}: {exc}") from exc
            self._wrong.add(i)
            raise TransferError(f"{m.base_url}: {exc}") from exc


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


async def _in_streams(pieces: list[int], move_piece: Callable[[int], Awaitable[None]]) -> None:
    """Move pieces, STREAMS at a time. The first failure ends all and is raised as it was."""
    rest = iter(pieces)

    async def stream() -> None:
        for i in rest:
            await move_piece(i)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(STREAMS, len(pieces))):
                group.create_task(stream())
    except BaseExceptionGroup as failures:
        first = min(failures.exceptions, key=lambda exc: not isinstance(exc, TransferRefused))
    else:
        return
    raise first
