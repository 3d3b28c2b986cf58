"""The central experiment, as trials: ways to train by eight learners under the failures of 1.2 million chips.

A *trial* is one arm of one model with one seed, by tokens or by time. What all ways to train get is what data-parallel
training without failures does in a model's time: its tokens ("equal tokens"), or its time ("equal time", by the
simulated clock). Data-parallel training under the plan is not trained by tokens: it would learn from the same batches
in the same order as without failures, only later.

Cost: 45M tokens of the dense model in three seeds, 14M of the vision transformer in three, 9M of the mixture of experts
in one: about an hour of one idle core, by the speeds in `plan.py`, of which only the first is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from geo_diloco.training.presets import ModelName

LEARNERS = 8
SEQUENCES = 256
"""Held-out."""
REFERENCE = "data-parallel:faults=off"
UNDER_FAULTS = ("decoupled", "elastic-data-parallel")


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a model's trials get."""

    tokens: int
    """Whole steps of all learners."""
    seconds: float
    """In which the reference trains on so many."""
    seeds: tuple[int, ...]


SHARES: dict[ModelName, Share] = {
    "dense": Share(tokens=390 * 8192, seconds=63.96, seeds=(0, 1, 2)),
    "vit": Share(tokens=240 * 4096, seconds=38.88, seeds=(0, 1, 2)),
    "moe": Share(tokens=240 * 8192, seconds=38.88, seeds=(0,)),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One arm with one seed. The plan of faults is drawn from the same seed."""

    model: ModelName
    arm: str
    seed: int
    tokens: int = 0
    """0: the time counts."""
    seconds: float = 0.0

    @property
    def key(self) -> str:
        """A result is known by all that decides it."""
        return json.dumps([self.model, self.arm, self.tokens, self.seconds, LEARNERS, self.seed])

    @property
    def command(self) -> str:
        """That trains the same."""
        kind, _, settings = self.arm.partition(":")
        model = "" if self.model == "dense" else f"--model {self.model} "
        budget = f"--tokens {self.tokens}" if self.tokens else f"--seconds {self.seconds:g}"
        arm = f"{kind}:sequences={SEQUENCES}" + (f",{settings}" if settings else "")
        return (
            f"geo-diloco simulate train {model}--learners {LEARNERS} --up 10000 --down 10000 --delay-ms 1 "
            f"--faults plan-{self.seed}.toml {budget} --seed {self.seed} --arm {arm}"
        )


def trials_of(model: ModelName, seed: int) -> tuple[Trial, ...]:
    """The reference first: it is compared with by tokens and by time."""
    share = SHARES[model]
    by_tokens = [Trial(model=model, arm=arm, seed=seed, tokens=share.tokens) for arm in (REFERENCE, *UNDER_FAULTS)]
    timed = ("decoupled", "elastic-data-parallel", "data-parallel")
    by_time = [Trial(model=model, arm=arm, seed=seed, seconds=share.seconds) for arm in timed]
    return (*by_tokens, *by_time)


def all_trials() -> list[Trial]:
    """All of the first seed, then of the next: whoever stops early has one of everything."""
    seeds = sorted({seed for share in SHARES.values() for seed in share.seeds})
    return [
        trial
        for seed in seeds
        for model, share in SHARES.items()
        if seed in share.seeds
        for trial in trials_of(model, seed)
    ]


def plan_command(seed: int) -> list[str]:
    """That writes the plan of faults, but for the file's name."""
    return ["simulate", "goodput", "--chips", "1.2M", "--learners", str(LEARNERS), "--seed", str(seed), "--write-plan"]
