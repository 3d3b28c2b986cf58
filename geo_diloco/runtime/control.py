"""The control connection: one WebSocket for small signed messages, the same at both ends.

What a liar could do with a socket is undone here, so that the core hears proven messages only. Each side puts half of
the connection's nonce, hence an envelope is worth nothing on any other connection, for either side. An envelope must
be of this run, for this peer, of this nonce, and by the one peer that this connection began with; anything else closes
it with a reason. A number not above the last one is dropped. What is to be sent waits in a bounded queue: a peer that
does not read is let go, it never holds anybody up. Where many connections share a loop they take turns (`turns.py`)
for each message that is verified, or sealed and sent. Text is a signed line, a binary message one that is packed: an
entry.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
from aiohttp import WSMsgType, web

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import WIRE_VERSION, BootId, PeerId, RunId
from geo_diloco.protocol.election.ballots import Vote
from geo_diloco.protocol.messages import Envelope
from geo_diloco.runtime.door import Allowance
from geo_diloco.runtime.identity import Identity, is_peer_id
from geo_diloco.runtime.session import CONNECT_S, ByteCounters, Session, asking
from geo_diloco.runtime.turns import Turns
from geo_diloco.runtime.wire import LINE_BYTES_MAX, MESSAGE_LINE_BYTES_MAX, Signed, open_envelope, unpack_line

HEARTBEAT_S = 10.0
SEND_STALL_S = 30.0
CLOSE_S = 1.0
"""For the closing words."""
FLUSH_S = 2.0
"""For what is queued and the closing words together: leaving must not take long."""
QUEUE_MESSAGES_MAX = 1024
QUEUE_BYTES_MAX = 64 << 20

CLOSE_LEAVING = 1000
CLOSE_PROTOCOL = 4400
"""The other side broke the protocol."""
CLOSE_REFUSED = 4403
"""The other side is not admitted, and won't be by trying again."""
CLOSE_REPLACED = 4409
"""The same peer opened a newer connection. Who hears that on the connection it uses has a double."""
_LOST = "connection lost"
_TOO_SLOW = "too slow: it does not read what it is sent"
_REASON_BYTES_MAX = 120
_NONCE_HALF = re.compile(r"[0-9a-f]{32}")
_PASS = '{{"proof":"{}"}}'
_PASS_FORM = re.compile(r'\{"proof":"([0-9a-f]{64})"\}')

_Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse
_Outgoing = str | bytes | Callable[[], str]


