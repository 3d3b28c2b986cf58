"""When chips that train in step stand still, given a fault plan: one rule for learners, data-parallel and elastic
groups.

The same plan makes different ways to train lose different amounts of time. An *elastic* group stands still to go on
without a part that failed, and again to take it back. One that is not stands still until the part is back, and to start
again. A part is a slice of a learner, or, for a group of several learners, a whole learner that is away. Chips that
stand still don't fail: a slice's fault that falls into a stop of its group is none. So a plan whose faults come at a
constant rate in all the time makes each group fail at that rate in the time in which it trains, as `goodput/lanes.py`
has it. What befalls a whole learner is not left to chance, and befalls it all the same. Integer milliseconds, no
clock, no chance.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Iterator
from itertools import count

from geo_diloco.config import Fault, FaultPlan

NEVER = sys.maxsize
"""In milliseconds: for good."""

_Part = tuple[int, int]
"""(learner counted from 0, slice counted from 1; 0 is the learner itself)."""


def occurrences(faults: Collection[Fault], repeat_s: float | None) -> Iterator[tuple[int, int, Fault]]:
    """(begin, end, fault) in order of beginning, in milliseconds; without end if the plan is repeated."""
    in_order = sorted(faults, key=lambda fault: fault.from_ms)
    for turn in count() if in_order and repeat_s is not None else range(1):
        offset = 0 if repeat_s is None else turn * round(1000 * repeat_s)
        for fault in in_order:
            until = NEVER if fault.until_ms is None else offset + fault.until_ms
            yield offset + fault.from_ms, until, fault


class Group:
    """Chips that train in step, followed in time. `learners`, counted from 0, are those in it; more may join."""

    def __init__(
        self, plan: FaultPlan, learners: Collection[int], *, elastic: bool, with_learners: bool = True
    ) -> None:
        """`with_learners`: learners that are away matter here. They don't to one that crashes and comes back itself."""
        faults = plan.faults if with_learners else plan.of_slices
        self._coming = occurrences(faults, plan.repeat_s)
        self._next_fault = next(self._coming, None)
        self._returns: list[tuple[int, _Part]] = []
        self._away: dict[_Part, int] = {}
        self._learners = set(learners)
        self._elastic = elastic
        self._slices = plan.slices
        self._downscale_ms, self._upscale_ms = round(1000 * plan.downscale_s), round(1000 * plan.upscale_s)
        self.stands_until = 0
        """Milliseconds; in the past while it trains."""

    @property
    def here(self) -> frozenset[int]:
        """Learners that train when the group does."""
        return frozenset(learner for learner in self._learners if not self._is_gone(learner))

    def join(self, learner: int, now_ms: int) -> None:
        """Taken in like one that is back."""
        self._learners.add(learner)
        if self.stands_until == NEVER and self._elastic and self.here:
            self.stands_until = now_ms
        self.stands_until = max(self.stands_until, now_ms + self._upscale_ms)

    def follow(self, now_ms: int) -> None:
        """Know of everything up to then, that moment included."""
        while (at := self.next_at) is not None and at <= now_ms:
            self._advance()

    def run(self, begin_ms: int, work_ms: int) -> int | None:
        """When so much work, begun then, is done; none if it never is. Time never goes back from call to call."""
        now, left = begin_ms, work_ms
        while not self._is_over:
            at = self.next_at
            if self.stands_until == NEVER:
                assert at is not None
                now = max(now, at)
            else:
                now = max(now, self.stands_until)
                if at is None or at >= now + left:
                    return now + left
                if at > now:
                    now, left = at, left - (at - now)
            self._advance()
        return None

    def stops(self, until_ms: int) -> Iterator[tuple[int, int | None]]:
        """(begin, end) of every stop that begins before then; the end is none if it is for good."""
        begin = None
        while (at := self.next_at) is not None and at < until_ms and not self._is_over:
            if begin is not None and at > self.stands_until:
                yield begin, self.stands_until
                begin = None
            self._advance()
            if begin is None and self.stands_until > at:
                begin = at
        if begin is not None:
            yield begin, None if self.stands_until == NEVER else self.stands_until

    # ---- events

    @property
    def _is_over(self) -> bool:
        """Stands still, and nobody who could end that will ever be back."""
        return self.stands_until == NEVER and not (self._elastic and self._returns)

    @property
    def next_at(self) -> int | None:
        """When something happens next; none if nothing ever does."""
        times = [] if self._next_fault is None else [self._next_fault[0]]
        times += [at for at, _ in self._returns[:1]]
        return min(times, default=None)

    def _advance(self) -> None:
        """The next event; a return before a fault of the same moment."""
        fault = self._next_fault
        if self._returns and (fault is None or self._returns[0][0] <= fault[0]):
            self._comes_back(*heapq.heappop(self._returns))
        else:
            assert fault is not None
            self._next_fault = next(self._coming, None)
            self._fails(*fault)

    def _fails(self, at: int, until: int, fault: Fault) -> None:
        learner = fault.learner - 1
        if learner not in self._learners:
            return
        part = (learner, fault.slice or 0)
        if fault.slice is not None and (at < self.stands_until or part in self._away or (learner, 0) in self._away):
            return
        if until > self._away.get(part, 0):
            self._away[part] = until
            if until != NEVER:
                heapq.heappush(self._returns, (until, part))
        if not self._elastic:
            self.stands_until = max(self.stands_until, NEVER if until == NEVER else until + self._upscale_ms)
        elif not self.here:
            self.stands_until = NEVER
        else:
            self.stands_until = max(self.stands_until, at + self._downscale_ms)

    def _comes_back(self, at: int, part: _Part) -> None:
        if self._away.get(part) != at:
            return  # away for longer by another fault
        del self._away[part]
        if self._elastic and self.here and (self.stands_until == NEVER or at >= self.stands_until):
            self.stands_until = at + self._upscale_ms  # a stop that goes on takes it in

    def _is_gone(self, learner: int) -> bool:
        if (learner, 0) in self._away:
            return True
        return 0 < self._slices <= sum(part[0] == learner for part in self._away)
