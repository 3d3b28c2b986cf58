"""What stands for bytes in a simulation: names, and digests that are functions of what they are digests of.

Theta of a fragment is a digest: an update hashes into it, so two peers agree exactly if they folded the same updates in
the same order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from geo_diloco.manifest import Digest, PeerId, RunId
from geo_diloco.protocol.messages import Entry

RUN = RunId("ab" * 20)
LAYOUT = Digest("1a" * 32)


def fake_digest(*parts: object) -> Digest:
    """64 hex characters that stand for the parts."""
    return Digest(hashlib.sha256(repr(parts).encode()).hexdigest())


def fake_peer(name: str) -> PeerId:
    return PeerId(hashlib.sha256(name.encode()).hexdigest())


def theta_after(theta: Digest, update: Digest) -> Digest:
    return fake_digest("theta", theta, update)


def momentum_after(momentum: Digest, update: Digest) -> Digest:
    return fake_digest("momentum", momentum, update)


def fake_cosine(update: Digest) -> float:
    """Between that update and the one before it, in [-1, 1): any value, as often as any other."""
    return int(update[:8], 16) / (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SignedEntry:
    """An entry as it is sent and lies on a disk."""

    entry: Entry
    digest: Digest
    signer: PeerId
