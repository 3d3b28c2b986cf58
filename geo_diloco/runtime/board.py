"""The transfers that are under way, for `status`: what, with whom, how far, how fast, how often resumed.

A transfer that we ask for is one line from its begin to its end. What others ask of us comes as single requests; those
of one address for one blob are one line, which goes when nothing has come for a while.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["up", "down"]
SHOWN_MAX = 64
IDLE_S = 10.0
"""What others asked of us and did not go on with is over after that."""
_RATE_S = 2.0
_LOOK_S = 1.0
"""Idle ones are looked for that often at most: where a thousand peers ask there are thousands of lines."""


@dataclass
class Line:
    """One transfer. Times are the board's clock."""

    what: str
    direction: Direction
    total: int
    at: float
    whom: dict[str, None] = field(default_factory=dict)
    """Addresses, in the order in which they came in."""
    done: int = 0
    resumed: int = 0
    _moved: int = 0
    """Since `_since`."""
    _since: float = 0.0
    _rate: float = 0.0
    _began_at: float = 0.0

    def __post_init__(self) -> None:
        self._since = self._began_at = self.at

    def moved(self, size: int, whom: str, now: float) -> None:
        self.at = now
        self.whom[whom] = None
        self.done = min(self.total, self.done + size)
        self._moved += size
        if now - self._since >= _RATE_S:
            self._rate = self._moved / (now - self._since)
            self._moved, self._since = 0, now

    def to_json(self, now: float) -> dict[str, Any]:
        """`left_s` is None while nothing moves."""
        rate = self._rate or self.done / max(now - self._began_at, 1e-3)
        if now - self._since > 2 * _RATE_S:
            rate = self._moved / (now - self._since)
        left = self.total - self.done
        return {
            "what": self.what,
            "direction": self.direction,
            "with": list(self.whom),
            "bytes": self.done,
            "bytes_total": self.total,
            "bytes_per_s": round(rate),
            "left_s": round(left / rate, 1) if rate >= 1 else None,
            "resumed": self.resumed,
        }


class Board:
    """For the event loop's thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: list[Line] = []
        self._served: dict[tuple[Direction, str, str], Line] = {}
        self._looked_at = -math.inf

    def begin(self, what: str, direction: Direction, total: int, *, done: int = 0) -> Line:
        """A transfer of ours; `end` it. `done`: what an earlier one had moved."""
        line = Line(what, direction, total, self._clock(), done=done, resumed=1 if done else 0)
        self._lines.append(line)
        return line

    def end(self, line: Line) -> None:
        self._lines = [each for each in self._lines if each is not line]

    def moved(self, line: Line, size: int, whom: str) -> None:
        line.moved(size, whom, self._clock())

    def served(self, what: str, direction: Direction, total: int, whom: str) -> Line:
        """The line of what `whom` asks of us."""
        if self._clock() - self._looked_at >= _LOOK_S:
            self._forget_idle()
        line = self._served.get((direction, what, whom))
        if line is None or line.done >= line.total:
            line = self._served[direction, what, whom] = Line(what, direction, total, self._clock(), {whom: None})
        return line

    def to_json(self) -> list[dict[str, Any]]:
        """Of those that are not over, the oldest first."""
        self._forget_idle()
        now = self._clock()
        lines = [*self._lines, *(line for line in self._served.values() if line.done < line.total)]
        return [line.to_json(now) for line in lines[:SHOWN_MAX]]

    def _forget_idle(self) -> None:
        self._looked_at = self._clock()
        old_at = self._looked_at - IDLE_S
        if any(line.at < old_at for line in self._served.values()):
            self._served = {key: line for key, line in self._served.items() if line.at >= old_at}
