"""Whatever breaks, at whatever byte, the store holds nothing wrong, and the transfer goes on from there.

Between a real server and a real client on loopback stands a relay that lets so many bytes through and then resets the
all connections, or gives one back changed. It walks the classes of byte boundaries: in the request's and the answer's
header, in the first piece, at its end, in a middle one, in the last one, before the very last byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from geo_diloco.errors import TransferError
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime import flow, streams
from geo_diloco.runtime.disk import StoreFullError
from geo_diloco.runtime.fetch import Source, fetch_blob
from geo_diloco.runtime.pieces import OpenBudget
from geo_diloco.runtime.store import PIECE_BYTES, BlobStore, blob_ref, piece_digests
from geo_diloco.runtime.upload import upload_blob

from .samples import Served, bytes_of, served

BIG = bytes_of(3 * PIECE_BYTES + 5000, 7)
BIG_REF = blob_ref(BIG)
HEADER = 300
"""About as long as the header of a request or an answer."""
BOUNDARIES = {
    "in the first header": 20,
    "at the first piece's begin": HEADER,
    "in the first piece": PIECE_BYTES // 2,
    "before its last byte": PIECE_BYTES - 1,
    "between two pieces": PIECE_BYTES + HEADER,
    "in a middle piece": PIECE_BYTES + PIECE_BYTES // 3,
    "in the last piece": 3 * PIECE_BYTES + 2 * HEADER,
    "before the last byte": len(BIG) + HEADER,
}
Direction = str


@pytest.fixture(autouse=True)
def _one_stream_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream, so that the byte where it breaks is where it says."""
    monkeypatch.setattr(flow, "BACKOFF_S", 0.001)
    monkeypatch.setattr(streams, "STREAMS_MAX", 1)
    monkeypatch.setattr("geo_diloco.runtime.routes.STREAMS_MAX", 1)


@dataclass
class Wire:
    """What a relay does to the link."""

    cuts: list[int] = field(default_factory=list)
    """Bytes, over all connections and in both directions, until all of them are reset; then the next number counts."""
    spoil: int = -1
    """Which byte, counted over all connections towards the side that takes, is changed."""
    towards: Direction = "down"
    passed: int = 0


