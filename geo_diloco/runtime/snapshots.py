"""Snapshots of the outer state: one blob per fragment, raw float32, named and signed as of a seq.

A snapshot must be of one moment, so it is made on the worker thread from what is visible there: the outer state and a
ledger that moves in the same thread, entry by entry. Fragments that did not change keep their blob. One is refreshed
on disk every so many commits, so that a restart is "the newest snapshot and the entries after it"; blobs that only
older snapshots name are deleted once nobody can still be fetching them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from geo_diloco.errors import BlobError, DigestMismatch, RemoteProtocolError
from geo_diloco.manifest import Digest, FragmentId, RunId, Seq, Version
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import BlobRef, Commit, Entry, Finished, Snapshot
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.store import BlobStore, blob_ref
from geo_diloco.runtime.wire import Signed, open_snapshot, seal_snapshot

SAVE_EVERY_COMMITS = 64
KEPT_S = 600.0
"""A snapshot that was handed out stays fetchable for this long."""
KEPT_MIN = 2
_NAME = re.compile(r"snapshot-(\d{12})\.json")


@dataclass
class _Kept:
    snapshot: Snapshot
    signed: Signed
    at: float
    """Handed out last."""
    made_at: float


class SnapshotShelf:
    """Makes, keeps and finds the snapshots of one run. `advance`, `save` and `make` belong to the worker thread."""

    def __init__(
        self,
        folder: Path,
        *,
        run: RunId,
        outer: OuterState,
        store: BlobStore,
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._run = run
        self._outer = outer
        self._store = store
        self._identity = identity
        self._clock = clock
        self.ledger = Ledger(founder=identity.peer_id)
        self._made: dict[FragmentId, tuple[Version, BlobRef, BlobRef]] = {}
        self._kept: list[_Kept] = []
        self._commits_since = 0
        self.named: set[Digest] = set()
        """Blobs of kept snapshots, and of one in the making."""

    def advance(self, entry: Entry, digest: Digest) -> None:
        """The outer state now stands at this entry. No snapshot goes beyond the last commit of a run: that it is
        finished is for whoever loads one to hear from the chain."""
        if isinstance(entry, Finished):
            return
        self.ledger.apply(entry, digest)
        if isinstance(entry, Commit):
            self._commits_since += 1

    @property
    def is_due(self) -> bool:
        return self._commits_since >= SAVE_EVERY_COMMITS or not self._kept

    def make(self, *, age_s_max: float = 0.0) -> Signed:
        """A signed snapshot of now, or one made up to so many seconds ago; the same again while nothing has changed."""
        ledger = self.ledger
        newest = self._kept[-1] if self._kept else None
        if newest is not None and self._is_whole(newest.snapshot):
            is_young = self._clock() - newest.made_at < age_s_max
            if is_young or newest.snapshot.seq == ledger.seq:
                newest.at = self._clock()
                return newest.signed
        blobs = [self._blobs_of(FragmentId(p)) for p in range(len(ledger.heads))]
        snapshot = Snapshot(
            run=self._run,
            branch=ledger.branch,
            term=ledger.term,
            seq=ledger.seq,
            head_digest=ledger.head_digest,
            heads=tuple(ledger.heads),
            theta=tuple(theta for theta, _ in blobs),
            momentum=tuple(momentum for _, momentum in blobs),
            tokens_per_fragment=tuple(ledger.tokens),
            num_elements=ledger.num_elements,
            layout_digest=ledger.layout_digest,
            progress=ledger.progress,
        )
        now = self._clock()
        self._kept.append(_Kept(snapshot, seal_snapshot(snapshot, self._identity), now, now))
        self._prune()
        return self._kept[-1].signed

    def _is_whole(self, snapshot: Snapshot) -> bool:
        """A blob that was found damaged on disk is dropped; then its snapshot is made again."""
        return all(self._store.has(blob) for blob in (*snapshot.theta, *snapshot.momentum))

    def save(self) -> None:
        """Make one and have it on disk, as the newest."""
        signed = self.make()
        seq = self._kept[-1].snapshot.seq
        atomic_write(self._folder / f"snapshot-{seq:012d}.json", signed.to_line().encode())
        self._commits_since = 0
        for path in self._files()[:-KEPT_MIN]:
            path.unlink(missing_ok=True)

    def _blobs_of(self, fragment: FragmentId) -> tuple[BlobRef, BlobRef]:
        version = self._outer.version(fragment)
        made = self._made.get(fragment)
        if made is None or made[0] != version or not (self._store.has(made[1]) and self._store.has(made[2])):
            theta, momentum = self._outer.fragment_bytes(fragment)
            self.named |= {blob_ref(theta).digest, blob_ref(momentum).digest}
            made = (version, self._store.put(theta), self._store.put(momentum))
            self._made[fragment] = made
        return made[1], made[2]

    def _files(self) -> list[Path]:
        """Oldest first."""
        return sorted(path for path in self._folder.glob("snapshot-*.json") if _NAME.fullmatch(path.name))

    def _prune(self) -> None:
        on_disk = {int(match[1]) for path in self._files()[-KEPT_MIN:] if (match := _NAME.fullmatch(path.name))}
        old_at = self._clock() - KEPT_S
        stay = [each for each in self._kept[:-KEPT_MIN] if each.at >= old_at or each.snapshot.seq in on_disk]
        gone = [each for each in self._kept[:-KEPT_MIN] if each not in stay]
        self._kept = stay + self._kept[-KEPT_MIN:]
        named = {blob for each in self._kept for blob in (*each.snapshot.theta, *each.snapshot.momentum)}
        for each in gone:
            for blob in {*each.snapshot.theta, *each.snapshot.momentum} - named:
                self._store.delete(blob)
        self.named = self.blobs()

    def blobs(self) -> set[Digest]:
        """Digests of all blobs that kept snapshots name."""
        return {blob.digest for each in self._kept for blob in (*each.snapshot.theta, *each.snapshot.momentum)}

    # ---- finding

    def restore(self) -> Seq | None:
        """Load the newest snapshot on disk that can be used into the outer state, and its blobs' names into memory.

        Returns its seq; the caller brings `ledger` there. None if there is none.
        """
        for path in reversed(self._files()):
            try:
                signed = Signed.from_line(path.read_bytes())
                snapshot = open_snapshot(signed)
                if signed.signer != self._identity.peer_id or snapshot.run != self._run:
                    continue
                load_snapshot(snapshot, self._outer, self._store.get)
            except (OSError, RemoteProtocolError, BlobError, DigestMismatch):
                continue
            self._kept.append(_Kept(snapshot, signed, self._clock(), -math.inf))
            for p, head in enumerate(snapshot.heads):
                self._made[FragmentId(p)] = (head.version, snapshot.theta[p], snapshot.momentum[p])
            self.named = self.blobs()
            return snapshot.seq
        return None


def load_snapshot(
    snapshot: Snapshot, outer: OuterState, read: Callable[[BlobRef], bytes], *, only: FragmentId | None = None
) -> None:
    """Take a snapshot's fragments (or one) into the outer state. Raises BlobError or DigestMismatch."""
    for p, head in enumerate(snapshot.heads):
        if only is not None and p != only:
            continue
        outer.load_fragment(
            FragmentId(p),
            head.version,
            theta=read(snapshot.theta[p]),
            momentum=read(snapshot.momentum[p]) if outer.with_momentum else None,
            state_digest=head.state_digest,
            momentum_digest=head.momentum_digest,
        )
