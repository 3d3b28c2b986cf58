"""What fails, how often, and how long each answer to a failure takes: the facts a goodput simulation starts from.

Chips fail independently, each with a constant rate while it trains (an interruption is one of training). What fails and
comes back together is a *slice* of chips. Chips that train one step in step are a *group*: all of them under
data-parallel, a learner's own under Decoupled DiLoCo. See `sim/README.md`, "simulate goodput".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
YEAR_S = 365 * DAY_S
PLAN_SCALE = 25.0
"""Seconds of the chips in one of a training run's, in a plan of faults (`plans.py`). A step of 160 ms then stands for
one of 4 s; more of the chips' outages fall into a short run, and a stop of 14 s still lasts longer than a step."""

Kind = Literal["data-parallel", "elastic data-parallel", "decoupled"]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that a group loses, and for what."""

    downscale_s: float
    """An elastic group stands still that long to go on without a slice that failed."""
    upscale_s: float
    """The same to take one back; a group that is not elastic needs it to start again."""
    return_s: float
    """From a slice's failure until it may be used again: the mean of an exponential law."""
    lost_s: float = 0.0
    """Work before a failure that has to be done again (half the time between checkpoints)."""


RESHAPE_S = 14.0
RETURN_S = 66.0
"""What `simulate goodput --calibrate` finds: two constants, fitted on the two baselines of the paper's table."""

FITTED = Times(downscale_s=RESHAPE_S, upscale_s=RESHAPE_S, return_s=RETURN_S)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Chips that train in step."""

    slices: int
    """The smallest part that can be taken out and put back; all of one size."""
    slice_rate: float
    """Failures of one slice per second of training."""
    elastic: bool

    @property
    def rate(self) -> float:
        """Failures per second of training while all slices are there."""
        return self.slices * self.slice_rate


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to train on a number of chips."""

    kind: Kind
    chips: int
    learners: int = 1
    """Groups that don't wait for each other; 1 unless `decoupled`."""

    @property
    def name(self) -> str:
        return f"decoupled M={self.learners}" if self.kind == "decoupled" else self.kind

    def group(self, world: World) -> Group:
        """One of its groups; all are alike. A slice is as near to the wanted size as a whole number of them allows."""
        chips = self.chips / self.learners
        slices = max(1, round(chips / world.slice_chips))
        return Group(slices=slices, slice_rate=chips / slices / world.mtbi_s, elastic=self.kind != "data-parallel")


@dataclass(frozen=True, kw_only=True)
class World:
    """What is the same for all systems that are compared."""

    mtbi_s: float = YEAR_S
    """Mean time between interruptions of one chip that trains."""
    slice_chips: int = 256
    times: Times = FITTED
    step_spread: float = 0.0
    """Coefficient of variation of slices' step times, lasting for a run; a group is as fast as its slowest slice."""
    quorum: int = 1
    """K: learners without which no round closes."""
    grace: bool = True
    grace_gamma: float = 0.5
    overlap_steps: int = 2
    days: float = 30.0
    """Simulated for each seed."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a system came to: shares from 0 to 1, means over seeds."""

    system: System
    goodput: float
    """Of the chips' time, the share spent on steps that count, at the speed of an average chip."""
    goodput_by_seed: tuple[float, ...]
    uptime: float
    """Of the time, the share in which at least K learners train (K = 1 where there is one group)."""
    interruptions_per_hour: float
    """Failures of slices, of all groups together."""
    participants: float
    """Learners whose work is in a round's merge when it closes, on average."""
    in_time: float
    """Share of the work that is in the merge of its own round; the rest rides with a later one."""

    @property
    def spread(self) -> float:
        """Between the best and the worst seed."""
        return max(self.goodput_by_seed) - min(self.goodput_by_seed)
