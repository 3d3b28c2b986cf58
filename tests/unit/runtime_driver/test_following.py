"""Whoever keeps the chain: what is wanted gets onto the disk, by whatever way, and the state is never of two chains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from geo_diloco.errors import RemoteProtocolError, RunDirError, TransferError
from geo_diloco.manifest import BranchId, CodecSpec, Digest, FragmentId, RunId, RunManifest, Seq, Term, Version
from geo_diloco.numerics import codec
from geo_diloco.numerics.fragments import Layout, TensorSpec, fragment_digest
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import FetchEntries, KeepEntry, Prune
from geo_diloco.protocol.election.ballots import Opened
from geo_diloco.protocol.events import EntryArrived, EntryStored, Event, FragmentReplaced, Tick, UpdateLost
from geo_diloco.protocol.messages import BlobRef, Commit, FragmentHead, Snapshot
from geo_diloco.runtime import following as following_module
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.following import Following, FollowingParts
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.replacing import FragmentReplacing, ReplacingParts
from geo_diloco.runtime.session import TransferRefused
from geo_diloco.runtime.snapshots import SnapshotShelf, Standing
from geo_diloco.runtime.store import BlobStore, ChainStore, blob_ref
from geo_diloco.runtime.wire import Signed, seal_entry, seal_snapshot
from tests.unit.runtime.samples import BOOT, RUN, commit, header

N = 64
P0 = FragmentId(0)
LAYOUT = Layout((TensorSpec("w", (8, 8), "float32", 0, 0, N, False),))
ME = Identity.generate()
SPEC = CodecSpec(name="none")
MANIFEST = RunManifest(codec_down=SPEC)


class Core:
    """Wants every entry kept that it is told to want; its ledger and chain are set by the test."""

    deadline = None

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.wants = True
        self.chain: list[Digest] = []
        self.ledger = SimpleNamespace(seq=-1, heads=[SimpleNamespace(version=0, state_digest="", momentum_digest="")])
        self.election = SimpleNamespace(knows=lambda digest: digest in self.chain, digest_at=self._at)

    def _at(self, seq: int) -> Digest | None:
        return self.chain[seq] if 0 <= seq < len(self.chain) else None

    def handle(self, event: Event, now: int) -> list[Any]:
        self.heard.append(event)
        if isinstance(event, EntryArrived) and self.wants:
            self.chain.append(event.digest)
            return [KeepEntry(event.digest, event.entry.update if isinstance(event.entry, Commit) else None)]
        return []

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]


class Peer:
    """A follower on a folder; its donor is this object."""

    def __init__(self, root: Path, *, keeps_snapshots: bool = True) -> None:
        self.core = Core()
        self.driver = Driver(self.core, log=EventLog())  # type: ignore[arg-type]
        self.worker = Worker("fold")
        self.outer = OuterState(LAYOUT, with_momentum=True, with_residual=False)
        self.outer.start_fragment(P0, torch.zeros(N))
        self.store = BlobStore(root / "blobs")
        (root / "state").mkdir()
        self.shelf = SnapshotShelf(root / "state", run=RUN, outer=self.outer, store=self.store, identity=ME)
        self.chain = ChainCopy(ChainStore(root / "chain.jsonl"), run=RUN)
        self.answer: Exception | bytes | None = None
        self.asked = 0
        self.often = asyncio.Event()
        self.snapshots: list[Signed] = []
        around: Any = self
        self.replacing = FragmentReplacing(
            ReplacingParts(
                driver=self.driver,
                worker=self.worker,
                run=RUN,
                outer=self.outer,
                store=self.store,
                chain=self.chain,
                shelf=self.shelf if keeps_snapshots else None,
                donor=around,
                log=EventLog(),
            )
        )
        self.following = Following(
            FollowingParts(
                driver=self.driver,
                worker=self.worker,
                outer=self.outer,
                chain=self.chain,
                store=self.store,
                donor=around,
                replacing=self.replacing,
                log=EventLog(),
                is_elector=True,
            )
        )
        self.driver.interpret(self.following.interpreters())

    async def blob(self, blob: BlobRef) -> None:
        self.asked += 1
        if self.asked == 3:
            self.often.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        assert self.answer is not None
        self.store.put(self.answer)

    async def signed_snapshots(self) -> list[Signed]:
        return self.snapshots

    async def wait_for(self, kind: type[Event]) -> list[Any]:
        await self.driver.wait_until(lambda: bool(self.core.told(kind)))
        return self.core.told(kind)

    def commits(self, number: int, *, held: bool = True, prefix: str = "") -> list[Commit]:
        """Commits that follow each other from where the state is, in an outer state of their own."""
        made: list[Commit] = []
        outer = OuterState(LAYOUT, with_momentum=True, with_residual=False)
        outer.start_fragment(P0, torch.zeros(N))
        prev = Digest("0" * 64)
        for version in range(1, number + 1):
            update = torch.full((N,), 0.5 * version + len(prefix))
            frame = codec.encode(update, SPEC, layout_digest=LAYOUT.digest, fragment=0)
            if held:
                self.store.put(frame)
            draft = commit(
                ME.peer_id,
                header=header(version - 1, prev),
                version=Version(version),
                update=blob_ref(frame),
                participants=(),
                left_out=(),
            )
            theta, momentum = digests_after(outer, draft, frame)
            made.append(replace(draft, state_digest=theta, momentum_digest=momentum))
            prev = seal_entry(made[-1], ME).digest
        return made

    def know(self, commits: list[Commit]) -> None:
        """They are on the chain, and durable."""
        for each in commits:
            self.following.take_entry(seal_entry(each, ME))
        self.core.ledger.seq = len(commits) - 1
        self.core.ledger.heads[0] = SimpleNamespace(
            version=len(commits), state_digest=commits[-1].state_digest, momentum_digest=commits[-1].momentum_digest
        )
        self.driver.feed(Tick())


def digests_after(outer: OuterState, draft: Commit, frame: bytes) -> tuple[Digest, Digest]:
    """What the state's digests are once that update is folded in."""
    from geo_diloco.numerics.outer import apply_update

    update = codec.decode(frame, num_elements=N, layout_digest=LAYOUT.digest, fragment=0)
    theta, momentum = apply_update(outer.theta(P0), outer.momentum(P0), update, eta=draft.eta, mu=draft.mu)
    assert momentum is not None
    outer._fragments[P0].theta_N, outer._fragments[P0].momentum_N = theta, momentum
    return fragment_digest(theta), fragment_digest(momentum)


