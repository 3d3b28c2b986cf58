"""`Learner.step`: the one call between a training script and the run.

The script owns its model, optimizer and loop; the peer's other thread owns sockets, disk and the protocol. They meet
here, at an inner-step boundary: `step` reports what was done, then carries out the orders that have come in meanwhile
(take a sample, adopt a new version, stop). It never waits for the network. Only in lockstep, the deterministic mode
for tests and research, does it wait for the orders that the schedule names.

Orders come from, and reports go to, a `NodePort`; nothing here knows what stands behind it.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from geo_diloco.errors import UserError
from geo_diloco.manifest import InnerSpec, RunManifest
from geo_diloco.numerics.fragments import Layout
from geo_diloco.protocol.schedule import lockstep_duties
from geo_diloco.training.checkpoint import LearnerCheckpoint, capture_state, restore_state
from geo_diloco.training.replica import Replica

LOSS_EVERY_STEPS = 16
"""A loss on an accelerator is read back, which waits for the device, only this often."""
SAVE_SHARE = 0.005
"""Of the time, at most that much goes into copies for checkpoints: a large model is saved less often than asked."""
SAVE_REST_S_MAX = 300.0
"""But that often: one copy may have been held up by something else."""


@dataclass(frozen=True, eq=False, slots=True)
class SampleOrder:
    """Copy fragment minus anchor."""

    fragment: int
    round: int


@dataclass(frozen=True, eq=False, slots=True)
class AdoptOrder:
    """Take a new version into the model. `theta` is handed over: nobody writes to it any more."""

    fragment: int
    version: int
    theta: Tensor
    d_hat: Tensor | None
    """This learner's delta as merged (decoded), if it was a participant."""
    rbar: float


@dataclass(frozen=True, eq=False, slots=True)
class ResetOrder:
    """Take Theta as it is; what the replica carries is dropped."""

    fragment: int
    version: int
    theta: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class FinishOrder:
    """The run is done, or this peer leaves."""

    reason: str


Order = SampleOrder | AdoptOrder | ResetOrder | FinishOrder
Accept = Callable[[Order], bool]
"""Which orders a learner in lockstep waits for."""


class NodePort(Protocol):
    """What the training thread sees of the rest of the peer. Called from the training thread only."""

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1], as of the newest commit."""

    @property
    def resume(self) -> tuple[int, int]:
        """(step, tokens) after which this learner goes on; (0, 0) for a new one."""

    @property
    def failed(self) -> BaseException | None:
        """Why the rest of the peer is gone, if it is."""

    def take_orders(self) -> list[Order]:
        """What has come in since, oldest first. Does not wait."""

    def wait_over(self, limit_s: float) -> None:
        """So long, or until it is finished, left or failed: orders that come meanwhile stay where they are."""

    def wait_order(self, accept: Accept) -> Order | None:
        """The oldest order that is accepted, waiting for it; others stay where they are. None: finished or left."""

    def step_done(self, step: int, tokens: int, step_time_us: int, loss: float | None, cursor: int) -> None: ...

    def sampled(self, order: SampleOrder, delta: Tensor, step: int, tokens: int, cursor: int) -> None: ...

    def adopted(self, order: AdoptOrder | ResetOrder, scale_ppm: int, step: int, tokens: int) -> None: ...

    def save(self, save: int, step: int, tokens: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnerSetup:
    """What a learner starts from."""

    manifest: RunManifest
    layout: Layout
    theta: Sequence[Tensor]
    """Theta per fragment, as of the versions the protocol holds for adopted. Not read where there is a checkpoint."""
    checkpoint: LearnerCheckpoint | None = None
    cursor: Callable[[], int] | None = None
    """Tokens consumed of the allotted share; without it, tokens trained since the start."""
    save_every_s: float = 10.0
    """Seconds between checkpoints, more where their copies cost much (`SAVE_SHARE`); 0: none."""
    sets_learning_rate: bool = True
    """False: the script has a schedule of its own."""
    pace_ms: int = 0
    """An inner step takes at least so long: for benchmarks, in place of the compute that this machine hasn't got."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds; inner steps and the time between checkpoints are measured by it."""


