"""The table that `simulate train` ends with: a row for each arm, means over its seeds."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from geo_diloco.sim.train.pairing import difference
from geo_diloco.sim.train.results import mean_loss

if TYPE_CHECKING:
    from geo_diloco.sim.train.results import ArmResult

WIDTH = 240
"""More than a table needs: a line is never broken here, so that it can be copied whole."""
MEGABYTE = 1_000_000


def table(results: Sequence[ArmResult]) -> str:
    """As text, so that a pipe gets the same. `results` are grouped by arm, in the order of first appearance."""
    grid = Table(show_edge=False, pad_edge=False)
    grid.add_column("arm", overflow="fold", max_width=60)
    seeds = list(dict.fromkeys(result.seed for result in results))
    arms = list(dict.fromkeys(result.arm for result in results))
    headings = [f"seed {seed}" for seed in seeds] + (["mean"] if len(seeds) > 1 else [])
    if any(result.accuracy is not None for result in results):
        headings.append("accuracy")
    headings += ["against the first"] if len(arms) > 1 else []
    at_equal_tokens = len({result.tokens_trained for result in results}) == 1
    if not at_equal_tokens:
        headings.append("tokens")
    headings += ["merged", "carried", "dropped", "commits", "of", "B/param up, down", "MB up, down", "virtual", "wall"]
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    first = [result.heldout for result in results if result.arm == arms[0]]
    for arm in arms:
        runs = [result for result in results if result.arm == arm]
        against = [] if len(arms) == 1 else [_against(runs, None if arm == arms[0] else first)]
        grid.add_row(Text(arm), *_losses(runs), *against, *_cells(runs, with_tokens=not at_equal_tokens))
    unbalanced = [result.arm for result in results if not result.tokens_balance]
    written = io.StringIO()
    console = Console(file=written, width=WIDTH, highlight=False)
    unit = "token" if results[0].accuracy is None else "image"
    when = f"at {results[0].tokens_trained:,} tokens trained" if at_equal_tokens else "when the budget is spent"
    console.print(f"held-out nats/{unit} of Theta {when}")
    console.print(grid)
    balance = f"NO: {', '.join(unbalanced)}" if unbalanced else "yes"
    console.print(Text(f"tokens balance (trained = merged + in flight + carried + dropped): {balance}"))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _losses(runs: Sequence[ArmResult]) -> list[str]:
    losses = [run.heldout for run in runs]
    cells = [_loss(loss) for loss in losses] + ([_loss(mean_loss(losses))] if len(losses) > 1 else [])
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    return cells + ([f"{_mean(accuracies):.1%}"] if accuracies else [])


def _against(runs: Sequence[ArmResult], first: Sequence[float | None] | None) -> str:
    """The mean of the differences within each seed, and the half of its 95 % interval."""
    paired = None if first is None else difference([run.heldout for run in runs], first)
    if paired is None:
        return "-"
    margin = "" if paired.margin is None else f" +- {100 * paired.margin:.2f}"
    return f"{100 * paired.mean:+.2f}{margin} %"


def _cells(runs: Sequence[ArmResult], *, with_tokens: bool) -> list[str]:
    trained = max(1, sum(run.tokens_trained for run in runs))
    cells = [f"{_mean(run.tokens_trained for run in runs):,.0f}"] if with_tokens else []
    cells += [
        f"{sum(tokens) / trained:.1%}"
        for tokens in (
            [run.tokens_merged for run in runs],
            [run.tokens_carried + run.tokens_in_flight for run in runs],
            [run.tokens_dropped for run in runs],
        )
    ]
    up, down = _mean(run.bytes_per_param_up for run in runs), _mean(run.bytes_per_param_down for run in runs)
    mb_up, mb_down = (_mean(number / MEGABYTE for number in each) for each in _totals(runs))
    return [
        *cells,
        f"{_mean(run.commits for run in runs):.0f}",
        f"{_mean(run.participants_mean for run in runs):.2f}",
        f"{up:.3f}, {down:.3f}",
        f"{mb_up:.1f}, {mb_down:.1f}",
        f"{_mean(run.virtual_ms for run in runs) / 1000:.0f} s",
        f"{_mean(run.wall_s for run in runs):.0f} s",
    ]


def _totals(runs: Sequence[ArmResult]) -> tuple[list[int], list[int]]:
    return [run.bytes_up for run in runs], [run.bytes_down for run in runs]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)
