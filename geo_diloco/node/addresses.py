"""Where this machine listens and how others reach it, from the settings."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from geo_diloco.config import PeerConfig, peer_config_from, split_announce
from geo_diloco.errors import ConfigError
from geo_diloco.node.rundir import RunDir
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.records import maddr_of, tcp_of_maddr

_ANY = ("0.0.0.0", "::", "")


@dataclass(frozen=True, kw_only=True)
class DirectoryAddresses:
    """Multiaddrs for `Directory.start`."""

    listen: tuple[str, ...]
    announce: tuple[str, ...]


def http_address(config: PeerConfig, bound_port: int) -> str:
    """`host:port` under which others reach this peer's HTTP side. Raises ConfigError if that can't be known."""
    if config.announce:
        host, port = split_announce(config.announce)
        return f"{f'[{host}]' if ':' in host else host}:{port or bound_port}"
    if config.host in _ANY:
        raise ConfigError(f"host = {config.host}: listening everywhere needs --announce HOST, as others reach it")
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{host}:{bound_port}"


def directory_addresses(config: PeerConfig) -> DirectoryAddresses:
    """Where p2pd listens; a port is picked here if it has to be announced."""
    port = config.dht_port
    announce: tuple[str, ...] = ()
    if config.announce and config.dht_host in _ANY:
        port = port or free_port(config.dht_host)
        announce = (maddr_of(split_announce(config.announce)[0], port),)
    return DirectoryAddresses(listen=(maddr_of(config.dht_host, port),), announce=announce)


SAID = (
    *("host", "port", "announce", "dht_host", "dht_port", "bootstraps"),
    *("keep_contributions", "max_up", "max_down", "quota", "mirror", "congestion"),
)
"""Settings that a founder or standby keeps: a run that is resumed as the README says must be where its peers look for
it, within the same limits, and must not delete what it was told to keep."""


def as_before(run_dir: RunDir, config: PeerConfig) -> PeerConfig:
    """These settings, and where nothing was said this time what was said last time; kept for the next time.

    Raises ConfigError if what was kept can't be used.
    """
    kept: dict[str, object] = {}
    with contextlib.suppress(OSError):
        try:
            kept = dict(json.loads(run_dir.addresses.read_bytes()))
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{run_dir.addresses} is damaged: {exc}; remove it and give the addresses again") from exc
    said = {key: getattr(config, key) for key in SAID if key in config.model_fields_set}
    both = {key: value for key, value in (kept | said).items() if key in SAID}
    atomic_write(run_dir.addresses, json.dumps(both, indent=1).encode())
    settings = {key: getattr(config, key) for key in config.model_fields_set} | both
    return peer_config_from(settings)


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where an earlier process of this run directory listened; 0 if that is not known."""

    http: int = 0
    dht: int = 0
    host: str = ""
    """That the HTTP side was bound to."""

    @property
    def url(self) -> str:
        """For who is on the same machine; empty if it is not known."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http}" if self.http else ""


def read_ports(run_dir: RunDir) -> Ports:
    try:
        said = json.loads(run_dir.ports.read_bytes())
        ports = Ports(http=int(said["http"]), dht=int(said["dht"]), host=str(said.get("host", "")))
        return ports if 0 <= ports.http < 65536 and 0 <= ports.dht < 65536 else Ports()
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Ports()


def write_ports(run_dir: RunDir, *, http: int, host: str, maddrs: Sequence[str]) -> None:
    ports = [place[1] for maddr in maddrs if (place := tcp_of_maddr(maddr)) is not None]
    atomic_write(run_dir.ports, json.dumps({"http": http, "host": host, "dht": ports[0] if ports else 0}).encode())


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
