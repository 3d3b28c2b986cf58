from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import WIRE_VERSION, BootId, PeerId, RunId
from geo_diloco.protocol.election.ballots import Release
from geo_diloco.protocol.messages import Commit, Envelope, Goodbye, Message, Sampled
from geo_diloco.runtime import control, http
from geo_diloco.runtime.control import ControlLink, connect_control
from geo_diloco.runtime.identity import Identity, admission_proof, proof_is_valid
from geo_diloco.runtime.session import make_session
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.turns import Turns
from geo_diloco.runtime.wire import (
    MESSAGE_LINE_BYTES_MAX,
    Signed,
    open_entry,
    pack_line,
    seal_entry,
    seal_envelope,
)

from .samples import RUN, RememberingPort, Served, commit, envelope, hello, served

ME = Identity.generate()


def with_server(
    tmp_path: Path, talk: Callable[[Served], Awaitable[None]], port: RememberingPort | None = None
) -> Served:
    async def run() -> Served:
        async with served(BlobStore(tmp_path), port) as it:
            await talk(it)
            return it

    return asyncio.run(run())


def sealed(link: ControlLink, message: Message, *, identity: Identity = ME, **changed: Any) -> str:
    """A proper envelope for the other end of `link`, but for what is changed."""
    made = envelope(identity.peer_id, link.peer, message, nonce=link.nonce, number=link.next_number())
    return seal_envelope(replace(made, **changed), identity)


def long_commit(peer: PeerId) -> Commit:
    made = commit(peer)
    (participant,) = made.participants
    return replace(made, participants=tuple(replace(participant, peer=PeerId(f"{n:064x}")) for n in range(40)))


async def wait_over(link: ControlLink) -> str:
    async with asyncio.timeout(10):
        async for item in link:
            raise AssertionError(f"unexpected {item}")
    return link.close_reason


def test_envelopes_and_entries_travel_both_ways(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN, expected_peer=it.identity.peer_id) as link:
            assert link.peer == it.identity.peer_id
            link.send(sealed(link, hello()))
            link.send(sealed(link, Goodbye(reason="bye")))
            await it.port.wait_until(lambda: len(it.port.heard) == 2)
            (theirs,) = it.port.links
            assert (theirs.peer, theirs.nonce) == (ME.peer_id, link.nonce)
            entry = commit(it.identity.peer_id)
            theirs.send(sealed(theirs, Goodbye(reason="you too"), identity=it.identity))
            theirs.send(seal_entry(entry, it.identity).to_line())
            first, second = await anext(link), await anext(link)
            assert isinstance(first, Envelope)
            assert first.message == Goodbye(reason="you too")
            assert isinstance(second, Signed)
            assert open_entry(second) == entry
            link.send(seal_entry(entry, ME).to_line())
            await it.port.wait_until(lambda: bool(it.port.entries_heard))
            assert open_entry(it.port.entries_heard[0]) == entry
        await it.port.wait_until(lambda: bool(it.port.ended))
        assert it.port.ended == ["closed"]

    it = with_server(tmp_path, talk)
    assert it.server.counters.control_in > 0
    assert it.server.counters.control_out > 0


def test_long_entries_travel_packed_both_ways(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN, expected_peer=it.identity.peer_id) as link:
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: bool(it.port.links))
            (theirs,) = it.port.links
            entry = seal_entry(long_commit(it.identity.peer_id), it.identity)
            packed = pack_line(entry.to_line())
            assert isinstance(packed, bytes) and len(packed) < len(entry.to_line()) / 3
            before = it.server.counters.control_out
            theirs.send(packed)
            assert await anext(link) == entry
            assert it.server.counters.control_out - before == len(packed)
            link.send(pack_line(seal_entry(long_commit(ME.peer_id), ME).to_line()))
            await it.port.wait_until(lambda: bool(it.port.entries_heard))
            assert open_entry(it.port.entries_heard[0]) == long_commit(ME.peer_id)

    with_server(tmp_path, talk)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda link: zlib.compress(sealed(link, Goodbye(reason="")).encode()), "a packed line that is no entry"),
        (lambda link: zlib.compress(b"x" * (2 * MESSAGE_LINE_BYTES_MAX)), "cut, or of more than"),
        (lambda link: zlib.compress(b"x" * 9_999)[:-3], "cut, or of more than"),
        (lambda link: b"noise", "can't be unpacked"),
        (lambda link: zlib.compress(b"\xff" * 5_000), "can't be unpacked"),
    ],
)
def test_packed_noise_closes_the_link_with_a_reason(
    tmp_path: Path, made: Callable[[ControlLink], bytes], reason: str
) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            link.send(made(link))
            assert reason in await wait_over(link)
        assert len(it.port.heard) == 1 and not it.port.entries_heard

    with_server(tmp_path, talk)


