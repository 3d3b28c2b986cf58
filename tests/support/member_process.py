"""The shell of everyone who follows the chain: connections, fetches, the fold; a learner's orders and uploads too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, PeerId, Seq, Version
from geo_diloco.protocol.effects import (
    Adopt,
    ApplyUpdate,
    CloseConnection,
    Effect,
    FetchEntries,
    FetchFragment,
    FetchUpdate,
    ForgetBlob,
    PersistAccounts,
    ReadyToLeave,
    RefusedForGood,
    Reset,
    RunFinished,
    Send,
    StartTraining,
    TakeSample,
    TokensDropped,
    TokensMerged,
    Upload,
)
from geo_diloco.protocol.events import (
    Applied,
    ApplyFailed,
    Connected,
    DeltaEncoded,
    Disconnected,
    EntryArrived,
    Event,
    FragmentReplaced,
    Resumed,
    SampleTaken,
    Saved,
    StopRequested,
    UpdateFetched,
    UpdateLost,
    UploadDone,
    UploadFailed,
)
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.protocol.peer import Role
from tests.support.cluster import FOUNDER, Cluster, Link, Process, fake_digest
from tests.support.syncer_process import SyncerProcess, theta_after
from tests.support.training import Training
from tests.support.work import Replica, Work

UPLOAD_TRIES = 8


@dataclass(frozen=True)
class Checkpoint:
    """What a learner's disk holds of one save."""

    accounts: PersistAccounts
    replica: Replica


@dataclass
class MemberDisk:
    """What outlives a learner's process."""

    checkpoint: Checkpoint | None = None
    tokens_at_death: int = 0
    steps_at_death: int = 0


@dataclass
class World:
    """What members reach: the syncer that is up now, if one is, and whose link is cut."""

    syncer: SyncerProcess | None = None
    cut: set[PeerId] = field(default_factory=set)

    def reachable(self, peer: PeerId) -> SyncerProcess | None:
        syncer = self.syncer
        return None if syncer is None or not syncer.alive or peer in self.cut else syncer


