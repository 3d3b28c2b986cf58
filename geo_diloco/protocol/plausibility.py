"""How much of what a learner claims is believed: a claim is never refused for its size, it counts up to a limit.

Stands apart because it is the one place where a stranger's numbers meet everybody else's. What is beyond a limit is an
honest learner far from the others, or a liar, and nobody can tell which; so the work is merged all the same, and three
things are cut (numerics.md, 2):

    tokens   in all, CREDIT_FACTOR times what the median live learner has trained since this one is known, and as
             many times an interval of the manifest's own batches. What is beyond it enters neither the run's
             progress nor the weight; the learner books it as dropped, `implausible`.
    weight   WEIGHT_FACTOR times that of the median participant: nobody's share of a merge grows without end. Nor does
             that of those who are not in it, by whom its portion is counted (`portion.py`).
    length   LENGTH_FACTOR times the median of what was merged into the fragment lately: a longer delta is shortened.
             (Where nothing was merged yet, the shell's gate refuses what is absurd beside Theta itself.)

Medians are lower ones, so that half of the learners can't move them. A run in which liars are the majority is theirs:
against that there is the admission token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from geo_diloco.manifest import SyncSpec
from geo_diloco.protocol.messages import Contribution

T = TypeVar("T", int, float)

CREDIT_FACTOR = 32
WEIGHT_FACTOR = 8
LENGTH_FACTOR = 10
LENGTHS_KEPT = 16
"""Merged lengths that a fragment remembers."""
LENGTHS_MIN = 4
"""Fewer say nothing yet."""
BATCH_FACTOR = 64
"""A learner's own batches may be that many times the manifest's."""
STEP_TIME_US_MIN = 1000
"""No inner step is believed to be faster."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A contribution as it enters a merge."""

    tokens: int
    tokens_unmerged: int
    weight: float
    """Not normalised."""
    norm: float
    """L2 norm of the delta as merged."""
    scale: float
    """The delta is multiplied by it: 1, or less for one that was too long."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A live learner's own account of its speed."""

    step: int
    tokens: int
    step_time_us: int


def tokens_per_second(pace: Pace, tokens_per_step: int) -> int | None:
    """By what it says and the manifest allows; none if it has not told."""
    if pace.step <= 0 or pace.step_time_us <= 0:
        return None
    tokens = min(pace.tokens // pace.step, BATCH_FACTOR * tokens_per_step)
    return tokens * 1_000_000 // max(pace.step_time_us, STEP_TIME_US_MIN)


def credit_max(median_trained: int, credited: int, *, tokens_per_step: int, sync: SyncSpec) -> int | None:
    """Tokens that a learner's next contribution may stand for, where the median has trained `median_trained` since it
    is known and `credited` of its own were merged already; none without a limit."""
    if tokens_per_step == 0:
        return None
    return max(0, CREDIT_FACTOR * (sync.interval_steps * tokens_per_step + median_trained) - credited)


def count(
    taken: Sequence[tuple[Contribution, float]],
    credits: Sequence[int | None],
    lengths: Sequence[float],
    *,
    token_weights: bool = True,
    spans: Sequence[float] | None = None,
) -> tuple[Counted, ...]:
    """What of each (contribution, norm) counts. `credits`: from `credit_max`; `lengths`: merged lately; `spans`: inner
    steps of each in an interval (`portion.py`), none where each weighs by what it trained since it adopted last."""
    tokens = [_credited(claim, credit) for (claim, _), credit in zip(taken, credits, strict=True)]
    weights = [1.0] * len(taken)
    if token_weights:
        weights = [fresh * fresh / claim.steps for (fresh, _), (claim, _) in zip(tokens, taken, strict=True)]
    if token_weights and spans is not None:
        steps = [claim.steps for claim, _ in taken]
        weights = [weight * span / each for weight, span, each in zip(weights, spans, steps, strict=True)]
    weight_max = WEIGHT_FACTOR * lower_median(weights) if weights else 0.0
    usual = lower_median(lengths) if len(lengths) >= LENGTHS_MIN else 0.0
    counted = []
    for (fresh, unmerged), (_, norm), weight in zip(tokens, taken, weights, strict=True):
        scale = min(1.0, LENGTH_FACTOR * usual / norm) if usual > 0.0 and norm > 0.0 else 1.0
        counted.append(Counted(fresh, unmerged, min(weight, weight_max), norm * scale, scale))
    return tuple(counted)


def _credited(claim: Contribution, credit: int | None) -> tuple[int, int]:
    if credit is None:
        return claim.tokens, claim.tokens_unmerged
    return max(1, min(claim.tokens, credit)), max(1, min(claim.tokens_unmerged, credit))


def lower_median(values: Sequence[T]) -> T:
    """Of at least one value."""
    return sorted(values)[(len(values) - 1) // 2]
