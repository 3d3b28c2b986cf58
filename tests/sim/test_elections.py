"""The election against everything that can go wrong, and the checkers against everything that could be wrong with it.

`python -m tests.support.election_run --seeds 2000 --seconds 120` is the big one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.election_mutants import MUTANTS, Mutant, found_by, search
from tests.support.election_plans import swarm_plan
from tests.support.election_run import run_election, swarm
from tests.support.election_timings import LEASE_MS, gap_after, quantile

NUM_SEEDS = 25
"""Whole peers in 150 worlds are simulated by CI (.ci/run), some by test_simulate_protocol.py; here elections alone."""
PARTS = 5
HANDOVER_MS_MAX = 3_000
KILL_MS_P95 = 45_000


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_breaks_a_rule(part: int) -> None:
    size = NUM_SEEDS // PARTS
    came_to = swarm(part * size, size, seconds=60)
    assert came_to["violations"] == []
    assert int(str(came_to["elections"])) > 2 * size, "a swarm without elections shows nothing"
    assert int(str(came_to["healed"])) >= 0.8 * size, "nor one that nothing is demanded of"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found_by_its_recorded_seed(mutant: Mutant) -> None:
    found = found_by(mutant, mutant.seed)
    assert found is not None, "record the seeds anew: python -m tests.support.election_run --mutants 500"
    assert pytest.raises(AssertionError, match=mutant.finds).matches(AssertionError(found)), found
    run_election(swarm_plan(mutant.seed))


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_every_broken_rule_is_found_within_500_seeds() -> None:
    assert None not in search(500).values()


def test_a_run_is_a_function_of_its_seed_whatever_the_hash_seed(repository: Path) -> None:
    code = (
        "from tests.support.election_plans import swarm_plan; from tests.support.election_run import run_election\n"
        "print([run_election(swarm_plan(seed)).digest for seed in (3, 11, 20)])"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(repository)}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=True)
        digests.add(ran.stdout)
    assert len(digests) == 1 and len(digests.pop()) > 3 * 64


def test_after_a_kill_of_the_syncer_commits_come_again_in_time() -> None:
    gaps = [gap_after(seed, "crash") for seed in range(10)]
    assert LEASE_MS < quantile(gaps, 0.5) < 2 * LEASE_MS
    assert max(gaps) < KILL_MS_P95


def test_at_a_planned_hand_over_the_gap_between_commits_is_short() -> None:
    gaps = [gap_after(seed, "handover") for seed in range(10)]
    assert max(gaps) < HANDOVER_MS_MAX, gaps
