"""A small vision transformer on scikit-learn's 8 x 8 digits: the model and the data of `simulate train --model vit`.

Nothing else in the package brings a model of its own. This one is here because images ask other things of a run than
text does: a loss and an accuracy of their own, data that is gone through again and again. A token is a patch of 2 x 2
pixels, an image has 16, and a batch holds numbers of patches rather than pixels, so that its size is its tokens.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from geo_diloco.errors import DataError
from geo_diloco.manifest import DataSpec
from geo_diloco.training.models import model_factory

NUM_HELD_OUT = 297
"""Of 1,797 images: nobody trains on them."""
PATCH = 2
NUM_PATCHES = 16
NUM_CLASSES = 10


def digits_missing() -> str:
    """Why there are no digits on this machine, and what to do; empty if there are."""
    if find_spec("sklearn") is not None:
        return ""
    return "scikit-learn, which has the images, is not installed; install it with: pip install scikit-learn"


@cache
def digits(*, held_out: bool) -> tuple[Tensor, Tensor]:
    """Images float32 [n, 8, 8] in [0, 1] and labels int64 [n], split the same way everywhere. Raises DataError."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as exc:
        raise DataError(f"digits: {digits_missing() or exc}") from exc
    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32) / 16.0
    labels = torch.tensor(loaded.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[:NUM_HELD_OUT] if held_out else order[NUM_HELD_OUT:]
    return images[chosen], labels[chosen]


class DigitStream:
    """An endless, repeatable stream of batches from one share of the images: a `training.data.Batches`.

    Every image of the share is visited once per round through it, in an order seeded by (data.seed, share,
    pass_number, round); shares are disjoint. The cursor counts patches.
    """

    def __init__(self, spec: DataSpec, *, share: int, cursor: int = 0, pass_number: int = 0) -> None:
        dealt = np.random.default_rng([spec.seed]).permutation(len(digits(held_out=False)[1]))
        self._images = dealt[share :: spec.num_shares]
        if not len(self._images):
            raise DataError(f"digits: {len(dealt)} images, none in share {share}; lower data.num_shares")
        self._batch_size = spec.batch_size
        self._seed = [spec.seed, share, pass_number]
        self._next = -(-cursor // NUM_PATCHES)
        self._round = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def cursor(self) -> int:
        """Patches of the share consumed so far, the batch given last included."""
        return self._next * NUM_PATCHES

    def next_batch(self) -> Tensor:
        """int64 [batch_size, 16]: image number x 16 + patch."""
        images = torch.tensor([self._next_image() for _ in range(self._batch_size)], dtype=torch.int64)
        return images[:, None] * NUM_PATCHES + torch.arange(NUM_PATCHES)

    def _next_image(self) -> int:
        number, place = divmod(self._next, len(self._images))
        if number != self._round:
            self._order = np.random.default_rng([*self._seed, number]).permutation(self._images)
            self._round = number
        self._next += 1
        return int(self._order[place])


class VisionTransformer(nn.Module):
    """Patches, transformer layers, the mean of all patches decides."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.positions = nn.Parameter(torch.randn(NUM_PATCHES, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 8, 8] -> class scores [n, 10]."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(images), NUM_PATCHES, -1)
        hidden = self.patches(patches) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.classes(self.norm(hidden).mean(dim=1))
        return scores

    def batches(self, spec: DataSpec, *, share: int, cursor: int = 0, pass_number: int = 0) -> DigitStream:
        return DigitStream(spec, share=share, cursor=cursor, pass_number=pass_number)

    def training_loss(self, batch: Tensor) -> Tensor:
        images, labels = digits(held_out=False)
        chosen = batch[:, 0] // NUM_PATCHES
        return nn.functional.cross_entropy(self(images[chosen]), labels[chosen])

    def heldout_loss(self) -> float:
        """Mean nats per image."""
        images, labels = digits(held_out=True)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self._evaluated(images), labels))

    def heldout_accuracy(self) -> float:
        """Share of the held-out images that are told right."""
        images, labels = digits(held_out=True)
        with torch.no_grad():
            return float((self._evaluated(images).argmax(dim=1) == labels).float().mean())

    def _evaluated(self, images: Tensor) -> Tensor:
        was_training = self.training
        self.eval()
        try:
            scores: Tensor = self(images)
        finally:
            self.train(was_training)
        return scores


@model_factory
def vit_on_digits(*, width: int = 32, num_layers: int = 2) -> nn.Module:
    return VisionTransformer(4 * max(1, min(width, 256) // 4), max(1, min(num_layers, 12)))