def test_whatever_a_server_hears_says_and_serves_takes_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CountedTurns(Turns):
        taken = 0

        async def take(self) -> None:
            CountedTurns.taken += 1
            await super().take()

    monkeypatch.setattr(http, "Turns", CountedTurns)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            assert CountedTurns.taken == 1, "the greeting"
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: len(it.port.heard) == 1)
            assert CountedTurns.taken == 2
            theirs = it.port.links[0]
            theirs.send(sealed(theirs, Goodbye(reason=""), identity=it.identity))
            theirs.send(pack_line(seal_entry(long_commit(it.identity.peer_id), it.identity).to_line()))
            await anext(link), await anext(link)
            assert CountedTurns.taken == 4
            ref = it.store.put(b"a blob")
            async with it.session.get(f"{it.url}/v1/blobs/{ref.digest}/0") as response:
                assert await response.read() == b"a blob"
            assert CountedTurns.taken == 5

    with_server(tmp_path, talk)


def test_what_is_sealed_late_is_numbered_in_the_order_in_which_it_was_said(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send_sealed(lambda: sealed(link, hello()))
            for number in range(50):
                said = Sampled(round=number, fragment=0, attempt=0)  # type: ignore[arg-type]
                link.send_sealed(lambda said=said: sealed(link, said))  # type: ignore[misc]
            link.close()
        await it.port.wait_until(lambda: bool(it.port.ended))
        assert [each.number for each in it.port.heard] == list(range(1, 52))
        assert [each.message.round for each in it.port.heard[1:]] == list(range(50))  # type: ignore[union-attr]

    with_server(tmp_path, talk)


def test_what_is_queued_is_sent_before_the_link_closes(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            for _ in range(100):
                link.send(sealed(link, hello()))
            link.close("done")
            link.send("dropped")
        await it.port.wait_until(lambda: bool(it.port.ended))
        assert len(it.port.heard) == 100
        assert it.port.ended == ["done"]

    with_server(tmp_path, talk)


def test_the_accepting_end_closes_after_what_is_queued_and_says_why(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: bool(it.port.links))
            theirs = it.port.links[0]
            for _ in range(10):
                theirs.send(sealed(theirs, Goodbye(reason=""), identity=it.identity))
            theirs.close("the run is finished")
            assert len([item async for item in link]) == 10
            assert link.close_reason == "the run is finished"
            assert not link.is_refused

    with_server(tmp_path, talk)


def test_stopping_the_server_says_so_to_every_link(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with (
            connect_control(it.session, it.url, ME, RUN) as link,
            connect_control(it.session, it.url, Identity.generate(), RUN) as silent,
        ):
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: bool(it.port.links))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(it.server.stop())
                assert await wait_over(link) == "leaving"
                assert await wait_over(silent) == "leaving"
        assert it.port.ended == ["leaving"]

    with_server(tmp_path, talk)


# ---- envelopes that are not of this connection


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"run": "a" * 40}, "another run"),
        ({"to": "b" * 64}, "another receiver"),
        ({"nonce": "c" * 64}, "another nonce"),
        ({"nonce": ""}, "another nonce"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_envelope_of_another_connection_closes_this_one(
    tmp_path: Path, changed: dict[str, Any], reason: str, is_first: bool
) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            if not is_first:
                link.send(sealed(link, hello()))
            link.send(sealed(link, hello(), **changed))
            assert reason in await wait_over(link)
            assert ME.peer_id[:8] in link.close_reason
        assert len(it.port.heard) == (0 if is_first else 1)
        assert len(it.port.ended) == len(it.port.heard)

    with_server(tmp_path, talk)


def test_the_dialing_end_is_as_strict(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        for changed in ({"run": "a" * 40}, {"to": "b" * 64}, {"nonce": "c" * 64}):
            async with connect_control(it.session, it.url, ME, RUN) as link:
                link.send(sealed(link, hello()))
                await it.port.wait_until(lambda: bool(it.port.links))
                theirs = it.port.links.pop()
                theirs.send(sealed(theirs, Goodbye(reason=""), identity=it.identity, **changed))
                assert "envelope for another" in await wait_over(link)
            stranger = Identity.generate()
            async with connect_control(it.session, it.url, ME, RUN) as link:
                link.send(sealed(link, hello()))
                await it.port.wait_until(lambda: bool(it.port.links))
                theirs = it.port.links.pop()
                theirs.send(sealed(theirs, Goodbye(reason=""), identity=stranger))
                assert "another peer" in await wait_over(link)

    with_server(tmp_path, talk)


def test_a_link_has_one_sender(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            link.send(sealed(link, hello(), identity=Identity.generate()))
            assert "another peer" in await wait_over(link)
        assert [each.sender for each in it.port.heard] == [ME.peer_id]

    with_server(tmp_path, talk)


def test_an_envelope_that_comes_twice_or_out_of_order_is_dropped(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello(), number=5))
            for number in (5, 4, 0, 6, 6, 9):
                link.send(sealed(link, Sampled(round=number, fragment=0, attempt=0), number=number))  # type: ignore[arg-type]
            link.close()
        await it.port.wait_until(lambda: bool(it.port.ended))
        assert [each.number for each in it.port.heard] == [5, 6, 9]

    with_server(tmp_path, talk)


@pytest.mark.parametrize("text", ["", "{}", "garbage", "[" * 10_000, "\x00", '{"body":"","signer":"","signature":""}'])
def test_noise_closes_the_link_with_a_reason(tmp_path: Path, text: str) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(text)
            assert "signed line" in await wait_over(link)
        assert not it.port.heard

    with_server(tmp_path, talk)


def test_a_bad_signature_closes_the_link(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            honest = Signed.from_line(sealed(link, hello()))
            link.send(replace(honest, signature="0" * 128).to_line())
            assert "signature" in await wait_over(link)

    with_server(tmp_path, talk)


def test_an_entry_is_not_taken_from_one_who_has_not_said_who_he_is(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(seal_entry(commit(ME.peer_id), ME).to_line())
            assert "envelope was wanted" in await wait_over(link)

    with_server(tmp_path, talk)


def test_an_oversized_or_binary_message_closes_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MESSAGE_LINE_BYTES_MAX", 10_000)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            link.send("x" * 20_000)
            await wait_over(link)
        await it.port.wait_until(lambda: bool(it.port.ended))
        assert it.port.ended == ["message above the size limit"]
        async with it.session.ws_connect(f"{it.url}/v1/control?nonce={'0' * 32}") as socket:
            await socket.receive()
            await socket.send_bytes(b"x")
            closed = await socket.receive()
            assert (closed.type, closed.extra) == (aiohttp.WSMsgType.CLOSE, "binary message on a control connection")

    with_server(tmp_path, talk)


# ---- who may come in


def test_a_hello_or_a_ballot_must_come_first(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, Goodbye(reason="")))
            assert await wait_over(link) == "a Hello or a ballot must come first"
        assert not it.port.heard

    with_server(tmp_path, talk)


def test_who_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_S", 0.05)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            assert await wait_over(link) == "nothing was said in time"

    with_server(tmp_path, talk)


def test_only_who_knows_the_token_is_admitted_and_a_relayed_proof_is_worth_nothing(tmp_path: Path) -> None:
    port = RememberingPort(admits=lambda proof, nonce, peer: proof_is_valid(proof, "secret", nonce=nonce, peer=peer))
    thief = Identity.generate()

    async def attempt(it: Served, identity: Identity, proof: Callable[[ControlLink], str]) -> ControlLink:
        async with connect_control(it.session, it.url, identity, RUN) as link:
            link.send(sealed(link, hello(proof(link)), identity=identity))
            link.send(sealed(link, Goodbye(reason=""), identity=identity))
            if identity is ME and proof(link):
                await it.port.wait_until(lambda: len(it.port.heard) == 2)
            else:
                await wait_over(link)
            return link

    async def talk(it: Served) -> None:
        for link in (
            await attempt(it, ME, lambda link: ""),
            await attempt(it, thief, lambda link: admission_proof("secret", nonce=link.nonce, peer=ME.peer_id)),
            await attempt(it, thief, lambda link: admission_proof("secret", nonce="0" * 64, peer=thief.peer_id)),
            await attempt(it, thief, lambda link: admission_proof("guess", nonce=link.nonce, peer=thief.peer_id)),
        ):
            assert link.is_refused
            assert "token" in link.close_reason
        assert not it.port.heard
        link = await attempt(it, ME, lambda link: admission_proof("secret", nonce=link.nonce, peer=ME.peer_id))
        assert not link.is_refused

    with_server(tmp_path, talk, port)


def test_who_has_the_token_may_begin_with_a_ballot_if_he_shows_a_pass(tmp_path: Path) -> None:
    port = RememberingPort(admits=lambda proof, nonce, peer: proof_is_valid(proof, "secret", nonce=nonce, peer=peer))

    async def talk(it: Served) -> None:
        ballot = Release(to=it.identity.peer_id)
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, ballot))
            await wait_over(link)
            assert link.is_refused
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send_pass(admission_proof("secret", nonce=link.nonce, peer=ME.peer_id))
            link.send(sealed(link, ballot))
            await it.port.wait_until(lambda: bool(it.port.heard))
            assert it.port.heard[0].message == ballot
            link.send_pass(admission_proof("secret", nonce=link.nonce, peer=ME.peer_id))
            assert "signed line" in await wait_over(link), "a pass comes first or never"

    with_server(tmp_path, talk, port)


def test_the_same_process_may_dial_again(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as older:
            older.send(sealed(older, hello()))
            await it.port.wait_until(lambda: len(it.port.links) == 1)
            async with connect_control(it.session, it.url, ME, RUN) as newer:
                newer.send(sealed(newer, hello()))
                await it.port.wait_until(lambda: len(it.port.links) == 2)
                assert await wait_over(older) == "replaced by a newer connection"
                assert not older.is_refused

    with_server(tmp_path, talk)


def test_a_newer_connection_of_another_process_replaces_the_older(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as older:
            older.send(sealed(older, hello()))
            await it.port.wait_until(lambda: len(it.port.links) == 1)
            async with connect_control(it.session, it.url, ME, RUN) as newer:
                newer.send(sealed(newer, hello(), boot=BootId("f" * 16)))
                await it.port.wait_until(lambda: len(it.port.links) == 2)
                assert it.port.ended == ["replaced by a newer connection"]
                assert "another process has joined with this peer's identity" in await wait_over(older)
                assert older.is_refused, "two processes of one run directory would replace each other for ever"
                newer.send(sealed(newer, Goodbye(reason="")))
                await it.port.wait_until(lambda: len(it.port.heard) == 3)
            await it.port.wait_until(lambda: len(it.port.ended) == 2)

    it = with_server(tmp_path, talk)
    assert len(it.port.ended) == 2


def test_nobody_can_replace_a_connection_without_its_key(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as mine:
            mine.send(sealed(mine, hello()))
            await it.port.wait_until(lambda: len(it.port.links) == 1)
            recorded = sealed(mine, hello())
            async with connect_control(it.session, it.url, Identity.generate(), RUN) as thief:
                thief.send(recorded)
                assert "another nonce" in await wait_over(thief)
            mine.send(sealed(mine, Goodbye(reason="")))
            await it.port.wait_until(lambda: len(it.port.heard) == 2)
            assert not it.port.ended

    with_server(tmp_path, talk)


def test_too_many_connections_are_refused_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINKS_MAX", 1)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN):
            with pytest.raises(TransferError, match="503"):
                async with connect_control(it.session, it.url, ME, RUN):
                    pass

    with_server(tmp_path, talk)


# ---- whom we dialled


def test_another_run_or_peer_is_refused_by_name(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        with pytest.raises(RefusedError, match="serves run"):
            async with connect_control(it.session, it.url, ME, RunId("0" * 40)):
                pass
        with pytest.raises(RemoteProtocolError, match="another peer"):
            async with connect_control(it.session, it.url, ME, RUN, expected_peer=PeerId("0" * 64)):
                pass
        await it.server.stop()
        with pytest.raises(TransferError):
            async with connect_control(it.session, it.url, ME, RUN):
                pass

    with_server(tmp_path, talk)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"wire": WIRE_VERSION + 1}, RefusedError),
        ({"wire": str(WIRE_VERSION)}, RefusedError),
        ({"run": "0" * 40}, RefusedError),
        ({"peer": "x"}, RemoteProtocolError),
        ({"peer": None}, RemoteProtocolError),
        ({"nonce": "0" * 64}, RemoteProtocolError),
        ({"nonce": None}, RemoteProtocolError),
        (None, RemoteProtocolError),
    ],
)
def test_a_greeting_that_makes_no_sense_is_refused(change: dict[str, Any] | None, error: type[Exception]) -> None:
    async def greet(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        said = {"nonce": "1" * 32 + request.query["nonce"], "run": RUN, "peer": ME.peer_id, "wire": WIRE_VERSION}
        await socket.send_str(json.dumps(said | change) if change is not None else "[" * 5000)
        await socket.receive()
        return socket

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/v1/control", greet)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with make_session() as session:
                with pytest.raises(error):
                    async with connect_control(session, f"http://127.0.0.1:{runner.addresses[0][1]}", ME, RUN):
                        pass
        finally:
            await runner.cleanup()

    asyncio.run(run())


# ---- a peer that does not read


def test_a_full_queue_lets_the_peer_go_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "QUEUE_MESSAGES_MAX", 10)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: bool(it.port.links))
            theirs = it.port.links[0]
            for _ in range(11):
                theirs.send(sealed(theirs, Goodbye(reason=""), identity=it.identity))
            assert theirs.is_closing
            assert await wait_over(link) == "connection lost"
        await it.port.wait_until(lambda: bool(it.port.ended))
        assert it.port.ended == ["too slow: it does not read what it is sent"]

    with_server(tmp_path, talk)


