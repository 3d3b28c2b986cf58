"""A learner's own way up: a line that the uploads under way share evenly, as connections over one router do.

It stands apart because where it is thin it decides who takes part: the kernel takes some of an upload before the line
has carried it, so the next one is begun, and shares the line, while the last one is still on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from geo_diloco.sim.clock import Action, Clockwork


@dataclass
class _Flow:
    left_ms: float
    """What the line would need for the rest of it, alone."""
    sent: Action | None
    """Not told yet."""
    done: Callable[[], None]


class SharedLine:
    """`ahead_ms`: what the line needs for as much as the kernel takes of an upload beyond what was carried."""

    def __init__(self, clock: Clockwork, ahead_ms: int) -> None:
        self._clock = clock
        self._ahead_ms = ahead_ms
        self._flows: list[_Flow] = []
        self._at = 0
        self._number = 0

    def begin(self, ms: int, *, sent: Action, done: Action) -> None:
        """An upload for which the line needs that long if it is alone. `sent`: the kernel has all of it; `done`: the
        line has carried it."""
        self._move()
        self._flows.append(_Flow(ms, sent, done))
        self._look()

    def _move(self) -> None:
        now = self._clock.now
        for flow in self._flows:
            flow.left_ms -= (now - self._at) / len(self._flows)
        self._at = now

    def _look(self) -> None:
        """Tell what is over, and look again when the next thing is."""
        told: list[Action] = []
        for flow in self._flows:
            if flow.sent is not None and flow.left_ms <= self._ahead_ms:
                told.append(flow.sent)
                flow.sent = None
        told += [flow.done for flow in self._flows if flow.left_ms <= 0]
        self._flows = [flow for flow in self._flows if flow.left_ms > 0]
        self._number += 1
        if self._flows:
            least = min(flow.left_ms - (self._ahead_ms if flow.sent else 0) for flow in self._flows)
            number = self._number
            self._clock.after(math.ceil(least * len(self._flows)), lambda: self._look_again(number))
        for tell in told:
            self._clock.after(0, tell)

    def _look_again(self, number: int) -> None:
        if number == self._number:
            self._move()
            self._look()