def with_peer(root: Path, talk: Callable[[Peer], Awaitable[None]], **more: Any) -> None:
    async def scenario() -> None:
        it = Peer(root, **more)
        try:
            async with asyncio.timeout(30):
                await talk(it)
            assert it.driver.failure is None
        finally:
            await it.driver.close()
            it.worker.close()
            it.chain.close()

    asyncio.run(scenario())


async def becomes(holds: Callable[[], bool]) -> None:
    """Waits until it holds; `with_peer` says how long at most."""
    while not holds():  # noqa: ASYNC110  (no event tells)
        await asyncio.sleep(0.002)


# ---- onto the disk


def test_an_entry_is_stored_once_record_and_update_are_here(tmp_path: Path) -> None:
    async def talk(it: Peer) -> None:
        (only,) = it.commits(1, held=False)
        signed = seal_entry(only, ME)
        it.following.take_entry(signed)
        await becomes(
            lambda: it.chain.is_written(signed.digest) and it.following.accepts(only.update.digest) is not None
        )
        assert it.core.told(EntryStored) == []
        assert it.following.accepts(only.update.digest) == only.update
        it.store.put(codec.encode(torch.full((N,), 0.5), SPEC, layout_digest=LAYOUT.digest, fragment=0))
        it.following.blob_arrived(only.update)  # an elector brought it, while the donor says nothing
        assert await it.wait_for(EntryStored) == [EntryStored(signed.digest)]
        assert it.following.accepts(only.update.digest) is None
        it.following.take_entry(signed)
        assert len(it.core.told(EntryArrived)) == 1, "what is known is not told again"

    with_peer(tmp_path, talk)


def test_an_update_that_the_syncer_does_not_have_is_lost_and_one_out_of_reach_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_module.Backoff.__init__, "__defaults__", (0.001, 0.002))

    async def talk(it: Peer) -> None:
        (only,) = it.commits(1, held=False)
        signed = seal_entry(only, ME)
        it.answer = TransferError("away")
        it.following.take_entry(signed)
        await it.often.wait()
        assert it.core.told(UpdateLost) == []
        it.answer = TransferRefused("no such blob")
        (lost,) = await it.wait_for(UpdateLost)
        assert lost.digest == signed.digest

    with_peer(tmp_path, talk)


