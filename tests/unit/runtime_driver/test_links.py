"""The syncer's end of control connections: what is too long is not even recorded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, PeerId, RunId, Seq, Term
from geo_diloco.observability import EventLog
from geo_diloco.protocol.events import Connected, Event, Received
from geo_diloco.protocol.messages import ContributionId, Envelope, Hello
from geo_diloco.runtime.driver import Driver
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.links import AcceptedLinks, Sealer

ANN, SYNCER = PeerId("a" * 64), PeerId("b" * 64)
RUN = RunId("1" * 40)


class Core:
    """Of a run of two fragments."""

    deadline = None
    ledger = SimpleNamespace(heads=[None, None])

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def handle(self, event: Event, now: int) -> list[Any]:
        self.heard.append(event)
        return []


class Link:
    """Remembers why it was closed."""

    peer = ANN

    def __init__(self) -> None:
        self.closed = ""

    def close(self, reason: str, *, code: int = 0) -> None:
        self.closed = reason


def saying(undecided: int) -> Envelope:
    claims = tuple(ContributionId(ANN, FragmentId(0), Digest("c" * 64), step) for step in range(undecided))
    hello = Hello(
        wire_version=1,
        layout_digest=Digest("d" * 64),
        trains=True,
        host="",
        software="",
        address="",
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


def test_a_hello_that_lists_more_than_a_learner_can_have_ends_the_link_unheard() -> None:
    async def scenario() -> None:
        core, honest, liar = Core(), Link(), Link()
        driver = Driver(core, log=EventLog())  # type: ignore[arg-type]
        links = AcceptedLinks(driver, Sealer(Identity.generate(), run=RUN, boot=BootId("0" * 16)))
        links.opened(liar, saying(3))  # type: ignore[arg-type]
        assert "more undecided" in liar.closed and core.heard == []
        links.opened(honest, saying(2))  # type: ignore[arg-type]
        assert honest.closed == "" and [type(event) for event in core.heard] == [Connected, Received]
        links.received(honest, replace(saying(3), number=2))  # type: ignore[arg-type]
        assert "more undecided" in honest.closed and len(core.heard) == 2
        await driver.close()

    asyncio.run(scenario())
