"""The syncer's hands: what a contribution may name, cost and contain, and what a full disk does to a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_diloco.errors import RunDirError
from geo_diloco.manifest import BootId, CodecSpec, Digest, FragmentId, PeerId, RunManifest, Seq, SyncSpec, Term, Version
from geo_diloco.numerics import codec
from geo_diloco.numerics.fragments import Layout, TensorSpec, fragment_digest
from geo_diloco.numerics.gate import length_max
from geo_diloco.observability import Counters, EventLog
from geo_diloco.protocol.effects import AcceptBlob, CheckContribution, ForgetBlob, Merge, MergeInput, Seal
from geo_diloco.protocol.election.ballots import Elector, Opened
from geo_diloco.protocol.events import BlobArrived, ContributionChecked, Event, Merged, MergeFailed, Sealed
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import BlobRef, Commit, ContributionId, EntryHeader, Found, Participant
from geo_diloco.runtime import serving as serving_module
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.driver import JOBS_MAX, Driver, Worker
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.serving import CHECKED_AT_ONCE, CHECKED_BYTES, Serving, ServingParts
from geo_diloco.runtime.snapshots import SnapshotShelf, Standing, standing_of
from geo_diloco.runtime.store import BlobStore, ChainStore

N = 96
P0 = FragmentId(0)
ANN = PeerId("a" * 64)
LAYOUT = Layout((TensorSpec("w", (8, 12), "float32", 0, 0, N, False),))
UP = CodecSpec(name="int8", block=64)
MANIFEST = RunManifest(sync=SyncSpec(num_fragments=1), codec_up=UP)
RUN = MANIFEST.run_id()


class Core:
    """Remembers what it is told and asks for nothing."""

    deadline = None
    codecs_up = (UP,)

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.happened = asyncio.Event()

    def handle(self, event: Event, now: int) -> list[Any]:
        self.heard.append(event)
        self.happened.set()
        return []

    async def wait_for(self, kind: type[Event], number: int = 1) -> list[Any]:
        async with asyncio.timeout(20):
            while len(found := [event for event in self.heard if isinstance(event, kind)]) < number:
                self.happened.clear()
                await self.happened.wait()
        return found


class NoLinks:
    def broadcast(self, text: str) -> None:
        """Nobody is connected."""


class Syncer:
    """A syncer's hands on a folder, with a remembering core."""

    def __init__(self, root: Path, *, keep_contributions: bool = False) -> None:
        identity = Identity.generate()
        self.core = Core()
        self.driver = Driver(self.core, log=EventLog())  # type: ignore[arg-type]
        self.worker = Worker("fold")
        self.outer = OuterState(LAYOUT, with_momentum=True, with_residual=True)
        self.outer.start_fragment(P0, torch.arange(N, dtype=torch.float32) / N)
        self.store = BlobStore(root / "blobs")
        (root / "state").mkdir()
        self.shelf = SnapshotShelf(root / "state", run=RUN, outer=self.outer, store=self.store, identity=identity)
        self.chain = ChainCopy(ChainStore(root / "chain.jsonl"), run=RUN)
        self.parts = ServingParts(
            driver=self.driver,
            worker=self.worker,
            outer=self.outer,
            chain=self.chain,
            store=self.store,
            snapshots=self.shelf,
            identity=identity,
            manifest=MANIFEST,
            links=NoLinks(),
            counters=Counters(),
            log=EventLog(),
            keep_contributions=keep_contributions,
        )
        self.serving = Serving(self.parts)
        self._do = self.serving.interpreters()

    def do(self, effect: Any) -> None:
        self._do[type(effect)](effect)

    async def wait_jobs(self) -> None:
        await asyncio.gather(*self.driver._jobs)

    async def found(self) -> None:
        theta, momentum = self.outer.theta(P0), self.outer.momentum(P0)
        header = EntryHeader(run=RUN, branch="", term=Term(1), seq=Seq(0), prev="")  # type: ignore[arg-type]
        self.do(
            Seal(
                Found(
                    header=header,
                    boot=BootId("b" * 16),
                    state_digests=(fragment_digest(theta),),
                    momentum_digests=(fragment_digest(momentum),),
                    layout_digest=LAYOUT.digest,
                    num_elements=LAYOUT.num_elements,
                    roster=(Elector(self.parts.identity.peer_id, "ab", "machine"),),
                )
            )
        )
        await self.core.wait_for(Sealed)
        await self.worker.call(lambda: None)

    async def commit(self, merged: Merged, blob: BlobRef) -> None:
        """The commit of that merge, of that contribution alone."""
        participant = Participant(
            peer=ANN,
            base=Digest("c" * 64),
            base_version=Version(0),
            first_step=0,
            last_step=8,
            steps=8,
            tokens=8,
            tokens_unmerged=8,
            contribution=blob,
            weight=1.0,
            norm=1.0,
        )
        header = EntryHeader(run=RUN, branch="", term=Term(1), seq=Seq(1), prev="")  # type: ignore[arg-type]
        commit = Commit(
            header=header,
            fragment=P0,
            version=Version(1),
            round=1,
            attempt=1,
            update=merged.update,
            state_digest=merged.state_digest,
            momentum_digest=merged.momentum_digest,
            eta=0.7,
            mu=0.5,
            participants=(participant,),
            left_out=(),
            quorum_wait_ms=0,
            grace_ms=0,
            close_reason="",
            rbar=1.0,
            rho=None,
            tokens_total=8,
            progress=0.0,
        )
        self.do(Seal(commit))
        await self.core.wait_for(Sealed, 2)

    async def check(self, frame: bytes) -> ContributionChecked:
        blob = self.store.put(frame)
        number = len([each for each in self.core.heard if isinstance(each, ContributionChecked)]) + 1
        self.do(CheckContribution(ContributionId(ANN, P0, Digest("c" * 64), 8), blob))
        checked = (await self.core.wait_for(ContributionChecked, number))[-1]
        assert isinstance(checked, ContributionChecked)
        return checked

    async def merge(self, blob: BlobRef) -> Merged:
        self.do(Merge(P0, 1, 1, Version(1), (MergeInput(ANN, blob, Version(0), 1.0),), 0.7, 0.5, CodecSpec()))
        (merged,) = await self.core.wait_for(Merged)
        assert isinstance(merged, Merged)
        return merged


