"""Starting a peer and staying with it: `found` and `join` for scripts, `run_founder` and its like for the command line.

A founder and a peer each own one node thread; everything in it is wired in this package and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from geo_diloco.config import PeerConfig, peer_config_from
from geo_diloco.errors import UserError
from geo_diloco.manifest import RunManifest
from geo_diloco.node.collector import spare_collector
from geo_diloco.node.founder import Founder, Reachable
from geo_diloco.node.inviting import FounderInfo
from geo_diloco.node.peer import Peer
from geo_diloco.node.signals import StopSignals
from geo_diloco.node.standby import Standby
from geo_diloco.runtime.invite import Invite

LINGER_S = 60.0
"""How long a syncer whose run is finished stays after its last peer has left, and a standby after the end."""
LOOK_S = 0.1


def found(manifest: RunManifest | Path | str, config: PeerConfig | None = None, **settings: Any) -> Founder:
    """Found a run from a manifest (or its file), or resume one from its folder; a context manager.

    settings: fields of PeerConfig, such as `run_dir`, `host`, `port` (here any free one by default).
    """
    source = Path(manifest) if isinstance(manifest, str) else manifest
    if not isinstance(source, Path | RunManifest):
        raise UserError(f"found({_kind(source)}): give a manifest, the path of its file, or a run's folder")
    return Founder(source, _settings(config, settings if config is not None else {"port": 0} | settings))


def join(invite: str | Invite, config: PeerConfig | None = None, **settings: Any) -> Peer:
    """Join a run; a context manager. Waits until the run is found, with the reason told on stderr.

    settings: fields of PeerConfig, such as `run_dir`, `device`, `dtype`, `threads`, `data_dir`; with `announce` a
    learner brings a standby, a process of its own that can take over the run.
    """
    return Peer(_invite(invite), _settings(config, settings))


def _invite(invite: str | Invite) -> Invite:
    parsed = Invite.parse(invite) if isinstance(invite, str) else invite
    if not isinstance(parsed, Invite):
        raise UserError(f"join({_kind(parsed)}): give the invite that `geo-diloco start` printed")
    return parsed


def _settings(config: PeerConfig | None, settings: dict[str, Any]) -> PeerConfig:
    """The settings given by name, over those of `config`. Raises ConfigError."""
    if config is not None:
        if not isinstance(config, PeerConfig):
            raise UserError(f"config = {_kind(config)}: give a PeerConfig, or the settings by name")
        settings = config.model_dump(exclude_unset=True) | settings
    return peer_config_from(settings)


def _kind(given: object) -> str:
    return "None" if given is None else f"a {type(given).__name__}"


def run_founder(source: Path, config: PeerConfig, *, on_ready: Callable[[FounderInfo], None]) -> int:
    """The command line's founder: until the run is finished and everyone has left, or SIGINT or SIGTERM."""
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    with (
        StopSignals() as signals,
        Founder(source, config, quiet=False, check=signals.check, preparing=signals.raising) as founder,
    ):
        spare_collector()
        on_ready(founder.info)
        _stay(founder, signals)
    return 0


def run_standby(invite: str | Invite, config: PeerConfig) -> int:
    """The command line's peer that takes over when the syncer is gone."""
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    with (
        StopSignals() as signals,
        Standby(_invite(invite), config, check=signals.check, preparing=signals.raising) as standby,
    ):
        spare_collector()
        _stay(standby, signals)
    return 0


def _stay(peer: Reachable, signals: StopSignals) -> None:
    """Until told to leave, or the run is finished and nobody needs this peer any more."""
    idle_since: float | None = None
    while not signals.told.is_set():
        if peer.failure is not None:
            raise peer.failure
        idle = peer.is_finished and (peer.num_connected == 0 or not peer.serves)
        idle_since = (idle_since or time.monotonic()) if idle else None
        if idle_since is not None and time.monotonic() - idle_since > LINGER_S:
            return
        signals.told.wait(LOOK_S)


def run_follower(invite: str | Invite, config: PeerConfig) -> int:
    """The command line's peer that does not train."""
    with join(invite, config) as peer:
        peer.follow()
    return 0
