"""When a group of chips stands still under a fault plan: the rules, one by one, and that they lose what they should."""

from __future__ import annotations

from typing import Any

import pytest

from geo_diloco.config import Fault, FaultPlan
from geo_diloco.sim.outages import Group


def part(number: int, from_s: float, until_s: float | None, *, learner: int = 1) -> Fault:
    return Fault(learner=learner, kind="slice", slice=number, from_s=from_s, until_s=until_s)


def away(learner: int, from_s: float, until_s: float | None) -> Fault:
    return Fault(learner=learner, kind="crash", from_s=from_s, until_s=until_s)


def plan(*faults: Fault, **changes: Any) -> FaultPlan:
    """Of learners with ten slices each; a second to go on without one, two to take it back."""
    return FaultPlan(faults=faults, **({"slices": 10, "downscale_s": 1.0, "upscale_s": 2.0} | changes))


def stops(group: Group, until_ms: int = 200_000) -> list[tuple[int, int | None]]:
    return list(group.stops(until_ms))


def test_an_elastic_group_stops_to_go_on_without_a_slice_and_to_take_it_back() -> None:
    assert stops(Group(plan(part(1, 10, 20)), {0}, elastic=True)) == [(10_000, 11_000), (20_000, 22_000)]


def test_a_slice_that_is_back_before_a_stop_is_over_is_taken_in_by_it() -> None:
    assert stops(Group(plan(part(1, 10, 10.5)), {0}, elastic=True)) == [(10_000, 11_000)]
    two = plan(part(1, 10, 20), part(2, 12, 21.5))
    assert stops(Group(two, {0}, elastic=True)) == [(10_000, 11_000), (12_000, 13_000), (20_000, 22_000)]


def test_chips_that_stand_still_do_not_fail() -> None:
    falls_into_a_stop = plan(part(1, 10, 20), part(2, 10.5, 30))
    assert stops(Group(falls_into_a_stop, {0}, elastic=True)) == [(10_000, 11_000), (20_000, 22_000)]
    assert stops(Group(falls_into_a_stop, {0}, elastic=False)) == [(10_000, 22_000)]
    fails_again_while_away = plan(part(1, 10, 20), part(1, 15, 30))
    assert stops(Group(fails_again_while_away, {0}, elastic=True)) == [(10_000, 11_000), (20_000, 22_000)]


def test_a_group_that_is_not_elastic_waits_for_the_slice_and_starts_again() -> None:
    assert stops(Group(plan(part(1, 10, 20), part(2, 40, 41)), {0}, elastic=False)) == [
        (10_000, 22_000),
        (40_000, 43_000),
    ]


def test_only_failures_of_its_own_learners_matter() -> None:
    two = plan(part(1, 10, 20), part(1, 40, 41, learner=2))
    assert stops(Group(two, {1}, elastic=False)) == [(40_000, 43_000)]
    assert len(stops(Group(two, {0, 1}, elastic=False))) == 2


def test_a_learner_that_is_away_leaves_the_group_and_comes_back() -> None:
    group = Group(plan(away(2, 10, 20)), {0, 1}, elastic=True)
    assert group.run(0, 10_500) == 11_500, "half a second after a stop of one"
    assert group.here == {0}
    assert group.run(11_500, 10_000) == 23_500
    assert group.here == {0, 1}


def test_a_learner_that_is_away_does_not_fail_besides_and_stays_away_for_the_longest() -> None:
    assert stops(Group(plan(away(2, 10, 40), part(1, 20, 30, learner=2)), {0, 1}, elastic=True)) == [
        (10_000, 11_000),
        (40_000, 42_000),
    ]
    for_good = Group(plan(away(2, 10, None), away(2, 15, 20)), {0, 1}, elastic=True)
    for_good.follow(50_000)
    assert for_good.here == {0}
    longest = Group(plan(away(2, 10, 30), away(2, 15, 20)), {0, 1}, elastic=True)
    longest.follow(25_000)
    assert longest.here == {0}
    longest.follow(30_000)
    assert longest.here == {0, 1}


