"""What a training thread tells its core: the reporting half of a `NodePort`, whatever carries the reports.

Apart from the carriers because there are several (a mailbox between threads, a simulator's clock), and what a report
says must not depend on how it travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from geo_diloco.manifest import FragmentId, Version
from geo_diloco.protocol.events import Adopted, Event, SampleTaken, Saved, StepDone
from geo_diloco.training.learner import AdoptOrder, ResetOrder, SampleOrder


@dataclass(frozen=True, eq=False)
class Report:
    """An event for the core, with what belongs to it and is not for the core."""

    event: Event
    delta: Tensor | None = None
    tensors: dict[str, Tensor] | None = None
    extra: dict[str, Any] | None = None


class Reporter:
    """Turns what a `Learner` says into reports, in order. Called from the training thread only."""

    def _report(self, report: Report) -> None:
        """Carry it to the core. Does not wait."""
        raise NotImplementedError

    def step_done(self, step: int, tokens: int, step_time_us: int, loss: float | None, cursor: int) -> None:
        self._report(Report(StepDone(step, tokens, step_time_us, loss, cursor)))

    def sampled(self, order: SampleOrder, delta: Tensor, step: int, tokens: int, cursor: int) -> None:
        event = SampleTaken(FragmentId(order.fragment), order.round, step, tokens, cursor)
        self._report(Report(event, delta=delta))

    def adopted(self, order: AdoptOrder | ResetOrder, scale_ppm: int, step: int, tokens: int) -> None:
        event = Adopted(FragmentId(order.fragment), Version(order.version), step, tokens, scale_ppm)
        self._report(Report(event))

    def save(self, save: int, step: int, tokens: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        self._report(Report(Saved(save, step, tokens), tensors=tensors, extra=extra))
