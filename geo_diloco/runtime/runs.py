"""What is under way over one address, and which of it all would wait for in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from geo_diloco.errors import TransferError
from geo_diloco.runtime.routes import Route
from geo_diloco.runtime.sockets import UNSENT_BYTES_MAX
from geo_diloco.runtime.spans import Report, Span
from geo_diloco.runtime.streams import Climb

LATE_S = 0.5
LATER = 2.0
"""In the end a stream that has nothing to do moves the rest of a run once more, if that takes so many times as long as
it would take itself, and two round trips and `LATE_S` more: packets were lost. Whichever comes first counts."""
RACED_BYTES_MAX = 256 << 10
"""More is no matter of lost packets."""


class NotYetError(TransferError):
    """The other side hasn't got it, or doesn't take it, and may before long. It is not blamed for that."""


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
    raced: Span | None = None
    """What of it another run has as well."""

    def rest(self, round_trip_s: float, *, is_towards_us: bool) -> Span:
        """What has not come, or may not have arrived: what was written lately is still on its way."""
        on_its_way = 0 if is_towards_us else UNSENT_BYTES_MAX + int(self.rate() * round_trip_s)
        return Span(self.span.begin + max(0, self.moved - on_its_way), self.span.end)

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


def latest(seat: Seat, own_rate: float, now: float) -> Run | None:
    """The run to be raced by one of so many bytes per second, marked so; None if none is late."""
    found: tuple[float, Run, Span] | None = None
    for run in seat.runs.values():
        rest = run.rest(seat.route.round_trip_s, is_towards_us=seat.way.is_towards_us)
        if run.raced is not None or run.is_taken_over or not 0 < rest.num_bytes <= RACED_BYTES_MAX:
            continue
        left_s = max(run.left_s(now), now - run.heard_at)
        limit_s = LATER * rest.num_bytes / max(own_rate, 1.0) + 2 * seat.route.round_trip_s + LATE_S
        if left_s > limit_s and now - run.began_at > limit_s and (found is None or left_s > found[0]):
            found = left_s, run, rest
    if found is None:
        return None
    found[1].raced = found[2]
    return found[1]
