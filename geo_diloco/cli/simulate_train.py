"""`geo-diloco simulate train`: its flags, what they become, and what it prints.

With `--json` standard output holds JSON lines and nothing else, the summary last; how far it is goes to standard error.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from geo_diloco import __version__
from geo_diloco.cli.options import answer, say
from geo_diloco.errors import ConfigError

if TYPE_CHECKING:
    from geo_diloco.sim.train.arms import Arm
    from geo_diloco.sim.train.fleet import Fleet
    from geo_diloco.sim.train.results import ArmResult
    from geo_diloco.training.presets import ModelName

LEARNERS_MAX = 64
TOKENS = 1_000_000
"""Unless it is said."""
TOKENS_MAX = 10**12
SECONDS_MAX = 1e7
STEP_MS_MAX = 3_600_000
DELAY_MS_MAX = 60_000
MBIT_MAX = 1e6
SPEED_MIN = 0.001
SEEDS_MAX = 1000
SEED_MAX = (1 << 63) - 1


def train(
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="KIND[:KEY=VALUE,...]",
            help="Several times: decoupled, diloco, data-parallel or elastic-data-parallel, with settings, as "
            "decoupled:K=1,kappa=0,codec_up=int8; links=0.01 thins its links, faults=off leaves the fault "
            "plan out. [default: the first three]",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="dense (bytes), dense-1M (the same with a million parameters), moe (a mixture of experts on bytes) or "
            "vit (images of digits)."
        ),
    ] = "dense",
    learners: Annotated[int, typer.Option(help="How many learners.")] = 4,
    add_at: Annotated[
        list[str] | None,
        typer.Option("--add-at", metavar="TOKENS:N", help="N more when so many tokens are trained; several times."),
    ] = None,
    speeds: Annotated[str, typer.Option(help="Relative speeds, one for each learner: 1,0.8,0.5,0.2.")] = "1",
    step_ms: Annotated[int, typer.Option(help="Milliseconds of an inner step at speed 1.")] = 160,
    up: Annotated[str, typer.Option(help="Mbit/s up, for all or one for each learner.")] = "100",
    down: Annotated[str, typer.Option(help="Mbit/s down, for all or one for each learner.")] = "100",
    delay_ms: Annotated[str, typer.Option(help="Delay one way in milliseconds, for all or for each.")] = "20",
    tokens: Annotated[
        int | None, typer.Option(help="Tokens each arm trains on, all learners together. [default: 1000000]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Virtual seconds that each arm trains for, instead of --tokens.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option("--seed", help="Several times. [default: 0]")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="So many seeds, from 0 on.")] = None,
    faults: Annotated[
        Path | None,
        typer.Option(help="Fault plan (TOML): crashes, freezes, cuts; or one of `simulate goodput --write-plan`."),
    ] = None,
    lockstep: Annotated[bool, typer.Option("--lockstep", help="Decoupled arms in lockstep, with K = all.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results: the same command again takes them over, and goes on.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw curves into this file (.png, .svg, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of the table, a summary last.")] = False,
) -> None:
    """Really train a small model, in one process under virtual time, by several methods side by side."""
    from geo_diloco.sim.train.arms import DEFAULT_ARMS, arms_from, base_manifest
    from geo_diloco.sim.train.results import summarize

    _check("--learners", learners, 1, LEARNERS_MAX)
    budget = _budget(tokens, seconds)
    chosen = _seeds(seed, seeds)
    joins = _joins(add_at or [], learners, tokens_max=budget if seconds is None else TOKENS_MAX)
    fleet = _fleet(learners, joins, speeds=speeds, step_ms=step_ms, links=(up, down, delay_ms), faults=faults)
    _check_lockstep(lockstep, faults=faults, add_at=add_at, seconds=seconds)
    base = base_manifest(
        num_learners=fleet.num_learners, tokens=budget, lockstep=lockstep, model=_model(model), seconds=seconds
    )
    arms = arms_from(arm or list(DEFAULT_ARMS), base, num_learners=learners)
    results = _compared(arms, fleet, chosen, files=(out, plot), as_json=as_json)
    if as_json:
        facts = {"model": model, "learners": learners, "joins": joins, "tokens": base.stop.tokens, "seconds": seconds}
        answer(json.dumps(summarize(arms, results, facts | {"seeds": chosen, "lockstep": lockstep})))
        return
    from geo_diloco.cli.simulate_table import table

    answer(table(results))


def _compared(
    arms: tuple[Arm, ...], fleet: Fleet, seeds: list[int], *, files: tuple[Path | None, Path | None], as_json: bool
) -> list[ArmResult]:
    """All results; `files` are the folder that keeps them and the picture."""
    from geo_diloco.cli.goodput_plot import check_plot
    from geo_diloco.cli.simulate_plot import plot_training
    from geo_diloco.cli.simulate_progress import Teller
    from geo_diloco.sim.train.comparing import compare
    from geo_diloco.sim.train.keeping import Kept

    out, plot = files
    if plot is not None:
        check_plot(plot)
    kept = None if out is None else Kept(out, lambda line: say(line, err=True), version=__version__)
    with Teller(len(arms) * len(seeds), as_json=as_json) as teller:
        results = compare(arms, fleet, seeds, teller, kept=kept)
    if plot is not None:
        plot_training(results, plot)
    return results


def _budget(tokens: int | None, seconds: float | None) -> int:
    """Of tokens; without meaning where there are seconds."""
    if seconds is not None:
        if tokens is not None:
            raise ConfigError(f"--seconds {seconds:g}: together with --tokens; give one of them")
        _check("--seconds", seconds, 1, SECONDS_MAX)
    if tokens is None:
        return TOKENS
    _check("--tokens", tokens, 1, TOKENS_MAX)
    return tokens


def _joins(given: list[str], num_learners: int, *, tokens_max: int) -> tuple[int, ...]:
    """For each learner that comes later, after how many tokens."""
    joins: list[int] = []
    for text in given:
        when, _, number = text.partition(":")
        scale = {"k": 1_000, "M": 1_000_000}.get(when[-1:], 1)
        digits = when if scale == 1 else when[:-1]
        if not (digits.isascii() and digits.isdigit() and number.isascii() and number.isdigit()):
            raise ConfigError(f"--add-at {text}: wanted TOKENS:N, as 500000:2 or 500k:2")
        tokens, coming = _count(digits) * scale, _count(number)
        if not 1 <= tokens < tokens_max:
            raise ConfigError(
                f"--add-at {text}: {tokens} tokens; allowed is a number from 1, below the {tokens_max} in all"
            )
        if not 1 <= coming <= LEARNERS_MAX - num_learners - len(joins):
            raise ConfigError(f"--add-at {text}: wanted 1 or more learners, {LEARNERS_MAX} at most in all")
        joins += [tokens] * coming
    return tuple(sorted(joins))


def _count(digits: str) -> int:
    """More than anybody means, where it has more digits than that."""
    significant = digits.lstrip("0")
    return int(significant or "0") if len(significant) <= 15 else 10**15


def _check_lockstep(lockstep: bool, *, faults: Path | None, add_at: list[str] | None, seconds: float | None) -> None:
    if not lockstep:
        return
    if faults is not None:
        raise ConfigError(f"--faults {faults}: not with --lockstep, where all wait for one that is away; leave one out")
    if add_at or seconds is not None:
        flag = f"--add-at {add_at[0]}" if add_at else f"--seconds {seconds:g}"
        raise ConfigError(f"{flag}: not with --lockstep, where all take the same number of steps; leave one out")


def _model(given: str) -> ModelName:
    from geo_diloco.training.presets import ModelName

    known: dict[str, ModelName] = {name: name for name in get_args(ModelName)}
    if given not in known:
        raise ConfigError(f"--model {given}: no such model; there are: {', '.join(known)}")
    return known[given]


def _seeds(given: list[int] | None, number: int | None) -> list[int]:
    if number is not None:
        if given:
            raise ConfigError(f"--seeds {number}: together with --seed; give one of them")
        _check("--seeds", number, 1, SEEDS_MAX)
        return list(range(number))
    for seed in given or []:
        _check("--seed", seed, 0, SEED_MAX)
    return list(dict.fromkeys(given or [0]))


def _fleet(
    num_founders: int, joins: tuple[int, ...], *, speeds: str, step_ms: int, links: tuple[str, str, str],
    faults: Path | None,
) -> Fleet:  # fmt: skip
    from geo_diloco.config import load_fault_plan
    from geo_diloco.sim.train.fleet import NO_FAULTS, Fleet, Machine

    _check("--step-ms", step_ms, 1, STEP_MS_MAX)
    num_learners = num_founders + len(joins)
    up, down, delay = links
    columns = zip(
        _numbers("--speeds", speeds, num_learners, SPEED_MIN, 1000.0),
        _numbers("--up", up, num_learners, 0.001, MBIT_MAX),
        _numbers("--down", down, num_learners, 0.001, MBIT_MAX),
        _numbers("--delay-ms", delay, num_learners, 0, DELAY_MS_MAX),
        strict=True,
    )
    machines = tuple(
        Machine(step_ms=max(1, round(step_ms / speed)), up_mbit=up, down_mbit=down, delay_ms=round(delay_ms))
        for speed, up, down, delay_ms in columns
    )
    plan = NO_FAULTS if faults is None else load_fault_plan(faults, num_learners=num_learners)
    return Fleet(machines=machines, joins=joins, plan=plan)


def _numbers(flag: str, text: str, num_learners: int, low: float, high: float) -> list[float]:
    """One number for each learner; a single one is for all."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(
            f"{flag} {text}: not numbers; wanted one, or {num_learners} with commas between them"
        ) from exc
    if len(values) not in (1, num_learners):
        raise ConfigError(
            f"{flag} {text}: {len(values)} numbers; wanted one, or one for each of {num_learners} learners"
        )
    for value in values:
        _check(flag, value, low, high)
    return values * num_learners if len(values) == 1 else values


def _check(flag: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{flag} {value:g}: wanted a number from {low:g} to {high:g}")
