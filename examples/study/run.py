"""Runs what is missing of a part of the study.

    python examples/study/run.py a1 --minutes 9 --jobs 2     # again and again, until it says that nothing is missing
    python examples/study/run.py --list                      # the parts, what they cost, how much of them is there

Each finished (cell, seed) is one line of `results/PART.jsonl`; what is there, by any part, is not run again. A run
that would not fit into the minutes left, by the speed of those before it, is not begun.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from plan import PARTS, SEQUENCES, Cell

RESULTS = Path(__file__).parent / "results"
TOKENS_PER_SECOND = 20_000
"""Of a core, until something has been measured."""
NUM_POINTS = 5
"""Of a loss curve, besides the last."""
Job = tuple[Cell, int]


def key_of(cell: Cell, seed: int) -> str:
    """A result is known by all that decides it."""
    return json.dumps([cell.arm, cell.tokens, asdict(cell.decisive), seed], sort_keys=True)


NEEDED = ("key", "seed", "date", "cpu_s", "heldout", "tokens_trained", "tokens_merged", "participants_mean")
"""What the tables are made of."""


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Finished runs of all parts by key: what one has run another needs not."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                row = json.loads(line)
                found[row["key"]] = {name: row[name] for name in NEEDED} | row
            except (ValueError, KeyError, TypeError):
                sys.exit(f"{path}, line {number}: no result; a run was cut off there: delete the line and run it again")
    return found


def missing(part: str, folder: Path) -> list[Job]:
    """All cells of the first seed, then of the next."""
    there = read_results(folder)
    jobs = [(cell, seed) for seed in PARTS[part].seeds for cell in PARTS[part].cells]
    return [job for job in jobs if key_of(*job) not in there]


def run_one(cell: Cell, seed: int) -> dict[str, Any]:
    """In a process of its own: torch has one thread there."""
    from churn import faults_of

    from geo_diloco.config import FaultPlan
    from geo_diloco.sim.train.arms import arms_from, base_manifest
    from geo_diloco.sim.train.comparing import run_arm
    from geo_diloco.sim.train.fleet import Fleet, Machine

    fleet, began = cell.fleet, time.process_time()
    speeds = fleet.speeds * fleet.learners if len(fleet.speeds) == 1 else fleet.speeds
    batches = fleet.batch_sizes or (0,) * fleet.learners
    machines = tuple(
        Machine(step_ms=round(160 / speed), up_mbit=100, down_mbit=100, delay_ms=20, batch_size=batch)
        for speed, batch in zip(speeds, batches, strict=True)
    )
    base = base_manifest(num_learners=fleet.learners, tokens=cell.tokens, lockstep=False)
    kind, _, settings = cell.arm.partition(":")
    written = f"{kind}:sequences={SEQUENCES}" + (f",{settings}" if settings else "")
    (arm,) = arms_from([written], base, num_learners=fleet.learners)
    until_s = 3 * cell.tokens / 1024 / fleet.learners * 0.16 / min(fleet.speeds)
    faults = faults_of(fleet, seed, until_s=until_s)
    result = run_arm(
        arm, Fleet(machines=machines, plan=FaultPlan(faults=faults)), seed, num_points=NUM_POINTS
    ).to_json()
    return {
        "key": key_of(cell, seed),
        "arm": cell.arm,
        "fleet": asdict(fleet),
        "tokens": cell.tokens,
        "seed": seed,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cpu_s": round(time.process_time() - began, 1),
        **{name: value for name, value in result.items() if name not in ("arm", "kind", "seed", "wall_s")},
    }


@contextmanager
def _alone(part: str, folder: Path) -> Iterator[Any]:
    """The results to append to, ours alone for as long as we run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / f"{part}.jsonl").open("a", encoding="utf-8")
    except OSError as exc:
        sys.exit(f"--results {folder}: {exc.strerror}; give a folder that can be written to")
    with opened as lines:
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{lines.name}: another run.py is at work on it; wait for it, or run another part")
        yield lines


def run(part: str, folder: Path, *, num_jobs: int, minutes: float) -> None:
    """Whatever fits into so many minutes."""
    began, ends_at = time.monotonic(), time.monotonic() + 60 * minutes
    # Otherwise malloc gives pages back and takes them again in every inner step, which costs 4 % of the time.
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
    speed = float(TOKENS_PER_SECOND)
    with _alone(part, folder) as lines, ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        waiting = missing(part, folder)
        running: dict[Future[dict[str, Any]], tuple[Job, float]] = {}
        while waiting or running:
            while waiting and len(running) < num_jobs:
                if time.monotonic() + waiting[0][0].tokens / speed > ends_at and (
                    running or time.monotonic() > began + 1
                ):
                    waiting = []
                    break
                job = waiting.pop(0)
                running[pool.submit(run_one, *job)] = (job, time.monotonic())
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                (cell, seed), started = running.pop(future)
                row = future.result()
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                speed = cell.tokens / (time.monotonic() - started)
                loss = "not finite" if row["heldout"] is None else f"{row['heldout']:.4f}"
                print(
                    f"{part} {cell.arm} {_fleet_in_words(cell)} seed {seed}: {loss}, {speed:,.0f} tokens/s", flush=True
                )
    left = len(missing(part, folder))
    print(f"{part}: {f'{left} runs are missing, start it again' if left else 'nothing is missing'}")


def _fleet_in_words(cell: Cell) -> str:
    given = {name: value for name, value in asdict(cell.fleet).items() if value}
    return ", ".join(f"{name} {value}" for name, value in given.items())


def list_parts(folder: Path) -> None:
    total = 0
    for name, part in PARTS.items():
        tokens = len(part.seeds) * sum(cell.tokens for cell in part.cells)
        total += tokens
        runs = len(part.cells) * len(part.seeds)
        there = runs - len(missing(name, folder))
        print(f"{name:7} {there:3} of {runs:3} runs, {tokens / 1e6:5.0f}M tokens  {part.question}")
    print(f"        {total / 1e6:,.0f}M tokens, {total / TOKENS_PER_SECOND / 3600:.1f} hours of one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(PARTS))
    parser.add_argument("--list", action="store_true", help="what there is to run")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    given = parser.parse_args()
    if not 1 <= given.jobs <= 64:
        parser.error(f"--jobs {given.jobs}: wanted a number from 1 to 64")
    if not 0 < given.minutes < 1e6:
        parser.error(f"--minutes {given.minutes:g}: wanted a number above 0")
    if given.list or given.part is None:
        list_parts(given.results)
    else:
        run(given.part, given.results, num_jobs=given.jobs, minutes=given.minutes)


if __name__ == "__main__":
    main()
