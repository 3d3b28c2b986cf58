"""A learner whose way down is too thin for the run's updates says so, with both rates; no other one does."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import CodecSpec, MonoMs, Version
from geo_diloco.protocol.downlink import WAITING_MAX, WINDOW_MS, Downlink
from geo_diloco.protocol.messages import BlobRef, Commit
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ChainBuilder

INT4, BF16 = CodecSpec(name="int4", block=64), CodecSpec(name="bf16", block=64)
SIZE = 100_000


class Way:
    """An update is committed every second; each takes `takes_ms` to come, one after another."""

    def __init__(self, *, takes_ms: int) -> None:
        entry = ChainBuilder.opened().commit().entry
        assert isinstance(entry, Commit)
        self.commit = replace(entry, update=BlobRef(fake_digest("update"), SIZE))
        self.takes_ms = takes_ms
        self.downlink = Downlink()
        self.num_heard = self.num_came = 0
        self.busy_ms = 0

    def go(self, seconds: int, *, begin: int = 0) -> str:
        """What it says in the end."""
        for second in range(begin, begin + seconds):
            if self.num_came == self.num_heard:
                self.busy_ms = max(self.busy_ms, second * 1000)
            self.hear(second * 1000)
            while self.num_came < self.num_heard and self.busy_ms + self.takes_ms <= (second + 1) * 1000:
                self.busy_ms += self.takes_ms
                self.downlink.came(fake_digest("entry", self.num_came), MonoMs(self.busy_ms))
                self.num_came += 1
        return self.downlink.text(INT4)

    def hear(self, ms: int) -> None:
        self.downlink.heard(self.commit, fake_digest("entry", self.num_heard), MonoMs(ms))
        self.num_heard += 1


def test_a_link_that_carries_less_than_is_needed_is_told_with_both_rates() -> None:
    way = Way(takes_ms=1600)
    assert way.go(WINDOW_MS // 1000) == "", "that it has much to do for a while is no news"
    said = way.go(2 * WINDOW_MS // 1000, begin=WINDOW_MS // 1000)
    assert said == (
        "behind: its way down carries 0.51 Mbit/s, updates need 0.81 Mbit/s; a larger interval (H) would let it keep up"
    )
    assert "(H) or a thinner codec (codec.down) would" in way.downlink.text(BF16)


def test_a_link_that_keeps_up_says_nothing_be_it_ever_so_busy() -> None:
    for takes_ms in (100, 900, 1000):
        assert Way(takes_ms=takes_ms).go(300) == ""


def test_who_was_away_and_catches_up_says_nothing() -> None:
    way = Way(takes_ms=500)
    for _ in range(200):
        way.hear(0)
    for second in range(0, 200, 10):
        assert way.go(10, begin=second) == "", second


def test_who_caught_up_is_not_behind_any_more() -> None:
    way = Way(takes_ms=1600)
    assert way.go(100)
    for number in range(way.num_came, way.num_heard):
        way.downlink.came(fake_digest("entry", number), MonoMs(101_000), lost=number % 2 == 0)
    assert way.downlink.text(INT4) == ""


def test_a_fragment_that_came_whole_stands_for_its_updates() -> None:
    way = Way(takes_ms=10_000_000)
    way.go(60)
    for second in range(60, 180):
        way.hear(second * 1000)
        before = Version(way.commit.version - 1)
        way.downlink.replaced(way.commit.fragment, before, SIZE // 2, MonoMs(second * 1000))
    assert "carries 0.41 Mbit/s, updates need 0.81 Mbit/s" in way.downlink.text(INT4)
    way.downlink.replaced(way.commit.fragment, way.commit.version, SIZE, MonoMs(180_000))
    assert way.downlink._waiting == {} and way.downlink.text(INT4) == ""


def test_only_commits_count_each_once_and_memory_is_bounded() -> None:
    way = Way(takes_ms=1)
    opened = ChainBuilder.opened().events[-1].entry
    way.downlink.heard(opened, fake_digest("open"), MonoMs(0))
    assert way.downlink._waiting == {}
    for _ in range(3):
        way.downlink.heard(way.commit, fake_digest("entry", 0), MonoMs(0))
    assert way.downlink._heard == SIZE
    for number in range(2 * WAITING_MAX):
        way.downlink.heard(way.commit, fake_digest("entry", number), MonoMs(number))
    assert len(way.downlink._waiting) == WAITING_MAX
