"""`geo-diloco simulate protocol`: the production core under seeded clocks, links, crashes and cuts.

Checkers watch from outside. A failure says everything that is needed to see it again: seed, version, the plan, and the
film's last lines.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pprint import pformat
from typing import Annotated, Any

import typer

from geo_diloco import __version__
from geo_diloco.cli.options import answer, say
from geo_diloco.errors import ConfigError, SimulationError

SEEDS_MAX = 1_000_000
HOSTS_MIN, HOSTS_MAX = 2, 64


def protocol(
    scenario: Annotated[
        str | None, typer.Option(help="A named scenario; `list` shows them all. [default: drawn from the seed]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS_MAX, help="How many seeds, one run each.")] = 1,
    seconds: Annotated[float, typer.Option(min=10.0, max=86_400.0, help="Simulated seconds of training.")] = 60.0,
    hosts: Annotated[str, typer.Option(help="How many peers, from-to.")] = "5-9",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes to run seeds in.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Run the protocol's production core in a simulated world; stop at the first broken invariant."""
    if scenario == "list":
        _list_scenarios()
        return
    order = _Order(scenario=_known(scenario), seconds=seconds, hosts=_bounds(hosts))
    began = time.perf_counter()
    total = _Total()
    for result in _results(order, range(seed, seed + seeds), jobs):
        if result.violation:
            _report(order, result, as_json=as_json)
            raise SimulationError(f"seed {result.seed} of version {__version__}: {result.violation.splitlines()[0]}")
        total.add(result)
        if not as_json and seeds > 1:
            say(
                f"seed {result.seed}: {result.commits} commits, {result.elections} terms, "
                f"{result.simulated_s:.0f} simulated seconds in {result.wall_s:.1f}"
            )
    _summary(total, first=seed, num_seeds=seeds, wall_s=time.perf_counter() - began, as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What each run is made from, besides its seed."""

    scenario: str | None
    seconds: float
    hosts: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Result:
    seed: int
    commits: int = 0
    elections: int = 0
    events: int = 0
    gap_s: float = 0.0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    digest: str = ""
    violation: str = ""
    film: str = ""


class _Total:
    """What all runs together came to."""

    def __init__(self) -> None:
        self.results: list[_Result] = []
        self._digest = hashlib.sha256()

    def add(self, result: _Result) -> None:
        self.results.append(result)
        self._digest.update(result.digest.encode())

    @property
    def digest(self) -> str:
        """Of every effect of every run, in order."""
        return self.results[0].digest if len(self.results) == 1 else self._digest.hexdigest()


def _results(order: _Order, seeds: range, jobs: int) -> Iterator[_Result]:
    """In the order of the seeds."""
    if jobs == 1:
        yield from (_run(order, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(_run, order, seed) for seed in seeds]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _run(order: _Order, seed: int) -> _Result:
    from geo_diloco.sim.drawn import drawn_plan
    from geo_diloco.sim.run import Outcome, Run, Violation
    from geo_diloco.sim.scenarios import play, scenarios

    began = time.perf_counter()

    def go() -> Outcome:
        if order.scenario is not None:
            return play(scenarios()[order.scenario], seed=seed)
        return Run(drawn_plan(seed, seconds=order.seconds, num_hosts=order.hosts)).go()

    try:
        outcome = go()
    except Violation as violation:
        return _Result(seed=seed, violation=violation.what, film=str(violation))
    return _Result(
        seed=seed,
        commits=outcome.num_commits,
        elections=outcome.num_elections,
        events=outcome.num_events,
        gap_s=outcome.gap_ms / 1000,
        simulated_s=outcome.simulated_ms / 1000,
        wall_s=time.perf_counter() - began,
        digest=outcome.effects_digest,
    )


def _report(order: _Order, result: _Result, *, as_json: bool) -> None:
    """Everything that is needed to see a failure again."""
    from geo_diloco.sim.drawn import drawn_plan
    from geo_diloco.sim.scenarios import scenarios

    plan: Any = None if order.scenario is None else scenarios()[order.scenario].plan
    plan = plan or drawn_plan(result.seed, seconds=order.seconds, num_hosts=order.hosts)
    say(pformat(asdict(plan), width=120, sort_dicts=False), err=as_json)
    say(result.film, err=as_json)
    if as_json:
        answer(json.dumps({"seed": result.seed, "violations": 1, "version": __version__}))


def _summary(total: _Total, *, first: int, num_seeds: int, wall_s: float, as_json: bool) -> None:
    results = total.results
    simulated_s = sum(result.simulated_s for result in results)
    figures = {
        "seed": first,
        "seeds": num_seeds,
        "violations": 0,
        "commits": sum(result.commits for result in results),
        "elections": sum(result.elections for result in results),
        "events": sum(result.events for result in results),
        "gap_s_max": max(result.gap_s for result in results),
        "simulated_s": round(simulated_s, 3),
        "wall_s": round(wall_s, 3),
        "times_real_time": round(simulated_s / wall_s, 1),
        "tape_digest": total.digest,
        "version": __version__,
    }
    if as_json:
        answer(json.dumps(figures))
        return
    width = max(map(len, figures))
    lines = [f"{name:>{width}}  {value}" for name, value in figures.items()]
    answer("\n".join([*lines, _verdict(num_seeds)]))


def _verdict(num_runs: int) -> str:
    """In a sentence, for who reads a violation for the first time."""
    runs = "the run" if num_runs == 1 else f"any of the {num_runs} runs"
    return (
        f"No invariant was broken in {runs}. simulated_s counts more than the training: after the faults everything is "
        "mended, and the run has to get on and to its end."
    )


def _list_scenarios() -> None:
    from geo_diloco.sim.scenarios import scenarios

    for name, scenario in scenarios().items():
        where = f" (a test: {scenario.test})" if scenario.test else ""
        answer(f"{name:28} {scenario.row}{where}")


def _known(name: str | None) -> str | None:
    from geo_diloco.sim.scenarios import scenarios

    if name is None:
        return None
    if name in scenarios() and scenarios()[name].plan is None:
        raise ConfigError(f"--scenario {name}: is no simulation but a test of real processes: {scenarios()[name].test}")
    playable = [each.name for each in scenarios().values() if each.plan is not None]
    if name not in playable:
        raise ConfigError(f"--scenario {name}: no such scenario; there are: {', '.join(playable)}")
    return name


def _bounds(text: str) -> tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        bounds = int(least), int(most if dash else least)
    except ValueError:
        bounds = 0, 0
    if not HOSTS_MIN <= bounds[0] <= bounds[1] <= HOSTS_MAX:
        raise ConfigError(f"--hosts {text}: wanted two numbers from {HOSTS_MIN} to {HOSTS_MAX}, as 5-9")
    return bounds
