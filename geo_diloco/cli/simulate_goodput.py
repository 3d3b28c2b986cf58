"""`geo-diloco simulate goodput`: what a way to train is worth on chips that fail, and on machines of one's own.

One command with several questions (`--paper`, `--calibrate`, `--scavenge`, `--bandwidth`, `--fleet`, `--from-tape`);
without one of them, a table for the systems and chips that are asked for. What is answered is computed in
`sim/goodput`, how it looks is in `goodput_report.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geo_diloco.cli.options import answer, say
from geo_diloco.errors import ConfigError
from geo_diloco.sim.goodput.model import PLAN_SCALE

if TYPE_CHECKING:
    from geo_diloco.sim.goodput.model import System, World

CHIPS_MAX = 10**9
LEARNERS_MAX = 1024
SEEDS_MAX = 1000
EVENTS_MAX = 2e6
"""Of one lane: arrays step so often. Some minutes."""
QUESTIONS = ("--paper", "--calibrate", "--scavenge", "--bandwidth", "--fleet", "--from-tape")
_CHIPS = ("", "--write-plan", "--paper", "--calibrate")
_ONLY_FOR = {
    **dict.fromkeys(("slice_chips", "downscale_s", "upscale_s", "return_s", "lost_s", "step_spread"), _CHIPS),
    **dict.fromkeys(("quorum", "grace"), _CHIPS),
    **dict.fromkeys(("params", "step_s", "sites", "interval", "codec", "utilisation"), ("--bandwidth",)),
    **dict.fromkeys(("plan_seconds", "plan_scale"), ("--write-plan",)),
    "hold_out": ("--from-tape",),
}
"""Flags that say nothing to other questions."""
_SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "": 1.0}


def goodput(
    context: typer.Context,
    chips: Annotated[str | None, typer.Option(help="How many, several with commas. [default: 150k to 2.4M]")] = None,
    learners: Annotated[str | None, typer.Option(help="M of Decoupled, likewise. [default: 2,4,8,16]")] = None,
    mtbi_days: Annotated[float | None, typer.Option(help="Between interruptions of one chip. [default: 365]")] = None,
    slice_chips: Annotated[int, typer.Option(help="Chips that fail and come back together.")] = 256,
    downscale_s: Annotated[float | None, typer.Option(help="Stop to go on without a slice. [default: fitted]")] = None,
    upscale_s: Annotated[float | None, typer.Option(help="Stop to take a slice back. [default: fitted]")] = None,
    return_s: Annotated[float | None, typer.Option(help="Until a slice is back, on average. [default: fitted]")] = None,
    lost_s: Annotated[float, typer.Option(help="Work done again after a failure.")] = 0.0,
    step_spread: Annotated[float, typer.Option(help="Coefficient of variation of slices' step times.")] = 0.0,
    quorum: Annotated[int, typer.Option(help="K: learners without which no round closes.")] = 1,
    grace: Annotated[bool, typer.Option(help="Wait for more than K where it costs nobody a step.")] = True,
    days: Annotated[float, typer.Option(help="Simulated for each seed.")] = 30.0,
    seeds: Annotated[int, typer.Option(help="So many, from --seed on.")] = 5,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's table beside ours.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Fit the constants on the paper's baselines.")] = False,
    scavenge: Annotated[bool, typer.Option("--scavenge", help="Time to a token budget with extra compute.")] = False,
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Gbit/s for a compute utilisation.")] = False,
    params: Annotated[str | None, typer.Option(help="--bandwidth: model sizes. [default: 1B,5B,10B,100B]")] = None,
    step_s: Annotated[float, typer.Option(help="--bandwidth: seconds of an inner step.")] = 1.0,
    sites: Annotated[int, typer.Option(help="--bandwidth: sites, or learners.")] = 8,
    interval: Annotated[int, typer.Option(help="--bandwidth: H, inner steps between merges of a fragment.")] = 24,
    codec: Annotated[str, typer.Option(help="--bandwidth: none, bf16, int8 or int4.")] = "int4",
    utilisation: Annotated[float, typer.Option(help="--bandwidth: wanted share of time that chips compute.")] = 0.99,
    fleet: Annotated[Path | None, typer.Option(help="What your own machines come to, and volunteers (TOML).")] = None,
    from_tape: Annotated[Path | None, typer.Option(help="The same for those of a run, from a syncer's tape.")] = None,
    hold_out: Annotated[
        float, typer.Option(help="--from-tape: keep that share, its end, from the prediction, and compare with it.")
    ] = 0.0,
    write_plan: Annotated[Path | None, typer.Option(help="Failures as a plan for `simulate train --faults`.")] = None,
    plan_seconds: Annotated[float, typer.Option(help="--write-plan: of the run; then it begins anew.")] = 600.0,
    plan_scale: Annotated[float, typer.Option(help="--write-plan: chips' seconds in one of the run's.")] = PLAN_SCALE,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file (.png, .svg, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What is left of the chips' time under failures, beside the paper's figures; what your own fleet comes to."""
    kinds = (paper, calibrate, scavenge, bandwidth, fleet is not None, from_tape is not None)
    question = _question(dict(zip(QUESTIONS, kinds, strict=True)), with_systems=bool(chips or learners or mtbi_days))
    _check_flags(context, question or ("--write-plan" if write_plan is not None else ""), plot)
    if write_plan is not None and question:
        raise ConfigError(f"--write-plan {write_plan}: not with {question}; leave one of them out")
    times = {"downscale_s": downscale_s, "upscale_s": upscale_s, "return_s": return_s, "lost_s": lost_s}
    world = _world(
        seeds=(seeds, seed),
        times=times,
        days=days,
        mtbi_days=365.0 if mtbi_days is None else mtbi_days,
        slice_chips=slice_chips,
        step_spread=step_spread,
        quorum=quorum,
        grace=grace,
    )
    if write_plan is not None:
        _write_plan(write_plan, _systems(chips, learners, world), world, (plan_scale, plan_seconds), as_json=as_json)
    elif question == "--paper":
        _paper(world, plot, as_json=as_json)
    elif question == "--calibrate":
        _calibrate(world, as_json=as_json)
    elif question == "--scavenge":
        _scavenge(plot, as_json=as_json)
    elif question == "--bandwidth":
        line = {"step_s": step_s, "sites": sites, "interval_steps": interval, "utilisation": utilisation}
        _bandwidth(params or "1B,5B,10B,100B", codec, line, as_json=as_json)
    elif question:
        _fleet(fleet, from_tape, hold_out, world, as_json=as_json)
    else:
        _table(_systems(chips, learners, world), world, plot, as_json=as_json)


