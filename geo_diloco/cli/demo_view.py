"""How a demo looks while it runs: a live view for a terminal, a line every few seconds for everything else.

Both show the same `Moment` and know nothing of processes; what they draw comes from the founder's status alone.
Text from peers goes through `rich.text.Text`, so it can't carry markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from geo_diloco.cli.demo_status import RunStatus

_BARS = "▁▂▃▄▅▆▇█"
_BARS_ASCII = "_.-=+*%#"
_ROUNDS_SHOWN = 6
_LEARNERS_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One frame."""

    phase: str
    """What the demo is doing, in words."""
    elapsed_s: float
    minutes: float
    """The stop rule."""
    num_learners: int
    status: RunStatus | None = None
    failure: str = ""
    """Why there is no fresh status, if there isn't."""


class DemoView(Protocol):
    """What `demo.py` draws on. A context manager: entered before the first `show`."""

    def __enter__(self) -> DemoView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def show(self, moment: Moment) -> None: ...

    def say(self, text: str) -> None:
        """A line that stays."""


class LiveView:
    """Redraws in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, moment: Moment) -> None:
        self._live.update(frame(moment, ascii_only=self._console.options.ascii_only), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(Text(text))


class PlainView:
    """A line whenever `interval_s` have passed or the phase changes."""

    def __init__(
        self, console: Console, *, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._interval_s = interval_s
        self._clock = clock
        self._last_at: float | None = None
        self._phase = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        return None

    def show(self, moment: Moment) -> None:
        now = self._clock()
        due = self._last_at is None or now - self._last_at >= self._interval_s
        if not due and moment.phase == self._phase:
            return
        self._last_at, self._phase = now, moment.phase
        self.say(plain_line(moment))

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def plain_line(moment: Moment) -> str:
    """The moment in one line."""
    start = f"{moment.elapsed_s:5.0f} s  {moment.phase}"
    status = moment.status
    if status is None:
        return start + (f"  (no status: {moment.failure})" if moment.failure else "")
    connected = [learner for learner in status.learners if learner.connected]
    rate = sum(learner.tokens_per_s for learner in connected)
    line = (
        f"{start}  learners {len(connected)}/{moment.num_learners}  seq {status.seq}  commits {status.commits}"
        f"  tokens {count(status.tokens_total)}  {count(rate)} tokens/s  held-out {_loss(_last_loss(status))}"
        f"  up {size(status.bytes_in)}  down {size(status.bytes_out)}"
    )
    if status.rounds:
        last = status.rounds[-1]
        line += (
            f"  round {last.round} fragment {last.fragment}: {last.participants}/{last.live}"
            f" quorum {last.quorum_wait_ms} ms grace {last.grace_ms} ms"
        )
    return line


def frame(moment: Moment, *, ascii_only: bool = False) -> RenderableType:
    """The whole live view."""
    share = min(1.0, moment.status.progress) if moment.status else 0.0
    facts = f"  {moment.phase}  {moment.elapsed_s:.0f} s  {share:.0%} of {moment.minutes:g} min"
    title = Text.assemble(("geo_diloco demo", "bold"), facts)
    if moment.failure:
        title.append(f"  (no fresh status: {moment.failure})", style="yellow")
    if moment.status is None:
        return Group(title)
    parts: list[RenderableType] = [title, _learners_table(moment.status), _run_panel(moment.status, ascii_only)]
    return Group(*parts)


def _learners_table(status: RunStatus) -> Table:
    table = Table(title="Learners", title_justify="left", expand=True)
    table.add_column("learner", no_wrap=True)
    for name in ("steps", "tokens", "tokens/s", "ms/step", "local loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("doing", ratio=1, no_wrap=True, overflow="ellipsis")
    for learner in status.learners[:_LEARNERS_SHOWN]:
        table.add_row(
            Text(f"{learner.peer[:8]}"),
            f"{learner.step:,}",
            count(learner.tokens),
            count(learner.tokens_per_s),
            f"{learner.step_time_ms:.0f}",
            _loss(learner.loss),
            Text(learner.doing if learner.connected else "away"),
            style="" if learner.connected else "dim",
        )
    if len(status.learners) > _LEARNERS_SHOWN:
        table.caption = f"and {len(status.learners) - _LEARNERS_SHOWN} more"
    return table


def _run_panel(status: RunStatus, ascii_only: bool) -> Panel:
    losses = [loss for _, loss, _ in status.heldout]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    facts.add_row("chain", f"seq {status.seq}   term {status.term}   commits {status.commits}")
    facts.add_row("tokens merged", count(status.tokens_total))
    facts.add_row(
        "held-out loss of Theta",
        Text(f"{_loss(losses[-1] if losses else None)} nats/token  {sparkline(losses, ascii_only=ascii_only)}"),
    )
    facts.add_row(
        "bytes",
        f"up {size(status.bytes_in)} ({status.bytes_per_param_up:.2f} per parameter)   "
        f"down {size(status.bytes_out)} ({status.bytes_per_param_down:.2f} per parameter)",
    )
    for fragment, reason in status.waiting[:3]:
        facts.add_row("waiting", Text(f"fragment {fragment}: {reason}"))
    return Panel(Group(facts, _rounds_table(status)), title="Run", title_align="left")


def _rounds_table(status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("round", "fragment", "version", "merged", "quorum wait", "grace"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("closed because", no_wrap=True, overflow="ellipsis")
    for last in reversed(status.rounds[-_ROUNDS_SHOWN:]):
        table.add_row(
            str(last.round),
            str(last.fragment),
            str(last.version),
            f"{last.participants} of {last.live}",
            f"{last.quorum_wait_ms} ms",
            f"{last.grace_ms} ms",
            Text(last.reason),
        )
    return table


def sparkline(values: Sequence[float], *, width: int = 40, ascii_only: bool = False) -> str:
    """The last `width` values as bars, lowest to highest; empty without values."""
    bars = _BARS_ASCII if ascii_only else _BARS
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high <= low:
        return bars[0] * len(shown)
    return "".join(bars[round((value - low) / (high - low) * (len(bars) - 1))] for value in shown)


def count(number: float) -> str:
    """1234567 -> 1.23M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}" if number < 1000 * limit else f"{number / limit:.0f}{unit}"
    return f"{number:.0f}"


def size(num_bytes: float) -> str:
    """1234567 -> 1.2 MB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _last_loss(status: RunStatus) -> float | None:
    return status.heldout[-1][1] if status.heldout else None


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"
