"""What a replica would hold, followed step by step without tensors.

Every inner step of every process start is one unit of work per fragment. A replica carries a share of it in [0, 1], a
delta takes a copy, a commit adds what the delta holds to Theta, an adoption subtracts and scales, all by numerics.md
section 5. So "no inner step is merged twice" is checked on the work itself and not only on the ranges that the
protocol writes down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PPM = 1_000_000
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, order=True)
class StepKey:
    """One inner step, of one process start: a step number that a crash lost may be used again by the next process."""

    peer: str
    boot: str
    step: int


Work = dict[StepKey, float]
"""Share of each step's work."""


@dataclass
class Replica:
    """One learner's replica: per fragment, the work it holds beyond its anchor."""

    num_fragments: int
    carried: list[Work] = field(default_factory=list)
    undecided_scale: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.carried = self.carried or [{} for _ in range(self.num_fragments)]
        self.undecided_scale = self.undecided_scale or [1.0] * self.num_fragments

    def copy(self) -> Replica:
        return Replica(self.num_fragments, [dict(work) for work in self.carried], list(self.undecided_scale))

    def train(self, key: StepKey) -> None:
        for work in self.carried:
            work[key] = 1.0

    def sample(self, fragment: int) -> Work:
        self.undecided_scale[fragment] = 1.0
        return {key: share for key, share in self.carried[fragment].items() if share > TOLERANCE}

    def adopt(self, fragment: int, delta: Work | None, scale_ppm: int) -> None:
        """`delta`: as it was sampled, if the commit took it."""
        scale = scale_ppm / PPM
        subtracted, before = delta or {}, self.undecided_scale[fragment]
        left = {
            key: scale * (share - before * subtracted.get(key, 0.0)) for key, share in self.carried[fragment].items()
        }
        self.carried[fragment] = {key: share for key, share in left.items() if abs(share) > TOLERANCE}
        self.undecided_scale[fragment] = 1.0 if delta is not None else before * scale

    def reset(self, fragment: int) -> None:
        self.carried[fragment] = {}
        self.undecided_scale[fragment] = 1.0
