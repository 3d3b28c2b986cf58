"""When a fragment's turn comes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import FragmentId, MonoMs, SyncSpec
from geo_diloco.protocol.schedule import (
    LIVE_MS,
    LIVE_STEPS,
    MICRO,
    PROGRESS_MS,
    Duty,
    InnerClock,
    first_due_steps,
    first_dues,
    live_for_ms,
    lockstep_duties,
    phase_steps,
    progress_due_ms,
    progress_every_ms,
)


@st.composite
def syncs(draw: st.DrawFn) -> SyncSpec:
    interval = draw(st.integers(2, 40))
    return SyncSpec(
        interval_steps=interval,
        num_fragments=draw(st.integers(1, interval)),
        overlap_steps=draw(st.integers(0, interval - 1)),
    )


def test_phases_are_spread_over_the_interval_as_in_the_paper() -> None:
    sync = SyncSpec(interval_steps=24, num_fragments=4)
    assert [phase_steps(p, sync) for p in range(4)] == [0, 6, 12, 18]
    assert [first_due_steps(p, sync) for p in range(4)] == [24, 6, 12, 18]


def test_a_fragment_at_phase_zero_waits_for_steps_to_show() -> None:
    assert lockstep_duties(0, SyncSpec(interval_steps=8, num_fragments=1)) == ()


def test_overlapping_adoptions_come_before_samples_of_the_same_boundary() -> None:
    sync = SyncSpec(interval_steps=4, num_fragments=2, overlap_steps=2)
    assert lockstep_duties(6, sync) == (Duty("adopt", FragmentId(0)), Duty("sample", FragmentId(1)))


def test_without_overlap_all_samples_come_before_any_adoption() -> None:
    sync = SyncSpec(interval_steps=2, num_fragments=4, overlap_steps=0)
    assert [duty.kind for duty in lockstep_duties(2, sync)] == ["sample", "sample", "adopt", "adopt"]


@given(syncs())
def test_each_fragment_is_sampled_once_in_every_interval_and_adopted_tau_later(sync: SyncSpec) -> None:
    horizon = 4 * sync.interval_steps
    duties = {step: lockstep_duties(step, sync) for step in range(1, horizon + sync.overlap_steps + 1)}
    for p in range(sync.num_fragments):
        sampled = [step for step, each in duties.items() if Duty("sample", FragmentId(p)) in each]
        adopted = [step for step, each in duties.items() if Duty("adopt", FragmentId(p)) in each]
        assert sampled[0] == first_due_steps(p, sync)
        assert all(b - a == sync.interval_steps for a, b in pairwise(sampled))
        expected = [step + sync.overlap_steps for step in sampled if step <= horizon]
        assert adopted[: len(expected)] == expected


def test_a_run_begins_with_phases_and_is_taken_up_with_the_fragment_whose_turn_it_is() -> None:
    sync = SyncSpec(interval_steps=24, num_fragments=4)
    assert first_dues([0, 0, 0, 0], sync) == [24, 6, 12, 18]
    assert first_dues([5, 5, 5, 5], sync) == [18, 0, 6, 12], "all merged equally often: fragment 1 is next"
    assert first_dues([5, 6, 6, 5], sync) == [6, 12, 18, 0], "fragment 3, then 0, which ends the cycle"
    assert first_dues([0, 1, 0, 0], sync) == [12, 18, 0, 6]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(1, 50))
def test_who_takes_up_a_run_begins_at_once_with_those_merged_least(versions: list[int], interval_steps: int) -> None:
    dues = first_dues(versions, SyncSpec(interval_steps=interval_steps, num_fragments=len(versions)))
    assert min(dues) == 0 and max(dues) < interval_steps
    by_version = sorted(zip(versions, dues, strict=True))
    assert all(one[1] <= other[1] for one, other in pairwise(by_version) if one[0] < other[0])


def test_the_clock_runs_at_the_pace_of_the_step_time_that_it_is_given() -> None:
    clock = InnerClock(at=MonoMs(1_000))
    clock.advance(MonoMs(1_000), 200_000)
    clock.advance(MonoMs(2_000), None)
    assert clock.micro_steps == 5 * MICRO


def test_the_clock_stands_still_without_live_learners() -> None:
    clock = InnerClock(at=MonoMs(0))
    clock.advance(MonoMs(0), 100_000)
    clock.advance(MonoMs(500), None)
    shown = clock.micro_steps
    clock.advance(MonoMs(90_000), None)
    assert (clock.micro_steps, clock.ms_until(shown + 1)) == (shown, None)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.none() | st.integers(1, 10**9)), max_size=20))
def test_the_clock_never_goes_back(moves: list[tuple[int, int | None]]) -> None:
    clock, shown = InnerClock(at=MonoMs(5_000)), 0
    for now, step_time_us in moves:
        clock.advance(MonoMs(now), step_time_us)
        assert clock.micro_steps >= shown
        shown = clock.micro_steps


@given(st.integers(1, 10**8), st.integers(0, 10**9))
def test_a_due_time_is_reached_exactly_when_the_clock_said(step_time_us: int, more: int) -> None:
    clock = InnerClock(at=MonoMs(0))
    clock.advance(MonoMs(0), step_time_us)
    wait_ms = clock.ms_until(more)
    assert wait_ms is not None
    if wait_ms > 0:
        clock.advance(MonoMs(wait_ms - 1), step_time_us)
        assert clock.micro_steps < more
    clock.advance(MonoMs(wait_ms), step_time_us)
    assert clock.micro_steps >= more


def test_a_syncer_of_many_learners_asks_to_hear_of_each_less_often() -> None:
    assert [progress_every_ms(learners=learners) for learners in (0, 200, 400, 1000)] == [1_000, 1_000, 2_000, 5_000]


@given(st.integers(-(2**53), 2**53), st.integers(0, 10_000_000))
def test_whatever_it_is_asked_for_no_learner_falls_silent_nor_says_it_all_the_time(asked_ms: int, step_us: int) -> None:
    due_ms = progress_due_ms(asked_ms, step_us)
    assert due_ms >= PROGRESS_MS and 3 * due_ms <= max(LIVE_MS, LIVE_STEPS * step_us // 1000) == live_for_ms(step_us)
