"""A learner's shell: its link, its fetches, the fold, its orders and uploads, and the disk that outlives it.

What `node/learning.py` and `runtime/following.py` do with sockets and threads is done here on the clock; tensors,
frames and checkpoints are the real ones. It takes no part in elections, and its disk holds no chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geo_diloco.manifest import CodecSpec, FragmentId, PeerId
from geo_diloco.numerics import codec
from geo_diloco.numerics.fragments import bytes_from_vector
from geo_diloco.protocol.effects import (
    Adopt,
    ApplyUpdate,
    CloseConnection,
    Effect,
    FetchEntries,
    FetchFragment,
    ForgetBlob,
    KeepEntry,
    PersistAccounts,
    PersistVote,
    ReadyToLeave,
    RefusedForGood,
    Reset,
    RunFinished,
    SeekSyncer,
    Send,
    StartTraining,
    TakeSample,
    TokensDropped,
    TokensMerged,
    Upload,
)
from geo_diloco.protocol.events import (
    Applied,
    ChainLoaded,
    Connected,
    DeltaEncoded,
    Disconnected,
    EntryStored,
    Event,
    FragmentReplaced,
    Resumed,
    SampleTaken,
    Saved,
    SnapshotLoaded,
    StepDone,
    StopRequested,
    UploadDone,
    UploadFailed,
    UploadSent,
    VotePersisted,
)
from geo_diloco.protocol.messages import BlobRef, FragmentHead
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.pieces import blob_ref
from geo_diloco.sim.train.disk import MemberDisk, Saving, checkpoint_from
from geo_diloco.sim.train.fleet import Machine
from geo_diloco.sim.train.syncer import SyncerProcess
from geo_diloco.sim.train.training import Start, Training
from geo_diloco.sim.train.world import CUT_NOTICED_MS, FSYNC_MS, WORK_MS, ControlLink, Process, World
from geo_diloco.training.checkpoint import LearnerCheckpoint
from geo_diloco.training.learner import AdoptOrder, ResetOrder, SampleOrder
from geo_diloco.training.reports import Report

RETRY_MS = 500
"""Between two tries to reach the syncer."""
SNAPSHOT_RETRY_MS = 10
"""Between two tries to take a fragment while an entry is under way."""
SAVE_MS = 50
"""Writing a checkpoint."""
SAVE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class MemberParts:
    """What every process of one learner begins with."""

    peer: PeerId
    machine: Machine
    syncer: SyncerProcess
    model: nn.Module
    disk: MemberDisk


class MemberProcess(Process):
    """One process start of a learner."""

    def __init__(self, world: World, parts: MemberParts) -> None:
        super().__init__(world, parts.peer, "learner", hello=HelloFacts(host="learner"), seat=Seat())
        self._parts = parts
        self._syncer = parts.syncer
        self.machine = parts.machine
        self._disk = parts.disk
        self._link: ControlLink | None = None
        self._outer = OuterState(world.layout, with_momentum=False, with_residual=False)
        self._training: Training | None = None
        self._saves: dict[int, LearnerCheckpoint] = {}
        self._updates: dict[BlobRef, bytes] = {}
        """Fetched, not folded yet."""
        self._fold_free_at = 0
        self._down_free_at = 0

    # ---- start and end

    def start(self, *, founding: bool = False) -> None:
        """From the own checkpoint if there is one, else from the syncer's snapshot, which takes its time on the link;
        `founding`: not, for Theta_0 was here before the run began."""
        saving = self._disk.saving
        if saving is None:
            self._from_syncer(lambda: self._start_from_snapshot(founding=founding))
            return
        accounts = saving.accounts
        theta = [bytes_from_vector(saving.state.tensors[f"anchor.{p}"]) for p in self._fragments]
        self._begin(accounts.resume_at, theta, saving.state)
        self.handle(Resumed(accounts.step, accounts.tokens, accounts.accounts, *self._disk.lost_since(saving)))
        self.clock.after(2 * self.machine.delay_ms, self._connect)

    def _start_from_snapshot(self, *, founding: bool) -> bool:
        snapshot = self._syncer.snapshot()
        if snapshot is None:
            return False
        theta = [self._syncer.theta(p) for p in self._fragments]

        def begin() -> None:
            self._begin(snapshot, theta, None)
            self._connect()

        if founding:
            begin()
        else:
            self._fetch(sum(len(each) for each in theta), begin)
        return True

    @property
    def _fragments(self) -> list[FragmentId]:
        return [FragmentId(p) for p in range(self.world.layout.num_fragments)]

    def _begin(self, snapshot: SnapshotLoaded, theta: list[bytes], checkpoint: LearnerCheckpoint | None) -> None:
        """The outer state stands at the snapshot. There is no more of the chain on this disk."""
        for fragment in self._fragments:
            self._load(fragment, snapshot.heads[fragment], theta[fragment])
        start = Start(
            model=self._parts.model,
            theta=[self._outer.theta(fragment) for fragment in self._fragments],
            checkpoint=checkpoint,
            machine=self.machine,
            save_every_s=SAVE_EVERY_S if self._disk.keeps_checkpoints else 0.0,
            receive=self._receive,
            progress=lambda: self.core.ledger.progress,
        )
        self._training = Training(self.world, start)
        self.handle(snapshot)
        self.handle(ChainLoaded())

    def _load(self, fragment: FragmentId, head: FragmentHead, theta: bytes) -> None:
        self._outer.load_fragment(
            fragment,
            head.version,
            theta=theta,
            momentum=None,
            state_digest=head.state_digest,
            momentum_digest=head.momentum_digest,
        )

    def crash(self) -> None:
        """The process dies; the disk stays."""
        if not self.is_alive:
            return
        self.is_alive = False
        if self._training is not None:
            self._training.stop()
        if self._link is not None:
            self._link.break_off(noticed_ms=self.machine.delay_ms)

    def leave(self) -> None:
        """In good order: what is sampled is handed in, then Goodbye."""
        self.handle(StopRequested("the token budget is spent"))

    def freeze(self) -> None:
        super().freeze()
        if self._training is not None:
            self._training.freeze()

    def thaw(self) -> None:
        super().thaw()
        if self._training is not None:
            self._training.thaw()

    @property
    def is_at_rest(self) -> bool:
        return self._training is None or self._training.is_at_rest

    @property
    def num_steps(self) -> int:
        return 0 if self._training is None else self._training.num_steps

    # ---- connections

    def _connect(self) -> None:
        """There is nobody but the founder to look for."""
        if not self.is_alive or self._link is not None or not self.core.seeks:
            return
        if self._is_out_of_reach:
            self.clock.after(RETRY_MS, self._connect)
            return
        self._link = ControlLink(self, self._syncer, self.machine.delay_ms)
        self._syncer.links[self.peer] = self._link
        self._syncer.handle(Connected(self.peer))
        self.handle(Connected(self._syncer.peer, seeking=True))

    def _seek(self) -> None:
        self._link = None
        self.clock.after(RETRY_MS, self._connect)

    def lost(self, link: ControlLink) -> None:
        if self._link is link:
            self.handle(Disconnected(self._syncer.peer, "cut"))
            self._seek()

    @property
    def _is_out_of_reach(self) -> bool:
        return self.is_frozen or self.peer in self.world.cut

    def lose_link(self) -> None:
        if self._link is not None:
            self._link.break_off(noticed_ms=CUT_NOTICED_MS)

    def handle(self, event: Event) -> None:
        if self.is_alive and not self.is_frozen and isinstance(event, StepDone):
            self._disk.steps_heard, self._disk.tokens_heard = event.step, event.tokens
        super().handle(event)

    def _from_syncer(self, ask: Callable[[], bool]) -> None:
        """Ask for something small until it works; `ask` says whether it did."""

        def attempt() -> None:
            if not self.is_alive:
                return
            if self._is_out_of_reach or not ask():
                self.clock.after(RETRY_MS, attempt)

        self.clock.after(2 * self.machine.delay_ms, attempt)

    def _fetch(self, num_bytes: int, arrived: Callable[[], None]) -> None:
        """Ask for something large; one after another on the way down."""
        begins_at = max(self.clock.now + self.machine.delay_ms, self._down_free_at)
        self._down_free_at = begins_at + self.machine.down_ms(num_bytes)

        def attempt() -> None:
            if not self.is_alive:
                return
            if self._is_out_of_reach:
                self.clock.after(RETRY_MS, attempt)
            else:
                arrived()

        self.clock.at(self._down_free_at + self.machine.delay_ms, attempt)

    # ---- effects

    def do(self, effect: Effect) -> None:
        match effect:
            case Send():
                if self._link is not None:
                    self._link.send(self, effect)
            case CloseConnection():
                if self._link is not None:
                    self._link.close_when_sent()
            case PersistVote():
                self.handle_after(FSYNC_MS, VotePersisted(effect.number))  # and forgotten: it never votes
            case SeekSyncer():
                self._seek()
            case FetchEntries():
                self._from_syncer(lambda: self._take_entries(effect.from_seq))
            case KeepEntry():
                self._keep(effect)
            case ApplyUpdate():
                self._on_fold(lambda: self._apply(effect))
            case FetchFragment():
                size = 4 * self.world.layout.num_elements[effect.fragment]
                self._fetch(size, lambda: self._take_fragment(effect.fragment))
            case RefusedForGood():
                raise AssertionError(effect.reason)
            case ReadyToLeave() | TokensMerged() | TokensDropped():
                pass
            case _:
                self._do_as_learner(effect)

    def _do_as_learner(self, effect: Effect) -> None:
        training = self._training
        assert training is not None
        match effect:
            case StartTraining():
                training.begin(effect)
            case TakeSample():
                training.post(SampleOrder(effect.fragment, effect.round))
            case Adopt():
                mine = None if effect.participant is None else self._decode(effect.participant, effect.fragment)
                theta_N = self._theta(effect)
                training.post(AdoptOrder(effect.fragment, effect.version, theta_N, mine, effect.rbar))
            case Reset():
                training.post(ResetOrder(effect.fragment, effect.version, self._theta(effect)))
            case Upload():
                self._upload(effect.blob)
            case ForgetBlob():
                self._disk.forget(effect.blob)
            case PersistAccounts():
                saving = Saving(effect, self._saves.pop(effect.save))
                self.clock.after(SAVE_MS, lambda: self._disk.save(saving) if self.is_alive else None)
            case RunFinished():
                training.finish(effect.reason)
            case _:
                raise AssertionError(f"not for a learner: {effect!r}")

    def _theta(self, effect: Adopt | Reset) -> Tensor:
        """The core orders an adoption in the moment in which the fold reaches its version."""
        assert self._outer.version(effect.fragment) == effect.version
        return self._outer.theta(effect.fragment)

    def _decode(self, blob: BlobRef, fragment: FragmentId) -> Tensor:
        layout = self.world.layout
        return codec.decode(
            self._disk.contributions[blob],
            num_elements=layout.num_elements[fragment],
            layout_digest=layout.digest,
            fragment=fragment,
        )

    # ---- following

    def _take_entries(self, from_seq: int) -> bool:
        for event in self._syncer.entries(from_seq):
            self.handle(event)
        return True

    def _keep(self, effect: KeepEntry) -> None:
        """No fsync: this disk is no elector's."""
        update, stored = effect.update, EntryStored(effect.digest)
        if update is None:
            self.handle_after(0, stored)
            return

        def arrived() -> None:
            self._updates[update] = self._syncer.updates[update]
            self.handle(stored)

        self._fetch(update.size, arrived)

    def _on_fold(self, action: Callable[[], None]) -> None:
        """On the worker thread: one at a time, in the order asked for."""
        self._fold_free_at = max(self.clock.now, self._fold_free_at) + WORK_MS
        self.clock.at(self._fold_free_at, lambda: action() if self.is_alive else None)

    def _apply(self, effect: ApplyUpdate) -> None:
        self._outer.apply(effect, self._updates.pop(effect.update))
        self.handle(Applied(effect.fragment, effect.version, effect.state_digest))

    def _take_fragment(self, fragment: FragmentId) -> None:
        """It may be of a version that is not durable yet, as far as is known here: then it waits."""
        snapshot = self._syncer.snapshot()
        if snapshot is None:
            self.clock.after(SNAPSHOT_RETRY_MS, lambda: self._take_fragment(fragment))
            return
        head, theta = snapshot.heads[fragment], self._syncer.theta(fragment)

        def replace() -> None:
            if not self.is_alive:
                return
            if self.core.ledger.heads[fragment].version < head.version:
                self.clock.after(SNAPSHOT_RETRY_MS, lambda: self._on_fold(replace))
                return
            self._load(fragment, head, theta)
            self.handle(FragmentReplaced(fragment, head.version, head.state_digest))

        self._on_fold(replace)

    # ---- reports, contributions, checkpoints

    def _receive(self, report: Report) -> None:
        if not self.is_alive:
            return
        event = report.event
        if isinstance(event, Saved):
            self._saves[event.save] = checkpoint_from(report)
        self.handle(event)
        if isinstance(event, SampleTaken) and report.delta is not None:
            delta_N, spec = report.delta, self.core.codec_for(event.fragment)
            self._on_fold(lambda: self._encode(event, delta_N, spec))

    def _encode(self, event: SampleTaken, delta_N: Tensor, spec: CodecSpec) -> None:
        layout = self.world.layout
        frame = codec.encode(delta_N, spec, layout_digest=layout.digest, fragment=event.fragment)
        blob = blob_ref(frame)
        self._disk.contributions[blob] = frame
        norm = float(torch.linalg.vector_norm(delta_N, dtype=torch.float64))
        self.handle(DeltaEncoded(event.fragment, event.round, blob, norm))

    def _upload(self, blob: BlobRef) -> None:
        ms = self.machine.up_ms(blob.size)

        def arrives() -> None:
            frame = self._disk.contributions.get(blob)
            if not self.is_alive:
                return
            if self._is_out_of_reach:
                self.clock.after(RETRY_MS, arrives)
            elif frame is not None and self._syncer.take_blob(blob, frame):
                self.handle_after(self.machine.delay_ms, UploadDone(blob, 1000 * blob.size // max(1, ms)))
            else:
                self.handle_after(self.machine.delay_ms, UploadFailed(blob, "not announced"))

        self.handle_after(ms, UploadSent(blob))
        self.clock.after(ms + self.machine.delay_ms, arrives)
