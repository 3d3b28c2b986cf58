"""What being in a run costs a learner: the same training loop with and without the rest of the peer, in pairs.

Each window is a process of its own, so that nothing of one is left in the other; a pair is measured close together and
in changing order, because the machine's speed drifts. The founder runs beside all windows, idle ones included.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from geo_diloco.cli.demo_processes import child_environment
from geo_diloco.errors import GeoDilocoError

WARM_UP_STEPS = 30
WINDOW_LIMIT_S = 120.0


def measure_overhead(*, num_pairs: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Keys: `lost_median` (share of steps per second lost), `waiting_median` (the part of it in which the training
    thread was kept from the processor: the rest is steps that take longer on it, the machine's own drift among it),
    `inside_median` (share of an inner step spent inside `Learner.step`), and `rows`, one per pair. Raises
    GeoDilocoError if a window fails."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="geo-diloco-bench-") as folder, _founder(Path(folder)) as invite:
        for pair in range(num_pairs):
            order = [True, False] if pair % 2 else [False, True]
            window = {
                joined: _window(seconds, invite if joined else "", Path(folder) / f"learner-{pair}") for joined in order
            }
            lost = 1 - window[True]["steps_per_s"] / window[False]["steps_per_s"]
            waiting = 1 - window[True]["running"] / window[False]["running"]
            row = {
                "alone_steps_per_s": window[False]["steps_per_s"],
                "joined_steps_per_s": window[True]["steps_per_s"],
                "lost": lost,
                "waiting": waiting,
                "inside": window[True]["inside"],
                "adoptions": window[True]["adoptions"],
            }
            rows.append(row)
            say(
                f"pair {pair + 1}/{num_pairs}: alone {row['alone_steps_per_s']:.2f}, joined "
                f"{row['joined_steps_per_s']:.2f} steps/s, lost {lost:.1%}, "
                f"waiting {waiting:.1%}, inside step {row['inside']:.2%}"
            )
    return {
        "pairs": num_pairs,
        "lost_median": statistics.median(row["lost"] for row in rows),
        "waiting_median": statistics.median(row["waiting"] for row in rows),
        "inside_median": statistics.median(row["inside"] for row in rows),
        "rows": rows,
    }


@contextlib.contextmanager
def _founder(folder: Path) -> Iterator[str]:
    """A founder of the demo's run without an end; gives its invite."""
    from geo_diloco.cli.demo_files import toml_from_manifest
    from geo_diloco.cli.demo_processes import Children
    from geo_diloco.manifest import StopSpec
    from geo_diloco.training.presets import demo_manifest

    run = replace(demo_manifest(), stop=StopSpec(minutes=600.0))
    (folder / "run.toml").write_text(toml_from_manifest(run), encoding="utf-8")
    with Children(folder) as children:
        where = ("--run-dir", str(folder / "founder"), "--host", "127.0.0.1", "--port", "0", "--json")
        founder = children.start("founder", "start", str(folder / "run.toml"), *where)
        yield str(children.wait_ready(founder, "invite")["invite"])
        children.end([founder], signal.SIGTERM, limit_s=10.0)


def window_alone(seconds: float) -> dict[str, float]:
    """One window of training without a run, in a process of its own."""
    return _window(seconds, "", Path())


def _window(seconds: float, invite: str, run_dir: Path) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "geo_diloco", "bench", "overhead-window", str(seconds)]
    if invite:
        command += ["--invite", invite, "--run-dir", str(run_dir)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WINDOW_LIMIT_S + seconds,
        env=child_environment(os.environ),
        check=False,
    )
    if done.returncode != 0:
        raise GeoDilocoError(f"a window of the benchmark failed: {done.stderr.strip()[-500:]}")
    window: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return window


def measure_window(*, seconds: float, invite: str, run_dir: Path | None) -> dict[str, float]:
    """Train for so long after a warm-up, in the run of `invite` or alone."""
    import torch

    import geo_diloco

    torch.set_num_threads(1)
    if not invite:
        return _train_alone(seconds)
    with geo_diloco.join(invite, run_dir=run_dir, threads=1, device="cpu") as peer:
        from geo_diloco.training.loop import make_optimizer

        model = peer.build_model()
        optimizer = make_optimizer(model, peer.manifest.inner)
        learner = peer.learner(model, optimizer)
        clock = StepWindow(seconds)
        inside_at_start = 0.0
        for batch in peer.data():
            loss = _inner_step(model, optimizer, batch, peer.manifest.inner.gradient_clip)
            learner.step(tokens=batch.numel(), loss=loss)
            if clock.tick():
                break
            if clock.began_now:
                inside_at_start = learner.seconds_inside
        return {
            "steps_per_s": clock.steps_per_s,
            "running": clock.running,
            "inside": (learner.seconds_inside - inside_at_start) / clock.elapsed_s,
            "adoptions": float(sum(peer.status()["versions"])),
        }


def _train_alone(seconds: float) -> dict[str, float]:
    from geo_diloco.training.data import TokenStream
    from geo_diloco.training.loop import make_optimizer
    from geo_diloco.training.models import build_model
    from geo_diloco.training.presets import demo_manifest

    manifest = demo_manifest()
    model = build_model(manifest.model)
    optimizer = make_optimizer(model, manifest.inner)
    clock = StepWindow(seconds)
    for batch in TokenStream(manifest.data, share=0):
        loss = _inner_step(model, optimizer, batch, manifest.inner.gradient_clip)
        loss.item()
        if clock.tick():
            break
    return {"steps_per_s": clock.steps_per_s, "running": clock.running, "inside": 0.0, "adoptions": 0.0}


def _inner_step(model: Any, optimizer: Any, batch: Any, gradient_clip: float) -> Any:
    from geo_diloco.training.loop import inner_step, training_loss

    loss = training_loss(model, batch)
    inner_step(model, optimizer, loss, gradient_clip=gradient_clip)
    return loss


class StepWindow:
    """Counts steps after the warm-up, for so many seconds. For the thread that trains."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._num_steps = -WARM_UP_STEPS
        self._began_at = 0.0
        self._processor_began_s = 0.0
        self.elapsed_s = 0.0
        self.running = 0.0
        """Share of the window that this thread had a processor."""

    @property
    def began_now(self) -> bool:
        return self._num_steps == 0

    def tick(self) -> bool:
        """After a step; True when the window is over."""
        self._num_steps += 1
        now = time.perf_counter()
        if self._num_steps <= 0:
            self._began_at, self._processor_began_s = now, time.thread_time()
            return False
        self.elapsed_s = now - self._began_at
        self.running = (time.thread_time() - self._processor_began_s) / self.elapsed_s
        return self.elapsed_s >= self._seconds

    @property
    def steps_per_s(self) -> float:
        return self._num_steps / self.elapsed_s
