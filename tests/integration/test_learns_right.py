"""A run in lockstep, on real processes, is the algorithm: compared weight by weight with references written here.

The references know nothing of the package but the initial weights: `torch.optim.SGD(nesterov=True)` on the mean of the
outer gradients, fragment by fragment at its phase. No encoding, K = M, tau = 0, kappa = 0, plain mean.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import geo_diloco
from geo_diloco.manifest import (
    CodecSpec,
    EvalSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunManifest,
    StopSpec,
    SyncSpec,
)
from geo_diloco.node import export
from tests.support.lockstep_learner import inner_step, make_optimizer, tiny_net

pytestmark = pytest.mark.integration

H = 8
OUTER_STEPS = 10
ETA, MU = 0.7, 0.9
SEED = 11


def manifest(num_learners: int, num_fragments: int) -> RunManifest:
    return RunManifest(
        name="learns-right",
        model=ModelSpec(factory="tests.support.lockstep_learner:tiny_net", seed=SEED),
        inner=InnerSpec(schedule="constant", warmup_steps=0),
        sync=SyncSpec(
            interval_steps=H,
            num_fragments=num_fragments,
            overlap_steps=0,
            quorum=num_learners,
            grace=False,
            kappa=0.0,
            merge="mean",
            lockstep=True,
        ),
        outer=OuterSpec(eta=ETA, mu=MU),
        codec_up=CodecSpec(name="none"),
        codec_down=CodecSpec(name="none"),
        stop=StopSpec(commits=OUTER_STEPS * num_fragments),
        evaluation=EvalSpec(every_seconds=0.0),
    )


def run(tmp_path: Path, rules: RunManifest, num_learners: int) -> dict[str, Tensor]:
    """The run on real processes; Theta at its end, by parameter name."""
    with geo_diloco.found(rules, run_dir=tmp_path / "founder") as founder:
        learners = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.lockstep_learner", founder.invite, tmp_path / f"{i}", str(i)]
            )
            for i in range(num_learners)
        ]
        try:
            assert founder.wait_finished(timeout_s=240), founder.status()
            assert [learner.wait(timeout=30) for learner in learners] == [0] * num_learners
        finally:
            for learner in learners:
                learner.kill()
                learner.wait()
    export(tmp_path / "founder", tmp_path / "export")
    return load_file(tmp_path / "export" / "model.safetensors")


def initial_model() -> nn.Module:
    torch.manual_seed(SEED)
    return tiny_net()


def synchronous_diloco(num_learners: int, fragments: list[list[str]], *, mu: float = MU) -> dict[str, Tensor]:
    """DiLoCo (arXiv 2311.08105), and with several fragments Streaming DiLoCo (2501.18512) without overlap."""
    theta = dict(initial_model().named_parameters())
    theta = {name: nn.Parameter(value.detach().clone()) for name, value in theta.items()}
    outer = {
        p: torch.optim.SGD([theta[name] for name in names], lr=ETA, momentum=mu, nesterov=True)
        for p, names in enumerate(fragments)
    }
    replicas = [copy.deepcopy(initial_model()) for _ in range(num_learners)]
    inner = [make_optimizer(replica) for replica in replicas]
    for step in range(1, H * OUTER_STEPS + 1):
        for index, replica in enumerate(replicas):
            inner_step(replica, inner[index], index, step)
        for p, names in enumerate(fragments):
            if step % H != p * H // len(fragments):
                continue
            weights = [dict(replica.named_parameters()) for replica in replicas]
            for name in names:
                gradients = [theta[name].detach() - each[name].detach() for each in weights]
                theta[name].grad = torch.stack(gradients).mean(0)
            outer[p].step()
            with torch.no_grad():
                for each in weights:
                    for name in names:
                        each[name].copy_(theta[name])
    return {name: value.detach() for name, value in theta.items()}


def relative_distance(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    difference = torch.cat([(got[name] - wanted[name]).flatten() for name in wanted]).double()
    size = torch.cat([wanted[name].flatten() for name in wanted]).double()
    return float(difference.norm() / size.norm())


def fragments_of(rules: RunManifest) -> list[list[str]]:
    """Which parameters go together is the run's choice; when each is merged is the reference's own."""
    from geo_diloco.numerics.fragments import layout_from_module

    layout = layout_from_module(initial_model(), num_fragments=rules.sync.num_fragments)
    return [[spec.name for spec in layout.of(p)] for p in range(layout.num_fragments)]


@pytest.mark.parametrize(
    ("num_learners", "num_fragments"), [(2, 1), pytest.param(1, 1, marks=pytest.mark.slow), (2, 4)]
)
def test_lockstep_run_equals_synchronous_diloco(tmp_path: Path, num_learners: int, num_fragments: int) -> None:
    rules = manifest(num_learners, num_fragments)
    theta = run(tmp_path, rules, num_learners)
    reference = synchronous_diloco(num_learners, fragments_of(rules))
    start = {name: value.detach() for name, value in initial_model().named_parameters()}
    assert relative_distance(reference, start) > 0.05, "the reference must have learnt something"
    assert relative_distance(theta, reference) < 1e-5
    other = synchronous_diloco(num_learners, fragments_of(rules), mu=0.5)
    assert relative_distance(theta, other) > 1e-3, "another outer momentum is told apart: the comparison bites"
