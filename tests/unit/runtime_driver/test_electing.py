"""An elector's hands: what was voted is on disk before the core hears so, and others get the chain as it was signed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import RunDirError, TransferError
from geo_diloco.manifest import BootId, BranchId, Digest, PeerId, Seq, Term
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import PersistVote, SendEntries
from geo_diloco.protocol.election.ballots import PeerBoot, Rank, VoteRecord
from geo_diloco.protocol.events import Event, VotePersisted
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import electing as electing_module
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.driver import Driver
from geo_diloco.runtime.electing import Electing, read_vote_record
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import TransferRefused
from geo_diloco.runtime.wire import seal_entry
from tests.unit.runtime.samples import commit, record

ANN = PeerId("a" * 64)
ME = Identity.generate()
RECORD = VoteRecord(
    branch=BranchId("b" * 64),
    lineage=0,
    term=Term(3),
    voted_for=PeerBoot(ANN, BootId("c" * 16)),
    held=Rank(0, Term(2), Seq(7)),
    enrolment="ab",
)


class Core:
    deadline = None

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def handle(self, event: Event, now: int) -> list[Any]:
        self.heard.append(event)
        return []


class Elector:
    """The hands under test; what they work with is this object, too."""

    def __init__(self, path: Path, write: Callable[[Path, bytes], None]) -> None:
        self.core = Core()
        self.driver = Driver(self.core, log=EventLog())  # type: ignore[arg-type]
        self.told: list[str] = []
        self.pushed: list[Digest] = []
        self.held = {commit(ME.peer_id).update.digest}
        self.is_linked = True
        self.failure: Exception | None = None
        entries = [commit(ME.peer_id), record(4, Digest("d" * 64))]
        self._entries = {signed.digest: (signed, entry) for entry in entries for signed in [seal_entry(entry, ME)]}
        self.digests = tuple(self._entries)
        around: Any = self
        self.hands = Electing(
            self.driver, path, links=around, chain=around, store=around, donors=around, log=EventLog(), write=write
        )
        self._do = self.hands.interpreters()

    def do(self, effect: Any) -> None:
        self._do[type(effect)](effect)

    async def done(self) -> None:
        async with asyncio.timeout(10):
            while self.driver._jobs:
                await asyncio.gather(*self.driver._jobs)

    def tell(self, peer: PeerId, text: str) -> bool:
        if self.is_linked:
            self.told.append(text)
        return self.is_linked

    def signed(self, digest: Digest) -> Any:
        return self._entries.get(digest, (None, None))[0]

    def entry(self, digest: Digest) -> Any:
        return self._entries.get(digest, (None, None))[1]

    def has(self, blob: BlobRef) -> bool:
        return blob.digest in self.held

    def url_of(self, peer: PeerId) -> str | None:
        return "http://ann"

    async def push(self, blob: BlobRef, url: str, *, ask_first: bool) -> int:
        assert ask_first
        if self.failure is not None:
            raise self.failure
        self.pushed.append(blob.digest)
        return 0


def with_elector(
    path: Path, talk: Callable[[Elector], Awaitable[None]], write: Callable[[Path, bytes], None] = atomic_write
) -> None:
    async def scenario() -> None:
        it = Elector(path, write)
        await talk(it)
        await it.driver.close()
        assert it.driver.failure is None

    asyncio.run(scenario())


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "vote.json"

    async def talk(it: Elector) -> None:
        it.do(PersistVote(1, RECORD))
        assert it.core.heard == []
        await it.done()
        assert it.core.heard == [VotePersisted(1)] and read_vote_record(path) == RECORD

    assert read_vote_record(path) is None
    with_elector(path, talk)


def test_records_that_wait_are_one_write_of_the_newest(tmp_path: Path) -> None:
    written: list[bytes] = []

    async def talk(it: Elector) -> None:
        for number in range(1, 6):
            it.do(PersistVote(number, replace(RECORD, term=Term(number))))
        await it.done()
        assert it.core.heard[-1] == VotePersisted(5) and len(written) < 5
        assert read_vote_record(tmp_path / "vote.json") == replace(RECORD, term=Term(5))

    def write(path: Path, data: bytes) -> None:
        written.append(data)
        atomic_write(path, data)

    with_elector(tmp_path / "vote.json", talk, write=write)


def test_a_full_disk_holds_the_elector_up_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(electing_module, "DISK_RETRY_S", 0.01)
    tries = 0

    def write(path: Path, data: bytes) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(28, "No space left on device")
        atomic_write(path, data)

    async def talk(it: Elector) -> None:
        it.do(PersistVote(1, RECORD))
        await it.done()
        assert tries == 3 and it.core.heard == [VotePersisted(1)]

    with_elector(tmp_path / "vote.json", talk, write=write)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"term":1}', b"x" * 5000, b"\xff"])
def test_a_damaged_record_is_an_error_and_never_a_fresh_start(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "vote.json"
    path.write_bytes(text)
    with pytest.raises(RunDirError, match="is damaged"):
        read_vote_record(path)


def test_entries_go_out_as_signed_and_updates_after_them(tmp_path: Path) -> None:
    async def talk(it: Elector) -> None:
        it.do(SendEntries(ANN, it.digests, upload=True))
        assert len(it.told) == 2 and it.pushed == []
        await it.done()
        assert it.pushed == [commit(ME.peer_id).update.digest]
        it.do(SendEntries(ANN, it.digests, upload=False))
        await it.done()
        assert len(it.told) == 4 and len(it.pushed) == 1

    with_elector(tmp_path / "vote.json", talk)


@pytest.mark.parametrize("failure", [TransferError("gone"), TransferRefused("not wanted")])
def test_an_update_that_does_not_get_there_is_left_for_the_next_time(tmp_path: Path, failure: Exception) -> None:
    async def talk(it: Elector) -> None:
        it.failure = failure
        it.do(SendEntries(ANN, it.digests, upload=True))
        await it.done()
        it.failure = None
        it.do(SendEntries(ANN, it.digests, upload=True))
        await it.done()
        assert len(it.pushed) == 1

    with_elector(tmp_path / "vote.json", talk)


def test_what_is_not_here_or_not_reachable_is_not_sent(tmp_path: Path) -> None:
    async def talk(it: Elector) -> None:
        it.do(SendEntries(ANN, (Digest("e" * 64), *it.digests), upload=False))
        assert len(it.told) == 2
        it.held = set()
        it.do(SendEntries(ANN, it.digests, upload=True))
        await it.done()
        it.is_linked = False
        it.do(SendEntries(ANN, it.digests, upload=True))
        await it.done()
        assert it.pushed == []

    with_elector(tmp_path / "vote.json", talk)
