"""The averaging race, run small: both sides get all their peers to the mean, and int4 over a star is ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.namespaces import why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--parameters", "2M", "--rate", "5mbit", "--turns", "1", "--rounds", "2")
MARK = "AVERAGING_RACE_OF"
BUSY = 0.9
"""Of the processors: from there on they decide who is ahead, not the links."""
FLOAT16_MB = 2 * 0.75 * 2 * 2.0
"""That an all-reduce of four sends from each: three quarters of everything there, and of the result back."""


def test_int4_over_a_star_is_ahead_of_an_all_reduce_of_float16(tmp_path: Path) -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.support.averaging_race", *SMALL, "--json", "--keep", str(tmp_path / "kept")]
    command += ["--side", "theirs-16", "--side", "int4-shared"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=800,
        cwd=Path(__file__).parents[2],
        env=os.environ | {MARK: str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    theirs, ours = said["rows"]
    assert (theirs["side"], ours["side"]) == ("theirs-16", "int4-shared")
    assert theirs["rounds"] == 2 and ours["rounds"] >= 1
    assert FLOAT16_MB < theirs["mb_busiest_link"] < 1.9 * FLOAT16_MB, "16 bits, and what its streams send again"
    assert ours["mb_busiest_link"] < 0.6 * theirs["mb_busiest_link"]
    for row in said["rows"]:
        assert row["link_alone_s"] < row["seconds_min"], "nothing goes faster than its link"
        assert row["cpu_s"] > 0 and row["wires_cpu_s"] > 0
    assert 0 < theirs["formed_s_median"] < 30
    assert ours["link_alone_s"] < 0.6 * theirs["link_alone_s"]
    if max(row["machine_share"] for row in said["rows"]) < BUSY:
        assert said["ratios"]["int4-shared/theirs-16"] < 1.0
    assert not _left_behind(tmp_path)


def _left_behind(folder: Path) -> list[bytes]:
    """Processes of it that still run, whoever started them: they have its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes())
    return found
