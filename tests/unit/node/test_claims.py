"""Whoever says that he serves: the chain and his key show it, or the owner's commands don't go by it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import BootId, Digest, PeerId, RunManifest, Seq, Term
from geo_diloco.node import claims, owning, reforming
from geo_diloco.node.claims import KeyNotShown, check_head, check_syncer
from geo_diloco.node.owning import Doubt, Finder, Found, Owned
from geo_diloco.node.reforming import Intended, Present
from geo_diloco.protocol.election.ballots import Rank, Refuse
from geo_diloco.protocol.messages import Envelope, Hello, Reform
from geo_diloco.runtime import http
from geo_diloco.runtime.control import ControlLink, greeting
from geo_diloco.runtime.identity import Identity, admission_proof
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Signed, open_entry, seal_envelope
from tests.unit.runtime.samples import RUN, RememberingPort, Served, served
from tests.unit.runtime.test_chain import BOOTS, FOUNDER, LIAR, SECOND, THIRD, Chain, handed_over, proof, reformed, seat

INVITE = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))
OWNED = Owned(invite=INVITE, identity=FOUNDER, local_url="")


@dataclass
class SpeakingPort(RememberingPort):
    """Refuses every Hello as a peer of another branch does, signed by `key`."""

    key: Identity = LIAR

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        super().opened(link, envelope)
        answer = Envelope(
            run=RUN,
            branch=envelope.branch,
            term=Term(1),
            boot=BootId("0" * 16),
            sender=self.key.peer_id,
            to=envelope.sender,
            nonce=link.nonce,
            number=link.next_number(),
            message=Refuse(reason="branch", detail="another", term=Term(1)),
        )
        link.send(seal_envelope(answer, self.key))


def serving(identity: Identity) -> Chain:
    """The founder takes that peer and another as electors, and it is elected."""
    BOOTS[identity.peer_id] = BootId("f" * 16)
    chain = Chain().found().open(1, FOUNDER, (FOUNDER,)).roster(1, FOUNDER, FOUNDER, identity, THIRD)
    return chain.open(2, identity, (identity, THIRD))


def with_peer(folder: Path, go: Callable[[Served], Awaitable[None]]) -> None:
    """At a real server, whose port speaks with that server's key, and shows the chain that it serves."""

    async def scenario() -> None:
        port = SpeakingPort()
        async with asyncio.timeout(20), served(BlobStore(folder), port) as it:
            port.key = it.identity
            port.entries = proof(serving(it.identity))
            await go(it)

    asyncio.run(scenario())


async def check(it: Served, peer: PeerId | None = None, invite: Invite = INVITE) -> None:
    await check_syncer(it.session, it.url, peer or it.identity.peer_id, invite=invite, founder=FOUNDER.peer_id)


def test_a_syncer_shows_that_it_is(tmp_path: Path) -> None:
    async def go(it: Served) -> None:
        await check(it)
        (heard,) = [envelope.message for envelope in it.port.heard]
        assert isinstance(heard, Hello) and not heard.trains
        assert it.port.heard[0].branch == "0" * 64, "no peer takes it in"
        assert it.port.heard[0].sender not in (FOUNDER.peer_id, it.identity.peer_id)

    with_peer(tmp_path, go)


def test_in_a_run_with_a_token_the_invite_lets_the_question_in(tmp_path: Path) -> None:
    async def go(it: Served) -> None:
        it.port.admits = lambda shown, nonce, peer: shown == admission_proof("secret", nonce=nonce, peer=peer)
        await check(it, invite=replace(INVITE, token="secret"))
        with pytest.raises(KeyNotShown, match=r"does not show that it is .*: not admitted"):
            await check(it)

    with_peer(tmp_path, go)


def test_a_peer_that_was_not_elected_is_contradicted_by_the_chain_it_shows(tmp_path: Path) -> None:
    async def go(it: Served) -> None:
        it.port.entries = proof(handed_over())
        with pytest.raises(RemoteProtocolError, match=f"serves, and shows that {SECOND.peer_id[:8]} does"):
            await check(it)
        it.port.entries = proof(Chain().found())
        with pytest.raises(RemoteProtocolError, match="serves, and shows that nobody does"):
            await check(it)

    with_peer(tmp_path, go)


