"""What a reachable peer serves: the run, the chain, snapshots, status, blobs by piece, and control connections.

Everyone may read: what is served names itself by a digest or is signed. Written may be only what the core announced
(`ServerPort.accepts`). Blobs are in `blobs.py`, bodies and refusals in `answers.py`.
"""

from __future__ import annotations

import asyncio
import errno
import json
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from geo_diloco.errors import ConfigError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import Digest, PeerId, RunId
from geo_diloco.protocol.election.ballots import Ballot
from geo_diloco.protocol.messages import BlobRef, Envelope, Hello
from geo_diloco.runtime.answers import Refusal, number, read_body, refusals, write_answer
from geo_diloco.runtime.blobs import BlobDoor
from geo_diloco.runtime.bulk import Lanes
from geo_diloco.runtime.contacts import Contacts
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
from geo_diloco.runtime.door import Allowance, Doorkeeper, Occasions, address_of, connections_max
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import ByteCounters
from geo_diloco.runtime.sockets import prepare
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.turns import Turns
from geo_diloco.runtime.wire import MESSAGE_LINE_BYTES_MAX, ORDER_BYTES_MAX, Order, Signed, open_order

ENTRIES_PER_ANSWER_MAX = 512
ANSWER_BYTES_MAX = 1 << 20
"""Of entries in one answer, unless one alone is longer: many may ask at once, and read slowly."""
LINKS_MAX = 2048
"""A learner has a connection for bulk beside its link."""
LINKS_PER_ADDRESS_MAX = LINKS_MAX // 2
STATUS_S = 0.1
IDLE_S = 75.0
"""A connection without a request ends after that, whether one is being sent slowly or none at all."""
FIRST_S = 20.0
"""On a control connection something must be said within this time."""


class ServerPort(Protocol):
    """What the server asks of the peer it serves for. Called in the event loop's thread."""

    @property
    def run(self) -> RunId: ...
    @property
    def manifest(self) -> bytes:
        """Canonical bytes."""

    @property
    def layout(self) -> bytes:
        """Canonical JSON, which hashes to the digest in the chain's `found`."""

    def signed_entries(self, from_seq: int, limit: int) -> list[Signed]: ...
    def proof(self, first: int, limit: int) -> list[Signed]:
        """Of who serves: durable `found`, `roster` and `open` entries, counted from 0."""

    async def snapshot(self, fragments: tuple[int, ...] | None) -> Signed | None: ...
    def status(self) -> dict[str, Any]: ...
    def contacts(self) -> Contacts:
        """Of this peer and of others, for one to whom no bootstrap answers."""

    def accepts(self, digest: Digest) -> BlobRef | None:
        """The announced blob of that digest, if its bytes may come now."""

    def must_last(self, digest: Digest) -> bool:
        """Whether an announced blob has to outlive a crash of the machine: an update has to, and is waited for on the
        disk. What a learner hands in it has itself, and hands in again."""

    def blob_arrived(self, ref: BlobRef) -> None:
        """It is complete. May be said more than once."""

    @property
    def owner(self) -> PeerId:
        """Of the run: its founder."""

    def why_no_mirror(self) -> str:
        """Why blobs are not given to others now; empty if they are."""

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


