"""`simulate goodput --fleet` and `--from-tape`: what machines of one's own come to, with volunteers and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_diloco import __version__
from geo_diloco.cli.goodput_report import drawn
from geo_diloco.config import FleetFile, FleetMachine, load_fleet
from geo_diloco.errors import ConfigError
from geo_diloco.sim.goodput.fleet import (
    DAY_MINUTES,
    Advice,
    Fleet,
    FleetOutcome,
    Machine,
    advise,
    predict,
    with_machines,
)
from geo_diloco.sim.goodput.tapes import Actual, fleet_from_tape
from geo_diloco.sim.goodput.timing import time_rounds

if TYPE_CHECKING:
    from geo_diloco.sim.goodput.model import World

CELLS_MAX, FEW_MACHINES = 2.5e8, 24
"""Minutes of machines, and as many are charged for fewer: about a minute of one core."""


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """Columns side by side: the fleet as it is, and with volunteers or beside what really was."""

    columns: tuple[tuple[str, FleetOutcome], ...]
    advice: tuple[Advice, ...]
    """For the last column."""
    actual: Actual | None = None

    def text(self) -> str:
        headings = ["", *(name for name, _ in self.columns), *(["the run"] if self.actual else [])]
        rows = [
            [label, *(said(outcome) for _, outcome in self.columns), *self._really(label)]
            for label, said in _LABELS.items()
        ]
        advice = drawn(["rule", "suggested"], [[each.rule, each.value] for each in self.advice])
        return "\n".join([drawn(headings, rows), "", advice, *(f"{each.rule}: {each.reason}" for each in self.advice)])

    def _really(self, label: str) -> list[str]:
        if self.actual is None:
            return []
        known = {
            "goodput": f"{self.actual.goodput:.1%}",
            "rounds an hour": f"{self.actual.rounds_per_hour:.1f}",
            "tokens an hour": f"{self.actual.tokens_per_hour:,.0f}",
            "participants": "" if self.actual.participants is None else f"{self.actual.participants:.2f}",
        }
        return [known.get(label, "")]

    def to_json(self) -> dict[str, Any]:
        return {
            "fleets": {name: asdict(outcome) for name, outcome in self.columns},
            "advice": [asdict(each) for each in self.advice],
            "actual": None if self.actual is None else asdict(self.actual),
            "version": __version__,
        }


_LABELS: dict[str, Callable[[FleetOutcome], str]] = {
    "goodput": lambda each: f"{each.goodput:.1%}",
    "uptime": lambda each: f"{each.uptime:.2%}",
    "time with K or more": lambda each: f"{each.quorum_time:.2%}",
    "tokens an hour": lambda each: f"{each.tokens_per_hour:,.0f}",
    "in their round's merge": lambda each: f"{each.in_merges:.1%}",
    "rounds an hour": lambda each: f"{each.rounds_per_hour:.1f}",
    "participants": lambda each: f"{each.participants:.2f}",
    "machines that train": lambda each: f"{each.training:.2f}",
}


def report_fleet(path: Path, world: World) -> FleetReport:
    """Of a fleet file; with volunteers if it has any."""
    file = load_fleet(path)
    fleet = fleet_from_file(file)
    columns = [("the fleet", fleet)]
    if file.volunteers:
        columns.append(("with volunteers", with_machines(fleet, _machines(file.volunteers))))
    _affordable(columns[-1][1], world)
    outcomes = tuple(
        (name, predict(each, time_rounds(each), days=world.days, seeds=world.seeds)) for name, each in columns
    )
    return FleetReport(columns=outcomes, advice=tuple(advise(columns[-1][1], outcomes[-1][1])))


def fleet_from_file(file: FleetFile) -> Fleet:
    """Without volunteers."""
    return Fleet(
        machines=_machines(file.machines),
        params=file.model.parameters,
        tokens_per_step=file.model.tokens_per_step,
        interval_steps=file.sync.interval_steps,
        fragments=file.sync.fragments,
        quorum=file.sync.quorum,
        codec=file.sync.codec,
    )


def report_tape(path: Path, world: World, *, hold_out: float = 0.0) -> FleetReport:
    """Of the machines that a run had, beside what it came to; with `hold_out` beside what that share of it, the end,
    came to, of which the prediction knows nothing."""
    fleet, actual = fleet_from_tape(path, hold_out=hold_out)
    _affordable(fleet, world)
    outcome = predict(fleet, time_rounds(fleet), days=world.days, seeds=world.seeds)
    return FleetReport(columns=(("predicted", outcome),), advice=tuple(advise(fleet, outcome)), actual=actual)


def _affordable(fleet: Fleet, world: World) -> None:
    """Raises ConfigError for what would take many minutes, or more memory than there is."""
    number = len(fleet.machines)
    minutes = world.days * DAY_MINUTES * len(world.seeds)
    if minutes * max(number, FEW_MACHINES) > CELLS_MAX:
        days = CELLS_MAX / max(number, FEW_MACHINES) / DAY_MINUTES / len(world.seeds)
        raise ConfigError(
            f"--days {world.days:g} for {len(world.seeds)} seeds: {number} machines would be followed for "
            f"{minutes:.2g} minutes; give at most {days:.3g} days, or fewer --seeds"
        )


def _machines(tables: Sequence[FleetMachine]) -> tuple[Machine, ...]:
    return tuple(
        Machine(
            name=each.name,
            step_s=each.step_s,
            up_mbit=each.up_mbit,
            down_mbit=each.down_mbit,
            rtt_s=each.rtt_ms / 1000,
            fails_every_s=each.fails_every_hours * 3600,
            back_after_s=each.back_after_minutes * 60,
            on_from=each.on_from,
            on_until=each.on_until,
        )
        for each in tables
        for _ in range(each.count)
    )
