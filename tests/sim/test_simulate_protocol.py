"""The command: many seeds at once, the same for everybody, and a failure that can be seen again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from geo_diloco import __version__
from geo_diloco.cli.simulate_protocol import protocol
from geo_diloco.errors import ConfigError, SimulationError
from geo_diloco.protocol.messages import Commit
from geo_diloco.sim.checkers import CommitChecker

APP = typer.Typer()
APP.command()(protocol)
NUM_SEEDS = 6
"""CI runs 150 by the command itself (.ci/run)."""
IN_CHILD = "from tests.sim.test_simulate_protocol import APP; APP()"


def simulated(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(APP, [*arguments, "--json"], catch_exceptions=False)
    last: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return last


@pytest.mark.timeout(1200)
def test_no_seed_breaks_an_invariant() -> None:
    said = simulated("--seeds", str(NUM_SEEDS), "--seconds", "60", "--jobs", "2")
    assert (said["violations"], said["seeds"]) == (0, NUM_SEEDS)
    assert said["elections"] > 2 * NUM_SEEDS and said["commits"] > 30 * NUM_SEEDS


def test_a_run_is_a_function_of_its_seed_whatever_the_hash_seed() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", IN_CHILD, "--seed", "5", "--seconds", "30", "--json"]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        )
        digests.add(json.loads(done.stdout.splitlines()[-1])["tape_digest"])
    assert len(digests) == 1
    assert simulated("--seed", "6", "--seconds", "30")["tape_digest"] not in digests


def test_a_failure_says_seed_version_plan_and_film(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds_fault(checker: CommitChecker, entry: Commit) -> None:
        raise AssertionError("a made-up rule is broken")

    monkeypatch.setattr(CommitChecker, "_check", finds_fault)
    result = CliRunner().invoke(APP, ["--seed", "3", "--seeds", "2"])
    assert isinstance(result.exception, SimulationError)
    assert str(result.exception) == f"seed 3 of version {__version__}: a made-up rule is broken"
    assert "'faults'" in result.stdout and "seals found" in result.stdout


@pytest.mark.parametrize("hosts", ["1-3", "9-5", "many", "5-", "5-99"])
def test_a_range_of_hosts_that_is_none_is_named(hosts: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        CliRunner().invoke(APP, ["--hosts", hosts], catch_exceptions=False)


def test_an_unknown_scenario_is_answered_by_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="there are: learner-killed"):
        CliRunner().invoke(APP, ["--scenario", "none"], catch_exceptions=False)


def test_a_scenario_that_is_a_test_is_named_as_one() -> None:
    with pytest.raises(ConfigError, match=r"bootstraps-down: is no simulation but a test .*tests/integration"):
        CliRunner().invoke(APP, ["--scenario", "bootstraps-down"], catch_exceptions=False)


def test_the_scenarios_can_be_listed() -> None:
    listed = CliRunner().invoke(APP, ["--scenario", "list"], catch_exceptions=False).stdout
    assert "syncer-killed" in listed and "a test: tests/" in listed


def test_people_are_told_the_verdict_in_a_sentence() -> None:
    said = CliRunner().invoke(APP, ["--seconds", "10", "--hosts", "3"], catch_exceptions=False).stdout.splitlines()
    assert said[-1].startswith("No invariant was broken in the run. simulated_s counts more than the training")