@asynccontextmanager
async def relay(it: Served, wire: Wire) -> AsyncIterator[str]:
    port = int(it.url.rsplit(":", 1)[1])
    open_now: set[asyncio.StreamWriter] = set()

    def take(size: int) -> int:
        """How many of so many bytes may pass; 0 if the link was cut with them."""
        if not wire.cuts:
            return size
        size = min(size, wire.cuts[0])
        wire.cuts[0] -= size
        if wire.cuts[0] <= 0:
            del wire.cuts[0]
            for writer in open_now:
                writer.transport.abort()
        return size

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction) -> None:
        while data := await source.read(16384):
            data = data[: take(len(data))]
            if direction == wire.towards:
                if wire.passed <= wire.spoil < wire.passed + len(data):
                    changed = bytearray(data)
                    changed[wire.spoil - wire.passed] ^= 0xFF
                    data = bytes(changed)
                wire.passed += len(data)
            sink.write(data)
            await sink.drain()

    async def carry(near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        far, far_writer = await asyncio.open_connection("127.0.0.1", port)
        open_now.update((near_writer, far_writer))
        pumps = [asyncio.create_task(pump(near, far_writer, "up")), asyncio.create_task(pump(far, near_writer, "down"))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pumps:
                each.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for writer in (near_writer, far_writer):
                open_now.discard(writer)
                writer.transport.abort()

    listening = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await it.session.close()


@dataclass
class Ends:
    """Both stores, and a transfer between them."""

    it: Served
    mine: BlobStore
    direction: Direction

    @property
    def taker(self) -> BlobStore:
        return self.mine if self.direction == "down" else self.it.store

    @property
    def received(self) -> int:
        counters = self.it.bulk.counters if self.direction == "down" else self.it.server.counters
        return counters.bulk_in

    async def transfer(self, url: str, ref: BlobRef = BIG_REF) -> None:
        if self.direction == "down":
            await fetch_blob(self.it.bulk, [Source(url)], ref, self.mine)
        else:
            await upload_blob(self.it.bulk, url, ref, self.mine)

    def check_nothing_wrong_is_held(self) -> None:
        """As a new process would see it, which believes the disk alone."""
        folder = self.taker._root
        again = BlobStore(folder, is_read_only=True)
        for i in again.status(BIG_REF).held:
            assert again.read_piece(BIG_REF, i) == BIG[i * PIECE_BYTES : (i + 1) * PIECE_BYTES]
        if again.has(BIG_REF):
            assert again.get(BIG_REF) == BIG
        assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def with_ends(tmp_path: Path, direction: Direction, talk: Callable[[Ends], Awaitable[None]]) -> None:
    async def run() -> None:
        mine, theirs = BlobStore(tmp_path / "mine"), BlobStore(tmp_path / "theirs")
        (theirs if direction == "down" else mine).put(BIG)
        async with served(theirs) as it, asyncio.timeout(60):
            it.port.announce(BIG_REF)
            await talk(Ends(it, mine, direction))

    asyncio.run(run())


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("where", BOUNDARIES)
def test_a_cut_anywhere_leaves_nothing_wrong_and_is_resumed_by_the_byte(
    tmp_path: Path, direction: Direction, where: str
) -> None:
    async def talk(ends: Ends) -> None:
        # the link is cut, again in the next header, and once more as far on
        async with relay(ends.it, Wire(cuts=[BOUNDARIES[where], 50, BOUNDARIES[where]])) as url:
            await ends.transfer(url)
        ends.check_nothing_wrong_is_held()
        assert ends.taker.get(BIG_REF) == BIG
        index = 32 * len(piece_digests(BIG)) * (direction == "up")
        assert ends.received - len(BIG) - 2 * index <= 0.05 * len(BIG), "what came before the cut is not sent again"

    with_ends(tmp_path, direction, talk)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("where", list(BOUNDARIES)[1:])
def test_while_it_is_cut_for_good_nothing_wrong_is_held(tmp_path: Path, direction: Direction, where: str) -> None:
    async def talk(ends: Ends) -> None:
        async with relay(ends.it, Wire(cuts=[BOUNDARIES[where], *[10] * 100])) as url:
            with pytest.raises(TransferError):
                await ends.transfer(url)
            ends.check_nothing_wrong_is_held()
            assert not ends.taker.has(BIG_REF)

    with_ends(tmp_path, direction, talk)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("where", ["in the first piece", "in a middle piece", "in the last piece"])
def test_a_byte_that_was_changed_on_the_way_costs_one_piece(tmp_path: Path, direction: Direction, where: str) -> None:
    async def talk(ends: Ends) -> None:
        at = BOUNDARIES[where] + (3000 if where == "in the last piece" else 0)
        async with relay(ends.it, Wire(spoil=at, towards=direction)) as url:
            await ends.transfer(url)
        assert ends.taker.get(BIG_REF) == BIG
        ends.check_nothing_wrong_is_held()

    with_ends(tmp_path, direction, talk)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("where", [0, PIECE_BYTES // 2, PIECE_BYTES, 3 * PIECE_BYTES + 10])
def test_a_file_that_shrank_under_who_gives_it_gives_no_wrong_byte(
    tmp_path: Path, direction: Direction, where: int
) -> None:
    async def talk(ends: Ends) -> None:
        giver = ends.mine if direction == "up" else ends.it.store
        file = giver._root / BIG_REF.digest
        read = giver.read_piece
        reads = 0

        def shrinking(ref: BlobRef, i: int) -> bytes:
            nonlocal reads
            reads += 1
            if reads == 2:
                with file.open("r+b") as handle:
                    handle.truncate(where)
            return read(ref, i)

        giver.read_piece = shrinking  # type: ignore[method-assign]
        with pytest.raises(TransferError):
            await ends.transfer(ends.it.url)
        assert not ends.taker.has(BIG_REF)
        ends.check_nothing_wrong_is_held()
        giver.put(BIG)
        await ends.transfer(ends.it.url)
        assert ends.taker.get(BIG_REF) == BIG

    with_ends(tmp_path, direction, talk)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("piece", [0, 1, 3])
def test_a_disk_that_fills_up_at_any_piece_may_have_room_again(
    tmp_path: Path, direction: Direction, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(ends: Ends) -> None:
        check = ends.taker._check_space
        checks = 0

        def filling(needed: int) -> None:
            nonlocal checks
            checks += 1
            if checks > 1 + piece:
                raise StoreFullError("disk full: 1 bytes wanted")
            check(needed)

        with monkeypatch.context() as patch:
            patch.setattr(ends.taker, "_check_space", filling)
            with pytest.raises(TransferError, match="disk full"):
                await ends.transfer(ends.it.url)
            ends.check_nothing_wrong_is_held()
        await ends.transfer(ends.it.url)
        assert ends.taker.get(BIG_REF) == BIG

    with_ends(tmp_path, direction, talk)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_two_writers_that_are_cut_at_different_places_end_with_one_right_blob(
    tmp_path: Path, direction: Direction
) -> None:
    async def talk(ends: Ends) -> None:
        async with relay(ends.it, Wire(cuts=[PIECE_BYTES // 2, 2 * PIECE_BYTES, 700_000, 100])) as url:
            await asyncio.gather(ends.transfer(url), ends.transfer(url))
        assert ends.taker.get(BIG_REF) == BIG
        ends.check_nothing_wrong_is_held()

    with_ends(tmp_path, direction, talk)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_after_a_restart_of_the_taking_side_at_most_a_piece_per_stream_comes_again(
    tmp_path: Path, direction: Direction
) -> None:
    async def talk(ends: Ends) -> None:
        async with relay(ends.it, Wire(cuts=[2 * PIECE_BYTES + PIECE_BYTES // 2, *[10] * 100])) as url:
            with pytest.raises(TransferError):
                await ends.transfer(url)
        before = ends.received
        held = len(BlobStore(ends.taker._root, is_read_only=True).status(BIG_REF).held)
        assert held == 2
        ends.taker._partials.clear()  # all that a process forgets when it dies
        ends.taker._budget = OpenBudget()
        async with served(ends.it.store, ends.it.port) as again:
            restarted = Ends(again, ends.mine, direction)
            await restarted.transfer(again.url)
            assert restarted.taker.get(BIG_REF) == BIG
            assert before + restarted.received - len(BIG) < PIECE_BYTES

    with_ends(tmp_path, direction, talk)


def test_an_unfinished_piece_begins_again_only_if_it_is_told_to(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.set_index(BIG_REF, b"".join(piece_digests(BIG)))
    store.append_piece(BIG_REF, 1, 0, BIG[PIECE_BYTES : PIECE_BYTES + 100])
    assert store.status(BIG_REF).unverified == ((PIECE_BYTES, PIECE_BYTES + 100),)
    store.drop_open(BIG_REF, 1)
    assert store.status(BIG_REF).unverified == ()
