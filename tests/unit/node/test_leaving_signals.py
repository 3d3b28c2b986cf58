"""What SIGINT and SIGTERM do in a process that takes part in a run, at every moment of its life."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from geo_diloco import __main__ as way_in
from geo_diloco.node import signals as module
from geo_diloco.node.signals import StopSignals


@pytest.fixture(autouse=True)
def _handlers_given_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def told() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_is_told_and_ends_nothing_by_itself() -> None:
    names: list[str] = []
    with StopSignals(names.append) as signals:
        signals.check()
        told()
        assert names == ["SIGTERM"]
        with pytest.raises(SystemExit) as left:
            signals.check()
    assert left.value.code == 0


def test_where_nothing_has_begun_the_first_signal_ends_it() -> None:
    with StopSignals() as signals:
        with pytest.raises(SystemExit) as left, signals.raising():
            told()
        assert left.value.code == 0
        assert not signals.raises
        with pytest.raises(SystemExit), signals.raising():
            raise AssertionError("was told already")


def test_a_signal_that_comes_twice_is_one_and_a_later_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignals() as signals:
        told()
        told()
        assert signals.told.is_set()
        monkeypatch.setattr(module, "AGAIN_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            told()


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("command", sorted(way_in.TAKES_PART))
def test_before_the_imports_are_done_who_would_take_part_leaves_with_status_0(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(way_in, "atexit", SimpleNamespace(register=lambda function: None))
    way_in.begin_to_listen(command)
    told()
    os.kill(os.getpid(), signal.SIGINT)
    assert left == [0, 0]


def test_a_command_that_was_asked_for_something_says_that_it_did_not_do_it() -> None:
    # Where the tests run in the background of a shell, SIGINT is ignored from birth.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    way_in.begin_to_listen("export")
    with pytest.raises(SystemExit) as left:
        told()
    assert left.value.code == 128 + signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
