"""Held-out loss: what the run is judged by, measured the same way everywhere.

Mean nats per predicted token over fixed sequences that nobody trains on. A factory's model that isn't a causal
language model has a method `training_loss(batch)`, and may bring its own measure as `heldout_loss() -> float`; without
one nothing is measured and the chain carries no records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from geo_diloco.manifest import RunManifest
from geo_diloco.training.data import heldout_batches


def heldout_loss(model: nn.Module, batches: Iterable[Tensor]) -> float:
    """Mean nats per predicted token over int64 [batch, sequence] batches. The model's mode is put back as it was."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        device = next(model.parameters()).device
        with torch.inference_mode():
            for batch in batches:
                predicted = batch.shape[0] * (batch.shape[1] - 1)
                total += float(causal_loss(model, batch.to(device))) * predicted
                count += predicted
    finally:
        model.train(was_training)
    return total / count if count else math.nan


def causal_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean next-token loss of a Hugging Face causal language model, a scalar; auxiliary losses are included."""
    loss = model(input_ids=batch, labels=batch).loss
    assert isinstance(loss, Tensor)
    return loss


def heldout_accuracy(model: nn.Module) -> float | None:
    """Share of the held-out examples that a model with a `heldout_accuracy()` of its own tells right."""
    own = getattr(model, "heldout_accuracy", None)
    return float(own()) if callable(own) else None


class Evaluator:
    """Measures a model against the manifest's held-out sequences. Reads them once, at the first measurement."""

    def __init__(self, manifest: RunManifest, *, data_dir: Path | None = None) -> None:
        self._manifest = manifest
        self._data_dir = data_dir
        self._batches: list[Tensor] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Have the measurement that goes on end at its next batch, with None. From any thread, for good."""
        self._stopped = True

    def measure(self, model: nn.Module) -> float | None:
        """Held-out loss; None if this model has no measure or the loss is not finite. Raises DataError."""
        own = getattr(model, "heldout_loss", None)
        if callable(own):
            loss = float(own())
        elif callable(getattr(model, "training_loss", None)):  # not a causal language model, and no measure of its own
            return None
        else:
            if self._batches is None:
                data, number = self._manifest.data, self._manifest.evaluation.sequences
                self._batches = heldout_batches(data, number, data_dir=self._data_dir)
            loss = heldout_loss(model, self._until_stopped(self._batches))
        return loss if math.isfinite(loss) and not self._stopped else None

    def _until_stopped(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            if self._stopped:
                return
            yield batch
