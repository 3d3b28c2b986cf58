"""What is remembered of addresses, and who is asked first."""

from __future__ import annotations

import random
from collections import Counter

from geo_diloco.runtime.routes import IN_VAIN_MAX, MEASURED_BYTES_MIN, REST_S, REST_S_MAX, ROUTES_MAX, Routes
from geo_diloco.runtime.streams import STREAMS_MAX


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def routes(clock: Clock | None = None) -> Routes:
    return Routes(clock=clock or Clock(), rng=random.Random(1))


def test_a_transfer_leaves_its_rate_and_streams_to_the_next() -> None:
    it = routes()
    it.worked("a", MEASURED_BYTES_MIN, 0.5, streams=3)
    assert (it.to("a").bytes_per_s, it.to("a").streams) == (2 * MEASURED_BYTES_MIN, 3)
    it.worked("a", MEASURED_BYTES_MIN - 1, 1e-9, streams=9)
    assert it.to("a").streams == 3, "so little says nothing about the rate"


def test_who_fails_rests_longer_each_time_and_is_forgiven_when_it_works() -> None:
    clock = Clock()
    it = routes(clock)
    it.failed("a")
    assert it.is_resting("a") and not it.is_resting("b")
    clock.now += REST_S
    assert not it.is_resting("a")
    for _ in range(20):
        it.failed("a")
    clock.now += REST_S_MAX - 1
    assert it.is_resting("a")
    it.worked("a", 1, 1.0, streams=1)
    assert not it.is_resting("a")


def test_the_fast_are_asked_more_and_nobody_is_left_out() -> None:
    it = routes()
    it.worked("fast", 10 << 20, 1.0, streams=4)
    it.worked("slow", 1 << 20, 1.0, streams=4)
    first = Counter(it.ordered(["slow", "fast", "new"])[0] for _ in range(2000))
    assert first["fast"] > 3 * first["slow"] and min(first.values()) > 20


def test_who_rests_is_asked_last() -> None:
    it = routes()
    it.failed("b")
    assert all(it.ordered(["a", "b", "c"])[-1] == "b" for _ in range(50))


def test_it_is_waited_in_vain_only_so_often_until_it_brings_something() -> None:
    it = routes()
    it.to("a").waited_in_vain = IN_VAIN_MAX
    assert not it.to("a").is_worth_waiting_for
    it.worked("a", 0, 1.0, streams=1)
    assert not it.to("a").is_worth_waiting_for
    it.worked("a", 10, 1.0, streams=1)
    assert it.to("a").is_worth_waiting_for


def test_transfers_to_one_address_share_the_streams() -> None:
    route = routes().to("a")
    assert route.streams_max() == STREAMS_MAX
    route.transfers = 4
    assert route.streams_max() == STREAMS_MAX // 4
    route.transfers = 100
    assert route.streams_max() == 1


def test_no_more_is_remembered_than_fits() -> None:
    it = routes()
    for number in range(ROUTES_MAX + 10):
        it.to(str(number))
    assert len(it._routes) == ROUTES_MAX