def _check_flags(context: typer.Context, question: str, plot: Path | None) -> None:
    """What would be ignored is said. `question`: a flag; empty for the table."""
    if plot is not None:
        _can_plot(plot, question)
    for name, questions in _ONLY_FOR.items():
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE" and question not in questions:
            flag, wanted = f"--{name.replace('_', '-')}", " or ".join(each or "the table" for each in questions)
            where = f"with {question}" if question else "here"
            raise ConfigError(f"{flag} {where} says nothing: it is for {wanted}; leave it out")


def _write_plan(
    path: Path, systems: list[System], world: World, scale_and_seconds: tuple[float, float], *, as_json: bool
) -> None:
    from geo_diloco.cli.goodput_plan import write_plan

    scale, seconds = scale_and_seconds
    _check("--plan-scale", scale, 0.001, 1e6)
    _check("--plan-seconds", seconds, 1, 1e6)
    write_plan(path, systems, world, scale=scale, seconds=seconds, as_json=as_json)


def _question(given: dict[str, bool], *, with_systems: bool) -> str:
    """The one that is asked; empty for the table."""
    asked = [flag for flag, is_given in given.items() if is_given]
    if len(asked) > 1:
        raise ConfigError(f"{asked[0]} together with {asked[1]}: one question at a time; leave one out")
    if asked and with_systems:
        raise ConfigError(f"{asked[0]} with --chips, --learners or --mtbi-days: it has its own; leave them out")
    return asked[0] if asked else ""


