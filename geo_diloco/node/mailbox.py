"""Where the training thread and the node thread meet.

Orders go one way, reports the other; neither side ever waits for the other (lockstep excepted, where waiting is the
point). Reports wake the loop once for as many as have gathered. If the loop should be busy for long, consecutive
reports of inner steps are folded into the newest: counts are cumulative, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from geo_diloco.manifest import FragmentId, Version
from geo_diloco.protocol.events import Adopted, Event, SampleTaken, Saved, StepDone
from geo_diloco.training.learner import AdoptOrder, FinishOrder, Order, ResetOrder, SampleOrder

REPORTS_MAX = 256
"""Reports that may gather before steps are folded."""


@dataclass(frozen=True, eq=False)
class Report:
    """An event for the core, with what belongs to it and is not for the core."""

    event: Event
    delta: Tensor | None = None
    tensors: dict[str, Tensor] | None = None
    extra: dict[str, Any] | None = None


class Mailbox:
    """A `training.learner.NodePort`. `post`, `finish`, `fail` and `set_*` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Report], None]) -> None:
        self._loop = loop
        self._receive = receive
        self._reports: deque[Report] = deque()
        self._scheduled = False
        self._reports_lock = threading.Lock()
        self._orders: list[Order] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._failed: BaseException | None = None
        self._progress = 0.0
        self._resume = (0, 0)
        self.last_save = 0
        """Number of the newest checkpoint that was handed over."""

    # ---- node thread

    def post(self, order: Order) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()

    def finish(self, reason: str) -> None:
        """Orders that came before are still carried out; nothing is waited for any more."""
        with self._changed:
            self._is_over = True
            self._orders.append(FinishOrder(reason))
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failed = failure
            self._is_over = True
            self._changed.notify_all()

    def set_progress(self, progress: float) -> None:
        self._progress = progress

    def set_resume(self, step: int, tokens: int) -> None:
        self._resume = (step, tokens)

    def _drain(self) -> None:
        while True:
            with self._reports_lock:
                if not self._reports:
                    self._scheduled = False
                    return
                report = self._reports.popleft()
            self._receive(report)

    # ---- training thread: NodePort

    @property
    def progress(self) -> float:
        return self._progress

    @property
    def resume(self) -> tuple[int, int]:
        return self._resume

    @property
    def failed(self) -> BaseException | None:
        return self._failed

    def take_orders(self) -> list[Order]:
        if not self._orders:
            return []
        with self._changed:
            taken, self._orders = self._orders, []
        return taken

    def wait_order(self, accept: Callable[[Order], bool]) -> Order | None:
        with self._changed:
            while True:
                for index, order in enumerate(self._orders):
                    if accept(order):
                        return self._orders.pop(index)
                if self._is_over:
                    return None
                self._changed.wait()

    def step_done(self, step: int, tokens: int, step_time_us: int, loss: float | None, cursor: int) -> None:
        self._report(Report(StepDone(step, tokens, step_time_us, loss, cursor)))

    def sampled(self, order: SampleOrder, delta: Tensor, step: int, tokens: int, cursor: int) -> None:
        event = SampleTaken(FragmentId(order.fragment), order.round, step, tokens, cursor)
        self._report(Report(event, delta=delta))

    def adopted(self, order: AdoptOrder | ResetOrder, scale_ppm: int, step: int, tokens: int) -> None:
        event = Adopted(FragmentId(order.fragment), Version(order.version), step, tokens, scale_ppm)
        self._report(Report(event))

    def save(self, save: int, step: int, tokens: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        self.last_save = save
        self._report(Report(Saved(save, step, tokens), tensors=tensors, extra=extra))

    def _report(self, report: Report) -> None:
        with self._reports_lock:
            newest = self._reports[-1] if len(self._reports) >= REPORTS_MAX else None
            if newest is not None and isinstance(newest.event, StepDone) and isinstance(report.event, StepDone):
                self._reports[-1] = report
            else:
                self._reports.append(report)
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            # The loop is closed: this peer has left, and what happens after leaving is nobody's business.
            return
