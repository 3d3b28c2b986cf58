"""Who is asked for what: the syncer first, then whoever the chain or the directory names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import TransferError
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import donor as donor_module
from geo_diloco.runtime.donor import KNOWN_MAX, Donors
from geo_diloco.runtime.session import ByteCounters, TransferRefused
from geo_diloco.runtime.store import BlobStore, blob_ref

ME, ANN, BOB = (PeerId(letter * 64) for letter in "abc")
DATA = b"an update"
REF = blob_ref(DATA)


class Net:
    """Answers each URL by its script."""

    def __init__(self, answers: dict[str, Exception | None]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def fetch(self, session: Any, url: str, ref: BlobRef, store: BlobStore, **more: Any) -> int:
        self.asked.append(url.removeprefix("http://"))
        answer = self.answers[self.asked[-1]]
        if answer is not None:
            raise answer
        store.put(DATA)
        return 0


Talk = Callable[[Donors, Net, BlobStore], Awaitable[None]]


def with_donors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Exception | None], talk: Talk
) -> None:
    net = Net(answers)
    monkeypatch.setattr(donor_module, "fetch_blob", net.fetch)

    async def scenario() -> None:
        store = BlobStore(tmp_path)
        session: Any = None
        donors = Donors(session, store, own=ME, counters=ByteCounters())
        donors.roster_addresses = lambda: [(ME, "me:1"), (ANN, "ann:1"), (BOB, "bob:1"), (BOB, "no address")]
        async with asyncio.timeout(10):
            await talk(donors, net, store)

    asyncio.run(scenario())


GONE, NO = TransferError("gone"), TransferRefused("no such blob")


def test_the_syncer_is_asked_first_and_that_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        await donors.blob(REF)
        await donors.blob(REF)
        assert net.asked == ["bob:1"] and store.has(REF)

    with_donors(tmp_path, monkeypatch, {"bob:1": None}, talk)


@pytest.mark.parametrize("syncer", [GONE, NO])
def test_what_it_can_not_give_others_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncer: Exception) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        await donors.blob(REF)
        assert net.asked == ["bob:1", "ann:1"]

    with_donors(tmp_path, monkeypatch, {"bob:1": syncer, "ann:1": None}, talk)


@pytest.mark.parametrize(
    ("ann", "bob", "raised"),
    [(NO, NO, TransferRefused), (GONE, NO, TransferRefused), (NO, GONE, TransferError), (GONE, GONE, TransferError)],
)
def test_only_the_syncers_word_makes_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ann: Exception, bob: Exception, raised: type[Exception]
) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        with pytest.raises(TransferError) as caught:
            await donors.blob(REF)
        assert type(caught.value) is raised

    with_donors(tmp_path, monkeypatch, {"ann:1": ann, "bob:1": bob}, talk)


def test_without_a_syncer_others_are_asked_and_never_make_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        donors.lost()
        with pytest.raises(TransferError) as caught:
            await donors.blob(REF)
        assert type(caught.value) is TransferError and net.asked == ["ann:1", "bob:1"]
        donors.roster_addresses = lambda: []
        waiting = asyncio.ensure_future(donors.blob(REF))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "with nobody known it waits"
        net.answers["carl:1"] = None
        donors.found_at("http://carl:1")
        await waiting
        assert store.has(REF)

    with_donors(tmp_path, monkeypatch, {"ann:1": NO, "bob:1": NO}, talk)


def test_addresses_are_believed_by_who_says_them_and_no_more_than_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.roster_addresses = lambda: [(ANN, "ann:1")]
        donors.says(ANN, "elsewhere:1")
        assert donors.url_of(ANN) == "http://ann:1"
        donors.directory_addresses = lambda: [(ANN, "ann:2")]
        assert donors.url_of(ANN) == "http://ann:2", "the directory is newer than the chain"
        donors.says(BOB, "not an address")
        assert donors.url_of(BOB) is None
        for number in range(KNOWN_MAX + 10):
            donors.says(PeerId(f"{number:064x}"), "x:1")
        assert len(donors._said) == KNOWN_MAX
        donors.says(PeerId(f"{KNOWN_MAX:064x}"), "")
        assert donors.address_of(PeerId(f"{KNOWN_MAX:064x}")) == ""

    with_donors(tmp_path, monkeypatch, {}, talk)


# ---- handing in


def test_work_waits_for_whoever_serves_and_turns_round_when_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []
    hangs = asyncio.Event

    async def upload(session: Any, url: str, ref: BlobRef, store: BlobStore, **more: Any) -> int:
        pushed.append(url)
        if url == "http://ann:1":
            await hangs().wait()
        return 7

    monkeypatch.setattr(donor_module, "upload_blob", upload)

    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        handing_in = asyncio.ensure_future(donors.upload(REF, ""))
        await asyncio.sleep(0.02)
        assert pushed == [], "who is only known to be there may not serve"
        donors.serves_at("http://ann:1")
        await asyncio.sleep(0.02)
        donors.lost()
        donors.serves_at("http://ann:1")
        await asyncio.sleep(0.02)
        assert pushed == ["http://ann:1"] and not handing_in.done(), "the link alone broke"
        donors.serves_at("http://bob:1")
        with pytest.raises(TransferError, match="another syncer"):
            await handing_in
        assert await donors.upload(REF, "") == 7 and pushed[-1] == "http://bob:1"

    with_donors(tmp_path, monkeypatch, {}, talk)
