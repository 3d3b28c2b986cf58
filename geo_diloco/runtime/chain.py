"""A peer's own log of the chain: every entry that the core wanted kept, verified, on disk, found by its digest.

Memory has the newest; what the core has let go of is read from the disk when somebody asks for it.

Entries come from the syncer's announcements, from electors, from fetches and from this disk; whichever way, they pass
here once. Which of them count is the core's to say: several may continue the same one, and none is taken out again.
Writing is in order and off the loop. `read_entries` and `counting_chain` answer without a core what counts, for a
folder at rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from geo_diloco.errors import BlobError, LocalProtocolError, RemoteProtocolError, RunDirError
from geo_diloco.manifest import Digest, RunId, Seq
from geo_diloco.protocol.messages import BlobRef, Commit, Entry, Reform
from geo_diloco.runtime.store import ChainStore, Place
from geo_diloco.runtime.wire import Signed, open_entry

Link = tuple[Signed, Entry]


class ChainCopy:
    """For the loop's thread."""

    def __init__(self, store: ChainStore, *, run: RunId) -> None:
        self._store = store
        self._run = run
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="chain")
        self._entries: dict[Digest, Link] = {}
        """In the order in which they came."""
        self._arriving: dict[Digest, Link] = {}
        """Verified, and not asked to be kept (yet)."""
        self._places: dict[Digest, Place] = {}
        """Where on disk, of those that are written."""
        self.updates: dict[Digest, Digest] = {}
        """Update blobs that entries here name and that were not let go of, and the entry."""

    def load(self) -> list[Link]:
        """Read and verify the copy on disk. Raises RunDirError if it is not of this run."""
        for signed, place in self._store.load_placed():
            try:
                self._add(signed, self.verify(signed))
                self._places[signed.digest] = place
            except RemoteProtocolError as exc:
                raise RunDirError(f"the chain on disk can't be used: {exc}{self._store.repair}") from exc
        return self.entries()

    def verify(self, signed: Signed) -> Entry:
        """The entry, if it is of this run; RemoteProtocolError otherwise. Who may sign it is the core's to say."""
        entry = open_entry(signed)
        if entry.header.run != self._run:
            raise RemoteProtocolError(f"an entry of run {entry.header.run[:12]}", peer=signed.signer)
        return entry

    def knows(self, digest: Digest) -> bool:
        return digest in self._entries or digest in self._places

    def arrives(self, signed: Signed, entry: Entry) -> None:
        """Have a verified entry at hand while the core looks at it."""
        self._arriving[signed.digest] = signed, entry

    def passes(self, digest: Digest) -> None:
        """The core has looked."""
        self._arriving.pop(digest, None)

    def take(self, digest: Digest) -> bool:
        """The core wants it kept: from now on it is found here. False if it was already."""
        if self.knows(digest):
            return False
        link = self._arriving.pop(digest, None)
        if link is None:
            raise LocalProtocolError(f"entry {digest[:12]} is to be kept and is not here")
        self._add(*link)
        return True

    def _add(self, signed: Signed, entry: Entry) -> None:
        self._entries.setdefault(signed.digest, (signed, entry))
        if isinstance(entry, Commit):
            self.updates[entry.update.digest] = signed.digest

    async def write(self, digest: Digest, *, sync: bool) -> None:
        """Have it on disk, after all that was taken before it. Raises what the disk raises."""
        signed, _ = self._entries[digest]
        await self._write(signed, sync)

    def is_written(self, digest: Digest) -> bool:
        return digest in self._places

    async def append(self, signed: Signed, entry: Entry) -> None:
        """The syncer's own way: on disk when it returns, and only then found here. Raises what the disk raises."""
        await self._write(signed, True)
        self._add(signed, entry)

    async def _write(self, signed: Signed, sync: bool) -> None:
        loop = asyncio.get_running_loop()
        place = await loop.run_in_executor(self._writer, lambda: self._store.append(signed, sync=sync))
        self._places.setdefault(signed.digest, place)

    def let_go(self, digests: Iterable[Digest], updates: Iterable[BlobRef]) -> None:
        """Take these entries out of memory, as far as they are on disk, and don't count on these updates any more."""
        for digest in digests:
            if digest in self._places:
                self._entries.pop(digest, None)
        for update in updates:
            self.updates.pop(update.digest, None)

    def newest_updates(self, bytes_max: int, *, after: Seq) -> set[Digest]:
        """Update blobs of all entries in memory after that seq, and of older ones as long as they take no more."""
        commits = [entry for _, entry in self._entries.values() if isinstance(entry, Commit)]
        commits.sort(key=lambda commit: commit.header.seq, reverse=True)
        kept: set[Digest] = set()
        for commit in commits:
            bytes_max -= commit.update.size
            if commit.header.seq > after or bytes_max >= 0:
                kept.add(commit.update.digest)
        return kept

    def signed(self, digest: Digest) -> Signed | None:
        """None if it is not here, or can't be read any more."""
        link, place = self._entries.get(digest), self._places.get(digest)
        if link is not None or place is None:
            return None if link is None else link[0]
        try:
            signed = self._store.read(place)
        except (BlobError, RemoteProtocolError):
            return None
        return signed if signed.digest == digest else None

    def entry(self, digest: Digest) -> Entry | None:
        """As `signed`."""
        link = self._entries.get(digest)
        if link is not None:
            return link[1]
        signed = self.signed(digest)
        try:
            return None if signed is None else open_entry(signed)
        except RemoteProtocolError:
            return None

    def entries(self) -> list[Link]:
        """Those in memory, in the order in which they came: all, until some are let go of."""
        return list(self._entries.values())

    @property
    def num_entries(self) -> int:
        return len(self._entries.keys() | self._places.keys())

    def close(self) -> None:
        """Waits for what is still to be written."""
        self._writer.shutdown(wait=True)
        self._store.close()


def read_entries(path: Path) -> list[Entry]:
    """The entries that count of a log on disk, each with its signature checked. Its owner may be at work.

    Raises RunDirError.
    """
    return [entry for _, entry in counting_chain(read_log(path))]


def read_log(path: Path) -> list[tuple[Digest, Entry]]:
    """Every entry on disk, forks included, each with its signature checked. The folder's owner may be at work.

    Raises RunDirError, which names the line.
    """
    chain = ChainStore(path, is_read_only=True)
    log: list[tuple[Digest, Entry]] = []
    try:
        for signed in chain.load():
            log.append((signed.digest, open_entry(signed)))
    except RemoteProtocolError as exc:
        raise RunDirError(f"the chain {path} is damaged in line {len(log) + 1}: {exc}") from exc
    finally:
        chain.close()
    return log


def counting_chain(entries: Iterable[tuple[Digest, Entry]]) -> list[tuple[Digest, Entry]]:
    """Of a log with forks: the path to the entry of highest rank (lineage, term, seq), oldest first, as far back as it
    goes."""
    known = dict(entries)
    if not known:
        return []
    lineages: dict[str, int] = {}
    for digest, entry in known.items():  # what an entry follows came before it
        before = lineages.get(entry.header.prev, 0)
        lineages[digest] = entry.lineage if isinstance(entry, Reform) else before
    at: Digest | None = max(known, key=lambda each: (lineages[each], known[each].header.term, known[each].header.seq))
    path: list[tuple[Digest, Entry]] = []
    while at in known:
        assert at is not None
        entry = known.pop(at)
        path.append((at, entry))
        at = Digest(entry.header.prev)
    return path[::-1]
