"""`geo-diloco join`: takes part in a run, as a learner, a standby, both, or a peer that only follows the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from geo_diloco.cli import options
from geo_diloco.cli.options import peer_config
from geo_diloco.errors import ConfigError

if TYPE_CHECKING:
    from geo_diloco.config import PeerConfig
    from geo_diloco.runtime.invite import Invite

NoTrain = Annotated[
    bool,
    typer.Option(
        "--no-train",
        help="Only follow the run: needs no accelerator. With --announce, as a standby that can take over.",
    ),
]
Elector = Annotated[
    bool | None,
    typer.Option(
        "--elector/--no-elector", help="Let this disk guard the chain and vote on who serves. [default: elector]"
    ),
]


def join(
    invite: Annotated[str, typer.Argument(help="The run's invite, as `geo-diloco start` printed it.")],
    no_train: NoTrain = False,
    elector: Elector = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda[:N] or mps. [default: auto]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16, of the passes. [default: float32]")] = None,
    threads: options.Threads = None,
    data_dir: options.DataDir = None,
    save_every_s: options.SaveEvery = None,
    pace: options.Pace = None,
    run_dir: options.RunDir = None,
    host: options.Host = None,
    port: options.Port = None,
    announce: options.Announce = None,
    dht_host: options.DhtHost = None,
    dht_port: options.DhtPort = None,
    bootstraps: options.Bootstraps = None,
    contacts: options.Contacts = None,
    keep_contributions: options.KeepContributions = None,
    max_up: options.MaxUp = None,
    max_down: options.MaxDown = None,
    quota: options.Quota = None,
    mirror: options.Mirror = None,
    congestion: options.Congestion = None,
    log_level: options.LogLevel = None,
    config: options.ConfigFile = None,
) -> None:
    """Join a run and train until it is finished; with --announce beside a standby, which can take over the run. With
    --no-train only follow it, or with --announce only stand by."""
    from geo_diloco.runtime.invite import Invite

    parsed = Invite.parse(invite)
    settings = peer_config(
        config,
        device=device,
        dtype=dtype,
        threads=threads,
        data_dir=data_dir,
        save_every_s=save_every_s,
        pace_ms=pace,
        elector=elector,
        run_dir=run_dir,
        host=host,
        port=port,
        announce=announce,
        dht_host=dht_host,
        dht_port=dht_port,
        bootstraps=bootstraps,
        contacts=contacts,
        keep_contributions=keep_contributions,
        max_up=max_up,
        max_down=max_down,
        quota=quota,
        mirror=mirror,
        congestion=congestion,
        log_level=log_level,
    )
    if keep_contributions and not settings.announce:
        raise ConfigError("--keep-contributions: only a peer that can be syncer has some; give --announce HOST:PORT")
    if pace and no_train:
        raise ConfigError(f"--pace {pace}: only a peer that trains has inner steps; leave out --no-train")
    options.warn_if_exposed(*parsed.bootstraps)
    if no_train:
        raise typer.Exit(_stay(parsed, settings))
    from geo_diloco.node import join as join_run
    from geo_diloco.training.loop import train

    with join_run(parsed, settings) as peer:
        train(peer)


def _stay(invite: Invite, settings: PeerConfig) -> int:
    """Without training: as a standby if others can reach this machine."""
    from geo_diloco.node import run_follower, run_standby

    return run_standby(invite, settings) if settings.announce else run_follower(invite, settings)
