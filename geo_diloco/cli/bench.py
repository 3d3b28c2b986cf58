"""`geo-diloco bench`: figures measured on this machine, each a ratio of two things measured in the same run.

A benchmark prints a table, and with `--json` one object on the last line. None of them judges: the figures wanted are
in the README, beside those that were reached.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from geo_diloco.errors import ConfigError

LEARNERS_MAX = 10_000

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Measure this machine.")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, on the last line.")]


@app.command()
def overhead(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of windows, with and without the run.")] = 7,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of a window.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Inner steps per second of one learner in a run at the demo's size, against the same loop alone."""
    from geo_diloco.cli.bench_overhead import measure_overhead

    _print(measure_overhead(num_pairs=pairs, seconds=seconds, say=typer.echo), as_json=as_json)


@app.command(name="overhead-window", hidden=True)
def overhead_window(seconds: float, invite: str = "", run_dir: Path | None = None) -> None:
    """One window of `overhead`, in a process of its own."""
    from geo_diloco.cli.bench_overhead import measure_window

    typer.echo(json.dumps(measure_window(seconds=seconds, invite=invite, run_dir=run_dir)))


@app.command()
def kill(
    runs: Annotated[int, typer.Option(min=1, help="How many runs; the median is reported.")] = 5,
    learners: Annotated[int, typer.Option(min=2, help="Learners in each run.")] = 4,
    before: Annotated[float, typer.Option(min=5.0, help="Seconds of training before the kill.")] = 30.0,
    after: Annotated[float, typer.Option(min=5.0, help="Seconds watched after it.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Longest gap between commits after SIGKILL of a learner, against the 95th percentile before it."""
    from geo_diloco.cli.bench_kill import measure_kill

    result = measure_kill(num_runs=runs, num_learners=learners, before_s=before, after_s=after, say=typer.echo)
    _print(result, as_json=as_json)


@app.command()
def failover(
    kills: Annotated[int, typer.Option(min=0, help="How often the syncer is killed.")] = 20,
    handovers: Annotated[int, typer.Option(min=0, help="How often it is told to hand over.")] = 5,
    keep: Annotated[Path | None, typer.Option(help="New folder for the run's files, which are kept then.")] = None,
    as_json: AsJson = False,
) -> None:
    """From SIGKILL of the syncer to the next durable commit, and what learners notice. Takes 40 s a kill."""
    from geo_diloco.cli.bench_failover import measure_failover

    result = measure_failover(num_kills=kills, num_handovers=handovers, keep=keep, say=typer.echo)
    _print(result, as_json=as_json)


@app.command(name="failover-learner", hidden=True)
def failover_learner(
    invite: str,
    run_dir: Annotated[Path, typer.Option()],
    record: Annotated[Path, typer.Option()],
) -> None:
    """A learner of `failover`, in a process of its own."""
    from geo_diloco.cli.bench_steps import train_measured

    train_measured(invite=invite, run_dir=run_dir, record=record)


@app.command()
def quality(
    minutes: Annotated[float, typer.Option(min=0.2, help="Length of the run.")] = 2.0,
    learners: Annotated[int, typer.Option(min=1, help="Learners.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Held-out loss of a demo run against synchronous DiLoCo, and each learner alone, at equal tokens."""
    from geo_diloco.cli.bench_quality import measure_quality

    _print(measure_quality(minutes=minutes, num_learners=learners, say=typer.echo), as_json=as_json)


@app.command()
def transfer(
    relay: Annotated[
        str, typer.Option(help="The link that a relay on this machine makes: RATE,RTT.", metavar="RATE,RTT")
    ] = "100mbit,100ms",
    to: Annotated[str, typer.Option(help="Instead: HOST:PORT of a peer, whose snapshot is fetched.")] = "",
    cap: Annotated[str, typer.Option(help="Hold the sender's bulk below that, as --max-up does.", metavar="RATE")] = "",
    size_mb: Annotated[int, typer.Option(min=1, max=10_000, help="Size of the blob, in million bytes.")] = 100,
    cuts: Annotated[int, typer.Option(min=0, max=100, help="How often the link is cut in the second transfer.")] = 3,
    congestion: Annotated[
        list[str] | None,
        typer.Option(help="auto, bbr, cubic or system; may be given several times. [default: bbr and cubic]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How full a blob keeps a link, what cuts cost, and how long control messages take meanwhile."""
    from geo_diloco.cli.bench_transfer import Link, measure_peer, measure_relayed

    controls = congestion or ["bbr", "cubic"]
    if to:
        result = measure_peer(to, congestion=controls[0], say=typer.echo)
    else:
        link = Link.parse(relay, cap=cap)
        result = measure_relayed(link, size=size_mb * 10**6, cuts=cuts, congestion=controls, say=typer.echo)
    _print(result, as_json=as_json)


@app.command()
def star(
    learners: Annotated[int, typer.Option(min=1, max=64, help="Learners, each behind a link of its own.")] = 4,
    parameters: Annotated[str, typer.Option(help="Of the model, such as 30.8M.")] = "30.8M",
    rate: Annotated[str, typer.Option(help="Of a learner's link, each way.", metavar="RATE")] = "50mbit",
    rtt: Annotated[str, typer.Option(help="Round trip between learner and syncer.", metavar="RTT")] = "80ms",
    pace: Annotated[int, typer.Option(min=1, max=60_000, help="Milliseconds that an inner step lasts.")] = 30,
    quorum: Annotated[int, typer.Option(min=1, help="K of the run.")] = 1,
    fragments: Annotated[int, typer.Option(min=1, help="P of the run.")] = 8,
    interval: Annotated[
        int, typer.Option(min=0, help="H of the run; 0: what the links need for all fragments, with some room.")
    ] = 0,
    slow_one: Annotated[
        float, typer.Option(min=1.0, max=1000.0, help="The last learner's link is so many times slower.")
    ] = 1.0,
    mirrors: Annotated[int, typer.Option(min=0, max=8, help="Standbys without a thin link, which serve updates.")] = 0,
    choices: Annotated[bool, typer.Option("--choices", help="Let learners choose among int8 and int4.")] = False,
    congestion: Annotated[str, typer.Option(help="auto, bbr, cubic or system.")] = "auto",
    warm_up: Annotated[float, typer.Option(min=0.0, help="Seconds that all are at work before it counts.")] = 30.0,
    seconds: Annotated[float, typer.Option(min=5.0, help="Seconds that count.")] = 180.0,
    keep: Annotated[Path | None, typer.Option(help="New folder for the runs' files, which are kept then.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a run does over thin links: who takes part, how often fragments are merged, what is lost by it. Real
    processes, with compute simulated."""
    from geo_diloco.cli.bench_star import measure_star
    from geo_diloco.cli.bench_star_plan import StarPlan, link_from, parameters_from

    bytes_per_s, round_trip_s = link_from(rate, rtt)
    plan = StarPlan(
        learners=learners,
        parameters=parameters_from(parameters),
        bytes_per_s=bytes_per_s,
        round_trip_s=round_trip_s,
        pace_ms=pace,
        quorum=quorum,
        fragments=fragments,
        interval=interval,
        slow_one=slow_one,
        mirrors=mirrors,
        choices=choices,
        congestion=congestion,
        warm_up_s=warm_up,
        seconds=seconds,
    )
    _print(measure_star(plan, keep=keep, say=typer.echo), as_json=as_json)


@app.command()
def fleet(
    file: Annotated[Path, typer.Argument(help="As for `simulate goodput --fleet`.", metavar="FLEET.toml")],
    minutes: Annotated[float, typer.Option(min=0.1, max=600.0, help="Minutes that count.")] = 2.0,
    warm_up: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Seconds that all are at work before it counts.")
    ] = 30.0,
    keep: Annotated[Path | None, typer.Option(help="New folder for the run's files, which are kept then.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rounds a minute and participants of a real run of a fleet's machines, with compute simulated, beside what
    `simulate goodput --fleet` predicts for the same file."""
    from geo_diloco.cli.bench_fleet import measure_fleet

    result = measure_fleet(file, warm_up_s=warm_up, seconds=60 * minutes, keep=keep, say=typer.echo)
    _print_rows(result["machines"])
    _print_rows(result["phases"])
    _print(result, as_json=as_json)


@app.command(name="star-learner", hidden=True)
def star_learner(
    invite: str,
    run_dir: Annotated[Path, typer.Option()],
    record: Annotated[Path, typer.Option()],
    pace: Annotated[int, typer.Option()],
    congestion: Annotated[str, typer.Option()],
    spread: Annotated[float, typer.Option(min=0.0, max=0.5)] = 0.0,
) -> None:
    """A learner of `star` and `fleet`, in a process of its own."""
    from geo_diloco.cli.bench_star_learner import Pace, train_paced

    how = Pace(ms=pace, spread=spread)
    train_paced(invite=invite, run_dir=run_dir, records=record, pace=how, congestion=congestion)


@app.command(name="codec")
def codec_(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 7,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the model whose deltas are encoded.")] = 256,
    rate: Annotated[str, typer.Option(help="Of the link to the peer that decodes them.", metavar="RATE")] = "100mbit",
    rtt: Annotated[str, typer.Option(help="Its round trip.", metavar="RTT")] = "20ms",
    as_json: AsJson = False,
) -> None:
    """Bytes per parameter and speed of every codec, on real deltas, against a memcpy, and how long until a peer has
    them, beside hivemind's codecs."""
    from geo_diloco.cli.bench_codec import measure_codecs
    from geo_diloco.cli.bench_star_plan import link_from

    bytes_per_s, round_trip_s = link_from(rate, rtt)
    result = measure_codecs(
        num_rounds=rounds, hidden_size=hidden_size, bytes_per_s=bytes_per_s, round_trip_s=round_trip_s, say=typer.echo
    )
    _print(result, as_json=as_json)


@app.command()
def merge(
    elements: Annotated[int, typer.Option(min=1024, help="Elements of the fragment.")] = 16 << 20,
    contributions: Annotated[int, typer.Option(min=1, help="Contributions that are merged.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Time of a merge with its outer step against adding the contributions up, and the memory that it takes."""
    from geo_diloco.cli.bench_merge import measure_merge

    result = measure_merge(num_elements=elements, num_contributions=contributions, num_rounds=rounds, say=typer.echo)
    _print(result, as_json=as_json)


@app.command()
def syncer(
    learners: Annotated[
        str | None, typer.Option(help="Numbers of learners. [default: 1000; or 100,300,1000]", show_default=False)
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds of steady rounds, once all have joined. [default: 60; or 20]")
    ] = 0.0,
    step_s: Annotated[float, typer.Option(min=0.1, help="A learner's inner step. A round is due every six.")] = 2.0,
    core_only: Annotated[
        bool,
        typer.Option("--core-only", help="Its decisions alone, in simulated runs; defaults are then the second ones."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """How a syncer bears many learners: lag of its event loop, memory, CPU and bytes, with real connections."""
    if core_only:
        from geo_diloco.cli.bench_syncer import measure_syncer

        numbers = _numbers("100,300,1000" if learners is None else learners)
        return _print(measure_syncer(num_learners=numbers, seconds=seconds or 20.0, say=typer.echo), as_json=as_json)
    from geo_diloco.cli.bench_crowd import measure_crowd

    rows = [
        measure_crowd(num_learners=number, seconds=seconds or 60.0, step_s=step_s, say=typer.echo)
        for number in _numbers("1000" if learners is None else learners)
    ]
    _print({"seconds": seconds or 60.0, "rows": rows}, as_json=as_json)


@app.command()
def donor(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of windows, with and without a joiner.")] = 5,
    seconds: Annotated[float, typer.Option(min=1.0, help="Length of a window.")] = 10.0,
    rate: Annotated[str, typer.Option(help="The joiner's line.", metavar="RATE")] = "100mbit",
    as_json: AsJson = False,
) -> None:
    """Inner steps per second of a machine whose standby gives its state to a joiner, against the same without."""
    from geo_diloco.cli.bench_donor import measure_donor

    _print(measure_donor(num_pairs=pairs, seconds=seconds, rate=rate, say=typer.echo), as_json=as_json)


@app.command(name="donor-joiner", hidden=True)
def donor_joiner(url: str, rate: Annotated[str, typer.Option()]) -> None:
    """The joiner of `donor`, in a process of its own."""
    from geo_diloco.cli.bench_donor import fetch_for_ever

    fetch_for_ever(url, rate)


@app.command(name="crowd-learners", hidden=True)
def crowd_learners(
    url: str,
    run: str,
    learners: Annotated[int, typer.Option()],
    step_s: Annotated[float, typer.Option()],
    dial_from: Annotated[str, typer.Option("--from")],
    folder: Annotated[Path, typer.Option()],
) -> None:
    """Learners of `syncer`, in a process of their own."""
    from geo_diloco.cli.bench_crowd_learners import run_learners
    from geo_diloco.manifest import RunId

    run_learners(url=url, run=RunId(run), num_learners=learners, step_s=step_s, dial_from=dial_from, folder=folder)


def _numbers(text: str) -> list[int]:
    numbers = [int(each) if each.strip().isascii() and each.strip().isdecimal() else 0 for each in text.split(",")]
    if not all(1 <= number <= LEARNERS_MAX for number in numbers):
        raise ConfigError(f"--learners {text}: wanted numbers from 1 to {LEARNERS_MAX}, as 100,300,1000")
    return numbers


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    for key, value in result.items():
        if not isinstance(value, list):
            typer.echo(f"{key:>28}  {value:.4g}" if isinstance(value, float) else f"{key:>28}  {value}")
    if result.get("rows") and "codec" in result["rows"][0]:
        _print_rows(result["rows"])
    for row in result.get("rows", ()) if "lag_ms_p99" in result.get("rows", [{}])[0] else ():
        _print(row, as_json=False)
    if as_json:
        typer.echo(json.dumps(result))


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """A table, one line a row."""
    keys = list(rows[0]) if rows else []
    cells = [keys, *([f"{v:.4g}" if isinstance(v := row[key], float) else str(v) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    for line in cells:
        typer.echo("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
