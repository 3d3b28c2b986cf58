"""A stranger can take so much of a listening peer and no more, and whoever behaves gets in beside him."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from geo_diloco.errors import TransferError
from geo_diloco.protocol.messages import Goodbye
from geo_diloco.runtime import answers, http
from geo_diloco.runtime.control import connect_control
from geo_diloco.runtime.door import CONNECTIONS_MAX, CONNECTIONS_MIN, Allowance, allow_files, connections_max
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import fetch_entries, fetch_status
from geo_diloco.runtime.store import BlobStore

from .samples import RUN, RememberingPort, Served, chain_of, hello, served
from .test_control_link import sealed

ME = Identity.generate()


def with_server(tmp_path: Path, talk: Callable[[Served], Awaitable[None]], port: RememberingPort | None = None) -> None:
    async def run() -> None:
        async with served(BlobStore(tmp_path), port) as it:
            await talk(it)

    asyncio.run(run())


async def dial(it: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = it.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


def test_half_of_the_files_are_for_connections() -> None:
    assert CONNECTIONS_MIN <= connections_max() <= CONNECTIONS_MAX


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "granted"),
    [
        (1024, 4096, 3000, 3000),
        (1024, 4096, 9000, 4096),
        (1024, resource.RLIM_INFINITY, 9000, 9000),
        (8000, 9000, 3000, 8000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 3000, 3000),
    ],
)
def test_a_low_limit_of_open_files_is_raised_as_far_as_the_system_lets_it(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, granted: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    assert allow_files(wanted) == granted
    assert limits[1:] in ([], [(granted, hard)])


def test_a_limit_of_open_files_that_can_not_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, limit: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert allow_files(3000) == 1024


def test_one_address_gets_half_of_the_connections_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "connections_max", lambda: 6)

    async def talk(it: Served) -> None:
        first = [await dial(it) for _ in range(3)]
        await fetch_status_fails(it)
        for _, writer in first[:1]:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await fetch_status(it.session, it.url) == {"name": "run", "role": "syncer"}
                    break
                except TransferError:
                    await asyncio.sleep(0.01)
        for _, writer in first[1:]:
            writer.close()

    with_server(tmp_path, talk)


async def fetch_status_fails(it: Served) -> None:
    with pytest.raises(TransferError):
        await fetch_status(it.session, it.url)


@pytest.mark.parametrize("said", [b"", b"GET /v1/status HTTP/1.1\r\nHost: a"], ids=["nothing", "half a header"])
def test_a_connection_without_a_request_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(http, "IDLE_S", 0.2)

    async def talk(it: Served) -> None:
        reader, writer = await dial(it)
        writer.write(said)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()

    with_server(tmp_path, talk)


def test_whoever_does_not_read_his_answer_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STALL_S", 0.2)

    async def talk(it: Served) -> None:
        reader, writer = await dial(it)
        writer.write(b"GET /v1/run HTTP/1.1\r\nHost: a\r\n\r\n")
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        await asyncio.sleep(0.6)
        transport.resume_reading()
        async with asyncio.timeout(10):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(32 << 20)
        writer.close()

    with_server(tmp_path, talk, RememberingPort(manifest=bytes(32 << 20)))


def test_a_long_chain_is_answered_in_portions_however_much_is_asked_for(tmp_path: Path) -> None:
    chain = chain_of(ME, 40)

    async def talk(it: Served) -> None:
        it.port.entries = chain
        assert await fetch_entries(it.session, it.url, 0, limit=512) == chain

    with_server(tmp_path, talk)


def test_one_entry_above_the_portion_is_still_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_BYTES_MAX", 10)
    chain = chain_of(ME, 3)

    async def talk(it: Served) -> None:
        it.port.entries = chain
        assert await fetch_entries(it.session, it.url, 0) == chain[:1]

    with_server(tmp_path, talk)


# ---- talking too fast ----------------------------------------------------------------------------------------------


def allowance(now: list[float]) -> Allowance:
    return Allowance(messages_per_s=8, bytes_per_s=1000, burst_s=2, clock=lambda: now[0])


def test_a_burst_costs_nothing_and_what_comes_after_it_waits() -> None:
    now = [0.0]
    one = allowance(now)
    assert [one.wait_s(1) for _ in range(16)] == [0.0] * 16
    assert one.wait_s(1) == pytest.approx(1 / 8)
    now[0] += 100.0
    assert [one.wait_s(1) for _ in range(16)] == [0.0] * 16, "the allowance comes back, but no more than a burst"
    assert one.wait_s(1) == pytest.approx(1 / 8)


def test_long_messages_wait_by_their_bytes() -> None:
    now = [0.0]
    one = allowance(now)
    assert one.wait_s(2_000) == 0.0
    assert one.wait_s(500) == pytest.approx(0.5)


def test_whoever_talks_too_fast_is_slowed_and_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "Allowance", lambda: Allowance(messages_per_s=100, bytes_per_s=1e9, burst_s=0.1))

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            began = time.monotonic()
            link.send(sealed(link, hello()))
            for _ in range(49):
                link.send(sealed(link, Goodbye(reason="")))
            await it.port.wait_until(lambda: len(it.port.heard) == 50)
            assert time.monotonic() - began > 0.3

    with_server(tmp_path, talk)


def test_one_address_gets_half_of_the_control_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINKS_PER_ADDRESS_MAX", 1)

    async def talk(it: Served) -> None:
        async with connect_control(it.session, it.url, ME, RUN) as link:
            link.send(sealed(link, hello()))
            await it.port.wait_until(lambda: bool(it.port.heard))
            with pytest.raises(TransferError, match="503"):
                async with connect_control(it.session, it.url, Identity.generate(), RUN):
                    pass

    with_server(tmp_path, talk)
