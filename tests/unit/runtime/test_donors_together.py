"""One fetch from several donors at once: real servers, some of which stall, fail, lie, or haven't got all of it."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from geo_diloco.errors import TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import flow
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.fetch import NobodyLeftError, Source, _Fetch, _FetchJob, fetch_blob
from geo_diloco.runtime.flow import Flow
from geo_diloco.runtime.routes import Routes
from geo_diloco.runtime.runs import Seat
from geo_diloco.runtime.session import TransferRefused, make_session
from geo_diloco.runtime.spans import Missing, Span
from geo_diloco.runtime.store import PIECE_BYTES, BlobStore, blob_ref, piece_digests
from geo_diloco.runtime.streams import Climb
from geo_diloco.runtime.transfer import Move

from .samples import Served, bytes_of, served

BIG = bytes_of(24 * PIECE_BYTES + 1000, 5)
BIG_REF = blob_ref(BIG)
Talk = Callable[[Bulk, list[Served], BlobStore], Awaitable[None]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "BACKOFF_S", 0.001)
    monkeypatch.setattr(flow, "IDLE_S", 0.01)


def with_donors(tmp_path: Path, number: int, talk: Talk) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            donors = [await stack.enter_async_context(served(BlobStore(tmp_path / f"donor{n}"))) for n in range(number)]
            session = await stack.enter_async_context(make_session())
            await stack.enter_async_context(asyncio.timeout(60))
            bulk = Bulk(session, routes=Routes(rng=random.Random(1)))
            await talk(bulk, donors, BlobStore(tmp_path / "mine"))

    asyncio.run(run())


def sources(donors: list[Served], *, has_all: bool = False, patience_s: float = 0.0) -> list[Source]:
    return [Source(donor.url, has_all=has_all, patience_s=patience_s) for donor in donors]


def test_all_of_them_give_some_and_nothing_comes_twice(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        for donor in donors:
            donor.store.put(BIG)
        await fetch_blob(bulk, sources(donors), BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG
        assert bulk.counters.bulk_in == len(BIG)
        assert all(donor.server.counters.bulk_out > PIECE_BYTES for donor in donors)

    with_donors(tmp_path, 3, talk)


def test_one_that_stalls_loses_its_pieces_to_the_others_with_the_offsets_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "BACKOFF_S", 0.1)  # streams that stall together are one standstill

    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        for donor in donors:
            donor.store.put(BIG)
        stalled = asyncio.Event()
        asked_how_it_stands = 0

        async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """As the first donor, but in the middle of each answer it falls silent."""
            nonlocal asked_how_it_stands
            while request := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = request.decode().split(" ", 2)
                header = f"HTTP/1.1 200 OK\r\nX-Blob-Size: {len(BIG)}\r\nX-Blob-Index: 1\r\nX-Blob-Held: 0-24\r\n"
                piece = path.rpartition("/")[2]
                if method == "HEAD" or piece == BIG_REF.digest:
                    asked_how_it_stands += 1
                    index = b"" if method == "HEAD" else b"".join(piece_digests(BIG))
                    writer.write(header.encode() + f"Content-Length: {len(index)}\r\n\r\n".encode() + index)
                    continue
                first, _, last = piece.partition("-")
                begin, end = int(first) * PIECE_BYTES, min(len(BIG), (int(last or first) + 1) * PIECE_BYTES)
                if match := re.search(r"Range: bytes=(\d+)-(\d+)", request.decode()):
                    begin, end = begin + int(match[1]), begin + int(match[2]) + 1
                    header = header.replace("200 OK", "206 Partial Content")
                writer.write(header.encode() + f"Content-Length: {end - begin}\r\n\r\n".encode())
                writer.write(BIG[begin : (begin + end) // 2])
                stalled.set()
                await reader.read()
                writer.close()
                return

        listening = await asyncio.start_server(stall, "127.0.0.1", 0)
        async with listening:
            silent = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            both = [Source(silent), Source(donors[0].url, delay_s=0.05)]
            await fetch_blob(bulk, both, BIG_REF, mine, stall_s=0.3)
            assert stalled.is_set() and asked_how_it_stands == 1, "one standstill is enough while there are others"
            assert mine.get(BIG_REF) == BIG
            again = bulk.counters.bulk_in - len(BIG)  # of 4 MiB that came; on a busy machine a slow stream is relieved
            assert again < PIECE_BYTES, "the other half alone came from the other one"
            assert bulk.routes.is_resting(silent) and not bulk.routes.is_resting(donors[0].url)
            await bulk.session.close()

    with_donors(tmp_path, 1, talk)


@pytest.mark.parametrize("data", [BIG[: PIECE_BYTES // 2], BIG], ids=["one piece", "many"])
def test_those_that_are_cut_off_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(flow, "SILENT_S", 0.1)
    ref = blob_ref(data)

    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        donors[0].store.put(data)

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        listening = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        async with listening:
            silent = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            both = [Source(silent), Source(donors[0].url, delay_s=0.05)]
            async with asyncio.timeout(20):
                await fetch_blob(bulk, both, ref, mine)  # a stall is one after 30 s
            assert mine.get(ref) == data
            if len(data) < PIECE_BYTES:
                assert bulk.routes.is_resting(silent), "the next one is asked of somebody else"
            await bulk.session.close()

    with_donors(tmp_path, 1, talk)


def test_one_that_has_less_than_was_thought_gives_what_it_has(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        for donor, pieces in zip(donors, (range(20, 25), range(20)), strict=True):
            donor.port.announce(BIG_REF)
            donor.store.set_index(BIG_REF, b"".join(piece_digests(BIG)))
            for i in pieces:
                donor.store.append_piece(BIG_REF, i, 0, BIG[i * PIECE_BYTES : (i + 1) * PIECE_BYTES])
        await fetch_blob(bulk, sources(donors, has_all=True), BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG
        assert not any(bulk.routes.is_resting(donor.url) for donor in donors)

    with_donors(tmp_path, 2, talk)


def test_one_that_lies_is_found_out_whoever_sent_the_rest_of_the_piece(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        for donor in donors:
            donor.store.put(BIG)
        read = donors[0].store.read_piece
        donors[0].store.read_piece = lambda ref, i: read(ref, i)[::-1]  # type: ignore[method-assign]
        await fetch_blob(bulk, sources(donors), BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG
        assert bulk.routes.is_resting(donors[0].url) and not bulk.routes.is_resting(donors[1].url)

    with_donors(tmp_path, 2, talk)


def test_a_piece_that_two_sent_and_that_is_wrong_is_sent_by_one_alone_and_only_the_liar_is_blamed(
    tmp_path: Path,
) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        donors[0].store.put(BIG)
        mine.set_index(BIG_REF, b"".join(piece_digests(BIG)))
        for i in range(25):
            mine.append_piece(BIG_REF, i, 0, bytes(1000) if i % 2 else BIG[i * PIECE_BYTES :][:1000])
        await fetch_blob(bulk, sources(donors), BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG, "what somebody else had sent before was wrong in every other piece"
        assert not bulk.routes.is_resting(donors[0].url)

    with_donors(tmp_path, 1, talk)


def test_a_piece_that_is_sent_alone_is_none_of_the_others_business(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        donors[0].store.put(BIG)
        mine.set_index(BIG_REF, b"".join(piece_digests(BIG)))
        move = Move(bulk, BIG_REF, mine, 1.0, Missing(len(BIG), [(0, len(BIG))]))
        move.line = bulk.lanes.board.begin("it", "down", len(BIG))
        move.flow = Flow(move.missing, routes=bulk.routes)
        job = _FetchJob(move, has_index=True, begun=())
        way = _Fetch(job, Source(donors[0].url))
        move.flow._seats.append(Seat(way, bulk.routes.to(way.url), 0.0, Climb(1)))
        job.begins(1, "another")
        job.begins(1, way.url)
        assert not job.is_to_blame(1, way.url), "two sent parts of it"
        mine.append_piece(BIG_REF, 1, 0, bytes(100))
        await way.move(Span(PIECE_BYTES + 100, PIECE_BYTES + 200))
        assert mine.status(BIG_REF).unverified == ((PIECE_BYTES, PIECE_BYTES + 100),), "a part of it is not taken"
        await way.move(Span(PIECE_BYTES, 2 * PIECE_BYTES))
        assert mine.status(BIG_REF).held == {1}, "what was there before is forgotten first"

    with_donors(tmp_path, 1, talk)


def test_it_fails_only_when_nobody_is_left_and_says_why_of_each(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        donors[2].store.put(BIG)
        read = donors[2].store.read_piece

        def failing(ref: BlobRef, i: int) -> bytes:
            return read(ref, i) if i < 5 else read(ref, i)[::-1]

        donors[2].store.read_piece = failing  # type: ignore[method-assign]
        nowhere = "http://127.0.0.1:9"
        with pytest.raises(NobodyLeftError) as caught:
            await fetch_blob(bulk, [*sources(donors), Source(nowhere)], BIG_REF, mine)
        failures = caught.value.failures
        assert [isinstance(failures[donor.url], TransferRefused) for donor in donors] == [True, True, True]
        assert not isinstance(failures[nowhere], TransferRefused) and not caught.value.is_final
        donors[1].store.put(BIG)
        await fetch_blob(bulk, [Source(donors[1].url)], BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG and bulk.counters.bulk_in < len(BIG) + 20 * PIECE_BYTES

    with_donors(tmp_path, 3, talk)


def test_one_that_has_not_got_it_yet_is_asked_again_and_not_blamed(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        fetching = asyncio.create_task(fetch_blob(bulk, sources(donors, patience_s=30.0), BIG_REF, mine))
        await asyncio.sleep(0.05)
        assert not fetching.done()
        donors[0].store.put(BIG)
        await fetching
        assert mine.get(BIG_REF) == BIG and not bulk.routes.is_resting(donors[0].url)
        with pytest.raises(TransferError, match="404"):
            await fetch_blob(bulk, sources(donors, patience_s=0.01), blob_ref(b"another"), mine)
        assert not bulk.routes.is_resting(donors[0].url) and bulk.routes.to(donors[0].url).waited_in_vain == 1

    with_donors(tmp_path, 1, talk)


def test_one_that_is_fetching_it_itself_gives_what_it_has(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        half = donors[0]
        half.port.announce(BIG_REF)
        half.store.set_index(BIG_REF, b"".join(piece_digests(BIG)))
        for i in range(12):
            half.store.append_piece(BIG_REF, i, 0, BIG[i * PIECE_BYTES : (i + 1) * PIECE_BYTES])
        fetching = asyncio.create_task(fetch_blob(bulk, sources(donors), BIG_REF, mine))
        while len(mine.status(BIG_REF).held) < 12:  # noqa: ASYNC110 - nobody tells of a piece
            await asyncio.sleep(0.01)
        for i in range(12, 25):
            half.store.append_piece(BIG_REF, i, 0, BIG[i * PIECE_BYTES : (i + 1) * PIECE_BYTES])
        await fetching
        assert mine.get(BIG_REF) == BIG and bulk.counters.bulk_in == len(BIG)

    with_donors(tmp_path, 1, talk)


def test_the_reserve_is_left_alone_while_the_others_are_of_use(tmp_path: Path) -> None:
    async def talk(bulk: Bulk, donors: list[Served], mine: BlobStore) -> None:
        for donor in donors:
            donor.store.put(BIG)
        reserve = Source(donors[1].url, delay_s=30.0)
        await fetch_blob(bulk, [Source(donors[0].url), reserve], BIG_REF, mine)
        assert donors[1].server.counters.bulk_out == 0
        mine.delete(BIG_REF)
        donors[0].store.delete(BIG_REF)
        await fetch_blob(bulk, [Source(donors[0].url), reserve], BIG_REF, mine)
        assert donors[1].server.counters.bulk_out >= len(BIG), "at once when nobody else has it"

    with_donors(tmp_path, 2, talk)
