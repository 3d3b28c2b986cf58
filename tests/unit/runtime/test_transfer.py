from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import pytest

from geo_diloco.errors import TransferError
from geo_diloco.manifest import Digest
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import blobs, fetch, flow, transfer, upload
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.fetch import NobodyLeftError, Source, fetch_blob
from geo_diloco.runtime.pieces import (
    INDEX_BROUGHT_HEADER,
    INDEX_BROUGHT_PIECES_MAX,
    INDEX_WANTED_HEADER,
    digest_from_index,
    header_from_index,
    index_from_header,
)
from geo_diloco.runtime.routes import Route
from geo_diloco.runtime.session import Deadline, Response, TransferRefused, asking
from geo_diloco.runtime.spans import Missing
from geo_diloco.runtime.store import PIECE_BYTES, BlobStatus, BlobStore, blob_ref, piece_digests
from geo_diloco.runtime.upload import upload_blob

from .samples import Served, bytes_of, served

BIG = bytes_of(5 * PIECE_BYTES + 1000)
BIG_REF = blob_ref(BIG)
BIG_INDEX = b"".join(piece_digests(BIG))
SMALL = b"a small blob"
SMALL_REF = blob_ref(SMALL)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "BACKOFF_S", 0.001)


@pytest.fixture
def mine(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "mine")


def with_server(tmp_path: Path, talk: Callable[[Served], Awaitable[None]]) -> Served:
    async def run() -> Served:
        async with served(BlobStore(tmp_path / "theirs")) as it:
            await talk(it)
            return it

    return asyncio.run(run())


