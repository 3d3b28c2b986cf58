"""What a person is told once a run can be joined, the invite above all, which is also kept in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_diloco.config import PeerConfig
from geo_diloco.manifest import PeerId, RunId
from geo_diloco.node.founding import NodeParts
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.invite import Invite


@dataclass(frozen=True, kw_only=True)
class FounderInfo:
    """What a person needs once the run is open."""

    run: RunId
    name: str
    peer: PeerId
    invite: str
    http: str
    """`host:port` of the HTTP side."""
    maddrs: tuple[str, ...]
    """Of its own DHT side."""
    run_dir: Path
    served_by: PeerId | None = None
    """Who serves the run now: this peer or another; none while that is not known."""
    served_at: str = ""
    """Where that is, if it is another."""
    finished: str | None = None
    """Why, of a run that is over."""


def info_of(parts: NodeParts, config: PeerConfig, *, maddrs: Sequence[str], http: str) -> FounderInfo:
    """Of a founder or a standby whose DHT side has these `maddrs`; writes `invite.txt`."""
    bootstraps = tuple(dict.fromkeys((*config.bootstraps, *maddrs)))
    invite = Invite(run=parts.run, bootstraps=bootstraps, token=parts.token, name=parts.manifest.name).to_string()
    atomic_write(parts.run_dir.invite, (invite + "\n").encode(), mode=0o600 if parts.token else 0o644)
    return FounderInfo(
        run=parts.run,
        name=parts.manifest.name,
        peer=parts.identity.peer_id,
        invite=invite,
        http=http,
        maddrs=tuple(maddrs),
        run_dir=parts.run_dir.root,
    )
