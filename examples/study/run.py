"""Runs what is missing of a part of the study.

    python examples/study/run.py a1 --minutes 9 --jobs 2     # again and again, until it says that nothing is missing
    python examples/study/run.py --list                      # the parts, what they cost, how much of them is there

Each finished (cell, seed) is one line of `results/PART.jsonl`; what is there, by any part, is not run again. A run
that would not fit into the minutes left, by the speed of those before it, is not begun. One that fails is told, the
others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from errands import Errand, alone, run_errands
from plan import EQUAL, PARTS, SEQUENCES, TOKENS_PER_SECOND, Cell, Part, cells
from second import NUM_CELLS, second_stage

RESULTS = Path(__file__).parent / "results"
NUM_POINTS = 5
"""Of a loss curve, besides the last."""
Job = tuple[Cell, int]


def key_of(cell: Cell, seed: int) -> str:
    """A result is known by all that decides it."""
    fleet = asdict(cell.decisive)
    if cell.decisive.delay_ms == EQUAL.delay_ms:
        del fleet["delay_ms"]  # it came later than the first results
    model = [] if cell.model == "dense" else [cell.model]
    return json.dumps([cell.arm, cell.tokens, fleet, seed, *model], sort_keys=True)


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


def part_named(name: str, rows: dict[str, dict[str, Any]]) -> Part | None:
    """With its cells; none while the part that they come from is not done."""
    part = PARTS[name]
    if not part.after:
        return part
    first = PARTS[part.after]
    found = {cell.arm: rows.get(key_of(cell, first.seeds[0])) for cell in first.cells}
    losses = {arm: row["heldout"] for arm, row in found.items() if row is not None}
    if len(losses) < len(found):
        return None
    return replace(part, cells=cells(4, EQUAL, *second_stage(losses)))


def missing(name: str, folder: Path) -> list[Job]:
    """All cells of the first seed, then of the next. Exits if the cells are not known yet."""
    there = read_results(folder)
    part = part_named(name, there)
    if part is None:
        after = PARTS[name].after
        sys.exit(f"{name}: its cells come out of {after}, which is not done; run.py {after} first")
    jobs = [(cell, seed) for seed in part.seeds for cell in part.cells]
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
        Machine(step_ms=round(160 / speed), up_mbit=100, down_mbit=100, delay_ms=fleet.delay_ms, batch_size=batch)
        for speed, batch in zip(speeds, batches, strict=True)
    )
    base = base_manifest(num_learners=fleet.learners, tokens=cell.tokens, lockstep=False, model=cell.model)
    kind, _, settings = cell.arm.partition(":")
    written = f"{kind}:sequences={SEQUENCES}" + (f",{settings}" if settings else "")
    (arm,) = arms_from([written], base, num_learners=fleet.learners)
    until_s = 3 * cell.tokens / base.rules().tokens_per_step / fleet.learners * 0.16 / min(fleet.speeds)
    faults = faults_of(fleet, seed, until_s=until_s)
    result = run_arm(
        arm, Fleet(machines=machines, plan=FaultPlan(faults=faults)), seed, num_points=NUM_POINTS
    ).to_json()
    return {
        "key": key_of(cell, seed),
        "arm": cell.arm,
        **({} if cell.model == "dense" else {"model": cell.model}),
        "fleet": asdict(fleet),
        "tokens": cell.tokens,
        "seed": seed,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cpu_s": round(time.process_time() - began, 1),
        **{name: value for name, value in result.items() if name not in ("arm", "kind", "seed", "wall_s")},
    }


def run(part: str, folder: Path, *, num_jobs: int, minutes: float) -> bool:
    """Whatever fits into so many minutes. Has all of it gone well?"""
    missing(part, folder)  # may exit, and then should leave no file
    with alone(folder / f"{part}.jsonl") as lines:
        errands = [
            Errand(
                words=f"{part} {cell.arm} {_fleet_in_words(cell)} seed {seed}",
                tokens=cell.tokens,
                tokens_per_second=TOKENS_PER_SECOND[cell.model],
                call=run_one,
                args=(cell, seed),
            )
            for cell, seed in missing(part, folder)
        ]
        num_failed = run_errands(errands, lines, num_jobs=num_jobs, minutes=minutes, told=loss_in_words)
    left = len(missing(part, folder))
    print(f"{part}: {f'{left} runs are missing, start it again' if left else 'nothing is missing'}")
    if num_failed:
        print(f"{part}: {num_failed} of them FAILED", file=sys.stderr)
    return num_failed == 0


def loss_in_words(row: dict[str, Any]) -> str:
    return "not finite" if row["heldout"] is None else f"{row['heldout']:.4f}"


def _fleet_in_words(cell: Cell) -> str:
    given = {name: value for name, value in asdict(cell.fleet).items() if value}
    return ", ".join(f"{name} {value}" for name, value in given.items())


def list_parts(folder: Path) -> None:
    total, seconds = 0, 0.0
    rows = read_results(folder)
    for name in PARTS:
        part = part_named(name, rows)
        if part is None:
            runs = NUM_CELLS * len(PARTS[name].seeds)
            print(f"{name:8} waits for {PARTS[name].after}, then {runs} runs at most, {4 * runs:5.0f}M tokens")
            continue
        tokens = len(part.seeds) * sum(cell.tokens for cell in part.cells)
        total += tokens
        seconds += len(part.seeds) * sum(cell.tokens / TOKENS_PER_SECOND[cell.model] for cell in part.cells)
        runs = len(part.cells) * len(part.seeds)
        there = sum(key_of(cell, seed) in rows for cell in part.cells for seed in part.seeds)
        print(f"{name:8} {there:3} of {runs:3} runs, {tokens / 1e6:5.0f}M tokens  {part.question}")
    print(f"         {total / 1e6:,.0f}M tokens, {seconds / 3600:.1f} hours of one core; central.py comes on top")


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
        return
    try:
        went_well = run(given.part, given.results, num_jobs=given.jobs, minutes=given.minutes)
    except KeyboardInterrupt:
        sys.exit(130)
    if not went_well:
        sys.exit(1)


if __name__ == "__main__":
    main()
