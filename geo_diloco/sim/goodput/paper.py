"""Our figures beside the paper's, cell by cell: what `--paper`, `--scavenge` and `--bandwidth` print, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from geo_diloco.sim.goodput.bandwidth import Line, Needs, needs
from geo_diloco.sim.goodput.model import Outcome, World
from geo_diloco.sim.goodput.published import (
    BANDWIDTHS,
    EXTRA,
    SCAVENGED_DATA_PARALLEL,
    SCAVENGED_DECOUPLED,
    Bandwidth,
    rows,
)
from geo_diloco.sim.goodput.scavenging import Scavenging, data_parallel_time, decoupled_time
from geo_diloco.sim.goodput.systems import simulate


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One of the goodput table's."""

    outcome: Outcome
    published: int
    """Percent."""

    @property
    def goodput(self) -> float:
        """Percent."""
        return 100 * self.outcome.goodput

    @property
    def difference(self) -> float:
        """Points, ours minus published."""
        return self.goodput - self.published


def goodput_cells(world: World, told: Callable[[Cell], None] = lambda cell: None) -> list[Cell]:
    """Row by row, as the paper has them, where MTBI is a year. (K counts for uptime only.)"""
    cells = []
    for systems, figures in rows():
        for system, figure in zip(systems, figures, strict=True):
            cells.append(Cell(outcome=simulate(system, world), published=figure))
            told(cells[-1])
    return cells


def differences(cells: list[Cell], *, decoupled: bool) -> list[float]:
    """Absolute ones, of the Decoupled rows or of the baselines."""
    return [abs(cell.difference) for cell in cells if (cell.outcome.system.kind == "decoupled") == decoupled]


def mean_difference(cells: list[Cell], *, decoupled: bool = True) -> float:
    return fmean(differences(cells, decoupled=decoupled))


@dataclass(frozen=True, kw_only=True)
class ScavengeCell:
    method: str
    extra: float
    time: float
    published: float

    @property
    def difference(self) -> float:
        return self.time - self.published


def scavenge_cells(scavenging: Scavenging) -> list[ScavengeCell]:
    return [
        ScavengeCell(method=method, extra=extra, time=time_to(extra, scavenging), published=figure)
        for method, time_to, figures in (
            ("data-parallel", data_parallel_time, SCAVENGED_DATA_PARALLEL),
            ("decoupled", decoupled_time, SCAVENGED_DECOUPLED),
        )
        for extra, figure in zip(EXTRA, figures, strict=True)
    ]


def bandwidth_pairs(utilisation: float) -> list[tuple[Bandwidth, Needs]]:
    """The published pairs with what our formulas give for them."""
    found = []
    for pair in BANDWIDTHS:
        line = Line(params=pair.params, step_s=pair.step_s, sites=pair.sites, codec=pair.codec)
        found.append((pair, needs(replace(line, utilisation=utilisation))))
    return found
