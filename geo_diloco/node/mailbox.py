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
from typing import Any

from torch import Tensor

from geo_diloco.protocol.events import StepDone
from geo_diloco.training.learner import FinishOrder, Order
from geo_diloco.training.reports import Report, Reporter

REPORTS_MAX = 256
"""Reports that may gather before steps are folded."""


class Mailbox(Reporter):
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

    def wait_over(self, limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, limit_s)

    def wait_order(self, accept: Callable[[Order], bool]) -> Order | None:
        with self._changed:
            while True:
                for index, order in enumerate(self._orders):
                    if accept(order):
                        return self._orders.pop(index)
                if self._is_over:
                    return None
                self._changed.wait()

    def save(self, save: int, step: int, tokens: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        self.last_save = save
        super().save(save, step, tokens, tensors, extra)

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
