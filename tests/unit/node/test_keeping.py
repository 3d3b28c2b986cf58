"""A snapshot is written down and handed out when its moment is durable, and never if that moment was not to be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, RunId, Seq, Term, Version
from geo_diloco.node import keeping
from geo_diloco.node.keeping import SnapshotKeeper
from geo_diloco.numerics.fragments import Layout, TensorSpec, fragment_digest
from geo_diloco.observability import EventLog
from geo_diloco.protocol.election.ballots import Opened
from geo_diloco.protocol.events import Event, SnapshotKept, Tick
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import FragmentHead
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.snapshots import SnapshotShelf
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import open_snapshot

LAYOUT = Layout((TensorSpec("w", (2, 4), "float32", 0, 0, 8, False),))
ME = Identity.generate()


def digest_of(seq: int) -> Digest:
    return Digest(f"{seq:064x}")


class Core:
    """A syncer whose outer state stands at `at`, of which everything up to `durable` is durable."""

    deadline = None

    def __init__(self, outer: OuterState) -> None:
        self.heard: list[Event] = []
        self.at: int | None = 5
        self.durable = 5
        self.fork: dict[int, Digest] = {}
        self.election = SimpleNamespace(role="syncer", digest_at=lambda seq: self.fork.get(seq, digest_of(seq)))
        self._head = FragmentHead(
            version=Version(0),
            base=digest_of(0),
            state_digest=fragment_digest(outer.theta(FragmentId(0))),
            momentum_digest=fragment_digest(outer.momentum(FragmentId(0))),
        )

    def _ledger(self, seq: int) -> Ledger:
        ledger = Ledger(seq=Seq(seq), head_digest=digest_of(seq), branch=BranchId("b" * 64), term=Term(1))
        ledger.opened = Opened(ME.peer_id, BootId("1" * 16), "", ())
        ledger.heads, ledger.tokens, ledger.num_elements = [self._head], [0], (8,)
        ledger.layout_digest = LAYOUT.digest
        return ledger

    @property
    def ledger(self) -> Ledger:
        return self._ledger(self.durable)

    def state_ledger(self) -> Ledger | None:
        return None if self.at is None else self._ledger(self.at)

    def handle(self, event: Event, now: int) -> list[Any]:
        self.heard.append(event)
        return []


class Kept:
    """A keeper under test, and its core."""

    def __init__(self, root: Path) -> None:
        self.root = root
        outer = OuterState(LAYOUT, with_momentum=True, with_residual=False)
        outer.start_fragment(FragmentId(0), torch.ones(8))
        self.core = Core(outer)
        self.driver = Driver(self.core, log=EventLog())  # type: ignore[arg-type]
        self.worker = Worker("fold")
        (root / "state").mkdir()
        store = BlobStore(root / "blobs")
        self.shelf = SnapshotShelf(root / "state", run=RunId("1" * 40), outer=outer, store=store, identity=ME)
        self.keeper = SnapshotKeeper(self.driver, self.worker, self.shelf, log=EventLog())

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.root / "state").iterdir())

    def event(self) -> None:
        """Something happened: whoever waits looks again."""
        self.driver.feed(Tick())


def with_keeper(root: Path, talk: Callable[[Kept], Awaitable[None]]) -> None:
    async def scenario() -> None:
        it = Kept(root)
        async with asyncio.timeout(20):
            await talk(it)
        await it.driver.close()
        it.worker.close()
        assert it.driver.failure is None

    asyncio.run(scenario())


def test_what_is_ahead_is_handed_out_when_the_chain_has_got_there(tmp_path: Path) -> None:
    async def talk(it: Kept) -> None:
        it.core.durable = 3
        asking = asyncio.ensure_future(it.keeper.newest())
        await asyncio.sleep(0.1)
        it.event()
        await asyncio.sleep(0.05)
        assert not asking.done()
        it.core.durable = 5
        it.event()
        signed = await asking
        assert signed is not None and open_snapshot(signed).seq == 5
        assert await it.keeper.newest() == signed, "a young one will do"

    with_keeper(tmp_path, talk)


def test_what_came_to_be_of_another_chain_is_thrown_away(tmp_path: Path) -> None:
    async def talk(it: Kept) -> None:
        it.core.durable = 3
        asking = asyncio.ensure_future(it.keeper.newest())
        await asyncio.sleep(0.1)
        it.core.fork[5], it.core.durable = Digest("f" * 64), 6
        it.event()
        assert await asking is None
        it.core.at = None
        assert it.shelf.blobs() == set() and it.files() == []

    with_keeper(tmp_path, talk)


def test_who_asks_for_a_snapshot_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "ASKED_S", 0.05)

    async def talk(it: Kept) -> None:
        it.core.durable = 3
        assert await it.keeper.newest() is None
        assert await it.keeper.newest() is None, "one that was not durable in time is not handed out for being young"
        it.core.at = None
        assert await it.keeper.newest() is None

    with_keeper(tmp_path, talk)


def test_one_is_written_when_due_and_the_core_is_told(tmp_path: Path) -> None:
    async def talk(it: Kept) -> None:
        it.core.at = None
        running = asyncio.ensure_future(it.keeper.run())
        await asyncio.sleep(0.05)
        assert it.files() == []
        it.core.at = 5
        it.event()
        await it.driver.wait_until(lambda: any(isinstance(event, SnapshotKept) for event in it.core.heard))
        assert SnapshotKept(Seq(5)) in it.core.heard and it.files() == ["snapshot-000000000005.json"]
        running.cancel()

    with_keeper(tmp_path, talk)


def test_on_leaving_only_a_durable_moment_is_saved(tmp_path: Path) -> None:
    async def talk(it: Kept) -> None:
        it.core.durable = 4
        await it.keeper.save_last()
        assert it.files() == []
        it.core.durable = 5
        await it.keeper.save_last()
        assert it.files() == ["snapshot-000000000005.json"]

    with_keeper(tmp_path, talk)
