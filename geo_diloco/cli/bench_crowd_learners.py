"""The learners of `bench syncer`, many in one process: each with its own key, core, control connection and uploads.

All that is said is said by production code: the learner's core decides, `Links` and `ControlLink` talk, `Donors` and
`transfer` move blobs. What a learner does by itself is not there: no model, no training thread, no disk for the chain.
An inner step is a wait, a delta is noise in a real frame, and a new version is believed. An entry is the same for all
of them, so it is parsed and verified once for each process.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from geo_diloco.errors import GeoDilocoError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import BootId, Digest, FragmentId, PeerId, RunId, RunManifest
from geo_diloco.numerics import codec
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import (
    Adopt,
    ApplyUpdate,
    FetchEntries,
    FetchFragment,
    ForgetBlob,
    KeepEntry,
    RefusedForGood,
    Reset,
    StartTraining,
    TakeSample,
    Upload,
)
from geo_diloco.protocol.events import (
    Adopted,
    Applied,
    ChainLoaded,
    DeltaEncoded,
    EntryArrived,
    EntryStored,
    FragmentReplaced,
    SampleTaken,
    SnapshotLoaded,
    StepDone,
    UploadDone,
    UploadFailed,
)
from geo_diloco.protocol.messages import Entry, Message, Welcome
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.control import connect_control
from geo_diloco.runtime.donor import Donors
from geo_diloco.runtime.driver import Driver
from geo_diloco.runtime.following import Backoff
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.links import NONCE, Links, Sealer
from geo_diloco.runtime.proof import PROOF_ENTRIES_MAX, check_snapshot, read_proof
from geo_diloco.runtime.session import (
    ByteCounters,
    Session,
    TransferRefused,
    fetch_manifest,
    fetch_proof,
    fetch_snapshot,
    make_session,
)
from geo_diloco.runtime.snapshots import loaded_from
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed, open_entry, open_snapshot
from geo_diloco.tape import Boot

TOKENS_PER_STEP = 64
NOISE = 1e-4
SAY_EVERY_S = 1.0
DIALS_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """What the learners of one process have in common."""

    url: str
    session: Session
    run: RunId
    manifest: RunManifest
    founder: PeerId
    begin: SnapshotLoaded
    folder: Path
    step_s: float
    log: EventLog = field(default_factory=lambda: EventLog(level="error"))
    counters: ByteCounters = field(default_factory=ByteCounters)
    endings: Counter[str] = field(default_factory=Counter)
    """Of connections, and of tries to make one."""
    dialing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DIALS_AT_ONCE))


@lru_cache(maxsize=64)
def _opened(signed: Signed) -> tuple[Entry, Digest]:
    return open_entry(signed), signed.digest


class CrowdLearner:
    """One learner. For the event loop's thread."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self._crowd = crowd
        self._identity = Identity.generate()
        boot = Boot(
            peer=self._identity.peer_id,
            boot=BootId(secrets.token_hex(8)),
            role="learner",
            run=crowd.run,
            layout_digest=crowd.begin.layout_digest,
            hello=HelloFacts(host=f"crowd {number}", software="bench"),
            seat=Seat(),
            rules=crowd.manifest.rules(),
        )
        self.driver = Driver(boot.fresh_core(), log=crowd.log)
        bulk = Bulk(crowd.session, counters=crowd.counters)
        self._store = BlobStore(crowd.folder / str(number))
        self._donors = Donors(bulk, self._store, own=self._identity.peer_id)
        self._links = Links(
            self.driver,
            Sealer(self._identity, run=crowd.run, boot=boot.boot),
            connect=lambda url, peer: connect_control(
                crowd.session, url, self._identity, crowd.run, expected_peer=peer, counters=crowd.counters
            ),
            url_of=lambda peer: None,
            take_entry=self._take_entry,
            heard=self._heard,
            log=crowd.log,
        )
        self.is_welcome = False
        self.uploads = 0
        self._is_training = False
        self._step = self._tokens = self._cursor = 0
        self._orders: deque[TakeSample | Adopt | Reset] = deque()
        start = self.driver.start
        self.driver.interpret(
            {
                **self._links.interpreters(),
                FetchEntries: lambda effect: start(self._fetch_entries(effect.from_seq), name="fetch entries"),
                KeepEntry: lambda effect: start(self._keep(effect), name="keep"),
                ApplyUpdate: lambda effect: self.driver.feed(
                    Applied(effect.fragment, effect.version, effect.state_digest)
                ),
                FetchFragment: self._replace,
                StartTraining: self._start_training,
                TakeSample: self._orders.append,
                Adopt: self._orders.append,
                Reset: self._orders.append,
                Upload: lambda effect: start(self._upload(effect), name="upload"),
                ForgetBlob: lambda effect: self._store.delete(effect.blob),
                RefusedForGood: self._refused,
            }
        )

    async def run(self) -> None:
        """Until cancelled: a link that ends is dialed again."""
        crowd, backoff = self._crowd, Backoff()
        self.driver.feed(crowd.begin)
        self.driver.feed(ChainLoaded())
        self._donors.found_at(crowd.url)
        while True:
            try:
                crowd.endings[await self._connected()] += 1
            except (TransferError, RemoteProtocolError) as exc:
                crowd.endings[NONCE.sub("", str(exc))] += 1
            self.is_welcome = False
            await backoff.wait()

    async def _connected(self) -> str:
        """Until the connection ends; why. So many are dialed at once."""
        crowd, up = self._crowd, asyncio.Event()
        async with crowd.dialing:
            talking = asyncio.ensure_future(
                self._links.hold(crowd.url, crowd.founder, seeking=True, up=lambda peer: up.set())
            )
            waiting = asyncio.ensure_future(up.wait())
            await asyncio.wait({talking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        return await talking

    # ---- the chain

    def _take_entry(self, signed: Signed) -> None:
        entry, digest = _opened(signed)
        if not self.driver.core.election.knows(digest):
            self.driver.feed(EntryArrived(entry, digest, signed.signer))

    async def _fetch_entries(self, from_seq: int) -> None:
        backoff = Backoff()
        while True:
            try:
                while batch := await self._donors.entries(from_seq, 256):
                    for signed in batch:
                        self._take_entry(signed)
                    from_seq += len(batch)
                return
            except TransferError:
                await backoff.wait()

    async def _keep(self, effect: KeepEntry) -> None:
        backoff = Backoff()
        while effect.update is not None and not self._store.has(effect.update):
            try:
                await self._donors.blob(effect.update)
            except TransferError:
                await backoff.wait()
        self.driver.feed(EntryStored(effect.digest))

    def _replace(self, effect: FetchFragment) -> None:
        head = self.driver.core.ledger.heads[effect.fragment]
        self.driver.feed(FragmentReplaced(effect.fragment, head.version, head.state_digest))

    # ---- training

    def _heard(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, Welcome):
            self.is_welcome = True
            self._donors.serves_at(self._crowd.url)

    def _refused(self, effect: RefusedForGood) -> None:
        raise RefusedError(effect.reason)

    def _start_training(self, effect: StartTraining) -> None:
        self._cursor = effect.cursor
        if not self._is_training:
            self._is_training = True
            self._step = effect.resume_step
            self.driver.start(self._train(), name="train")

    async def _train(self) -> None:
        """The first boundary is anywhere within a step, as if they had begun one by one."""
        step_s = self._crowd.step_s
        await asyncio.sleep(random.uniform(0, step_s))
        while True:
            await asyncio.sleep(step_s * random.uniform(0.95, 1.05))
            self._step += 1
            self._tokens += TOKENS_PER_STEP
            self._cursor += TOKENS_PER_STEP
            self.driver.feed(StepDone(self._step, self._tokens, round(step_s * 1e6), 2.0, self._cursor))
            while self._orders:
                self._carry_out(self._orders.popleft())

    def _carry_out(self, order: TakeSample | Adopt | Reset) -> None:
        if isinstance(order, TakeSample):
            spec = self.driver.core.codec_for(order.fragment)
            self.driver.feed(SampleTaken(order.fragment, order.round, self._step, self._tokens, self._cursor))
            begin = self._crowd.begin
            delta = torch.randn(begin.num_elements[order.fragment]) * NOISE
            frame = codec.encode(delta, spec, layout_digest=begin.layout_digest, fragment=order.fragment)
            norm = float(torch.linalg.vector_norm(delta, dtype=torch.float64))
            self.driver.feed(DeltaEncoded(order.fragment, order.round, self._store.put(frame), norm))
            return
        scale_ppm = 0 if isinstance(order, Reset) else round(self._crowd.manifest.sync.kappa * 1e6)
        fragment = FragmentId(order.fragment)
        self.driver.feed(Adopted(fragment, order.version, self._step, self._tokens, scale_ppm))

    async def _upload(self, effect: Upload) -> None:
        backoff = Backoff()
        while True:
            try:
                rate = await self._donors.upload(effect.blob, effect.collect_at)
            except TransferRefused as exc:
                if self.is_welcome or not self._store.has(effect.blob):
                    self.driver.feed(UploadFailed(effect.blob, str(exc)))
                    return
            except TransferError as exc:
                self._crowd.log.note("upload", str(exc))
            else:
                self.uploads += 1
                self.driver.feed(UploadDone(effect.blob, rate))
                return
            await backoff.wait()


# ---- the process ------------------------------------------------------------------------------------------------


def run_learners(*, url: str, run: RunId, num_learners: int, step_s: float, dial_from: str, folder: Path) -> None:
    """Until it is told to end; a line of JSON each second says how they are."""
    torch.set_num_threads(1)
    asyncio.run(_run(url, run, num_learners, step_s, dial_from, folder))


async def _run(url: str, run: RunId, num_learners: int, step_s: float, dial_from: str, folder: Path) -> None:
    async with make_session(dial_from=dial_from) as session:
        crowd = await _meet(session, url, run, folder, step_s)
        learners = [CrowdLearner(crowd, number) for number in range(num_learners)]
        async with asyncio.TaskGroup() as group:
            group.create_task(_say(crowd, learners))
            for learner in learners:
                group.create_task(learner.run())
                group.create_task(learner.driver.wait_closed())


async def _meet(session: Session, url: str, run: RunId, folder: Path, step_s: float) -> Crowd:
    """The run as a joiner finds it; its tensors are of no interest here."""
    from geo_diloco.config import manifest_from_bytes

    manifest = manifest_from_bytes(await fetch_manifest(session, url, run))
    lines = await fetch_proof(session, url, entries_max=PROOF_ENTRIES_MAX)
    authority = read_proof(lines, run=run, founder=manifest.founder)
    signed = await fetch_snapshot(session, url)
    if signed is None:
        raise GeoDilocoError(f"{url} has no snapshot yet")
    snapshot = open_snapshot(signed)
    check_snapshot(signed, snapshot, authority)
    return Crowd(
        url=url,
        session=session,
        run=run,
        manifest=manifest,
        founder=manifest.founder,
        begin=loaded_from(snapshot, whole_chain=False),
        folder=folder,
        step_s=step_s,
    )


async def _say(crowd: Crowd, learners: Sequence[CrowdLearner]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        wanted_at = loop.time() + SAY_EVERY_S
        await asyncio.sleep(SAY_EVERY_S)
        print(json.dumps({"crowd": _state(crowd, learners) | {"late_s": loop.time() - wanted_at}}), flush=True)


def _state(crowd: Crowd, learners: Sequence[CrowdLearner]) -> dict[str, Any]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "at": time.monotonic(),
        "welcome": sum(learner.is_welcome for learner in learners),
        "uploads": sum(learner.uploads for learner in learners),
        "control_in": crowd.counters.control_in,
        "control_out": crowd.counters.control_out,
        "bulk_in": crowd.counters.bulk_in,
        "bulk_out": crowd.counters.bulk_out,
        "ended": crowd.endings.total(),
        "endings": dict(crowd.endings.most_common(3)),
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
