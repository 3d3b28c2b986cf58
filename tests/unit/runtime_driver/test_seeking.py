"""Whoever serves is found: hint first, then the chain's word, then the directory's, and again when it is lost."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from geo_diloco.errors import RefusedError, TransferError
from geo_diloco.manifest import PeerId
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import SeekSyncer
from geo_diloco.protocol.events import Event, Tick
from geo_diloco.runtime import following, seeking
from geo_diloco.runtime.driver import Driver
from geo_diloco.runtime.seeking import Seeker

ME, ANN, BOB, EVE = (PeerId(letter * 64) for letter in "eabc")


class Core:
    deadline = None

    def __init__(self) -> None:
        self.election = SimpleNamespace(role="peer")

    def handle(self, event: Event, now: int) -> list[Any]:
        return []


class Peer:
    """A seeker; its links and donors are this object."""

    def __init__(self) -> None:
        self.core = Core()
        self.driver = Driver(self.core, log=EventLog())  # type: ignore[arg-type]
        self.roster: list[tuple[PeerId, str]] = []
        self.directory: list[tuple[PeerId | None, str]] = []
        self.answers: dict[str, asyncio.Future[str] | Exception] = {}
        self.who: dict[str, PeerId] = {}
        """Who turns out to be there, if no peer was named."""
        self.slow: dict[str, asyncio.Event] = {}
        """Until then a dial there goes on."""
        self.dialed: list[str] = []
        self.broken_off: list[str] = []
        self.changed = asyncio.Event()
        self.said = io.StringIO()
        self.finished = False
        self.found: list[str] = []
        self.serving: list[str] = []
        around: Any = self
        self.seeker = Seeker(
            self.driver,
            around,
            around,
            own=ME,
            look_up=self._look_up,
            is_final=lambda peer: peer == ANN,
            is_finished=lambda: self.finished,
            log=EventLog(stream=self.said),
        )

    async def _look_up(self) -> list[tuple[PeerId | None, str]]:
        return self.directory

    def roster_addresses(self) -> list[tuple[PeerId, str]]:
        return self.roster

    def url_of(self, peer: PeerId) -> str | None:
        return None

    def found_at(self, url: str) -> None:
        self.found.append(url)

    def serves_at(self, url: str) -> None:
        self.serving.append(url)

    def lost(self) -> None:
        self.found.append("")

    def up(self, url: str) -> asyncio.Future[str]:
        """From now on somebody answers there."""
        self.answers[url] = asyncio.get_running_loop().create_future()
        return self.answers[url]  # type: ignore[return-value]

    async def seek(self, url: str, peer: PeerId | None, *, up: Callable[[PeerId], None]) -> str:
        self.dialed.append(url.removeprefix("http://"))
        self.changed.set()
        if url in self.slow:
            try:
                await self.slow[url].wait()
            except asyncio.CancelledError:
                self.broken_off.append(url.removeprefix("http://"))
                self.changed.set()
                raise
        answer = self.answers.get(url, TransferError("nobody is there"))
        if isinstance(answer, Exception):
            raise answer
        up(peer or self.who.get(url, EVE))
        return await asyncio.shield(answer)

    def do(self, peer: PeerId | None, address: str = "") -> None:
        self.seeker.interpreters()[SeekSyncer](SeekSyncer(peer, address))

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()

    async def wait_dialed(self, *urls: str) -> None:
        """Until these were dialed, last of all and in this order."""
        while tuple(self.dialed[-len(urls) :]) != urls:
            self.changed.clear()
            await self.changed.wait()


def with_peer(monkeypatch: pytest.MonkeyPatch, talk: Callable[[Peer], Awaitable[None]]) -> None:
    monkeypatch.setattr(following, "BACKOFF_S", 0.01)
    monkeypatch.setattr(following.Backoff.__init__, "__defaults__", (0.01, 0.02))

    async def scenario() -> None:
        it = Peer()
        seeking = asyncio.ensure_future(it.seeker.run())
        async with asyncio.timeout(10):
            await talk(it)
        seeking.cancel()
        await asyncio.gather(seeking, return_exceptions=True)
        await it.driver.close()

    asyncio.run(scenario())


def test_only_a_syncer_can_be_lost_and_nobody_is_missed_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        ends = it.up("http://a:1")
        it.do(ANN, "a:1")
        await it.wait_dialed("a:1")
        it.seeker.welcomed_by(ANN)
        it.directory = [(EVE, "c:1")]
        ends.set_result("connection lost")
        await it.wait_until(lambda: it.dialed.count("c:1") == 2)
        assert "link a:1: the syncer is lost, looking who serves: connection lost" in it.said.getvalue()
        assert "link c:1: no syncer there, looking again: nobody is there" in it.said.getvalue()
        it.up("http://b:1")
        it.do(BOB, "b:1")
        await it.wait_dialed("b:1")
        it.do(EVE, "d:1")  # B was no syncer, and says so
        it.finished = True
        it.directory = []
        await it.wait_until(lambda: it.dialed.count("d:1") == 1)
        it.do(EVE, "d:1")
        await it.wait_until(lambda: it.dialed.count("d:1") == 2)
        assert "b:1" not in it.said.getvalue() and "d:1" not in it.said.getvalue()

    with_peer(monkeypatch, talk)


def test_the_chain_is_asked_before_the_directory_and_nobody_twice_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(ANN, "a:1"), (ME, "e:1"), (BOB, "b:1"), (BOB, "")]
        it.directory = [(EVE, "c:1"), (ANN, "a:1"), (EVE, "not an address")]
        await it.wait_dialed("c:1")
        assert it.dialed == ["a:1", "b:1", "c:1"]

    with_peer(monkeypatch, talk)


def test_contacts_whose_names_are_not_known_are_each_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.directory = [(None, "a:1"), (None, "b:1")]
        await it.wait_dialed("a:1", "b:1")
        it.directory = [(None, "b:1"), (None, "a:1"), (None, "c:1")]
        await it.wait_until(lambda: len(it.dialed) >= 5)
        assert it.dialed[2:5] == ["c:1", "a:1", "b:1"]

    with_peer(monkeypatch, talk)


def test_the_one_named_is_tried_at_once_whatever_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(ANN, "a:1")]
        it.up("http://a:1")
        await it.wait_dialed("a:1")
        assert it.seeker.connection > 0 and it.found[-1] == "http://a:1"
        it.up("http://b:1")
        it.do(BOB, "b:1")
        await it.wait_dialed("b:1")
        assert it.found[-3:] == ["http://a:1", "", "http://b:1"]

    with_peer(monkeypatch, talk)


def test_whoever_was_lost_is_tried_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be cut off, and then it takes seconds to find out that it does not answer."""

    async def talk(it: Peer) -> None:
        it.up("http://a:1")
        it.do(ANN, "a:1")
        await it.wait_dialed("a:1")
        it.roster = [(ANN, "a:1"), (BOB, "b:1"), (EVE, "c:1")]
        lost = it.answers.pop("http://a:1")
        assert isinstance(lost, asyncio.Future)
        lost.set_result("connection lost")
        await it.wait_dialed("c:1")
        assert it.dialed == ["a:1", "b:1", "c:1"]

    with_peer(monkeypatch, talk)


