"""May a round close now? Every branch and every reason."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import MonoMs, SyncSpec
from geo_diloco.protocol.quorum import RoundFacts, decide, window_ms

FACTS = RoundFacts(
    now=MonoMs(1_000),
    opened_at=MonoMs(0),
    quorum_at=MonoMs(900),
    fresh=1,
    late=0,
    live=3,
    missing=2,
    given_up=0,
    expected_missing=2,
    slack_ms=None,
    cap_ms=400,
    due_again_at=MonoMs(5_000),
    was_due=False,
)
SYNC = SyncSpec(quorum=1)


def test_below_the_quorum_a_round_waits_and_says_for_how_many() -> None:
    facts = replace(FACTS, fresh=1, quorum_at=None)
    decision = decide(facts, replace(SYNC, quorum=2))
    assert (decision.close, decision.reason, decision.until) == (False, "quorum: 1 of 2 fresh, 3 live", None)


def test_late_work_never_makes_the_quorum_while_a_live_learner_could_deliver() -> None:
    facts = replace(FACTS, fresh=0, late=2, quorum_at=None, now=MonoMs(10**9))
    assert not decide(facts, SYNC).close


def test_only_late_work_left_closes_after_a_share_of_the_time_until_due_again() -> None:
    facts = replace(FACTS, fresh=0, late=1, missing=0, quorum_at=None)
    waiting = decide(facts, SYNC)
    assert (waiting.close, waiting.until) == (False, 2_500)
    assert waiting.reason == "only late work so far: 1 contributions"
    closed = decide(replace(facts, now=MonoMs(2_500)), SYNC)
    assert (closed.close, closed.reason) == (True, "only late work: 1 contributions")


def test_only_late_work_does_not_wait_for_who_never_delivers() -> None:
    facts = replace(FACTS, fresh=0, late=1, missing=2, given_up=1, quorum_at=None, now=MonoMs(2_500))
    assert not decide(facts, SYNC).close, "the other one still may"
    closed = decide(replace(facts, missing=1), SYNC)
    assert (closed.close, closed.reason) == (True, "only late work: 1 contributions, 1 never deliver")


def test_fresh_and_late_work_close_together_when_nobody_else_can_deliver() -> None:
    """One learner's late work keeps it from sampling anew, so a quorum of two fresh ones could never come."""
    facts = replace(FACTS, fresh=1, late=1, missing=0, quorum_at=None, now=MonoMs(2_500))
    assert decide(facts, replace(SYNC, quorum=2)).close


def test_too_little_late_work_waits_for_more_learners() -> None:
    facts = replace(FACTS, fresh=0, late=1, missing=0, quorum_at=None, now=MonoMs(10**9))
    assert not decide(facts, replace(SYNC, quorum=2)).close


def test_only_late_work_waits_while_nobody_knows_when_the_fragment_is_due_again() -> None:
    facts = replace(FACTS, fresh=0, late=1, missing=0, quorum_at=None, due_again_at=None, now=MonoMs(10**9))
    assert not decide(facts, SYNC).close


def test_only_late_work_of_absent_learners_waits() -> None:
    facts = replace(FACTS, fresh=0, late=1, missing=0, live=0, quorum_at=None, now=MonoMs(10**9))
    assert not decide(facts, SYNC).close


def test_nobody_left_to_wait_for_closes_at_once() -> None:
    decision = decide(replace(FACTS, missing=0, late=1), SYNC)
    assert (decision.close, decision.reason) == (True, "all 2 who could deliver have")


def test_without_grace_the_quorum_closes() -> None:
    assert decide(FACTS, replace(SYNC, grace=False)).reason == "quorum of 1, no grace"
    assert decide(FACTS, replace(SYNC, lockstep=True)).close


def test_without_estimates_grace_is_one_inner_step_of_the_slowest_fresh_learner() -> None:
    decision = decide(FACTS, SYNC)
    assert (decision.close, decision.until, decision.reason) == (False, 1_300, "grace 400 ms, no estimates yet")
    assert decide(replace(FACTS, now=MonoMs(1_300)), SYNC).close


def test_grace_is_a_share_of_the_slack_capped_by_one_inner_step() -> None:
    assert decide(replace(FACTS, slack_ms=300), SYNC).until == 900 + 150
    assert decide(replace(FACTS, slack_ms=10_000), SYNC).until == 900 + 400
    assert decide(replace(FACTS, slack_ms=300), replace(SYNC, grace_gamma=1.0)).until == 900 + 300


