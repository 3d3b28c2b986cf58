"""A peer's own log of the chain: every entry that the core wanted kept, verified, on disk, found by its digest.

Entries come from the syncer's announcements, from electors, from fetches and from this disk; whichever way, they pass
here once. Which of them count is the core's to say: several may continue the same one, and none is taken out again.
Writing is in order and off the loop. `counting_chain` answers without a core what counts, for a folder at rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from geo_diloco.errors import LocalProtocolError, RemoteProtocolError, RunDirError
from geo_diloco.manifest import Digest, RunId
from geo_diloco.protocol.messages import Commit, Entry, Reform
from geo_diloco.runtime.store import ChainStore
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
        self._written: set[Digest] = set()
        self.updates: dict[Digest, Digest] = {}
        """Update blobs that entries here name, and the entry."""

    def load(self) -> list[Link]:
        """Read and verify the copy on disk. Raises RunDirError if it is not of this run."""
        for signed in self._store.load():
            try:
                self._add(signed, self.verify(signed))
                self._written.add(signed.digest)
            except RemoteProtocolError as exc:
                raise RunDirError(f"the chain on disk can't be used: {exc}") from exc
        return self.entries()

    def verify(self, signed: Signed) -> Entry:
        """The entry, if it is of this run; RemoteProtocolError otherwise. Who may sign it is the core's to say."""
        entry = open_entry(signed)
        if entry.header.run != self._run:
            raise RemoteProtocolError(f"an entry of run {entry.header.run[:12]}", peer=signed.signer)
        return entry

    def knows(self, digest: Digest) -> bool:
        return digest in self._entries

    def arrives(self, signed: Signed, entry: Entry) -> None:
        """Have a verified entry at hand while the core looks at it."""
        self._arriving[signed.digest] = signed, entry

    def passes(self, digest: Digest) -> None:
        """The core has looked."""
        self._arriving.pop(digest, None)

    def take(self, digest: Digest) -> bool:
        """The core wants it kept: from now on it is found here. False if it was already."""
        if digest in self._entries:
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
        self._written.add(digest)

    def is_written(self, digest: Digest) -> bool:
        return digest in self._written

    async def append(self, signed: Signed, entry: Entry) -> None:
        """The syncer's own way: on disk when it returns, and only then found here. Raises what the disk raises."""
        await self._write(signed, True)
        self._written.add(signed.digest)
        self._add(signed, entry)

    async def _write(self, signed: Signed, sync: bool) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, lambda: self._store.append(signed, sync=sync))

    def signed(self, digest: Digest) -> Signed | None:
        link = self._entries.get(digest)
        return None if link is None else link[0]

    def entry(self, digest: Digest) -> Entry | None:
        link = self._entries.get(digest)
        return None if link is None else link[1]

    def entries(self) -> list[Link]:
        """All of them, in the order in which they came."""
        return list(self._entries.values())

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        """Waits for what is still to be written."""
        self._writer.shutdown(wait=True)
        self._store.close()


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
