"""The picture of `simulate train --plot`: each arm's curve over tokens and over virtual time, with the spread of its
seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from geo_diloco.cli.goodput_plot import DPI, save

if TYPE_CHECKING:
    from geo_diloco.sim.train.results import ArmResult

PANEL_INCHES = (5.5, 4.0)

Point = tuple[float, float]
_Axis = Callable[[int, int], float]


def plot_training(results: Sequence[ArmResult], path: Path) -> None:
    """A line is the mean of the seeds, its band goes from the lowest to the highest. A row of panels for the loss,
    another for the accuracy where there is one."""
    from matplotlib.figure import Figure

    images = results[0].accuracy is not None
    measures = [f"held-out nats/{'image' if images else 'token'}"] + (["accuracy (%)"] if images else [])
    across: list[tuple[str, _Axis]] = [
        ("tokens trained (millions)", lambda tokens, ms: tokens / 1e6),
        ("virtual time (s)", lambda tokens, ms: ms / 1000),
    ]
    size = (2 * PANEL_INCHES[0], len(measures) * PANEL_INCHES[1])
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")  # no pyplot: no window, no global state
    panels = figure.subplots(len(measures), 2, squeeze=False)
    for row, measure in zip(panels, measures, strict=True):
        for axes, (label, at) in zip(row, across, strict=True):
            axes.set_xlabel(label)
            axes.set_ylabel(measure)
            axes.grid(alpha=0.3)
            for arm in dict.fromkeys(result.arm for result in results):
                runs = [result for result in results if result.arm == arm]
                band = spread([_points(run, at, accuracy=measure.startswith("accuracy")) for run in runs])
                (line,) = axes.plot([x for x, *_ in band], [mean for _, mean, *_ in band], label=_legible(arm))
                lows, highs = [low for *_, low, _ in band], [high for *_, high in band]
                axes.fill_between([x for x, *_ in band], lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
    panels[0][0].legend(fontsize="small")
    save(figure, path)


def _points(run: ArmResult, at: _Axis, *, accuracy: bool) -> list[Point]:
    """(across, up) of one seed; where it diverged there is none."""
    values = [100 * each if each is not None else None for each in run.curve_accuracy] if accuracy else None
    ups = values or [loss for _, _, loss in run.curve]
    return [(at(tokens, ms), up) for (tokens, ms, _), up in zip(run.curve, ups, strict=True) if up is not None]


def spread(curves: Sequence[Sequence[Point]]) -> list[tuple[float, float, float, float]]:
    """(across, mean, lowest, highest) where any curve has a point and all are known: between two points on the line."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    begins, ends = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    places = sorted({x for curve in curves for x, _ in curve if begins <= x <= ends})
    band = []
    for x in places:
        ups = [_between(curve, x) for curve in curves]
        band.append((x, sum(ups) / len(ups), min(ups), max(ups)))
    return band


def _between(curve: Sequence[Point], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def _legible(arm: str) -> str:
    """matplotlib leaves out names that begin with an underscore, and reads mathematics between dollars."""
    return arm.replace("$", r"\$")
