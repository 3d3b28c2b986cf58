"""What happens next, and chance: the heap that a simulation is driven by.

Time is integer milliseconds and moves from one action to the next. Ties break on a counter, so actions of the same
moment happen in the order in which they were asked for; all chance comes from one seeded generator. Two simulations
that ask for the same things in the same order are therefore the same, on any machine and under any hash seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clockwork:
    """The one clock of a simulation."""

    def __init__(self, seed: int) -> None:
        self.now = 0
        self.random = random.Random(seed)
        self._heap: list[tuple[int, int, Action]] = []
        self._counter = count()

    @property
    def is_idle(self) -> bool:
        """Nothing will ever happen again."""
        return not self._heap

    def at(self, when: int, action: Action) -> None:
        """At that time, or now if it is past."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._counter), action))

    def after(self, ms: int, action: Action) -> None:
        self.at(self.now + ms, action)

    def between(self, bounds: tuple[int, int]) -> int:
        """A whole number by chance, both bounds included."""
        return self.random.randint(*bounds)

    def run(self, until_ms: int, done: Callable[[], bool] = lambda: False) -> None:
        """Do everything up to and including `until_ms`, unless `done` says sooner that it is enough. `now` is then the
        time of the last action."""
        while self._heap and not done():
            when, _, action = self._heap[0]
            if when > until_ms:
                break
            heapq.heappop(self._heap)
            self.now = when
            action()
