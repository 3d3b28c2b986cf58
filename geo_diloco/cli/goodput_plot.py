"""Pictures of `simulate goodput`, as the paper draws them; matplotlib is an extra (`plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geo_diloco.errors import ConfigError

if TYPE_CHECKING:
    from geo_diloco.sim.goodput.model import Outcome, System
    from geo_diloco.sim.goodput.paper import ScavengeCell

SUFFIXES = (".png", ".svg", ".pdf")
SIZE_INCHES = (7.0, 4.5)
DPI = 150


def check_plot(path: Path) -> None:
    """Raises ConfigError if nothing could be drawn into that file."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {path}: matplotlib is not installed; install it with: pip install 'geo-diloco[plot]'"
        )
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: wanted a name that ends in {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: no folder {path.resolve().parent}; make it first")


def plot_goodput(outcomes: Sequence[Outcome], path: Path, *, published: Mapping[System, float] | None = None) -> None:
    """Goodput over chips, a line for each system; published figures as crosses of the same colour."""
    figure, axes = _axes("chips", "goodput (%)")
    for name in dict.fromkeys(each.system.name for each in outcomes):
        row = [each for each in outcomes if each.system.name == name]
        chips = [each.system.chips for each in row]
        (line,) = axes.plot(chips, [100 * each.goodput for each in row], marker="o", markersize=3, label=name)
        crosses = [(published or {}).get(each.system) for each in row]
        if any(cross is not None for cross in crosses):
            axes.plot(chips, crosses, linestyle="none", marker="x", color=line.get_color())
    axes.set_xscale("log", base=2)
    ticks = sorted({each.system.chips for each in outcomes})
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.set_ylim(0, 100)
    axes.legend(fontsize="small", title="x: published" if published else None)
    save(figure, path)


def plot_scavenging(cells: Sequence[ScavengeCell], path: Path) -> None:
    """Time to the budget over extra compute, ours as bars beside published crosses."""
    figure, axes = _axes("opportunistic compute", "time to the token budget")
    methods = list(dict.fromkeys(cell.method for cell in cells))
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        row = [cell for cell in cells if cell.method == method]
        at = [place + (i - (len(methods) - 1) / 2) * width for place in range(len(row))]
        axes.bar(at, [cell.time for cell in row], width=width, label=method)
        axes.plot(at, [cell.published for cell in row], linestyle="none", marker="x", color="black")
        axes.set_xticks(range(len(row)), [f"+{cell.extra:.0%}" for cell in row])
    axes.legend(title="x: published")
    save(figure, path)


def _axes(across: str, up: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")  # no pyplot: no window, no global state
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes


def _short(number: int) -> str:
    return f"{number / 1e6:g}M" if number >= 1e6 else f"{number / 1e3:g}k" if number >= 1e3 else str(number)


def save(figure: Any, path: Path) -> None:
    """Raises ConfigError."""
    try:
        figure.savefig(path)
    except OSError as exc:
        raise ConfigError(f"--plot {path}: {exc.strerror or exc}; choose another file") from exc