class HttpServer:
    """Serves one run on one port."""

    def __init__(
        self,
        port: ServerPort,
        identity: Identity,
        store: BlobStore,
        *,
        lanes: Lanes | None = None,
    ) -> None:
        self.counters = ByteCounters()
        self._lanes = lanes or Lanes()
        self._turns = Turns()
        self._blobs = BlobDoor(
            store,
            accepts=lambda digest: self._port.accepts(digest),
            must_last=lambda digest: self._port.must_last(digest),
            arrived=lambda ref: self._port.blob_arrived(ref),
            why_not=lambda: self._port.why_no_mirror(),
            counters=self.counters,
            lanes=self._lanes,
            turns=self._turns,
        )
        self._port = port
        self._identity = identity
        self._links: dict[PeerId, ControlLink] = {}
        self._all_links: dict[ControlLink, str] = {}
        """And the address at the other end."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._status_at: float | None = None
        self._status_body = b""
        self._occasions = Occasions()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chose if 0 was given. Raises ConfigError if it is not free."""
        app = web.Application(middlewares=[refusals])
        for method, path, handler in (
            ("GET", "/v1/run", self._run),
            ("GET", "/v1/layout", self._layout),
            ("GET", "/v1/chain", self._chain),
            ("GET", "/v1/proof", self._proof),
            ("GET", "/v1/snapshot", self._snapshot),
            ("GET", "/v1/status", self._status),
            ("GET", "/v1/contacts", self._contacts),
            ("GET", "/v1/control", self._control),
            ("GET", "/v1/order", self._order_nonce),
            ("POST", "/v1/order", self._order),
        ):
            app.router.add_route(method, path, handler)
        app.router.add_routes(self._blobs.routes())
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
            for each in listener.sockets:  # what is accepted inherits it
                prepare(each, congestion=self._lanes.controls, receive_bytes=self._lanes.receive_bytes)
        except OSError as exc:
            await runner.cleanup()
            hint = "; --port 0 takes a free one" if exc.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"can't listen on {host}:{port}: {exc.strerror or exc}{hint}") from exc
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

    async def _layout(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._port.layout, "application/json")

    async def _chain(self, request: web.Request) -> web.StreamResponse:
        from_seq = number(request.query.get("from", "0"), "from")
        limit = min(number(request.query.get("limit", "256"), "limit"), ENTRIES_PER_ANSWER_MAX)
        return await self._entries(request, self._port.signed_entries(from_seq, limit))

    async def _proof(self, request: web.Request) -> web.StreamResponse:
        first = number(request.query.get("from", "0"), "from")
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
            raise Refusal(400, "bad-query", "too many fragments")
        fragments = None if wanted is None else tuple(number(p, "fragments") for p in wanted.split(","))
        signed = await self._port.snapshot(fragments)
        return await self._answer(request, signed.to_line().encode() if signed else b"", "application/jsonl")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        """Made anew every so often, however many ask."""
        now = asyncio.get_running_loop().time()
        if self._status_at is None or now - self._status_at >= STATUS_S:
            self._status_at, self._status_body = now, json.dumps(self._port.status()).encode()
        return await self._answer(request, self._status_body, "application/json")

    async def _contacts(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._port.contacts().to_json(), "application/json")

    async def _answer(self, request: web.Request, body: bytes, content_type: str) -> web.StreamResponse:
        self.counters.control_out += len(body)
        return await write_answer(request, [body], headers={}, content_type=content_type)

    # ---- the owner's orders

    async def _order_nonce(self, request: web.Request) -> web.StreamResponse:
        """Of the one order that may follow it, soon."""
        nonce = self._occasions.new(asyncio.get_running_loop().time())
        return await self._answer(request, nonce.encode(), "text/plain")

    async def _order(self, request: web.Request) -> web.StreamResponse:
        length = request.content_length
        if length is None or length > 2 * ORDER_BYTES_MAX:
            raise Refusal(413, "too-large", f"an order of at most {2 * ORDER_BYTES_MAX} bytes is wanted")
        async with aclosing(read_body(request, length)) as chunks:
            text = b"".join([chunk async for chunk in chunks])
        try:
            order, signer = open_order(text)
        except RemoteProtocolError as exc:
            raise Refusal(400, "bad-order", str(exc)) from exc
        owner = self._identity.peer_id if order.wish == "hand_over" else self._port.owner
        is_his = (signer, order.run) == (owner, self._port.run)
        if not is_his or not self._occasions.take(order.nonce, asyncio.get_running_loop().time()):
            raise Refusal(403, "not-the-owner", "signed by another key, for another run, or on another occasion")
        try:
            answer = self._port.order(order)
        except (RefusedError, RemoteProtocolError) as exc:
            raise Refusal(403, "refused", str(exc)) from exc
        except TransferError as exc:
            raise Refusal(503, "not-now", str(exc)) from exc
        return await self._answer(request, answer.encode(), "text/plain")

    # ---- control connections

    async def _control(self, request: web.Request) -> web.StreamResponse:
        theirs = request.query.get("nonce", "")
        if not is_nonce_half(theirs):
            raise Refusal(400, "bad-nonce", "nonce wanted: 32 lower-case hex characters")
        address = address_of(request.transport)
        if len(self._all_links) >= LINKS_MAX or list(self._all_links.values()).count(address) >= LINKS_PER_ADDRESS_MAX:
            raise Refusal(503, "full", f"{len(self._all_links)} control connections are open")
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
            turns=self._turns,
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