def test_a_syncer_of_an_earlier_term_serves_no_more(tmp_path: Path) -> None:
    async def go(it: Served) -> None:
        it.port.entries = proof(serving(it.identity).open(3, THIRD, (FOUNDER, THIRD)))
        with pytest.raises(RemoteProtocolError, match=f"shows that {THIRD.peer_id[:8]} does"):
            await check(it)

    with_peer(tmp_path, go)


def test_a_chain_that_nobody_voted_for_shows_nothing(tmp_path: Path) -> None:
    async def go(it: Served) -> None:
        BOOTS[it.identity.peer_id] = BootId("f" * 16)
        it.port.entries = proof(Chain().found().open(1, it.identity, (it.identity,)))
        with pytest.raises(RemoteProtocolError, match="not proven"):
            await check(it)
        it.port.entries = proof(Chain().found(it.identity).open(1, it.identity, (it.identity,)))
        with pytest.raises(RemoteProtocolError, match="founder's `found`"):
            await check(it)

    with_peer(tmp_path, go)


def test_a_peer_without_a_proof_is_no_liar(tmp_path: Path) -> None:
    """It has just begun, and reads its chain."""

    async def go(it: Served) -> None:
        it.port.entries = []
        with pytest.raises(TransferError, match="shows no proof"):
            await check(it)

    with_peer(tmp_path, go)


def test_who_claims_to_be_the_syncer_that_is_dead_can_not_sign_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain is right, and anybody can show it."""
    monkeypatch.setattr(claims, "SHOW_S", 1.0)

    async def go(it: Served) -> None:
        it.port.entries = proof(handed_over())
        with pytest.raises(RemoteProtocolError, match=f"is another peer than {SECOND.peer_id[:8]}"):
            await check(it, SECOND.peer_id)
        monkeypatch.setattr(http, "greeting", lambda run, own, nonce: greeting(run, SECOND.peer_id, nonce))
        with pytest.raises(KeyNotShown, match=f"does not show (in 1 s )?that it is {SECOND.peer_id[:8]}"):
            await check(it, SECOND.peer_id)

        async def show_an_entry(self: Any, link: ControlLink) -> None:
            link.send(it.port.entries[-1].to_line())  # signed by SECOND, and anybody has it
            await link.receive()

        monkeypatch.setattr(http.HttpServer, "_serve", show_an_entry)
        with pytest.raises(KeyNotShown):
            await check(it, SECOND.peer_id)

    with_peer(tmp_path, go)


# ---- heads


def rank_of(chain: Chain, lineage: int = 0) -> Rank:
    header = open_entry(chain.entries[-1]).header
    return Rank(lineage, header.term, header.seq)


def test_a_head_is_of_the_run_if_whoever_was_elected_signed_it(tmp_path: Path) -> None:
    async def shows(
        it: Served, chain: Chain, durable: int, *more: Signed, gone: int = 0, rank: Rank | None = None
    ) -> None:
        it.port.entries = [*chain.entries[: len(chain.entries) - gone], *more]
        shown = proof(chain)[:durable]
        it.port.proof = lambda first, limit: shown[first : first + limit]  # type: ignore[method-assign]
        signed, rank = chain.entries[-1], rank or rank_of(chain)
        await check_head(it.session, it.url, signed, rank, run=RUN, founder=FOUNDER.peer_id)

    async def go(it: Served) -> None:
        await shows(it, handed_over().record(2, SECOND), 4)
        await shows(it, handed_over().record(2, SECOND), 2)  # the newest terms are not durable there
        await shows(it, reformed(), 4, rank=rank_of(reformed(), 1))
        await shows(it, handed_over(), 3)  # it is itself what is not durable
        later = handed_over().record(2, SECOND).open(3, LIAR, (SECOND,))
        await shows(it, handed_over().record(2, SECOND), 2, later.entries[-1])  # what comes after it is not asked
        with pytest.raises(TransferError, match="shows no entry 3"):
            await shows(it, handed_over().record(2, SECOND), 3, gone=2)
        with pytest.raises(RemoteProtocolError, match="did not sign"):
            await shows(it, handed_over().record(2, LIAR), 4)
        with pytest.raises(RemoteProtocolError, match="shows 1 of 2 votes"):
            await shows(it, handed_over().open(3, LIAR, (SECOND,)).record(3, LIAR), 4)

    with_peer(tmp_path, go)


# ---- the owner's commands


def test_a_liar_with_a_higher_term_keeps_nobody_from_the_syncer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = replace(RunManifest(nonce="00" * 16), founder=FOUNDER.peer_id)
    monkeypatch.setattr(owning, "manifest_from_bytes", lambda canonical: manifest)
    monkeypatch.setattr(owning, "_check_status", lambda status, url: None)

    async def go(it: Served) -> None:
        async with served(BlobStore(tmp_path / "liar"), SpeakingPort()) as liar:
            liar.port.entries = it.port.entries
            liar.port.more_status = {"peer": liar.identity.peer_id, "term": 1 << 50, "branch": "b"}
            it.port.more_status = {"peer": it.identity.peer_id, "term": 2, "branch": "b"}
            finder = Finder(Owned(invite=INVITE, identity=FOUNDER, local_url=liar.url), it.session)
            assert await finder.syncer() is None
            assert "serves, and shows that" in finder.why_not
            finder.learn(it.url.removeprefix("http://"))
            assert (found := await finder.syncer()) is not None and found.url == it.url
            it.port.entries = []
            assert await finder.doubt(found) is None, "what was shown is remembered"
            assert await finder.syncer() is not None

    with_peer(tmp_path, go)


def test_a_syncer_all_of_whose_doors_are_taken_is_found_if_nobody_shows_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers can take them; the owner's order needs none."""
    manifest = replace(RunManifest(nonce="00" * 16), founder=FOUNDER.peer_id)
    monkeypatch.setattr(owning, "manifest_from_bytes", lambda canonical: manifest)
    monkeypatch.setattr(owning, "_check_status", lambda status, url: None)

    async def go(it: Served) -> None:
        it.port.more_status = {"peer": it.identity.peer_id, "term": 2, "branch": "b"}
        finder = Finder(Owned(invite=INVITE, identity=FOUNDER, local_url=it.url), it.session)
        with monkeypatch.context() as full:
            full.setattr(http, "LINKS_MAX", 0)
            assert (found := await finder.syncer()) is not None and found.url == it.url
            assert isinstance(doubt := await finder.doubt(found), KeyNotShown) and "503" in str(doubt)
        it.port.entries = []
        finder._doubts.clear()
        assert await finder.syncer() is None, "but not by its word alone"

    with_peer(tmp_path, go)


