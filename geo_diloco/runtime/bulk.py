"""What all bulk of a process goes through, whoever asked for it: two shapers, the quota, the board of transfers.

Control messages have connections of their own and pass none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geo_diloco.runtime.board import Board
from geo_diloco.runtime.quota import Quota
from geo_diloco.runtime.routes import Routes
from geo_diloco.runtime.session import ByteCounters, Session, make_session
from geo_diloco.runtime.shaping import Shaper
from geo_diloco.runtime.streams import STREAMS_MAX

_RECEIVE_S = 0.02
"""Of the limit, for each of a transfer's streams: a limit on what comes in holds only if the kernels of both sides
together do not take in seconds of it beforehand."""
_RECEIVE_BYTES_MIN = 64 << 10
"""Less than a segment, which on loopback has 64 KiB, and the sender waits for its timer each time."""
_AHEAD_S = 0.5
"""What all streams of a transfer together may have in kernels, in seconds of the limit."""
CONTROLS = {"auto": ("bbr",), "bbr": ("bbr",), "cubic": ("cubic",), "system": ()}
"""Congestion controls by what a person asks for. Where the kernel has none of them its own is used."""


@dataclass(frozen=True)
class Lanes:
    """Both directions, of this machine's own transfers and of what it serves together."""

    up: Shaper = field(default_factory=Shaper)
    down: Shaper = field(default_factory=Shaper)
    quota: Quota = field(default_factory=lambda: Quota(None, 0))
    board: Board = field(default_factory=Board)
    congestion: str = "system"

    @property
    def controls(self) -> tuple[str, ...]:
        """To ask the kernel for."""
        return CONTROLS[self.congestion]

    @property
    def receive_bytes(self) -> int:
        """What a socket may hold of what we have not read yet; 0 leaves it to the kernel, where nothing is limited."""
        return 0 if self.down.is_open else max(_RECEIVE_BYTES_MIN, int(_RECEIVE_S * self.down.bytes_per_s))

    @property
    def fetching_streams_max(self) -> int:
        """Of one transfer. A kernel grants twice what it is asked for."""
        if self.down.is_open:
            return STREAMS_MAX
        return max(1, min(STREAMS_MAX, int(_AHEAD_S * self.down.bytes_per_s / (2 * self.receive_bytes))))

    def status(self) -> dict[str, Any]:
        """For `status`: limits that are set, and every transfer under way."""
        limits: dict[str, Any] = {
            name: int(shaper.bytes_per_s) for name, shaper in (("max_up", self.up), ("max_down", self.down))
        }
        if self.quota.bytes_per_day:
            limits |= {"quota": self.quota.bytes_per_day, "quota_used": self.quota.used}
        return {"limits": {name: value for name, value in limits.items() if value}, "transfers": self.board.to_json()}


@dataclass(frozen=True)
class Bulk:
    """What transfers that we ask for work with."""

    session: Session
    counters: ByteCounters = field(default_factory=ByteCounters)
    lanes: Lanes = field(default_factory=Lanes)
    routes: Routes = field(default_factory=Routes)

    async def close(self) -> None:
        self.lanes.quota.save()
        await self.session.close()


def make_bulk(
    *, max_up: int = 0, max_down: int = 0, quota: int = 0, quota_path: Path | None = None, congestion: str = "auto"
) -> Bulk:
    """Rates in bytes per second and the quota in bytes per day, 0 for no limit. To be made in the event loop."""
    spent = Quota(quota_path, quota)
    lanes = Lanes(
        up=Shaper(max_up, spend=spent.spend),
        down=Shaper(max_down, spend=spent.spend),
        quota=spent,
        congestion=congestion,
    )
    return Bulk(make_session(congestion=lanes.controls, receive_bytes=lanes.receive_bytes), lanes=lanes)
