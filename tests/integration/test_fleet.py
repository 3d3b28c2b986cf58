"""`bench fleet` with real processes: rounds of a small fleet are as they were predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

FLEET = """
[model]
parameters = 4e5
tokens_per_step = 1024

[sync]
interval_steps = 12
fragments = 4

[[machine]]
name = "desk"
count = 2
step_s = 0.4
up_mbit = 50.0
down_mbit = 100.0

[[machine]]
name = "laptop"
step_s = 1.0
up_mbit = 5.0
down_mbit = 20.0
"""
ROOM = 0.15
"""For a run as short as this one, on a machine that has other things to do. Longer ones are within 10 % (README)."""


def test_a_real_run_has_the_rounds_and_participants_that_were_predicted(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET, encoding="utf-8")
    command = [sys.executable, "-m", "geo_diloco", "bench", "fleet", str(tmp_path / "fleet.toml"), "--minutes", "1"]
    done = subprocess.run([*command, "--keep", str(tmp_path / "kept"), "--json"], capture_output=True, timeout=800)
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout.decode().splitlines()[-1])
    print(figures)
    assert figures["rounds_per_minute"] > 30
    assert [each["machine"] for each in figures["machines"]] == ["desk", "desk", "laptop"]
    assert 1.0 < figures["participants"] <= 3.0
    for ratio in ("rounds_per_minute_ratio", "participants_ratio"):
        assert figures[ratio] == pytest.approx(1.0, abs=ROOM)
    for ratio in ("tape_rounds_per_minute_ratio", "tape_participants_ratio"):
        assert figures[ratio] == pytest.approx(1.0, abs=2 * ROOM), "half as much of it"
    assert (tmp_path / "kept" / "run" / "syncer" / "tape.jsonl").exists()
