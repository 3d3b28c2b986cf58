"""The syncer's small parts: when to measure, when the run is over."""

from __future__ import annotations

import pytest

from geo_diloco.manifest import EvalSpec, MonoMs, RunRules, StopSpec
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.measuring import PATIENCE_MS, Measuring
from geo_diloco.protocol.winding import StopRule
from tests.support.chains import ANN, ChainBuilder, participant


def at(ms: int) -> MonoMs:
    return MonoMs(ms)


# ---- measuring


def begun(every_seconds: float = 10.0) -> Measuring:
    measuring = Measuring(EvalSpec(every_seconds=every_seconds))
    measuring.begin(at(0))
    return measuring


def test_theta_is_measured_at_the_beginning_and_then_every_so_often_if_it_changed() -> None:
    measuring = begun()
    assert measuring.due(0, at(0), last=False)
    assert not measuring.due(5, at(50), last=False), "one at a time"
    measuring.done()
    assert not measuring.due(5, at(9_999), last=False)
    assert not measuring.due(0, at(10_000), last=False), "Theta has not changed"
    assert measuring.due(5, at(10_000), last=False)


def test_the_end_is_measured_at_once_and_once() -> None:
    measuring = begun(every_seconds=0)
    assert measuring.due(0, at(0), last=False)
    measuring.done()
    assert not measuring.due(7, at(10**9), last=False)
    assert measuring.due(7, at(10**9), last=True)
    assert not measuring.up_to_date(7)
    measuring.done()
    assert measuring.up_to_date(7) and not measuring.due(7, at(10**9), last=True)


def test_a_measurement_without_an_answer_is_given_up() -> None:
    measuring = begun()
    assert measuring.due(0, at(0), last=True) and measuring.deadline == PATIENCE_MS
    assert not measuring.due(0, at(PATIENCE_MS), last=True)
    assert measuring.up_to_date(0)


# ---- winding up


def rule(**limits: float) -> StopRule:
    return StopRule(RunRules(stop=StopSpec(**limits)))  # type: ignore[arg-type]


def ledger_with(num_commits: int, tokens: int = 100) -> Ledger:
    chain = ChainBuilder.opened(num_elements=(100,))
    for index in range(num_commits):
        chain.commit(0, participant(ANN, chain.bases[0], index, 8 * index, 8 * index + 8, tokens=tokens))
    return chain.ledger()


def test_a_run_without_limits_never_stops() -> None:
    stop = rule()
    stop.begin(ledger_with(0), at(0))
    stop.look(ledger_with(9), at(10**12))
    assert stop.reason is None and stop.deadline is None
    assert stop.progress(10**9, 10**9, at(10**12)) == 0.0


def test_the_first_limit_reached_stops_and_its_reason_stays() -> None:
    stop = rule(tokens=300, commits=50, minutes=1.0)
    stop.begin(ledger_with(0), at(0))
    stop.look(ledger_with(2), at(59_999))
    assert stop.reason is None
    stop.look(ledger_with(3), at(59_999))
    assert stop.reason == "token budget of 300 reached"
    stop.look(ledger_with(3), at(60_000))
    assert stop.reason == "token budget of 300 reached" and stop.deadline is None


def test_commits_and_minutes_are_limits_too() -> None:
    stop = rule(commits=2)
    stop.begin(ledger_with(0), at(0))
    stop.look(ledger_with(2), at(0))
    assert stop.reason == "2 commits made"
    stop = rule(minutes=0.5)
    stop.begin(ledger_with(0), at(1_000))
    assert stop.deadline == 31_000
    stop.look(ledger_with(0), at(31_000))
    assert stop.reason == "0.5 minutes are over"


def test_minutes_begin_once_and_not_before_somebody_trains() -> None:
    stop = rule(minutes=0.5)
    stop.look(ledger_with(0), at(10**9))
    assert stop.deadline is None and stop.reason is None and stop.progress(0, 0, at(10**9)) == 0.0
    stop.begin(ledger_with(0), at(1_000))
    stop.begin(ledger_with(0), at(9_000))
    assert stop.deadline == 31_000


def test_minutes_served_in_earlier_terms_count() -> None:
    chain = ChainBuilder.opened(num_elements=(100,))
    for _ in range(48):
        chain.commit(0)
    ledger = chain.ledger()
    assert ledger.progress == pytest.approx(0.49)
    stop = rule(minutes=1.0)
    stop.begin(ledger, at(5_000))
    assert stop.deadline == pytest.approx(5_000 + 0.51 * 60_000, abs=1)


def test_progress_is_the_largest_share_of_any_limit_and_never_above_one() -> None:
    stop = rule(tokens=1_000, commits=10, minutes=1.0)
    stop.begin(ledger_with(0), at(0))
    assert stop.progress(100, 5, at(15_000)) == 0.5
    assert stop.progress(100, 1, at(45_000)) == 0.75
    assert stop.progress(9_999, 1, at(0)) == 1.0