def test_on_slow_links_the_window_ends_when_everyone_expected_has_delivered() -> None:
    facts = replace(FACTS, slack_ms=-50)
    waiting = decide(facts, SYNC)
    assert (waiting.close, waiting.until) == (False, 900 + (5_000 - 900) // 2)
    assert waiting.reason == "2 expected are on their way"
    assert decide(replace(facts, expected_missing=0), SYNC).reason == "everyone expected has delivered"
    assert decide(replace(facts, now=MonoMs(2_950)), SYNC).reason == "window over: 2 expected are on their way"


def test_on_slow_links_without_a_due_time_nobody_is_waited_for() -> None:
    assert decide(replace(FACTS, slack_ms=0, due_again_at=None), SYNC).close


@st.composite
def some_facts(draw: st.DrawFn) -> tuple[RoundFacts, SyncSpec]:
    sync = SyncSpec(
        quorum=draw(st.integers(1, 4)),
        grace=draw(st.booleans()),
        grace_gamma=draw(st.sampled_from((0.0, 0.5, 1.0))),
        lockstep=draw(st.booleans()),
    )
    fresh, late, missing = (draw(st.integers(0, 5)) for _ in range(3))
    opened_at = draw(st.integers(0, 1_000))
    quorum_at = opened_at + draw(st.integers(0, 1_000)) if fresh >= sync.quorum else None
    facts = RoundFacts(
        now=MonoMs((quorum_at or opened_at) + draw(st.integers(0, 5_000))),
        opened_at=MonoMs(opened_at),
        quorum_at=None if quorum_at is None else MonoMs(quorum_at),
        fresh=fresh,
        late=late,
        live=draw(st.integers(missing, 12)),
        missing=missing,
        given_up=draw(st.integers(0, missing)),
        expected_missing=draw(st.integers(0, missing)),
        slack_ms=draw(st.none() | st.integers(-1_000, 1_000)),
        cap_ms=draw(st.integers(0, 2_000)),
        due_again_at=draw(st.none() | st.integers(0, 9_000).map(MonoMs)),
        was_due=draw(st.booleans()),
    )
    return facts, sync


@given(some_facts())
def test_a_round_never_closes_below_the_quorum_except_by_the_only_late_rule(case: tuple[RoundFacts, SyncSpec]) -> None:
    facts, sync = case
    decision = decide(facts, sync)
    assert decision.reason
    if decision.close and facts.fresh < sync.quorum:
        assert decision.reason.startswith("only late work")
        assert facts.late > 0 and facts.missing == facts.given_up and facts.live > 0
        assert facts.fresh + facts.late >= sync.quorum


@given(some_facts(), st.integers(0, 20_000))
def test_time_alone_never_opens_a_decision_again(case: tuple[RoundFacts, SyncSpec], later_ms: int) -> None:
    facts, sync = case
    if decide(facts, sync).close:
        assert decide(replace(facts, now=MonoMs(facts.now + later_ms)), sync).close


@given(some_facts())
def test_a_decision_with_a_time_closes_at_that_time_and_not_before(case: tuple[RoundFacts, SyncSpec]) -> None:
    facts, sync = case
    decision = decide(facts, sync)
    if decision.until is not None:
        assert decision.until > facts.now
        assert decide(replace(facts, now=decision.until), sync).close
        assert not decide(replace(facts, now=MonoMs(decision.until - 1)), sync).close


# ---- uplinks that set the pace


def test_where_the_fragment_was_due_before_the_quorum_the_window_is_as_long_as_it_took_until_then() -> None:
    slow = replace(FACTS, slack_ms=-1, quorum_at=MonoMs(6_000), now=MonoMs(6_001), due_again_at=MonoMs(6_001))
    assert decide(slow, SYNC).close, "nothing is left of the time until it is due"
    overdue = replace(slow, was_due=True)
    assert decide(overdue, SYNC).until == 6_000 + 6_000 // 2
    assert decide(replace(overdue, expected_missing=0), SYNC).close
    assert decide(replace(overdue, now=MonoMs(9_000)), SYNC).close


def test_without_a_pace_nobody_knows_how_long_a_window_may_last() -> None:
    unpaced = replace(FACTS, slack_ms=-1, due_again_at=None)
    assert decide(unpaced, SYNC).close
    assert window_ms(MonoMs(0), None, None, SYNC, was_due=False) is None
    assert window_ms(MonoMs(1_000), None, MonoMs(5_000), SYNC, was_due=False) == 2_000
