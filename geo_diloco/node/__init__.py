"""The composition root: builds adapters and core, supervises them, shuts them down in order.

This is the only layer that knows both the runtime and the training side. Its names are looked up when first used, for
what only asks a peer (`fetch_status`, `hand_over`) needs no torch, and torch takes seconds to import.
"""

from __future__ import annotations

import atexit
import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geo_diloco.node.amending import amend
    from geo_diloco.node.asking import fetch_status, folder_status
    from geo_diloco.node.founder import Founder
    from geo_diloco.node.handing_over import hand_over
    from geo_diloco.node.inviting import FounderInfo
    from geo_diloco.node.offline import export, replay
    from geo_diloco.node.peer import Peer
    from geo_diloco.node.reforming import reform
    from geo_diloco.node.starting import found, join, run_follower, run_founder, run_standby

__all__ = [
    "Founder",
    "FounderInfo",
    "Peer",
    "amend",
    "export",
    "fetch_status",
    "folder_status",
    "found",
    "hand_over",
    "join",
    "reform",
    "replay",
    "run_follower",
    "run_founder",
    "run_standby",
]

_HOMES = {
    "Founder": "founder",
    "FounderInfo": "inviting",
    "Peer": "peer",
    "amend": "amending",
    "export": "offline",
    "fetch_status": "asking",
    "folder_status": "asking",
    "found": "starting",
    "hand_over": "handing_over",
    "join": "starting",
    "reform": "reforming",
    "replay": "offline",
    "run_follower": "starting",
    "run_founder": "starting",
    "run_standby": "starting",
}

# The interpreter's last garbage collections walk over everything torch and transformers ever made: seconds on a busy
# machine, for a process that has left the run already. Frozen objects are passed over.
atexit.register(gc.freeze)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
