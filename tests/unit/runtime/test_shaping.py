"""Bulk held below a rate, counted against a quota, and shown while it is under way."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.runtime.board import IDLE_S, Board
from geo_diloco.runtime.bulk import Bulk, Lanes
from geo_diloco.runtime.fetch import NobodyLeftError, Source, fetch_blob
from geo_diloco.runtime.quota import WRITE_EVERY_BYTES, Quota
from geo_diloco.runtime.shaping import BURST_S, PORTION_BYTES, Bucket, Shaper
from geo_diloco.runtime.store import BlobStore, blob_ref
from geo_diloco.runtime.upload import upload_blob

from .samples import RememberingPort, bytes_of, served

DATA = bytes_of(3 << 20, 9)
REF = blob_ref(DATA)


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# ---- the bucket


@given(
    st.floats(8e3, 1e9),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, PORTION_BYTES)), min_size=1, max_size=200),
)
def test_in_no_window_of_ten_seconds_more_than_a_tenth_above_the_rate_goes(
    rate: float, asked: list[tuple[float, int]]
) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    gone: list[tuple[float, int]] = []
    for pause, size in asked:
        now += pause
        gone.append((now + bucket.wait_s(size, now), size))
    for begin, _ in gone:
        within = sum(size for at, size in gone if begin <= at < begin + 10.0)
        assert within <= rate * (10.0 + BURST_S) + PORTION_BYTES + 1


@given(st.floats(8e3, 1e9), st.integers(10, 300))
def test_who_always_has_something_to_send_gets_all_of_the_rate(rate: float, portions: int) -> None:
    bucket, last = Bucket(rate, 0.0), 0.0
    for _ in range(portions):
        last = bucket.wait_s(PORTION_BYTES, 0.0)
    assert last == pytest.approx((portions - 1) * PORTION_BYTES / rate)


def test_without_a_limit_nothing_waits_and_all_is_counted() -> None:
    spent: list[int] = []

    async def run() -> None:
        shaper = Shaper(spend=spent.append)
        assert shaper.is_open and shaper.portion(123) == 123
        await shaper.take(1 << 40)

    asyncio.run(run())
    assert spent == [1 << 40]


def test_being_held_back_is_no_standstill() -> None:
    touched = 0

    def touch() -> None:
        nonlocal touched
        touched += 1

    async def run() -> None:
        shaper = Shaper(1e6)
        await shaper.take(100_000)
        await shaper.take(1, touch=touch)

    asyncio.run(run())
    assert touched == 1


# ---- what goes through it


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("side", ["asking", "serving"])
def test_both_sides_hold_both_directions_below_their_limit(tmp_path: Path, direction: str, side: str) -> None:
    rate = 2_500_000.0

    async def run() -> float:
        mine, theirs = BlobStore(tmp_path / "mine"), BlobStore(tmp_path / "theirs")
        (mine if direction == "up" else theirs).put(DATA)
        sends = (direction == "up") == (side == "asking")
        lanes = Lanes(up=Shaper(rate)) if sends else Lanes(down=Shaper(rate))
        async with served(theirs, lanes=lanes if side == "serving" else None) as it:
            it.port.announce(REF)
            bulk = Bulk(it.session, lanes=lanes if side == "asking" else Lanes())
            began_at = time.monotonic()
            if direction == "up":
                await upload_blob(bulk, it.url, REF, mine)
            else:
                await fetch_blob(bulk, [Source(it.url)], REF, mine)
            return time.monotonic() - began_at

    took_s = asyncio.run(run())
    assert took_s > 0.9 * (len(DATA) / rate - BURST_S)


def test_who_is_no_mirror_gives_nothing_but_takes_what_was_announced(tmp_path: Path) -> None:
    async def run() -> None:
        mine, theirs = BlobStore(tmp_path / "mine"), BlobStore(tmp_path / "theirs")
        theirs.put(DATA)
        other = mine.put(b"an announced one")
        async with served(theirs, RememberingPort(no_mirror="the quota is used up")) as it:
            it.port.announce(other)
            with pytest.raises(NobodyLeftError, match="the quota is used up") as caught:
                await fetch_blob(it.bulk, [Source(it.url)], REF, mine)
            assert caught.value.is_final and not it.bulk.routes.is_resting(it.url)
            await upload_blob(it.bulk, it.url, other, mine, there="likely")
            assert theirs.has(other) and it.server.counters.bulk_out == 0

    asyncio.run(run())


# ---- the quota


def test_a_quota_is_used_up_until_midnight_and_remembered_over_restarts(tmp_path: Path) -> None:
    clock = Clock(20_000 * 86_400.0 + 3600.0)
    quota = Quota(tmp_path / "quota.json", 1_000_000_000, clock=clock)
    quota.spend(999_999_999)
    assert quota.why_used_up() == ""
    quota.spend(1)
    assert "1 GB a day is used up for another 23.0 h" in quota.why_used_up()
    quota.save()
    again = Quota(tmp_path / "quota.json", 1_000_000_000, clock=clock)
    assert again.why_used_up() and again.used == 1_000_000_000
    clock.now += 86_400
    assert again.why_used_up() == "" and again.used == 0


def test_a_process_that_is_killed_forgets_little_of_it(tmp_path: Path) -> None:
    quota = Quota(tmp_path / "quota.json", 1 << 40)
    quota.spend(WRITE_EVERY_BYTES)
    quota.spend(5)
    assert Quota(tmp_path / "quota.json", 1 << 40).used == WRITE_EVERY_BYTES


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"day": 1, "bytes": 7}', '{"day": "x", "bytes": 7}'])
def test_a_memory_that_is_damaged_or_old_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "quota.json").write_text(text)
    assert Quota(tmp_path / "quota.json", 1000).used == 0


def test_a_clock_that_is_set_back_gives_no_second_day(tmp_path: Path) -> None:
    clock = Clock(20_000 * 86_400.0)
    quota = Quota(tmp_path / "quota.json", 100, clock=clock)
    quota.spend(100)
    quota.save()
    clock.now -= 86_400
    assert quota.why_used_up() and Quota(tmp_path / "quota.json", 100, clock=clock).why_used_up()


def test_a_clock_that_was_a_year_ahead_costs_no_more_than_the_day(tmp_path: Path) -> None:
    clock = Clock(20_000 * 86_400.0)
    quota = Quota(tmp_path / "quota.json", 100, clock=clock)
    quota.spend(100)
    quota.save()
    clock.now -= 365 * 86_400
    assert not Quota(tmp_path / "quota.json", 100, clock=clock).why_used_up()
    assert not quota.why_used_up()


def test_without_a_quota_nothing_is_written(tmp_path: Path) -> None:
    quota = Quota(tmp_path / "quota.json", 0)
    quota.spend(1 << 40)
    quota.save()
    assert quota.why_used_up() == "" and not list(tmp_path.iterdir())
    json.dumps(Lanes().status())


# ---- the board


def test_the_board_says_how_far_how_fast_and_how_long_still() -> None:
    clock = Clock()
    board = Board(clock=clock)
    line = board.begin("update", "down", 1000, done=100)
    for _ in range(3):
        clock.now += 1.0
        board.moved(line, 100, "http://a")
    (shown,) = board.to_json()
    assert shown == {
        "what": "update",
        "direction": "down",
        "with": ["http://a"],
        "bytes": 400,
        "bytes_total": 1000,
        "bytes_per_s": 100,
        "left_s": 6.0,
        "resumed": 1,
    }
    clock.now += 100.0
    assert board.to_json()[0]["bytes_per_s"] == 1
    board.end(line)
    assert board.to_json() == []


def test_what_others_ask_for_is_one_line_each_until_they_stop_asking() -> None:
    clock = Clock()
    board = Board(clock=clock)
    for whom in ("a", "b", "a"):
        board.moved(board.served("blob", "up", 1000, whom), 100, whom)
    assert [(shown["with"], shown["bytes"]) for shown in board.to_json()] == [(["a"], 200), (["b"], 100)]
    clock.now += IDLE_S + 1
    assert board.to_json() == []


def test_a_transfer_under_way_is_on_the_board_at_both_ends(tmp_path: Path) -> None:
    async def run() -> None:
        mine, theirs = BlobStore(tmp_path / "mine"), BlobStore(tmp_path / "theirs")
        theirs.put(DATA)
        lanes = Lanes(up=Shaper(2_000_000))
        async with served(theirs, lanes=lanes) as it:
            fetching = asyncio.create_task(fetch_blob(it.bulk, [Source(it.url)], REF, mine, what="update"))
            while not (shown := it.bulk.lanes.board.to_json()) or not shown[0]["bytes"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (ours,), (theirs_line,) = shown, lanes.board.to_json()
            assert (ours["what"], ours["with"], ours["bytes_total"]) == ("update", [it.url], len(DATA))
            assert (theirs_line["direction"], theirs_line["with"]) == ("up", ["127.0.0.1"])
            assert lanes.status()["limits"] == {"max_up": 2_000_000}
            await fetching
            assert it.bulk.lanes.board.to_json() == lanes.board.to_json() == []

    asyncio.run(run())
