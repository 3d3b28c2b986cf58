"""A follower's hands: fetches entries, updates and snapshots from the syncer, and folds updates into the outer state.

Fetches are tried for as long as the core wants them: a broken connection is waited out, and only the word of a syncer
that has the chain and not the blob makes an update lost. Theta of every version that was reached is kept until the
training thread has adopted it or a later one, so an adoption gets exactly the version it names.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from geo_diloco.errors import (
    BlobError,
    DigestMismatch,
    FrameError,
    LocalProtocolError,
    RemoteProtocolError,
    TransferError,
)
from geo_diloco.manifest import FragmentId, Version
from geo_diloco.protocol.effects import (
    ApplyUpdate,
    FetchEntries,
    FetchFragment,
    FetchUpdate,
)
from geo_diloco.protocol.events import (
    Applied,
    ApplyFailed,
    EntryArrived,
    FragmentReplaced,
    UpdateFetched,
    UpdateLost,
)
from geo_diloco.protocol.messages import BlobRef, Snapshot
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.driver import Driver, Interpreter, Worker
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.session import TransferRefused
from geo_diloco.runtime.snapshots import load_snapshot
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed

FETCHES_MAX = 4
"""Updates fetched at once."""
ENTRIES_PER_FETCH = 256
BACKOFF_S = 0.2
BACKOFF_S_MAX = 5.0


class Donor(Protocol):
    """Where a follower gets things from. Every method waits for a donor to be reachable, however long that takes;
    TransferError says that one try broke off."""

    async def entries(self, from_seq: int, limit: int) -> Sequence[Signed]: ...
    async def blob(self, blob: BlobRef) -> None:
        """Have it in the store. Raises TransferRefused if the donor has no such blob."""

    async def snapshot(self) -> Snapshot:
        """Verified and of this run."""


@dataclass(frozen=True, kw_only=True)
class FollowingParts:
    """What a follower works with."""

    driver: Driver
    worker: Worker
    outer: OuterState
    chain: ChainCopy
    store: BlobStore
    donor: Donor
    updates_bytes_max: int = 256 << 20
    """Applied updates are kept up to this much, for replay."""


class Following:
    """Interprets the effects of a peer that follows the chain."""

    def __init__(self, parts: FollowingParts) -> None:
        self._p = parts
        self._slots = asyncio.Semaphore(FETCHES_MAX)
        self._wanted_from: int | None = None
        self._is_fetching = False
        self._reached: dict[FragmentId, OrderedDict[Version, Tensor]] = {}
        self._updates: OrderedDict[BlobRef, None] = OrderedDict()
        self._updates_bytes = 0

    def interpreters(self) -> Mapping[type, Interpreter]:
        driver = self._p.driver
        return {
            FetchEntries: self._fetch_entries,
            FetchUpdate: lambda effect: driver.start(self._fetch_update(effect), name="fetch update"),
            ApplyUpdate: lambda effect: driver.start(self._apply(effect), name="apply update"),
            FetchFragment: lambda effect: driver.start(self._fetch_fragment(effect), name="fetch fragment"),
        }

    # ---- entries

    def entry_announced(self, signed: Signed) -> None:
        """An entry came over the control connection. Raises RemoteProtocolError if it is not what it claims."""
        self._take(signed)

    def _take(self, signed: Signed) -> None:
        entry = self._p.chain.verify(signed)
        self._p.chain.take(signed, entry)
        self._p.driver.feed(EntryArrived(entry, signed.digest, signed.signer))

    def _fetch_entries(self, effect: FetchEntries) -> None:
        wanted = self._wanted_from
        self._wanted_from = effect.from_seq if wanted is None else min(wanted, effect.from_seq)
        if not self._is_fetching:
            self._is_fetching = True
            self._p.driver.start(self._fetch_wanted_entries(), name="fetch entries")

    async def _fetch_wanted_entries(self) -> None:
        backoff = Backoff()
        while self._wanted_from is not None:
            from_seq, self._wanted_from = self._wanted_from, None
            try:
                await self._fetch_entries_once(from_seq)
                backoff.reset()
            except (TransferError, RemoteProtocolError):
                again = self._wanted_from
                self._wanted_from = from_seq if again is None else min(again, from_seq)
                await backoff.wait()
        self._is_fetching = False

    async def _fetch_entries_once(self, from_seq: int) -> None:
        while True:
            batch = await self._p.donor.entries(from_seq, ENTRIES_PER_FETCH)
            for signed in batch:
                self._take(signed)
            if not batch:
                return
            from_seq += len(batch)

    # ---- updates

    async def _fetch_update(self, effect: FetchUpdate) -> None:
        backoff = Backoff()
        while not self._p.store.has(effect.blob):
            try:
                async with self._slots:
                    await self._p.donor.blob(effect.blob)
            except TransferRefused as exc:
                self._p.driver.feed(UpdateLost(effect.fragment, effect.version, str(exc)))
                return
            except (TransferError, BlobError):
                await backoff.wait()
        self._p.driver.feed(UpdateFetched(effect.fragment, effect.version))

    async def _apply(self, effect: ApplyUpdate) -> None:
        p = self._p
        try:
            theta = await p.worker.call(lambda: p.outer.apply(effect, p.store.get(effect.update)))
        except (FrameError, BlobError, DigestMismatch, LocalProtocolError) as exc:
            p.driver.feed(ApplyFailed(effect.fragment, effect.version, str(exc)))
            return
        self.keep_theta(effect.fragment, effect.version, theta)
        self._keep_update(effect.update)
        p.driver.feed(Applied(effect.fragment, effect.version, effect.state_digest))

    def _keep_update(self, update: BlobRef) -> None:
        if update not in self._updates:
            self._updates[update] = None
            self._updates_bytes += update.size
        while self._updates_bytes > self._p.updates_bytes_max and len(self._updates) > 1:
            oldest, _ = self._updates.popitem(last=False)
            self._updates_bytes -= oldest.size
            self._p.store.delete(oldest)

    async def _fetch_fragment(self, effect: FetchFragment) -> None:
        """The syncer's newest snapshot of it. The chain is brought to the snapshot's seq first, so that no commit that
        the snapshot already holds comes after it."""
        p = self._p
        backoff = Backoff()
        while True:
            try:
                snapshot = await p.donor.snapshot()
                head = snapshot.heads[effect.fragment]
                if head.version < effect.version:
                    raise TransferError(f"the snapshot has version {head.version} of {effect.version}")
                await p.donor.blob(snapshot.theta[effect.fragment])
                if p.outer.with_momentum:
                    await p.donor.blob(snapshot.momentum[effect.fragment])
                await self._fetch_entries_once(p.chain.num_entries)
                await p.worker.call(load_snapshot, snapshot, p.outer, p.store.get, only=effect.fragment)
                break
            except (TransferError, RemoteProtocolError, BlobError, DigestMismatch):
                await backoff.wait()
        theta = await p.worker.call(p.outer.theta, effect.fragment)
        p.store.delete(snapshot.theta[effect.fragment])
        self.keep_theta(effect.fragment, head.version, theta)
        p.driver.feed(FragmentReplaced(effect.fragment, head.version, head.state_digest))

    # ---- reached versions

    def keep_theta(self, fragment: FragmentId, version: Version, theta: Tensor) -> None:
        self._reached.setdefault(fragment, OrderedDict())[version] = theta

    def theta(self, fragment: FragmentId, version: Version) -> Tensor:
        """Theta_p at that version, for an adoption; earlier ones are let go of. Raises LocalProtocolError."""
        reached = self._reached.get(fragment, OrderedDict())
        theta = reached.get(version)
        if theta is None:
            raise LocalProtocolError(f"version {version} of fragment {fragment} is not at hand")
        for older in [each for each in reached if each < version]:
            del reached[older]
        return theta


class Backoff:
    """Waits that double, with jitter, up to a bound."""

    def __init__(self, first_s: float = BACKOFF_S, max_s: float = BACKOFF_S_MAX) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    async def wait(self) -> None:
        wait_s, self._next_s = self._next_s, min(self._max_s, 2 * self._next_s)
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
