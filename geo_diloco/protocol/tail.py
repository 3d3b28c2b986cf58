"""Entries that are known here and not on the ledger: what is kept of what comes, and what of it is on this disk.

It stands apart because nothing in here counts yet. Some will be on the ledger when it is durable, some lies on a chain
that is passed over, and some leads to a branch of the owner's that we are not on: such a reform goes before all that we
have, but can be followed only when the entries are here on which it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from geo_diloco.manifest import Digest, Seq
from geo_diloco.protocol.effects import KeepEntry
from geo_diloco.protocol.events import EntryArrived, SnapshotLoaded
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Commit, Entry, Reform

TAIL_MAX = 4096
"""Entries kept beyond the durable head. No syncer goes that far; who is that far behind asks again."""


def contained(log: Iterable[tuple[Digest, Entry]], snapshot: SnapshotLoaded) -> set[Digest]:
    """Of a log with forks: the commits that the state of that snapshot came by, as far back as it goes. Versions alone
    do not tell: a reform goes on without some, and makes others of the same number."""
    entries = dict(log)
    found: set[Digest] = set()
    for digest in (snapshot.head_digest, *(head.base for head in snapshot.heads)):
        at = digest
        while at in entries and at not in found:
            found.add(at)
            at = Digest(entries[at].header.prev)
    return {
        digest
        for digest in found
        if isinstance(entry := entries[digest], Commit) and entry.version <= snapshot.heads[entry.fragment].version
    }


class Tail:
    """What follows one peer's ledger, forks included, by digest."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._entries: dict[Digest, Entry] = {}
        self._stored: set[Digest] = set()
        """Of those: record and update are on disk."""
        self._awaited: dict[Digest, Commit] = {}
        """Commits whose update is not stored yet. The ledger may have taken them already."""
        self._bare: set[Digest] = set()
        """Commits kept without their update, which the outer state has come by as it seems. It has not if they are of a
        branch that was not ours then."""
        self._parted: EntryArrived | None = None
        """The owner's reform, on top of entries that are still to come."""

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._entries

    def __getitem__(self, digest: Digest) -> Entry:
        return self._entries[digest]

    def __len__(self) -> int:
        return len(self._entries)

    # -- entries --------------------------------------------------------------------------------------------------

    def load(self, given: Sequence[EntryArrived]) -> None:
        """What this disk has."""
        self._entries = {each.digest: each.entry for each in given}
        self._stored = {each.digest for each in given if each.stored}

    def wants(self, entry: Entry, *, durable: Seq, floor: Seq) -> bool:
        """Whether it may come to count. Entries up to `durable` are, up to `floor` nothing can be taken back."""
        seq = entry.header.seq
        leads_back = self._parted is not None and floor < seq < self._parted.entry.header.seq
        return self.goes_before(entry) or leads_back or self._ledger.seq < seq <= durable + TAIL_MAX

    def add(self, digest: Digest, entry: Entry) -> None:
        self._entries[digest] = entry

    def drop(self, digest: Digest) -> None:
        """The ledger took it, or it is on nobody's chain."""
        self._entries.pop(digest, None)
        self._stored.discard(digest)
        self._bare.discard(digest)

    def take_back(self, digest: Digest, entry: Entry) -> None:
        """The owner's reform left it behind: it is not on the ledger any more."""
        self._entries[digest] = entry
        self._awaited.pop(digest, None)

    def settle(self, knows: Callable[[Digest], bool]) -> None:
        """The ledger went on: entries of other chains, at places that are decided, may go when no later reform can lead
        to them, because the election does not know them any more. It takes none twice: what is dropped before that is
        never had again."""
        if self._parted is not None and self.goes_before(self._parted.entry):
            return  # some of them may lead to what goes on
        self._parted = None
        for digest in [d for d, entry in self._entries.items() if entry.header.seq <= self._ledger.seq]:
            self._awaited.pop(digest, None)
            if not knows(digest):
                self.drop(digest)

    # -- on this disk ---------------------------------------------------------------------------------------------

    def keep(self, digest: Digest, *, update: bool) -> KeepEntry:
        """Have the record on disk, and with `update` that of a commit as well."""
        entry = self._entries[digest]
        if not update or not isinstance(entry, Commit):
            if isinstance(entry, Commit):
                self._bare.add(digest)
            return KeepEntry(digest, None)
        self._bare.discard(digest)
        self._awaited[digest] = entry
        return KeepEntry(digest, entry.update)

    def stored(self, digest: Digest) -> Commit | None:
        """It is on disk, and so is the update of that commit, if it was awaited."""
        if digest in self._entries:
            self._stored.add(digest)
        return self._awaited.pop(digest, None)

    def lost(self, digest: Digest) -> Commit | None:
        """Nobody has the update of that commit any more; none if it was not awaited."""
        return self._awaited.pop(digest, None)

    def is_stored(self, digest: Digest) -> bool:
        return digest in self._stored and digest not in self._bare

    def awaits(self, digest: Digest) -> bool:
        """Whether its update was asked for, and no answer came yet."""
        return digest in self._awaited

    # -- the owner's reform ---------------------------------------------------------------------------------------

    def goes_before(self, entry: Entry) -> bool:
        """Whether it begins a branch that goes before ours."""
        return isinstance(entry, Reform) and entry.lineage > self._ledger.lineage

    def part(self, reform: EntryArrived) -> None:
        """It continues nothing that is known: what leads there is wanted."""
        self._parted = reform

    def joined(self, digest: Digest) -> EntryArrived | None:
        """The reform that waited for that entry; told once."""
        parted = self._parted
        if parted is None or digest != parted.entry.header.prev:
            return None
        self._parted = None
        return parted

    def reforms(self) -> Iterator[tuple[Digest, Reform]]:
        """Those in here."""
        return ((digest, entry) for digest, entry in self._entries.items() if isinstance(entry, Reform))
