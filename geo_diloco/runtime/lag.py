"""How late the event loop is: what anything that comes waits before it is looked at.

Everything that a peer does with others goes through one loop, so a step of it that takes long holds up all of them.
A probe sleeps for a moment, over and over, and sees how much later it wakes up. While the loop stands still for a
second it can't be asked 50 times, so the questions that fell into that second are counted as if they had been. Two
counts are kept: how late it was, and for what share of that this process was computing, which it has itself to blame
for; the rest of it others had the processor. Counts only grow: what lies between two looks is what happened in between.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping

EVERY_S = 0.02
_PER_DECADE = 20
"""Steps of the scale: each is an eighth above the one before."""


class LagProbe:
    """For the event loop's thread."""

    def __init__(self) -> None:
        self._late: Counter[int] = Counter()
        self._busy: Counter[int] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_at, computed_s = loop.time(), time.process_time()
            await asyncio.sleep(EVERY_S)
            passed_s = loop.time() - began_at
            late_s = passed_s - EVERY_S
            self.note(late_s, late_s * min(1.0, (time.process_time() - computed_s) / passed_s))

    def note(self, late_s: float, busy_s: float) -> None:
        """It woke up that late, having computed for so long. Whoever asked meanwhile waited for the rest of that."""
        for counts, left_s in ((self._late, late_s), (self._busy, min(late_s, busy_s))):
            while left_s > 0.0:
                counts[_step_of(left_s * 1000)] += 1
                left_s -= EVERY_S

    def status(self) -> dict[str, dict[str, int]]:
        """How often it was about so many milliseconds late, each bound being the upper end of its step."""
        return {"late_ms": _counts(self._late), "busy_ms": _counts(self._busy)}


def _counts(steps: Counter[int]) -> dict[str, int]:
    return {f"{10 ** (step / _PER_DECADE):.3g}": steps[step] for step in sorted(steps)}


def counts_between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[float, int]:
    """What was counted between two looks, by upper bound in milliseconds, the smallest first."""
    grown = {float(bound): number - before.get(bound, 0) for bound, number in after.items()}
    return {bound: grown[bound] for bound in sorted(grown) if grown[bound] > 0}


def at_most(counts: Mapping[float, int], share: float) -> float:
    """So many milliseconds late, or less, was that share of them; 0 if there are none."""
    total = sum(counts.values())
    so_far = 0
    for bound, number in sorted(counts.items()):
        so_far += number
        if so_far >= share * total:
            return bound
    return 0.0


def _step_of(late_ms: float) -> int:
    return max(0, math.ceil(_PER_DECADE * math.log10(max(late_ms, 1e-3))))
