"""What all bulk of a process goes through, whoever asked for it: two shapers, the board, and what is known of links."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.runtime.board import Board
from geo_diloco.runtime.routes import Routes
from geo_diloco.runtime.session import ByteCounters, Session
from geo_diloco.runtime.shaping import Shaper

_RECEIVE_S = 0.1
"""A limit on what comes in holds only if the kernel does not take in seconds of it beforehand."""
_RECEIVE_BYTES_MIN = 32 << 10


@dataclass(frozen=True)
class Lanes:
    """Both directions, of this machine's own transfers and of what it serves together."""

    up: Shaper = field(default_factory=Shaper)
    down: Shaper = field(default_factory=Shaper)
    board: Board = field(default_factory=Board)

    @property
    def receive_bytes(self) -> int:
        """What a socket may hold of what we have not read yet; 0 leaves it to the kernel, where nothing is limited."""
        return 0 if self.down.is_open else max(_RECEIVE_BYTES_MIN, int(_RECEIVE_S * self.down.bytes_per_s))


@dataclass(frozen=True)
class Bulk:
    """What transfers that we ask for work with."""

    session: Session
    counters: ByteCounters = field(default_factory=ByteCounters)
    lanes: Lanes = field(default_factory=Lanes)
    routes: Routes = field(default_factory=Routes)
