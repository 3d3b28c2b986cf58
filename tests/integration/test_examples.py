"""The examples run as they stand, as a reader would run them, and what they train gets better."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import geo_diloco
from geo_diloco.manifest import StopSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LIMIT_S = 300
_LOSS = re.compile(r"held-out (?:loss|.*?) of Theta ([0-9.]+)")


def example(repository: Path, name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(repository / "examples" / name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "02_dense.py",
        pytest.param("03_mixture_of_experts.py", marks=pytest.mark.slow),
        pytest.param("04_vision.py", marks=pytest.mark.slow),
    ],
)
def test_each_model_family_learns(repository: Path, name: str) -> None:
    losses = [float(loss) for loss in _LOSS.findall(example(repository, name))]
    assert len(losses) >= 2, losses
    assert losses[-1] < 0.75 * losses[0], losses


def test_the_script_that_joins_a_run_trains_until_it_is_done(repository: Path, tmp_path: Path) -> None:
    dense = geo_diloco.load_manifest(repository / "examples" / "dense.toml")
    short = replace(dense, stop=StopSpec(commits=6))
    with geo_diloco.found(short, run_dir=tmp_path / "founder") as founder:
        said = example(repository, "01_join_a_run.py", founder.invite)
        assert founder.wait_finished(timeout_s=60)
    assert re.search(r"done after \d+ steps, \d+ tokens: 6 commits made", said), said
