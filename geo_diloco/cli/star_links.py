"""Links of their own for processes of one machine: each dials through a relay that knows it, at its own rate.

A peer dials whatever address is announced, so what is announced is a *front*: a port of this machine, behind which the
peer that can be reached really listens. Whoever dials a front is recognised by the system's own tables (whose socket
is at the other end), and all its connections, to whichever front, share its one link: a line up and a line down
(`relay.py`). So no peer has to know of it, and no rights are needed; but packets are never lost here, and the
directory (DHT) does not go through it.

All of it runs in a thread of this process, with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from geo_diloco.cli.bench_star_plan import Site
from geo_diloco.cli.bench_usage import dialer_of
from geo_diloco.cli.relay import Line, carry
from geo_diloco.node.addresses import free_port

QUEUE_S = 0.1
WIDE_BYTES_PER_S = 1.25e9
"""Of a link that is not thin."""
LOOK_S = 0.02
_CALL_S = 10.0
T = TypeVar("T")

Passed = Mapping[tuple[str, str], tuple[int, int]]
"""By (who dialed, who was dialed): bytes that passed from the one to the other, and back."""


@dataclass
class _Counted:
    """A `relay.Way`: a dialer's line, and what of it is one door's."""

    line: Line
    passed: int = 0

    @property
    def delay_s(self) -> float:
        return self.line.delay_s

    @property
    def chunk_bytes(self) -> int:
        return self.line.chunk_bytes

    async def wait_arrival(self, size: int) -> float:
        self.passed += size
        return await self.line.wait_arrival(size)


@dataclass(frozen=True)
class _Door:
    """Where a peer is dialed."""

    name: str
    port: int
    """It listens here itself."""
    front: int


@dataclass(frozen=True)
class _Link:
    """Of one that dials."""

    pid: int
    up: Line
    down: Line


class Star:
    """A context manager. The door of a peer is opened before it starts, its link is made as soon as its pid is known:
    whoever has no link is turned away."""

    def __init__(self, *, round_trip_s: float) -> None:
        self._round_trip_s = round_trip_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="star", daemon=True)
        self._links: dict[str, _Link] = {}
        self._ways: dict[tuple[str, str], tuple[_Counted, _Counted]] = {}
        self._servers: list[asyncio.Server] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self._late_s = 0.0

    def __enter__(self) -> Star:
        self._thread.start()
        self._call(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    def open_door(self, name: str) -> tuple[str, ...]:
        """Flags for a peer that the others can dial."""
        door = self._call(self._listen(name))
        return "--host", "127.0.0.1", "--port", str(door.port), "--announce", f"127.0.0.1:{door.front}"

    def inside(self, name: str) -> AbstractContextManager[None]:
        """A process is known by its pid."""
        return nullcontext()

    def link(self, name: str, pid: int) -> None:
        """What that process dials goes over a link of its own from now on, which is wide yet."""

        async def add() -> None:
            up, down = (Line(WIDE_BYTES_PER_S, self._round_trip_s / 2, QUEUE_S) for _ in range(2))
            self._links[name] = _Link(pid, up, down)

        self._call(add())

    def thin(self, name: str, site: Site) -> None:
        """From now on that link is that of the site."""

        async def change() -> None:
            up, down = self._links[name].up, self._links[name].down
            up.bytes_per_s, down.bytes_per_s = site.up_bytes_per_s, site.down_bytes_per_s
            up.delay_s = down.delay_s = site.round_trip_s / 2

        self._call(change())

    def passed(self) -> Passed:
        """So far."""

        async def read() -> Passed:
            return {names: (there.passed, back.passed) for names, (there, back) in self._ways.items()}

        return self._call(read())

    def late_s(self) -> float:
        """By how much the relay was late at most since this was asked last: on a busy machine links stand still."""

        async def read() -> float:
            late_s, self._late_s = self._late_s, 0.0
            return late_s

        return self._call(read())

    # ---- the thread's own

    def _call(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(_CALL_S)

    async def _begin(self) -> None:
        watching = self._loop.create_task(self._watch())
        self._carrying.add(watching)

    async def _watch(self) -> None:
        while True:
            due = self._loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self._late_s = max(self._late_s, self._loop.time() - due)

    async def _listen(self, name: str) -> _Door:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        door = _Door(name, free_port("127.0.0.1"), listening.getsockname()[1])

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._carry(door, reader, writer))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

        self._servers.append(await asyncio.start_server(accept, sock=listening))
        return door

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _carry(self, door: _Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pids = {name: link.pid for name, link in self._links.items()}
        # Apart from the loop: every link stands still while it does something else.
        name = await asyncio.to_thread(dialer_of, writer.get_extra_info("peername")[1], door.front, pids)
        if name is None:
            writer.transport.abort()
            return
        link = self._links[name]
        there, back = self._ways.setdefault((name, door.name), (_Counted(link.up), _Counted(link.down)))
        await carry(reader, writer, door.port, there=there, back=back, open_=self._open)
