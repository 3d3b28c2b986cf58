"""Flags that several commands share, and how they become a `PeerConfig`.

A flag that was not given is None here, so that the environment and a file can speak (`config.load_peer_config`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from geo_diloco.errors import ConfigError

if TYPE_CHECKING:
    from geo_diloco.config import PeerConfig

BOOTSTRAP_PORT = 31330
"""Documented default of a bootstrap's DHT side; a peer's HTTP side has 31340 (`config.PeerConfig`)."""

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings of this machine.")]
RunDir = Annotated[Path | None, typer.Option(help="Folder for this peer's files. [default: among this user's state]")]
Host = Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")]
Port = Annotated[int | None, typer.Option(help="HTTP port; 0 takes a free one. [default: 31340]")]
Announce = Annotated[
    str | None,
    typer.Option(help="HOST or HOST:PORT under which others reach this machine."),
]
DhtHost = Annotated[
    str | None,
    typer.Option(help="Address of the DHT side. [default: as --host]"),
]
DhtPort = Annotated[int | None, typer.Option(help="Port of the DHT side. [default: 0, a free one]")]
Bootstraps = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="Multiaddress of a bootstrap; may be given several times."),
]
Contacts = Annotated[
    list[str] | None,
    typer.Option(
        "--contact",
        metavar="HOST:PORT",
        help="HTTP side of a peer of the run, which knows the way if no bootstrap answers; may be given several times.",
    ),
]
KeepContributions = Annotated[
    bool | None,
    typer.Option(
        "--keep-contributions/--no-keep-contributions",
        help="While syncer, keep what was merged, so that replay can redo the merges. Costs, with each commit, one "
        "contribution per participant: about half a byte (int4) per parameter of the fragment.",
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads for torch; 0 leaves it to torch. [default: 0]")]
Pace = Annotated[
    int | None,
    typer.Option(
        metavar="MS",
        help="For benchmarks: an inner step takes at least so many milliseconds, as if it computed. [default: 0]",
    ),
]
SaveEvery = Annotated[
    float | None,
    typer.Option(help="Seconds between checkpoints; more if their copies cost over 1% of the time. [default: 10]"),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Training data. [default: the run's own source]"),
]
MaxUp = Annotated[str | None, typer.Option(help="Bulk sent at most, such as 10mbit or 1.2MB/s. [default: none]")]
MaxDown = Annotated[str | None, typer.Option(help="Bulk received at most, likewise. [default: none]")]
Quota = Annotated[
    str | None,
    typer.Option(help="Bulk a day, such as 50GB/day; when it is used up this peer is no mirror. [default: none]"),
]
Mirror = Annotated[
    bool | None,
    typer.Option("--mirror/--no-mirror", help="Serve blobs to others who can reach this machine. [default: mirror]"),
]
Congestion = Annotated[
    str | None,
    typer.Option(help="Congestion control: auto, bbr, cubic or system. [default: auto, BBR where there is one]"),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error. [default: info]")]


def peer_config(config_file: Path | None, **flags: Any) -> PeerConfig:
    """This process's settings; a flag that is None was not given. Raises ConfigError."""
    from geo_diloco.config import load_peer_config

    flags |= {name: flags.get(name) or None for name in ("bootstraps", "contacts")}
    config = load_peer_config(flags, environment=os.environ, file=config_file)
    warn_if_exposed(config.host, config.dht_host, config.announce, *config.contacts)
    _warn_if_unreachable(config.host, config.announce)
    return config


def _warn_if_unreachable(host: str, announce: str) -> None:
    from geo_diloco.config import is_loopback

    if announce and is_loopback(host) and not is_loopback(announce):
        say(
            f"warning: --announce {announce}, but this process listens on {host} only: others can't reach it there "
            "unless something here forwards to it; --host 0.0.0.0 listens everywhere",
            err=True,
        )


def say(text: str, *, err: bool = False) -> None:
    """Tell the person who started something that goes on. If nobody listens (`| head -1`), it goes on unheard."""
    try:
        typer.echo(text, err=err)
    except OSError:
        _hush(sys.stderr if err else sys.stdout)


def answer(text: str) -> None:
    """Print what was asked for. Raises ConfigError if it can't be: that is all the command was for."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        _hush(sys.stdout)  # whoever reads has seen enough
    except OSError as exc:
        _hush(sys.stdout)
        raise ConfigError(f"standard output: {exc.strerror or exc}; send it somewhere else") from exc


def _hush(stream: TextIO) -> None:
    """What is still buffered would fail again at exit, with a traceback."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn_if_exposed(*addresses: str) -> None:
    """Say that traffic is not encrypted as soon as one address isn't this machine's loopback."""
    from geo_diloco.config import is_loopback

    exposed = [address for address in addresses if address and not is_loopback(address)]
    if exposed:
        say(
            f"warning: {exposed[0]} is not loopback, and traffic is not yet encrypted: "
            "messages are signed, but anyone on the way can read them, models and updates included",
            err=True,
        )
