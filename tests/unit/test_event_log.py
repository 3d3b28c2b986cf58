"""The event log: for people what is new, for programs every word."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import Note
from geo_diloco.runtime.driver import Driver


def said(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_the_same_again_is_news_once_it_is_forgotten() -> None:
    stream = io.StringIO()
    log = EventLog(stream=stream)
    for _ in range(2):
        log.note("syncer", "following ab")
    log.forget("syncer")
    log.forget("never heard of")
    log.note("syncer", "following ab")
    assert said(stream) == ["syncer: following ab"] * 2


def test_what_peers_say_of_themselves_does_not_steer_a_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    EventLog(tmp_path / "log", stream=stream).note("learners", "\x1b[2Jbox\nforged: line trains here")
    assert said(stream) == ["learners: ?[2Jbox?forged: line trains here"]
    assert json.loads((tmp_path / "log").read_text())["text"].startswith("\x1b")


def test_an_election_that_comes_to_nothing_after_the_end_is_no_news() -> None:
    stream = io.StringIO()
    core: Any = SimpleNamespace(ledger=SimpleNamespace(finished=None))
    driver = Driver.__new__(Driver)
    driver.core, driver._log = core, EventLog(stream=stream)
    driver._note(Note("election", "serves no more: no lease for 5 s"))
    core.ledger.finished = "3 minutes are over"
    driver._note(Note("election", "serves no more: no lease for 6 s"))
    driver._note(Note("chain", "ALARM", "error"))
    assert said(stream) == ["election: serves no more: no lease for 5 s", "chain: ALARM"]
