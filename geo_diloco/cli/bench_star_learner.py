"""A learner of `bench star`: it computes nothing, and all else that it does is production.

An inner step lasts as long as it is told (`pace_ms`), and moves as many of the parameters as it takes to have moved all
of them within a part of H inner steps, by noise that no other learner has. So every delta that is sampled is a whole
one and costs what a trained one costs to encode, send and merge, and no processor is needed to come by it.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from geo_diloco.cli.bench_star_plan import NUM_TENSORS, ROW, num_rows_for
from geo_diloco.training.models import model_factory

PARAMETERS_MAX = 2_000_000_000
RECORD_EVERY_S = 0.5
MOVED_AHEAD = 3
"""All parameters are moved within that part of H: a learner whose steps are slow has whole deltas to hand in, too."""
_STD, _NOISE = 0.02, 1e-3
_POOL = 1 << 20


class Noise(nn.Module):
    """So many parameters, and nothing to do with them."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(num_rows, ROW) * _STD) for _ in range(NUM_TENSORS))

    def training_loss(self, batch: Tensor) -> Tensor:
        """There is none: this is no language model, so the syncer measures nothing."""
        return batch.float().mean()


@model_factory
def noise(*, num_parameters: int) -> nn.Module:
    """Named by the benchmark's manifest."""
    return Noise(num_rows_for(min(num_parameters, PARAMETERS_MAX)))


class Walk:
    """Moves the parameters a little with each inner step."""

    def __init__(self, model: nn.Module, cycle_steps: int) -> None:
        self._flat = [parameter.detach().view(-1) for parameter in model.parameters()]
        self._cycle_steps = cycle_steps
        self._pool = torch.randn(max(_POOL, 2 * max(len(flat) for flat in self._flat))) * _NOISE
        self._moved = 0
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        until = self._steps * len(self._flat) // self._cycle_steps
        for number in range(self._moved, until):
            flat = self._flat[number % len(self._flat)]
            begin = int(torch.randint(len(self._pool) - len(flat) + 1, ()))
            flat.add_(self._pool[begin : begin + len(flat)])
        self._moved = until


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long an inner step lasts: `ms`, give or take up to `spread`, a share of it, each step anew."""

    ms: int
    spread: float = 0.0

    @property
    def ms_min(self) -> int:
        return max(1, round(self.ms * (1.0 - self.spread)))

    def left_s(self, passed_s: float) -> float:
        """How long to wait beyond that, of a step that began so long ago."""
        return max(0.0, self.ms / 1000 * (1.0 + self.spread * random.uniform(-1.0, 1.0)) - passed_s)


def train_paced(*, invite: str, run_dir: Path, records: Path, pace: Pace, congestion: str) -> None:
    """Take part until told to leave; a line in `records` for each `RECORD_EVERY_S`, the first at the first step."""
    import geo_diloco
    from geo_diloco.runtime.driver import now_ms

    torch.set_num_threads(1)
    torch.seed()  # each has noise of its own
    joined = geo_diloco.join(
        invite, run_dir=run_dir, threads=1, device="cpu", pace_ms=pace.ms_min, congestion=congestion
    )
    with joined as peer, records.open("a", buffering=1) as lines:
        model = peer.build_model()
        learner = peer.learner(model, torch.optim.SGD(model.parameters(), lr=0.0))
        walk = Walk(model, max(1, peer.manifest.sync.interval_steps // MOVED_AHEAD))
        tokens = peer.manifest.data.sequence_length * peer.manifest.data.batch_size
        said_at = cpu_s = 0.0
        while True:
            began_s = time.thread_time()
            if learner.step(tokens=tokens):
                break
            cpu_s += time.thread_time() - began_s
            ended_s = time.monotonic()
            walk.step()
            if pace.spread:
                time.sleep(pace.left_s(time.monotonic() - ended_s))
            if time.monotonic() - said_at >= RECORD_EVERY_S:
                said_at = time.monotonic()
                record = [int(now_ms()), learner.num_steps, round(learner.seconds_inside, 6), round(cpu_s, 6)]
                lines.write(json.dumps(record) + "\n")
