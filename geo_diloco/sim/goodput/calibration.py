"""The constants of the paper's tables that it doesn't print, fitted on its baselines alone.

Two for goodput: the reshape time (down and up alike) and the return time, by least squares over the ten cells of
data-parallel and elastic data-parallel. Two for scavenging: over the data-parallel row. No Decoupled figure is looked
at: those rows are predictions. The constants that the package ships are what this finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from geo_diloco.sim.goodput.model import System, Times, World
from geo_diloco.sim.goodput.published import EXTRA, SCAVENGED_DATA_PARALLEL, rows
from geo_diloco.sim.goodput.scavenging import Scavenging, data_parallel_time
from geo_diloco.sim.goodput.systems import simulate

BEGIN = (20.0, 80.0)
STEPS = (8.0, 4.0, 2.0, 1.0, 0.5)
"""Seconds by which the search goes up and down; the last is the resolution. The fit is no sharper than that."""
AROUND = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (1, -1))
"""Both axes, and the diagonal: data-parallel sees only the sum of the two."""
SEEDS = 2
"""Of the world's, the first: enough for the resolution."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Two constants, and how well they do on the rows that they were fitted on."""

    first: float
    second: float
    residuals: tuple[float, ...]
    """Ours minus published, in the order of the rows."""

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.residuals))))


def times_of(reshape_s: float, return_s: float) -> Times:
    return Times(downscale_s=reshape_s, upscale_s=reshape_s, return_s=return_s)


def fit_times(world: World, told: Callable[[str], None] = lambda line: None) -> Fit:
    """Reshape and return seconds: a pattern search, with the same seeds for every try."""
    world = replace(world, seeds=world.seeds[:SEEDS])
    baselines: list[tuple[System, int]] = [
        (system, figure)
        for systems, figures in rows()
        for system, figure in zip(systems, figures, strict=True)
        if system.kind != "decoupled"
    ]
    tried: dict[tuple[float, float], tuple[float, ...]] = {}

    def residuals(point: tuple[float, float]) -> tuple[float, ...]:
        if point not in tried:
            under = replace(world, times=times_of(*point))
            tried[point] = tuple(100 * simulate(system, under).goodput - figure for system, figure in baselines)
            told(f"reshape {point[0]:g} s, return {point[1]:g} s: {_squares(tried[point]):.1f} points squared")
        return tried[point]

    best = BEGIN
    for step in STEPS:
        while True:
            around = [(best[0] + dx * step, best[1] + dy * step) for dx, dy in AROUND]
            near = min((point for point in around if min(point) > 0), key=lambda point: _squares(residuals(point)))
            if near == best:
                break
            best = near
    return Fit(first=best[0], second=best[1], residuals=residuals(best))


def fit_scavenging() -> Fit:
    """Share of the tokens and wait of a step, by linear least squares: the row is linear in share and share x wait."""
    unit = Scavenging(tokens_share=1.0, wait_steps=1.0)
    gain = [data_parallel_time(extra, replace(unit, wait_steps=0.0)) - 1.0 for extra in EXTRA]
    wait = [data_parallel_time(extra, unit) - 1.0 - won for extra, won in zip(EXTRA, gain, strict=True)]
    over = np.array(SCAVENGED_DATA_PARALLEL) - 1.0
    (share, share_wait), *_ = np.linalg.lstsq(np.array([gain, wait]).T, over, rcond=None)
    found = Scavenging(tokens_share=round(float(share), 2), wait_steps=round(float(share_wait / share), 2))
    ours = [data_parallel_time(extra, found) for extra in EXTRA]
    differences = tuple(our - theirs for our, theirs in zip(ours, SCAVENGED_DATA_PARALLEL, strict=True))
    return Fit(first=found.tokens_share, second=found.wait_steps, residuals=differences)


def _squares(residuals: tuple[float, ...]) -> float:
    return float(np.square(residuals).sum())