class Asked:
    """A finder that has a doubt of each URL, or none."""

    def __init__(self, **doubts: Doubt | None) -> None:
        self.doubts = doubts
        self.session = self.why_not = ""

    async def doubt(self, found: Found) -> Doubt | None:
        return self.doubts[found.url]


def claim(
    lease_ms: int = 4000, peer: str = "a" * 64, digest: str = "d" * 64, rank: tuple[int, int, int] = (0, 2, 3)
) -> dict[str, Any]:
    election = {"lease_ms": lease_ms, "roster": [peer], "electors": [{"peer": peer, "here": True}]}
    return {"role": "syncer", "peer": peer, "election": election | {"best": [*rank, digest]}}


def test_a_run_that_is_served_needs_no_reform_and_one_that_a_liar_serves_does() -> None:
    def says(doubt: Doubt | None, **of: Any) -> str:
        finder: Any = Asked(u=doubt)
        return asyncio.run(reforming._served(finder, {"u": claim(**of)}))

    assert says(None) == "aaaaaaaa serves the run, and 1 of 1 electors answer it, a majority"
    assert says(None, lease_ms=0) == ""
    assert says(RemoteProtocolError("no")) == "" == says(RefusedError("another run"))
    assert says(TransferError("u: refused")).endswith(
        "answer it, a majority; so it says, and does not prove it (u: refused)"
    )