def test_what_befalls_a_learner_befalls_it_in_a_stop_too() -> None:
    group = Group(plan(part(1, 10, 30), away(2, 10.5, 25)), {0, 1}, elastic=True)
    assert stops(group) == [(10_000, 11_500), (25_000, 27_000), (30_000, 32_000)]
    rigid = Group(plan(part(1, 10, 12), away(2, 10.5, 25)), {0, 1}, elastic=False)
    assert stops(rigid) == [(10_000, 27_000)]


def test_learners_that_crash_by_themselves_are_no_matter_of_the_group() -> None:
    both = plan(part(1, 10, 20), away(1, 12, 18))
    assert stops(Group(both, {0}, elastic=True, with_learners=False)) == [(10_000, 11_000), (20_000, 22_000)]


def test_an_elastic_group_that_nobody_is_left_of_waits_for_the_first() -> None:
    nobody = plan(away(1, 10, 20), away(2, 15, 40))
    assert stops(Group(nobody, {0, 1}, elastic=True)) == [(10_000, 11_000), (15_000, 22_000), (40_000, 42_000)]
    all_slices = plan(part(1, 10, 30), part(2, 12, 20), slices=2)
    assert stops(Group(all_slices, {0}, elastic=True)) == [(10_000, 11_000), (12_000, 22_000), (30_000, 32_000)]


@pytest.mark.parametrize("elastic", [True, False])
def test_who_is_away_for_good_ends_what_waits_for_it(elastic: bool) -> None:
    for repeat_s in (None, 50.0):
        alone = plan(away(1, 10, None), away(1, 11, 12), repeat_s=repeat_s)
        assert Group(alone, {0}, elastic=elastic).run(0, 60_000) is None
        assert stops(Group(alone, {0}, elastic=elastic)) == [(10_000, None)]
    two = Group(plan(away(1, 10, None)), {0, 1}, elastic=elastic)
    assert two.run(0, 60_000) == (61_000 if elastic else None)


def test_work_goes_on_where_a_stop_interrupted_it() -> None:
    group = Group(plan(part(1, 10, 20)), {0}, elastic=True)
    assert group.run(0, 4_000) == 4_000
    assert group.run(4_000, 8_000) == 13_000
    assert group.run(19_000, 2_000) == 23_000
    assert group.run(23_000, 100_000) == 123_000
    assert Group(plan(part(1, 10, 20)), {0}, elastic=True).run(0, 10_000) == 10_000, "done as it fails"


def test_a_plan_that_is_repeated_begins_anew() -> None:
    again = plan(part(1, 10, 30), repeat_s=100.0)
    first = [(10_000, 11_000), (30_000, 32_000)]
    assert stops(Group(again, {0}, elastic=True), 140_000) == [*first, *((a + 100_000, b + 100_000) for a, b in first)]


def test_a_plan_that_never_concerns_a_group_costs_it_nothing() -> None:
    """However often it is repeated: looking for a stop that never comes must end."""
    again = plan(part(1, 1, 3), repeat_s=10.0)
    assert stops(Group(again, {1}, elastic=True)) == []
    assert Group(again, {1}, elastic=False).run(0, 100_000) == 100_000
    assert stops(Group(plan(part(1, 1, 3), repeat_s=10.0, downscale_s=0.0, upscale_s=0.0), {0}, elastic=True)) == []


def test_a_learner_that_joins_costs_an_upscale_and_fails_from_then_on() -> None:
    group = Group(plan(part(1, 10, 20, learner=2), part(2, 40, 50, learner=2)), {0}, elastic=True)
    assert group.run(0, 30_000) == 30_000, "it has not joined"
    group.join(1, 30_000)
    assert group.run(30_000, 5_000) == 37_000
    assert group.here == {0, 1}
    assert group.run(37_000, 5_000) == 43_000
