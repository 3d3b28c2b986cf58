"""What a peer can say about itself. Frozen facts for `status`, the demo and tests; nothing decides by them."""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import BranchId, FragmentId, PeerId, RunRules, Seq, Term, Version
from geo_diloco.protocol.amendments import Amended
from geo_diloco.protocol.election.status import ElectionStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerStatus:
    """A learner as the syncer sees it."""

    peer: PeerId
    host: str
    connected: bool
    step: int
    tokens: int
    step_time_us: int
    loss: float | None
    upload_bytes_per_s: int
    share: int | None
    doing: str
    uplink: str
    """What it makes of its way up, and down if that is too thin, in its own words; empty if there is nothing to say."""
    tokens_per_s: int | None = None
    """Over the last half minute or so; none while that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStatus:
    """A learner as it sees itself, over its whole life."""

    step: int
    tokens: int
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundStatus:
    """A round that has ended in a commit."""

    round: int
    fragment: FragmentId
    version: Version
    seq: Seq
    participants: int
    live: int
    quorum_wait_ms: int
    grace_ms: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Why a fragment is where it is: every wait has a reason."""

    fragment: FragmentId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentTokens:
    """A learner's books on one fragment, in tokens."""

    trained: int
    merged: int
    in_flight: int
    carried: int
    restored: int
    """Part of `carried` that came with the checkpoint this process resumed from."""
    version: Version
    """Adopted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerStatus:
    """Everything about one peer at one moment."""

    role: str
    branch: BranchId
    lineage: int
    """Number of the owner's reform that began it; 0 for `found`."""
    term: Term
    seq: Seq
    finished: str | None
    num_commits: int
    tokens_total: int
    progress: float
    rules: RunRules
    """In force on the durable chain."""
    amended: tuple[Amended, ...]
    """What is in force beside the manifest."""
    heldout: tuple[tuple[Seq, float], ...]
    versions: tuple[Version, ...]
    learners: tuple[LearnerStatus, ...] = ()
    rounds: tuple[RoundStatus, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    tokens: tuple[FragmentTokens, ...] = ()
    uplink: str = ""
    """Of a learner: what it makes of its way up, and down."""
    training: TrainingStatus | None = None
    """Of a learner."""
    election: ElectionStatus | None = None
