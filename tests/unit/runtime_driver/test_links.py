"""Control connections as the core means them: what is too long is not even recorded, and nobody is dialed twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from geo_diloco.errors import LocalProtocolError, RemoteProtocolError, TransferError
from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, PeerId, RunId, Seq, Term
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import CloseConnection, Send
from geo_diloco.protocol.election.ballots import Serving
from geo_diloco.protocol.events import Connected, Disconnected, Event, Received
from geo_diloco.protocol.messages import ContributionId, Envelope, Hello
from geo_diloco.runtime.driver import Driver
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.links import Links, Sealer
from geo_diloco.runtime.wire import Signed

ANN, SYNCER = PeerId("a" * 64), PeerId("b" * 64)
RUN = RunId("1" * 40)
BALLOT = Send(ANN, BranchId(""), Term(1), Serving(term=Term(1), syncer=SYNCER), dial=True)


class Core:
    """Of a run of two fragments."""

    deadline = None
    ledger = SimpleNamespace(heads=[None, None])

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def handle(self, event: Event, now: int) -> list[Any]:
        self.heard.append(event)
        return []

    def kinds(self) -> list[type[Event]]:
        return [type(event) for event in self.heard]


class Link:
    """Remembers what it was told, and why it was closed. Says nothing of its own."""

    evidence = ""
    nonce = "n"
    is_refused = False

    def __init__(self, peer: PeerId = ANN) -> None:
        self.peer = peer
        self.close_reason = ""
        self.said: list[str] = []
        self._closing = asyncio.Event()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def next_number(self) -> int:
        return len(self.said) + 1

    def send(self, text: str) -> None:
        self.said.append(text)

    def send_sealed(self, seal: Callable[[], str]) -> None:
        self.said.append(seal())

    def close(self, reason: str, *, code: int = 0) -> None:
        self.close_reason = reason
        self._closing.set()

    async def wait_closing(self) -> None:
        await self._closing.wait()

    def __aiter__(self) -> Link:
        return self

    async def __anext__(self) -> Envelope:
        await self._closing.wait()
        raise StopAsyncIteration


def saying(undecided: int) -> Envelope:
    claims = tuple(ContributionId(ANN, FragmentId(0), Digest("c" * 64), step) for step in range(undecided))
    hello = Hello(
        wire_version=1,
        layout_digest=Digest("d" * 64),
        trains=True,
        host="",
        software="",
        address="10.0.0.1:5",
        step=0,
        tokens=0,
        head_seq=Seq(0),
        undecided=claims,
        proof="",
    )
    return Envelope(
        run=RUN,
        branch=BranchId(""),
        term=Term(1),
        boot=BootId("0" * 16),
        sender=ANN,
        to=SYNCER,
        nonce="n",
        number=1,
        message=hello,
    )


class Network:
    """Dials whoever is asked for."""

    def __init__(self, links: dict[str, Link]) -> None:
        self.links = links
        self.dialed: list[str] = []

    @asynccontextmanager
    async def connect(self, url: str, expected: PeerId | None) -> AsyncIterator[Any]:
        self.dialed.append(url)
        await asyncio.sleep(0)
        if url not in self.links:
            raise TransferError(f"{url}: nobody is there")
        yield self.links[url]


class Peer:
    """Links under test, with a core that remembers."""

    def __init__(self, network: Network | None = None) -> None:
        self.core = Core()
        self.driver = Driver(self.core, log=EventLog())  # type: ignore[arg-type]
        self.network = network or Network({})
        self.heard: list[Any] = []
        self.entries: list[Signed] = []
        self.links = Links(
            self.driver,
            Sealer(Identity.generate(), run=RUN, boot=BootId("0" * 16)),
            connect=self.network.connect,
            url_of=lambda peer: "ann" if peer == ANN else None,
            take_entry=self._take,
            heard=lambda peer, message: self.heard.append(message),
            log=EventLog(),
        )
        self._do = self.links.interpreters()

    def _take(self, signed: Signed) -> None:
        if signed.body == "forged":
            raise RemoteProtocolError("forged")
        self.entries.append(signed)

    def do(self, effect: Any) -> None:
        self._do[type(effect)](effect)


def with_peer(talk: Callable[[Peer], Awaitable[None]], links: Callable[[], dict[str, Link]] = dict) -> None:
    async def scenario() -> None:
        peer = Peer(Network(links()))
        async with asyncio.timeout(10):
            await talk(peer)
        await peer.driver.close()
        assert peer.driver.failure is None

    asyncio.run(scenario())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_hello_that_lists_more_than_a_learner_can_have_ends_the_link_unheard() -> None:
    async def talk(it: Peer) -> None:
        honest, liar = Link(), Link()
        it.links.opened(liar, saying(3))  # type: ignore[arg-type]
        assert "more undecided" in liar.close_reason and it.core.heard == []
        it.links.opened(honest, saying(2))  # type: ignore[arg-type]
        assert honest.close_reason == "" and it.core.kinds() == [Connected, Received]
        it.links.received(honest, replace(saying(3), number=2))  # type: ignore[arg-type]
        assert "more undecided" in honest.close_reason and len(it.core.heard) == 2
        assert [message.address for message in it.heard] == ["10.0.0.1:5"]

    with_peer(talk)


def test_an_entry_may_come_on_any_link_and_a_forged_one_ends_it() -> None:
    async def talk(it: Peer) -> None:
        link = Link()
        it.links.opened(link, saying(0))  # type: ignore[arg-type]
        it.links.received(link, Signed("honest", ANN, "", "entry"))  # type: ignore[arg-type]
        assert [signed.body for signed in it.entries] == ["honest"]
        it.links.received(link, Signed("forged", ANN, "", "entry"))  # type: ignore[arg-type]
        assert "forged" in link.close_reason and len(it.entries) == 1

    with_peer(talk)


def test_a_peer_is_gone_when_its_last_link_is() -> None:
    async def talk(it: Peer) -> None:
        first, second = Link(), Link()
        it.links.opened(first, saying(0))  # type: ignore[arg-type]
        it.links.opened(second, saying(0))  # type: ignore[arg-type]
        it.links.closed(first, "replaced")  # type: ignore[arg-type]
        it.links.closed(first, "replaced")  # type: ignore[arg-type]
        assert Disconnected not in it.core.kinds()
        it.links.closed(second, "gone")  # type: ignore[arg-type]
        assert it.core.heard[-1] == Disconnected(ANN, "gone") and it.links.num_peers == 0

    with_peer(talk)


def test_a_ballot_to_a_peer_without_a_link_waits_for_one_dial() -> None:
    ann = Link

    async def talk(it: Peer) -> None:
        for _ in range(3):
            it.do(BALLOT)
        it.do(replace(BALLOT, to=SYNCER))
        it.do(replace(BALLOT, dial=False))
        await settle()
        assert it.network.dialed == ["ann"]
        assert len(it.network.links["ann"].said) == 3
        it.do(BALLOT)
        await settle()
        assert it.network.dialed == ["ann"] and len(it.network.links["ann"].said) == 4
        it.do(CloseConnection(ANN, "over"))
        await settle()
        assert it.core.heard == [Connected(ANN), Disconnected(ANN, "over")]

    with_peer(talk, lambda: {"ann": ann()})


def test_who_does_not_answer_is_not_dialed_again_at_once() -> None:
    async def talk(it: Peer) -> None:
        it.do(BALLOT)
        await settle()
        it.do(BALLOT)
        await settle()
        assert it.network.dialed == ["ann"] and it.core.heard == []

    with_peer(talk)


def test_looking_for_the_syncer_uses_the_link_that_there_is() -> None:
    async def talk(it: Peer) -> None:
        it.do(BALLOT)
        await settle()
        ups: list[tuple[int, PeerId]] = []
        seeking = asyncio.ensure_future(it.links.seek("ann", ANN, up=lambda peer: ups.append((1, peer))))
        by_address = asyncio.ensure_future(it.links.seek("ann", None, up=lambda peer: ups.append((2, peer))))
        await settle()
        assert it.core.heard == [Connected(ANN), Connected(ANN, True), Connected(ANN, True)]
        assert ups == [(1, ANN), (2, ANN)] and it.links.num_peers == 1
        it.do(CloseConnection(ANN, "does not serve"))
        assert await seeking == await by_address == "does not serve"
        await settle()
        assert it.links.num_peers == 0

    with_peer(talk, lambda: {"ann": Link()})


def test_a_message_that_can_not_be_sealed_when_its_turn_comes_is_our_bug_and_ends_the_peer() -> None:
    async def talk() -> None:
        peer, link = Peer(), Link()
        waiting: list[Callable[[], str]] = []
        link.send_sealed = waiting.append  # type: ignore[method-assign]
        peer.links.opened(link, saying(0))  # type: ignore[arg-type]
        peer.do(replace(BALLOT, branch=BranchId("no digest")))
        assert peer.driver.failure is None, "said, and not sealed yet"
        with pytest.raises(LocalProtocolError):
            waiting[0]()
        assert isinstance(peer.driver.failure, LocalProtocolError)
        await peer.driver.close()

    asyncio.run(talk())