def test_work_goes_only_to_whoever_welcomed_us_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(ANN, "a:1")]
        it.up("http://a:1")
        await it.wait_dialed("a:1")
        assert it.found == ["http://a:1"] and it.serving == []
        it.seeker.welcomed_by(BOB)
        assert it.serving == []
        it.seeker.welcomed_by(ANN)
        assert it.serving == ["http://a:1"]

    with_peer(monkeypatch, talk)


def test_who_does_not_serve_is_tried_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(ANN, "a:1"), (BOB, "b:1")]
        it.up("http://a:1")
        await it.wait_dialed("a:1")
        it.do(None)
        await it.wait_dialed("a:1", "b:1", "a:1")

    with_peer(monkeypatch, talk)


def test_a_connection_that_ends_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(ANN, "a:1")]
        first = it.up("http://a:1")
        await it.wait_dialed("a:1")
        number = it.seeker.connection
        it.up("http://a:1")
        first.set_result("lost")
        await it.wait_dialed("a:1", "a:1")
        assert it.seeker.connection > number

    with_peer(monkeypatch, talk)


def test_while_it_serves_itself_it_looks_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(ANN, "a:1")]
        it.up("http://a:1")
        await it.wait_dialed("a:1")
        it.core.election.role = "syncer"
        it.driver.feed(Tick())
        await asyncio.sleep(0.1)
        assert it.dialed == ["a:1"] and it.seeker.connection == 0
        it.core.election.role = "peer"
        it.driver.feed(Tick())
        await it.wait_dialed("a:1", "a:1")

    with_peer(monkeypatch, talk)


def test_only_a_refusal_by_the_run_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(BOB, "b:1")]
        it.answers["http://b:1"] = RefusedError("go away")
        await it.wait_dialed("b:1", "b:1")
        assert it.seeker.refused is None
        it.answers["http://a:1"] = RefusedError("no token")
        it.do(ANN, "a:1")
        await it.wait_dialed("a:1")
        await asyncio.sleep(0.05)
        assert it.seeker.refused is not None
        number = len(it.dialed)
        await asyncio.sleep(0.1)
        assert len(it.dialed) == number

    with_peer(monkeypatch, talk)