def _fleet(file: Path | None, tape: Path | None, hold_out: float, world: World, *, as_json: bool) -> None:
    from geo_diloco.cli.goodput_fleet import report_fleet, report_tape

    _check("--hold-out", hold_out, 0.0, 0.9)
    if file is not None:
        report = report_fleet(file, world)
    else:
        assert tape is not None
        report = report_tape(tape, world, hold_out=hold_out)
    answer(json.dumps(report.to_json()) if as_json else report.text())


def _paper(world: World, plot: Path | None, *, as_json: bool) -> None:
    from geo_diloco.cli.goodput_report import paper_json, paper_text
    from geo_diloco.sim.goodput.paper import goodput_cells

    for system in (row for rows in _published_rows() for row in rows):
        _affordable(system, world)
    cells = goodput_cells(
        world, lambda cell: say(f"{cell.outcome.system.name}, {cell.outcome.system.chips:,}", err=True)
    )
    if plot is not None:
        from geo_diloco.cli.goodput_plot import plot_goodput

        published = {cell.outcome.system: float(cell.published) for cell in cells}
        plot_goodput([cell.outcome for cell in cells], plot, published=published)
    answer(json.dumps(paper_json(cells, world)) if as_json else paper_text(cells, world))


def _published_rows() -> list[list[System]]:
    from geo_diloco.sim.goodput.published import rows

    return [systems for systems, _ in rows()]


def _calibrate(world: World, *, as_json: bool) -> None:
    from geo_diloco.cli.goodput_report import calibration_json, calibration_text
    from geo_diloco.sim.goodput.calibration import fit_scavenging, fit_times

    found = fit_times(world, lambda line: say(line, err=True)), fit_scavenging()
    answer(json.dumps(calibration_json(*found)) if as_json else calibration_text(*found))


def _scavenge(plot: Path | None, *, as_json: bool) -> None:
    from geo_diloco.cli.goodput_report import scavenge_json, scavenge_text
    from geo_diloco.sim.goodput.paper import scavenge_cells
    from geo_diloco.sim.goodput.scavenging import FITTED_SCAVENGING

    cells = scavenge_cells(FITTED_SCAVENGING)
    if plot is not None:
        from geo_diloco.cli.goodput_plot import plot_scavenging

        plot_scavenging(cells, plot)
    answer(json.dumps(scavenge_json(cells)) if as_json else scavenge_text(cells))


def _bandwidth(params: str, codec: str, line: dict[str, float], *, as_json: bool) -> None:
    from geo_diloco.cli.goodput_report import bandwidth_json, bandwidth_text
    from geo_diloco.sim.goodput.bandwidth import BITS, Line
    from geo_diloco.sim.goodput.paper import bandwidth_pairs

    if codec not in BITS:
        raise ConfigError(f"--codec {codec}: no such codec; there are: {', '.join(BITS)}")
    _check("--step-s", line["step_s"], 1e-3, 1e5)
    _check("--sites", line["sites"], 2, 10**6)
    _check("--interval", line["interval_steps"], 1, 10**6)
    _check("--utilisation", line["utilisation"], 0.01, 1.0)
    lines = [
        Line(
            params=size,
            codec=codec,
            step_s=line["step_s"],
            sites=int(line["sites"]),
            interval_steps=int(line["interval_steps"]),
            utilisation=line["utilisation"],
        )
        for size in _amounts("--params", params, 1, 1e15)
    ]
    pairs = bandwidth_pairs(line["utilisation"])
    answer(json.dumps(bandwidth_json(lines, pairs)) if as_json else bandwidth_text(lines, pairs))


def _table(systems: list[System], world: World, plot: Path | None, *, as_json: bool) -> None:
    from geo_diloco.cli.goodput_report import table_json, table_text
    from geo_diloco.sim.goodput.systems import simulate

    for system in systems:
        _affordable(system, world)
    outcomes = [simulate(system, world) for system in systems]
    if plot is not None:
        from geo_diloco.cli.goodput_plot import plot_goodput

        plot_goodput(outcomes, plot)
    answer(json.dumps(table_json(outcomes, world)) if as_json else table_text(outcomes, world))