class Learner:
    """One replica in training. Belongs to the thread that runs the training loop; nothing here is thread-safe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, port: NodePort, setup: LearnerSetup) -> None:
        """Puts Theta (or this learner's own checkpoint) into the model and sets the first learning rate.

        Raises LayoutError if the model isn't the run's, ModelError if the checkpoint doesn't fit model and optimizer.
        """
        self.model = model
        self.optimizer = optimizer
        self.replica = Replica(model, setup.layout)
        self.num_steps, self.num_tokens = port.resume
        self.finished = False
        self.finish_reason = ""
        self.seconds_inside = 0.0
        """Time spent inside `step`, lockstep's waiting included."""
        self.seconds_waited = 0.0
        """Of that, time spent waiting in lockstep."""
        self._port = port
        self._setup = setup
        self._schedule = _Schedule(setup.manifest, optimizer)
        self._loss: float | None = None
        self._first_tokens = self.num_tokens
        self._first_step = self.num_steps
        self._num_saves = 0
        if setup.checkpoint is None:
            for fragment, theta in enumerate(setup.theta):
                self.replica.reset(fragment, theta)
            self._warm_from: int | None = self.num_steps
        else:
            self._warm_from = restore_state(setup.checkpoint, self.model, self.optimizer, self.replica)
            self._num_saves = setup.checkpoint.save
        self._set_learning_rate()
        self._left_at = setup.clock()
        self._saved_at = self._left_at
        self._save_rest_s = 0.0
        """From the last checkpoint to the next, by what the last one cost."""

    def step(self, tokens: int, loss: Tensor | float | None = None) -> bool:
        """Report an inner step (forward, backward, optimizer) that is complete. True when training should end.

        tokens: what this step trained on, at least 1; weights the learner's contribution.
        loss: mean nats per token of this step, for people to watch.
        Raises whatever ended the rest of the peer, if it failed; UserError if it is called with something else.
        """
        self._keep_pace()
        boundary = self.boundary(tokens, loss)
        order: Order | None = None
        while True:
            try:
                accept = boundary.send(order)
            except StopIteration as over:
                return bool(over.value)
            began = self._setup.clock()
            order = self._port.wait_order(accept)
            self.seconds_waited += self._setup.clock() - began

    def boundary(self, tokens: int, loss: Tensor | float | None) -> Generator[Accept, Order | None, bool]:
        """`step` without the waiting: yields what it waits for and is sent an order of that kind, or None once the run
        is finished or left. Only in lockstep does it yield. For whoever has many learners in one thread."""
        entered = self._setup.clock()
        if self.finished:
            return True
        tokens = _whole(tokens)
        if self._port.failed is not None:
            raise self._port.failed
        self._read_loss(loss)
        self.num_steps += 1
        self.num_tokens += tokens
        step_time_us = round((entered - self._left_at) * 1e6)
        self._port.step_done(self.num_steps, self.num_tokens, step_time_us, self._loss, self.cursor)
        if self._setup.manifest.sync.lockstep:
            yield from self._do_duties()
        else:
            self.carry_out_orders()
        self._save_if_due(entered)
        self._set_learning_rate()
        self._left_at = self._setup.clock()
        self.seconds_inside += self._left_at - entered
        return self.finished

    def _keep_pace(self) -> None:
        """A step that was too quick goes on for a while. Nothing is held meanwhile, and leaving ends it; orders wait
        for the boundary, as they would in a step that computes for so long."""
        left_s = self._left_at + self._setup.pace_ms / 1000 - self._setup.clock()
        if self._setup.pace_ms > 0 and left_s > 0 and not self.finished:
            self._port.wait_over(left_s)

    @property
    def cursor(self) -> int:
        if self._setup.cursor is not None:
            return self._setup.cursor()
        return self.num_tokens - self._first_tokens

    def carry_out_orders(self) -> None:
        """Do what the node has asked for since. `step` does it; besides, it is for the moment before a last save: a
        learner that comes back to a finished run has versions to take and no step to take them in."""
        for order in self._port.take_orders():
            self._carry_out(order)

    def save(self) -> None:
        """Copy model, optimizer and anchors as they are now, and hand the copy over to be written to disk."""
        self._num_saves += 1
        tensors, extra = capture_state(self.model, self.optimizer, self.replica, warm_from=self._warm_from)
        extra |= {"step": self.num_steps, "tokens": self.num_tokens, "cursor": self.cursor, "save": self._num_saves}
        self._port.save(self._num_saves, self.num_steps, self.num_tokens, tensors, extra)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, SampleOrder):
            delta = self.replica.sample(order.fragment)
            self._port.sampled(order, delta, self.num_steps, self.num_tokens, self.cursor)
        elif isinstance(order, AdoptOrder):
            sync = self._setup.manifest.sync
            scale_ppm = self.replica.adopt(
                order.fragment, order.theta, order.d_hat, kappa=sync.kappa, rbar=order.rbar, cap=sync.carry_cap
            )
            self._port.adopted(order, scale_ppm, self.num_steps, self.num_tokens)
        elif isinstance(order, ResetOrder):
            self.replica.reset(order.fragment, order.theta)
            self._port.adopted(order, 0, self.num_steps, self.num_tokens)
        else:
            self.finished = True
            self.finish_reason = order.reason

    def _do_duties(self) -> Generator[Accept, Order | None, None]:
        for duty in lockstep_duties(self.num_steps, self._setup.manifest.sync):
            wanted = SampleOrder if duty.kind == "sample" else AdoptOrder
            done = False
            while not done:
                order = yield _accepts(wanted, duty.fragment)
                if order is None:
                    if self._port.failed is not None:
                        raise self._port.failed
                    self._carry_out(FinishOrder("the run is done"))
                    return
                self._carry_out(order)
                if self.finished:
                    return
                done = isinstance(order, wanted)

    def _read_loss(self, loss: Tensor | float | None) -> None:
        if isinstance(loss, Tensor):
            if loss.device.type != "cpu" and (self.num_steps - self._first_step) % LOSS_EVERY_STEPS != 0:
                return
            loss = loss.detach()
        if loss is None:
            return
        try:
            value = float(loss)
        except (TypeError, ValueError, RuntimeError) as error:
            said = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:60]
            raise UserError(f"step(loss=...) takes one number, the mean of this step, not {said}") from error
        self._loss = value if math.isfinite(value) else None

    def _save_if_due(self, now: float) -> None:
        every = self._setup.save_every_s
        if every > 0 and now - self._saved_at >= max(every, self._save_rest_s) and not self.finished:
            began = self._setup.clock()
            self.save()
            self._save_rest_s = min(SAVE_REST_S_MAX, (self._setup.clock() - began) / SAVE_SHARE)
            self._saved_at = now

    def _set_learning_rate(self) -> None:
        if self._warm_from is not None and self.num_steps - self._warm_from >= self._schedule.warmup_steps:
            self._warm_from = None
        if self._setup.sets_learning_rate:
            warm_steps = None if self._warm_from is None else self.num_steps - self._warm_from
            self._schedule.apply(self._port.progress, own_tokens=self.num_tokens, warm_steps=warm_steps)


