"""How many may come in, and how fast they may talk: what a stranger can take of a peer that listens.

Everything else in this package bounds what one message may cost. Here is bounded how many there are: connections, in
all and per address, so that whoever holds sockets open keeps out himself first; and messages, by making the one who
talks too fast wait, never by dropping what was said.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import resource
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, cast

CONNECTIONS_MAX = 4096
CONNECTIONS_MIN = 64
LOOK_S = 1.0
OCCASION_S = 60.0
"""An order follows its nonce within this time."""


class Handlers(Protocol):
    """The HTTP library's server: makes a protocol for a connection, and knows the open ones."""

    @property
    def connections(self) -> list[Any]: ...
    def __call__(self) -> asyncio.Protocol: ...


def allow_files(wanted: int) -> int:
    """Have this process open so many files, if the system lets it: a shell's own limit is often 1024. Returns how many
    it may open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return wanted if soft == resource.RLIM_INFINITY else soft


def connections_max() -> int:
    """Half of the files that this process may open: the rest is for its own."""
    return max(CONNECTIONS_MIN, min(CONNECTIONS_MAX, allow_files(2 * CONNECTIONS_MAX) // 2))


class Doorkeeper:
    """Counts who is in. One address takes at most half of all connections.

    Who left is noticed only when it seems full, and then at most once a second: letting someone in costs no look at
    the others.
    """

    def __init__(self, handlers: Handlers, *, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._handlers = handlers
        self._most = most
        self._clock = clock
        self._inside: Counter[str] = Counter()
        self._total = 0
        self._looked_at = -math.inf

    def admits(self, address: str) -> bool:
        """Whether one more may come in from there; if so it counts as inside."""
        if self._is_full(address) and self._clock() - self._looked_at >= LOOK_S:
            self._looked_at = self._clock()
            self._inside = Counter(address_of(handler.transport) for handler in self._handlers.connections)
            self._total = self._inside.total()
        if self._is_full(address):
            return False
        self._inside[address] += 1
        self._total += 1
        return True

    def _is_full(self, address: str) -> bool:
        return self._total >= self._most or self._inside[address] >= self._most // 2

    def door(self) -> asyncio.Protocol:
        """For one new connection."""
        return _Door(self, self._handlers)


class _Door(asyncio.Protocol):
    """Hands a new connection to its handler, or ends it at once."""

    def __init__(self, keeper: Doorkeeper, handlers: Handlers) -> None:
        self._keeper = keeper
        self._handlers = handlers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._keeper.admits(address_of(transport)):
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


class Occasions:
    """Nonces for an owner's orders, each good once and for a while. One of ours is recognised, not remembered, so
    whoever asks for many takes away nobody's."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._taken: dict[str, float] = {}
        """Those used, and when they were made: as many as the owner gave orders of late."""

    def new(self, now: float) -> str:
        """`now` in seconds, by a clock that never goes back."""
        told = f"{int(now * 1000):016x}{secrets.token_hex(8)}"
        return told + self._mark(told)

    def take(self, nonce: str, now: float) -> bool:
        """Whether it is ours, not too old, and not taken yet. To be asked once it is known who shows it."""
        told, mark = nonce[:32], nonce[32:]
        if not nonce.isascii() or not hmac.compare_digest(mark, self._mark(told)):
            return False
        made = int(told[:16], 16) / 1000
        self._taken = {each: at for each, at in self._taken.items() if now - at <= OCCASION_S}
        if now - made > OCCASION_S or nonce in self._taken:
            return False
        self._taken[nonce] = made
        return True

    def _mark(self, told: str) -> str:
        return hmac.new(self._key, told.encode(), hashlib.sha256).hexdigest()
