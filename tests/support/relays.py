"""Cuts without root: a TCP relay on loopback in front of each host that can be dialed.

A relay is told who dials by asking the system whose socket is at the other end, so a cut is between two hosts and not
around one. While cut, what was sent waits, and a new connection is accepted and hears nothing; when healed, all of it
goes on, as TCP would. What this is not: packets are never lost, and the directory (DHT) does not go through here.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from geo_diloco.cli.bench_usage import dialer_of
from geo_diloco.node.addresses import free_port

CHUNK_BYTES = 1 << 16


class Relays:
    """A `networks.Network`: every host is this machine, and those dialed are reached through their relay."""

    def __init__(self, num_hosts: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._ports = [free_port("127.0.0.1") for _ in range(num_hosts)]
        """Where the peer itself listens."""
        self._pids: dict[int, int] = {}
        self._cut: set[frozenset[int]] = set()
        self._changed = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._carrying: set[asyncio.Task[None]] = set()
        self._fronts: list[int] = []
        """Where its relay does."""

    def __enter__(self) -> Relays:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        for host in range(len(self._ports)):
            front = socket.socket()
            front.bind(("127.0.0.1", 0))
            self._fronts.append(front.getsockname()[1])

            def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: int = host) -> None:
                task = self._loop.create_task(self._carry(host, reader, writer))
                self._carrying.add(task)
                task.add_done_callback(self._carrying.discard)

            self._servers.append(await asyncio.start_server(carry, sock=front))

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    # ---- networks.Network

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """All hosts are this machine."""
        yield

    def started(self, host: int, pid: int) -> None:
        """What that process dials comes from that host."""
        self._pids[pid] = host

    def flags(self, host: int) -> tuple[str, ...]:
        """With which a peer on that host can be reached by the others."""
        return "--host", "127.0.0.1", "--port", str(self._ports[host]), "--announce", f"127.0.0.1:{self._fronts[host]}"

    def cut(self, one: Collection[int], other: Collection[int]) -> None:
        """From now on nothing passes between hosts of the two sides, either way, and nobody is told."""
        self._set_cut(self._cut | {frozenset((a, b)) for a in one for b in other})

    def heal(self) -> None:
        """Everything passes again."""
        self._set_cut(set())

    def _set_cut(self, cut: set[frozenset[int]]) -> None:
        async def change() -> None:
            self._cut = cut
            self._changed.set()
            self._changed.clear()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(10)

    # ---- connections

    async def _wait_whole(self, pair: frozenset[int]) -> None:
        while pair in self._cut:
            await self._changed.wait()

    async def _carry(self, host: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            try:
                pid = dialer_of(
                    writer.get_extra_info("peername")[1], self._fronts[host], {each: each for each in self._pids}
                )
                dialer = None if pid is None else self._pids[pid]
                if dialer is None:
                    return
                pair = frozenset((dialer, host))
                await self._wait_whole(pair)
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._ports[host])
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(self._pump(pair, reader, there_writer))
                        both.create_task(self._pump(pair, there_reader, writer))
                except* OSError:
                    pass
                finally:
                    there_writer.transport.abort()
            finally:
                writer.transport.abort()

    async def _pump(self, pair: frozenset[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._wait_whole(pair)
            writer.write(data)
            await writer.drain()
        await self._wait_whole(pair)
        if writer.can_write_eof():
            writer.write_eof()
