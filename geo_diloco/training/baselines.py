"""What a run is measured against, in one process: synchronous DiLoCo, data-parallel training, or each learner alone.

Written apart from the run's own path on purpose: no fragments, no codecs, no fold, only `torch.optim.SGD` on the mean
of the outer gradients (DiLoCo, arXiv 2311.08105, Algorithm 1). Data shares, inner optimizer, learning-rate schedule
and the held-out sequences are the manifest's, so that only the way of synchronising differs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import nn

from geo_diloco.manifest import RunManifest
from geo_diloco.training.data import Batches, batches_for
from geo_diloco.training.evaluate import Evaluator
from geo_diloco.training.learner import schedule_factor
from geo_diloco.training.loop import inner_step, make_optimizer, training_loss
from geo_diloco.training.models import build_model

Watch = Callable[[int, nn.Module], None]
"""Told of (tokens so far, over all learners; the model as it stands) after each synchronisation. Must not change it."""


def _nobody(num_tokens: int, model: nn.Module) -> None:
    """Nobody watches."""


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """Held-out loss in mean nats per token; tokens over all learners."""

    heldout: float
    num_tokens: int


def synchronous_diloco(
    manifest: RunManifest, num_steps: Sequence[int], *, begins: Sequence[int] = (), watch: Watch = _nobody
) -> BaselineResult:
    """Learners in lockstep: all do H inner steps, then one outer step on the mean of their outer gradients.

    num_steps: inner steps of each learner. One that has done its own drops out after the outer step in which it ended,
    so unequal learners train on exactly the tokens they are given. `begins`: how many inner steps the first has done
    when each comes, whole rounds; without it all are there from the start.
    """
    theta = build_model(manifest.model, with_weights=True)
    eta, mu = manifest.outer.eta, manifest.outer.mu
    outer = torch.optim.SGD(theta.parameters(), lr=eta, momentum=mu, nesterov=mu > 0)
    learners = [
        _Replica(manifest, [index], steps, copy.deepcopy(theta), begun=begun)
        for index, (steps, begun) in enumerate(zip(num_steps, begins or [0] * len(num_steps), strict=True))
    ]
    steps_done = 0
    while active := [learner for learner in learners if learner.steps_left and learner.begun <= steps_done]:
        for learner in active:
            learner.train(manifest.sync.interval_steps)
        steps_done += manifest.sync.interval_steps
        replicas = [learner.model.parameters() for learner in active]
        with torch.no_grad():
            for parameter, *own in zip(theta.parameters(), *replicas, strict=True):
                parameter.grad = torch.stack([parameter - each for each in own]).mean(0)
        outer.step()
        for learner in learners:
            learner.model.load_state_dict(theta.state_dict())
        watch(sum(each.num_tokens for each in learners), theta)
    return BaselineResult(heldout=_heldout(manifest, theta), num_tokens=sum(each.num_tokens for each in learners))


def data_parallel(
    manifest: RunManifest, num_learners: int, num_steps: int, *, watch: Watch = _nobody
) -> BaselineResult:
    """One model, `num_steps` steps, each on the mean gradient of a batch from every learner's share."""
    return elastic_data_parallel(
        manifest, repeat(range(num_learners), num_steps), num_learners * num_steps, watch=watch
    )


def elastic_data_parallel(
    manifest: RunManifest, steps: Iterable[Sequence[int]], num_batches: int, *, watch: Watch = _nobody
) -> BaselineResult:
    """One model; `steps` says whose batches each step has the mean gradient of, `num_batches` how many there are in all
    steps together: the learning rate follows their share, so a step of few learners counts as little as it brings."""
    together = _Replica(manifest, (), num_batches, build_model(manifest.model, with_weights=True))
    for learners in steps:
        together.step(learners)
        watch(together.num_tokens, together.model)
    return BaselineResult(heldout=_heldout(manifest, together.model), num_tokens=together.num_tokens)


def alone(manifest: RunManifest, index: int, num_steps: int) -> BaselineResult:
    """One learner that trains on share `index` and never synchronises."""
    learner = _Replica(manifest, [index], num_steps, build_model(manifest.model, with_weights=True))
    learner.train(num_steps)
    return BaselineResult(heldout=_heldout(manifest, learner.model), num_tokens=learner.num_tokens)


class _Replica:
    """A replica with its inner optimizer and its data: a share each for the learners it stands for."""

    def __init__(
        self, manifest: RunManifest, indices: Sequence[int], num_batches: int, model: nn.Module, *, begun: int = 0
    ) -> None:
        """`num_batches`: that it will train on; so many of others count as `begun` in its learning rate."""
        self.model = model
        self.num_tokens = 0
        self.begun = begun
        self._manifest = manifest
        self._indices = indices
        self._num_batches = num_batches
        self._trained = 0
        self._steps = 0
        self._optimizer = make_optimizer(model, manifest.inner)
        self._streams: dict[int, Batches] = {}

    @property
    def steps_left(self) -> int:
        """Where each step has one batch."""
        return self._num_batches - self._trained

    def train(self, num_steps: int) -> None:
        """Up to so many inner steps."""
        for _ in range(min(num_steps, self.steps_left)):
            self.step(self._indices)

    def step(self, indices: Sequence[int]) -> None:
        """One inner step, on a batch of each of these."""
        inner = self._manifest.inner
        warm = min(1.0, (self._steps + 1) / (inner.warmup_steps + 1))
        progress = (self.begun + self._trained) / (self.begun + self._num_batches)
        for group in self._optimizer.param_groups:
            group["lr"] = inner.learning_rate * warm * schedule_factor(progress, inner)
        batches = [self._stream(index).next_batch() for index in indices]
        loss = torch.stack([training_loss(self.model, batch) for batch in batches]).mean()
        inner_step(self.model, self._optimizer, loss, gradient_clip=inner.gradient_clip)
        self._steps += 1
        self._trained += len(batches)
        self.num_tokens += sum(batch.numel() for batch in batches)

    def _stream(self, index: int) -> Batches:
        if index not in self._streams:
            num_shares = self._manifest.data.num_shares
            share, pass_number = index % num_shares, index // num_shares
            self._streams[index] = batches_for(self.model, self._manifest.data, share=share, pass_number=pass_number)
        return self._streams[index]


def _heldout(manifest: RunManifest, model: nn.Module) -> float:
    loss = Evaluator(manifest).measure(model)
    return math.nan if loss is None else loss
