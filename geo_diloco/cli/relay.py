"""A link made of TCP connections: so much a second, so long a round trip, a queue in front of it, cut at will.

It stands between two ends on one machine and needs no rights. What passes in a direction shares one line, as over a
home's router: a queue of fixed length in time, and behind it the way to the other side. It can't lose packets; for that
a laboratory with namespaces is wanted. Control that shares the line waits in the same queue as bulk does.

A `Relay` stands in front of one port and has one link, whoever dials; `star_links.py` has a link for each that dials.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

PACKET_BYTES = 2048
"""What is as short as that always finds room in the queue."""
_CHUNK_BYTES_MAX = 16 << 10
_CHUNK_S = 0.005


class Way(Protocol):
    """What bytes of one direction pass through."""

    @property
    def delay_s(self) -> float: ...

    @property
    def chunk_bytes(self) -> int: ...

    async def wait_arrival(self, size: int) -> float:
        """When so many bytes, which come now, are at the other side. Waits while the queue is full."""


@dataclass
class Line:
    """A `Way`: one direction of a link."""

    bytes_per_s: float
    delay_s: float
    queue_s: float
    room: asyncio.Lock = field(default_factory=asyncio.Lock)
    free_at: float = 0.0
    passed: int = 0

    @property
    def chunk_bytes(self) -> int:
        """Of bulk: longer than what is let pass at once, or the queue of a thin line would have no end."""
        return max(2 * PACKET_BYTES, min(_CHUNK_BYTES_MAX, int(self.bytes_per_s * _CHUNK_S)))

    async def wait_arrival(self, size: int) -> float:
        """When so many bytes, which come now, are at the other side. Waits while the queue is full."""
        if size > PACKET_BYTES:
            async with self.room:
                if (too_long_s := self.free_at - time.monotonic() - self.queue_s) > 0.0:
                    await asyncio.sleep(too_long_s)
                return self._pass(size)
        return self._pass(size)

    def _pass(self, size: int) -> float:
        self.free_at = max(self.free_at, time.monotonic()) + size / self.bytes_per_s
        self.passed += size
        return self.free_at + self.delay_s


class Relay:
    """Carries connections to one port of this machine. For the event loop's thread."""

    def __init__(self, port: int, *, bytes_per_s: float, round_trip_s: float, queue_s: float = 0.1) -> None:
        self._port = port
        self._there = Line(bytes_per_s, round_trip_s / 2, queue_s)
        self._back = Line(bytes_per_s, round_trip_s / 2, queue_s)
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    @property
    def passed(self) -> int:
        """Bytes, both ways."""
        return self._there.passed + self._back.passed

    def cut(self) -> None:
        """Every connection is reset; new ones are let through."""
        for writer in self._open:
            writer.transport.abort()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its base URL."""
        listening = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        finally:
            listening.close()
            carrying = list(self._carrying)
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

    def _accept(self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(near, near_writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        await carry(near, near_writer, self._port, there=self._there, back=self._back, open_=self._open)


async def carry(
    near: asyncio.StreamReader,
    near_writer: asyncio.StreamWriter,
    port: int,
    *,
    there: Way,
    back: Way,
    open_: set[asyncio.StreamWriter],
) -> None:
    """A connection that was accepted, to that port of this machine, until either end is gone. `open_`: holds what is
    to be aborted by whoever cuts the link."""
    try:
        await asyncio.sleep(there.delay_s + back.delay_s)  # the handshake
        far, far_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        near_writer.transport.abort()
        return
    except asyncio.CancelledError:
        near_writer.transport.abort()
        raise
    writers = {near_writer, far_writer}
    open_ |= writers
    ways = [
        asyncio.create_task(_pump(near, far_writer, there)),
        asyncio.create_task(_pump(far, near_writer, back)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        open_ -= writers
        for writer in writers:
            writer.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, line: Way) -> None:
    """Until either end is gone; what is on its way then is lost, as in a cut."""
    on_its_way: deque[tuple[float, bytes]] = deque()
    more = asyncio.Event()

    async def deliver() -> None:
        while True:
            while not on_its_way:
                more.clear()
                await more.wait()
            at, data = on_its_way.popleft()
            if (early_s := at - time.monotonic()) > 0.0:
                await asyncio.sleep(early_s)
            sink.write(data)
            await sink.drain()

    delivering = asyncio.create_task(deliver())
    try:
        while (data := await source.read(line.chunk_bytes)) and not delivering.done():
            on_its_way.append((await line.wait_arrival(len(data)), data))
            more.set()
    finally:
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
