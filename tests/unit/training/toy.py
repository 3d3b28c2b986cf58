"""A model small enough to compute by hand, and a port that says what a node would: for these tests only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from geo_diloco.manifest import InnerSpec, RunManifest, StopSpec, SyncSpec
from geo_diloco.numerics.fragments import Layout, gather, layout_from_module, named_trainable
from geo_diloco.training.learner import AdoptOrder, Order, ResetOrder, SampleOrder
from geo_diloco.training.models import model_factory


class Toy(nn.Module):
    """A causal language model in the shape of Hugging Face's: an embedding and a linear layer."""

    def __init__(self, vocab_size: int = 11, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.linear = nn.Linear(width, vocab_size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        scores = self.linear(self.embedding(input_ids[:, :-1]))
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten()))


def make_toy(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy()


def layout_of(model: nn.Module, num_fragments: int = 2) -> Layout:
    return layout_from_module(model, num_fragments=num_fragments)


def vectors_of(model: nn.Module, layout: Layout) -> list[Tensor]:
    return [gather(named_trainable(model), layout, fragment) for fragment in range(layout.num_fragments)]


def make_manifest(*, num_fragments: int = 2, **changes: Any) -> RunManifest:
    sync = {"num_fragments": num_fragments, "interval_steps": 4, "overlap_steps": 1} | changes.pop("sync", {})
    inner = {"warmup_steps": 0, "schedule": "constant"} | changes.pop("inner", {})
    stop = changes.pop("stop", {})
    assert not changes
    return RunManifest(sync=SyncSpec(**sync), inner=InnerSpec(**inner), stop=StopSpec(**stop))


class ScriptedPort:
    """A NodePort whose orders a test writes beforehand, per step; keeps what the learner reports."""

    def __init__(self, resume: tuple[int, int] = (0, 0)) -> None:
        self.progress = 0.0
        self.resume = resume
        self.failed: BaseException | None = None
        self.orders: deque[Order] = deque()
        self.steps: list[tuple[int, int, float | None, int]] = []
        self.samples: list[tuple[int, Tensor, int, int]] = []
        self.adoptions: list[tuple[Order, int, int]] = []
        self.saves: list[tuple[int, dict[str, Tensor], dict[str, Any]]] = []
        self.num_waits = 0
        self.paced: list[float] = []

    def take_orders(self) -> list[Order]:
        taken = list(self.orders)
        self.orders.clear()
        return taken

    def wait_over(self, limit_s: float) -> None:
        self.paced.append(limit_s)

    def wait_order(self, accept: Callable[[Order], bool]) -> Order | None:
        self.num_waits += 1
        for order in self.orders:
            if accept(order):
                self.orders.remove(order)
                return order
        return None

    def step_done(self, step: int, tokens: int, step_time_us: int, loss: float | None, cursor: int) -> None:
        assert step_time_us >= 0
        self.steps.append((step, tokens, loss, cursor))

    def sampled(self, order: SampleOrder, delta: Tensor, step: int, tokens: int, cursor: int) -> None:
        self.samples.append((order.fragment, delta, step, tokens))

    def adopted(self, order: AdoptOrder | ResetOrder, scale_ppm: int, step: int, tokens: int) -> None:
        self.adoptions.append((order, scale_ppm, step))

    def save(self, save: int, step: int, tokens: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        self.saves.append((save, tensors, extra))


@model_factory
def build_toy(*, seed: int = 0) -> nn.Module:
    return make_toy(seed)
