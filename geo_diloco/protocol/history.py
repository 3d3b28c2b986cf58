"""How far back the ledger can go: the owner's reform leaves behind what was durable.

It stands apart because it is a second ledger, far behind the first, and the entries between the two. Two snapshots on
this disk contain what lies behind it, and from there on this peer can't go back: it would have to begin the run again.
"""

from __future__ import annotations

from collections import deque

from geo_diloco.manifest import Digest, FragmentId, Seq
from geo_diloco.protocol.ledger import Ledger, head_of
from geo_diloco.protocol.messages import Commit, Entry, FragmentHead

ENTRIES_KEPT = 16_384
"""For a way back; each participant of a commit counts for one."""


class History:
    """A ledger as it was, and all that was folded since."""

    def __init__(self, base: Ledger, *, entries_kept: int) -> None:
        self._base = base
        self._entries_kept = entries_kept
        self._size = 0
        self._folded: deque[tuple[Entry, Digest]] = deque()
        """After the base, oldest first."""
        self._made: dict[FragmentId, FragmentHead] = {}
        """By the newest commit that went into the base, where a snapshot was ahead of that."""

    @property
    def floor(self) -> Seq:
        """There is no way back behind this entry."""
        return self._base.seq

    def folded(self, entry: Entry, digest: Digest) -> None:
        """The ledger took that entry."""
        self._folded.append((entry, digest))
        self._size += _size(entry)

    def settle(self, floor: Seq) -> None:
        """Up to `floor` snapshots contain everything: what is too much may go."""
        while self._size > self._entries_kept and self._folded and self._folded[0][0].header.seq <= floor:
            entry, digest = self._folded.popleft()
            self._size -= _size(entry)
            self._base.apply(entry, digest)
            if isinstance(entry, Commit):
                self._made[entry.fragment] = head_of(entry, digest)

    def back(self, to: Seq) -> tuple[Ledger, list[tuple[Entry, Digest]]]:
        """The ledger as it was at entry `to`, not behind the floor, and what came after it, which is forgotten."""
        assert to >= self.floor, f"entry {to} lies behind {self.floor}"
        left: list[tuple[Entry, Digest]] = []
        while self._folded and self._folded[-1][0].header.seq > to:
            left.append(self._folded.pop())
            self._size -= _size(left[-1][0])
        again, made = self._base.copy(), dict(self._made)
        for entry, digest in self._folded:
            again.apply(entry, digest)
            if isinstance(entry, Commit):
                made[entry.fragment] = head_of(entry, digest)
        for p, head in made.items():
            # A snapshot that was ahead of its seq in some fragments may have been of what is abandoned now.
            if again.contained[p] > head.version:
                again.contained[p], again.heads[p] = head.version, head
        return again, left[::-1]


def _size(entry: Entry) -> int:
    return 1 + len(entry.participants) if isinstance(entry, Commit) else 1