def believed(monkeypatch: pytest.MonkeyPatch, finder: Any, **statuses: dict[str, Any]) -> dict[str, Any]:
    """All have the chain of `handed_over`, and show it, but the forger and who says nothing."""
    monkeypatch.setattr(reforming, "DOUBT_S", 0.0)
    entries = handed_over().entries

    async def fetch_entries(session: Any, url: str, from_seq: int, *, limit: int = 256) -> list[Signed]:
        return [] if url == "gone" else entries[from_seq : from_seq + limit]

    async def fetch_proof(session: Any, url: str, *, entries_max: int) -> list[Signed]:
        if url == "silent":
            raise TransferError("no answer")
        return entries[1:] if url == "forger" else entries[:2]

    monkeypatch.setattr(claims, "fetch_entries", fetch_entries)
    monkeypatch.setattr(claims, "fetch_proof", fetch_proof)
    monkeypatch.setattr(reforming, "fetch_entries", fetch_entries)
    return asyncio.run(reforming._believed(finder, OWNED, statuses))


def test_who_shows_something_else_than_he_says_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    head = handed_over().entries[-1].digest
    statuses = {
        "honest": claim(0, digest=head),
        "forger": claim(0, digest=head),
        "moved": claim(0, digest=Digest("9" * 64)),
        "gone": claim(0, digest=head),
        "silent": claim(0, digest=head),
        "liar": claim(digest=head),
        "unclear": claim(digest=head),
    }
    finder: Any = Asked(liar=RemoteProtocolError("it does not serve"), unclear=TransferError("busy"))
    found = believed(monkeypatch, finder, **statuses)
    assert set(statuses) - set(found) == {"forger", "liar"}
    assert "liar is left out: peer unknown: it does not serve" in finder.why_not


@pytest.mark.parametrize("rank", [(1, 2, 3), (0, 3, 3), (0, 1, 3)])
def test_an_old_entry_is_not_gone_back_to_because_somebody_calls_it_the_highest(
    monkeypatch: pytest.MonkeyPatch, rank: tuple[int, int, int]
) -> None:
    """The head of highest rank is what a reform goes on from: all that came after it is abandoned."""
    head = handed_over().entries[-1].digest
    liar = claim(0, digest=head, rank=rank)
    finder: Any = Asked()
    assert list(believed(monkeypatch, finder, honest=claim(0, digest=head), liar=liar)) == ["honest"]
    assert "shows an entry of reform 0, term 2, seq 3 and calls it reform" in finder.why_not


def test_electors_are_those_of_the_chain_and_not_those_that_a_peer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a roster of one's own all electors are here, or gone, as one likes."""
    head = handed_over().entries[-1].digest
    finder: Any = Asked()
    found = believed(monkeypatch, finder, liar=claim(0, digest=head), silent=claim(0, digest=head))
    assert found["liar"]["election"]["roster"] == [FOUNDER.peer_id, SECOND.peer_id, THIRD.peer_id]
    assert found["silent"]["election"]["roster"] == ["a" * 64]


def test_a_chain_that_moves_on_between_two_questions_makes_no_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reforming, "DOUBT_S", 0.0)
    answers: list[list[str] | None] = []

    async def roster_shown(finder: Any, run: Any, url: str, best: Any) -> list[str] | None:
        answers.append(None)
        if len(answers) == 1:
            raise RemoteProtocolError("not proven")
        return None

    monkeypatch.setattr(reforming, "_roster_shown", roster_shown)
    finder: Any = Asked()
    status = claim(0)
    assert asyncio.run(reforming._shown(finder, OWNED, "u", status)) == status
    assert len(answers) == 2


def test_a_reform_is_signed_on_what_was_shown_and_on_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    head = handed_over().entries[-1].digest
    finder: Any = Asked()
    believed(monkeypatch, finder)

    def signed(rank: Rank, *urls: str) -> Signed:
        roster = tuple(Present(elector=seat(THIRD), held=rank, url=url, head=(rank, head)) for url in urls)
        intended = Intended(parent=(rank, head), lineage=1, roster=roster, gone=(), num_old=3)
        return asyncio.run(reforming._signed(finder, OWNED, intended))

    rank = Rank(0, Term(2), Seq(3))
    reform = open_entry(signed(rank, "gone", "forger", "honest"))
    assert isinstance(reform, Reform) and (reform.header.prev, reform.header.seq) == (head, 4)
    for wrong, url in ((rank._replace(lineage=1), "honest"), (rank, "forger"), (rank, "gone")):
        with pytest.raises(TransferError, match=r"nobody shows entry 3 as one of this run: .*--electors may name"):
            signed(wrong, url)
