"""What the study asks, as cells: an arm, who trains it, and on how many tokens.

Every arm is one that `geo-diloco simulate train --arm ...` takes. Model and data are the demo's (0.2M parameters, the
source code of Python's standard library); held-out loss is measured on 256 sequences instead of the demo's 64, since
arms differ by less than the noise of 64.

Budget: 5 hours on two cores. A core of the machine that the results come from trains about 20,000 tokens a second when
nothing else runs, measurements included: 0.7 billion tokens. `run.py --list` tells what the parts come to; they stand
in order of importance: whoever has less time begins at the top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_diloco.training.presets import ModelName

SEQUENCES = 256
"""Held-out, of 128 bytes each."""
MILLION = 1_000_000
TOKENS_PER_SECOND: dict[ModelName, int] = {"dense": 20_000, "dense-1M": 6_000, "moe": 12_000, "vit": 40_000}
"""Of a core: the first is measured, the others are guesses, good until a run has told."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Who trains. An inner step takes 160 ms at speed 1; links are of 100 Mbit/s."""

    learners: int = 4
    speeds: tuple[float, ...] = (1.0,)
    """One for all, or one for each."""
    batch_sizes: tuple[int, ...] = ()
    """Sequences in a batch of each; none: the manifest's 8."""
    away: Literal["", "freeze", "crash"] = ""
    """Each learner is away 20 % of the time, for ten rounds on average, and how it goes away (`churn.py`)."""
    delay_ms: int = 20
    """Of a packet between any two."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm of one part."""

    arm: str
    tokens: int
    fleet: Fleet = Fleet()
    model: ModelName = "dense"

    @property
    def decisive(self) -> Fleet:
        """The fleet as far as this arm depends on it: a baseline's learners wait for each other, and none goes away."""
        return self.fleet if self.arm.startswith("decoupled") else Fleet(learners=self.fleet.learners)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One question."""

    question: str
    cells: tuple[Cell, ...] = ()
    after: str = ""
    """The part whose results its cells come from (`second.py`); it has none of its own."""
    seeds: tuple[int, ...] = (0, 1, 2)
    against: tuple[str, ...] = ("decoupled",)
    """Arms that the others are compared with, seed by seed, in the same fleet with the same tokens."""


EQUAL = Fleet()
MIXED = Fleet(speeds=(1.0, 0.8, 0.5, 0.2))
ONE_SLOW = Fleet(speeds=(1.0, 1.0, 1.0, 0.2))
UNEQUAL_BATCHES = Fleet(batch_sizes=(8, 8, 4, 2))
THREE_WAYS = ("decoupled", "diloco", "data-parallel")


def cells(tokens: float, fleet: Fleet, *arms: str, model: ModelName = "dense") -> tuple[Cell, ...]:
    """The same fleet and tokens (in millions) for all of them."""
    return tuple(Cell(arm=arm, tokens=round(tokens * MILLION), fleet=fleet, model=model) for arm in arms)


def _coarse() -> tuple[Cell, ...]:
    """Outer learning rate x momentum x H with all else as it is; then kappa, and a limit on momentum."""
    grid = [
        f"decoupled:H={h},eta={eta},mu={mu}" for h in (24, 8, 64) for eta in (0.4, 0.7, 1.0) for mu in (0, 0.5, 0.9)
    ]
    kappa = [f"decoupled:H={h},kappa={kappa}" for h in (24, 8, 64) for kappa in (0, 0.5)]
    limited = [f"decoupled:H={h},mu=0.9,gain_max=2" for h in (24, 8, 64)]
    return cells(1, EQUAL, *grid, *kappa, *limited)


def _merges() -> tuple[Cell, ...]:
    """Half a million tokens for each learner."""
    rules = ("decoupled", "decoupled:merge=mean", "decoupled:merge=rda-fragment", "decoupled:merge_embeddings=rda")
    found: list[Cell] = []
    for learners in (2, 4, 8, 16):
        found += cells(learners / 2, Fleet(learners=learners), *(rules if learners < 16 else rules[:2]))
    return tuple(found)


def _delays() -> tuple[Cell, ...]:
    """A fragment is in flight for about five packets' ways: from nothing to half of H = 24 steps. The manifest's tau
    decides nothing here: outside lockstep an update is adopted when it is there."""
    found: list[Cell] = []
    for delay_ms in (1, 20, 150, 350):
        arms = ["decoupled", "decoupled:kappa=0"]
        if delay_ms == 350:
            arms += ["decoupled:cap=1", "decoupled:cap=1000"]
        found += cells(2, Fleet(delay_ms=delay_ms), *arms)
    return tuple(found)


def _codecs() -> tuple[Cell, ...]:
    legs = (("none", "none"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "none"), ("none", "int4"))
    arms = [f"decoupled:codec_up={up},codec_down={down}" for up, down in legs]
    return cells(2, EQUAL, "decoupled", *arms, "decoupled:block_up=256,block_down=256")


PARTS: dict[str, Part] = {
    "a1": Part(
        question="eta, mu, H and kappa: where is it good at all?",
        cells=_coarse(),
        seeds=(0,),
        against=("decoupled:H=24,eta=0.7,mu=0.5",),
    ),
    "parity": Part(
        question="Does it learn as well as synchronous DiLoCo and data-parallel training?",
        cells=(
            *cells(4, EQUAL, "decoupled", "diloco", "data-parallel"),
            *cells(4, Fleet(learners=2), "decoupled", "data-parallel"),
            *cells(4, Fleet(learners=8), "decoupled", "data-parallel"),
        ),
        against=("diloco", "data-parallel"),
    ),
    "c": Part(
        question="Learners of unequal speed: K = M, K = 1, K = 1 with grace?",
        cells=cells(
            4,
            MIXED,
            "decoupled",
            "decoupled:grace=off",
            "decoupled:K=4",
            "decoupled:gamma=0.5",
            "diloco",
            "data-parallel",
        ),
        against=("decoupled", "diloco"),
    ),
    "g": Part(
        question="Learners that are away a fifth of the time, at unequal speeds?",
        cells=(
            *cells(4, Fleet(speeds=MIXED.speeds, away="freeze"), "decoupled"),
            *cells(4, Fleet(away="freeze"), "decoupled"),
            *cells(4, Fleet(away="crash"), "decoupled"),
            *cells(4, EQUAL, "diloco"),
        ),
        against=("diloco",),
    ),
    "moe": Part(
        question="Does a mixture of experts learn as well so?",
        cells=cells(2.8, EQUAL, *THREE_WAYS, model="moe"),
        against=("diloco", "data-parallel"),
    ),
    "vision": Part(
        question="Does a vision transformer learn as well so (accuracy on digits)?",
        cells=cells(1, EQUAL, *THREE_WAYS, model="vit"),
        seeds=(0, 1, 2, 3, 4),
        against=("diloco", "data-parallel"),
    ),
    "a2": Part(question="The best six cells of a1 and those next to them: which is the best?", after="a1"),
    "b": Part(question="How are deltas best averaged, and does it matter more with more learners?", cells=_merges()),
    "d": Part(question="What does encoding cost, up and down?", cells=_codecs()),
    "p": Part(
        question="Does it matter into how many fragments a model is cut?",
        cells=cells(2, EQUAL, "decoupled", "decoupled:P=1", "decoupled:P=2", "decoupled:P=8"),
    ),
    "e": Part(
        question="How long may transfers take, and what of the work done meanwhile?",
        cells=_delays(),
    ),
    "h": Part(
        question="One learner is five times slower: is its late work worth taking?",
        cells=cells(2, ONE_SLOW, "decoupled", "decoupled:S_max=2", "decoupled:S_max=0", "decoupled:late_form=paper"),
    ),
    "f": Part(
        question="Unequal batches: should tokens weigh?",
        cells=cells(2, UNEQUAL_BATCHES, "decoupled", "decoupled:token_weights=off"),
    ),
    "i": Part(
        question="Does the learning rate follow the run's progress, or the learner's own steps?",
        cells=cells(2, MIXED, "decoupled", "decoupled:schedule_by=own"),
    ),
    "parity1M": Part(
        question="Is it as good with a million parameters?",
        cells=cells(20, EQUAL, *THREE_WAYS, model="dense-1M"),
        seeds=(0,),
        against=("diloco", "data-parallel"),
    ),
}
