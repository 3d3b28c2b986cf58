"""When a fragment's turn comes: phases, the inner clock of the median learner, and the duties of lockstep.

Pure functions and one small clock. The syncer opens rounds by it; a learner in lockstep mode knows from it, without
asking, after which inner step it samples and adopts. Phases are those of Streaming DiLoCo (arXiv 2501.18512):
t_p = floor(p * H / P).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from geo_diloco.manifest import FragmentId, MonoMs, SyncSpec

MICRO = 1_000_000
"""Micro-steps in an inner step: the clock counts in integers."""
PROGRESS_MS = 1_000
"""From one Progress to the next, where there is room for that."""
PROGRESS_MS_PER_LEARNER = 5
"""Hearing one costs a syncer about half a millisecond: a tenth of its time at most."""
LIVE_MS = 5_000
"""A learner that was not heard of for so long, and for LIVE_STEPS of its steps, holds up no round."""
LIVE_STEPS = 8


@dataclass(frozen=True, slots=True)
class Duty:
    """What a learner in lockstep does at an inner-step boundary."""

    kind: Literal["sample", "adopt"]
    fragment: FragmentId


def live_for_ms(step_time_us: int) -> int:
    """How long a learner with such steps counts as heard of."""
    return max(LIVE_MS, LIVE_STEPS * step_time_us // 1000)


def progress_every_ms(*, learners: int) -> int:
    """What a syncer asks for: as often as it can hear so many."""
    return max(PROGRESS_MS, PROGRESS_MS_PER_LEARNER * learners)


def progress_due_ms(asked_ms: int, step_time_us: int) -> int:
    """When a learner with such steps says it again, whatever it is asked for: two may be lost before it is silent."""
    return max(PROGRESS_MS, min(asked_ms, live_for_ms(step_time_us) // 3))


def phase_steps(fragment: int, sync: SyncSpec) -> int:
    """t_p, in inner steps."""
    return fragment * sync.interval_steps // sync.num_fragments


def first_due_steps(fragment: int, sync: SyncSpec) -> int:
    """After how many inner steps a fragment is due for the first time: its phase, or H where that is zero."""
    return phase_steps(fragment, sync) or sync.interval_steps


def first_dues(versions: Sequence[int], sync: SyncSpec) -> list[int]:
    """After how many inner steps of a term each fragment is due first. A run begins with every fragment's first due
    time. Whoever takes it up goes on at once, a phase apart, with the one whose turn it is: learners train on while
    nobody serves, so waiting a phase more would only lengthen the gap. That one may be early, by a phase, once."""
    dues = [first_due_steps(p, sync) for p in range(len(versions))]
    if any(versions):
        for turn, fragment in enumerate(sorted(range(len(versions)), key=lambda p: (versions[p], dues[p]))):
            dues[fragment] = phase_steps(turn, sync)
    return dues


def lockstep_duties(step: int, sync: SyncSpec) -> tuple[Duty, ...]:
    """Duties after own inner step `step` (counted from 1), in the order in which they are done.

    A fragment is sampled after step n >= 1 when n mod H = t_p and adopted exactly tau steps later. Adoptions of
    earlier samples come first; with tau = 0 all samples of a step come before their adoptions, so that no learner
    waits for a round to which it has not contributed yet.
    """
    samples = tuple(Duty("sample", p) for p in _sampled_after(step, sync))
    adoptions = tuple(Duty("adopt", p) for p in _sampled_after(step - sync.overlap_steps, sync))
    return samples + adoptions if sync.overlap_steps == 0 else adoptions + samples


def _sampled_after(step: int, sync: SyncSpec) -> list[FragmentId]:
    if step < 1:
        return []
    at = step % sync.interval_steps
    return [FragmentId(p) for p in range(sync.num_fragments) if phase_steps(p, sync) == at]


@dataclass(slots=True)
class InnerClock:
    """Inner steps of the median live learner, extrapolated from the step times that learners report.

    It only moves forward; with no live learner it stands still. Micro-steps and milliseconds, integers.
    """

    micro_steps: int = 0
    pace: int = 0
    """Micro-steps per millisecond."""
    at: MonoMs = MonoMs(0)

    def advance(self, now: MonoMs, step_time_us: int | None) -> None:
        """Move to `now` at the pace so far, then take that of the median learner: its step time, none without one."""
        if now > self.at:
            self.micro_steps += (now - self.at) * self.pace
            self.at = now
        self.pace = 0 if step_time_us is None else max(1, 1000 * MICRO // step_time_us)

    def ms_until(self, micro_steps: int) -> int | None:
        """Milliseconds from `at` until the clock shows `micro_steps`; none if it stands still."""
        if micro_steps <= self.micro_steps:
            return 0
        return None if self.pace == 0 else -(-(micro_steps - self.micro_steps) // self.pace)


class Turns:
    """The fragments without an open round, and when each is due by the inner clock, in micro-steps."""

    def __init__(self, sync: SyncSpec, versions: Sequence[int]) -> None:
        """`versions`: of each fragment where the term begins."""
        self._waiting = [(steps * MICRO, FragmentId(p)) for p, steps in enumerate(first_dues(versions, sync))]
        heapq.heapify(self._waiting)

    @property
    def next_due(self) -> int | None:
        """None if all fragments have open rounds."""
        return self._waiting[0][0] if self._waiting else None

    def take(self) -> FragmentId:
        """The one that is due first."""
        return heapq.heappop(self._waiting)[1]

    def give(self, fragment: FragmentId, due: int) -> None:
        """Its round is over."""
        heapq.heappush(self._waiting, (due, fragment))

    def due(self, fragment: FragmentId) -> int:
        """Of one that has no open round."""
        return next(due for due, each in self._waiting if each == fragment)
