"""The HTTP library as the dialing side uses it, and the small questions that one peer asks another.

Stands apart so that there is one place where its exceptions become ours, where answers are bounded before they are
read, and where a request's only time limit is a progress deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from blake3 import blake3

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import Digest, RunId, run_id_from_bytes
from geo_diloco.runtime.contacts import CONTACTS_BYTES_MAX, Contacts, contacts_from_json
from geo_diloco.runtime.sockets import bytes_acked, prepare
from geo_diloco.runtime.wire import LINE_BYTES_MAX, Signed

Session = aiohttp.ClientSession
Response = aiohttp.ClientResponse

STALL_S = 30.0
CONNECT_S = 10.0
MANIFEST_BYTES_MAX = 4 << 20
LAYOUT_BYTES_MAX = 16 << 20
CHAIN_BYTES_MAX = 2 * LINE_BYTES_MAX
"""Of one answer to a question for entries."""
STATUS_BYTES_MAX = 4 << 20
_ERROR_BYTES_MAX = 4096


class StallError(TransferError):
    """Nothing moved for too long."""


class TransferRefused(TransferError):
    """The other side won't ever give or take that: trying again is of no use."""


@dataclass
class ByteCounters:
    """Bytes of bodies and messages that this process moved, by plane."""

    bulk_in: int = 0
    bulk_out: int = 0
    control_in: int = 0
    control_out: int = 0


def make_session(*, congestion: Sequence[str] = (), receive_bytes: int = 0, dial_from: str = "") -> Session:
    """The one session of a process: no total time limit, warm connections, no cookies, nothing decompressed.

    Connections are not counted here: who waits for one of them to get free would be a control connection behind bulk.
    Of bulk there are as many as `streams` and `routes` allow. `dial_from`: this one of our own addresses, by default
    the kernel's choice. See `sockets.prepare` for the others.
    """

    def make_socket(info: tuple[Any, ...]) -> socket.socket:
        made = socket.socket(info[0], info[1], info[2])
        prepare(made, congestion=congestion, receive_bytes=receive_bytes)
        if dial_from:
            made.bind((dial_from, 0))
        return made

    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, socket_factory=make_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )


class Deadline:
    """A progress deadline: TimeoutError in the body if nothing is known to have moved for `stall_s`.

    What has moved is told by `touch`, or found by looking at what the other end has acknowledged (`watch`): on a slow
    link minutes may pass until the kernel takes another chunk of ours, and all the while bytes arrive over there.
    """

    def __init__(self, stall_s: float) -> None:
        self._limit_s = stall_s
        self._look_s = stall_s / 6
        self._timeout = asyncio.timeout(stall_s)
        self._is_running = False
        self._transport: Any = None
        self._acked: int | None = None
        self._next_look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Deadline:
        await self._timeout.__aenter__()
        self._is_running = True
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._is_running = False
        if self._next_look is not None:
            self._next_look.cancel()
        await self._timeout.__aexit__(*exc_info)

    def touch(self) -> None:
        """Also from another task, and harmless when it is too late."""
        if self._is_running and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._limit_s)

    def watch(self, transport: Any) -> None:
        """From now on what the other end of this connection acknowledges counts as well."""
        if self._next_look is None and self._is_running and bytes_acked(transport) is not None:
            self._limit_s -= self._look_s  # what is found moved may have moved that long ago
            self._transport = transport
            self._look()

    def _look(self) -> None:
        acked = bytes_acked(self._transport)
        if acked is not None and acked != self._acked:
            self._acked = acked
            self.touch()
        self._next_look = asyncio.get_running_loop().call_later(self._look_s, self._look)


