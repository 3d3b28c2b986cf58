"""What `simulate goodput` prints: tables for people, objects for programs. Percent; the model has shares of 1."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from geo_diloco import __version__
from geo_diloco.sim.goodput.bandwidth import Line, Needs, needs
from geo_diloco.sim.goodput.paper import differences, mean_difference
from geo_diloco.sim.goodput.published import SOURCE

if TYPE_CHECKING:
    from geo_diloco.sim.goodput.calibration import Fit
    from geo_diloco.sim.goodput.model import Outcome, World
    from geo_diloco.sim.goodput.paper import Cell, ScavengeCell
    from geo_diloco.sim.goodput.published import Bandwidth

WIDTH = 240


def drawn(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, never broken; the first column to the left."""
    grid = Table(show_edge=False, pad_edge=False)
    for i, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    written = io.StringIO()
    Console(file=written, width=WIDTH, highlight=False, markup=False).print(grid)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def paper_text(cells: Sequence[Cell], world: World) -> str:
    """Ours, published and the difference; uptime and the spread of seeds below."""
    return "\n".join(
        [
            f"goodput in percent: ours / published ({SOURCE}) / difference",
            _by_chips(cells, lambda cell: f"{cell.goodput:.1f} / {cell.published} / {cell.difference:+.1f}"),
            "",
            "uptime in percent: at least one learner trains",
            _by_chips(cells, lambda cell: f"{100 * cell.outcome.uptime:.2f}"),
            "",
            f"decoupled, predicted: mean difference {mean_difference(list(cells)):.2f} points, "
            f"largest {max(differences(list(cells), decoupled=True)):.2f}",
            f"baselines, which the constants were fitted on: {mean_difference(list(cells), decoupled=False):.2f}, "
            f"{max(differences(list(cells), decoupled=False)):.2f}",
            f"largest spread over {len(world.seeds)} seeds of {world.days:g} days: "
            f"{100 * max(cell.outcome.spread for cell in cells):.2f} points",
            _times_text(world),
        ]
    )


def _times_text(world: World) -> str:
    times = world.times
    return (
        f"downscale {times.downscale_s:g} s, upscale {times.upscale_s:g} s, return {times.return_s:g} s "
        f"(`--calibrate` redoes the fit), slices of {world.slice_chips} chips"
    )


def _by_chips(cells: Sequence[Cell], said: Any) -> str:
    chips = list(dict.fromkeys(cell.outcome.system.chips for cell in cells))
    names = list(dict.fromkeys(cell.outcome.system.name for cell in cells))
    rows = [[name, *(said(cell) for cell in cells if cell.outcome.system.name == name)] for name in names]
    return drawn(["system", *(short(number) for number in chips)], rows)


def paper_json(cells: Sequence[Cell], world: World) -> dict[str, Any]:
    return {
        "cells": [
            outcome_json(cell.outcome) | {"published": cell.published, "difference": round(cell.difference, 3)}
            for cell in cells
        ],
        "mean_abs_diff_decoupled": round(mean_difference(list(cells)), 3),
        "max_abs_diff_decoupled": round(max(differences(list(cells), decoupled=True)), 3),
        "mean_abs_diff_baselines": round(mean_difference(list(cells), decoupled=False), 3),
        "source": SOURCE,
        **world_json(world),
    }


def table_text(outcomes: Sequence[Outcome], world: World) -> str:
    rows = [
        [
            each.system.name,
            short(each.system.chips),
            f"{100 * each.goodput:.1f}",
            f"{100 * each.uptime:.2f}",
            f"{100 * each.spread:.2f}",
            f"{each.interruptions_per_hour:.1f}",
            *([f"{each.participants:.2f}", f"{100 * each.in_time:.1f}"] if each.system.kind == "decoupled" else "--"),
        ]
        for each in outcomes
    ]
    headings = ["system", "chips", "goodput %", "uptime %", "seeds +-", "failures/h", "participants", "in time %"]
    return "\n".join([drawn(headings, rows), _times_text(world)])


