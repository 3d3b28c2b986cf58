"""What the views print, without a terminal."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from geo_diloco.cli.demo_status import RunStatus, read_status
from geo_diloco.cli.demo_view import LiveView, Moment, PlainView, count, frame, plain_line, size, sparkline

from .status_example import STATUS


def status(**changes: Any) -> RunStatus:
    return read_status(json.dumps(STATUS | changes).encode())


def moment(found: RunStatus | None, *, phase: str = "training", failure: str = "") -> Moment:
    return Moment(phase=phase, elapsed_s=33.4, minutes=2.0, num_learners=4, status=found, failure=failure)


def drawn(found: RunStatus | None, *, width: int = 120, failure: str = "") -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(frame(moment(found, failure=failure)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_live_view_shows_each_learner_and_the_run() -> None:
    text = drawn(status())
    for fact in ("bbbbbbbb", "cccccccc", "120", "15k", "3.500", "training", "away"):
        assert fact in text, fact
    for fact in ("seq 42", "term 1", "commits 39", "3.250", "1.23M", "2.4 MB", "9.6 MB", "0.46", "25%"):
        assert fact in text, fact
    for fact in ("210 ms", "90 ms", "3 of 4", "all expected are here", "fragment 3: not due for 4 steps"):
        assert fact in text, fact


def test_the_live_view_fits_a_narrow_terminal() -> None:
    assert max(len(line) for line in drawn(status(), width=80).splitlines()) <= 80


def test_many_learners_leave_room_for_the_run() -> None:
    text = drawn(status(learners=[{"peer": f"{number:064x}"[::-1], "connected": True} for number in range(40)]))
    assert "and 28 more" in text
    assert len(text.splitlines()) < 40


def test_before_any_status_the_view_says_what_it_waits_for() -> None:
    assert "training" in drawn(None)
    assert "connection refused" in drawn(None, failure="connection refused")


def test_text_from_peers_is_not_markup() -> None:
    text = drawn(status(waiting=[{"fragment": 0, "reason": "[bold]loud[/bold] [/]"}]))
    assert "[bold]loud[/bold] [/]" in text


def test_the_plain_line_is_one_line_with_the_run_in_it() -> None:
    line = plain_line(moment(status()))
    assert "\n" not in line
    for fact in ("33 s", "training", "learners 1/4", "seq 42", "held-out 3.250", "up 2.4 MB", "down 9.6 MB", "3/4"):
        assert fact in line, fact


def test_the_plain_line_without_a_status_says_why() -> None:
    assert "refused" in plain_line(moment(None, failure="refused"))
    assert "status" not in plain_line(moment(None))


def test_the_plain_view_prints_every_few_seconds_and_at_every_new_phase() -> None:
    now = [100.0]
    console = Console(file=io.StringIO(), width=40)
    with PlainView(console, interval_s=5.0, clock=lambda: now[0]) as view:
        for at, phase in ((100.0, "a"), (104.9, "a"), (105.0, "a"), (106.0, "b"), (107.0, "b"), (111.0, "b")):
            now[0] = at
            view.show(moment(None, phase=phase))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[-1] for line in lines] == ["a", "a", "b", "b"]


def test_the_plain_view_never_breaks_a_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    PlainView(console).show(moment(status()))
    assert len(console.file.getvalue().splitlines()) == 1  # type: ignore[attr-defined]


def test_the_live_view_draws_and_lets_lines_through() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveView(console) as view:
        view.show(moment(status()))
        view.say("chaos [here]")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "seq 42" in text and "chaos [here]" in text


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([5.6, 3.0, 1.0], "█▄▁"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█")],
)
def test_a_sparkline_spans_lowest_to_highest(values: list[float], wanted: str) -> None:
    assert sparkline(values) == wanted


def test_a_sparkline_keeps_the_newest_and_can_be_ascii() -> None:
    assert sparkline([9.0] * 50 + [1.0, 2.0], width=2) == "▁█"
    assert sparkline([1.0, 2.0], ascii_only=True).isascii()


@pytest.mark.parametrize(
    ("number", "wanted"),
    [(0, "0"), (999, "999"), (1000, "1k"), (15_000.5, "15k"), (1_234_567, "1.23M"), (2.5e9, "2.5G"), (3e13, "30000G")],
)
def test_counts_are_short(number: float, wanted: str) -> None:
    assert count(number) == wanted


@pytest.mark.parametrize(("number", "wanted"), [(0, "0 B"), (999, "999 B"), (2_400_000, "2.4 MB"), (1e9, "1.0 GB")])
def test_sizes_have_units(number: float, wanted: str) -> None:
    assert size(number) == wanted
