"""`geo-diloco start`: founds a run from a manifest, or resumes one from its folder in the next term.

The process is the run's syncer and does not train; learners join with the invite that it prints.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geo_diloco.cli import options
from geo_diloco.cli.options import peer_config, say

if TYPE_CHECKING:
    from geo_diloco.node import FounderInfo


def start(
    source: Annotated[Path, typer.Argument(help="A manifest (founds a run), or a run's folder (resumes it).")],
    bootstraps: options.Bootstraps = None,
    run_dir: options.RunDir = None,
    host: options.Host = None,
    port: options.Port = None,
    announce: options.Announce = None,
    dht_host: options.DhtHost = None,
    dht_port: options.DhtPort = None,
    data_dir: options.DataDir = None,
    threads: options.Threads = None,
    keep_contributions: options.KeepContributions = None,
    max_up: options.MaxUp = None,
    max_down: options.MaxDown = None,
    quota: options.Quota = None,
    mirror: options.Mirror = None,
    congestion: options.Congestion = None,
    log_level: options.LogLevel = None,
    config: options.ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the invite and addresses as one JSON object.")] = False,
) -> None:
    """Found a run and print its invite, or resume it."""
    settings = peer_config(
        config,
        bootstraps=bootstraps,
        run_dir=run_dir,
        host=host,
        port=port,
        announce=announce,
        dht_host=dht_host,
        dht_port=dht_port,
        data_dir=data_dir,
        threads=threads,
        keep_contributions=keep_contributions,
        max_up=max_up,
        max_down=max_down,
        quota=quota,
        mirror=mirror,
        congestion=congestion,
        log_level=log_level,
    )
    from geo_diloco.node import run_founder

    raise typer.Exit(run_founder(source, settings, on_ready=_print_json if as_json else _print_text))


def _print_json(info: FounderInfo) -> None:
    say(json.dumps(dataclasses.asdict(info), default=str))


def _print_text(info: FounderInfo) -> None:
    from geo_diloco.config import is_loopback

    folder = shlex.quote(str(info.run_dir))
    if info.finished is not None:
        say(f"run {info.run} is finished ({info.finished}): this process only tells so to peers that have missed it")
        say("Ctrl-C ends it; the run's model, once it has ended:")
        say(f"  geo-diloco export {folder} --to my-model")
        return
    say(f"run {info.run} {_how_it_is(info)}; its files are in {info.run_dir}")
    if is_loopback(info.http):
        say("\njoin from this machine (it listens on loopback only; for others: --host 0.0.0.0 --announce HOST):\n")
    else:
        say("\njoin from any machine that reaches this one:\n")
    say(f"  geo-diloco join {info.invite}\n")
    say(f"(should no bootstrap answer one day: add --contact {info.http}, or another peer's address)")
    say("Ctrl-C ends it; resume with")
    say(f"  geo-diloco start {folder}")


def _how_it_is(info: FounderInfo) -> str:
    if info.served_by is None:
        return "is taken up again, and nobody serves it yet"
    if info.served_by == info.peer:
        return "is open"
    where = f" at {info.served_at}" if info.served_at else ""
    return f"goes on: {info.served_by[:8]} serves it{where}, and this peer is a standby"
