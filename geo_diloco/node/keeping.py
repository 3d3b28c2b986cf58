"""Snapshots of a peer that others can reach: one on disk every so many commits, and one for whoever asks.

Facts and tensors must be of one moment (`runtime/snapshots.py`), and only moments that are durable count: a syncer's
state runs ahead of that. So one is made when the outer state stands somewhere exactly, and waits until the chain has
got there, or until it is clear that it never will.
"""

from __future__ import annotations

import asyncio

from geo_diloco.errors import BlobError
from geo_diloco.observability import EventLog
from geo_diloco.protocol.events import SnapshotKept
from geo_diloco.protocol.messages import Snapshot
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.snapshots import Kept, SnapshotShelf, Standing, standing_of
from geo_diloco.runtime.wire import Signed

AGE_S_MAX = 5.0
"""One is made for whoever asks, but not more often: each puts all that changed on the disk."""
ASKED_S = 10.0
"""How long whoever asks for one waits for a durable moment."""
RETRY_S = 10.0


class SnapshotKeeper:
    """For the event loop's thread."""

    def __init__(self, driver: Driver, worker: Worker, shelf: SnapshotShelf, *, log: EventLog) -> None:
        self._driver = driver
        self._worker = worker
        self._shelf = shelf
        self._log = log
        self._making = asyncio.Lock()

    async def run(self) -> None:
        """One on disk every so many commits; a full disk leaves it out and the one before stays."""
        while True:
            await self._driver.wait_until(lambda: self._is_due() and self._standing() is not None)
            try:
                async with self._making:
                    kept = await self._make()
                    if kept is not None:
                        await self._worker.call(self._shelf.write, kept)
                        self._driver.feed(SnapshotKept(kept.snapshot.seq))
                        continue
            except (BlobError, OSError) as exc:
                self._log.note("snapshot", f"none is saved, the one before stays: {exc}", level="warning")
            await asyncio.sleep(RETRY_S)

    async def newest(self) -> Signed | None:
        """Of a durable moment, as new as can be had in time; None if there is none."""
        try:
            async with asyncio.timeout(ASKED_S), self._making:
                kept = self._young() or await self._make()
        except TimeoutError:
            return None
        except (BlobError, OSError) as exc:
            self._log.note("snapshot", f"none for who asks: {exc}", level="warning")
            return None
        return None if kept is None else kept.signed

    async def save_last(self) -> None:
        """On leaving, if there is a moment to be saved; else the next start folds in a little more."""
        standing = self._standing()
        if standing is None or self._driver.core.ledger.seq < standing.seq:
            return
        try:
            kept = await self._worker.call(self._shelf.make, standing)
            await self._worker.call(self._shelf.write, kept)
        except (BlobError, OSError) as exc:
            self._log.note("leave", f"no last snapshot, the next start redoes more: {exc}", level="warning")

    def _standing(self) -> Standing | None:
        """Where the outer state stands exactly, if it does."""
        core = self._driver.core
        ledger = core.state_ledger()
        return None if ledger is None else standing_of(ledger, core.election.digest_at)

    def _is_due(self) -> bool:
        ledger = self._driver.core.ledger
        return ledger.opened is not None and self._shelf.is_due(ledger.num_commits)

    def _young(self) -> Kept | None:
        standing = self._standing()
        young = None if standing is None else self._shelf.young(standing, age_s_max=AGE_S_MAX)
        return young if young is not None and self._is_durable(young.snapshot) else None

    async def _make(self) -> Kept | None:
        """None if its moment came to be of a chain that does not count."""
        while (standing := self._standing()) is None:
            await self._driver.wait_until(lambda: self._standing() is not None)
        kept = await self._worker.call(self._shelf.make, standing)
        await self._driver.wait_until(lambda: self._is_durable(kept.snapshot) or not self._may_become_durable(standing))
        if self._is_durable(kept.snapshot):
            return kept
        self._shelf.drop(kept)
        return None

    def _is_durable(self, snapshot: Snapshot) -> bool:
        core = self._driver.core
        return core.ledger.seq >= snapshot.seq and core.election.digest_at(snapshot.seq) == snapshot.head_digest

    def _may_become_durable(self, standing: Standing) -> bool:
        election = self._driver.core.election
        return election.role == "syncer" and election.digest_at(standing.seq) == standing.head_digest
