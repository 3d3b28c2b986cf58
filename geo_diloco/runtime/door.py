"""How many may come in, and how fast they may talk: what a stranger can take of a peer that listens.

Everything else in this package bounds what one message may cost. Here is bounded how many there are: connections, in
all and per address, so that whoever holds sockets open keeps out himself first; and messages, by making the one who
talks too fast wait, never by dropping what was said.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, cast

CONNECTIONS_MAX = 4096
CONNECTIONS_MIN = 64


class Handlers(Protocol):
    """The HTTP library's server: makes a protocol for a connection, and knows the open ones."""

    @property
    def connections(self) -> list[Any]: ...
    def __call__(self) -> asyncio.Protocol: ...


def connections_max() -> int:
    """Half of the files that this process may open: the rest is for its own."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(CONNECTIONS_MIN, min(CONNECTIONS_MAX, files // 2))


class Door(asyncio.Protocol):
    """Hands a new connection to its handler, or ends it at once: one address takes at most half of all."""

    def __init__(self, handlers: Handlers, *, most: int) -> None:
        self._handlers = handlers
        self._most = most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        taken = Counter(address_of(handler.transport) for handler in self._handlers.connections)
        if taken.total() >= self._most or taken[address_of(transport)] >= self._most // 2:
            cast(asyncio.Transport, transport).abort()
            return
        handler = self._handlers()
        cast(asyncio.Transport, transport).set_protocol(handler)
        handler.connection_made(transport)


def address_of(transport: asyncio.BaseTransport | None) -> str:
    """The host at the other end; empty if it isn't known."""
    peer = None if transport is None else transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""


class Allowance:
    """So many messages and bytes a second, and a burst of each; whoever takes more waits.

    An honest learner says two messages a fragment and interval, and one a second beside them. Everything that is said
    goes onto the tape, so this is also how fast a stranger can fill the disk.
    """

    def __init__(
        self,
        *,
        messages_per_s: float = 100.0,
        bytes_per_s: float = float(64 << 10),
        burst_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates = (messages_per_s, bytes_per_s)
        self._burst_s = burst_s
        self._clock = clock
        self._left_s = [burst_s, burst_s]
        """Seconds' worth that may still be taken at once; below 0 is to be waited for."""
        self._at = clock()

    def wait_s(self, size: int) -> float:
        """Take a message of `size` bytes; how long to wait after it."""
        now = self._clock()
        passed, self._at = now - self._at, now
        for index, (rate, taken) in enumerate(zip(self._rates, (1, size), strict=True)):
            self._left_s[index] = min(self._burst_s, self._left_s[index] + passed) - taken / rate
        return max(0.0, -min(self._left_s))

    async def take(self, size: int) -> None:
        wait_s = self.wait_s(size)
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)
