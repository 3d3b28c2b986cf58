"""The command line's own learner: the training loop a user would write, on the public API and nothing else.

Worth reading before writing another: it is the script of `examples/01_join_a_run.py` with the manifest's optimizer,
clipping and mixed precision.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from geo_diloco.errors import ModelError
from geo_diloco.manifest import InnerSpec, RunManifest
from geo_diloco.training.learner import Learner


class TrainingPeer(Protocol):
    """What the loop needs of a peer."""

    @property
    def manifest(self) -> RunManifest: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the forward and backward pass; parameters stay float32."""

    def build_model(self) -> nn.Module: ...

    def learner(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Learner: ...

    def data(self) -> Iterable[Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """What a training loop did."""

    num_steps: int
    num_tokens: int
    """Own counts over the learner's life, not only this process."""
    seconds: float
    seconds_inside: float
    """Spent inside `Learner.step`."""
    finish_reason: str


def train(peer: TrainingPeer) -> TrainingSummary:
    """Train until the run is done or the peer leaves."""
    inner = peer.manifest.inner
    model = peer.build_model().to(peer.device)
    optimizer = make_optimizer(model, inner)
    learner = peer.learner(model, optimizer)
    began = time.perf_counter()
    for batch in peer.data():
        batch = batch.to(peer.device)
        with mixed_precision(peer.device, peer.dtype):
            loss = training_loss(model, batch)
        inner_step(model, optimizer, loss, gradient_clip=inner.gradient_clip)
        if learner.step(tokens=batch.numel(), loss=loss):
            break
    return TrainingSummary(
        num_steps=learner.num_steps,
        num_tokens=learner.num_tokens,
        seconds=time.perf_counter() - began,
        seconds_inside=learner.seconds_inside,
        finish_reason=learner.finish_reason,
    )


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, *, gradient_clip: float) -> None:
    """Backward pass, clipping by global norm (0: none), optimizer, gradients set to none."""
    loss.backward()  # type: ignore[no-untyped-call]
    if gradient_clip > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_optimizer(model: nn.Module, inner: InnerSpec) -> torch.optim.AdamW:
    """The manifest's AdamW; weight decay on matrices only (not on norms and biases)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=inner.learning_rate,
        betas=inner.betas,
        fused=trained[0].device.type in ("cpu", "cuda"),
    )


def training_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A model's own `training_loss(batch)` if it has one, else the next-token loss of a causal language model."""
    own = getattr(model, "training_loss", None)
    if callable(own):
        loss = own(batch)
        said = "training_loss(batch)"
    else:
        loss = _hugging_face_loss(model, batch)
        said = "model(input_ids=..., labels=...).loss"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError(f"this model's {said} is no scalar tensor, so `geo-diloco join` can't train it")
    return loss


def _hugging_face_loss(model: nn.Module, batch: Tensor) -> object:
    try:
        return getattr(model(input_ids=batch, labels=batch), "loss", None)
    except TypeError as error:
        raise ModelError(
            "this model can't be trained by `geo-diloco join`: it takes no `input_ids` and `labels` and has no "
            "`training_loss(batch)`; train it from a script with geo_diloco.join"
        ) from error


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocast to `dtype`, or nothing for float32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device_type=device.type, dtype=dtype)
