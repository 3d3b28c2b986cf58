"""Brings one fragment of the outer state to a version by other means than the next update.

Needed by a peer that is far behind, whose update nobody holds any more, or that merged something which did not become
durable. Its own newest snapshot and the updates on its disk come first; else a snapshot of anyone's does. Whose does
not matter: the chain says which bits a version has, and nothing is loaded that is beyond what is durable here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from geo_diloco.errors import (
    BlobError,
    DigestMismatch,
    FrameError,
    LocalProtocolError,
    RemoteProtocolError,
    TransferError,
)
from geo_diloco.manifest import FragmentId, RunId, Seq, Version
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import ApplyUpdate
from geo_diloco.protocol.events import FragmentReplaced
from geo_diloco.protocol.messages import BlobRef, Commit, Snapshot
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.following import Backoff
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.snapshots import SnapshotShelf, load_snapshot
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed, open_snapshot


class SnapshotDonor(Protocol):
    """Whoever has snapshots."""

    async def signed_snapshots(self) -> list[Signed]: ...
    async def blob(self, blob: BlobRef) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ReplacingParts:
    """What it works with."""

    driver: Driver
    worker: Worker
    run: RunId
    outer: OuterState
    store: BlobStore
    chain: ChainCopy
    shelf: SnapshotShelf | None
    """None where no snapshots are kept."""
    donor: SnapshotDonor
    log: EventLog


class FragmentReplacing:
    """For the event loop's thread."""

    def __init__(self, parts: ReplacingParts) -> None:
        self._p = parts

    async def replace(self, fragment: FragmentId, version: Version) -> FragmentReplaced:
        """However long that takes. Raises nothing but bugs."""
        event = await self._from_own_disk(fragment, version)
        backoff = Backoff()
        while event is None:
            try:
                event = await self._from_donor(fragment, version)
            except (TransferError, RemoteProtocolError, BlobError, DigestMismatch) as exc:
                self._p.log.note("chain", f"fragment {fragment} is not replaced yet: {exc}", level="warning")
                await backoff.wait()
        return event

    # ---- from our own disk

    async def _from_own_disk(self, fragment: FragmentId, version: Version) -> FragmentReplaced | None:
        snapshot = None if self._p.shelf is None else self._p.shelf.newest_for(fragment, version)
        if snapshot is None:
            return None
        head = snapshot.heads[fragment]
        made = next((each for each in self._durable_commits(fragment) if each.version <= head.version), None)
        if made is not None and (made.version, made.state_digest) != (head.version, head.state_digest):
            return None  # of a chain that the owner's reform left behind
        commits = self._commits(fragment, head.version, version)
        if commits is None:
            return None
        try:
            await self._p.worker.call(self._redo, snapshot, fragment, commits)
        except (BlobError, DigestMismatch, FrameError, LocalProtocolError) as exc:
            self._p.log.note("chain", f"fragment {fragment} can't be made again from this disk: {exc}")
            return None
        state_digest = commits[-1].state_digest if commits else snapshot.heads[fragment].state_digest
        return FragmentReplaced(fragment, version, state_digest)

    def _redo(self, snapshot: Snapshot, fragment: FragmentId, commits: list[Commit]) -> None:
        load_snapshot(snapshot, self._p.outer, self._p.store.get, only=fragment)
        for commit in commits:
            self._p.outer.apply(apply_of(commit), self._p.store.get(commit.update))

    def _commits(self, fragment: FragmentId, after: Version, until: Version) -> list[Commit] | None:
        """The durable commits of a fragment after one version up to another; None if one of them is not at hand."""
        found: dict[int, Commit] = {}
        for commit in self._durable_commits(fragment):
            if commit.version <= after:
                break
            if commit.version <= until:
                found[commit.version] = commit
        wanted = range(after + 1, until + 1)
        if any(each not in found or not self._p.store.has(found[each].update) for each in wanted):
            return None
        return [found[each] for each in wanted]

    def _durable_commits(self, fragment: FragmentId) -> Iterator[Commit]:
        """Newest first, as far back as they are known here; older ones are read from the disk."""
        core = self._p.driver.core
        seq = core.ledger.seq
        while (digest := core.election.digest_at(Seq(seq))) is not None:
            entry = self._p.chain.entry(digest)
            if isinstance(entry, Commit) and entry.fragment == fragment:
                yield entry
            seq = Seq(seq - 1)

    # ---- from somebody's snapshot

    async def _from_donor(self, fragment: FragmentId, version: Version) -> FragmentReplaced:
        snapshot = await self._fetch(fragment, version)
        head = snapshot.heads[fragment]
        ledger = self._p.driver.core.ledger
        await self._p.driver.wait_until(lambda: ledger.heads[fragment].version >= head.version)
        self._check(snapshot, fragment)
        await self._p.donor.blob(snapshot.theta[fragment])
        if self._p.outer.with_momentum:
            await self._p.donor.blob(snapshot.momentum[fragment])
        await self._p.worker.call(load_snapshot, snapshot, self._p.outer, self._p.store.get, only=fragment)
        for blob in (snapshot.theta[fragment], snapshot.momentum[fragment]):
            if self._p.shelf is None or blob.digest not in self._p.shelf.named:
                self._p.store.delete(blob)
        if self._p.shelf is not None:
            self._p.shelf.hurry()  # the updates before it are not here, nor may they come any more
        return FragmentReplaced(fragment, head.version, head.state_digest)

    async def _fetch(self, fragment: FragmentId, version: Version) -> Snapshot:
        for signed in await self._p.donor.signed_snapshots():
            snapshot = open_snapshot(signed)
            sizes = [len(part) for part in (snapshot.heads, snapshot.theta, snapshot.momentum)]
            if snapshot.run != self._p.run or sizes != [len(self._p.outer.layout.num_elements)] * 3:
                raise RemoteProtocolError("a snapshot of another run or layout", peer=signed.signer)
            if snapshot.heads[fragment].version >= version:
                return snapshot
        raise TransferError(f"no snapshot has version {version} of it yet")

    def _check(self, snapshot: Snapshot, fragment: FragmentId) -> None:
        """The chain must say the same bits; else the snapshot is of a chain that did not come to count."""
        head = snapshot.heads[fragment]
        size = 4 * self._p.outer.layout.num_elements[fragment]
        if snapshot.theta[fragment].size != size or snapshot.momentum[fragment].size != size:
            raise RemoteProtocolError("a snapshot of another size than the layout")
        now = self._p.driver.core.ledger.heads[fragment]
        for commit in self._durable_commits(fragment):
            if commit.version < head.version:
                break
            if commit.version == head.version:
                if (commit.state_digest, commit.momentum_digest) != (head.state_digest, head.momentum_digest):
                    raise RemoteProtocolError(f"a snapshot with another version {head.version} than the chain's")
                return
        if (now.version, now.state_digest, now.momentum_digest) != (
            head.version,
            head.state_digest,
            head.momentum_digest,
        ):
            raise RemoteProtocolError(f"a snapshot with a version {head.version} that the chain does not know")


def apply_of(commit: Commit) -> ApplyUpdate:
    """What the core asks for when the commit's turn has come."""
    return ApplyUpdate(
        fragment=commit.fragment,
        version=commit.version,
        update=commit.update,
        state_digest=commit.state_digest,
        momentum_digest=commit.momentum_digest,
        eta=commit.eta,
        mu=commit.mu,
    )
