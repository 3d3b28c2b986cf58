"""The syncer's shell: real merges, an honest disk, and every blob it was handed.

It is the founder, and alone on the roster: it votes for itself, and what it has sealed is durable. The order on disk
is that of `runtime/serving.py`: an entry is on disk before the core hears `Sealed`, a vote before `VotePersisted`, and
what a merge made is visible only with its commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from geo_diloco.manifest import Digest, FragmentId, PeerId
from geo_diloco.numerics.fragments import fragment_digest
from geo_diloco.protocol.effects import (
    AcceptBlob,
    Announce,
    CheckContribution,
    CloseConnection,
    Effect,
    Evaluate,
    ForgetBlob,
    Merge,
    PersistVote,
    RunFinished,
    Seal,
    Send,
)
from geo_diloco.protocol.events import (
    BlobArrived,
    ContributionChecked,
    Disconnected,
    EntryArrived,
    Evaluated,
    FoundRun,
    MergeFailed,
    Sealed,
    SnapshotLoaded,
    VotePersisted,
)
from geo_diloco.protocol.messages import BlobRef, Commit, Entry
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.runtime.merger import MergeError, OuterState
from geo_diloco.runtime.pieces import blob_ref
from geo_diloco.sim.train.world import FSYNC_MS, WORK_MS, ControlLink, Process, World, entry_digest


@dataclass(frozen=True, slots=True)
class ChainLink:
    """An entry as it lies on the syncer's disk."""

    entry: Entry
    digest: Digest


class SyncerProcess(Process):
    """The founder. Never dies here: what a run does without it is for the simulator of the protocol to show."""

    def __init__(self, world: World, theta_0: Sequence[Tensor], measure: Callable[[OuterState], float | None]) -> None:
        hello = HelloFacts(host="syncer", address="syncer:1")
        seat = Seat(may_serve=True, may_elect=True, fresh_enrolment="the syncer's disk", machine="syncer")
        super().__init__(world, world.manifest.founder, "follower", hello=hello, seat=seat)
        sync = world.manifest.sync
        kept = sync.staleness_max if sync.late_form == "paper" else 0
        self.outer = OuterState(world.layout, with_momentum=True, with_residual=True, updates_kept=kept)
        for p, theta_N in enumerate(theta_0):
            self.outer.start_fragment(FragmentId(p), theta_N)
        self.chain: list[ChainLink] = []
        self.links: dict[PeerId, ControlLink] = {}
        self.updates: dict[BlobRef, bytes] = {}
        self.last_commit_at = 0
        self._measure = measure
        self._accepted: set[BlobRef] = set()
        self._contributions: dict[BlobRef, bytes] = {}

    def start(self) -> None:
        fragments = [FragmentId(p) for p in range(self.world.layout.num_fragments)]
        self.handle(
            FoundRun(
                state_digests=tuple(fragment_digest(self.outer.theta(p)) for p in fragments),
                momentum_digests=tuple(fragment_digest(self.outer.momentum(p)) for p in fragments),
                num_elements=self.world.layout.num_elements,
                layout_digest=self.world.layout.digest,
            )
        )

    # ---- effects

    def do(self, effect: Effect) -> None:
        match effect:
            case Send():
                if (link := self.links.get(effect.to)) is not None:
                    link.send(self, effect)
            case CloseConnection():
                if (link := self.links.get(effect.peer)) is not None:
                    link.close_when_sent()
            case PersistVote():
                self.handle_after(FSYNC_MS, VotePersisted(effect.number))
            case Seal():
                self.clock.after(FSYNC_MS, lambda: self._on_disk(effect.entry))
            case Announce():
                for peer in sorted(self.links):
                    self.links[peer].deliver(self, self._arrival(self.chain[effect.seq]))
            case AcceptBlob():
                self._accepted.add(effect.blob)
                if effect.blob in self._contributions:
                    self.handle_after(0, BlobArrived(effect.blob))
            case ForgetBlob():
                self._accepted.discard(effect.blob)
                self._contributions.pop(effect.blob, None)
            case CheckContribution():
                self.clock.after(WORK_MS, lambda: self._check(effect))
            case Merge():
                self.clock.after(WORK_MS, lambda: self._merge(effect))
            case Evaluate():
                self.handle_after(WORK_MS, Evaluated(effect.seq, self._measure(self.outer)))
            case RunFinished():
                pass
            case _:
                raise AssertionError(f"not for a syncer: {effect!r}")

    def lost(self, link: ControlLink) -> None:
        peer = link.learner.peer
        if self.links.get(peer) is link:
            del self.links[peer]
            self.handle(Disconnected(peer, "cut"))

    def _arrival(self, link: ChainLink) -> EntryArrived:
        return EntryArrived(link.entry, link.digest, self.peer)

    def _on_disk(self, entry: Entry) -> None:
        link = ChainLink(entry, entry_digest(entry))
        self.chain.append(link)
        if isinstance(entry, Commit):
            self.outer.commit(entry.fragment, entry.version)
            self.last_commit_at = self.clock.now
        self.handle(Sealed(entry.header.term, entry.header.seq, link.digest))

    def _check(self, effect: CheckContribution) -> None:
        frame = self._contributions.get(effect.blob)
        if frame is None:
            self.handle(ContributionChecked(effect.id, False, "not held any more", 0.0))
        else:
            self.handle(self.outer.check(effect, frame, self.core.codecs_up))

    def _merge(self, effect: Merge) -> None:
        try:
            outcome = self.outer.merge(effect, self._contributions.__getitem__, self.world.manifest)
        except MergeError as exc:
            self.handle(MergeFailed(effect.fragment, effect.round, effect.attempt, exc.reason, exc.culprit))
            return
        update = blob_ref(outcome.frame)
        self.updates[update] = outcome.frame
        self.handle(outcome.answer(effect, update))

    # ---- what learners reach over their data plane

    def take_blob(self, blob: BlobRef, frame: bytes) -> bool:
        """A whole contribution came in; false if it was not announced."""
        if blob not in self._accepted:
            return False
        self._contributions[blob] = frame
        self.handle_after(0, BlobArrived(blob))
        return True

    def entries(self, from_seq: int) -> list[EntryArrived]:
        return [self._arrival(link) for link in self.chain[from_seq:]]

    def snapshot(self) -> SnapshotLoaded | None:
        """Where `outer` stands now; none before the run is open, and while an entry is on its way to the disk."""
        ledger = self.core.state_ledger()
        if ledger is None or ledger.opened is None:
            return None
        assert ledger.seq == self.core.ledger.seq, "alone on the roster, and not durable"
        return ledger.snapshot()

    def theta(self, fragment: FragmentId) -> bytes:
        """As a snapshot of now holds it."""
        return self.outer.fragment_bytes(fragment)[0]
