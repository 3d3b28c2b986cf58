"""geo_diloco trains one model on machines that are far apart. These are its public names; everything else may change.

    with geo_diloco.join(invite) as peer:
        learner = peer.learner(model, inner_optimizer)
        for batch in peer.data():
            ...
            if learner.step(tokens=batch.numel(), loss=loss):
                break

Names are looked up when first used: importing this package, and asking the command line for help, costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geo_diloco.config import PeerConfig, load_manifest
    from geo_diloco.errors import GeoDilocoError
    from geo_diloco.manifest import RunManifest
    from geo_diloco.node import Peer, fetch_status, found, join
    from geo_diloco.runtime.invite import Invite
    from geo_diloco.training.learner import Learner
    from geo_diloco.training.models import model_factory

__version__ = "0.1.0"

__all__ = [
    "GeoDilocoError",
    "Invite",
    "Learner",
    "Peer",
    "PeerConfig",
    "RunManifest",
    "fetch_status",
    "found",
    "join",
    "load_manifest",
    "model_factory",
]

_HOMES = {
    "GeoDilocoError": "errors",
    "Invite": "runtime.invite",
    "Learner": "training.learner",
    "Peer": "node",
    "PeerConfig": "config",
    "RunManifest": "manifest",
    "fetch_status": "node",
    "found": "node",
    "join": "node",
    "load_manifest": "config",
    "model_factory": "training.models",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
