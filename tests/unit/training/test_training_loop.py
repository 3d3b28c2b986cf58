"""The command line's learner and what it is measured by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from geo_diloco.errors import ModelError
from geo_diloco.manifest import EvalSpec, InnerSpec, RunManifest
from geo_diloco.training.evaluate import Evaluator, heldout_loss
from geo_diloco.training.learner import FinishOrder, Learner, LearnerSetup
from geo_diloco.training.loop import inner_step, make_optimizer, train, training_loss
from geo_diloco.training.presets import demo_manifest

from .toy import ScriptedPort, layout_of, make_manifest, make_toy, vectors_of


class Fixed(nn.Module):
    """Says the same loss for every token: the mean is then known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.modes: list[bool] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        self.modes.append(self.training)
        return SimpleNamespace(loss=labels.double().mean() + self.weight[0])


class OnePeer:
    """A peer whose run ends after a number of steps."""

    def __init__(self, num_steps: int, dtype: torch.dtype = torch.float32) -> None:
        self.manifest = make_manifest()
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.port = ScriptedPort()
        self._num_steps = num_steps

    def build_model(self) -> nn.Module:
        self.model = make_toy()
        return self.model

    def learner(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Learner:
        layout = layout_of(model)
        setup = LearnerSetup(manifest=self.manifest, layout=layout, theta=vectors_of(model, layout), save_every_s=0.0)
        return Learner(model, optimizer, self.port, setup)

    def data(self) -> Iterator[Tensor]:
        row = torch.arange(11).repeat(4, 1)
        for number in range(1000):
            if number == self._num_steps - 1:
                self.port.orders.append(FinishOrder("enough"))
            yield row


def test_the_loop_trains_until_the_run_is_done() -> None:
    peer = OnePeer(40)
    summary = train(peer)
    assert (summary.num_steps, summary.num_tokens, summary.finish_reason) == (40, 40 * 44, "enough")
    losses = [loss for _, _, loss, _ in peer.port.steps]
    assert losses[0] is not None and losses[-1] is not None and losses[-1] < losses[0] - 0.2
    assert 0.0 < summary.seconds_inside < summary.seconds


def test_in_bfloat16_parameters_stay_float32() -> None:
    peer = OnePeer(3, dtype=torch.bfloat16)
    train(peer)
    assert all(parameter.dtype == torch.float32 for parameter in peer.model.parameters())


def test_weight_decay_is_for_matrices_only() -> None:
    optimizer = make_optimizer(make_toy(), InnerSpec(weight_decay=0.3, betas=(0.8, 0.9), learning_rate=0.02))
    decays = {p.dim(): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.3, 1: 0.0}
    assert all(group["lr"] == 0.02 and group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_gradients_are_clipped_by_their_global_norm_and_not_at_zero() -> None:
    moved = {}
    for clip in (0.0, 0.5):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        inner_step(model, optimizer, 4.0 * model.weight.sum(), gradient_clip=clip)
        moved[clip] = float(model.weight.detach())
        assert model.weight.grad is None
    assert moved == {0.0: -4.0, 0.5: pytest.approx(-0.5)}


def test_a_model_with_its_own_training_loss_is_trained_by_it() -> None:
    class Own(nn.Module):
        def training_loss(self, batch: Tensor) -> Tensor:
            return batch.double().mean()

    assert float(training_loss(Own(), torch.tensor([[1, 3]]))) == 2.0


def test_a_model_that_takes_no_tokens_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"geo_diloco\.join"):
        training_loss(nn.Linear(2, 2), torch.zeros(1, 2))


def test_heldout_loss_is_the_mean_over_predicted_tokens_of_unequal_batches() -> None:
    batches = [torch.full((3, 5), 2), torch.full((1, 5), 6)]
    assert heldout_loss(Fixed(), batches) == pytest.approx((3 * 2 + 6) / 4)


@pytest.mark.parametrize("training", [True, False])
def test_measuring_is_done_in_evaluation_mode_and_puts_the_mode_back(training: bool) -> None:
    model = Fixed().train(training)
    heldout_loss(model, [torch.ones(1, 2)])
    assert model.modes == [False] and model.training is training


def test_without_heldout_sequences_the_loss_is_not_a_number() -> None:
    assert math.isnan(heldout_loss(Fixed(), []))


class Picture(nn.Module):
    def __init__(self, loss: float | None) -> None:
        super().__init__()
        if loss is not None:
            self.heldout_loss = lambda: loss

    def training_loss(self, batch: Tensor) -> Tensor:
        return batch.mean()


@pytest.mark.parametrize(("own", "measured"), [(0.25, 0.25), (math.nan, None), (None, None)])
def test_a_model_that_is_no_language_model_is_measured_by_itself_or_not_at_all(
    own: float | None, measured: float | None
) -> None:
    assert Evaluator(RunManifest()).measure(Picture(own)) == measured


def test_the_evaluator_reads_the_manifests_heldout_sequences_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def read(spec: object, number: int, *, data_dir: object) -> Iterable[Tensor]:
        asked.append(number)
        return [torch.full((1, 4), 3)]

    monkeypatch.setattr("geo_diloco.training.evaluate.heldout_batches", read)
    evaluator = Evaluator(RunManifest(evaluation=EvalSpec(sequences=7)))
    assert [evaluator.measure(Fixed()) for _ in range(2)] == [3.0, 3.0]
    assert asked == [7]


def test_a_measurement_that_is_stopped_ends_at_its_next_batch_without_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluator = Evaluator(RunManifest())
    seen: list[Tensor] = []

    class Stopping(Fixed):
        def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
            seen.append(input_ids)
            evaluator.stop()
            return super().forward(input_ids, labels)

    monkeypatch.setattr("geo_diloco.training.evaluate.heldout_batches", lambda *_, **__: [torch.ones(1, 3)] * 5)
    assert evaluator.measure(Stopping()) is None
    assert len(seen) == 1


def test_an_untrained_demo_model_knows_nothing_of_bytes() -> None:
    from geo_diloco.training.models import build_model

    manifest = demo_manifest()
    loss = Evaluator(manifest).measure(build_model(manifest.model))
    assert loss is not None and 5.3 < loss < 5.9  # ln 256 = 5.55


def test_the_demos_manifest_is_what_the_readme_says() -> None:
    manifest = demo_manifest()
    sync = manifest.sync
    assert (sync.interval_steps, sync.num_fragments, sync.overlap_steps, sync.quorum) == (24, 4, 2, 1)
    assert (sync.grace, sync.kappa, sync.lockstep) == (True, 1.0, False)
    assert (manifest.outer.eta, manifest.outer.mu) == (0.7, 0.5)
    assert {(codec.name, codec.block) for codec in (manifest.codec_up, manifest.codec_down)} == {("int4", 64)}
    assert (manifest.stop.minutes, manifest.data.source, manifest.inner.schedule_by) == (2.0, "stdlib", "run")
    assert manifest.founder == "" and manifest.nonce == ""
