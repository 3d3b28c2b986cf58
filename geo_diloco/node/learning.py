"""The learner's hands: turns the core's effects into orders for the training thread, and its reports into events.

Tensors take the worker thread, so orders of a fragment reach the training thread in the order in which the core asked
for them. A contribution's blob outlives its decision by two checkpoints: a process that dies resumes from a checkpoint
that may still need it, to subtract what the merge has taken.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from geo_diloco.errors import BlobError, ModelError, NonFiniteFrame, RefusedError, RunDirError, TransferError
from geo_diloco.manifest import CodecSpec, Digest, FragmentId, RunManifest
from geo_diloco.node.mailbox import Mailbox
from geo_diloco.numerics import codec
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import (
    Adopt,
    ForgetBlob,
    PersistAccounts,
    RefusedForGood,
    Reset,
    RunFinished,
    StartTraining,
    TakeSample,
    Upload,
)
from geo_diloco.protocol.events import (
    DeltaEncoded,
    SampleTaken,
    Saved,
    SnapshotKept,
    UploadDone,
    UploadFailed,
    UploadSent,
)
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.donor import Donors
from geo_diloco.runtime.driver import Driver, Interpreter, Worker
from geo_diloco.runtime.following import Backoff, Following
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.session import TransferRefused
from geo_diloco.runtime.store import BlobStore
from geo_diloco.tape import to_json
from geo_diloco.training.checkpoint import KEPT, save_learner
from geo_diloco.training.learner import AdoptOrder, ResetOrder, SampleOrder
from geo_diloco.training.reports import Report


@dataclass(frozen=True, kw_only=True)
class LearningParts:
    """What a learner's side works with."""

    driver: Driver
    worker: Worker
    outer: OuterState
    store: BlobStore
    donor: Donors
    following: Following
    manifest: RunManifest
    checkpoints: Path
    log: EventLog
    connection: Callable[[], int]
    """A number that changes with every control connection; 0 while there is none."""


