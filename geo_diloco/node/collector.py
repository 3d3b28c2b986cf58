"""The garbage collector of a process that others depend on: it must not stop all of it for long.

A full collection goes through everything that lives: what was imported alone is 400,000 objects, and with a thousand
learners connected it takes a fifth of a second, each time, in which nobody is heard. What has outlived one mostly stays
for as long as this process does. So when one took long, all that is left is spared from then on; once in a while it is
gone through after all, for the sake of links and tasks that are over.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

LONG_S = 0.03
THOROUGH_EVERY_S = 1800.0


def spare_collector() -> None:
    """Call once, when all is imported. For the rest of this process."""
    gc.collect()
    gc.freeze()
    gc.callbacks.append(Sparing())


class Sparing:
    """A callback of the collector."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = self._thorough_at = clock()

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """`phase` and `info` as `gc.callbacks` has them."""
        now = self._clock()
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_at = now
        elif now - self._thorough_at >= THOROUGH_EVERY_S:
            self._thorough_at = now
            gc.unfreeze()
        elif now - self._began_at >= LONG_S:
            gc.freeze()
