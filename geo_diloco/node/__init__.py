"""The composition root: builds adapters and core, supervises them, shuts them down in order.

`found` and `join` are for scripts, `run_founder` and `run_follower` for the command line. A founder and a peer each
own one node thread; everything in it is wired here and nowhere else. This is the only layer that knows both the
runtime and the training side.
"""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from geo_diloco.config import PeerConfig, peer_config_from
from geo_diloco.errors import UserError
from geo_diloco.manifest import RunManifest
from geo_diloco.node.amending import amend
from geo_diloco.node.asking import fetch_status
from geo_diloco.node.founder import Founder, FounderInfo, Reachable
from geo_diloco.node.handing_over import hand_over
from geo_diloco.node.offline import export, replay
from geo_diloco.node.peer import Peer
from geo_diloco.node.reforming import reform
from geo_diloco.node.signals import StopSignals
from geo_diloco.node.standby import Standby
from geo_diloco.runtime.invite import Invite

__all__ = [
    "Founder",
    "FounderInfo",
    "Peer",
    "amend",
    "export",
    "fetch_status",
    "found",
    "hand_over",
    "join",
    "reform",
    "replay",
    "run_follower",
    "run_founder",
    "run_standby",
]

LINGER_S = 60.0
"""How long a syncer whose run is finished stays after its last peer has left, and a standby after the end."""
LOOK_S = 0.1

# The interpreter's last garbage collections walk over everything torch and transformers ever made: seconds on a busy
# machine, for a process that has left the run already. Frozen objects are passed over.
atexit.register(gc.freeze)


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

    settings: fields of PeerConfig, such as `run_dir`, `device`, `dtype`, `threads`, `data_dir`.
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
