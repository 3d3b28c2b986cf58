"""What a run is measured against, in one process: synchronous DiLoCo, data-parallel training, or each learner alone.

Written apart from the run's own path on purpose: no fragments, no codecs, no fold, only `torch.optim.SGD` on the mean
of the outer gradients (DiLoCo, arXiv 2311.08105, Algorithm 1). Data shares, inner optimizer, learning-rate schedule
and the held-out sequences are the manifest's, so that only the way of synchronising differs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def synchronous_diloco(manifest: RunManifest, num_steps: Sequence[int], *, watch: Watch = _nobody) -> BaselineResult:
    """Learners in lockstep: all do H inner steps, then one outer step on the mean of their outer gradients.

    num_steps: inner steps of each learner. One that has done its own drops out after the outer step in which it ended,
    so unequal learners train on exactly the tokens they are given.
    """
    theta = build_model(manifest.model, with_weights=True)
    eta, mu = manifest.outer.eta, manifest.outer.mu
    outer = torch.optim.SGD(theta.parameters(), lr=eta, momentum=mu, nesterov=mu > 0)
    learners = [_Replica(manifest, [index], steps, copy.deepcopy(theta)) for index, steps in enumerate(num_steps)]
    while active := [learner for learner in learners if learner.steps_left]:
        for learner in active:
            learner.train(manifest.sync.interval_steps)
        replicas = [learner.model.parameters() for learner in active]
        with torch.no_grad():
            for parameter, *own in zip(theta.parameters(), *replicas, strict=True):
                parameter.grad = torch.stack([parameter - each for each in own]).mean(0)
        outer.step()
        for learner in active:
            learner.model.load_state_dict(theta.state_dict())
        watch(sum(each.num_tokens for each in learners), theta)
    return BaselineResult(heldout=_heldout(manifest, theta), num_tokens=sum(each.num_tokens for each in learners))


def data_parallel(
    manifest: RunManifest, num_learners: int, num_steps: int, *, watch: Watch = _nobody
) -> BaselineResult:
    """One model, `num_steps` steps, each on the mean gradient of a batch from every learner's share."""
    together = _Replica(manifest, range(num_learners), num_steps, build_model(manifest.model, with_weights=True))
    while together.steps_left:
        together.train(1)
        watch(together.num_tokens, together.model)
    return BaselineResult(heldout=_heldout(manifest, together.model), num_tokens=together.num_tokens)


def alone(manifest: RunManifest, index: int, num_steps: int) -> BaselineResult:
    """One learner that trains on share `index` and never synchronises."""
    learner = _Replica(manifest, [index], num_steps, build_model(manifest.model, with_weights=True))
    learner.train(num_steps)
    return BaselineResult(heldout=_heldout(manifest, learner.model), num_tokens=learner.num_tokens)


class _Replica:
    """A replica with its inner optimizer and its data: a share each for the learners it stands for."""

    def __init__(self, manifest: RunManifest, indices: Sequence[int], num_steps: int, model: nn.Module) -> None:
        self.model = model
        self.num_tokens = 0
        self._num_steps = num_steps
        self._step = 0
        self._inner = manifest.inner
        self._optimizer = make_optimizer(model, manifest.inner)
        self._streams = [_stream(manifest, model, index) for index in indices]

    @property
    def steps_left(self) -> int:
        return self._num_steps - self._step

    def train(self, num_steps: int) -> None:
        """Up to so many inner steps."""
        for _ in range(min(num_steps, self.steps_left)):
            warm = min(1.0, (self._step + 1) / (self._inner.warmup_steps + 1))
            rate = self._inner.learning_rate * warm * schedule_factor(self._step / self._num_steps, self._inner)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            batches = [stream.next_batch() for stream in self._streams]
            loss = torch.stack([training_loss(self.model, batch) for batch in batches]).mean()
            inner_step(self.model, self._optimizer, loss, gradient_clip=self._inner.gradient_clip)
            self._step += 1
            self.num_tokens += sum(batch.numel() for batch in batches)


def _stream(manifest: RunManifest, model: nn.Module, index: int) -> Batches:
    share, pass_number = index % manifest.data.num_shares, index // manifest.data.num_shares
    return batches_for(model, manifest.data, share=share, pass_number=pass_number)


def _heldout(manifest: RunManifest, model: nn.Module) -> float:
    loss = Evaluator(manifest).measure(model)
    return math.nan if loss is None else loss
