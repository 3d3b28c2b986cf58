"""A learner's shell: its link, its fetches, the fold, its orders and uploads, and the disk that outlives it.

What `node/learning.py` and `runtime/following.py` do with sockets and threads is done here on the clock; tensors,
frames and checkpoints are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geo_diloco.manifest import FragmentId, PeerId, Seq, Version
from geo_diloco.numerics import codec
from geo_diloco.numerics.fragments import bytes_from_vector
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
    Connected,
    DeltaEncoded,
    Disconnected,
    Event,
    FragmentReplaced,
    Resumed,
    SampleTaken,
    Saved,
    StepDone,
    StopRequested,
    UpdateFetched,
    UploadDone,
    UploadFailed,
)
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.pieces import blob_ref
from geo_diloco.sim.train.disk import MemberDisk, Saving, checkpoint_from
from geo_diloco.sim.train.fleet import Machine
from geo_diloco.sim.train.syncer import SyncerProcess
from geo_diloco.sim.train.training import Start, Training
from geo_diloco.sim.train.world import CUT_NOTICED_MS, WORK_MS, ControlLink, Process, World
from geo_diloco.training.checkpoint import LearnerCheckpoint
from geo_diloco.training.learner import AdoptOrder, ResetOrder, SampleOrder
from geo_diloco.training.reports import Report

RETRY_MS = 500
"""Between two tries to reach the syncer."""
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
        super().__init__(world, parts.peer, "learner")
        self._parts = parts
        self._syncer = parts.syncer
        self.machine = parts.machine
        self._disk = parts.disk
        self._link: ControlLink | None = None
        self._outer = OuterState(world.layout, with_momentum=False, with_residual=False)
        self._training: Training | None = None
        self._saves: dict[int, LearnerCheckpoint] = {}
        self._fetched: dict[tuple[FragmentId, Version], bytes] = {}
        self._fold_free_at = 0
        self._down_free_at = 0
        self._is_leaving = False

    # ---- start and end

    def start(self) -> None:
        """From the own checkpoint if there is one, else from the syncer's snapshot."""
        saving = self._disk.saving
        if saving is None:
            self._from_syncer(self._start_from_snapshot)
            return
        accounts = saving.accounts
        for p, head in enumerate(accounts.resume_at.heads):
            self._outer.load_fragment(
                FragmentId(p),
                head.version,
                theta=bytes_from_vector(saving.state.tensors[f"anchor.{p}"]),
                momentum=None,
                state_digest=head.state_digest,
                momentum_digest=head.momentum_digest,
            )
        self._begin(saving.state)
        self.handle(accounts.resume_at)
        self.handle(Resumed(accounts.step, accounts.tokens, accounts.accounts, *self._disk.lost_since(saving)))
        self._from_syncer(lambda: self._take_entries(accounts.resume_at.seq + 1))
        self._connect()

    def _start_from_snapshot(self) -> bool:
        snapshot = self._syncer.snapshot()
        if snapshot is None:
            return False
        for p in range(self.world.layout.num_fragments):
            self._syncer.load_fragment(self._outer, FragmentId(p))
        self._begin(None)
        self.handle(snapshot)
        self._connect()
        return True

    def _begin(self, checkpoint: LearnerCheckpoint | None) -> None:
        fragments = range(self.world.layout.num_fragments)
        start = Start(
            model=self._parts.model,
            theta=[self._outer.theta(FragmentId(p)) for p in fragments],
            checkpoint=checkpoint,
            step_ms=self.machine.step_ms,
            save_every_s=SAVE_EVERY_S if self._disk.keeps_checkpoints else 0.0,
            receive=self._receive,
            progress=lambda: self.core.ledger.progress,
        )
        self._training = Training(self.world, start)

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
        self._is_leaving = True
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
        if not self.is_alive or self._link is not None:
            return
        if self._is_out_of_reach:
            self.clock.after(RETRY_MS, self._connect)
            return
        self._link = ControlLink(self, self._syncer, self.machine.delay_ms)
        self._syncer.links[self.peer] = self._link
        self.handle(Connected(self._syncer.peer))

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
        if isinstance(event, Disconnected) and not self._is_leaving:
            self._link = None
            self.clock.after(RETRY_MS, self._connect)

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
                    self._link.send(self, effect.message, effect.branch, effect.term)
            case CloseConnection():
                if self._link is not None:
                    self._link.close_when_sent()
            case FetchEntries():
                self._from_syncer(lambda: self._take_entries(effect.from_seq))
            case FetchUpdate():
                self._fetch(effect.blob.size, lambda: self._update_here(effect))
            case ApplyUpdate():
                self._on_fold(lambda: self._apply(effect))
            case FetchFragment():
                size = 4 * self.world.layout.num_elements[effect.fragment]
                self._fetch(size, lambda: self._on_fold(lambda: self._replace(effect)))
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

    def _update_here(self, effect: FetchUpdate) -> None:
        self._fetched[effect.fragment, effect.version] = self._syncer.updates[effect.blob]
        self.handle(UpdateFetched(effect.fragment, effect.version))

    def _on_fold(self, action: Callable[[], None]) -> None:
        """On the worker thread: one at a time, in the order asked for."""
        self._fold_free_at = max(self.clock.now, self._fold_free_at) + WORK_MS
        self.clock.at(self._fold_free_at, lambda: action() if self.is_alive else None)

    def _apply(self, effect: ApplyUpdate) -> None:
        self._outer.apply(effect, self._fetched.pop((effect.fragment, effect.version)))
        self.handle(Applied(effect.fragment, effect.version, effect.state_digest))

    def _replace(self, effect: FetchFragment) -> None:
        """The chain is brought to the snapshot's seq first, so that no commit that it holds comes after it."""
        self._take_entries(Seq(self.core.ledger.seq + 1))
        version = self._syncer.load_fragment(self._outer, effect.fragment)
        digest = self.core.ledger.heads[effect.fragment].state_digest
        self.handle(FragmentReplaced(effect.fragment, version, digest))

    # ---- reports, contributions, checkpoints

    def _receive(self, report: Report) -> None:
        if not self.is_alive:
            return
        event = report.event
        if isinstance(event, Saved):
            self._saves[event.save] = checkpoint_from(report)
        self.handle(event)
        if isinstance(event, SampleTaken) and report.delta is not None:
            delta_N = report.delta
            self._on_fold(lambda: self._encode(event, delta_N))

    def _encode(self, event: SampleTaken, delta_N: Tensor) -> None:
        layout = self.world.layout
        frame = codec.encode(
            delta_N, self.world.manifest.codec_up, layout_digest=layout.digest, fragment=event.fragment
        )
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

        self.clock.after(ms + self.machine.delay_ms, arrives)
