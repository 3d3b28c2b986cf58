"""A peer's own copy of the chain: verified, contiguous, on disk, and folded into a ledger of the shell's own.

Entries come from the syncer's announcements, from fetches and from this disk; whichever way, they pass here once.
In this version the syncer is always the founder, whose key is in the manifest and so in the run id: an entry signed by
anyone else is not of this run. Writing is in order and off the loop; a follower does not wait for it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from geo_diloco.errors import RemoteProtocolError, RunDirError
from geo_diloco.manifest import PeerId, RunId
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Entry
from geo_diloco.runtime.store import ChainStore
from geo_diloco.runtime.wire import Signed, open_entry


class ChainCopy:
    """For the loop's thread, except `ledger` while it is being loaded."""

    def __init__(self, store: ChainStore, *, run: RunId, signer: PeerId) -> None:
        self._store = store
        self._run = run
        self._signer = signer
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="chain")
        self._taken: list[tuple[Signed, Entry]] = []
        self.ledger = Ledger(founder=signer)

    def load(self) -> list[tuple[Signed, Entry]]:
        """Read and verify the copy on disk, from the first entry on. Raises RunDirError if it is not of this run."""
        for signed in self._store.load():
            try:
                entry = self.verify(signed)
            except RemoteProtocolError as exc:
                raise RunDirError(f"the chain on disk can't be used: {exc}") from exc
            why_not = self.ledger.why_not(entry, signed.signer)
            if why_not is not None:
                raise RunDirError(f"the chain on disk is damaged: {why_not}")
            self.ledger.apply(entry, signed.digest)
            self._taken.append((signed, entry))
        return list(self._taken)

    def verify(self, signed: Signed) -> Entry:
        """The entry, if it is of this run and signed by its syncer; RemoteProtocolError otherwise."""
        entry = open_entry(signed)
        if signed.signer != self._signer:
            raise RemoteProtocolError("an entry signed by a peer that is not the run's syncer", peer=signed.signer)
        if entry.header.run != self._run:
            raise RemoteProtocolError(f"an entry of run {entry.header.run[:12]}", peer=signed.signer)
        return entry

    def take(self, signed: Signed, entry: Entry) -> bool:
        """Keep a verified entry if it is the next one. False if it is an old one or comes too early."""
        if self.ledger.why_not(entry, signed.signer) is not None:
            return False
        self.ledger.apply(entry, signed.digest)
        self._taken.append((signed, entry))
        self._writer.submit(self._store.append, signed)
        return True

    async def append(self, signed: Signed, entry: Entry) -> None:
        """The syncer's own way: on disk when it returns. Raises what the disk raises."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._store.append, signed)
        self.ledger.apply(entry, signed.digest)
        self._taken.append((signed, entry))

    def signed(self, from_seq: int, limit: int) -> list[Signed]:
        return [signed for signed, _ in self._taken[from_seq : from_seq + limit]]

    def entries(self, from_seq: int = 0) -> list[tuple[Signed, Entry]]:
        return self._taken[from_seq:]

    @property
    def num_entries(self) -> int:
        return len(self._taken)

    def close(self) -> None:
        """Waits for what is still to be written."""
        self._writer.shutdown(wait=True)
        self._store.close()
