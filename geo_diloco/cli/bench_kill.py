"""How long a run notices that a learner was killed: gaps between commits before and after SIGKILL.

Commit times are those of the founder's tape; it and this process read the same monotonic clock. The killed learner is
started again from its own run directory, so that the figure includes its return.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.cli.demo_processes import Child, Children
from geo_diloco.errors import GeoDilocoError
from geo_diloco.manifest import StopSpec

RESTART_AFTER_S = 2.0
START_LIMIT_S = 120.0
COMMITS_BEFORE_MIN = 40
"""Fewer gaps have no 95th percentile worth the name; a busy machine takes longer to make them."""


def measure_kill(
    *, num_runs: int, num_learners: int, before_s: float, after_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Keys: `ratio_median` (longest gap after the kill over the 95th percentile before it), and `rows`."""
    rows = []
    for number in range(num_runs):
        with tempfile.TemporaryDirectory(prefix="geo-diloco-bench-") as folder:
            row = _one_run(Path(folder), num_learners=num_learners, before_s=before_s, after_s=after_s)
        rows.append(row)
        say(
            f"run {number + 1}/{num_runs}: p95 before {row['p95_before_ms']:.0f} ms, longest after "
            f"{row['longest_after_ms']:.0f} ms, ratio {row['ratio']:.2f}, rejoined at step {row['resumed_step']:.0f}"
        )
    return {"runs": num_runs, "ratio_median": statistics.median(row["ratio"] for row in rows), "rows": rows}


def _one_run(folder: Path, *, num_learners: int, before_s: float, after_s: float) -> dict[str, float]:
    from geo_diloco.training.presets import demo_manifest

    run = replace(demo_manifest(), stop=StopSpec(minutes=600.0))
    (folder / "run.toml").write_text(toml_from_manifest(run), encoding="utf-8")
    with Children(folder) as children:
        where = ("--run-dir", str(folder / "founder"), "--host", "127.0.0.1", "--port", "0", "--json")
        founder = children.start("founder", "start", str(folder / "run.toml"), *where)
        invite = str(children.wait_ready(founder, "invite")["invite"])
        learners = [_join(children, folder, invite, number) for number in range(num_learners)]
        tape = folder / "founder" / "tape.jsonl"
        began_ms = _wait_all_training(tape, num_learners)
        time.sleep(before_s)
        _wait_commits(tape, COMMITS_BEFORE_MIN)
        killed_ms = _now_ms()
        children.kill(learners[0])
        time.sleep(RESTART_AFTER_S)
        learners[0] = _join(children, folder, invite, 0)
        time.sleep(max(0.0, after_s - RESTART_AFTER_S))
        children.check()
        children.end([*learners, founder], signal.SIGTERM, limit_s=15.0)
    commits_ms = commit_times_ms(tape)
    before = _gaps([at for at in commits_ms if began_ms <= at <= killed_ms])
    last_before = max((at for at in commits_ms if at <= killed_ms), default=killed_ms)
    after = _gaps([last_before, *(at for at in commits_ms if killed_ms < at <= killed_ms + 1000 * after_s)])
    if not after:
        raise GeoDilocoError(f"no commit in the {after_s:g} s after the kill")
    p95 = statistics.quantiles(before, n=20)[-1]
    return {
        "p95_before_ms": p95,
        "longest_after_ms": max(after),
        "ratio": max(after) / p95,
        "commits_before": float(len(before)),
        "commits_after": float(len(after)),
        "resumed_step": _resumed_step(folder / "learner-0"),
    }


def _join(children: Children, folder: Path, invite: str, number: int) -> Child:
    flags = ("--run-dir", str(folder / f"learner-{number}"), "--threads", "1", "--device", "cpu")
    return children.start(f"learner-{number}", "join", invite, *flags, ends_by_itself=True)


def _now_ms() -> int:
    from geo_diloco.runtime.driver import now_ms

    return now_ms()


def commit_times_ms(tape: Path) -> list[int]:
    """When each commit was sealed, by the founder's tape."""
    from geo_diloco.protocol.events import Merged, Sealed
    from geo_diloco.tape import read_tape

    times, merged = [], 0
    for boot in read_tape(tape):
        for record in boot.events:
            if isinstance(record.event, Merged):
                merged += 1
            elif isinstance(record.event, Sealed) and merged:
                merged -= 1
                times.append(int(record.at))
    return times


def _wait_all_training(tape: Path, num_learners: int) -> int:
    """Until every learner has told of a step; when that was."""
    from geo_diloco.protocol.events import Received
    from geo_diloco.protocol.messages import Progress
    from geo_diloco.tape import read_tape

    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        seen: dict[str, int] = {}
        for boot in read_tape(tape):
            for record in boot.events:
                if isinstance(record.event, Received) and isinstance(record.event.message, Progress):
                    seen.setdefault(record.event.sender, int(record.at))
        if len(seen) == num_learners:
            return max(seen.values())
        time.sleep(1.0)
    raise GeoDilocoError(f"not all {num_learners} learners trained within {START_LIMIT_S:.0f} s")


def _wait_commits(tape: Path, num_commits: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while len(commit_times_ms(tape)) < num_commits:
        if time.monotonic() > deadline:
            raise GeoDilocoError(f"fewer than {num_commits} commits within {START_LIMIT_S:.0f} s more")
        time.sleep(1.0)


def _gaps(times_ms: list[int]) -> list[float]:
    return [float(later - earlier) for earlier, later in pairwise(times_ms)]


def _resumed_step(learner: Path) -> float:
    """The inner step from which the killed learner went on; 0 if it began anew."""
    from geo_diloco.protocol.events import Resumed
    from geo_diloco.tape import read_tape

    tapes = sorted(learner.rglob("tape.jsonl"))
    steps = [
        record.event.step
        for tape in tapes
        for boot in read_tape(tape)
        for record in boot.events
        if isinstance(record.event, Resumed)
    ]
    return float(steps[-1]) if steps else 0.0
