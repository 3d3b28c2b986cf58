"""A simulated learner's shell: orders to the training thread, its reports, encodings, uploads, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_diloco.protocol.effects import (
    Adopt,
    Effect,
    ForgetBlob,
    PersistAccounts,
    Reset,
    StartTraining,
    TakeSample,
    Upload,
)
from geo_diloco.protocol.events import (
    DeltaEncoded,
    Event,
    SampleTaken,
    Saved,
    SnapshotKept,
    UploadDone,
    UploadFailed,
    UploadSent,
)
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.sim.disk import Checkpoint
from geo_diloco.sim.fakes import fake_digest
from geo_diloco.sim.training import Training
from geo_diloco.sim.uplinks import SharedLine
from geo_diloco.sim.work import Replica, Work

if TYPE_CHECKING:
    from geo_diloco.sim.process import Process

UPLOAD_TRIES = 8
DELTA_BYTES = 10_000


class LearnHands:
    """What a learner's shell does beyond any other's."""

    def __init__(self, process: Process, step_ms: int) -> None:
        self._process = process
        self.training = Training(process, step_ms)
        self._replicas: dict[int, Replica] = {}
        self._cancelled: set[BlobRef] = set()
        self._line = SharedLine(process.clock, process.host.plan.ahead_ms)
        self._over_at = 0
        """When the last upload over a line was confirmed."""

    def resume(self, checkpoint: Checkpoint) -> None:
        self.training.resume(checkpoint)

    def do(self, effect: Effect) -> bool:
        process, training = self._process, self.training
        match effect:
            case StartTraining():
                training.start(effect)
            case TakeSample():
                training.order(effect)
            case Adopt() | Reset():
                process.on_fold(lambda: training.order(effect))
            case Upload() if process.host.plan.uplink_ms:
                self._upload_by_line(effect.blob)
            case Upload():
                self._upload(effect.blob, 0)
            case ForgetBlob():
                if process.world.plan.forgets_uploads:
                    self._cancelled.add(effect.blob)
            case PersistAccounts():
                checkpoint = Checkpoint(effect, self._replicas.pop(effect.save))
                process.clock.after(process.clock.between((5, 400)), lambda: self._saved(checkpoint))
            case _:
                return False
        return True

    def report(self, event: Event, *, delta: Work | None = None, replica: Replica | None = None) -> None:
        """From the training thread, in order; the thread hop takes a moment."""
        self._process.clock.after(2, lambda: self._take_report(event, delta, replica))

    def _take_report(self, event: Event, delta: Work | None, replica: Replica | None) -> None:
        process = self._process
        if not process.alive:
            return
        if isinstance(event, Saved) and replica is not None:
            self._replicas[event.save] = replica
        process.handle(event)
        if isinstance(event, SampleTaken) and delta is not None and not process.host.plan.is_mute:
            process.on_fold(lambda: self._encode(event, delta))

    def _encode(self, event: SampleTaken, delta: Work) -> None:
        process, world = self._process, self._process.world
        blob = BlobRef(fake_digest("delta", process.boot, event, sorted(delta.items())), DELTA_BYTES)
        world.contents[blob.digest] = delta
        if world.mishap(world.plan.odds.bad_frame):
            world.bad_blobs.add(blob.digest)
        process.handle(DeltaEncoded(event.fragment, event.round, blob, 1.0))

    # -- uploads --------------------------------------------------------------------------------------------------

    def _upload(self, blob: BlobRef, tries: int, takes_ms: int = 0) -> None:
        clock, own_ms = self._process.clock, self._process.host.plan.upload_ms
        usual_ms = (own_ms - own_ms // 20, own_ms + own_ms // 20) if own_ms else self._process.world.plan.transfer_ms
        ms = clock.between(usual_ms) if tries == 0 else min(1_000, 20 << tries)
        takes_ms = takes_ms or ms
        clock.after(ms, lambda: self._upload_sent(blob))
        clock.after(ms, lambda: self._upload_ends(blob, tries, takes_ms))

    def _upload_by_line(self, blob: BlobRef) -> None:
        clock, began_at = self._process.clock, self._process.clock.now
        sent_at = began_at

        def sent() -> None:
            nonlocal sent_at
            sent_at = clock.now
            if blob not in self._cancelled:
                self._process.handle(UploadSent(blob))

        def arrived() -> None:
            """The rate that comes of it is that of `transfer.upload_bytes_per_s`."""
            over_at, self._over_at = self._over_at, clock.now
            took_ms = max(clock.now - max(began_at, over_at), sent_at - began_at, 1)
            self._upload_ends(blob, 0, took_ms)

        own_ms = self._process.host.plan.upload_ms
        self._line.begin(self._process.host.plan.uplink_ms, sent=sent, done=lambda: clock.after(own_ms, arrived))

    def _upload_sent(self, blob: BlobRef) -> None:
        """Said again at every try, late, or not at all."""
        clock, delay_ms = self._process.clock, self._process.world.plan.delay_ms
        if blob not in self._cancelled and clock.between((0, 9)):
            self._process.handle_after(clock.between((0, 2 * delay_ms[1])), UploadSent(blob))

    def _upload_ends(self, blob: BlobRef, tries: int, takes_ms: int) -> None:
        process, world = self._process, self._process.world
        if not process.alive or blob in self._cancelled:
            return
        syncer = world.collector(process)
        if syncer is None or process.frozen:
            process.clock.after(500, lambda: self._upload_ends(blob, tries, takes_ms))
        elif world.mishap(world.plan.odds.upload_failed):
            process.handle(UploadFailed(blob, "refused for good"))
        elif syncer.serve.upload_ended(blob):
            done = UploadDone(blob, 1000 * blob.size // takes_ms)
            process.handle_after(process.clock.between(world.plan.delay_ms), done)
        elif tries >= UPLOAD_TRIES:
            process.handle(UploadFailed(blob, "not announced"))
        else:
            self._upload(blob, tries + 1, takes_ms)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _saved(self, checkpoint: Checkpoint) -> None:
        if not self._process.alive:
            return
        self._process.disk.checkpoint = checkpoint
        self._process.world.saved(self._process, checkpoint.accounts.save)
        self._process.handle(SnapshotKept(checkpoint.accounts.resume_at.seq))