def test_what_the_core_does_not_want_is_not_kept(tmp_path: Path) -> None:
    async def talk(it: Peer) -> None:
        it.core.wants = False
        signed = seal_entry(it.commits(1)[0], ME)
        it.following.take_entry(signed)
        assert not it.chain.knows(signed.digest)
        with pytest.raises(RemoteProtocolError, match="signature"):
            it.following.take_entry(replace(signed, signature="0" * 128))
        other = seal_entry(commit(ME.peer_id, header=replace(header(), run=RunId("9" * 40))), ME)
        with pytest.raises(RemoteProtocolError, match="of run"):
            it.following.take_entry(other)

    with_peer(tmp_path, talk)


def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_module, "DISK_RETRY_S", 0.01)

    async def talk(it: Peer) -> None:
        honest, tries = it.chain.write, 0

        async def write(digest: Digest, *, sync: bool) -> None:
            nonlocal tries
            tries += 1
            assert sync, "an elector's record is synced"
            if tries < 3:
                raise RunDirError("No space left on device")
            await honest(digest, sync=sync)

        monkeypatch.setattr(it.chain, "write", write)
        it.following.take_entry(seal_entry(it.commits(1)[0], ME))
        await it.wait_for(EntryStored)
        assert tries == 3

    with_peer(tmp_path, talk)


def test_being_asked_again_ends_the_wait_for_the_next_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a syncer's death the last try was of the dead one; the next is of another."""
    monkeypatch.setattr(following_module.Backoff.__init__, "__defaults__", (3600.0, 3600.0))

    async def talk(it: Peer) -> None:
        tries: list[int] = []

        async def entries(from_seq: int, limit: int) -> list[Signed]:
            tries.append(from_seq)
            if len(tries) == 1:
                raise TransferError("gone")
            return []

        it.entries = entries  # type: ignore[attr-defined]
        fetch = it.following.interpreters()[FetchEntries]
        fetch(FetchEntries(Seq(7)))
        await becomes(lambda: tries == [7])
        fetch(FetchEntries(Seq(5)))
        await becomes(lambda: tries == [7, 5])

    with_peer(tmp_path, talk)


# ---- what is not needed any more


def test_what_the_core_lets_go_of_is_deleted_and_the_record_stays(tmp_path: Path) -> None:
    async def talk(it: Peer) -> None:
        commits = it.commits(3)
        it.know(commits)
        await it.driver.wait_until(lambda: len(it.core.told(EntryStored)) == 3)
        digests = tuple(it.core.chain[:2])
        it.following.interpreters()[Prune](Prune(tuple(each.update for each in commits[:2]), digests))
        await asyncio.gather(*it.driver._jobs)
        assert [it.store.has(each.update) for each in commits] == [False, False, True]
        assert len(it.chain.entries()) == 1 and list(it.chain.updates) == [commits[2].update.digest]
        assert [it.chain.entry(digest) for digest in digests] == commits[:2]
        it.following.interpreters()[Prune](Prune((commits[0].update,), ()))  # not here, after a restart: no harm

    with_peer(tmp_path, talk)


# ---- a fragment by other means


def test_far_back_commits_are_found_where_memory_has_let_go_of_them(tmp_path: Path) -> None:
    async def talk(it: Peer) -> None:
        it.shelf.write(it.shelf.make(standing(it, 0, None)))
        commits = it.commits(3)
        it.know(commits)
        await it.driver.wait_until(lambda: len(it.core.told(EntryStored)) == 3)
        it.chain.let_go(it.core.chain[:2], [])
        it.outer.start_fragment(P0, torch.full((N,), 9.0))
        assert (await it.replacing.replace(P0, Version(3))).state_digest == commits[-1].state_digest

    with_peer(tmp_path, talk)


def test_who_takes_a_donors_snapshot_soon_has_one_of_its_own(tmp_path: Path) -> None:
    """The updates before it are not here: without one this disk would never be whole again."""

    async def talk(it: Peer) -> None:
        commits = it.commits(3, held=True)
        it.snapshots = [seal_snapshot(snapshot_of(it, commits), Identity.generate())]
        it.shelf.write(it.shelf.make(standing(it, 0, None)))
        it.store.delete(commits[0].update)
        it.know(commits)
        assert not it.shelf.is_due(3)
        await it.replacing.replace(P0, Version(3))
        assert it.shelf.is_due(3)

    with_peer(tmp_path, talk)


