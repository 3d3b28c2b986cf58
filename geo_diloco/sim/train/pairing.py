"""How much worse is one arm than another, seed by seed: losses of two seeds are on different held-out documents, so
only what differs within a seed says anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# fmt: off
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
"""Of Student's t, by degrees of freedom from 1 on."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of an arm's held-out loss from another's, as a share of that: positive is worse."""

    by_seed: tuple[float, ...]
    mean: float
    margin: float | None
    """The mean's 95 % interval is so wide each way, if seeds are drawn at random; none from a single seed."""


def difference(losses: Sequence[float | None], others: Sequence[float | None]) -> Difference | None:
    """Of the first from the second, in the order of the seeds; none if a run diverged, or there is nothing to pair."""
    if not losses or len(losses) != len(others):
        return None
    shares = []
    for loss, other in zip(losses, others, strict=True):
        if loss is None or not other:
            return None
        shares.append(loss / other - 1)
    margin = None if len(shares) < 2 else _t_975(len(shares) - 1) * stdev(shares) / math.sqrt(len(shares))
    return Difference(tuple(shares), fmean(shares), margin)


def _t_975(freedom: int) -> float:
    """Beyond the table within a thousandth."""
    return _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.4 / freedom
