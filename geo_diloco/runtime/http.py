"""What a reachable peer serves: the run, the chain, snapshots, status, blobs by piece, and control connections.

Everyone may read: what is served names itself by a digest or is signed. Written may be only what the core announced
(`ServerPort.accepts`), and bytes are counted here, before and while they are read, because the HTTP library does not.
A body has a progress deadline and no total one. A refusal is one line of JSON, `{"error": word, "detail": text}`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from aiohttp import ClientPayloadError, web

from geo_diloco.errors import BlobError, ConfigError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import Digest, PeerId, RunId
from geo_diloco.protocol.election.ballots import Ballot
from geo_diloco.protocol.messages import BlobRef, Envelope, Hello
from geo_diloco.runtime.control import (
    CLOSE_LEAVING,
    CLOSE_PROTOCOL,
    CLOSE_REFUSED,
    CLOSE_REPLACED,
    CLOSE_S,
    HEARTBEAT_S,
    ControlLink,
    greeting,
    is_nonce_half,
    new_nonce_half,
)
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.door import Allowance, Doorkeeper, address_of, connections_max
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.pieces import (
    PIECE_DIGEST_BYTES,
    SIZE_HEADER,
    GapError,
    IndexMissingError,
    headers_from_status,
    num_pieces,
    piece_size,
)
from geo_diloco.runtime.session import STALL_S, ByteCounters
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import MESSAGE_LINE_BYTES_MAX, ORDER_BYTES_MAX, Order, Signed, open_order

ENTRIES_PER_ANSWER_MAX = 512
ANSWER_BYTES_MAX = 1 << 20
"""Of entries in one answer, unless one alone is longer: many may ask at once, and read slowly."""
LINKS_MAX = 1024
LINKS_PER_ADDRESS_MAX = LINKS_MAX // 2
STATUS_S = 0.1
IDLE_S = 75.0
"""A connection without a request ends after that, whether one is being sent slowly or none at all."""
FIRST_S = 20.0
"""On a control connection something must be said within this time."""
_WRITE_BYTES = 256 << 10
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,8})-([0-9]{1,8})/([0-9]{1,8})")
_RANGE = re.compile(r"bytes=([0-9]{1,8})-([0-9]{0,8})")
_NUMBER = re.compile(r"[0-9]{1,15}")


class ServerPort(Protocol):
    """What the server asks of the peer it serves for. Called in the event loop's thread."""

    @property
    def run(self) -> RunId: ...
    @property
    def manifest(self) -> bytes:
        """Canonical bytes."""

    def signed_entries(self, from_seq: int, limit: int) -> list[Signed]: ...
    def proof(self, first: int, limit: int) -> list[Signed]:
        """Of who serves: durable `found`, `roster` and `open` entries, counted from 0."""

    async def snapshot(self, fragments: tuple[int, ...] | None) -> Signed | None: ...
    def status(self) -> dict[str, Any]: ...
    def accepts(self, digest: Digest) -> BlobRef | None:
        """The announced blob of that digest, if its bytes may come now."""

    def blob_arrived(self, ref: BlobRef) -> None:
        """It is complete. May be said more than once."""

    @property
    def owner(self) -> PeerId:
        """Of the run: its founder."""

    def order(self, order: Order) -> str:
        """An owner's wish, verified to be his; a word to answer with. Raises RefusedError if it can't be followed,
        TransferError if it can't be here and now."""

    def verify_token(self, proof: str, nonce: str, peer: PeerId) -> bool:
        """Whether the proof it shows, in Hello or before all else, lets the peer in (`identity.proof_is_valid`)."""

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        """A control connection began, with this envelope. An older one that the peer dialed has been closed."""

    def received(self, link: ControlLink, item: Envelope | Signed) -> None: ...
    def closed(self, link: ControlLink, reason: str) -> None:
        """Said once for every link that was opened."""


