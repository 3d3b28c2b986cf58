"""An elector's hands: its record on disk before anything that depends on it is said, and its chain for who needs it.

The record is one small file that is replaced whole and synced. Several that wait are one write: the newest says all.
It belongs to this disk alone: in a copy of the folder it would let one vote be given twice, so no backup has it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from geo_diloco.errors import RunDirError, TapeError, TransferError
from geo_diloco.manifest import Digest, PeerId
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import PersistVote, SendEntries
from geo_diloco.protocol.election.ballots import VoteRecord
from geo_diloco.protocol.events import VotePersisted
from geo_diloco.protocol.messages import BlobRef, Commit
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.donor import Donors
from geo_diloco.runtime.driver import Driver, Interpreter
from geo_diloco.runtime.links import Links
from geo_diloco.runtime.session import TransferRefused
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import MESSAGE_LINE_BYTES_MAX, pack_line
from geo_diloco.tape import build, plain

RECORD_BYTES_MAX = 4096
DISK_RETRY_S = 1.0
SUPPLIED_MAX = 4
"""Peers that get our update blobs at once."""


def read_vote_record(path: Path) -> VoteRecord | None:
    """None if there never was one. Raises RunDirError if it is damaged: guessing it could give one vote twice."""
    try:
        with path.open("rb") as file:
            text = file.read(RECORD_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise RunDirError(f"vote record {path}: {exc.strerror or exc}") from exc
    try:
        if len(text) > RECORD_BYTES_MAX:
            raise TapeError("too long")
        record = build(VoteRecord, json.loads(text), path.name)
    except (ValueError, RecursionError, TapeError) as exc:
        raise RunDirError(
            f"vote record {path} is damaged: {exc}; remove it, and this peer is a new elector, as if its disk were new"
        ) from exc
    assert isinstance(record, VoteRecord)
    return record


class Electing:
    """Interprets what the election asks for. For the event loop's thread."""

    def __init__(
        self,
        driver: Driver,
        path: Path,
        *,
        links: Links,
        chain: ChainCopy,
        store: BlobStore,
        donors: Donors,
        log: EventLog,
        write: Callable[[Path, bytes], None] = atomic_write,
    ) -> None:
        self._driver = driver
        self._path = path
        self._links = links
        self._chain = chain
        self._store = store
        self._donors = donors
        self._log = log
        self._write = write
        self._to_persist: PersistVote | None = None
        self._is_persisting = False
        self._supply: dict[PeerId, deque[BlobRef]] = {}
        """Updates that a candidate still has to get from us, oldest first."""

    def interpreters(self) -> Mapping[type, Interpreter]:
        return {PersistVote: self._persist, SendEntries: self._send_entries}

    # ---- the record

    def _persist(self, effect: PersistVote) -> None:
        self._to_persist = effect
        if not self._is_persisting:
            self._is_persisting = True
            self._driver.start(self._persist_all(), name="vote")

    async def _persist_all(self) -> None:
        """A full disk holds this elector up, visibly, and doesn't make it forget."""
        while (effect := self._to_persist) is not None:
            self._to_persist = None
            text = json.dumps(plain(effect.record), separators=(",", ":")).encode()
            try:
                await asyncio.to_thread(self._write, self._path, text)
            except OSError as exc:
                self._log.note("vote", f"the vote record can't be written, trying again: {exc}", level="error")
                self._to_persist = self._to_persist or effect
                await asyncio.sleep(DISK_RETRY_S)
                continue
            self._driver.feed(VotePersisted(effect.number))
        self._is_persisting = False

    # ---- the chain for others

    def _send_entries(self, effect: SendEntries) -> None:
        updates: list[BlobRef] = []
        for digest in effect.digests:
            if not self._send_entry(effect.to, digest):
                return
            entry = self._chain.entry(digest)
            if isinstance(entry, Commit):
                updates.append(entry.update)
        if effect.upload:
            self._upload_to(effect.to, updates)

    def _send_entry(self, to: PeerId, digest: Digest) -> bool:
        """False if there is no link to that peer: it will ask again."""
        signed = self._chain.signed(digest)
        line = "" if signed is None else signed.to_line()
        if not line or len(line) > MESSAGE_LINE_BYTES_MAX:
            self._log.note("ballots", f"entry {digest[:12]} is not here to be sent", level="warning")
            return True
        return self._links.tell(to, pack_line(line))

    def _upload_to(self, to: PeerId, updates: list[BlobRef]) -> None:
        """What it asks for now replaces what it asked for before."""
        if to in self._supply:
            self._supply[to] = deque(updates)
        elif len(self._supply) < SUPPLIED_MAX and updates:
            self._supply[to] = deque(updates)
            self._driver.start(self._upload_all(to), name=f"supply {to[:8]}")

    async def _upload_all(self, to: PeerId) -> None:
        """One after the other. What does not get there now is asked for again."""
        try:
            while self._supply[to]:
                blob = self._supply[to].popleft()
                url = self._donors.url_of(to)
                if url is None:
                    return
                if not self._store.has(blob):
                    continue
                try:
                    await self._donors.push(blob, url, ask_first=True)
                except TransferRefused as exc:
                    self._log.note("ballots", f"update {blob.digest[:12]} for {to[:8]}: {exc}", level="debug")
                except TransferError as exc:
                    self._log.note("ballots", f"no updates for {to[:8]}: {exc}", level="debug")
                    return
        finally:
            del self._supply[to]
