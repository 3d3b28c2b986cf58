"""The tables of the central experiment, from `results/central/trials.jsonl`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from central import read_trials
from trials import REFERENCE, SHARES, Share, Trial, all_trials, trials_of

from geo_diloco.sim.train.pairing import difference
from geo_diloco.training.presets import ModelName

Rows = dict[str, dict[str, Any]]
Figure = Callable[[dict[str, Any]], float | None]
NAMES: dict[str, str] = {
    "dense": "Bytes, dense, 0.21M parameters",
    "vit": "Digits, a vision transformer, 18k parameters",
    "moe": "Bytes, a mixture of experts, 0.14M parameters",
}


def central_report(folder: Path) -> str:
    """Markdown; what was not run it says."""
    rows = read_trials(folder)
    wanted = all_trials()
    there = [rows[trial.key] for trial in wanted if trial.key in rows]
    if not there:
        return f"Not run yet: `python examples/study/central.py`, {len(wanted)} trials.\n"
    dates = sorted({row["date"] for row in there})
    minutes = sum(row["cpu_s"] for row in there) / 60
    lines = [
        f"`python examples/study/central.py`: {len(there)} of {len(wanted)} trials, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {minutes:.0f} minutes of one core.",
    ]
    for model, share in SHARES.items():
        found = [seed for seed in share.seeds if any(trial.key in rows for trial in trials_of(model, seed))]
        if found:
            lines += ["", f"**{NAMES[model]}**: seeds {', '.join(map(str, found))}", ""]
            lines += _table(model, share, rows)
        else:
            lines += ["", f"**{NAMES[model]}**: not run yet."]
    return "\n".join(lines) + "\n"


def _table(model: ModelName, share: Share, rows: Rows) -> list[str]:
    is_vision = model == "vit"
    columns = ["way to train", "gets", "tokens", "seconds", "held-out loss, seeds in order", "against no failures"]
    columns += ["accuracy, %", "points"] if is_vision else []
    columns += ["elsewhere, untuned", "elsewhere, tuned", "against no failures"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for trial in trials_of(model, share.seeds[0]):
        cells = _row(trial, share, rows)
        lines += ["| " + " | ".join(cells) + " |"] if cells else []
    first = [rows.get(replace(trials_of(model, 0)[0], seed=seed).key) for seed in share.seeds]
    nothing = [row["finetuned"]["untrained"] for row in first if row is not None]
    if nothing:
        before, after = (fmean(each["loss"] for one in nothing for each in one[when]) for when in ("before", "after"))
        lines += ["", f"Elsewhere, a model that nobody has trained: {before:.3f}, tuned {after:.3f}."]
    return lines


def _row(trial: Trial, share: Share, rows: Rows) -> list[str]:
    """Empty if there is none of its results."""
    reference = trials_of(trial.model, trial.seed)[0]
    mine = {seed: rows.get(replace(trial, seed=seed).key) for seed in share.seeds}
    theirs = {seed: rows.get(replace(reference, seed=seed).key) for seed in share.seeds}
    there = [row for row in mine.values() if row is not None]
    pairs = [(row, other) for seed, row in mine.items() if row is not None and (other := theirs[seed]) is not None]
    if not there:
        return []
    is_reference = trial.arm == REFERENCE
    gets = "both" if is_reference else "as many tokens" if trial.tokens else "as much time"

    def against(figure: Figure) -> str:
        return "" if is_reference else in_percent([(figure(row), figure(other)) for row, other in pairs])

    cells = [f"`{trial.arm}`", gets]
    cells += [f"{fmean(row['tokens_trained'] for row in there) / 1e6:.2f}M"]
    cells += [f"{fmean(row['virtual_ms'] for row in there) / 1000:.1f}"]
    cells += [" ".join("not finite" if row["heldout"] is None else f"{row['heldout']:.4f}" for row in there)]
    cells += [against(lambda row: row["heldout"])]
    if trial.model == "vit":
        cells += [" ".join(f"{100 * row['accuracy']:.1f}" for row in there)]
        cells += ["" if is_reference else in_points([(row["accuracy"], other["accuracy"]) for row, other in pairs])]
    cells += [f"{fmean(_elsewhere(row, 'before') for row in there):.3f}"]
    cells += [f"{fmean(_elsewhere(row, 'after') for row in there):.3f}"]
    return [*cells, against(lambda row: _elsewhere(row, "after"))]


def _elsewhere(row: dict[str, Any], when: str) -> float:
    """Loss on the other task: the mean over the seeds of the fine-tuning."""
    return fmean(each["loss"] for each in row["finetuned"]["exported"][when])


def in_percent(pairs: list[tuple[float | None, float | None]]) -> str:
    """Mean of the differences within seeds, of the second, and half of its 95 % interval."""
    if not pairs:
        return ""
    paired = difference([one for one, _ in pairs], [other for _, other in pairs])
    if paired is None:
        return "not finite"
    margin = "" if paired.margin is None else f" ± {100 * paired.margin:.2f}"
    return f"{100 * paired.mean:+.2f}{margin} %"


def in_points(pairs: list[tuple[float, float]]) -> str:
    """Of per cent, likewise, with the standard deviation over seeds instead of an interval."""
    points = [100 * (one - other) for one, other in pairs]
    if not points:
        return ""
    return f"{fmean(points):+.1f}" + (f" (s {stdev(points):.1f})" if len(points) > 1 else "")