def _systems(chips: str | None, learners: str | None, world: World) -> list[System]:
    from geo_diloco.sim.goodput.model import System
    from geo_diloco.sim.goodput.published import CHIPS

    numbers = [round(each) for each in _amounts("--chips", chips, 1, CHIPS_MAX)] if chips else list(CHIPS)
    groups = [round(each) for each in _amounts("--learners", learners or "2,4,8,16", 1, LEARNERS_MAX)]
    for m in groups:
        if m < world.quorum:
            raise ConfigError(
                f"--quorum {world.quorum}: more than the {m} learners of --learners; no round would close"
            )
        if m > min(numbers):
            raise ConfigError(f"--learners {m}: more than the {min(numbers)} chips of --chips; a learner needs one")
    systems = [System(kind="data-parallel", chips=n) for n in numbers]
    systems += [System(kind="elastic data-parallel", chips=n) for n in numbers]
    return systems + [System(kind="decoupled", chips=n, learners=m) for m in groups for n in numbers]


def _affordable(system: System, world: World) -> None:
    """Refuse what would run for hours: many failures in a lane, because slices stay away for days."""
    from geo_diloco.sim.goodput.lanes import events_of_a_lane
    from geo_diloco.sim.goodput.model import DAY_S

    events = events_of_a_lane(system.group(world), world.times, seconds=world.days * DAY_S)
    if events > EVENTS_MAX:
        raise ConfigError(
            f"--days {world.days:g}: {events:.1e} failures and returns one after another with {system.chips:,} chips, "
            f"more than {EVENTS_MAX:.0e}; take fewer days, larger slices or a shorter --return-s"
        )


def _world(
    *, seeds: tuple[int, int], times: dict[str, float | None], days: float, mtbi_days: float, slice_chips: int,
    step_spread: float, quorum: int, grace: bool,
) -> World:  # fmt: skip
    from geo_diloco.sim.goodput.model import DAY_S, FITTED, World

    number, first = seeds
    _check("--seeds", number, 1, SEEDS_MAX)
    _check("--seed", first, 0, 2**32)
    _check("--days", days, 0.01, 36_500)
    _check("--mtbi-days", mtbi_days, 1e-3, 1e6)
    _check("--slice-chips", slice_chips, 1, CHIPS_MAX)
    _check("--step-spread", step_spread, 0, 10)
    _check("--quorum", quorum, 1, LEARNERS_MAX)
    given = {name: value for name, value in times.items() if value is not None}
    for name, value in given.items():
        _check(f"--{name.replace('_', '-')}", value, 0, 1e8)
    return World(
        mtbi_s=mtbi_days * DAY_S,
        slice_chips=slice_chips,
        times=replace(FITTED, **given),
        step_spread=step_spread,
        quorum=quorum,
        grace=grace,
        days=days,
        seeds=tuple(range(first, first + number)),
    )


def _amounts(flag: str, text: str, low: float, high: float) -> list[float]:
    """`150k,1.2M`: numbers with k, M or B."""
    found = []
    for part in text.split(","):
        word = part.strip()
        scale = word[-1:] if word[-1:] in ("k", "M", "B") else ""
        try:
            value = float(word.removesuffix(scale) if scale else word) * _SCALES[scale]
        except ValueError as exc:
            raise ConfigError(f"{flag} {text}: {word!r} is no number; wanted some as 150k,1.2M") from exc
        _check(flag, value, low, high)
        found.append(value)
    return found


def _can_plot(path: Path, question: str) -> None:
    """Before anything is computed."""
    from geo_diloco.cli.goodput_plot import check_plot

    if question not in ("", "--paper", "--scavenge"):
        raise ConfigError(f"--plot {path}: there is no picture of {question}; leave one of them out")
    check_plot(path)


def _check(flag: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{flag} {value:g}: wanted a number from {low:g} to {high:g}")