def table_json(outcomes: Sequence[Outcome], world: World) -> dict[str, Any]:
    return {"cells": [outcome_json(each) for each in outcomes], **world_json(world)}


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Percent, but for counts."""
    return {
        "system": outcome.system.name,
        "chips": outcome.system.chips,
        "learners": outcome.system.learners,
        "goodput": round(100 * outcome.goodput, 3),
        "uptime": round(100 * outcome.uptime, 4),
        "spread": round(100 * outcome.spread, 3),
        "goodput_by_seed": [round(100 * each, 3) for each in outcome.goodput_by_seed],
        "interruptions_per_hour": round(outcome.interruptions_per_hour, 3),
        "participants": round(outcome.participants, 3),
        "in_time": round(100 * outcome.in_time, 3),
    }


def world_json(world: World) -> dict[str, Any]:
    return {"world": asdict(world) | {"seeds": list(world.seeds)}, "version": __version__}


def calibration_text(times: Fit, scavenging: Fit) -> str:
    from geo_diloco.sim.goodput.model import RESHAPE_S, RETURN_S
    from geo_diloco.sim.goodput.scavenging import FITTED_SCAVENGING as SHIPPED

    rows = [
        ["reshape time, down and up (s)", f"{times.first:g}", f"{RESHAPE_S:g}"],
        ["return time (s)", f"{times.second:g}", f"{RETURN_S:g}"],
        ["scavenging: share of the tokens", f"{scavenging.first:g}", f"{SHIPPED.tokens_share:g}"],
        ["scavenging: wait for one group (steps)", f"{scavenging.second:g}", f"{SHIPPED.wait_steps:g}"],
    ]
    return "\n".join(
        [
            drawn(["constant", "fitted", "shipped"], rows),
            f"goodput of the two baselines: root mean square difference {times.rms:.2f} points; ours minus published "
            + ", ".join(f"{each:+.1f}" for each in times.residuals),
            f"scavenging, data-parallel: {scavenging.rms:.3f}; "
            + ", ".join(f"{each:+.3f}" for each in scavenging.residuals),
            f"fitted on data-parallel and elastic data-parallel of {SOURCE} only",
        ]
    )


def calibration_json(times: Fit, scavenging: Fit) -> dict[str, Any]:
    return {
        "reshape_s": times.first,
        "return_s": times.second,
        "residuals": [round(each, 3) for each in times.residuals],
        "rms": round(times.rms, 3),
        "scavenging": {
            "tokens_share": scavenging.first,
            "wait_steps": scavenging.second,
            "residuals": [round(each, 4) for each in scavenging.residuals],
        },
        "version": __version__,
    }


def scavenge_text(cells: Sequence[ScavengeCell]) -> str:
    extras = list(dict.fromkeys(cell.extra for cell in cells))
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        row = [cell for cell in cells if cell.method == method]
        rows.append([method, *(f"{cell.time:.2f} / {cell.published:.2f} / {cell.difference:+.2f}" for cell in row)])
    return "\n".join(
        [
            f"time to the token budget: ours / published ({SOURCE}) / difference",
            drawn(["method", *(f"+{extra:.0%}" for extra in extras)], rows),
            "fitted on the data-parallel row; the decoupled row is predicted",
        ]
    )


def scavenge_json(cells: Sequence[ScavengeCell]) -> dict[str, Any]:
    return {
        "cells": [
            {
                "system": cell.method,
                "extra": cell.extra,
                "time": round(cell.time, 4),
                "published": cell.published,
                "difference": round(cell.difference, 4),
            }
            for cell in cells
        ],
        "max_abs_diff_decoupled": round(max(abs(c.difference) for c in cells if c.method == "decoupled"), 4),
        "source": SOURCE,
        "version": __version__,
    }


def bandwidth_text(lines: Sequence[Line], pairs: Sequence[tuple[Bandwidth, Needs]]) -> str:
    first = lines[0]
    rows = [[short(line.params), *_needs_row(needs(line))] for line in lines]
    beside = [
        [
            pair.told,
            f"{short(pair.params)}, {pair.codec}",
            _beside(ours.data_parallel, pair.data_parallel_gbit),
            _beside(ours.decoupled, pair.decoupled_gbit),
        ]
        for pair, ours in pairs
    ]
    return "\n".join(
        [
            f"Gbit/s each way at a site: {first.sites} sites, {first.step_s:g} s a step, H = {first.interval_steps}, "
            f"{first.codec}, utilisation {first.utilisation:.0%}",
            drawn(["parameters", "data-parallel", "decoupled", "ratio", "syncer, all learners"], rows),
            "",
            f"ours / published ({SOURCE}) / difference; model and codec are our reading, not told with the figures",
            drawn(["published for", "read as", "data-parallel", "decoupled"], beside),
        ]
    )


def _needs_row(need: Needs) -> list[str]:
    return [f"{need.data_parallel:.3g}", f"{need.decoupled:.3g}", f"{need.ratio:.0f}", f"{need.syncer:.3g}"]


def _beside(ours: float, published: float) -> str:
    return f"{ours:.3g} / {published:g} / {ours / published - 1:+.0%}"


def bandwidth_json(lines: Sequence[Line], pairs: Sequence[tuple[Bandwidth, Needs]]) -> dict[str, Any]:
    return {
        "lines": [asdict(line) | asdict(needs(line)) for line in lines],
        "published": [
            asdict(pair)
            | {
                "ours_data_parallel_gbit": round(ours.data_parallel, 4),
                "ours_decoupled_gbit": round(ours.decoupled, 4),
                "difference_data_parallel": round(ours.data_parallel / pair.data_parallel_gbit - 1, 4),
                "difference_decoupled": round(ours.decoupled / pair.decoupled_gbit - 1, 4),
            }
            for pair, ours in pairs
        ],
        "source": SOURCE,
        "version": __version__,
    }


def short(number: float) -> str:
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:g}{letter}"
    return f"{number:g}"