def test_a_refusal_by_whom_an_address_turned_out_to_be_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.who["http://a:1"] = ANN
        connection = it.up("http://a:1")
        it.directory = [(None, "a:1")]
        await it.wait_until(lambda: it.seeker.connection > 0)
        connection.set_exception(RefusedError("another process has joined with this peer's identity"))
        await asyncio.sleep(0.05)
        assert it.seeker.refused is not None and it.dialed == ["a:1"]

    with_peer(monkeypatch, talk)


def test_who_leaves_looks_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Peer) -> None:
        it.roster = [(ANN, "a:1")]
        lost = it.up("http://a:1")
        await it.wait_dialed("a:1")
        it.seeker.leave()
        lost.set_result("leaving")
        await asyncio.sleep(0.1)
        assert it.dialed == ["a:1"]

    with_peer(monkeypatch, talk)


# ---- dials that take long ----------------------------------------------------------------------------------------


def slow_dials(monkeypatch: pytest.MonkeyPatch, slow_s: float = 0.01) -> None:
    monkeypatch.setattr(seeking, "SLOW_S", slow_s)


def test_beside_a_dial_that_takes_long_the_next_one_is_dialed_and_the_first_that_is_up_ends_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_dials(monkeypatch)

    async def talk(it: Peer) -> None:
        it.slow["http://a:1"] = asyncio.Event()
        it.up("http://b:1")
        it.roster = [(ANN, "a:1"), (BOB, "b:1"), (EVE, "c:1")]
        await it.wait_until(lambda: it.broken_off == ["a:1"])
        assert it.dialed == ["a:1", "b:1"] and it.found == ["http://b:1"]
        assert it.seeker.connection == 2
        it.seeker.welcomed_by(BOB)
        assert it.serving == ["http://b:1"]

    with_peer(monkeypatch, talk)


def test_a_dial_that_takes_long_may_still_come_up_and_ends_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_dials(monkeypatch)

    async def talk(it: Peer) -> None:
        it.slow = {"http://a:1": asyncio.Event(), "http://b:1": asyncio.Event()}
        connection = it.up("http://a:1")
        it.roster = [(ANN, "a:1"), (BOB, "b:1")]
        await it.wait_dialed("a:1", "b:1")
        it.slow["http://a:1"].set()
        await it.wait_until(lambda: it.broken_off == ["b:1"])
        assert it.found == ["http://a:1"] and it.seeker.connection > 0
        connection.set_result("lost")
        await it.wait_until(lambda: len(it.dialed) > 2)
        assert it.found[:2] == ["http://a:1", ""]

    with_peer(monkeypatch, talk)


def test_nobody_is_dialed_twice_while_all_take_long_and_all_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_dials(monkeypatch)

    async def talk(it: Peer) -> None:
        it.slow = {"http://a:1": asyncio.Event(), "http://b:1": asyncio.Event()}
        it.roster = [(ANN, "a:1"), (BOB, "b:1")]
        await it.wait_dialed("a:1", "b:1")
        for _ in range(10):
            await asyncio.sleep(0)
        assert it.dialed == ["a:1", "b:1"]
        it.slow["http://b:1"].set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert it.dialed == ["a:1", "b:1"] and it.broken_off == []
        it.slow.pop("http://a:1").set()
        await it.wait_until(lambda: len(it.dialed) > 2)

    with_peer(monkeypatch, talk)


def test_one_that_is_named_meanwhile_ends_all_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_dials(monkeypatch)

    async def talk(it: Peer) -> None:
        it.slow = {"http://a:1": asyncio.Event(), "http://b:1": asyncio.Event()}
        it.roster = [(ANN, "a:1"), (BOB, "b:1")]
        await it.wait_dialed("a:1", "b:1")
        it.up("http://c:1")
        it.do(EVE, "c:1")
        await it.wait_dialed("c:1")
        assert sorted(it.broken_off) == ["a:1", "b:1"] and it.found == ["http://c:1"]

    with_peer(monkeypatch, talk)


def test_who_is_elected_itself_meanwhile_ends_all_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_dials(monkeypatch)

    async def talk(it: Peer) -> None:
        it.slow = {"http://a:1": asyncio.Event(), "http://b:1": asyncio.Event()}
        it.roster = [(ANN, "a:1"), (BOB, "b:1")]
        await it.wait_dialed("a:1", "b:1")
        it.core.election.role = "syncer"
        it.driver.feed(Tick())
        await it.wait_until(lambda: sorted(it.broken_off) == ["a:1", "b:1"])
        assert it.seeker.connection == 0

    with_peer(monkeypatch, talk)
