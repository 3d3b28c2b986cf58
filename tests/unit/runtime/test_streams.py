"""How many streams a link gets, on links that are formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.runtime.streams import STREAMS_MAX, Climb, window_s

MUCH = 1 << 60
Link = Callable[[int], float]
"""Bytes per second by the number of streams."""


def climbed(link: Link, windows: int, *, first: int = 8, left: int = MUCH) -> list[int]:
    climb, used = Climb(first), []
    for _ in range(windows):
        used.append(climb.streams)
        climb = climb.judged(int(link(climb.streams)), 1.0, left=left)
    return used


def most_used(used: list[int]) -> int:
    return max(set(used), key=used.count)


def test_on_a_lossy_link_every_stream_helps_and_all_are_used() -> None:
    used = climbed(lambda n: 3e6 * n, 40)
    assert used.index(STREAMS_MAX) <= 4
    assert most_used(used) == STREAMS_MAX


def test_on_a_clean_link_one_is_as_good_and_it_ends_there() -> None:
    used = climbed(lambda n: 1.25e6, 200)
    assert most_used(used[100:]) == 1
    assert used[100:].count(1) > 80, "and it is tried less and less often whether more would help"


def test_on_a_link_that_four_streams_fill_it_settles_there() -> None:
    used = climbed(lambda n: 3e6 * min(n, 4), 300)
    assert most_used(used[100:]) == 4


def test_a_link_that_becomes_lossy_is_climbed_again() -> None:
    climb = Climb(1)
    for _ in range(60):
        climb = climb.judged(10_000_000, 1.0, left=MUCH)
    for _ in range(12):
        climb = climb.judged(300_000 * climb.streams, 1.0, left=MUCH)
    assert climb.streams == STREAMS_MAX


def test_with_little_left_nothing_is_tried() -> None:
    assert set(climbed(lambda n: 3e6 * n, 20, left=5_000_000)) == {8}


def test_the_window_in_which_streams_get_going_does_not_count() -> None:
    climb = Climb(4).judged(0, 1.0, left=MUCH)
    assert climb.streams == 4 and climb.settled == 0


def test_every_decision_says_why() -> None:
    climb = Climb(4)
    for _ in range(30):
        climb = climb.judged(1_000_000, 1.0, left=MUCH)
        assert climb.reason


@pytest.mark.parametrize(("round_trip_s", "wanted"), [(0.0, 1.0), (0.1, 1.0), (0.3, 1.5)])
def test_a_window_lasts_some_round_trips(round_trip_s: float, wanted: float) -> None:
    assert window_s(round_trip_s) == pytest.approx(wanted)


@given(
    st.integers(1, STREAMS_MAX),
    st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0.0, 100.0), st.integers(0, 1 << 50)), max_size=60),
)
def test_whatever_is_measured_the_number_stays_in_bounds(first: int, windows: list[tuple[int, float, int]]) -> None:
    climb = Climb(first)
    for moved, elapsed_s, left in windows:
        climb = climb.judged(moved, elapsed_s, left=left)
        assert 1 <= climb.streams <= STREAMS_MAX
        assert 0 <= climb.settled <= STREAMS_MAX