@asynccontextmanager
async def relay(it: Served, rest: list[int]) -> AsyncIterator[str]:
    """A way to the server whose connections are cut after so many bytes, one budget each; later ones are not."""
    port = int(it.url.rsplit(":", 1)[1])

    async def carry(near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        left = [rest.pop(0) if rest else 1 << 40]
        far, far_writer = await asyncio.open_connection("127.0.0.1", port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while left[0] > 0 and (data := await source.read(min(left[0], 65536))):
                left[0] -= len(data)
                sink.write(data)
                await sink.drain()

        pumps = [asyncio.create_task(pump(near, far_writer)), asyncio.create_task(pump(far, near_writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pumps:
                each.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for writer in (near_writer, far_writer):
                writer.transport.abort()

    listening = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    await it.session.close()


@contextmanager
def refused(match: str) -> Iterator[None]:
    """A fetch fails because every donor refuses for good."""
    with pytest.raises(NobodyLeftError, match=match) as caught:
        yield
    assert caught.value.is_final


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 1000])
def test_a_blob_goes_up_and_comes_down_again(tmp_path: Path, mine: BlobStore, size: int) -> None:
    data = bytes_of(size)
    ref = mine.put(data)
    other = BlobStore(tmp_path / "other")

    async def talk(it: Served) -> None:
        it.port.announce(ref)
        assert await upload_blob(it.bulk, it.url, ref, mine) > 0 or size == 0
        assert set(it.port.arrived) == {ref}
        assert it.store.get(ref) == data
        assert await fetch_blob(it.bulk, [Source(it.url)], ref, other) > 0 or size == 0
        assert other.get(ref) == data

    counters = with_server(tmp_path, talk).bulk.counters
    index = 32 * len(piece_digests(data)) if size > PIECE_BYTES else 0
    assert (counters.bulk_out, counters.bulk_in) == (size + index, size)


def test_one_small_blob_is_one_request(tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    mine.put(SMALL)

    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        asked: list[str] = []

        def accepts(digest: Digest) -> BlobRef | None:
            asked.append(digest)
            return SMALL_REF

        monkeypatch.setattr(it.port, "accepts", accepts)
        await upload_blob(it.bulk, it.url, SMALL_REF, mine)
        assert asked == [SMALL_REF.digest]

    with_server(tmp_path, talk)


def test_a_large_blob_is_begun_with_one_request_which_also_tells_what_is_there(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def head(move: object, url: str) -> BlobStatus:
        raise AssertionError("on a link with a long way every question costs a part of a fragment")

    monkeypatch.setattr(transfer.Move, "status_there", head)
    half = BlobStore(tmp_path / "theirs")
    half.set_index(BIG_REF, BIG_INDEX)
    half.append_piece(BIG_REF, 1, 0, BIG[PIECE_BYTES : 2 * PIECE_BYTES])
    mine.put(BIG)

    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        await upload_blob(it.bulk, it.url, BIG_REF, mine)
        assert it.store.get(BIG_REF) == BIG

    assert with_server(tmp_path, talk).server.counters.bulk_in == len(BIG) - PIECE_BYTES + len(BIG_INDEX)


@pytest.mark.parametrize("data", [SMALL, BIG[: PIECE_BYTES + 1000]])
def test_a_new_blob_of_few_pieces_is_sent_without_a_question_and_is_sent_before_it_is_confirmed(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    async def ask(*_: object) -> BlobStatus:
        raise AssertionError("on a link with a long way every question costs a part of a fragment")

    monkeypatch.setattr(transfer.Move, "status_there", ask)
    monkeypatch.setattr(upload._Upload, "_put_index", ask)
    ref = mine.put(data)

    async def talk(it: Served) -> None:
        it.port.announce(ref)
        sent, may_be_heard, check = asyncio.Event(), asyncio.Event(), transfer.check
        times: list[bool] = []

        async def late(response: Response) -> None:
            await may_be_heard.wait()
            await check(response)

        def on_sent() -> None:
            times.append(may_be_heard.is_set())
            sent.set()

        monkeypatch.setattr(upload, "check", late)
        uploading = asyncio.ensure_future(upload_blob(it.bulk, it.url, ref, mine, there="none", on_sent=on_sent))
        async with asyncio.timeout(10):
            await sent.wait()
        assert not uploading.done()
        may_be_heard.set()
        await uploading
        assert it.store.get(ref) == data and times == [False]

    with_server(tmp_path, talk)


def test_to_a_peer_that_knows_no_index_among_bytes_it_is_sent_by_itself(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.put(BIG)
    monkeypatch.setattr(upload, "INDEX_BROUGHT_HEADER", "X-Unheard-Of")

    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        await upload_blob(it.bulk, it.url, BIG_REF, mine, there="none")
        assert it.store.get(BIG_REF) == BIG

    with_server(tmp_path, talk)


def test_who_has_all_of_a_blob_is_asked_for_bytes_at_once(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(way: object) -> None:
        raise AssertionError("on a link with a long way every question costs a part of a fragment")

    monkeypatch.setattr(fetch._Fetch, "_get_index", ask)
    BlobStore(tmp_path / "theirs").put(BIG)

    async def talk(it: Served) -> None:
        await fetch_blob(it.bulk, [Source(it.url, has_all=True)], BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG
        assert it.bulk.routes.to(it.url).round_trip_s > 0, "the next bytes are to be asked for in time"

    with_server(tmp_path, talk)


def test_a_peer_that_knows_no_index_among_bytes_is_asked_for_it(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    BlobStore(tmp_path / "theirs").put(BIG)
    monkeypatch.setattr(fetch, "INDEX_WANTED_HEADER", "X-Unheard-Of")

    async def talk(it: Served) -> None:
        await fetch_blob(it.bulk, [Source(it.url, has_all=True)], BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG

    with_server(tmp_path, talk)


@pytest.mark.parametrize(
    "header", ["no base64!", b64encode(BIG_INDEX[::-1]).decode(), b64encode(BIG_INDEX[32:]).decode()]
)
def test_who_brings_a_wrong_index_along_is_refused_before_any_of_it_is_kept(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    BlobStore(tmp_path / "theirs").put(BIG)
    monkeypatch.setattr(blobs, "header_from_index", lambda index: header)

    async def talk(it: Served) -> None:
        with refused("digests|index"):
            await fetch_blob(it.bulk, [Source(it.url, has_all=True)], BIG_REF, mine)
        status = mine.status(BIG_REF)
        assert not status.has_index and status.lacking(BIG_REF.size) == [(0, BIG_REF.size)]

    with_server(tmp_path, talk)


def test_the_longest_index_that_goes_along_with_bytes_fits_into_a_header_both_ways(
    tmp_path: Path, mine: BlobStore
) -> None:
    piece = bytes_of(PIECE_BYTES)
    index = piece_digests(piece)[0] + bytes_of(32 * (INDEX_BROUGHT_PIECES_MAX - 1))
    ref = BlobRef(
        digest_from_index(INDEX_BROUGHT_PIECES_MAX * PIECE_BYTES, index), INDEX_BROUGHT_PIECES_MAX * PIECE_BYTES
    )

    async def talk(it: Served) -> None:
        it.port.announce(ref)
        url = f"{it.url}/v1/blobs/{ref.digest}/0"
        brought = {INDEX_BROUGHT_HEADER: header_from_index(index)}
        async with it.session.put(url, data=piece, headers=brought) as response:
            assert response.status == 200 and it.store.index(ref) == index
        async with it.session.get(url, headers={INDEX_WANTED_HEADER: "1"}) as response:
            assert index_from_header(response.headers[INDEX_BROUGHT_HEADER]) == index
        async with it.session.get(url) as response:
            assert INDEX_BROUGHT_HEADER not in response.headers, "it is long"

    with_server(tmp_path, talk)


def test_uploads_that_follow_each_other_are_timed_by_what_the_link_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes a second and a round trip of 1 s: the first is sent at 9 and answered at 11, the next began at 9."""
    now = 0.0
    monkeypatch.setattr(transfer, "monotonic", lambda: now)
    route = Route(round_trip_s=1.0)

    def over(began_at: float, sent_at: float, over_at: float, num_moved: int = 10_000) -> int:
        nonlocal now
        now = over_at
        bulk, nothing = cast("Bulk", None), Missing(0, [])
        move = transfer.Move(bulk, SMALL_REF, cast("BlobStore", None), 1.0, nothing, num_moved=num_moved)
        move.began_at, move.sent_at = began_at, sent_at
        return move.upload_bytes_per_s(route)

    assert over(0.0, 9.0, 11.0) == 1000
    assert over(9.0, 19.0, 21.0) == 1000
    assert over(19.0, 29.0, 29.5) == 1000, "the answer before was late, the bytes were not"
    assert over(100.0, 109.0, 111.0) == 1000, "after a pause"


def test_of_what_is_complete_nothing_but_the_index_is_moved_again(tmp_path: Path, mine: BlobStore) -> None:
    mine.put(BIG)

    async def talk(it: Served) -> None:
        it.store.put(BIG)
        it.port.announce(BIG_REF)
        await upload_blob(it.bulk, it.url, BIG_REF, mine)
        await it.server.stop()
        await fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine)

    assert with_server(tmp_path, talk).server.counters.bulk_in == len(BIG_INDEX)


# ---- breaking off and going on


def test_an_upload_resumes_where_the_connection_broke(tmp_path: Path, mine: BlobStore) -> None:
    mine.put(BIG)

    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        async with relay(it, [500_000, 700_000, 1_300_000, 200_000, 900_000, 100_000, 1_500_000]) as url:
            await upload_blob(it.bulk, url, BIG_REF, mine)
        assert it.store.get(BIG_REF) == BIG

    it = with_server(tmp_path, talk)
    assert it.server.counters.bulk_in < len(BIG) + PIECE_BYTES


def test_a_fetch_resumes_where_the_connection_broke(tmp_path: Path, mine: BlobStore) -> None:
    async def talk(it: Served) -> None:
        it.store.put(BIG)
        async with relay(it, [500_000, 700_000, 1_300_000, 200_000, 900_000, 100_000, 1_500_000]) as url:
            await fetch_blob(it.bulk, [Source(url)], BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG

    counters = with_server(tmp_path, talk).bulk.counters
    assert counters.bulk_in < len(BIG) + PIECE_BYTES  # a chunk on its way to the store may be asked for again


def test_a_transfer_goes_on_after_a_restart_of_either_side(tmp_path: Path, mine: BlobStore) -> None:
    half = BlobStore(tmp_path / "theirs")
    half.set_index(BIG_REF, BIG_INDEX)
    for i in (0, 3):
        half.append_piece(BIG_REF, i, 0, BIG[i * PIECE_BYTES : (i + 1) * PIECE_BYTES])
    mine.put(BIG)

    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        await upload_blob(it.bulk, it.url, BIG_REF, mine)
        assert it.store.get(BIG_REF) == BIG

    assert with_server(tmp_path, talk).server.counters.bulk_in == len(BIG) - 2 * PIECE_BYTES + len(BIG_INDEX)


def test_without_progress_it_gives_up_and_may_be_tried_again(tmp_path: Path, mine: BlobStore) -> None:
    mine.put(SMALL)

    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        budgets = [10] * 100
        async with relay(it, budgets) as url:
            with pytest.raises(TransferError) as caught:
                await upload_blob(it.bulk, url, SMALL_REF, mine)
            assert not isinstance(caught.value, TransferRefused)
            budgets.clear()
            await upload_blob(it.bulk, url, SMALL_REF, mine)
        assert it.store.get(SMALL_REF) == SMALL

    with_server(tmp_path, talk)


def test_a_cancelled_fetch_keeps_what_it_has(tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(it: Served) -> None:
        it.store.put(BIG)
        append = mine.append_piece
        appended = 0

        def stop_after(ref: BlobRef, i: int, offset: int, chunk: bytes) -> bool:
            nonlocal appended
            appended += len(chunk)
            if appended > 3 * PIECE_BYTES:
                loop.call_soon_threadsafe(task.cancel)
            return append(ref, i, offset, chunk)

        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(mine, "append_piece", stop_after)
            task = asyncio.create_task(fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine))
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not mine.has(BIG_REF)
        before = it.bulk.counters.bulk_in
        await fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG
        assert it.bulk.counters.bulk_in - before < len(BIG) - PIECE_BYTES

    with_server(tmp_path, talk)


def test_two_fetches_of_one_blob_do_no_harm(tmp_path: Path, mine: BlobStore) -> None:
    async def talk(it: Served) -> None:
        it.store.put(BIG)
        await asyncio.gather(*(fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine) for _ in range(3)))
        assert mine.get(BIG_REF) == BIG

    with_server(tmp_path, talk)


# ---- the announcement


def test_an_upload_waits_until_its_announcement_is_heard(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.put(SMALL)

    async def talk(it: Served) -> None:
        asked = 0

        def accepts(digest: Digest) -> BlobRef | None:
            nonlocal asked
            asked += 1
            return SMALL_REF if asked > 3 else None

        monkeypatch.setattr(it.port, "accepts", accepts)
        await upload_blob(it.bulk, it.url, SMALL_REF, mine)
        assert it.store.get(SMALL_REF) == SMALL

    with_server(tmp_path, talk)


def test_an_upload_that_is_never_announced_is_refused_for_good(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "ANNOUNCE_WAIT_S", 0.05)
    mine.put(SMALL)

    async def talk(it: Served) -> None:
        with pytest.raises(TransferRefused, match="404"):
            await upload_blob(it.bulk, it.url, SMALL_REF, mine)

    with_server(tmp_path, talk)


# ---- liars and damage


def test_a_blob_that_the_donor_lacks_is_refused_at_once(tmp_path: Path, mine: BlobStore) -> None:
    async def talk(it: Served) -> None:
        for ref in (SMALL_REF, BIG_REF):
            with refused("404"):
                await fetch_blob(it.bulk, [Source(it.url)], ref, mine)

    with_server(tmp_path, talk)


def test_a_donor_that_sends_wrong_bytes_once_is_asked_again_and_twice_is_refused(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(it: Served) -> None:
        it.store.put(BIG)
        read = it.store.read_piece
        lies = 0

        def lying(ref: BlobRef, i: int) -> bytes:
            nonlocal lies
            if i == 3 and lies < lies_max:
                lies += 1
                return read(ref, i)[::-1]
            return read(ref, i)

        monkeypatch.setattr(it.store, "read_piece", lying)
        lies_max = 1000
        with refused("wrong digest"):
            await fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine)
        assert not mine.has(BIG_REF)
        lies, lies_max = 0, 1
        await fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine)
        assert mine.get(BIG_REF) == BIG

    with_server(tmp_path, talk)


def test_a_donor_with_a_wrong_index_or_a_wrong_length_is_refused(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(it: Served) -> None:
        it.store.put(BIG)
        index = it.store.index(BIG_REF)
        for wrong in (index[::-1], index[:-1], b""):
            with monkeypatch.context() as patch:
                patch.setattr(it.store, "index", lambda ref, wrong=wrong: wrong)
                with refused("index"):
                    await fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine)
        for wrong in (SMALL[:-1], SMALL + b"x", b""):
            with monkeypatch.context() as patch:
                claimed = BlobRef(SMALL_REF.digest, len(wrong))
                patch.setattr(it.store, "find", lambda digest, claimed=claimed: claimed)
                patch.setattr(it.store, "status", lambda ref: BlobStatus(True, True, frozenset({0})))
                patch.setattr(it.store, "read_piece", lambda ref, i, wrong=wrong: wrong)
                with refused("wanted 12|piece 0 of|pieces 0 to 0"):
                    await fetch_blob(it.bulk, [Source(it.url)], SMALL_REF, mine)

    with_server(tmp_path, talk)


def test_a_donor_that_sends_too_much_without_saying_so_is_cut_short(tmp_path: Path, mine: BlobStore) -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
                await writer.drain()
        except OSError:
            writer.close()

    async def talk(it: Served) -> None:
        listening = await asyncio.start_server(pour, "127.0.0.1", 0)
        async with listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            for ref in (SMALL_REF, BIG_REF):
                with pytest.raises(TransferError):
                    await fetch_blob(it.bulk, [Source(url)], ref, mine)
            await it.session.close()

    with_server(tmp_path, talk)
    assert not list((tmp_path / "mine").iterdir())


def test_bytes_spoiled_on_the_way_up_are_sent_again(
    tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.put(BIG)

    async def talk(it: Served) -> None:
        it.port.announce(BIG_REF)
        read = mine.read_piece
        spoiled: list[int] = []

        def spoiling(ref: BlobRef, i: int) -> bytes:
            data = read(ref, i)
            if i == 2 and not spoiled:
                spoiled.append(i)
                return data[::-1]
            return data

        monkeypatch.setattr(mine, "read_piece", spoiling)
        await upload_blob(it.bulk, it.url, BIG_REF, mine)
        assert it.store.get(BIG_REF) == BIG
        assert spoiled

    with_server(tmp_path, talk)


def test_what_we_dont_hold_or_hold_damaged_is_never_sent(tmp_path: Path, mine: BlobStore) -> None:
    async def talk(it: Served) -> None:
        it.port.announce(SMALL_REF)
        with pytest.raises(TransferRefused, match="not held"):
            await upload_blob(it.bulk, it.url, SMALL_REF, mine)
        mine.put(SMALL)
        (tmp_path / "mine" / SMALL_REF.digest).write_bytes(SMALL[::-1])
        with pytest.raises(TransferRefused, match="damaged"):
            await upload_blob(it.bulk, it.url, SMALL_REF, mine)

    assert with_server(tmp_path, talk).server.counters.bulk_in == 0


def test_a_full_disk_on_either_side_may_pass(tmp_path: Path, mine: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(needed: int) -> None:
        raise StoreFullError("disk full: 1 bytes wanted")

    async def talk(it: Served) -> None:
        mine.put(BIG)
        it.port.announce(BIG_REF)
        with monkeypatch.context() as patch:
            patch.setattr(it.store, "_check_space", full)
            with pytest.raises(TransferError, match="disk full") as caught:
                await upload_blob(it.bulk, it.url, BIG_REF, mine)
            assert not isinstance(caught.value, TransferRefused)
        await upload_blob(it.bulk, it.url, BIG_REF, mine)
        mine.delete(BIG_REF)
        with monkeypatch.context() as patch:
            patch.setattr(mine, "_check_space", full)
            with pytest.raises(TransferError, match="disk full") as caught:
                await fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine)
            assert not isinstance(caught.value, TransferRefused)
        await fetch_blob(it.bulk, [Source(it.url)], BIG_REF, mine)

    with_server(tmp_path, talk)


def test_a_claimed_size_beyond_all_measure_is_refused_without_asking(mine: BlobStore) -> None:
    async def run() -> None:
        with pytest.raises(TransferRefused, match="at most"):
            await fetch_blob(None, [], BlobRef(SMALL_REF.digest, 1 << 50), mine)  # type: ignore[arg-type]

    asyncio.run(run())


# ---- standing still


def test_a_transfer_that_stands_still_is_given_up(tmp_path: Path, mine: BlobStore) -> None:
    mine.put(BIG)
    silent: list[asyncio.StreamWriter] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)

    async def talk(it: Served) -> None:
        listening = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        async with listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            with pytest.raises(TransferError, match="no progress"):
                await upload_blob(it.bulk, url, BIG_REF, mine, stall_s=0.02)
            with pytest.raises(TransferError, match="no progress"):
                await fetch_blob(it.bulk, [Source(url)], SMALL_REF, mine, stall_s=0.02)
            await it.session.close()
            for writer in silent:
                writer.transport.abort()

    with_server(tmp_path, talk)


def test_progress_moves_the_deadline_and_a_late_word_is_harmless() -> None:
    async def run() -> None:
        async with asking("x"), Deadline(1000.0) as deadline:
            first = deadline._timeout.when()
            deadline.touch()
            second = deadline._timeout.when()
        assert first is not None
        assert second is not None
        assert second > first
        deadline.touch()
        with pytest.raises(TransferError, match="no progress"):
            async with asking("x"), Deadline(0.0) as deadline:
                await asyncio.Event().wait()
        deadline.touch()

    asyncio.run(run())
