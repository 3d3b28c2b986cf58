"""When baselines train and with whom, under faults and with learners that come later."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from geo_diloco.config import Fault, FaultPlan
from geo_diloco.errors import ConfigError
from geo_diloco.manifest import RunManifest, StopSpec
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.sim.train.timetable import Timetable, Turn

from .runs import TOKENS_PER_STEP, fleet, small_manifest

AWAY = Fault(learner=2, kind="crash", from_s=1.0, until_s=3.0)
PLAN = FaultPlan(faults=(AWAY,), downscale_s=0.5, upscale_s=0.25)


def tokens(steps: int) -> RunManifest:
    return small_manifest(tokens=steps * TOKENS_PER_STEP, interval_steps=4)


def seconds(number: float) -> RunManifest:
    return replace(tokens(1), stop=StopSpec(minutes=number / 60))


def in_step(manifest: RunManifest, machines: Fleet, *, elastic: bool) -> list[Turn]:
    return list(Timetable(manifest, machines, num_elements=0).in_step(elastic=elastic))


def test_data_parallel_stands_still_while_a_learner_is_away() -> None:
    turns = in_step(tokens(60), fleet(100, 90, delay_ms=0, plan=PLAN), elastic=False)
    assert {turn.learners for turn in turns} == {(0, 1)}
    assert len(turns) == 30
    assert [b.ended_at - a.ended_at for a, b in pairwise(turns) if b.ended_at - a.ended_at != 100] == [2350]
    assert turns[-1].ended_at == 30 * 100 + 2250


def test_an_elastic_group_goes_on_with_the_others_and_their_speed() -> None:
    turns = in_step(tokens(60), fleet(50, 100, delay_ms=0, plan=PLAN), elastic=True)
    alone = [turn for turn in turns if turn.learners == (0,)]
    assert alone[0].ended_at == 1550, "half a second of a stop after the tenth step"
    assert alone[-1].ended_at == 3000 and len(alone) == 30
    assert turns[-1].learners == (0, 1) and turns[-1].ended_at == 3000 + 250 + 5 * 100
    assert sum(len(turn.learners) for turn in turns) == 60


def test_who_is_away_at_either_end_of_a_step_has_no_part_in_it() -> None:
    plan = replace(PLAN, faults=(AWAY.model_copy(update={"from_s": 0.95, "until_s": 3.05}),))
    turns = in_step(tokens(60), fleet(100, 100, delay_ms=0, plan=plan), elastic=True)
    alone = [turn.ended_at for turn in turns if turn.learners == (0,)]
    assert (alone[0], alone[-1]) == (1500, 3350), "it went or came while the step was under way"


def test_diloco_waits_with_its_exchange() -> None:
    turns = list(Timetable(tokens(48), fleet(100, 90, delay_ms=0, plan=PLAN), num_elements=0).in_rounds())
    assert [turn.steps for turn in turns] == [4] * 6
    ends = [turn.ended_at for turn in turns]
    assert ends[:2] == [400, 800]
    assert ends[2] == 3000 + 250 + 160, "200 ms of its four steps of 90 were done"
    assert ends[3] - ends[2] == 400


def test_seconds_are_a_budget_and_nothing_ends_after_them() -> None:
    assert in_step(seconds(1.05), fleet(100, delay_ms=10), elastic=False)[-1] == Turn((0,), 1, 960)
    turns = list(Timetable(seconds(1.05), fleet(100, 80, delay_ms=0), num_elements=0).in_rounds())
    assert [(turn.steps, turn.ended_at) for turn in turns] == [(4, 400), (4, 800), (2, 1000)]
    gone = replace(PLAN, faults=(AWAY.model_copy(update={"until_s": None}),))
    for elastic, last in ((False, 1000), (True, 4000)):
        assert in_step(seconds(4), fleet(100, 100, delay_ms=0, plan=gone), elastic=elastic)[-1].ended_at == last
    assert list(Timetable(seconds(0.05), fleet(100), num_elements=0).in_rounds()) == []


def test_who_waits_for_somebody_that_never_comes_back_is_told() -> None:
    gone = replace(PLAN, faults=(AWAY.model_copy(update={"until_s": None}),))
    machines = fleet(100, 100, plan=gone)
    with pytest.raises(ConfigError, match="nobody trains any more, 1152 of 6400 tokens are trained"):
        in_step(tokens(100), machines, elastic=False)
    with pytest.raises(ConfigError, match="nobody trains any more"):
        list(Timetable(tokens(100), machines, num_elements=0).in_rounds())
    assert len(in_step(tokens(100), machines, elastic=True)) > 60


def test_learners_come_later() -> None:
    late = fleet(100, 100, 100, delay_ms=0, plan=replace(PLAN, faults=()), joins=(8 * TOKENS_PER_STEP,))
    turns = in_step(tokens(26), late, elastic=True)
    assert [turn.learners for turn in turns] == [(0, 1)] * 4 + [(0, 1, 2)] * 6
    assert turns[4].ended_at - turns[3].ended_at == 250 + 100, "it is taken in like one that is back"
    rounds = list(Timetable(tokens(44), late, num_elements=0).in_rounds())
    assert [(turn.learners, turn.steps) for turn in rounds] == [
        ((0, 1), 4),
        ((0, 1, 2), 4),
        ((0, 1, 2), 4),
        ((0, 1, 2), 4),
    ]
