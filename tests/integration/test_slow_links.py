"""No transfer ends for having taken long; one that stands still is found out. In each direction, with real sockets.

The slow end has a small receive buffer and reads a little at a time, so that most of the time nothing moves that the
sending process could see: only the kernel knows that bytes still arrive over there.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from geo_diloco.errors import TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import answers, flow
from geo_diloco.runtime.bulk import CONTROLS, Bulk, Lanes
from geo_diloco.runtime.fetch import Source, fetch_blob
from geo_diloco.runtime.http import HttpServer
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import make_session
from geo_diloco.runtime.sockets import bytes_acked, congestion_in_use
from geo_diloco.runtime.store import BlobStore, blob_ref
from geo_diloco.runtime.upload import upload_blob
from tests.unit.runtime.samples import RememberingPort, bytes_of

DATA = bytes_of(600_000, 3)
REF = blob_ref(DATA)
STALL_S = 0.8
READ_BYTES = 8 << 10


@asynccontextmanager
async def slow_relay(port: int, *, pause_s: float, stop_after: int = 1 << 40) -> AsyncIterator[str]:
    """Carries both ways, a little at a time; after so many bytes it stands still, with its connections open."""
    passed = 0
    running: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    async def pump(source: socket.socket, sink: socket.socket) -> None:
        nonlocal passed
        while passed < stop_after and (data := await loop.sock_recv(source, READ_BYTES)):
            passed += len(data)
            await loop.sock_sendall(sink, data)
            await asyncio.sleep(pause_s)
        if passed >= stop_after:
            await asyncio.Event().wait()

    async def carry(near: socket.socket) -> None:
        with near, socket.socket() as far:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
            far.setblocking(False)
            await loop.sock_connect(far, ("127.0.0.1", port))
            pumps = [asyncio.create_task(pump(near, far)), asyncio.create_task(pump(far, near))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in pumps:
                    each.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def accept(listening: socket.socket) -> None:
        while True:
            near, _ = await loop.sock_accept(listening)
            running.add(asyncio.create_task(carry(near)))

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        accepting = asyncio.create_task(accept(listening))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            for task in (accepting, *running):
                task.cancel()
            await asyncio.gather(accepting, *running, return_exceptions=True)


async def move(direction: str, tmp_path: Path, *, pause_s: float, stop_after: int = 1 << 40) -> BlobStore:
    mine, theirs = BlobStore(tmp_path / "mine"), BlobStore(tmp_path / "theirs")
    (mine if direction == "up" else theirs).put(DATA)
    port = RememberingPort()
    port.announce(REF)
    server = HttpServer(port, Identity.generate(), theirs)
    number = await server.start("127.0.0.1", 0)
    try:
        async with make_session() as session, slow_relay(number, pause_s=pause_s, stop_after=stop_after) as url:
            bulk = Bulk(session)
            if direction == "up":
                await upload_blob(bulk, url, REF, mine, stall_s=STALL_S)
            else:
                await fetch_blob(bulk, [Source(url)], REF, mine, stall_s=STALL_S)
    finally:
        await server.stop()
    return theirs if direction == "up" else mine


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_slow_transfer_lives_for_many_times_what_a_standstill_may_last(
    tmp_path: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "STALL_S", STALL_S)
    monkeypatch.setattr(flow, "FAILURES_MAX", 1)
    began_at = time.monotonic()
    monkeypatch.setattr("geo_diloco.runtime.routes.STREAMS_MAX", 1)  # or many of them would share the bytes
    taker = asyncio.run(move(direction, tmp_path, pause_s=0.08))
    assert taker.get(REF) == DATA
    assert time.monotonic() - began_at > 3 * STALL_S


@pytest.mark.parametrize("direction", ["up", "down"])
def test_one_that_stands_still_is_found_in_time_and_keeps_what_it_has(
    tmp_path: Path, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "STALL_S", STALL_S)
    monkeypatch.setattr(flow, "FAILURES_MAX", 1)
    began_at = time.monotonic()
    with pytest.raises(TransferError, match=r"no progress|no byte came"):  # whichever side sees it first
        asyncio.run(move(direction, tmp_path, pause_s=0.0, stop_after=200_000))
    assert STALL_S * 5 / 6 - 0.1 < time.monotonic() - began_at < 3 * STALL_S


def test_the_server_lets_go_of_whoever_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STALL_S", 0.3)

    async def run() -> None:
        store = BlobStore(tmp_path)
        data = bytes_of(30 << 20)
        ref: BlobRef = store.put(data)
        server = HttpServer(RememberingPort(), Identity.generate(), store)
        number = await server.start("127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", number, limit=1024)
            writer.write(f"GET /v1/blobs/{ref.digest}/0-29 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await writer.drain()
            async with asyncio.timeout(10):
                await asyncio.sleep(1.0)
                received = 0
                with suppress(ConnectionError):
                    while chunk := await reader.read(1 << 20):
                        received += len(chunk)
                assert received < len(data)
            writer.close()
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.parametrize("wanted", ["reno", "nonesuch"])
def test_a_congestion_control_is_asked_for_at_both_ends_and_is_no_error_where_it_is_not_there(
    tmp_path: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTROLS, wanted, (wanted,))

    async def run() -> None:
        theirs = BlobStore(tmp_path)
        theirs.put(DATA)
        server = HttpServer(RememberingPort(), Identity.generate(), theirs, lanes=Lanes(congestion=wanted))
        number = await server.start("127.0.0.1", 0)
        with socket.socket() as plain:
            usual = congestion_in_use(plain)
        expected = "reno" if wanted == "reno" else usual
        try:
            assert server._listener is not None
            assert congestion_in_use(server._listener.sockets[0]._sock) == expected  # type: ignore[attr-defined]
            piece = f"http://127.0.0.1:{number}/v1/blobs/{REF.digest}/0"
            async with make_session(congestion=(wanted,)) as session, session.get(piece) as response:
                assert response.connection is not None
                transport = response.connection.transport
                assert transport is not None
                assert congestion_in_use(transport.get_extra_info("socket")) == expected
                assert (bytes_acked(transport) or 0) > 0
        finally:
            await server.stop()

    asyncio.run(run())
