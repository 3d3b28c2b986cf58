"""A line that uploads share."""

from __future__ import annotations

from geo_diloco.sim.clock import Clockwork
from geo_diloco.sim.uplinks import SharedLine


def carried(*begins: tuple[int, int], ahead_ms: int) -> list[tuple[int, str]]:
    """`begins`: when an upload is begun, and how long the line needs for it alone. What was told, and when."""
    clock = Clockwork(0)
    line = SharedLine(clock, ahead_ms)
    told: list[tuple[int, str]] = []

    def begin(number: int, ms: int) -> None:
        line.begin(
            ms,
            sent=lambda: told.append((clock.now, f"{number} sent")),
            done=lambda: told.append((clock.now, f"{number} done")),
        )

    for number, (at, ms) in enumerate(begins):
        clock.at(at, lambda number=number, ms=ms: begin(number, ms))  # type: ignore[misc]
    clock.run(100_000)
    assert clock.is_idle
    return told


def test_one_alone_takes_its_time_and_is_sent_a_little_before() -> None:
    assert carried((50, 1000), ahead_ms=300) == [(750, "0 sent"), (1050, "0 done")]


def test_what_the_kernel_takes_whole_is_sent_at_once() -> None:
    assert carried((0, 200), ahead_ms=300) == [(0, "0 sent"), (200, "0 done")]


def test_two_share_the_line_while_both_are_under_way() -> None:
    told = carried((0, 1000), (500, 1000), ahead_ms=0)
    assert told == [(1500, "0 sent"), (1500, "0 done"), (2000, "1 sent"), (2000, "1 done")], (
        "the line never stands idle"
    )


def test_a_third_that_comes_late_waits_for_its_share_only() -> None:
    told = dict((what, at) for at, what in carried((0, 900), (0, 900), (0, 300), ahead_ms=0))
    assert told["2 done"] == 900, "a third of the line for 300 of its own"
    assert told["0 done"] == told["1 done"] == 2100