class Learning:
    """Interprets a learner's effects and receives its training thread's reports. For the loop's thread."""

    def __init__(self, parts: LearningParts) -> None:
        self._p = parts
        self.mailbox = Mailbox(asyncio.get_running_loop(), self.receive)
        self.started = asyncio.Event()
        """Admitted, or the run is over."""
        self.finished = asyncio.Event()
        self.allotment: StartTraining | None = None
        self.refused: RefusedError | None = None
        self._saves: dict[int, Report] = {}
        self._saving = asyncio.Lock()
        self._num_saved = 0
        self._saved = asyncio.Condition()
        self._newest_saved = 0
        self._not_saved: tuple[int, RunDirError | None] = (0, None)
        self._untried: set[BlobRef] = set()
        """Contributions that nobody can have any of yet."""
        self._forgotten: deque[tuple[int, BlobRef]] = deque()

    def interpreters(self) -> Mapping[type, Interpreter]:
        start = self._p.driver.start
        return {
            StartTraining: self._start_training,
            TakeSample: lambda effect: self.mailbox.post(SampleOrder(effect.fragment, effect.round)),
            Upload: lambda effect: start(self._upload(effect), name="upload"),
            Adopt: lambda effect: start(self._adopt(effect), name="adopt"),
            Reset: lambda effect: start(self._reset(effect), name="reset"),
            PersistAccounts: lambda effect: start(self._persist(effect), name="save"),
            ForgetBlob: self._forget,
            RunFinished: self._run_finished,
            RefusedForGood: self._refuse,
        }

    # ---- orders

    def _start_training(self, effect: StartTraining) -> None:
        self.allotment = effect
        self.started.set()

    async def _adopt(self, effect: Adopt) -> None:
        p = self._p

        def d_hat() -> Tensor | None:
            return None if effect.participant is None else self._decode(effect.participant, effect.fragment)

        try:
            decoded = await p.worker.call(d_hat)
        except BlobError as exc:
            # What was merged can't be subtracted, so nothing may be carried: the work counts once, in the merge.
            p.log.note("adopt", f"own contribution is gone, carrying nothing: {exc}", level="warning")
            await self._reset(Reset(effect.fragment, effect.version))
            return
        theta = p.following.theta(effect.fragment, effect.version)
        self.mailbox.post(AdoptOrder(effect.fragment, effect.version, theta, decoded, effect.rbar))

    def _decode(self, blob: BlobRef, fragment: FragmentId) -> Tensor:
        layout = self._p.outer.layout
        return codec.decode(
            self._p.store.get(blob),
            num_elements=layout.num_elements[fragment],
            layout_digest=layout.digest,
            fragment=fragment,
        )

    async def _reset(self, effect: Reset) -> None:
        await self._p.worker.call(lambda: None)  # keeps its place behind adoptions
        theta = self._p.following.theta(effect.fragment, effect.version)
        self.mailbox.post(ResetOrder(effect.fragment, effect.version, theta))

    def _run_finished(self, effect: RunFinished) -> None:
        async def finish() -> None:
            await self._p.worker.call(lambda: None)  # after the adoptions before it
            self.mailbox.finish(effect.reason)
            self.finished.set()
            self.started.set()

        self._p.driver.start(finish(), name="finish")

    def _refuse(self, effect: RefusedForGood) -> None:
        self.refused = RefusedError(effect.reason)
        self.mailbox.fail(self.refused)
        self.started.set()

    # ---- reports

    def receive(self, report: Report) -> None:
        """From the training thread, in order."""
        p = self._p
        event = report.event
        if isinstance(event, Saved):
            self._saves[event.save] = report
        p.driver.feed(event)
        if isinstance(event, SampleTaken) and report.delta is not None:
            spec = p.driver.core.codec_for(event.fragment)
            p.driver.start(self._encode(event, report.delta, spec), name="encode")
        self.mailbox.set_progress(p.driver.core.ledger.progress)

    async def _encode(self, event: SampleTaken, delta: Tensor, spec: CodecSpec) -> None:
        p, layout = self._p, self._p.outer.layout

        def encode() -> tuple[BlobRef, float]:
            frame = codec.encode(delta, spec, layout_digest=layout.digest, fragment=event.fragment)
            blob = p.store.put(frame)
            return blob, float(torch.linalg.vector_norm(delta, dtype=torch.float64))

        backoff = Backoff()
        while True:
            try:
                blob, norm = await p.worker.call(encode)
                break
            except BlobError as exc:
                p.log.note("contribution", f"can't be kept, trying again: {exc}", level="warning")
                await backoff.wait()
            except NonFiniteFrame as exc:
                raise ModelError(
                    f"this learner's model diverged: fragment {event.fragment} has values that are NaN or infinite "
                    f"after step {event.step}, so it can't be merged. Lower the learning rate; to begin again from the "
                    f"run's state, remove {p.checkpoints}"
                ) from exc
        self._untried.add(blob)
        p.driver.feed(DeltaEncoded(event.fragment, event.round, blob, norm))

    async def _upload(self, effect: Upload) -> None:
        """Until the collector has it or refuses it. A refusal that a broken connection explains is no refusal: the
        syncer may not have heard the announcement."""
        p, blob = self._p, effect.blob
        backoff = Backoff()
        while True:
            connection = p.connection()
            is_new = blob in self._untried
            self._untried.discard(blob)
            try:
                rate = await p.donor.upload(
                    blob, effect.collect_at, is_new=is_new, on_sent=lambda: p.driver.feed(UploadSent(blob))
                )
            except TransferRefused as exc:
                if connection == p.connection() != 0 or not p.store.has(blob):
                    p.driver.feed(UploadFailed(blob, str(exc)))
                    return
            except TransferError as exc:
                is_known = p.connection() == 0  # that the syncer is lost was said, and is why
                text = f"a contribution could not be handed in, trying again: {exc}"
                p.log.note("upload", text, level="debug" if is_known else "warning")
            else:
                p.driver.feed(UploadDone(blob, rate))
                return
            await backoff.wait()

    # ---- checkpoints

    async def _persist(self, effect: PersistAccounts) -> None:
        report = self._saves.pop(effect.save)
        assert report.tensors is not None and report.extra is not None
        accounts_json = json.dumps(to_json(effect), separators=(",", ":"))
        try:
            async with self._saving:
                await asyncio.to_thread(save_learner, self._p.checkpoints, report.tensors, report.extra, accounts_json)
        except RunDirError as exc:
            self._p.log.note("save", f"no checkpoint now, the one before stays: {exc}", level="warning")
            async with self._saved:
                self._not_saved = effect.save, exc
                self._saved.notify_all()
            return
        self._num_saved += 1
        self._p.driver.feed(SnapshotKept(effect.resume_at.seq))
        while self._forgotten and self._forgotten[0][0] + KEPT < self._num_saved:
            self._p.store.delete(self._forgotten.popleft()[1])
        async with self._saved:
            self._newest_saved = max(self._newest_saved, effect.save)
            self._saved.notify_all()

    async def wait_saved(self, save: int) -> None:
        """Until checkpoint `save` or a later one is on disk. Raises RunDirError if the disk does not take it."""
        async with self._saved:
            await self._saved.wait_for(lambda: max(self._newest_saved, self._not_saved[0]) >= save)
        if self._newest_saved < save and self._not_saved[1] is not None:
            raise self._not_saved[1]

    def _forget(self, effect: ForgetBlob) -> None:
        self._untried.discard(effect.blob)
        self._forgotten.append((self._num_saved, effect.blob))


def blobs_to_keep(digests: set[Digest], accounts: PersistAccounts | None) -> set[Digest]:
    """What a learner's blob store must keep at start: known updates, and contributions without a decision."""
    undecided = [] if accounts is None else [each.undecided for each in accounts.accounts if each.undecided is not None]
    return digests | {each.contribution.blob.digest for each in undecided}
