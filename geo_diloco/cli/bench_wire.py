"""One connection to a peer in this process, over a relay of a given rate: for what can't be told from bytes alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from geo_diloco.cli.relay import Relay

_LENGTH_BYTES = 8


class Wire:
    """For one message at a time."""

    def __init__(self, writer: asyncio.StreamWriter, arrived: asyncio.Queue[bytes]) -> None:
        self._writer = writer
        self._arrived = arrived

    async def send(self, data: bytes) -> bytes:
        """Returns what came out at the other end, as soon as all of it has."""
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big"))
        self._writer.write(data)
        await self._writer.drain()
        return await self._arrived.get()


@asynccontextmanager
async def wire(*, bytes_per_s: float, round_trip_s: float) -> AsyncIterator[Wire]:
    """The connection is there, and has carried something."""
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                arrived.put_nowait(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        relay = Relay(server.sockets[0].getsockname()[1], bytes_per_s=bytes_per_s, round_trip_s=round_trip_s)
        async with relay.running() as url:
            _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            made = Wire(writer, arrived)
            await made.send(b"warm")
            yield made
            writer.transport.abort()