def test_a_queue_is_bounded_in_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "QUEUE_BYTES_MAX", 10_000)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send("x" * 10_001)
            assert link.is_closing

    with_server(tmp_path, talk)


def test_a_peer_that_stopped_reading_is_let_go_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SEND_STALL_S", 0.2)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: bool(it.port.links))
            theirs = it.port.links[0]
            for _ in range(60):  # more than what the sockets' buffers take
                theirs.send("x" * 1_000_000)
            await it.port.wait_until(lambda: bool(it.port.ended))
        assert it.port.ended == ["too slow: it does not read what it is sent"]

    with_server(tmp_path, talk)


def test_a_link_that_breaks_ends_the_iteration_and_is_said_once(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: bool(it.port.links))
            it.port.links[0]._abort()
            assert await wait_over(link) == "connection lost"
        await it.port.wait_until(lambda: bool(it.port.ended))

    it = with_server(tmp_path, talk)
    assert it.port.ended == ["connection lost"]


def test_leaving_by_cancellation_is_not_swallowed_and_closes_the_link(tmp_path: Path) -> None:
    async def talk(it: Served) -> None:
        async def follow() -> None:
            async with connect_control(it.session, it.url, ME, RUN) as link:
                link.send(sealed(link, hello()))
                async for _ in link:
                    pass

        task = asyncio.create_task(follow())
        await it.port.wait_until(lambda: bool(it.port.links))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await it.port.wait_until(lambda: bool(it.port.ended))

    with_server(tmp_path, talk)


def test_a_peer_that_answers_no_ping_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEARTBEAT_S", 0.1)

    async def talk(it: Served) -> None:
        url = f"{it.url}/v1/control?nonce={'0' * 32}"
        async with it.session.ws_connect(url, autoping=False) as socket:
            greeting = json.loads((await socket.receive()).data)
            made = envelope(ME.peer_id, it.identity.peer_id, hello(), nonce=greeting["nonce"])
            await socket.send_str(seal_envelope(made, ME))
            await it.port.wait_until(lambda: bool(it.port.ended))

    assert with_server(tmp_path, talk).port.ended == ["connection lost"]
