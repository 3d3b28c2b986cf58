"""The model and the data of `04_vision.py`: a small vision transformer on scikit-learn's 8 x 8 digits.

A manifest names it as `vit_digits:build_vit`. That works wherever this folder is on Python's path, as it is when a
script in it is started (or with PYTHONPATH=examples for the command line). A real project installs its own module on
every machine instead. Needs scikit-learn, which comes with the `test` extra.
"""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import geo_diloco

NUM_HELD_OUT = 297
"""Of 1,797 images: nobody trains on them."""
PATCH = 2
NUM_PATCHES = 16


@cache
def digits(*, held_out: bool) -> tuple[Tensor, Tensor]:
    """Images float32 [n, 8, 8] in [0, 1] and labels int64 [n], split the same way on every machine."""
    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32) / 16.0
    labels = torch.tensor(loaded.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[:NUM_HELD_OUT] if held_out else order[NUM_HELD_OUT:]
    return images[chosen], labels[chosen]


class VisionTransformer(nn.Module):
    """Patches of 2 x 2, two transformer layers, the mean of all patches decides."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, width)
        self.positions = nn.Parameter(torch.randn(NUM_PATCHES, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 8, 8] -> class scores [n, 10]."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(images), NUM_PATCHES, -1)
        hidden = self.patches(patches) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.classes(self.norm(hidden).mean(dim=1))
        return scores

    def training_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def heldout_loss(self) -> float:
        """What the syncer records of Theta, since this is no language model: mean nats per image."""
        with torch.no_grad():
            return float(self.training_loss(digits(held_out=True)))


@geo_diloco.model_factory  # only marked functions are called when a manifest names them
def build_vit(*, width: int = 32, num_layers: int = 2) -> nn.Module:
    return VisionTransformer(min(width, 256), min(num_layers, 12))
