"""Every row of the failure table is a scenario, and comes to what the table says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.sim.run import Violation
from geo_diloco.sim.scenarios import Scenario, play, scenarios

ALL = scenarios()
PLAYED = [scenario for scenario in ALL.values() if scenario.plan is not None]
SLOW = {"syncer-killed", "syncer-paused", "partition-without-majority", "a-thousand-learners"}


@pytest.mark.parametrize(
    "scenario", [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name in SLOW)) for each in PLAYED]
)
def test_a_scenario_comes_to_what_is_expected(scenario: Scenario) -> None:
    play(scenario, seed=0)


def test_what_is_no_business_of_the_core_names_a_test_that_is_there() -> None:
    tests = [scenario.test for scenario in ALL.values() if scenario.plan is None]
    assert tests and all((Path(__file__).parents[2] / test).is_file() for test in tests)


def test_an_expectation_that_is_not_met_is_a_violation_that_says_which() -> None:
    killed = ALL["learner-killed"]
    assert killed.expected is not None
    eager = replace(killed, expected=replace(killed.expected, commits=10_000))
    with pytest.raises(Violation, match=r"learner-killed: \d+ commits, expected 10000 or more"):
        play(eager, seed=0)
