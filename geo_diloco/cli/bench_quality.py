"""Does the run learn as well? A demo run, then the same tokens in one process: synchronous DiLoCo, and each alone.

The run comes first, in real processes; how many inner steps each of its learners made is read from their tapes, and
the baselines (`training/baselines.py`) make as many. All are measured on the same held-out sequences.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from geo_diloco.errors import GeoDilocoError


def measure_quality(*, minutes: float, num_learners: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Keys: `heldout_run`, `heldout_synchronous`, `ratio`, `heldout_alone` (a list), `tokens`."""
    with tempfile.TemporaryDirectory(prefix="geo-diloco-bench-") as folder:
        run_dir = Path(folder) / "demo"
        say(f"the run: {num_learners} learners, {minutes:g} minutes")
        summary = _demo(run_dir, minutes, num_learners)
        steps = [steps_of(run_dir / f"learner-{number}") for number in range(1, num_learners + 1)]
    say(f"run: {summary['heldout_after']:.4f} nats/token after {summary['tokens_trained']} tokens, steps {steps}")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        together = pool.submit(_synchronous, minutes, num_learners, steps)
        apart = [pool.submit(_alone, minutes, num_learners, index, own) for index, own in enumerate(steps)]
        synchronous, tokens = together.result()
        say(f"synchronous DiLoCo: {synchronous:.4f} after {tokens} tokens")
        alone = [each.result() for each in apart]
    say("alone: " + ", ".join(f"{loss:.4f}" for loss in alone))
    return {
        "heldout_run": summary["heldout_after"],
        "heldout_synchronous": synchronous,
        "ratio": summary["heldout_after"] / synchronous,
        "heldout_alone_best": min(alone),
        "tokens_run": summary["tokens_trained"],
        "tokens_synchronous": tokens,
        "heldout_alone": alone,
        "steps": steps,
    }


def _demo(run_dir: Path, minutes: float, num_learners: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "geo_diloco", "demo", "--plain", "--json", "--run-dir", str(run_dir)]
    command += ["--minutes", str(minutes), "--learners", str(num_learners)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GeoDilocoError(f"the demo failed: {done.stderr.strip()[-500:]}")
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def steps_of(learner: Path) -> int:
    """Inner steps a learner made, by its tape."""
    from geo_diloco.protocol.events import StepDone
    from geo_diloco.tape import read_tape

    steps = [
        record.event.step
        for tape in sorted(learner.rglob("tape.jsonl"))
        for boot in read_tape(tape)
        for record in boot.events
        if isinstance(record.event, StepDone)
    ]
    return max(steps, default=0)


def _manifest(minutes: float, num_learners: int) -> Any:
    import torch

    from geo_diloco.cli.demo_files import demo_run
    from geo_diloco.training.presets import demo_manifest

    torch.set_num_threads(1)
    return demo_run(demo_manifest(), minutes=minutes, num_learners=num_learners)


def _synchronous(minutes: float, num_learners: int, steps: list[int]) -> tuple[float, int]:
    from geo_diloco.training.baselines import synchronous_diloco

    result = synchronous_diloco(_manifest(minutes, num_learners), steps)
    return result.heldout, result.num_tokens


def _alone(minutes: float, num_learners: int, index: int, steps: int) -> float:
    from geo_diloco.training.baselines import alone

    return alone(_manifest(minutes, num_learners), index, steps).heldout
