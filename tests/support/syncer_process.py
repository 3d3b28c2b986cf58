"""The syncer's shell in a simulated cluster: its disk, what it accepts, and fake merges.

Theta of a fragment is a digest: applying an update hashes both, so two peers agree exactly if they applied the same
updates in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, FragmentId, PeerId, Seq, Version
from geo_diloco.protocol.effects import (
    AcceptBlob,
    Announce,
    CheckContribution,
    CloseConnection,
    Effect,
    Evaluate,
    ForgetBlob,
    Merge,
    RunFinished,
    Seal,
    Send,
)
from geo_diloco.protocol.events import (
    BlobArrived,
    ContributionChecked,
    EntryArrived,
    Evaluated,
    FoundRun,
    Merged,
    MergeFailed,
    Sealed,
    Serve,
    SnapshotLoaded,
)
from geo_diloco.protocol.messages import BlobRef, Commit, Found, FragmentHead
from tests.support.cluster import FOUNDER, LAYOUT, Cluster, Link, Process, SignedEntry, fake_digest


def theta_after(theta: Digest, update: Digest) -> Digest:
    return fake_digest("theta", theta, update)


def momentum_after(momentum: Digest, update: Digest) -> Digest:
    return fake_digest("momentum", momentum, update)


@dataclass(frozen=True, slots=True)
class Shelved:
    """A snapshot as the syncer serves it."""

    loaded: SnapshotLoaded
    seq: Seq


@dataclass
class SyncerDisk:
    """What outlives the process."""

    chain: list[SignedEntry] = field(default_factory=list)
    theta: list[Digest] = field(default_factory=list)
    momentum: list[Digest] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    bases: list[Digest] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def append(self, signed: SignedEntry) -> None:
        self.chain.append(signed)
        entry = signed.entry
        if isinstance(entry, Found):
            self.theta, self.momentum = list(entry.state_digests), list(entry.momentum_digests)
            self.versions = [Version(0)] * len(self.theta)
            self.bases, self.tokens = [signed.digest] * len(self.theta), [0] * len(self.theta)
        elif isinstance(entry, Commit):
            p = entry.fragment
            self.theta[p] = theta_after(self.theta[p], entry.update.digest)
            self.momentum[p] = momentum_after(self.momentum[p], entry.update.digest)
            assert (self.theta[p], self.momentum[p]) == (entry.state_digest, entry.momentum_digest)
            self.versions[p], self.bases[p] = entry.version, signed.digest
            self.tokens[p] += sum(each.tokens_unmerged for each in entry.participants)

    def snapshot(self) -> SnapshotLoaded:
        found, last = self.chain[0].entry, self.chain[-1]
        assert isinstance(found, Found)
        progress = [each.entry.progress for each in self.chain if isinstance(each.entry, Commit)]
        return SnapshotLoaded(
            branch=self.chain[0].digest,  # type: ignore[arg-type]
            term=last.entry.header.term,
            seq=last.entry.header.seq,
            head_digest=last.digest,
            heads=tuple(
                FragmentHead(version=version, base=base, state_digest=theta, momentum_digest=momentum)
                for version, base, theta, momentum in zip(
                    self.versions, self.bases, self.theta, self.momentum, strict=True
                )
            ),
            num_elements=found.num_elements,
            layout_digest=LAYOUT,
            tokens_per_fragment=tuple(self.tokens),
            progress=progress[-1] if progress else 0.0,
        )


class SyncerProcess(Process):
    """One start of the founder."""

    def __init__(self, cluster: Cluster, disk: SyncerDisk, start: int) -> None:
        super().__init__(cluster, FOUNDER, "syncer", start)
        self.disk = disk
        self.links: dict[PeerId, Link] = {}
        self.accepted: dict[BlobRef, PeerId] = {}
        self.arrived: set[BlobRef] = set()
        self.told_finished = False
        self._merge_free_at = 0

    def start(self) -> None:
        if not self.disk.chain:
            num_fragments = len(self.cluster.plan.num_elements)
            found = FoundRun(
                state_digests=tuple(fake_digest("theta_0", p) for p in range(num_fragments)),
                momentum_digests=tuple(fake_digest("momentum_0", p) for p in range(num_fragments)),
                num_elements=self.cluster.plan.num_elements,
                layout_digest=LAYOUT,
            )
            self.handle(found)
            return
        for signed in list(self.disk.chain):
            self.handle(EntryArrived(signed.entry, signed.digest, FOUNDER))
        self.handle(Serve())

    def crash(self) -> None:
        self.alive = False
        for peer in sorted(self.links):
            self.links[peer].break_off()

    def do(self, effect: Effect) -> None:
        match effect:
            case Send():
                link = self.links.get(effect.to)
                if link is not None:
                    link.send(self, effect.message, effect.branch, effect.term)
            case CloseConnection():
                link = self.links.get(effect.peer)
                if link is not None:
                    link.close_when_sent()
            case Seal():
                signed = SignedEntry(effect.entry, fake_digest(effect.entry))
                self.clock.after(self.clock.between((1, 10)), lambda: self._on_disk(signed))
            case Announce():
                signed = self.disk.chain[effect.seq]
                for peer in sorted(self.links):
                    self.links[peer].deliver(self, EntryArrived(signed.entry, signed.digest, FOUNDER))
            case AcceptBlob():
                self.accepted[effect.blob] = effect.peer
                if effect.blob in self.arrived:
                    self.handle_after(0, BlobArrived(effect.blob))
            case ForgetBlob():
                self.accepted.pop(effect.blob, None)
                self.arrived.discard(effect.blob)
            case CheckContribution():
                ok = effect.blob.digest not in self.cluster.bad_blobs
                checked = ContributionChecked(effect.id, ok, "" if ok else "NaN scale", 1.0 if ok else 0.0)
                self.handle_after(self.clock.between((1, 20)), checked)
            case Merge():
                self._merge_free_at = max(self.clock.now, self._merge_free_at) + self.clock.between((2, 60))
                self.clock.at(self._merge_free_at, lambda: self._merge(effect))
            case Evaluate():
                loss = None if self.clock.random.random() < 0.1 else 1.0 + self.clock.random.random()
                self.handle_after(self.clock.between((50, 1_500)), Evaluated(effect.seq, loss))
            case RunFinished():
                self.told_finished = True
            case _:
                raise AssertionError(f"not for a syncer: {effect!r}")

    def _on_disk(self, signed: SignedEntry) -> None:
        """A process that dies now has the entry on disk and told nobody."""
        if not self.alive:
            return
        self.disk.append(signed)
        for watch in self.cluster.watches:
            watch.sealed(signed)
        if isinstance(signed.entry, Commit):
            commit = signed.entry
            for watch in self.cluster.watches:
                watch.state(self, commit.fragment, commit.version, self.disk.theta[commit.fragment])
        self.handle_after(self.clock.between((0, 5)), Sealed(signed.entry.header.seq, signed.digest))

    def _merge(self, effect: Merge) -> None:
        assert effect.inputs and list(effect.inputs) == sorted(effect.inputs, key=lambda each: each.peer)
        assert effect.version == self.disk.versions[effect.fragment] + 1, "a merge that nobody can commit"
        assert all(each.blob in self.arrived for each in effect.inputs), "bytes that are not here"
        if self.cluster.mishap(self.cluster.plan.odds.merge_failed):
            culprit = self.clock.random.choice([None, effect.inputs[0].peer])
            self.handle(MergeFailed(effect.fragment, effect.round, effect.attempt, "disk full", culprit))
            return
        theta, momentum = self.disk.theta[effect.fragment], self.disk.momentum[effect.fragment]
        update = fake_digest("update", theta, effect.inputs, effect.eta, effect.mu)
        merged = Merged(
            fragment=FragmentId(effect.fragment),
            round=effect.round,
            attempt=effect.attempt,
            update=BlobRef(update, 1_000),
            state_digest=theta_after(theta, update),
            momentum_digest=momentum_after(momentum, update),
            rbar=1.0,
            rho=None,
        )
        self.handle(merged)

    # -- what others reach over HTTP ------------------------------------------------------------------------------

    def upload_ended(self, blob: BlobRef) -> bool:
        """Every piece is here; false if the blob isn't announced."""
        if blob not in self.accepted:
            return False
        self.arrived.add(blob)
        self.handle_after(0, BlobArrived(blob))
        return True
