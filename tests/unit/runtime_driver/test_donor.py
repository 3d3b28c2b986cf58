"""Who is asked for what: mirrors, which the chain or the directory names, and the syncer as their reserve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import TransferError
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import donor as donor_module
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.donor import HEAD_START_S, KNOWN_MAX, MIRRORS_AT_ONCE, PATIENCE_S, Donors
from geo_diloco.runtime.fetch import NobodyLeftError, Source
from geo_diloco.runtime.routes import IN_VAIN_MAX
from geo_diloco.runtime.session import TransferRefused
from geo_diloco.runtime.store import BlobStore, blob_ref

ME, ANN, BOB = (PeerId(letter * 64) for letter in "abc")
DATA = b"an update"
REF = blob_ref(DATA)


class Net:
    """Answers each URL by its script, those first that are asked without a delay."""

    def __init__(self, answers: dict[str, Exception | None]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.sources: list[Source] = []

    async def fetch(self, bulk: Bulk, sources: Sequence[Source], ref: BlobRef, store: BlobStore) -> int:
        self.sources = list(sources)
        failures: dict[str, TransferError] = {}
        for source in sorted(sources, key=lambda source: source.delay_s):
            self.asked.append(source.url.removeprefix("http://"))
            answer = self.answers[self.asked[-1]]
            if answer is None:
                store.put(DATA)
                return 0
            assert isinstance(answer, TransferError)
            failures[source.url] = answer
        raise NobodyLeftError(failures)


Talk = Callable[[Donors, Net, BlobStore], Awaitable[None]]


def with_donors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, Exception | None],
    talk: Talk,
    *,
    is_mirror: bool = False,
) -> None:
    net = Net(answers)
    monkeypatch.setattr(donor_module, "fetch_blob", net.fetch)

    async def scenario() -> None:
        store = BlobStore(tmp_path)
        session: Any = None
        donors = Donors(Bulk(session), store, own=ME, is_mirror=is_mirror)
        donors.roster_addresses = lambda: [(ME, "me:1"), (ANN, "ann:1"), (BOB, "bob:1"), (BOB, "no address")]
        async with asyncio.timeout(10):
            await talk(donors, net, store)

    asyncio.run(scenario())


GONE, NO = TransferError("gone"), TransferRefused("no such blob")


def test_who_can_be_reached_asks_the_syncer_first_because_others_wait_for_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        await donors.blob(REF)
        assert net.asked == ["bob:1"] and store.has(REF)

    with_donors(tmp_path, monkeypatch, {"bob:1": None}, talk, is_mirror=True)


def test_a_learner_asks_mirrors_first_and_the_syncer_is_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        await donors.blob(REF)
        assert net.asked == ["ann:1"]
        assert net.sources == [
            Source("http://ann:1", patience_s=PATIENCE_S),
            Source("http://bob:1", delay_s=HEAD_START_S, has_all=True),
        ]

    with_donors(tmp_path, monkeypatch, {"ann:1": None}, talk)


@pytest.mark.parametrize("why", ["it was waited for in vain", "it rests"])
def test_a_mirror_that_was_of_no_use_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        if why == "it rests":
            donors._bulk.routes.failed("http://ann:1")
        else:
            donors._bulk.routes.to("http://ann:1").waited_in_vain = IN_VAIN_MAX
        await donors.blob(REF)
        assert net.sources == [Source("http://ann:1"), Source("http://bob:1", has_all=True)]

    with_donors(tmp_path, monkeypatch, {"ann:1": None}, talk)


def test_no_more_mirrors_than_are_of_use_are_asked_at_once_and_not_all_learners_ask_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors = [f"mirror{n}:1" for n in range(10)]
    first: set[str] = set()

    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.directory_addresses = lambda: [(PeerId(f"{n:064x}"), address) for n, address in enumerate(mirrors)]
        donors.roster_addresses = lambda: []
        donors.found_at("http://bob:1")
        for _ in range(50):
            await donors.blob(REF)
            assert len(net.sources) == MIRRORS_AT_ONCE + 1
            first.add(net.sources[0].url)
        assert len(first) > 5

    with_donors(tmp_path, monkeypatch, dict.fromkeys([*mirrors, "bob:1"], None), talk)


def test_before_an_update_counts_as_lost_everybody_has_been_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors = {f"mirror{n}:1": NO for n in range(10)}

    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.directory_addresses = lambda: [(PeerId(f"{n:064x}"), address) for n, address in enumerate(mirrors)]
        donors.no_mirrors = lambda: [PeerId(f"{7:064x}")]
        donors.roster_addresses = lambda: []
        donors.found_at("http://bob:1")
        with pytest.raises(TransferRefused):
            await donors.blob(REF)
        assert sorted(net.asked) == sorted([*mirrors, "bob:1"])
        net.answers["mirror7:1"] = None
        await donors.blob(REF)
        assert store.has(REF)

    with_donors(tmp_path, monkeypatch, {**mirrors, "bob:1": NO}, talk)


@pytest.mark.parametrize("ann", [GONE, NO])
def test_what_a_mirror_can_not_give_the_syncer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ann: Exception
) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        await donors.blob(REF)
        assert net.asked == ["ann:1", "bob:1"]

    with_donors(tmp_path, monkeypatch, {"ann:1": ann, "bob:1": None}, talk)


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
        assert isinstance(caught.value, TransferRefused) is (raised is TransferRefused)

    with_donors(tmp_path, monkeypatch, {"ann:1": ann, "bob:1": bob}, talk)


def test_without_a_syncer_others_are_asked_and_never_make_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(donors: Donors, net: Net, store: BlobStore) -> None:
        donors.found_at("http://bob:1")
        donors.lost()
        with pytest.raises(TransferError) as caught:
            await donors.blob(REF)
        assert not isinstance(caught.value, TransferRefused) and sorted(net.asked) == ["ann:1", "bob:1"]
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
