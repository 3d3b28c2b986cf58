"""A syncer and learners with connections of their own, as `bench syncer` measures them: that what it says can be so."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LEARNERS = 12


def test_every_learner_of_the_benchmark_takes_part_in_every_round() -> None:
    command = [sys.executable, "-m", "geo_diloco", "bench", "syncer", "--learners", str(LEARNERS), "--json"]
    done = subprocess.run(
        [*command, "--seconds", "12", "--step-s", "0.3"], capture_output=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (row,) = result["rows"]
    assert row["learners"] == row["welcome"] == LEARNERS
    assert row["rounds_per_min"] > 10 and row["participants"] > LEARNERS / 2
    assert 0 < row["own_lag_ms_p50"] <= row["own_lag_ms_p99"] <= row["own_lag_ms_max"]
    assert row["own_lag_ms_p99"] <= row["lag_ms_p99"]
    assert row["uploads_per_s"] * 60 > 0.9 * row["rounds_per_min"] * row["participants"] / 2
    assert row["bytes_to_learner_s"] > row["bytes_from_learner_s"] > 100
    assert row["syncer_cpu"] > 0 and row["driver_cpu"] > 0


def test_too_many_learners_for_the_open_files_are_refused_in_one_line() -> None:
    command = f"ulimit -n 1024; ulimit -Hn 1024; exec {sys.executable} -m geo_diloco bench syncer --learners 1000"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "GD-103" in line and "1000 learners" in line and "ulimit -Hn" in line


def test_more_learners_than_a_syncer_takes_are_refused_in_one_line() -> None:
    command = [sys.executable, "-m", "geo_diloco", "bench", "syncer", "--learners", "5000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "GD-103" in line and "5000" in line and "2048" in line
