"""Makes the tables of the study's README from its results.

    python examples/study/report.py            # to standard output
    python examples/study/report.py --write    # into examples/study/README.md, between its two marks

A difference is of held-out loss, in per cent of the arm that it is compared with, seed by seed on the same data; its
interval is that of Student's t at 95 %. With one seed there is none.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from central_report import central_report, in_percent, in_points
from plan import EQUAL, PARTS, Cell, Part
from run import RESULTS, key_of, part_named, read_results

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- results: made by report.py -->", "<!-- end of results -->"
Rows = dict[str, dict[str, Any]]


def losses(cell: Cell, part: Part, rows: Rows) -> dict[int, float | None]:
    """Held-out loss by seed, of what was run; none where it was not finite."""
    keys = {seed: key_of(cell, seed) for seed in part.seeds}
    return {seed: rows[key]["heldout"] for seed, key in keys.items() if key in rows}


def reference_of(cell: Cell, part: Part, arm: str) -> Cell | None:
    """What that cell is compared with: another arm, the same fleet as far as that arm cares, and tokens."""
    for other in part.cells:
        same = other.decisive == replace(cell, arm=arm).decisive and other.model == cell.model
        if other.arm == arm and same and other.tokens == cell.tokens:
            return None if other.arm == cell.arm else other
    return None


def difference(cell: Cell, part: Part, arm: str, rows: Rows) -> str:
    other = reference_of(cell, part, arm)
    if other is None:
        return ""
    mine, theirs = losses(cell, part, rows), losses(other, part, rows)
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        return ""
    return in_percent([(mine[seed], theirs[seed]) for seed in seeds])


def points(cell: Cell, part: Part, arm: str, rows: Rows) -> str:
    """Of accuracy, likewise."""
    other = reference_of(cell, part, arm)
    if other is None:
        return ""
    keys = [(key_of(cell, seed), key_of(other, seed)) for seed in part.seeds]
    there = [(rows[mine], rows[theirs]) for mine, theirs in keys if mine in rows and theirs in rows]
    return in_points([(mine["accuracy"], theirs["accuracy"]) for mine, theirs in there])


def fleet_in_words(cell: Cell) -> str:
    fleet = cell.fleet
    words = [f"{fleet.learners} learners"]
    if len(fleet.speeds) > 1:
        words.append("speeds " + " : ".join(f"{speed:g}" for speed in fleet.speeds))
    if fleet.batch_sizes:
        words.append("batches " + " : ".join(map(str, fleet.batch_sizes)))
    if fleet.delay_ms != EQUAL.delay_ms:
        words.append(f"packets take {fleet.delay_ms} ms")
    if fleet.away:
        words.append(f"away a fifth of the time ({fleet.away})")
    return ", ".join(words)


def table(part: Part, rows: Rows) -> list[str]:
    """One for each fleet and number of tokens."""
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in part.cells:
        if losses(cell, part, rows):
            groups[fleet_in_words(cell), cell.tokens].append(cell)
    lines: list[str] = []
    for (fleet, tokens), cells in groups.items():
        lines += ["", f"{fleet}, {tokens / 1e6:g}M tokens:", ""]
        columns = ["arm", "held-out loss, seeds in order", *(f"against `{arm}`" for arm in part.against)]
        if is_vision(cells[0]):
            columns += ["accuracy, %", *(f"points against `{arm}`" for arm in part.against)]
        columns += ["merged", "participants", "rho"]
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += [_row(cell, part, rows) for cell in cells]
    return lines


def is_vision(cell: Cell) -> bool:
    return cell.model == "vit"


def _row(cell: Cell, part: Part, rows: Rows) -> str:
    there = [rows[key] for seed in part.seeds if (key := key_of(cell, seed)) in rows]
    found = " ".join("not finite" if row["heldout"] is None else f"{row['heldout']:.4f}" for row in there)
    merged = sum(row["tokens_merged"] for row in there) / max(1, sum(row["tokens_trained"] for row in there))
    participants = sum(row["participants_mean"] for row in there) / len(there)
    against = [difference(cell, part, arm, rows) for arm in part.against]
    if is_vision(cell):
        against.append(" ".join(f"{100 * row['accuracy']:.1f}" for row in there))
        against += [points(cell, part, arm, rows) for arm in part.against]
    rhos = [row["rho_mean"] for row in there if row.get("rho_mean") is not None]
    rho = f"{sum(rhos) / len(rhos):.2f}" if rhos else ""
    cells = [f"`{cell.arm}`", found, *against, f"{100 * merged:.1f} %", f"{participants:.2f}", rho]
    return "| " + " | ".join(cells) + " |"


def report(folder: Path) -> str:
    lines: list[str] = []
    rows = read_results(folder)
    for name in PARTS:
        part = part_named(name, rows)
        if part is None:
            after = PARTS[name].after
            lines += ["", f"### {name}: {PARTS[name].question}", ""]
            lines.append(f"Not run yet: its cells come out of {after}, by the rule in `second.py`, when that is done.")
            continue
        keys = [key_of(cell, seed) for cell in part.cells for seed in part.seeds]
        there = [rows[key] for key in keys if key in rows]
        lines += ["", f"### {name}: {part.question}", ""]
        if not there:
            lines.append(f"Not run yet: `python examples/study/run.py {name}`, {len(keys)} runs.")
            continue
        dates = sorted({row["date"] for row in there})
        seeds = ", ".join(map(str, sorted({row["seed"] for row in there})))
        cpu_s = sum(row["cpu_s"] for row in there)
        lines.append(
            f"`python examples/study/run.py {name}`: {len(there)} of {len(keys)} runs, seeds {seeds}, "
            f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {cpu_s / 60:.0f} minutes of one core."
        )
        lines += table(part, rows)
    lines += ["", "### The paper's central experiment: eight learners under the failures of 1.2 million chips", ""]
    lines.append(central_report(folder))
    return "\n".join(lines).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the README")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    given = parser.parse_args()
    made = report(given.results)
    if not given.write:
        print(made, end="")
        return
    text = README.read_text("utf-8")
    head, began, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not (began and ended):
        sys.exit(f"{README}: without its two marks, {BEGIN} and {END}; put them where the tables belong")
    README.write_text(f"{head}{BEGIN}\n\n{made}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
