"""Time to a number of tokens if more compute is there for a part of it, and elsewhere.

The extra compute comes in groups of a quarter of the run's own, each at the end of a long link. Under data-parallel
every step waits for the slowest of them; the waits are exponential, so for g groups it is 1 + 1/2 + .. + 1/g mean
waits. Under Decoupled DiLoCo each group is a learner of its own: nobody waits for it, and the run is faster by its
share.

    time = (1 - q) + q / (1 + extra) * (1 + w * (1 + 1/2 + .. + 1/g))        w = 0 if decoupled

q is the share of the tokens that are trained while the extra compute is there, w the mean wait in steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

GROUP_EXTRA = 0.25
"""Of the run's own compute: the smallest amount that the paper adds."""


@dataclass(frozen=True, kw_only=True)
class Scavenging:
    """What the paper doesn't print of its runs with opportunistic compute."""

    tokens_share: float
    """q: of the budget, trained while the extra compute is there."""
    wait_steps: float
    """w: mean wait of a data-parallel step for one remote group, beside the step itself."""


FITTED_SCAVENGING = Scavenging(tokens_share=0.51, wait_steps=0.49)
"""What `simulate goodput --calibrate` finds on the paper's data-parallel row."""


def data_parallel_time(extra: float, scavenging: Scavenging) -> float:
    """Beside the time without extra compute."""
    groups = -(-extra // GROUP_EXTRA)
    waits = fsum(1.0 / number for number in range(1, int(groups) + 1))
    return _time(extra, scavenging.tokens_share, 1.0 + scavenging.wait_steps * waits)


def decoupled_time(extra: float, scavenging: Scavenging) -> float:
    """Beside the time without extra compute."""
    return _time(extra, scavenging.tokens_share, 1.0)


def _time(extra: float, tokens_share: float, step: float) -> float:
    return 1.0 - tokens_share + tokens_share * step / (1.0 + extra)