class MemberProcess(Process):
    """One process start of a learner or follower."""

    def __init__(
        self,
        cluster: Cluster,
        peer: PeerId,
        role: Role,
        start: int,
        *,
        world: World,
        disk: MemberDisk,
        step_ms: int = 0,
    ) -> None:
        super().__init__(cluster, peer, role, start)
        self.world, self.disk = world, disk
        self.link: Link | None = None
        self.told_finished = False
        self.held_blobs: set[BlobRef] = set()
        """Own contributions in the blob store."""
        self.versions: list[Version] = []
        self.theta: list[Digest] = []
        self.training = Training(self, step_ms) if role == "learner" else None
        self._deltas: dict[tuple[int, int], Work] = {}
        self._replicas: dict[int, Replica] = {}
        self._fold_free_at = 0
        self._cancelled: set[BlobRef] = set()
        self.is_leaving = False

    # -- start and end ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """From the own checkpoint if there is one, else from the syncer's snapshot."""
        checkpoint = self.disk.checkpoint
        if checkpoint is None:
            self._from_syncer(self._start_from_snapshot)
            return
        accounts = checkpoint.accounts
        self._take_state(accounts)
        self.handle(accounts.resume_at)
        lost_steps, lost_tokens = self.disk.steps_at_death - accounts.step, self.disk.tokens_at_death - accounts.tokens
        self.handle(Resumed(accounts.step, accounts.tokens, accounts.accounts, max(0, lost_steps), lost_tokens))
        assert self.training is not None
        self.training.resume(checkpoint)
        self.held_blobs = {each.undecided.contribution.blob for each in accounts.accounts if each.undecided is not None}
        self.do(FetchEntries(Seq(accounts.resume_at.seq + 1)))
        self._connect()

    def _take_state(self, accounts: PersistAccounts) -> None:
        self.versions = [head.version for head in accounts.resume_at.heads]
        self.theta = [head.state_digest for head in accounts.resume_at.heads]

    def _start_from_snapshot(self, syncer: SyncerProcess) -> bool:
        if len(syncer.disk.chain) < 2:
            return False
        snapshot = syncer.disk.snapshot()
        self.versions = [head.version for head in snapshot.heads]
        self.theta = [head.state_digest for head in snapshot.heads]
        self.handle(snapshot)
        self._connect()
        return True

    def crash(self) -> None:
        """The process dies; the disk stays."""
        if not self.alive:
            return
        self.alive = False
        tokens = self.core.status(self.mono()).tokens
        self.disk.tokens_at_death = tokens[0].trained if tokens else 0
        self.disk.steps_at_death = self.training.step if self.training is not None else 0
        for watch in self.cluster.watches:
            watch.ended(self)
        if self.link is not None:
            self.link.break_off()

    def leave(self) -> None:
        """SIGTERM: a last checkpoint, then hand in what is sampled, then Goodbye."""
        if not self.alive or self.is_leaving:
            return
        self.is_leaving = True
        if self.training is not None:
            self.training.stop_with_save()
        self.handle_after(100, StopRequested("SIGTERM"))

    # -- connections ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if not self.alive or self.link is not None:
            return
        syncer = self.world.reachable(self.peer)
        if syncer is not None and not self.frozen:
            self.link = Link(self.cluster, self, syncer)
            syncer.links[self.peer] = self.link
            self.handle(Connected(FOUNDER))
        else:
            self.clock.after(self.clock.between((200, 900)), self._connect)

    def lose_link(self) -> None:
        if self.link is not None and self.link.up:
            self.link.break_off()

    def handle(self, event: Event) -> None:
        super().handle(event)
        if isinstance(event, Disconnected) and self.alive and not self.is_leaving:
            self.link = None
            self.clock.after(self.clock.between((200, 900)), self._connect)

    def _from_syncer(self, ask: Callable[[SyncerProcess], bool]) -> None:
        """Ask over HTTP until it works; `ask` answers whether it did."""

        def attempt() -> None:
            if not self.alive:
                return
            syncer = self.world.reachable(self.peer)
            if syncer is None or self.frozen or not ask(syncer):
                self.clock.after(self.clock.between((100, 800)), attempt)

        self.clock.after(self.clock.between(self.cluster.plan.delay_ms), attempt)

    # -- effects ----------------------------------------------------------------------------------------------------

    def do(self, effect: Effect) -> None:
        match effect:
            case Send():
                if self.link is not None and self.link.up:
                    self.link.send(self, effect.message, effect.branch, effect.term)
            case CloseConnection():
                if self.link is not None:
                    self.link.close_when_sent()
            case FetchEntries():
                self._from_syncer(lambda syncer: self._take_entries(syncer, effect.from_seq))
            case FetchUpdate():
                ms = self.clock.between(self.cluster.plan.transfer_ms)
                self.clock.after(ms, lambda: self._from_syncer(lambda syncer: self._fetched(effect)))
            case ApplyUpdate():
                self._on_fold(lambda: self._apply(effect))
            case FetchFragment():
                ms = self.clock.between(self.cluster.plan.transfer_ms)
                self.clock.after(ms, lambda: self._from_syncer(lambda syncer: self._replace(syncer, effect)))
            case RunFinished():
                self.told_finished = True
                self._on_fold(lambda: self.training.finish() if self.training is not None else None)
            case ReadyToLeave():
                assert self.is_leaving
                self.clock.after(20, self.crash)
            case RefusedForGood():
                raise AssertionError(effect.reason)
            case TokensMerged() | TokensDropped():
                pass
            case _:
                self._do_as_learner(effect)

    def _do_as_learner(self, effect: Effect) -> None:
        training = self.training
        assert training is not None, f"not for a follower: {effect!r}"
        match effect:
            case StartTraining():
                training.start(effect)
            case TakeSample():
                training.order(effect)
            case Adopt() | Reset():
                self._on_fold(lambda: training.order(effect))
            case Upload():
                self._upload(effect.blob, 0)
            case ForgetBlob():
                self.held_blobs.discard(effect.blob)
                if self.cluster.plan.forgets_uploads:
                    self._cancelled.add(effect.blob)
            case PersistAccounts():
                checkpoint = Checkpoint(effect, self._replicas.pop(effect.save))
                self.clock.after(self.clock.between((5, 400)), lambda: self._saved(checkpoint))
            case _:
                raise AssertionError(f"not for a learner: {effect!r}")

    def _take_entries(self, syncer: SyncerProcess, from_seq: int) -> bool:
        for signed in syncer.disk.chain[from_seq:]:
            self.handle(EntryArrived(signed.entry, signed.digest, FOUNDER))
        return True

    # -- fold -------------------------------------------------------------------------------------------------------

    def _on_fold(self, action: Callable[[], None]) -> None:
        """First in, first out, each after some work."""
        self._fold_free_at = max(self.clock.now, self._fold_free_at) + self.clock.between((1, 15))
        self.clock.at(self._fold_free_at, lambda: action() if self.alive else None)

    def _fetched(self, effect: FetchUpdate) -> bool:
        if self.cluster.mishap(self.cluster.plan.odds.update_lost):
            self.handle(UpdateLost(effect.fragment, effect.version, "not kept"))
        else:
            self.handle(UpdateFetched(effect.fragment, effect.version))
        return True

    def _apply(self, effect: ApplyUpdate) -> None:
        p = effect.fragment
        after = theta_after(self.theta[p], effect.update.digest)
        fits = self.versions[p] + 1 == effect.version and after == effect.state_digest
        if not fits and not self.faults_explain():
            raise AssertionError(f"{self.peer[:8]}: update {effect.version} does not fit version {self.versions[p]}")
        if not fits or self.cluster.mishap(self.cluster.plan.odds.apply_failed):
            self.handle(ApplyFailed(p, effect.version, "digest differs"))
            return
        self._reach(p, effect.version, after)
        self.handle(Applied(p, effect.version, after))

    def faults_explain(self) -> bool:
        return self.cluster.plan.odds.apply_failed > 0 or self.cluster.plan.odds.update_lost > 0

    def _replace(self, syncer: SyncerProcess, effect: FetchFragment) -> bool:
        snapshot = syncer.disk.snapshot()
        p, head = effect.fragment, snapshot.heads[effect.fragment]
        if head.version < effect.version:
            return False
        self._take_entries(syncer, self.core.ledger.seq + 1)

        def replaced() -> None:
            self._reach(p, head.version, head.state_digest)
            self.handle(FragmentReplaced(p, head.version, head.state_digest))

        self._on_fold(replaced)
        return True

    def _reach(self, p: int, version: Version, theta: Digest) -> None:
        assert version >= self.versions[p], f"fragment {p} went back from {self.versions[p]} to {version}"
        self.versions[p], self.theta[p] = version, theta
        for watch in self.cluster.watches:
            watch.state(self, p, version, theta)

    # -- reports from the training thread, and uploads ----------------------------------------------------------------

    def report(self, event: Event, *, delta: Work | None = None, replica: Replica | None = None) -> None:
        """In order; the thread hop takes a moment."""
        self.clock.after(2, lambda: self._take_report(event, delta, replica))

    def _take_report(self, event: Event, delta: Work | None, replica: Replica | None) -> None:
        if not self.alive:
            return
        if isinstance(event, Saved) and replica is not None:
            self._replicas[event.save] = replica
        self.handle(event)
        if isinstance(event, SampleTaken) and delta is not None:
            self._on_fold(lambda: self._encode(event, delta))

    def _encode(self, event: SampleTaken, delta: Work) -> None:
        blob = BlobRef(fake_digest("delta", self.boot, event, sorted(delta.items())), 50)
        self.cluster.contents[blob.digest] = delta
        if self.cluster.mishap(self.cluster.plan.odds.bad_frame):
            self.cluster.bad_blobs.add(blob.digest)
        self.held_blobs.add(blob)
        self.handle(DeltaEncoded(event.fragment, event.round, blob, 1.0))

    def _upload(self, blob: BlobRef, tries: int) -> None:
        ms = self.clock.between(self.cluster.plan.transfer_ms) if tries == 0 else min(1_000, 20 << tries)
        self.clock.after(ms, lambda: self._upload_ends(blob, tries))

    def _upload_ends(self, blob: BlobRef, tries: int) -> None:
        if not self.alive or blob in self._cancelled:
            return
        syncer = self.world.reachable(self.peer)
        if syncer is None or self.frozen:
            self.clock.after(500, lambda: self._upload_ends(blob, tries))
        elif self.cluster.mishap(self.cluster.plan.odds.upload_failed):
            self.handle(UploadFailed(blob, "refused for good"))
        elif syncer.upload_ended(blob):
            self.handle_after(self.clock.between(self.cluster.plan.delay_ms), UploadDone(blob, 1_000_000))
        elif tries >= UPLOAD_TRIES:
            self.handle(UploadFailed(blob, "not announced"))
        else:
            self._upload(blob, tries + 1)

    def _saved(self, checkpoint: Checkpoint) -> None:
        if not self.alive:
            return
        self.disk.checkpoint = checkpoint
        for watch in self.cluster.watches:
            watch.saved(self, checkpoint.accounts.save)
