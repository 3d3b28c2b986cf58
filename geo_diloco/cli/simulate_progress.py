"""How far `simulate train` is: a bar while an arm trains, on a terminal only, and a line when it is done."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from geo_diloco.cli.options import answer, say

if TYPE_CHECKING:
    from geo_diloco.sim.train.arms import Arm
    from geo_diloco.sim.train.results import ArmResult


def on_terminal() -> bool:
    return sys.stderr.isatty()


class Teller:
    """A `comparing.Audience`: bar and lines go to standard error, JSON lines to standard output as results come."""

    def __init__(self, number: int, *, as_json: bool) -> None:
        """`number` of results in all."""
        self._number = number
        self._done = 0
        self._as_json = as_json
        self._bar: Progress | None = None

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def begins(self, arm: Arm, seed: int) -> None:
        if not on_terminal():
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
        # Redirected, standard output would end up on the terminal even where it goes to a file.
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.add_task(f"{self._done + 1} of {self._number}: {escape(arm.text)}, seed {seed}", total=1.0)
        self._bar.start()

    def progress(self, share: float) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share)

    def ends(self, result: ArmResult, *, kept: bool) -> None:
        self._hide()
        self._done += 1
        loss = "not finite" if result.heldout is None else f"{result.heldout:.4f}"
        right = "" if result.accuracy is None else f", {result.accuracy:.1%} right"
        took = "kept from before" if kept else f"{result.wall_s:.0f} s"
        say(f"{result.arm}, seed {result.seed}: held-out loss {loss}{right}, {took}", err=True)
        if self._as_json:
            answer(json.dumps(result.to_json()))

    def _hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
