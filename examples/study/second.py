"""Which cells the second stage of (a) is made of: a pure function of what the first stage came to.

The rule. The six cells with the lowest held-out loss are taken, and the default. Then cells next to one of the six:
those that differ from it by one step in one setting (`LADDERS`; a ladder may go on where the first stage ended, since
the best may lie at its edge). One that the first stage ran counts by its own loss; one that it did not run counts as
the best of the six that it is next to, for it may be as good. The best of these are taken until there are `NUM_CELLS`
in all. A cell that diverged is never taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

NUM_BEST = 6
NUM_CELLS = 10
"""3 seeds x 4M tokens of each; more would not fit into the study's five hours."""
KIND = "decoupled"
DEFAULTS: dict[str, str] = {"H": "24", "eta": "0.7", "mu": "0.5", "kappa": "1"}
LADDERS: dict[str, tuple[str, ...]] = {
    "H": ("8", "24", "64"),
    "eta": ("0.2", "0.4", "0.7", "1", "1.4"),
    "mu": ("0", "0.5", "0.9"),
    "kappa": ("0", "0.5", "1"),
}


@dataclass(frozen=True, order=True)
class Settings:
    """Of an arm: its place on each ladder, in the order of `LADDERS`, and what is on none."""

    steps: tuple[int, ...]
    others: tuple[str, ...] = ()

    @property
    def arm(self) -> str:
        """As it is typed; what is as the default is not said."""
        values = {name: ladder[step] for (name, ladder), step in zip(LADDERS.items(), self.steps, strict=True)}
        said = [f"{name}={value}" for name, value in values.items() if value != DEFAULTS[name]]
        said += self.others
        return f"{KIND}:{','.join(said)}" if said else KIND


def settings_of(arm: str) -> Settings:
    """Raises ValueError if a setting lies between the steps of its ladder."""
    _, _, text = arm.partition(":")
    given = dict(each.split("=", 1) for each in text.split(",") if each)
    values = DEFAULTS | {name: f"{float(given.pop(name)):g}" for name in DEFAULTS if name in given}
    for name, ladder in LADDERS.items():
        if values[name] not in ladder:
            raise ValueError(f"{arm}: {name} = {values[name]} is no step of {', '.join(ladder)}; add it to the ladder")
    steps = tuple(ladder.index(values[name]) for name, ladder in LADDERS.items())
    return Settings(steps, tuple(f"{name}={value}" for name, value in sorted(given.items())))


def neighbours(settings: Settings) -> Iterator[Settings]:
    for place, ladder in enumerate(LADDERS.values()):
        for step in (settings.steps[place] - 1, settings.steps[place] + 1):
            if 0 <= step < len(ladder):
                yield replace(settings, steps=(*settings.steps[:place], step, *settings.steps[place + 1 :]))


def second_stage(losses: Mapping[str, float | None]) -> tuple[str, ...]:
    """Arms, from the first stage's arms and losses (none: not finite). The default is the first of them."""
    known = {settings_of(arm): loss for arm, loss in losses.items()}
    ranked = sorted((loss, settings) for settings, loss in known.items() if loss is not None)
    best = ranked[:NUM_BEST]
    chosen = [settings_of(KIND)]
    chosen += [settings for _, settings in best if settings not in chosen]
    hopes: dict[Settings, float] = {}
    for loss, settings in best:
        for other in neighbours(settings):
            own = known.get(other, hopes.get(other, loss))
            if own is not None:
                hopes[other] = own
    coming = sorted((hope, settings) for settings, hope in hopes.items() if settings not in chosen)
    chosen += [settings for _, settings in coming]
    return tuple(settings.arm for settings in chosen[:NUM_CELLS])
