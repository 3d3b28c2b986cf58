"""What survives a simulated process: its vote, the chain as signed, blobs, snapshots, a learner's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.manifest import Digest
from geo_diloco.protocol.effects import PersistAccounts
from geo_diloco.protocol.election.ballots import VoteRecord
from geo_diloco.protocol.events import SnapshotLoaded
from geo_diloco.protocol.messages import Commit
from geo_diloco.sim.fakes import SignedEntry
from geo_diloco.sim.work import Replica


@dataclass(frozen=True)
class Checkpoint:
    """What a learner's disk holds of one save."""

    accounts: PersistAccounts
    replica: Replica


@dataclass
class Disk:
    """One host's disk. A lost disk comes back empty, with another enrolment."""

    enrolment: str
    vote: VoteRecord | None = None
    log: list[SignedEntry] = field(default_factory=list)
    """In the order in which they were written."""
    known: dict[Digest, SignedEntry] = field(default_factory=dict)
    blobs: set[Digest] = field(default_factory=set)
    """Updates and contributions."""
    snapshot: SnapshotLoaded | None = None
    checkpoint: Checkpoint | None = None
    tokens_at_death: int = 0
    steps_at_death: int = 0

    def write(self, signed: SignedEntry) -> None:
        if signed.digest not in self.known:
            self.known[signed.digest] = signed
            self.log.append(signed)

    def is_stored(self, signed: SignedEntry) -> bool:
        """Record and update are here."""
        entry = signed.entry
        return signed.digest in self.known and (not isinstance(entry, Commit) or entry.update.digest in self.blobs)

    def holds_up_to(self, digest: Digest) -> bool:
        """Whether all that became durable since this disk's last snapshot (or a learner's checkpoint, which is of what
        was durable, too) is on it, up to that entry."""
        based = set() if self.snapshot is None else {self.snapshot.head_digest}
        if self.checkpoint is not None:
            based.add(self.checkpoint.accounts.resume_at.head_digest)
        at: Digest | str = digest
        while at and at not in based:
            signed = self.known.get(Digest(at))
            if signed is None or not self.is_stored(signed):
                return False
            at = signed.entry.header.prev
        return True