def standing_of_theta_0(it: Syncer) -> Standing:
    signed, found = it.chain.entries()[0]
    assert isinstance(found, Found)
    ledger = Ledger()
    ledger.apply(found, signed.digest)
    ledger.opened = Opened(it.parts.identity.peer_id, BootId("b" * 16), "", ())
    standing = standing_of(ledger, lambda seq: None)
    assert standing is not None
    return standing


def frame_of(delta: torch.Tensor, spec: CodecSpec = UP) -> bytes:
    return codec.encode(delta, spec, layout_digest=LAYOUT.digest, fragment=0)


def with_syncer(root: Path, talk: Callable[[Syncer], Awaitable[None]], *, keep_contributions: bool = False) -> None:
    async def run() -> None:
        it = Syncer(root, keep_contributions=keep_contributions)
        try:
            await talk(it)
            assert it.driver.failure is None
        finally:
            await it.driver.close()
            it.worker.close()
            it.chain.close()

    asyncio.run(run())


def test_a_contribution_of_another_codec_than_agreed_is_refused(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        assert (await it.check(frame_of(torch.ones(N) / N))).ok
        for spec in (CodecSpec(name="none"), CodecSpec(name="int8", block=256), CodecSpec(name="int4", block=64)):
            checked = await it.check(frame_of(torch.ones(N) / N, spec))
            assert not checked.ok and "was agreed" in checked.reason

    with_syncer(tmp_path, talk)


@pytest.mark.parametrize("value", [1e3, 1e30, 3e38])
def test_a_delta_that_is_absurd_beside_theta_is_refused(tmp_path: Path, value: float) -> None:
    async def talk(it: Syncer) -> None:
        checked = await it.check(frame_of(torch.full((N,), value)))
        assert not checked.ok and checked.reason.startswith("implausible")

    with_syncer(tmp_path, talk)


def test_a_fragment_that_begins_at_zero_takes_usual_deltas() -> None:
    assert length_max(torch.zeros(10_000)) == pytest.approx(100.0)


def test_an_outer_step_that_is_not_finite_is_blamed_on_the_longest_delta(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        inputs = [
            MergeInput(PeerId(name * 64), it.store.put(frame_of(torch.full((N,), value))), Version(0), 1.0)
            for name, value in (("a", 1e-3), ("b", 3e38))
        ]
        it.do(Merge(P0, 1, 1, Version(1), tuple(inputs), 0.7, 0.5, CodecSpec()))
        (failed,) = await it.core.wait_for(MergeFailed)
        assert failed.culprit == "b" * 64 and "not finite" in failed.reason

    with_syncer(tmp_path, talk)


def test_a_shortened_delta_is_merged_shortened(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        blob = it.store.put(frame_of(torch.full((N,), 1.0)))
        it.do(Merge(P0, 1, 1, Version(1), (MergeInput(ANN, blob, Version(0), 1.0, 0.25),), 0.7, 0.5, CodecSpec()))
        (merged,) = await it.core.wait_for(Merged)
        assert merged.rbar == pytest.approx(0.25 * N**0.5, rel=0.02)

    with_syncer(tmp_path, talk)


def test_a_contribution_that_names_an_update_of_ours_takes_nothing_along(tmp_path: Path) -> None:
    """Digests of updates and snapshots are public: anyone may announce them as his contribution."""

    async def talk(it: Syncer) -> None:
        await it.found()
        kept = it.shelf.make(standing_of_theta_0(it))
        update = (await it.merge(it.store.put(frame_of(torch.ones(N) / N)))).update
        for blob in [update, *kept.snapshot.theta, *kept.snapshot.momentum]:
            for named in (blob, BlobRef(blob.digest, blob.size + 1)):
                it.do(AcceptBlob(ANN, named))
                it.do(ForgetBlob(named))
                await it.wait_jobs()
                assert it.store.has(blob)

    with_syncer(tmp_path, talk)


@pytest.mark.parametrize("keep", [True, False])
def test_of_contributions_only_what_was_merged_is_kept_and_only_if_wanted(tmp_path: Path, keep: bool) -> None:
    async def talk(it: Syncer) -> None:
        await it.found()
        blob, refused = it.store.put(frame_of(torch.ones(N) / N)), it.store.put(frame_of(torch.ones(N)))
        await it.commit(await it.merge(blob), blob)
        for each in (blob, refused):
            it.do(AcceptBlob(ANN, each))
            it.do(ForgetBlob(each))
        await it.wait_jobs()
        assert (it.store.has(blob), it.store.has(refused)) == (keep, False)
        restarted = Serving(it.parts)
        restarted.interpreters()[ForgetBlob](ForgetBlob(blob))
        await it.wait_jobs()
        assert it.store.has(blob) == keep, "a learner that announces it again does not take it along"

    with_syncer(tmp_path, talk, keep_contributions=keep)


def test_what_is_announced_again_while_it_is_deleted_is_taken_in_after_that(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        kept, gone = (it.store.put(frame_of(torch.full((N,), value))) for value in (1.0, 2.0))
        for blob in (kept, gone):
            it.do(AcceptBlob(ANN, blob))
            it.do(ForgetBlob(blob))
            assert it.serving.accepts(blob.digest) is None
        it.do(AcceptBlob(ANN, kept))
        assert it.serving.accepts(kept.digest) is None, "not yet"
        await it.wait_jobs()
        assert it.serving.accepts(kept.digest) == kept and it.serving.accepts(gone.digest) is None
        assert (it.store.has(kept), it.store.has(gone)) == (True, False)
        arrived = await it.core.wait_for(BlobArrived, 3)
        assert [event.blob for event in arrived] == [kept, gone, kept]

    with_syncer(tmp_path, talk)


def test_a_contribution_alike_to_an_update_still_arrives(tmp_path: Path) -> None:
    """Of a learner whose model did not move, for one."""

    async def talk(it: Syncer) -> None:
        update = (await it.merge(it.store.put(frame_of(torch.zeros(N))))).update
        it.do(AcceptBlob(ANN, update))
        assert await it.core.wait_for(BlobArrived) == [BlobArrived(update)]

    with_syncer(tmp_path, talk)


@contextmanager
def busy(worker: Worker) -> Iterator[None]:
    """Its thread is at something that takes as long as the block does."""
    is_over = threading.Event()
    worker.begin(is_over.wait, 120)
    try:
        yield
    finally:
        is_over.set()


def test_a_contribution_is_checked_while_the_worker_thread_merges(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        with busy(it.worker):
            assert (await it.check(frame_of(torch.ones(N) / N))).ok
            refused = await it.check(frame_of(torch.ones(N) / N)[:-1])
            assert not refused.ok and refused.reason.startswith("GD-302")

    with_syncer(tmp_path, talk)


def test_an_entry_is_sealed_while_the_worker_thread_merges_and_who_asks_then_finds_it_done(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        await it.found()
        blob = it.store.put(frame_of(torch.ones(N) / N))
        merged = await it.merge(blob)
        with busy(it.worker):
            await it.commit(merged, blob)
            assert it.outer.version(P0) == 0
            seen = it.worker.begin(lambda: (it.outer.version(P0), fragment_digest(it.outer.theta(P0))))
        assert await seen == (1, merged.state_digest)

    with_syncer(tmp_path, talk)


def test_a_commit_that_is_sealed_when_the_driver_closes_is_still_made_visible(tmp_path: Path) -> None:
    """The core has heard of it: a last snapshot is of a state that has it."""

    async def talk(it: Syncer) -> None:
        await it.found()
        blob = it.store.put(frame_of(torch.ones(N) / N))
        merged = await it.merge(blob)
        with busy(it.worker):
            await it.commit(merged, blob)
            await it.driver.close()
        assert await it.worker.call(it.outer.version, P0) == 1

    with_syncer(tmp_path, talk)


def test_a_driver_that_closes_while_contributions_are_checked_waits_for_none(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        blob, reading, may_go = it.store.put(frame_of(torch.ones(N) / N)), threading.Event(), threading.Event()
        honest = it.store.get
        it.store.get = lambda ref: (reading.set(), may_go.wait(20), honest(ref))[-1]  # type: ignore[method-assign]
        try:
            for step in range(3 * CHECKED_AT_ONCE):
                it.do(CheckContribution(ContributionId(ANN, P0, Digest("c" * 64), step), blob))
            await asyncio.to_thread(reading.wait, 20)
            async with asyncio.timeout(10):
                await it.driver.close()
        finally:
            may_go.set()
        assert not it.core.heard

    with_syncer(tmp_path, talk)


def test_a_bug_in_a_check_ends_the_driver(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        def check(*of: Any) -> ContributionChecked:
            raise ZeroDivisionError

        it.outer.check = check  # type: ignore[method-assign]
        it.do(CheckContribution(ContributionId(ANN, P0, Digest("c" * 64), 8), it.store.put(frame_of(torch.ones(N)))))
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(20):
                await it.driver.wait_closed()
        it.driver._failure = None  # it was looked at

    with_syncer(tmp_path, talk)


def test_large_contributions_are_shared_out_and_small_ones_go_together(tmp_path: Path) -> None:
    async def talk(it: Syncer) -> None:
        def next_of(size: int) -> int:
            it.serving._to_check.clear()
            for step in range(40):
                blob = BlobRef(Digest("d" * 64), size)
                it.serving._to_check.append(CheckContribution(ContributionId(ANN, P0, Digest("c" * 64), step), blob))
            return len(it.serving._next_to_check())

        assert next_of(1 << 30) == 1
        assert next_of(CHECKED_BYTES // 4) == 4
        assert next_of(100) == CHECKED_AT_ONCE

    with_syncer(tmp_path, talk)


@pytest.mark.parametrize("are_large", [False, True])
def test_however_many_contributions_arrive_at_once_they_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_large: bool
) -> None:
    if are_large:
        monkeypatch.setattr(serving_module, "CHECKED_BYTES", 0)

    async def talk(it: Syncer) -> None:
        it.worker.num_aside = 3
        blob = it.store.put(frame_of(torch.ones(N) / N))
        number = JOBS_MAX // 256 + 300
        for step in range(number):
            it.do(CheckContribution(ContributionId(ANN, P0, Digest("c" * 64), step), blob))
        assert len(it.driver._jobs) == (3 if are_large else 1)
        assert len(await it.core.wait_for(ContributionChecked, number)) == number

    with_syncer(tmp_path, talk)


def test_a_full_disk_holds_the_chain_up_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "DISK_RETRY_S", 0.01)

    async def talk(it: Syncer) -> None:
        honest, tries = it.chain.append, 0

        async def append(signed: Any, entry: Any) -> None:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise RunDirError("chain: No space left on device")
            await honest(signed, entry)

        monkeypatch.setattr(it.chain, "append", append)
        await it.found()
        assert tries == 4 and it.chain.num_entries == 1

    with_syncer(tmp_path, talk)
