"""Who trains in a simulation: how fast, over which links, and what befalls them. Facts, and the time a transfer takes.

A link is a delay each way and a rate each way, as the learner's own access line; the syncer's is without bound. A blob
takes size / rate + delay, a message the delay alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from geo_diloco.config import FaultPlan

NO_FAULTS = FaultPlan()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One learner's."""

    step_ms: int
    """Of an inner step, on average."""
    up_mbit: float
    """Mbit/s, from the learner to the syncer."""
    down_mbit: float
    delay_ms: int
    """One way."""
    batch_size: int = 0
    """Sequences in a batch of its own; 0: the manifest's."""

    def up_ms(self, num_bytes: int) -> int:
        """How long the way up is taken by that many bytes; the delay comes on top."""
        return _transfer_ms(num_bytes, self.up_mbit)

    def down_ms(self, num_bytes: int) -> int:
        return _transfer_ms(num_bytes, self.down_mbit)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All learners, and the fault plan."""

    machines: tuple[Machine, ...]
    joins: tuple[int, ...] = ()
    """Of the last machines, which come later: when all learners together have trained so many tokens, in order."""
    plan: FaultPlan = NO_FAULTS

    @property
    def num_learners(self) -> int:
        return len(self.machines)

    @property
    def num_founders(self) -> int:
        """Who is there from the start."""
        return len(self.machines) - len(self.joins)

    def with_links(self, factor: float) -> Fleet:
        """Every link's rates times that."""
        machines = (
            replace(each, up_mbit=factor * each.up_mbit, down_mbit=factor * each.down_mbit) for each in self.machines
        )
        return replace(self, machines=tuple(machines))

    @property
    def begins(self) -> tuple[int, ...]:
        """Per learner, after how many tokens it comes."""
        return (0,) * self.num_founders + self.joins

    def without_faults(self) -> Fleet:
        return replace(self, plan=NO_FAULTS)

    def slowest_step_ms_of(self, learners: Collection[int]) -> int:
        """0 of nobody."""
        return max((self.machines[i].step_ms for i in learners), default=0)

    def exchange_ms(self, num_bytes: int, learners: Collection[int]) -> int:
        """How long these learners together take for an all-to-one exchange that everybody waits for: the bytes up, and
        as many down."""
        theirs = [self.machines[i] for i in learners]
        return max((each.up_ms(num_bytes) + each.down_ms(num_bytes) + 2 * each.delay_ms for each in theirs), default=0)


def _transfer_ms(num_bytes: int, mbit: float) -> int:
    """1 Mbit/s is 1000 bits a millisecond."""
    return round(8 * num_bytes / (1000 * mbit))