class Body(aiohttp.payload.Payload):
    """What a request sends, chunk by chunk; the deadline watches the connection that it goes out on."""

    def __init__(self, chunks: AsyncIterator[bytes | memoryview], size: int, deadline: Deadline) -> None:
        super().__init__(chunks, content_type="application/octet-stream")
        self._chunks = chunks
        self._size = size
        self._deadline = deadline
        self.written_at = 0.0
        """When the kernel had taken all of it, by the monotonic clock."""
        self.failure: TransferError | None = None
        """Why it could not be sent, where that lay with us."""

    async def write(self, writer: aiohttp.abc.AbstractStreamWriter) -> None:
        self._consumed = True  # the library must not begin again with what is left of it
        transport = getattr(writer, "transport", None)
        self._deadline.watch(transport)
        if transport is not None:
            transport.set_write_buffer_limits(
                0
            )  # what was written is with the kernel, or we would not know how far it is
        try:
            async for chunk in self._chunks:
                await writer.write(chunk)
                await writer.drain()
            self.written_at = time.monotonic()
        except TransferError as exc:
            self.failure = exc
            raise

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body that is sent once, chunk by chunk, is no text")


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[None]:
    """The HTTP library's exceptions become TransferError."""
    try:
        yield
    except TimeoutError as exc:
        raise StallError(f"{url}: no progress in time") from exc
    except (aiohttp.ClientError, HttpProcessingError, OSError) as exc:
        raise TransferError(f"{url}: {_why(exc)}") from exc


def _why(failure: Exception) -> str:
    """In the operating system's words where it is its: the library's are for those who know the library."""
    if isinstance(failure, aiohttp.ClientConnectorError):
        error = failure.os_error
        number = error.errno or 0
        said = os.strerror(number) if number > 0 else error.strerror or str(error)
        return f"can't connect: {said.lower()}"
    return str(failure) or type(failure).__name__


async def raise_for_status(response: Response) -> None:
    if response.status in (200, 206):
        return
    body = b"" if response.method == "HEAD" else await response.content.read(_ERROR_BYTES_MAX)
    try:
        said = str(_json_object(body, str(response.url)).get("detail", ""))[:300]
        detail = "".join(character if character.isprintable() else " " for character in said)
    except RemoteProtocolError:
        detail = ""
    text = f"{response.method} {response.url} answers {response.status} {detail}".strip()
    if response.status in (408, 409, 422, 429) or response.status >= 500:
        raise TransferError(text)
    raise TransferRefused(text)


# ---- small questions -------------------------------------------------------------------------------------------


async def fetch_manifest(session: Session, base_url: str, run: RunId, *, counters: ByteCounters | None = None) -> bytes:
    """The manifest's canonical bytes, which hash to `run`. RefusedError if the peer serves another run."""
    body = await _ask(session, f"{base_url}/v1/run", bytes_max=MANIFEST_BYTES_MAX, counters=counters)
    if run_id_from_bytes(body) != run:
        raise RefusedError(f"{base_url} serves run {run_id_from_bytes(body)[:12]}, wanted {run[:12]}")
    return body


async def fetch_layout(session: Session, base_url: str, digest: Digest, *, counters: ByteCounters | None = None) -> str:
    """The layout's canonical JSON, which hashes to `digest`. RemoteProtocolError if it is another."""
    body = await _ask(session, f"{base_url}/v1/layout", bytes_max=LAYOUT_BYTES_MAX, counters=counters)
    if blake3(body).hexdigest() != digest:
        raise RemoteProtocolError(f"{base_url} shows another layout than the run's")
    return body.decode("utf-8", "replace")


async def fetch_entries(
    session: Session,
    base_url: str,
    from_seq: int,
    *,
    limit: int = 256,
    counters: ByteCounters | None = None,
) -> list[Signed]:
    """Up to `limit` signed entries from `from_seq` on, not verified; the peer may send fewer. None means no more."""
    url = f"{base_url}/v1/chain?from={from_seq:d}&limit={limit:d}"
    lines = (await _ask(session, url, bytes_max=CHAIN_BYTES_MAX, counters=counters)).splitlines()
    if len(lines) > limit:
        raise RemoteProtocolError(f"{len(lines)} entries from {base_url}, {limit} were asked for")
    return [Signed.from_line(line) for line in lines]


