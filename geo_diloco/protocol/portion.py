"""How much of everybody's work a merge holds: the one who is in it alone is not everybody.

With all M learners in every merge, a fragment's Theta moves by the mean of M outer gradients an interval. Where each is
in every n-th merge only, its delta stands for n intervals by then. If those who happen to be in a merge count as
everybody, the same work moves Theta by M / participants times as much, as if eta were so much larger, and momentum adds
that up. So that all work moves Theta by what it would in lockstep, whenever it comes,

    G = portion * merge(g_m, w_m),   portion = sum(w_m of those in it) / sum(w_m of all who train)
    w_m = (tokens / steps)^2 * span

span: the inner steps that the learner does while the median learner does H. That is the paper's tokens^2 / steps for
one interval, the same for all: what was trained since the last adoption, often a step or two where links are thin, says
nothing of a delta that stands for several. Where everybody has delivered, the portion is 1. A learner that has been
awaited for long and delivers nothing (`patience`) is not missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geo_diloco.protocol.plausibility import BATCH_FACTOR, STEP_TIME_US_MIN, WEIGHT_FACTOR, Pace, lower_median


@dataclass(frozen=True, slots=True)
class Interval:
    """Of the run, as it goes now."""

    steps: int
    """H."""
    median_us: int | None
    """Step time of the median learner; none until somebody has told."""
    tokens_per_step: int
    """Of the manifest's batches; 0 if it names none."""

    def span(self, step_time_us: int) -> float:
        """Inner steps that a learner does in it; H of one that has not told its step time (0)."""
        if step_time_us <= 0 or self.median_us is None:
            return float(self.steps)
        return self.steps * self.median_us / max(step_time_us, STEP_TIME_US_MIN)

    def weight(self, pace: Pace) -> float | None:
        """Of a learner that is not in a merge, by its own account; none before its first step."""
        if pace.step <= 0 or pace.tokens <= 0:
            return None
        tokens_per_step = pace.tokens / pace.step
        if self.tokens_per_step:
            tokens_per_step = min(tokens_per_step, BATCH_FACTOR * self.tokens_per_step)
        return tokens_per_step * tokens_per_step * self.span(pace.step_time_us)


def portion(present: Sequence[float], absent: Sequence[float | None]) -> float:
    """Of those in a merge, by weight, beside all who train. Who has no weight yet counts as the median participant; no
    weight counts for more than WEIGHT_FACTOR times the median: a learner that exaggerates shrinks others' steps no more
    than it could have pushed them aside."""
    if not absent:
        return 1.0
    usual = lower_median(present)
    missing = [usual if weight is None else weight for weight in absent]
    weight_max = WEIGHT_FACTOR * lower_median([*present, *missing])
    held = sum(min(weight, weight_max) for weight in present)
    return held / (held + sum(min(weight, weight_max) for weight in missing))