class _Refusal(Exception):
    def __init__(self, status: int, error: str, detail: str, **more: int) -> None:
        super().__init__(detail)
        self.status = status
        self.body = json.dumps({"error": error, "detail": detail, **more})


class HttpServer:
    """Serves one run on one port."""

    def __init__(self, port: ServerPort, identity: Identity, store: BlobStore) -> None:
        self.counters = ByteCounters()
        self._port = port
        self._identity = identity
        self._store = store
        self._links: dict[PeerId, ControlLink] = {}
        self._all_links: dict[ControlLink, str] = {}
        """And the address at the other end."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._status_at: float | None = None
        self._status_body = b""
        self._order_nonce_now = ""

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chose if 0 was given. Raises ConfigError if it is not free."""
        app = web.Application(middlewares=[_refusals])
        for method, path, handler in (
            ("GET", "/v1/run", self._run),
            ("GET", "/v1/chain", self._chain),
            ("GET", "/v1/proof", self._proof),
            ("GET", "/v1/snapshot", self._snapshot),
            ("GET", "/v1/status", self._status),
            ("HEAD", "/v1/blobs/{digest}", self._blob_status),
            ("GET", "/v1/blobs/{digest}", self._blob_index),
            ("PUT", "/v1/blobs/{digest}/index", self._put_index),
            ("GET", "/v1/blobs/{digest}/{piece}", self._get_piece),
            ("PUT", "/v1/blobs/{digest}/{piece}", self._put_piece),
            ("GET", "/v1/control", self._control),
            ("GET", "/v1/order", self._order_nonce),
            ("POST", "/v1/order", self._order),
        ):
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=1.0,
            lingering_time=2.0,
            keepalive_timeout=IDLE_S,
        )
        await runner.setup()
        handlers = runner.server
        assert handlers is not None
        keeper = Doorkeeper(handlers, most=connections_max())
        try:
            loop = asyncio.get_running_loop()
            listener = await loop.create_server(keeper.door, host, port, backlog=128)
        except OSError as exc:
            await runner.cleanup()
            raise ConfigError(f"can't listen on {host}:{port}: {exc.strerror or exc}") from exc
        self._runner, self._listener = runner, listener
        return int(listener.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close every control connection after what is queued there, then stop listening."""
        for link in list(self._all_links):
            link.close("leaving", code=CLOSE_LEAVING)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # ---- small questions

    async def _run(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._port.manifest, "application/json")

    async def _chain(self, request: web.Request) -> web.StreamResponse:
        from_seq = _number(request.query.get("from", "0"), "from")
        limit = min(_number(request.query.get("limit", "256"), "limit"), ENTRIES_PER_ANSWER_MAX)
        return await self._entries(request, self._port.signed_entries(from_seq, limit))

    async def _proof(self, request: web.Request) -> web.StreamResponse:
        first = _number(request.query.get("from", "0"), "from")
        return await self._entries(request, self._port.proof(first, ENTRIES_PER_ANSWER_MAX))

    async def _entries(self, request: web.Request, entries: list[Signed]) -> web.StreamResponse:
        lines: list[bytes] = []
        size = 0
        for signed in entries:
            line = signed.to_line().encode() + b"\n"
            size += len(line)
            if lines and size > ANSWER_BYTES_MAX:
                break
            lines.append(line)
        return await self._answer(request, b"".join(lines), "application/jsonl")

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("fragments")
        if wanted is not None and len(wanted) > 4096:
            raise _Refusal(400, "bad-query", "too many fragments")
        fragments = None if wanted is None else tuple(_number(p, "fragments") for p in wanted.split(","))
        signed = await self._port.snapshot(fragments)
        return await self._answer(request, signed.to_line().encode() if signed else b"", "application/jsonl")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        """Made anew every so often, however many ask."""
        now = asyncio.get_running_loop().time()
        if self._status_at is None or now - self._status_at >= STATUS_S:
            self._status_at, self._status_body = now, json.dumps(self._port.status()).encode()
        return await self._answer(request, self._status_body, "application/json")

    async def _answer(self, request: web.Request, body: bytes, content_type: str) -> web.StreamResponse:
        self.counters.control_out += len(body)
        return await _write(request, body, content_type=content_type)

    # ---- blobs

    async def _blob_status(self, request: web.Request) -> web.StreamResponse:
        ref = self._readable(request)
        with _not_taken():
            status = await asyncio.to_thread(self._store.status, ref)
        return web.Response(headers=headers_from_status(ref, status))

    async def _blob_index(self, request: web.Request) -> web.StreamResponse:
        ref = self._readable(request)
        with _not_held():
            index = await asyncio.to_thread(self._store.index, ref)
        return await self._send(request, index, status=200, headers={SIZE_HEADER: str(ref.size)})

    async def _get_piece(self, request: web.Request) -> web.StreamResponse:
        ref = self._readable(request)
        i, size = self._piece(request, ref)
        with _not_held():
            data = await asyncio.to_thread(self._store.read_piece, ref, i)
        headers = {SIZE_HEADER: str(ref.size)}
        asked = request.headers.get("Range")
        if asked is None:
            return await self._send(request, data, status=200, headers=headers)
        match = _RANGE.fullmatch(asked)
        first = int(match[1]) if match else size
        last = min(int(match[2]) if match and match[2] else size - 1, size - 1)
        if first > last:
            raise _Refusal(416, "bad-range", f"range {asked[:40]!r} of a piece of {size} bytes")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return await self._send(request, memoryview(data)[first : last + 1], status=206, headers=headers)

    async def _send(
        self, request: web.Request, body: bytes | memoryview, *, status: int, headers: dict[str, str]
    ) -> web.StreamResponse:
        def sent(size: int) -> None:
            self.counters.bulk_out += size

        return await _write(request, body, status=status, headers=headers, sent=sent)

    async def _put_index(self, request: web.Request) -> web.StreamResponse:
        ref = self._writable(request)
        wanted = num_pieces(ref.size) * PIECE_DIGEST_BYTES
        _check_length(request, wanted)
        async with aclosing(self._body(request, wanted)) as chunks:
            index = b"".join([chunk async for chunk in chunks])
        with _not_taken():
            await asyncio.to_thread(self._store.set_index, ref, index)
        return self._taken(ref)

    async def _put_piece(self, request: web.Request) -> web.StreamResponse:
        ref = self._writable(request)
        i, size = self._piece(request, ref)
        match = _CONTENT_RANGE.fullmatch(request.headers.get("Content-Range", f"bytes 0-{size - 1}/{size}"))
        if match is None or int(match[3]) != size or not int(match[1]) <= int(match[2]) < size:
            raise _Refusal(416, "bad-range", f"Content-Range wanted within a piece of {size} bytes")
        offset, length = int(match[1]), int(match[2]) - int(match[1]) + 1
        _check_length(request, length)
        async with aclosing(self._body(request, length)) as chunks:
            async for chunk in chunks:
                with _not_taken():
                    if offset + len(chunk) < size:
                        self._store.append_piece(ref, i, offset, chunk)
                    else:  # hashed and written now, which is no work for the event loop
                        await asyncio.to_thread(self._store.append_piece, ref, i, offset, chunk)
                offset += len(chunk)
        return self._taken(ref)

    async def _body(self, request: web.Request, length: int) -> AsyncGenerator[bytes]:
        """Exactly `length` bytes in chunks as they come; refused if there are fewer, more or none for a while."""
        taken = 0
        try:
            while taken < length:
                async with asyncio.timeout(STALL_S):
                    chunk = await request.content.readany()
                if not chunk:
                    raise _Refusal(400, "truncated", f"{taken} bytes came, {length} were declared")
                taken += len(chunk)
                if taken > length:
                    raise _Refusal(413, "too-large", f"more than the {length} bytes declared")
                self.counters.bulk_in += len(chunk)
                yield chunk
        except TimeoutError as exc:
            raise _Refusal(408, "stalled", f"no byte came for {STALL_S:.0f} s") from exc
        except (ConnectionError, ClientPayloadError) as exc:
            raise _Refusal(400, "truncated", f"{taken} bytes came, {length} were declared") from exc

    def _taken(self, ref: BlobRef) -> web.Response:
        if self._store.has(ref):
            self._port.blob_arrived(ref)
        return web.Response()

    def _readable(self, request: web.Request) -> BlobRef:
        """Held or announced."""
        digest = request.match_info["digest"]
        ref = self._store.find(digest) or self._port.accepts(Digest(digest))
        if ref is None:
            raise _Refusal(404, "unknown-blob", f"blob {digest[:12]} is neither held nor announced")
        return ref

    def _writable(self, request: web.Request) -> BlobRef:
        """Announced, or complete already, when a repeat does no harm."""
        digest = request.match_info["digest"]
        ref = self._port.accepts(Digest(digest)) or self._store.find(digest)
        if ref is None:
            raise _Refusal(404, "unannounced", f"blob {digest[:12]} is not announced")
        if "Content-Encoding" in request.headers:
            raise _Refusal(415, "encoded", "bodies are taken as they are, without a Content-Encoding")
        return ref

    def _piece(self, request: web.Request, ref: BlobRef) -> tuple[int, int]:
        i = _number(request.match_info["piece"], "piece")
        if i >= num_pieces(ref.size):
            raise _Refusal(404, "no-such-piece", f"piece {i} of a blob of {num_pieces(ref.size)}")
        return i, piece_size(ref.size, i)

    # ---- the owner's orders

    async def _order_nonce(self, request: web.Request) -> web.StreamResponse:
        """Of the one order that may follow; the newest counts."""
        self._order_nonce_now = new_nonce_half()
        return await self._answer(request, self._order_nonce_now.encode(), "text/plain")

    async def _order(self, request: web.Request) -> web.StreamResponse:
        length = request.content_length
        if length is None or length > 2 * ORDER_BYTES_MAX:
            raise _Refusal(413, "too-large", f"an order of at most {2 * ORDER_BYTES_MAX} bytes is wanted")
        async with aclosing(self._body(request, length)) as chunks:
            text = b"".join([chunk async for chunk in chunks])
        nonce, self._order_nonce_now = self._order_nonce_now, ""
        try:
            order, signer = open_order(text)
        except RemoteProtocolError as exc:
            raise _Refusal(400, "bad-order", str(exc)) from exc
        owner = self._identity.peer_id if order.wish == "hand_over" else self._port.owner
        if (signer, order.run) != (owner, self._port.run) or not nonce or order.nonce != nonce:
            raise _Refusal(403, "not-the-owner", "signed by another key, for another run, or on another occasion")
        try:
            answer = self._port.order(order)
        except (RefusedError, RemoteProtocolError) as exc:
            raise _Refusal(403, "refused", str(exc)) from exc
        except TransferError as exc:
            raise _Refusal(503, "not-now", str(exc)) from exc
        return await self._answer(request, answer.encode(), "text/plain")

    # ---- control connections

    async def _control(self, request: web.Request) -> web.StreamResponse:
        theirs = request.query.get("nonce", "")
        if not is_nonce_half(theirs):
            raise _Refusal(400, "bad-nonce", "nonce wanted: 32 lower-case hex characters")
        address = address_of(request.transport)
        if len(self._all_links) >= LINKS_MAX or list(self._all_links.values()).count(address) >= LINKS_PER_ADDRESS_MAX:
            raise _Refusal(503, "full", f"{len(self._all_links)} control connections are open")
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, max_msg_size=MESSAGE_LINE_BYTES_MAX, compress=False, timeout=CLOSE_S
        )
        await socket.prepare(request)
        nonce = new_nonce_half() + theirs
        own = self._identity.peer_id
        link = ControlLink(
            socket,
            run=self._port.run,
            own=own,
            peer=None,
            nonce=nonce,
            counters=self.counters,
            allowance=Allowance(),
        )
        self._all_links[link] = address
        try:
            async with link.running():
                link.send(greeting(self._port.run, own, nonce))
                await self._serve(link)
        finally:
            self._all_links.pop(link, None)
        return socket

    async def _serve(self, link: ControlLink) -> None:
        first = await self._first(link)
        if first is None:
            return
        older = self._links.pop(link.peer, None)
        if older is not None:
            code = CLOSE_LEAVING if older.boot == link.boot else CLOSE_REPLACED
            older.close("replaced by a newer connection", code=code)
            self._port.closed(older, older.close_reason)
        self._links[link.peer] = link
        try:
            self._port.opened(link, first)
            async for item in link:
                if self._links.get(link.peer) is not link:
                    break
                self._port.received(link, item)
        finally:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
                link.close("connection lost")
                self._port.closed(link, link.close_reason)

    async def _first(self, link: ControlLink) -> Envelope | None:
        """The first envelope, if it is an admitted peer's: a learner's Hello, or a ballot."""
        try:
            async with asyncio.timeout(FIRST_S):
                first = await link.receive()
        except TimeoutError:
            link.close("nothing was said in time", code=CLOSE_PROTOCOL)
            return None
        if not isinstance(first, Envelope):
            return None
        if not isinstance(first.message, Hello | Ballot):
            link.close("a Hello or a ballot must come first", code=CLOSE_PROTOCOL)
            return None
        proof = first.message.proof if isinstance(first.message, Hello) else link.proof
        if not self._port.verify_token(proof, link.nonce, link.peer):
            link.close("not admitted: the invite's admission token is missing or wrong", code=CLOSE_REFUSED)
            return None
        return first


async def _write(
    request: web.Request,
    body: bytes | memoryview,
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
    content_type: str = "application/octet-stream",
    sent: Callable[[int], None] = lambda size: None,
) -> web.StreamResponse:
    """An answer that whoever asked has to read: one that takes nothing for a while is let go."""
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = content_type
    response.content_length = len(body)
    await response.prepare(request)
    try:
        for begin in range(0, len(body), _WRITE_BYTES):
            chunk = bytes(body[begin : begin + _WRITE_BYTES])
            async with asyncio.timeout(STALL_S):
                await response.write(chunk)
            sent(len(chunk))
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


# ---- refusals --------------------------------------------------------------------------------------------------


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Also for paths and methods that don't exist: every refusal is one line of JSON."""
    try:
        return await handler(request)
    except _Refusal as refusal:
        return web.Response(status=refusal.status, text=refusal.body, content_type="application/json")
    except web.HTTPError as exc:
        body = json.dumps({"error": "no-such-thing", "detail": f"{request.method} {request.path[:200]}: {exc.reason}"})
        return web.Response(status=exc.status, text=body, content_type="application/json")


@contextmanager
def _not_taken() -> Iterator[None]:
    try:
        yield
    except GapError as exc:
        raise _Refusal(409, "gap", str(exc), offset=exc.expected_offset) from exc
    except IndexMissingError as exc:
        raise _Refusal(409, "index-missing", str(exc)) from exc
    except StoreFullError as exc:
        raise _Refusal(507, "full", str(exc)) from exc
    except BlobError as exc:
        raise _Refusal(422, "wrong-bytes", str(exc)) from exc


@contextmanager
def _not_held() -> Iterator[None]:
    try:
        yield
    except BlobError as exc:
        raise _Refusal(404, "not-held", str(exc)) from exc


def _check_length(request: web.Request, wanted: int) -> None:
    declared = request.content_length
    if declared is None:
        raise _Refusal(411, "no-length", "Content-Length wanted")
    if declared != wanted:
        status = 413 if declared > wanted else 400
        raise _Refusal(status, "wrong-length", f"Content-Length {declared}, wanted {wanted}")


def _number(text: str, name: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise _Refusal(400, "bad-number", f"{name}={text[:40]!r} is not a whole number")
    return int(text)
