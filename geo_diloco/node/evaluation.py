"""The evaluator: measures held-out loss of Theta beside the syncer's work, never in its way.

It has a model of its own and a thread of its own at low priority, so a measurement that takes long delays the next
measurement and nothing else. What it can't measure is said once and recorded as no loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor, nn

from geo_diloco.errors import DataError
from geo_diloco.manifest import FragmentId, RunManifest
from geo_diloco.numerics.fragments import named_trainable, scatter_
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import Evaluate
from geo_diloco.protocol.events import Evaluated
from geo_diloco.runtime.driver import Driver, Interpreter, Worker
from geo_diloco.runtime.merger import OuterState
from geo_diloco.training.evaluate import Evaluator

NICENESS = 10


class Evaluation:
    """Interprets `Evaluate`. `model` is its own: nobody else may use it."""

    def __init__(self, manifest: RunManifest, model: nn.Module, *, data_dir: Path | None, log: EventLog) -> None:
        self._model = model
        self._tensors = named_trainable(model)
        self._evaluator = Evaluator(manifest, data_dir=data_dir)
        self._log = log
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="evaluator", initializer=_lower_priority)

    def interpreters(self, driver: Driver, worker: Worker, outer: OuterState) -> Mapping[type, Interpreter]:
        async def evaluate(effect: Evaluate) -> None:
            thetas = await worker.call(_thetas, outer)
            loss = await asyncio.get_running_loop().run_in_executor(self._pool, self._measure, thetas, outer)
            driver.feed(Evaluated(effect.seq, loss))

        return {Evaluate: lambda effect: driver.start(evaluate(effect), name="evaluate")}

    def _measure(self, thetas: list[Tensor], outer: OuterState) -> float | None:
        for fragment, theta in enumerate(thetas):
            scatter_(theta, self._tensors, outer.layout, fragment)
        try:
            return self._evaluator.measure(self._model)
        except Exception as exc:  # the model's code is its author's: what it raises must not end the run
            what = str(exc) if isinstance(exc, DataError) else f"{type(exc).__name__}: {exc}"
            self._log.note("evaluation", f"held-out loss can't be measured: {what}", level="warning")
            return None

    def close(self) -> None:
        """The process can't end before this thread has, whose priority is low: it leaves off where it is."""
        self._evaluator.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _thetas(outer: OuterState) -> list[Tensor]:
    """All fragments as of one moment; the tensors are never written to, so they may be kept."""
    return [outer.theta(FragmentId(p)) for p in range(outer.layout.num_fragments)]


def _lower_priority() -> None:
    """Of this thread alone, where the system can do that."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