def check_given(model: object, optimizer: object) -> None:
    """Raises UserError if a script handed over something else than a model and the optimizer that trains it."""
    if not isinstance(model, nn.Module):
        raise UserError(f"peer.learner(model, optimizer): the model is a {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise UserError(f"peer.learner(model, optimizer): the optimizer is a {kind}, not a torch.optim.Optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(
            "peer.learner(model, optimizer): the optimizer trains none of this model's parameters; make it from "
            "model.parameters(), after the model is on its device"
        )


def _whole(tokens: int) -> int:
    """Whatever counts as a whole number (NumPy's too), as an int."""
    try:
        number = operator.index(tokens)
    except TypeError:
        number = 0
    if number < 1:
        said = repr(tokens)[:60]
        raise UserError(f"step(tokens={said}): an inner step trains on at least one token; pass batch.numel()")
    return number


class _Schedule:
    """Sets the optimizer's learning rates: each group's own rate at construction times the schedule's factor."""

    def __init__(self, manifest: RunManifest, optimizer: torch.optim.Optimizer) -> None:
        self.warmup_steps = manifest.inner.warmup_steps
        self._inner = manifest.inner
        self._token_budget = manifest.stop.tokens
        self._optimizer = optimizer
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._last: float | None = None

    def apply(self, progress: float, *, own_tokens: int, warm_steps: int | None) -> None:
        if self._inner.schedule_by == "own" and self._token_budget > 0:
            progress = own_tokens / self._token_budget
        factor = schedule_factor(progress, self._inner)
        if warm_steps is not None:
            factor *= min(1.0, (warm_steps + 1) / (self.warmup_steps + 1))
        if factor != self._last:
            self._last = factor
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor


def schedule_factor(progress: float, inner: InnerSpec) -> float:
    """Learning rate as a share of the first, at this share of the run: from 1 to `final_share`. Without warm-up."""
    progress = min(max(progress, 0.0), 1.0)
    if inner.schedule == "constant":
        return 1.0
    left = (1.0 + math.cos(math.pi * progress)) / 2.0 if inner.schedule == "cosine" else 1.0 - progress
    return inner.final_share + (1.0 - inner.final_share) * left


def _accepts(wanted: type[SampleOrder] | type[AdoptOrder], fragment: int) -> Accept:
    """In lockstep: the order the duty names, or one that no schedule names."""

    def accept(order: Order) -> bool:
        if isinstance(order, wanted):
            return order.fragment == fragment
        return isinstance(order, ResetOrder | FinishOrder)

    return accept
