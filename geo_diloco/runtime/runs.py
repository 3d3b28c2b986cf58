"""What is under way over one address, and how it does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from geo_diloco.errors import TransferError
from geo_diloco.runtime.routes import Route
from geo_diloco.runtime.spans import Report, Span
from geo_diloco.runtime.streams import Climb


class NotYetError(TransferError):
    """The other side hasn't got it, or doesn't take it, and may before long. It is not blamed for that."""


class UnaskedError(TransferError):
    """It was taken to have all of it, and has not: how things stand there has to be asked after all."""


class Way(Protocol):
    """One address, as a transfer uses it. Every method raises TransferError, `NotYetError` or TransferRefused."""

    url: str
    patience_s: float
    """How long it is waited for what it hasn't got yet; it is refused after that."""
    is_towards_us: bool
    """A fetch: what comes has arrived, while of what is sent the last may not have."""
    confirmed: int
    """Bytes that are known to have got where they should, this way: only more of them is progress."""

    def open(self) -> Coroutine[Any, Any, Collection[int] | None]:
        """Make ready, say into the queue what is known of the pieces, and return those that it has; None for all."""

    async def move(self, span: Span) -> None:
        """All of it, when it returns."""

    async def left(self) -> Report | None:
        """After something broke off: what is still missing, if that can be told without asking the other side. Raises
        nothing."""


@dataclass(eq=False)
class Run:
    """A span under way."""

    span: Span
    size: int
    began_at: float
    heard_at: float
    """When anything was moved last, or waited for its turn on this machine."""
    moved: int = 0
    is_ending: bool = False
    """The rest of it is on its way: another may begin."""
    is_taken_over: bool = False
    is_silent: bool = False

    def rate(self) -> float:
        return self.moved / max(self.heard_at - self.began_at, 0.01)

    def left_s(self, now: float) -> float:
        """As it did so far."""
        return (self.size - self.moved) * max(now - self.began_at, 0.1) / max(self.moved, 1)


@dataclass(eq=False)
class Seat:
    """A way, and how it does in this transfer."""

    way: Way
    route: Route
    delay_s: float
    climb: Climb
    having: Collection[int] | None = None
    must_open: bool = True
    failures: int = 0
    """Since there was progress."""
    progress: int = 0
    retry_at: float = 0.0
    waits_since: float | None = None
    polls: int = 0
    runs: dict[asyncio.Task[None], Run] = field(default_factory=dict)
    began_at: float = 0.0
    moved: int = 0
    window_at: float = 0.0
    window_moved: int = 0
    is_window_full: bool = False
    nudge: asyncio.Future[None] | None = None
    is_out: bool = False
    failure: TransferError | None = None
