"""A learner's training thread in virtual time: the production `Learner` between real inner steps.

An inner step takes its time on the clock and none of ours; at its end the batch is drawn, the gradient taken and the
boundary begun. In lockstep a boundary waits for orders, and goes on when they come.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from geo_diloco.protocol.effects import StartTraining
from geo_diloco.sim.train.fleet import Machine
from geo_diloco.sim.train.world import HOP_MS, World
from geo_diloco.training.checkpoint import LearnerCheckpoint
from geo_diloco.training.data import Batches, batches_for
from geo_diloco.training.learner import Accept, FinishOrder, Learner, LearnerSetup, Order
from geo_diloco.training.loop import inner_step, make_optimizer, training_loss
from geo_diloco.training.reports import Report, Reporter

JITTER = 0.05
"""An inner step takes its machine's time, give or take this share of it."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a process has for its training thread."""

    model: nn.Module
    """Of the run's layout; copied."""
    theta: list[Tensor]
    checkpoint: LearnerCheckpoint | None
    machine: Machine
    save_every_s: float
    """0: none."""
    receive: Callable[[Report], None]
    """Called a thread's hop later, in order."""
    progress: Callable[[], float]


class Training(Reporter):
    """A `training.learner.NodePort` and the loop above it. Stops for good when its process dies."""

    failed: BaseException | None = None

    def __init__(self, world: World, start: Start) -> None:
        self._world = world
        self._start = start
        self._orders: list[Order] = []
        self._is_admitted = False
        self._is_over = False
        self._is_stopped = False
        self._frozen_at: int | None = None
        self._ends_at: int | None = None
        """The inner step that is under way."""
        self._stream: Batches | None = None
        self._learner: Learner | None = None
        self._model = copy.deepcopy(start.model)
        self._boundary: Generator[Accept, Order | None, bool] | None = None
        self._awaited: Accept | None = None
        self._resume = (0, 0)

    # ---- the process

    def begin(self, effect: StartTraining) -> None:
        """Admitted. May come again, with another share of the data."""
        data = self._world.manifest.data
        own = replace(data, batch_size=self._start.machine.batch_size or data.batch_size)
        self._stream = batches_for(
            self._model, own, share=effect.share, cursor=effect.cursor, pass_number=effect.pass_number
        )
        if self._is_admitted:
            return
        self._is_admitted = True
        checkpoint = self._start.checkpoint
        self._resume = (effect.resume_step, 0 if checkpoint is None else checkpoint.tokens)
        # Machines don't start at the same moment, and so don't end their steps at the same moment.
        self._world.clock.after(self._world.clock.between((0, self._start.machine.step_ms)), self._begin_training)

    def _begin_training(self) -> None:
        if self._is_stopped:
            return
        manifest, checkpoint = self._world.manifest, self._start.checkpoint
        setup = LearnerSetup(
            manifest=manifest,
            layout=self._world.layout,
            theta=self._start.theta,
            checkpoint=checkpoint,
            cursor=self._cursor,
            save_every_s=self._start.save_every_s,
            clock=lambda: self._world.clock.now / 1000,
        )
        self._learner = Learner(self._model, make_optimizer(self._model, manifest.inner), self, setup)
        if self._start.save_every_s > 0 and checkpoint is None:
            self._learner.save()  # from here on there is always a checkpoint to come back to
        self._begin_step()

    def post(self, order: Order) -> None:
        self._orders.append(order)
        self._go_on()

    def finish(self, reason: str) -> None:
        """What was ordered before is still carried out; nothing is waited for any more."""
        self._is_over = True
        self.post(FinishOrder(reason))

    def stop(self) -> None:
        self._is_stopped = True

    def freeze(self) -> None:
        self._frozen_at = self._world.clock.now

    def thaw(self) -> None:
        """What is left of the inner step still has to be done."""
        frozen_at, self._frozen_at = self._frozen_at, None
        if frozen_at is not None and self._ends_at is not None:
            self._end_at(self._ends_at + self._world.clock.now - frozen_at)

    @property
    def is_at_rest(self) -> bool:
        """Between two inner steps, with nothing to wait for."""
        return self._boundary is None

    @property
    def num_steps(self) -> int:
        return 0 if self._learner is None else self._learner.num_steps

    # ---- inner steps

    def _cursor(self) -> int:
        assert self._stream is not None
        return self._stream.cursor

    def _begin_step(self) -> None:
        steps_max = self._world.steps_max
        if steps_max is not None and self.num_steps >= steps_max:
            return
        step_ms = self._start.machine.step_ms
        jitter_ms = int(JITTER * step_ms)
        if self._frozen_at is not None:
            self._frozen_at = self._world.clock.now
        self._end_at(self._world.clock.now + step_ms + self._world.clock.between((-jitter_ms, jitter_ms)))

    def _end_at(self, when: int) -> None:
        self._ends_at = when
        self._world.clock.at(when, lambda: self._step_ends(when))

    def _step_ends(self, when: int) -> None:
        learner, stream = self._learner, self._stream
        if self._is_stopped or self._world.is_over or self._frozen_at is not None or when != self._ends_at:
            return
        self._ends_at = None
        assert learner is not None and stream is not None
        batch = stream.next_batch()
        loss = training_loss(self._model, batch)
        inner_step(self._model, learner.optimizer, loss, gradient_clip=self._world.manifest.inner.gradient_clip)
        self._world.trained(batch.numel())
        self._boundary = learner.boundary(batch.numel(), loss)
        self._send(None)

    def _send(self, order: Order | None) -> None:
        """Drive the boundary to where it waits, or to its end and into the next inner step."""
        assert self._boundary is not None and self._learner is not None
        try:
            self._awaited = self._boundary.send(order)
        except StopIteration:
            self._boundary = self._awaited = None
            if not self._learner.finished:
                self._begin_step()
            return
        self._go_on()

    def _go_on(self) -> None:
        """A boundary that waits takes the oldest order that it accepts, or learns that there will be none."""
        if self._awaited is None or self._is_stopped:
            return
        order = next((each for each in self._orders if self._awaited(each)), None)
        if order is not None:
            self._orders.remove(order)
            self._send(order)
        elif self._is_over:
            self._send(None)

    # ---- NodePort

    @property
    def progress(self) -> float:
        return self._start.progress()

    @property
    def resume(self) -> tuple[int, int]:
        return self._resume

    def take_orders(self) -> list[Order]:
        taken, self._orders = self._orders, []
        return taken

    def wait_over(self, limit_s: float) -> None:
        raise AssertionError("a step takes as long as the clock says")

    def wait_order(self, accept: Accept) -> Order | None:
        raise AssertionError("a boundary is driven here, it never waits")

    def _report(self, report: Report) -> None:
        self._world.clock.after(HOP_MS, lambda: self._start.receive(report))
