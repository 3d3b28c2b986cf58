"""What this disk and this memory may let go of: update blobs, and entries that everybody has long agreed on.

It stands apart because it is the one place that takes something away. An update may go once a snapshot on this disk
contains it (a learner's checkpoint is one) and another one, in case that is damaged, does too: what the election wants
of an elector, every update from a held snapshot up to what it acks, stays. Some more are kept for others: a learner
that is a little behind fetches updates, one that is far behind takes a snapshot.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from geo_diloco.manifest import Digest, Seq
from geo_diloco.protocol.messages import BlobRef, Commit

SPARE_VERSIONS = 8
"""Updates of a fragment that are kept in any case, beyond S_max."""


@dataclass(frozen=True, slots=True)
class _Update:
    seq: Seq
    blob: BlobRef


class Pruning:
    """The updates of the ledger's commits, and how many of them are needed here."""

    def __init__(self, *, versions_kept: int, bytes_kept: int | None) -> None:
        """Of each fragment the newest `versions_kept` stay, and more as long as all take no more than `bytes_kept`
        together; everything, if that is none."""
        self._versions_kept = versions_kept
        self._bytes_kept = bytes_kept
        self._updates: list[deque[_Update]] = []
        """Per fragment, oldest first."""
        self._num_named: Counter[Digest] = Counter()
        """Commits above that name a blob: two that change nothing have the same."""
        self._bytes = 0
        self._snapshots: tuple[Seq | None, Seq | None] = None, None
        """The newest two on this disk, the newest last."""

    @property
    def floor(self) -> Seq | None:
        """Up to there two snapshots on this disk contain everything; none while there are not two."""
        return self._snapshots[0]

    def start(self, num_fragments: int) -> None:
        self._updates = [deque() for _ in range(num_fragments)]

    def snapshot_kept(self, seq: Seq) -> None:
        """Another snapshot is on this disk; of older ones than the one before it nothing is expected any more."""
        self._snapshots = self._snapshots[1], seq

    def folded(self, commit: Commit) -> None:
        """A commit is on the ledger."""
        if self._bytes_kept is None:
            return
        self._updates[commit.fragment].append(_Update(commit.header.seq, commit.update))
        self._num_named[commit.update.digest] += 1
        self._bytes += commit.update.size

    def rewound(self, to: Seq) -> bool:
        """The owner's reform left behind what came after `to`, updates and snapshots; files of them stay. Whether the
        newest snapshot was one of these: a process that started now would begin there."""
        for updates in self._updates:
            while updates and updates[-1].seq > to:
                self._forget(updates.pop().blob)
        older, newest = self._snapshots
        if newest is None or newest <= to:
            return False
        self._snapshots = None, None if older is None or older > to else older
        return True

    def _forget(self, blob: BlobRef) -> bool:
        """Whether no commit left names it."""
        self._bytes -= blob.size
        self._num_named[blob.digest] -= 1
        if self._num_named[blob.digest]:
            return False
        del self._num_named[blob.digest]
        return True

    def due(self) -> tuple[BlobRef, ...]:
        """Updates that are not needed here any more, oldest first; told once."""
        gone: list[BlobRef] = []
        while self._bytes_kept is not None and self._bytes > self._bytes_kept:
            oldest = min(
                (each for each in self._updates if self._may_go(each)), key=lambda each: each[0].seq, default=None
            )
            if oldest is None:
                break
            blob = oldest.popleft().blob
            if self._forget(blob):
                gone.append(blob)
        return tuple(gone)

    def _may_go(self, updates: deque[_Update]) -> bool:
        """Of one fragment, the oldest."""
        return self.floor is not None and len(updates) > self._versions_kept and updates[0].seq <= self.floor
