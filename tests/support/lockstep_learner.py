"""A learner for tests that compare a run with a reference: its own loop on the public API, data from a seed.

    python -m tests.support.lockstep_learner INVITE RUN_DIR INDEX

Learner INDEX trains on `batch(INDEX, step)`, so a reference in another process can see the same numbers.
"""

from __future__ import annotations

import sys
from itertools import count

import torch
from torch import Tensor, nn

import geo_diloco

DIMENSIONS = 12
BATCH = 16
LEARNING_RATE = 3e-3


class TinyNet(nn.Module):
    """Big enough to have four fragments, small enough to compare every weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIMENSIONS, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 24)
        self.last = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(self.second(hidden)) + hidden
        hidden = torch.tanh(self.third(hidden)) + hidden
        out: Tensor = self.last(hidden)
        return out


@geo_diloco.model_factory
def tiny_net() -> nn.Module:
    """The manifest's `factory`."""
    return TinyNet()


def batch(index: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a learner's inner step (from 1); learners see different inputs, the same function."""
    generator = torch.Generator().manual_seed(1_000_003 * index + step)
    x = torch.randn(BATCH, DIMENSIONS, generator=generator)
    target = torch.stack([x[:, :4].sum(1).sin(), x[:, 4:8].prod(1), x[:, 8:].norm(dim=1)], dim=1)
    return x, target


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, step: int) -> Tensor:
    x, target = batch(index, step)
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)


def main(invite: str, run_dir: str, index: int) -> None:
    torch.set_num_threads(1)
    with geo_diloco.join(invite, run_dir=run_dir, threads=1) as peer:
        model = peer.build_model()
        optimizer = make_optimizer(model)
        learner = peer.learner(model, optimizer)
        for step in count(1):
            loss = inner_step(model, optimizer, index, step)
            if learner.step(tokens=BATCH, loss=loss):
                break


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