def standing(it: Peer, version: int, head: Commit | None) -> Standing:
    theta, momentum = fragment_digest(it.outer.theta(P0)), fragment_digest(it.outer.momentum(P0))
    digest = Digest("0" * 64) if head is None else seal_entry(head, ME).digest
    fragment = FragmentHead(version=Version(version), base=digest, state_digest=theta, momentum_digest=momentum)
    return Standing(
        branch=BranchId("3" * 64),
        term=Term(1),
        seq=Seq(version),
        head_digest=digest,
        heads=(fragment,),
        tokens_per_fragment=(0,),
        num_elements=(N,),
        layout_digest=LAYOUT.digest,
        progress=0.0,
        roster=(),
        roster_seq=Seq(0),
        opened=Opened(ME.peer_id, BOOT, "", ()),
        amended=(),
        lineage=0,
        num_commits=version,
    )


def test_our_own_snapshot_and_the_updates_on_disk_bring_it_back(tmp_path: Path) -> None:
    """As after a term whose merges did not become durable."""

    async def talk(it: Peer) -> None:
        it.shelf.write(it.shelf.make(standing(it, 0, None)))
        commits = it.commits(3)
        it.know(commits)
        it.outer.start_fragment(P0, torch.full((N,), 9.0))  # what we merged ourselves
        event = await it.replacing.replace(P0, Version(3))
        assert event == FragmentReplaced(P0, Version(3), commits[-1].state_digest)
        assert fragment_digest(it.outer.theta(P0)) == commits[-1].state_digest

    with_peer(tmp_path, talk)


def snapshot_of(it: Peer, commits: list[Commit]) -> Snapshot:
    """A donor's, at the last of them."""
    donor = OuterState(LAYOUT, with_momentum=True, with_residual=False)
    donor.start_fragment(P0, torch.zeros(N))
    for each in commits:
        digests_after(donor, each, it.store.get(each.update))
    theta, momentum = donor.fragment_bytes(P0)
    last = commits[-1]
    head = FragmentHead(
        version=last.version,
        base=seal_entry(last, ME).digest,
        state_digest=last.state_digest,
        momentum_digest=last.momentum_digest,
    )
    it.given = {blob_ref(data): data for data in (theta, momentum)}  # type: ignore[attr-defined]

    async def blob(wanted: BlobRef) -> None:
        if wanted not in it.given:  # type: ignore[attr-defined]
            raise TransferError("this donor has the snapshot and nothing else")
        it.store.put(it.given[wanted])  # type: ignore[attr-defined]

    it.blob = blob  # type: ignore[method-assign]
    return Snapshot(
        run=RUN,
        branch=BranchId("3" * 64),
        term=Term(1),
        seq=last.header.seq,
        head_digest=head.base,
        heads=(head,),
        theta=(blob_ref(theta),),
        momentum=(blob_ref(momentum),),
        tokens_per_fragment=(0,),
        num_elements=(N,),
        layout_digest=LAYOUT.digest,
        progress=0.0,
        roster=(),
        roster_seq=Seq(0),
        opened=Opened(ME.peer_id, BOOT, "", ()),
        amended=(),
        lineage=0,
    )


def test_a_donors_snapshot_is_loaded_when_the_ledger_has_got_there(tmp_path: Path) -> None:
    async def talk(it: Peer) -> None:
        commits = it.commits(3)
        it.snapshots = [seal_snapshot(snapshot_of(it, commits), Identity.generate())]
        it.know(commits[:2])
        replacing = asyncio.ensure_future(it.replacing.replace(P0, Version(2)))
        await asyncio.sleep(0.1)
        assert not replacing.done(), "the snapshot is beyond what is durable here"
        it.know(commits)
        event = await replacing
        assert (event.version, event.state_digest) == (3, commits[-1].state_digest)
        assert fragment_digest(it.outer.theta(P0)) == commits[-1].state_digest

    with_peer(tmp_path, talk, keeps_snapshots=False)


def test_a_snapshot_of_another_chain_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_module.Backoff.__init__, "__defaults__", (0.001, 0.002))

    async def talk(it: Peer) -> None:
        fork = it.commits(2, prefix="another")
        forged = seal_snapshot(snapshot_of(it, fork), Identity.generate())
        commits = it.commits(2)
        it.know(commits)
        it.snapshots = [forged]
        replacing = asyncio.ensure_future(it.replacing.replace(P0, Version(2)))
        await asyncio.sleep(0.1)
        assert not replacing.done()
        it.snapshots = [seal_snapshot(snapshot_of(it, commits), ME)]
        assert (await replacing).state_digest == commits[-1].state_digest

    with_peer(tmp_path, talk, keeps_snapshots=False)
