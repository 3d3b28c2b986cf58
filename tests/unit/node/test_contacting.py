"""Contacts at work: kept for all peers of a machine, asked all at once, believed in nothing that can be checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import RemoteProtocolError, TransferError
from geo_diloco.manifest import WIRE_VERSION, BranchId, Digest, RunManifest, Seq, Term
from geo_diloco.node import contacting, joining
from geo_diloco.node.contacting import ContactBook, Introduction, Remembering, first_introduction, introduction_from
from geo_diloco.node.joining import Lobby
from geo_diloco.node.rundir import RunDir, default_root
from geo_diloco.node.station import candidates
from geo_diloco.observability import EventLog
from geo_diloco.protocol.election.ballots import Elector
from geo_diloco.protocol.messages import EntryHeader, Found
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.contacts import Contacts, read_contacts, write_contacts
from geo_diloco.runtime.following import Backoff
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.records import PeerRecord
from geo_diloco.runtime.session import Session, make_session
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed, seal_entry
from geo_diloco.training.presets import demo_manifest
from tests.unit.runtime.samples import BOOT, D1, PEER, RememberingPort, served

FOUNDER = Identity.generate()
MANIFEST = replace(demo_manifest(), nonce="00" * 16, founder=FOUNDER.peer_id)
RUN = MANIFEST.run_id()
IDENTITY = "QmS3GLgjqzHA3WXTxwQTnLF5fxx5DzAMPu7rK1vLfH7Kuo"
MADDR = f"/ip4/127.0.0.1/tcp/31330/p2p/{IDENTITY}"
FAR = f"/ip4/192.0.2.1/tcp/31330/p2p/{IDENTITY}"


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def found_by(identity: Identity) -> Signed:
    """The first entry of the run's chain, as that peer would sign it."""
    entry = Found(
        header=EntryHeader(run=RUN, branch=BranchId(""), term=Term(0), seq=Seq(0), prev=Digest("")),
        state_digests=(D1,),
        momentum_digests=(D1,),
        num_elements=(1,),
        layout_digest=D1,
        boot=BOOT,
        roster=(Elector(identity.peer_id, "ab" * 8, "machine", "127.0.0.1:1"),),
    )
    return seal_entry(entry, identity)


def honest(known: Contacts | None = None) -> RememberingPort:
    return RememberingPort(
        run=RUN, manifest=MANIFEST.canonical_bytes(), entries=[found_by(FOUNDER)], known=known or Contacts()
    )


@asynccontextmanager
async def peer_at(folder: Path, port: RememberingPort) -> AsyncIterator[str]:
    """Its address."""
    async with served(BlobStore(folder / f"blobs-{id(port)}"), port) as it:
        yield it.url.removeprefix("http://")