async def fetch_proof(
    session: Session, base_url: str, *, entries_max: int, counters: ByteCounters | None = None
) -> list[Signed]:
    """Every `found`, `roster` and `open` entry of a peer's durable chain, in order, not verified."""
    found: list[Signed] = []
    while True:
        url = f"{base_url}/v1/proof?from={len(found):d}"
        lines = (await _ask(session, url, bytes_max=CHAIN_BYTES_MAX, counters=counters)).splitlines()
        if not lines:
            return found
        found += [Signed.from_line(line) for line in lines]
        if len(found) > entries_max:
            raise RemoteProtocolError(f"{base_url} shows more than {entries_max} entries as a proof")


async def fetch_snapshot(
    session: Session,
    base_url: str,
    fragments: Collection[int] | None = None,
    *,
    counters: ByteCounters | None = None,
) -> Signed | None:
    """The newest snapshot's signed description, not verified (its blobs are fetched one by one); None if none yet."""
    query = "" if fragments is None else "?fragments=" + ",".join(str(p) for p in sorted(fragments))
    body = await _ask(session, f"{base_url}/v1/snapshot{query}", bytes_max=LINE_BYTES_MAX, counters=counters)
    return Signed.from_line(body) if body else None


async def give_order(session: Session, base_url: str, order: Callable[[str], str]) -> str:
    """Tell a peer what its owner wants; returns its answer. `order` signs one with the nonce it is given.

    Raises TransferRefused if it is not the owner's.
    """
    url = f"{base_url}/v1/order"
    nonce = (await _ask(session, url, bytes_max=256, counters=None)).decode("ascii", "replace")
    async with asking(url), Deadline(STALL_S) as deadline, session.post(url, data=order(nonce).encode()) as response:
        deadline.touch()
        await raise_for_status(response)
        return (await read_bounded(response, _ERROR_BYTES_MAX, deadline)).decode("utf-8", "replace")


async def fetch_status(session: Session, base_url: str, *, counters: ByteCounters | None = None) -> dict[str, Any]:
    body = await _ask(session, f"{base_url}/v1/status", bytes_max=STATUS_BYTES_MAX, counters=counters)
    return _json_object(body, base_url)


async def fetch_contacts(session: Session, base_url: str, *, counters: ByteCounters | None = None) -> Contacts:
    """Where that peer says that others are, itself among them. Nothing in it is proven."""
    body = await _ask(session, f"{base_url}/v1/contacts", bytes_max=CONTACTS_BYTES_MAX, counters=counters)
    return contacts_from_json(body)


async def read_small(session: Session, url: str) -> int:
    """Ask for something small, whatever it is; how many bytes it is."""
    return len(await _ask(session, url, bytes_max=MANIFEST_BYTES_MAX, counters=None))


async def _ask(session: Session, url: str, *, bytes_max: int, counters: ByteCounters | None) -> bytes:
    async with asking(url), Deadline(STALL_S) as deadline, session.get(url, allow_redirects=False) as response:
        deadline.touch()
        await raise_for_status(response)
        body = await read_bounded(response, bytes_max, deadline)
    if counters is not None:
        counters.control_in += len(body)
    return body


async def read_bounded(response: Response, bytes_max: int, deadline: Deadline) -> bytes:
    if (response.content_length or 0) > bytes_max:
        raise RemoteProtocolError(f"{response.url} answers {response.content_length} bytes, at most {bytes_max} wanted")
    body = bytearray()
    async for chunk in response.content.iter_any():
        deadline.touch()
        body += chunk
        if len(body) > bytes_max:
            raise RemoteProtocolError(f"{response.url} answers more than the {bytes_max} bytes wanted")
    return bytes(body)


def _json_object(body: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"{url} answers no JSON") from exc
    if not isinstance(found, dict):
        raise RemoteProtocolError(f"{url} answers no JSON object")
    return found
