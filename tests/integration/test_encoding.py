"""Encoding both legs by int4 costs next to nothing: the same run in lockstep, the same seeds, with and without it.

Lockstep makes a run a function of its seeds, so the two differ by the codec alone. Slow: `pytest -m slow` runs it.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import geo_diloco
from geo_diloco.manifest import CodecSpec, EvalSpec, ModelSpec, RunManifest, StopSpec, SyncSpec
from geo_diloco.training.presets import demo_manifest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_LEARNERS = 2
COMMITS = 80


def manifest(codec: CodecSpec) -> RunManifest:
    demo = demo_manifest()
    small = dict(demo.model.config or {}) | {"hidden_size": 48, "intermediate_size": 96}
    return replace(
        demo,
        model=ModelSpec(config=small, seed=5),
        data=replace(demo.data, sequence_length=64),
        sync=SyncSpec(
            interval_steps=24, num_fragments=4, overlap_steps=2, quorum=NUM_LEARNERS, grace=False, lockstep=True
        ),
        codec_up=codec,
        codec_down=codec,
        stop=StopSpec(commits=COMMITS),
        evaluation=EvalSpec(every_seconds=0.0, sequences=64),
    )


def heldout_losses(root: Path, codec: CodecSpec) -> list[float]:
    with geo_diloco.found(manifest(codec), run_dir=root / "founder") as founder:
        join = [sys.executable, "-m", "geo_diloco", "join", founder.invite, "--threads", "1", "--run-dir"]
        learners = [
            subprocess.Popen([*join, str(root / f"learner-{i}")], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for i in range(NUM_LEARNERS)
        ]
        try:
            assert founder.wait_finished(timeout_s=400), founder.status()
            assert [learner.wait(timeout=60) for learner in learners] == [0] * NUM_LEARNERS
        finally:
            for learner in learners:
                learner.kill()
                learner.wait()
        return [loss for _, loss, _ in founder.status()["heldout"]]


def test_int4_on_both_legs_is_within_two_percent_of_no_encoding(tmp_path: Path) -> None:
    plain = heldout_losses(tmp_path / "none", CodecSpec(name="none"))
    encoded = heldout_losses(tmp_path / "int4", CodecSpec(name="int4", block=64))
    print(f"held-out: none {plain[0]:.4f} -> {plain[-1]:.4f}, int4 {encoded[0]:.4f} -> {encoded[-1]:.4f}")
    assert plain[0] == encoded[0], "the same beginning"
    assert plain[-1] < 0.7 * plain[0], "something was learnt"
    assert abs(encoded[-1] / plain[-1] - 1) < 0.02
