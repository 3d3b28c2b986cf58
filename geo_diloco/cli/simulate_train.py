"""`geo-diloco simulate train`: its flags, what they become, and what it prints.

With `--json` standard output holds JSON lines and nothing else, the summary last; how far it is goes to standard error.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from geo_diloco.cli.options import answer, say
from geo_diloco.errors import ConfigError

if TYPE_CHECKING:
    from geo_diloco.sim.train.comparing import ArmResult
    from geo_diloco.sim.train.fleet import Fleet
    from geo_diloco.training.presets import ModelName

LEARNERS_MAX = 64
TOKENS_MAX = 10**12
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
            help="Several times: decoupled, diloco or data-parallel, with settings, as decoupled:K=1,kappa=0,"
            "codec_up=int8; links=0.01 makes all links so much thinner. [default: one of each]",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="dense (bytes), moe (a mixture of experts on bytes) or vit (images of digits).")
    ] = "dense",
    learners: Annotated[int, typer.Option(help="How many learners.")] = 4,
    speeds: Annotated[str, typer.Option(help="Relative speeds, one for each learner: 1,0.8,0.5,0.2.")] = "1",
    step_ms: Annotated[int, typer.Option(help="Milliseconds of an inner step at speed 1.")] = 160,
    up: Annotated[str, typer.Option(help="Mbit/s up, for all or one for each learner.")] = "100",
    down: Annotated[str, typer.Option(help="Mbit/s down, for all or one for each learner.")] = "100",
    delay_ms: Annotated[str, typer.Option(help="Delay one way in milliseconds, for all or for each.")] = "20",
    tokens: Annotated[int, typer.Option(help="Tokens each arm trains on, all learners together.")] = 1_000_000,
    seed: Annotated[list[int] | None, typer.Option("--seed", help="Several times. [default: 0]")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="So many seeds, from 0 on.")] = None,
    faults: Annotated[
        Path | None, typer.Option(help="Fault plan (TOML): crashes, freezes and cuts, for decoupled arms.")
    ] = None,
    lockstep: Annotated[bool, typer.Option("--lockstep", help="Decoupled arms in lockstep, with K = all.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of the table, a summary last.")] = False,
) -> None:
    """Really train a small model, in one process under virtual time, by several methods side by side."""
    from geo_diloco.sim.train.arms import DEFAULT_ARMS, arms_from, base_manifest
    from geo_diloco.sim.train.comparing import compare, summarize

    _check("--learners", learners, 1, LEARNERS_MAX)
    _check("--tokens", tokens, 1, TOKENS_MAX)
    chosen = _seeds(seed, seeds)
    fleet = _fleet(learners, speeds=speeds, step_ms=step_ms, links=(up, down, delay_ms), faults=faults)
    if lockstep and fleet.faults:
        raise ConfigError(f"--faults {faults}: not with --lockstep, where all wait for one that is away; leave one out")
    base = base_manifest(num_learners=learners, tokens=tokens, lockstep=lockstep, model=_model(model))
    arms = arms_from(arm or list(DEFAULT_ARMS), base, num_learners=learners)

    def told(result: ArmResult) -> None:
        loss = "not finite" if result.heldout is None else f"{result.heldout:.4f}"
        right = "" if result.accuracy is None else f", {result.accuracy:.1%} right"
        say(f"{result.arm}, seed {result.seed}: held-out loss {loss}{right}, {result.wall_s:.0f} s", err=True)
        if as_json:
            answer(json.dumps(result.to_json()))

    results = compare(arms, fleet, chosen, told)
    if as_json:
        facts = {
            "model": model,
            "learners": learners,
            "tokens": base.stop.tokens,
            "seeds": chosen,
            "lockstep": lockstep,
        }
        answer(json.dumps(summarize(arms, results, facts)))
        return
    from geo_diloco.cli.simulate_table import table

    answer(table(results))


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


def _fleet(num_learners: int, *, speeds: str, step_ms: int, links: tuple[str, str, str], faults: Path | None) -> Fleet:
    from geo_diloco.config import load_fault_plan
    from geo_diloco.sim.train.fleet import Fleet, Machine

    _check("--step-ms", step_ms, 1, STEP_MS_MAX)
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
    plan = () if faults is None else load_fault_plan(faults, num_learners=num_learners)
    return Fleet(machines=machines, faults=plan)


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