@asynccontextmanager
async def silent_peer() -> AsyncIterator[str]:
    """Takes connections and says nothing."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def with_session(go: Callable[[Session], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        session = make_session()
        try:
            async with asyncio.timeout(20):
                return await go(session)
        finally:
            await session.close()

    return asyncio.run(scenario())


# ---- the book ----------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_one_peer_has_seen_another_of_this_machine_knows(tmp_path: Path) -> None:
    async def go() -> None:
        log = EventLog()
        one = ContactBook(RUN, log, own=tmp_path / "one.json")
        await one.remember(Contacts(("a.example:1",)))
        await one.remember(Contacts(("b.example:1",)), Contacts(("heard.example:1",)))
        wanted = ("b.example:1", "a.example:1", "heard.example:1")
        assert read_contacts(tmp_path / "one.json").addresses == wanted
        other = ContactBook(RUN, log, own=tmp_path / "other.json", given=("hand.example:1",))
        assert (await other.read()).addresses == ("hand.example:1", *wanted)
        assert other.origin("hand.example:1") == "given by --contact"
        assert other.origin("a.example:1") == "known from an earlier time"

    asyncio.run(go())


def test_a_damaged_file_is_one_line_in_the_log_and_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "contacts.json"
    path.write_bytes(b"{half")

    async def go() -> None:
        log = EventLog(tmp_path / "log.jsonl")
        book = ContactBook(RUN, log, own=path)
        assert not await book.read() and not await book.read()
        (line,) = lines_of(tmp_path / "log.jsonl")
        assert line["topic"] == "contacts" and f"{path} can't be read" in line["text"]
        await book.remember(Contacts(("a.example:1",)))
        assert read_contacts(path) == Contacts(("a.example:1",))
        log.close()

    asyncio.run(go())


def test_a_file_is_written_only_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def count(path: Path, contacts: Contacts) -> None:
        written.append(path)
        write_contacts(path, contacts)

    monkeypatch.setattr(contacting, "write_contacts", count)

    async def go() -> None:
        book = ContactBook(RUN, EventLog(), own=tmp_path / "own.json")
        for _ in range(3):
            await book.remember(Contacts(("a.example:1",)))

    asyncio.run(go())
    assert written == [RunDir(default_root(RUN)).contacts, tmp_path / "own.json"]


def test_a_disk_that_takes_nothing_costs_a_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")

    async def go() -> None:
        log = EventLog(tmp_path / "log.jsonl")
        book = ContactBook(RUN, log, own=blocked / "contacts.json")
        await book.remember(Contacts(("a.example:1",)))
        assert book.known.addresses == ("a.example:1",)
        log.close()

    asyncio.run(go())
    assert any("can't be written" in line["text"] for line in lines_of(tmp_path / "log.jsonl"))


# ---- asking ------------------------------------------------------------------------------------------------------


def test_the_first_that_shows_the_run_counts_and_nobody_waits_for_those_that_are_silent(tmp_path: Path) -> None:
    async def go(session: Session) -> None:
        known = Contacts(("127.0.0.1:9",), (MADDR,))
        async with silent_peer() as silent, peer_at(tmp_path, honest(known)) as good:
            found = await first_introduction(session, RUN, [silent, "127.0.0.1:1", good])
            assert found == Introduction(address=good, manifest=MANIFEST.canonical_bytes(), contacts=known)

    with_session(go)


def lying(**change: Any) -> RememberingPort:
    port = honest()
    for name, value in change.items():
        setattr(port, name, value)
    return port


@pytest.mark.parametrize(
    ("port", "why"),
    [
        (lying(manifest=RunManifest(nonce="11" * 16).canonical_bytes()), "serves run"),
        (lying(entries=[]), "a proof of 0 entries"),
        (lying(entries=[found_by(Identity.generate())]), "does not begin with the founder's `found`"),
        (lying(entries=[found_by(FOUNDER), found_by(FOUNDER)]), "not proven"),
    ],
    ids=["another run", "no proof", "another founder", "a wrong proof"],
)
def test_a_liar_is_refused_by_name_and_holds_up_nobody(tmp_path: Path, port: RememberingPort, why: str) -> None:
    async def go(session: Session) -> None:
        async with peer_at(tmp_path, port) as liar:
            problems = await first_introduction(session, RUN, [liar])
            assert isinstance(problems, dict) and why in problems[liar]
            async with peer_at(tmp_path, honest()) as good:
                found = await first_introduction(session, RUN, [liar, good])
                assert isinstance(found, Introduction) and found.address == good

    with_session(go)


def test_who_is_gone_or_silent_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contacting, "ANSWER_S", 0.05)

    async def go(session: Session) -> None:
        async with silent_peer() as silent:
            problems = await first_introduction(session, RUN, [silent, "127.0.0.1:1"])
            assert isinstance(problems, dict)
            assert problems[silent] == "no answer in 0 s" and "127.0.0.1" in problems["127.0.0.1:1"]

    with_session(go)


def test_contacts_of_another_machine_are_not_looked_for_on_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Contacts(("127.0.0.1:9", "a.example:1"), (MADDR, FAR))

    async def go(session: Session) -> None:
        async with peer_at(tmp_path, honest(known)) as address:
            assert (await introduction_from(session, RUN, address)).contacts == known
            monkeypatch.setattr(
                contacting, "is_loopback", lambda each: "127.0.0.1" in each and not each.startswith(address)
            )
            found = await introduction_from(session, RUN, address)
            assert found.contacts == Contacts(("a.example:1",), (FAR,))

    with_session(go)


# ---- joining -----------------------------------------------------------------------------------------------------


class ShutDirectory:
    """No bootstrap answers."""

    num_contacts = 0
    silent_since = 1000.0

    def __init__(self) -> None:
        self.learned: list[str] = []

    def learn(self, maddrs: Sequence[str]) -> None:
        self.learned += [maddr for maddr in maddrs if maddr not in self.learned]

    async def wait_tried(self) -> None:
        pass

    async def wait_joined(self) -> None:
        await asyncio.Event().wait()

    async def find(self, run: str) -> list[PeerRecord]:
        return []


def lobby_in(folder: Path, session: Session, log: EventLog, *given: str) -> Lobby:
    folder.mkdir(exist_ok=True)
    run_dir = RunDir(folder)
    book = ContactBook(RUN, log, own=run_dir.contacts, given=given)
    invite = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))
    identity, directory = Identity.generate(), ShutDirectory()
    return Lobby(invite, run_dir, identity, log, directory, Bulk(session), book)  # type: ignore[arg-type]


def test_a_joiner_goes_by_a_contact_says_so_and_enters_the_directory_by_what_it_knows(tmp_path: Path) -> None:
    async def go(session: Session) -> None:
        log = EventLog(tmp_path / "log.jsonl")
        async with peer_at(tmp_path, honest(Contacts(maddrs=(MADDR,)))) as good:
            lobby = lobby_in(tmp_path / "peer", session, log, "127.0.0.1:1", good)
            await joining._find_run(lobby)
            assert lobby.manifest == MANIFEST and lobby.url == f"http://{good}"
            assert lobby.directory.learned == [MADDR]  # type: ignore[attr-defined]
            assert read_contacts(lobby.run_dir.contacts) == Contacts((good,), (MADDR,))
        log.close()
        said = [line["text"] for line in lines_of(tmp_path / "log.jsonl")]
        assert said[0] == f"no bootstrap answers: joining through {good}, given by --contact"

    with_session(go)


def test_it_asks_for_ever_with_the_reason_and_sees_what_others_on_this_machine_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff.__init__, "__defaults__", (0.01, 0.02))

    async def go(session: Session) -> None:
        log = EventLog(tmp_path / "log.jsonl")
        lobby = lobby_in(tmp_path / "peer", session, log)
        looking = asyncio.ensure_future(joining._find_run(lobby))
        texts: list[str] = []
        while not any("--contact HOST:PORT names one" in text for text in texts):
            await asyncio.sleep(0)
            texts = [line["text"] for line in lines_of(tmp_path / "log.jsonl")]
        other = ContactBook(RUN, log)
        await other.remember(Contacts(("127.0.0.1:1",)))
        while not any("none of 1 peers answers" in text for text in texts):
            await asyncio.sleep(0)
            texts = [line["text"] for line in lines_of(tmp_path / "log.jsonl")]
        async with peer_at(tmp_path, honest()) as good:
            await other.remember(Contacts((good,)))
            await looking
        log.close()
        assert f"joining through {good}, known from an earlier time" in lines_of(tmp_path / "log.jsonl")[-2]["text"]

    with_session(go)


class Arrived(Exception):
    """At the one who has the state."""


def test_if_the_state_does_not_come_from_one_the_next_contact_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff.__init__, "__defaults__", (0.01, 0.02))
    asked: list[str] = []

    async def state_from(lobby: Lobby, url: str, *unused: Any, **more: Any) -> None:
        asked.append(url)
        if url == "http://good.example:1":
            raise Arrived
        raise RemoteProtocolError("a snapshot that nobody signed")

    monkeypatch.setattr(joining, "_catch_up_from", state_from)

    async def go(session: Session) -> None:
        lobby = lobby_in(tmp_path / "peer", session, EventLog(), "liar.example:1", "good.example:1")
        lobby.url = "http://liar.example:1"
        nothing: Any = None
        with pytest.raises(Arrived):
            await joining.catch_up(lobby, nothing, nothing, nothing, whole_chain=False)

    with_session(go)
    assert asked == ["http://liar.example:1", "http://liar.example:1", "http://good.example:1"]


def test_contacts_are_candidates_only_where_the_directory_names_nobody() -> None:
    record = PeerRecord(
        run=RUN,
        peer=PEER,
        roles=("standby",),
        address="a.example:1",
        term=Term(1),
        boot=BOOT,
        head_seq=Seq(0),
        wire_version=WIRE_VERSION,
    )
    contacts = Contacts(("b.example:1",))
    assert candidates([record], contacts) == [(PEER, "a.example:1")]
    assert candidates([replace(record, roles=("learner",), address="")], contacts) == [(None, "b.example:1")]


# ---- remembering -------------------------------------------------------------------------------------------------


def test_who_answers_goes_first_with_its_way_into_the_directory_and_what_it_has_heard_goes_last(tmp_path: Path) -> None:
    async def go(session: Session) -> None:
        heard = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{IDENTITY}" for port in range(1, 7)]
        book = ContactBook(RUN, EventLog(), own=tmp_path / "own.json")
        await book.remember(Contacts(("old.example:1",), (FAR,)))
        learned: list[str] = []
        async with peer_at(tmp_path, honest(Contacts(("heard.example:1",), tuple(heard)))) as good:
            remembering = Remembering(
                book,
                session,
                own=lambda: Contacts(("me.example:1",)),
                named=lambda: ("127.0.0.1:1", good, "me.example:1"),
                learn=learned.extend,
            )
            await remembering.look()
        kept = read_contacts(tmp_path / "own.json")
        assert kept.addresses == ("me.example:1", good, "old.example:1", "heard.example:1")
        assert kept.maddrs == (*heard[:4], FAR, *heard[4:])
        assert learned == list(kept.maddrs)

    with_session(go)


def test_a_contact_that_shows_nothing_raises_a_named_error(tmp_path: Path) -> None:
    async def go(session: Session) -> None:
        with pytest.raises(TransferError):
            await introduction_from(session, RUN, "127.0.0.1:1")
        with pytest.raises(RemoteProtocolError):
            await introduction_from(session, RUN, "nonsense")

    with_session(go)
