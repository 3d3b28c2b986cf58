"""`geo-diloco demo`: a whole run on this machine, from one command.

It does what a person with several machines would do by hand, with the same commands: a bootstrap, a founder that syncs
and does not train, and learners that join by invite, each a separate OS process. They are told addresses of the DHT
and nothing else, so they find each other through the DHT. The demo itself holds no part of the run: it starts
processes, looks at the founder's status over HTTP, ends them in order and adds up what they left on disk.

This file is the command: its flags, what it prints, its exit status. The rest is in `demo_director` (the order of
things), `demo_processes`, `demo_status`, `demo_view`, `demo_files` and `demo_summary`, imported only when it runs; none
of them needs torch or hivemind.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from geo_diloco.errors import ConfigError

if TYPE_CHECKING:
    from geo_diloco.cli.demo_processes import ChildFailed

_LEARNERS_MAX = 64
_MINUTES_MAX = 24 * 60


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command's flags."""

    minutes: float = 2.0
    num_learners: int = 4
    run_dir: Path | None = None
    chaos: bool = False
    plain: bool = False
    json: bool = False


@dataclass(frozen=True)
class Interruption:
    """Ctrl-C or SIGTERM: the first asks everyone to leave, the second stops waiting for them."""

    asked: threading.Event = field(default_factory=threading.Event)
    again: threading.Event = field(default_factory=threading.Event)

    def on_signal(self, number: int, where: FrameType | None) -> None:
        (self.again if self.asked.is_set() else self.asked).set()


def demo(
    minutes: Annotated[float, typer.Option(help="How long the run lasts before it ends by itself.")] = 2.0,
    learners: Annotated[int, typer.Option(help="How many learner processes.")] = 4,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Kill one learner midway (SIGKILL) and start it again.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="A line every few seconds instead of the live view.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object, on the last line.")
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Keep everything in this folder, new or empty, instead of among this user's state."),
    ] = None,
) -> None:
    """Train a small language model with several learners on this machine, over a real DHT and HTTP."""
    options = DemoOptions(
        minutes=minutes, num_learners=learners, run_dir=run_dir, chaos=chaos, plain=plain, json=as_json
    )
    raise typer.Exit(run_demo(options))


def run_demo(options: DemoOptions) -> int:
    """Run it and print the summary; returns the exit status. Raises UserError for flags that can't be used."""
    _check(options)
    from rich.console import Console
    from rich.text import Text

    from geo_diloco.cli.demo_director import Director
    from geo_diloco.cli.demo_files import create_demo_files
    from geo_diloco.cli.demo_processes import ChildFailed, Children
    from geo_diloco.cli.demo_summary import print_summary, summarize
    from geo_diloco.cli.demo_view import DemoView, LiveView, PlainView

    files = create_demo_files(options.run_dir)
    console = Console(highlight=False)
    view: DemoView = PlainView(console) if options.plain or not console.is_terminal else LiveView(console)
    with _interruptible() as interruption:
        try:
            with Children(files.logs, interrupted=interruption.asked) as children, view:
                director = Director(options, files, children, view, interruption)
                director.run()
        except ChildFailed as failed:
            _explain(failed)
            return 1
        summary = summarize(files, status=director.last_status, elapsed_s=director.elapsed_s)
    ending = "Interrupted; this is the run so far." if interruption.asked.is_set() else "The run is finished."
    console.print(Text(ending))
    print_summary(console, summary)
    if options.json:
        print(json.dumps(summary.to_json()), flush=True)
    return 0


def _check(options: DemoOptions) -> None:
    if not (math.isfinite(options.minutes) and 0 < options.minutes <= _MINUTES_MAX):
        raise ConfigError(f"--minutes {options.minutes:g}: wanted more than 0 and at most {_MINUTES_MAX}")
    if not 1 <= options.num_learners <= _LEARNERS_MAX:
        raise ConfigError(f"--learners {options.num_learners}: wanted 1 to {_LEARNERS_MAX}")


@contextlib.contextmanager
def _interruptible() -> Iterator[Interruption]:
    interruption = Interruption()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, interruption.on_signal) for number in numbers}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(failed: ChildFailed) -> None:
    lines = "".join(f"    {line}\n" for line in failed.child.last_lines())
    typer.echo(f"{lines}demo: {failed}", err=True)