class ControlLink:
    """One end of a control connection. For the event loop's thread.

    Iterate it for what comes in: envelopes, verified, and signed entries, which `wire.open_entry` verifies. When the
    iteration ends the connection is over and `close_reason` says why.
    """

    def __init__(
        self,
        socket: _Socket,
        *,
        run: RunId,
        own: PeerId,
        peer: PeerId | None,
        nonce: str,
        counters: ByteCounters,
        allowance: Allowance | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`allowance`: how fast the other end may talk; `turns` are shared with other connections."""
        self.nonce = nonce
        self.close_reason = ""
        self.boot = BootId("")
        """Process start at the other end, known with the first envelope."""
        self.evidence = ""
        """The envelope read last, as signed, if it is a vote."""
        self.is_refused = False
        """The other end says that this peer is not admitted: trying again does not help."""
        self._socket = socket
        self._run = run
        self._own = own
        self._peer = peer
        self._is_dialing = peer is not None
        self._counters = counters
        self._allowance = allowance
        self._turns = turns
        self._outgoing: deque[_Outgoing] = deque()
        self._outgoing_bytes = 0
        self.proof = ""
        """Of the admission token, if the dialing end showed it before its first envelope."""
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._close_code = CLOSE_LEAVING
        self._number_in = -1
        self._number_out = 0

    @property
    def peer(self) -> PeerId:
        """Who is at the other end; at the accepting end known with the first envelope."""
        return self._peer or PeerId("")

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    async def wait_closing(self) -> None:
        """Until it is about to end, for whatever reason."""
        await self._closing.wait()

    def next_number(self) -> int:
        """For the next envelope to be sent."""
        self._number_out += 1
        return self._number_out

    def send(self, line: str | bytes) -> None:
        """Queue an envelope or a signed entry, as it is or packed. Dropped once closing; a peer that doesn't keep up is
        let go."""
        self._queue(line)

    def send_sealed(self, seal: Callable[[], str]) -> None:
        """Queue what is sealed when its turn to be sent has come: the same said to many would take long at once."""
        self._queue(seal)

    def _queue(self, outgoing: _Outgoing) -> None:
        if self.is_closing:
            return
        size = 0 if callable(outgoing) else len(outgoing)
        if len(self._outgoing) >= QUEUE_MESSAGES_MAX or self._outgoing_bytes + size > QUEUE_BYTES_MAX:
            self._outgoing.clear()
            self.close(_TOO_SLOW)
            self._abort()
            return
        self._outgoing.append(outgoing)
        self._outgoing_bytes += size
        self._wake.set()

    def send_pass(self, proof: str) -> None:
        """Show the admission token's proof, before anything else is said."""
        self.send(_PASS.format(proof))

    def close(self, reason: str = "", *, code: int = CLOSE_LEAVING) -> None:
        """Close after what is queued was sent. Only the first reason counts."""
        if not self.is_closing:
            self._closing.set()
            self._close_code = code
            self.close_reason = self.close_reason or reason or "closed"
            self._wake.set()

    def __aiter__(self) -> ControlLink:
        return self

    async def __anext__(self) -> Envelope | Signed:
        item = await self.receive()
        if item is None:
            raise StopAsyncIteration
        return item

    async def receive(self) -> Envelope | Signed | None:
        """The next one; None once the connection is over."""
        while True:
            message = await self._socket.receive()
            if message.type is WSMsgType.TEXT or (message.type is WSMsgType.BINARY and self._peer is not None):
                if self._turns is not None:
                    await self._turns.take()
                self._counters.control_in += len(message.data)
                try:
                    text = message.data if message.type is WSMsgType.TEXT else self._unpack(message.data)
                    item = self._verify(text, is_packed=text is not message.data)
                except RemoteProtocolError as exc:
                    self.close(str(exc), code=CLOSE_PROTOCOL)
                    return None
                if self._allowance is not None:
                    await self._allowance.take(len(text))
                if item is not None and not self.is_closing:
                    return item
            elif message.type is WSMsgType.CLOSE:
                self._other_end_closed(message.data, message.extra)
                return None
            elif message.type in (WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
                self.close(_too_big(message.data) or _LOST)
                return None
            else:
                self.close("binary message on a control connection", code=CLOSE_PROTOCOL)
                return None

    def _unpack(self, packed: bytes) -> str:
        return unpack_line(packed, bytes_max=LINE_BYTES_MAX if self._is_dialing else MESSAGE_LINE_BYTES_MAX)

    def _verify(self, text: str, *, is_packed: bool) -> Envelope | Signed | None:
        if self._peer is None and not self.proof and (shown := _PASS_FORM.fullmatch(text)):
            self.proof = shown[1]
            return None
        signed = Signed.from_line(text)
        if signed.purpose == "entry" and self._peer is not None:
            return signed
        if is_packed:
            raise RemoteProtocolError("a packed line that is no entry", peer=self._peer or "unknown")
        envelope = open_envelope(signed)
        if self._peer is not None and envelope.sender != self._peer:
            raise RemoteProtocolError(f"envelope from another peer than {self._peer[:8]}", peer=envelope.sender)
        for name, said, wanted in (
            ("run", envelope.run, self._run),
            ("receiver", envelope.to, self._own),
            ("nonce", envelope.nonce, self.nonce),
        ):
            if said != wanted:
                raise RemoteProtocolError(f"envelope for another {name}", peer=envelope.sender)
        self._peer, self.boot = envelope.sender, envelope.boot
        self.evidence = text if isinstance(envelope.message, Vote) else ""
        if envelope.number <= self._number_in:
            return None
        self._number_in = envelope.number
        return envelope

    def _other_end_closed(self, code: int | None, reason: str | None) -> None:
        said = "".join(character for character in (reason or "") if character.isprintable())
        if code == CLOSE_REPLACED and self._is_dialing:
            said = "another process has joined with this peer's identity: a run directory belongs to one process"
        self.is_refused = code in (CLOSE_REFUSED, CLOSE_REPLACED)
        self.close(said or (f"closed by the other end ({code})" if code else _LOST))

    # ---- sending

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While inside, what is queued is sent. On leaving, the rest is sent (bounded), then it is closed."""
        writer = asyncio.create_task(self._write(), name="control writer")
        try:
            yield
        finally:
            self.close()
            try:
                await asyncio.wait_for(writer, FLUSH_S)
            except TimeoutError:
                self._abort()
            except asyncio.CancelledError:
                self._abort()
                writer.cancel()
                raise

    async def _write(self) -> None:
        """Ends without an exception when the connection is over: the reading side says so."""
        try:
            while await self._wait_outgoing():
                if self._turns is not None:
                    await self._turns.take()
                if not self._outgoing:  # let go of meanwhile
                    continue
                outgoing = self._outgoing.popleft()
                line = outgoing() if callable(outgoing) else outgoing
                self._outgoing_bytes -= 0 if callable(outgoing) else len(outgoing)
                async with asyncio.timeout(SEND_STALL_S):
                    if isinstance(line, str):
                        await self._socket.send_str(line)
                    else:
                        await self._socket.send_bytes(line)
                self._counters.control_out += len(line)
            async with asyncio.timeout(CLOSE_S):
                await self._socket.close(code=self._close_code, message=_cut(self.close_reason))
        except TimeoutError:
            self.close(_TOO_SLOW)
            self._abort()
        except (aiohttp.ClientError, OSError):
            self.close(_LOST)
            self._abort()

    async def _wait_outgoing(self) -> bool:
        """True when there is something to send, False when there is nothing and the link is closing."""
        while not self._outgoing:
            if self.is_closing:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    def _abort(self) -> None:
        """End the connection now, whatever lies in buffers: both a blocked writer and the reader wake up."""
        transport_socket = self._socket.get_extra_info("socket")
        if transport_socket is not None:
            with suppress(OSError):
                transport_socket.shutdown(2)


def new_nonce_half() -> str:
    return secrets.token_hex(16)


def is_nonce_half(text: str) -> bool:
    return _NONCE_HALF.fullmatch(text) is not None


def greeting(run: RunId, own: PeerId, nonce: str) -> str:
    """First text from the accepting end. Not signed: what it claims is proven by the envelopes that follow."""
    return json.dumps({"nonce": nonce, "run": run, "peer": own, "wire": WIRE_VERSION})


@asynccontextmanager
async def connect_control(
    session: Session,
    base_url: str,
    identity: Identity,
    run: RunId,
    *,
    expected_peer: PeerId | None = None,
    counters: ByteCounters | None = None,
) -> AsyncIterator[ControlLink]:
    """Dial a peer's control connection; closed on leaving, after what is queued.

    Raises TransferError if it can't be reached, RefusedError if it serves another run or wire version,
    RemoteProtocolError if it is not `expected_peer` or makes no sense.
    """
    ours = new_nonce_half()
    socket = await _dial(session, f"{base_url}/v1/control?nonce={ours}")
    try:
        peer, nonce = await _read_greeting(socket, base_url, run, ours)
        if expected_peer is not None and peer != expected_peer:
            raise RemoteProtocolError(f"{base_url} is another peer than {expected_peer[:8]}", peer=peer)
        link = ControlLink(
            socket, run=run, own=identity.peer_id, peer=peer, nonce=nonce, counters=counters or ByteCounters()
        )
        async with link.running():
            yield link
    finally:
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_S):
                await socket.close()


async def _dial(session: Session, url: str) -> aiohttp.ClientWebSocketResponse:
    async with asking(url), asyncio.timeout(CONNECT_S):
        return await session.ws_connect(
            url,
            heartbeat=HEARTBEAT_S,
            max_msg_size=LINE_BYTES_MAX,
            compress=0,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
        )


async def _read_greeting(
    socket: aiohttp.ClientWebSocketResponse, base_url: str, run: RunId, ours: str
) -> tuple[PeerId, str]:
    async with asking(base_url), asyncio.timeout(CONNECT_S):
        message = await socket.receive()
    if message.type is not WSMsgType.TEXT:
        raise TransferError(f"{base_url} closed the connection: {message.extra or message.data or 'no reason given'}")
    try:
        said = json.loads(message.data)
        peer, nonce, their_run, wire = said["peer"], said["nonce"], said["run"], said["wire"]
    except (ValueError, RecursionError, KeyError, TypeError) as exc:
        raise RemoteProtocolError(f"{base_url} greets in no known way") from exc
    if wire != WIRE_VERSION:
        raise RefusedError(f"{base_url} speaks wire version {str(wire)[:12]}, this peer {WIRE_VERSION}")
    if their_run != run:
        raise RefusedError(f"{base_url} serves run {str(their_run)[:12]}, wanted {run[:12]}")
    if not is_peer_id(peer):
        raise RemoteProtocolError(f"{base_url} greets without a peer id")
    theirs = nonce.removesuffix(ours) if isinstance(nonce, str) and nonce.endswith(ours) else ""
    if not is_nonce_half(theirs):
        raise RemoteProtocolError(f"{base_url} greets with a nonce that is not of this connection", peer=peer)
    return PeerId(peer), nonce


def _cut(reason: str) -> bytes:
    return reason.encode()[:_REASON_BYTES_MAX].decode("utf-8", "ignore").encode()


def _too_big(data: object) -> str:
    is_too_big = isinstance(data, aiohttp.WebSocketError) and data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
    return "message above the size limit" if is_too_big else ""
