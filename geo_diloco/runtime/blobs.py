"""Blobs as the server gives and takes them: by piece or by run of pieces, from any offset, any number of times.

Everyone may read, because a blob names itself by its digest. Written may be only what the core announced. What is
here in part is given in part, so that a peer which is still fetching can already be a donor to the next.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

from aiohttp import web

from geo_diloco.errors import BlobError, RemoteProtocolError
from geo_diloco.manifest import Digest
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.answers import WRITE_BYTES, Refusal, check_length, number, read_body, write_answer
from geo_diloco.runtime.bulk import Lanes
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.door import address_of
from geo_diloco.runtime.pieces import (
    COMPLETE_HEADER,
    INDEX_BROUGHT_HEADER,
    INDEX_BROUGHT_PIECES_MAX,
    INDEX_WANTED_HEADER,
    PIECE_BYTES,
    PIECE_DIGEST_BYTES,
    SIZE_HEADER,
    IndexMissingError,
    by_piece,
    header_from_index,
    headers_from_status,
    index_from_header,
    num_pieces,
    piece_range,
)
from geo_diloco.runtime.session import ByteCounters, Deadline
from geo_diloco.runtime.spans import Span
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.turns import Turns

SPAN_PIECES_MAX = 64
"""Of one request."""
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,8})-([0-9]{1,8})/([0-9]{1,8})")
_RANGE = re.compile(r"bytes=([0-9]{1,8})-([0-9]{0,8})")


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BlobDoor:
    """The handlers of `/v1/blobs/`."""

    def __init__(
        self,
        store: BlobStore,
        *,
        accepts: Callable[[Digest], BlobRef | None],
        must_last: Callable[[Digest], bool],
        arrived: Callable[[BlobRef], None],
        why_not: Callable[[], str],
        counters: ByteCounters,
        lanes: Lanes,
        turns: Turns,
    ) -> None:
        """`accepts`: the announced blob of a digest, if its bytes may come now; `must_last`: whether it has to outlive
        a crash of the machine; `arrived` is told of a complete one; `why_not`: why blobs are not given to others now,
        empty if they are. Every request takes a turn."""
        self._store = store
        self._accepts = accepts
        self._must_last = must_last
        self._arrived = arrived
        self._why_not = why_not
        self._counters = counters
        self._lanes = lanes
        self._turns = turns

    def routes(self) -> list[web.RouteDef]:
        blob = "/v1/blobs/{digest}"
        return [
            web.head(blob, self._in_turn(self._status)),
            web.get(blob, self._in_turn(self._index), allow_head=False),
            web.put(f"{blob}/index", self._in_turn(self._put_index)),
            web.get(f"{blob}/{{pieces}}", self._in_turn(self._get_pieces), allow_head=False),
            web.put(f"{blob}/{{pieces}}", self._in_turn(self._put_pieces)),
        ]

    def _in_turn(self, handler: _Handler) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            await self._turns.take()
            return await handler(request)

        return handle

    async def _status(self, request: web.Request) -> web.StreamResponse:
        ref = self._readable(request)
        with _not_taken():
            status = await asyncio.to_thread(self._store.status, ref)
        return web.Response(headers=headers_from_status(ref, status))

    async def _index(self, request: web.Request) -> web.StreamResponse:
        ref = self._readable(request)
        with _not_held():
            index = await asyncio.to_thread(self._store.index, ref)
            status = await asyncio.to_thread(self._store.status, ref)
        return await self._send(request, ref, [index], headers=headers_from_status(ref, status))

    async def _get_pieces(self, request: web.Request) -> web.StreamResponse:
        ref = self._readable(request)
        span = self._span(request, ref)
        size = span.num_bytes
        status, headers = 200, {SIZE_HEADER: str(ref.size)}
        if (asked := request.headers.get("Range")) is not None:
            match = _RANGE.fullmatch(asked)
            first = int(match[1]) if match else size
            last = min(int(match[2]) if match and match[2] else size - 1, size - 1)
            if first > last:
                raise Refusal(416, "bad-range", f"range {asked[:40]!r} of {size} bytes")
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{size}"
        else:
            first, last = 0, size - 1
        with _not_held():
            held = (await asyncio.to_thread(self._store.status, ref)).held
            if not held.issuperset(span.pieces()):
                raise BlobError(f"not all of pieces {request.match_info['pieces']} are held")
            begin = await asyncio.to_thread(self._store.read_piece, ref, (span.begin + first) // PIECE_BYTES)
            if INDEX_WANTED_HEADER in request.headers and num_pieces(ref.size) <= INDEX_BROUGHT_PIECES_MAX:
                index = await asyncio.to_thread(self._store.index, ref)
                headers[INDEX_BROUGHT_HEADER] = header_from_index(index)
        parts = self._parts(ref, Span(span.begin + first, span.begin + last + 1), begin)
        headers["Content-Length"] = str(last + 1 - first)
        return await self._send(request, ref, parts, status=status, headers=headers)

    async def _parts(self, ref: BlobRef, wanted: Span, first: bytes) -> AsyncIterator[memoryview]:
        """The bytes wanted, piece by piece; `first` is the first of these pieces."""
        at, data = wanted.begin, first
        while True:
            offset = at % PIECE_BYTES
            part = memoryview(data)[offset : offset + wanted.end - at]
            if not part:
                raise BlobError(f"a piece of blob {ref.digest[:12]} is shorter than it should be")
            yield part
            at += len(part)
            if at >= wanted.end:
                return
            data = await asyncio.to_thread(self._store.read_piece, ref, at // PIECE_BYTES)

    async def _send(
        self,
        request: web.Request,
        ref: BlobRef,
        parts: AsyncIterator[memoryview] | list[bytes],
        *,
        status: int = 200,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        up, board = self._lanes.up, self._lanes.board
        whom = address_of(request.transport)
        line = board.served(f"blob {ref.digest[:12]}", "up", ref.size, whom)
        line.resumed += status == 206

        async def sending(size: int, deadline: Deadline) -> None:
            await up.take(size, touch=deadline.touch)
            self._counters.bulk_out += size
            board.moved(line, size, whom)

        return await write_answer(
            request, parts, status=status, headers=headers, portion=up.portion(WRITE_BYTES), sending=sending
        )

    async def _put_index(self, request: web.Request) -> web.StreamResponse:
        ref = self._writable(request)
        wanted = num_pieces(ref.size) * PIECE_DIGEST_BYTES
        check_length(request, wanted)
        async with aclosing(read_body(request, wanted, came=self._came)) as chunks:
            index = b"".join([chunk async for chunk in chunks])
        with _not_taken():
            await asyncio.to_thread(self._store.set_index, ref, index)
            status = await asyncio.to_thread(self._store.status, ref)
        return self._taken(ref, headers_from_status(ref, status))

    async def _put_pieces(self, request: web.Request) -> web.StreamResponse:
        ref = self._writable(request)
        span = self._span(request, ref)
        size = span.num_bytes
        match = _CONTENT_RANGE.fullmatch(request.headers.get("Content-Range", f"bytes 0-{size - 1}/{size}"))
        if match is None or int(match[3]) != size or not int(match[1]) <= int(match[2]) < size:
            raise Refusal(416, "bad-range", f"Content-Range wanted within {size} bytes")
        at, length = int(match[1]), int(match[2]) - int(match[1]) + 1
        check_length(request, length)
        if (index := request.headers.get(INDEX_BROUGHT_HEADER)) is not None:
            await self._take_index(ref, index)
        whom, board = address_of(request.transport), self._lanes.board
        line = board.served(f"blob {ref.digest[:12]}", "down", ref.size, whom)
        line.resumed += at > 0
        async with aclosing(read_body(request, length, came=self._came)) as chunks:
            async for chunk in chunks:
                board.moved(line, len(chunk), whom)
                await self._keep(ref, span.begin + at, chunk)
                at += len(chunk)
        return self._taken(ref)

    async def _take_index(self, ref: BlobRef, text: str) -> None:
        """Which came along with bytes, to save a round trip."""
        try:
            index = index_from_header(text)
        except RemoteProtocolError as exc:
            raise Refusal(400, "bad-index", str(exc)) from exc
        with _not_taken():
            await asyncio.to_thread(self._store.set_index, ref, index)

    async def _keep(self, ref: BlobRef, at: int, chunk: bytes) -> None:
        """Bytes from `at` within the blob on, into the pieces they belong to."""
        for i, offset, part in by_piece(ref.size, at, chunk):
            with _not_taken():
                if self._store.is_piece_filled_by(ref, i, offset, len(part)):  # no work for the event loop
                    syncs = self._must_last(ref.digest)
                    await asyncio.to_thread(self._store.append_piece, ref, i, offset, part, syncs=syncs)
                else:
                    self._store.append_piece(ref, i, offset, part)

    async def _came(self, size: int) -> None:
        self._counters.bulk_in += size
        await self._lanes.down.take(size)

    def _taken(self, ref: BlobRef, headers: dict[str, str] | None = None) -> web.Response:
        is_complete = self._store.has(ref)
        if is_complete:
            self._arrived(ref)
        return web.Response(headers={COMPLETE_HEADER: str(int(is_complete)), **(headers or {})})

    def _readable(self, request: web.Request) -> BlobRef:
        """Held or announced. Who pushes an announced one may always ask how much of it is here."""
        digest = request.match_info["digest"]
        why_not = self._why_not()
        if why_not and not (request.method == "HEAD" and self._accepts(Digest(digest))):
            raise Refusal(404, "no-mirror", f"this peer gives nothing to others now: {why_not}")
        ref = self._store.find(digest) or self._accepts(Digest(digest))
        if ref is None:
            raise Refusal(404, "unknown-blob", f"blob {digest[:12]} is neither held nor announced")
        return ref

    def _writable(self, request: web.Request) -> BlobRef:
        """Announced, or complete already, when a repeat does no harm."""
        digest = request.match_info["digest"]
        ref = self._accepts(Digest(digest)) or self._store.find(digest)
        if ref is None:
            raise Refusal(404, "unannounced", f"blob {digest[:12]} is not announced")
        if "Content-Encoding" in request.headers:
            raise Refusal(415, "encoded", "bodies are taken as they are, without a Content-Encoding")
        return ref

    def _span(self, request: web.Request, ref: BlobRef) -> Span:
        """The piece or run of pieces that a request is about: `3`, or `3-7`."""
        name, _, other = request.match_info["pieces"].partition("-")
        first, last = number(name, "piece"), number(other or name, "piece")
        if not first <= last < num_pieces(ref.size) or last - first >= SPAN_PIECES_MAX:
            text = f"pieces {first} to {last} of a blob of {num_pieces(ref.size)}, at most {SPAN_PIECES_MAX}"
            raise Refusal(404, "no-such-piece", text)
        return Span(first * PIECE_BYTES, piece_range(ref.size, last)[1])


@contextmanager
def _not_taken() -> Iterator[None]:
    try:
        yield
    except IndexMissingError as exc:
        raise Refusal(409, "index-missing", str(exc)) from exc
    except StoreFullError as exc:
        raise Refusal(507, "full", str(exc)) from exc
    except BlobError as exc:
        raise Refusal(422, "wrong-bytes", str(exc)) from exc


@contextmanager
def _not_held() -> Iterator[None]:
    try:
        yield
    except BlobError as exc:
        raise Refusal(404, "not-held", str(exc)) from exc
