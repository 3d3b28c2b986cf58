"""The baselines a run is measured against: synchronous DiLoCo reduces to what it must reduce to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from geo_diloco.manifest import DataSpec, EvalSpec, InnerSpec, ModelSpec, OuterSpec, RunManifest, SyncSpec
from geo_diloco.training.baselines import alone, data_parallel, synchronous_diloco
from geo_diloco.training.data import TokenStream
from geo_diloco.training.evaluate import Evaluator
from geo_diloco.training.loop import inner_step, make_optimizer, training_loss
from geo_diloco.training.models import build_model
from geo_diloco.training.presets import demo_manifest

STEPS = 6


@pytest.fixture(scope="module")
def manifest() -> RunManifest:
    config = dict(demo_manifest().model.config or {})
    config |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2}
    return RunManifest(
        model=ModelSpec(config=config, seed=3),
        data=DataSpec(sequence_length=32, batch_size=4, num_shares=2),
        inner=InnerSpec(learning_rate=5e-3, warmup_steps=0, schedule="constant"),
        sync=SyncSpec(interval_steps=3, num_fragments=1),
        outer=OuterSpec(eta=1.0, mu=0.0),
        evaluation=EvalSpec(sequences=4),
    )


def test_one_learner_with_a_plain_outer_step_is_a_learner_alone(manifest: RunManifest) -> None:
    together, single = synchronous_diloco(manifest, [STEPS]), alone(manifest, 0, STEPS)
    assert together.num_tokens == single.num_tokens == STEPS * 4 * 32
    assert together.heldout == pytest.approx(single.heldout, abs=1e-5)


def test_two_learners_and_outer_momentum_make_a_difference(manifest: RunManifest) -> None:
    single = alone(manifest, 0, STEPS).heldout
    assert abs(synchronous_diloco(manifest, [STEPS, STEPS]).heldout - single) > 1e-4
    momentum = replace(manifest, outer=OuterSpec(eta=1.0, mu=0.9))
    assert abs(synchronous_diloco(momentum, [STEPS]).heldout - single) > 1e-4


def test_unequal_learners_train_on_exactly_their_own_steps(manifest: RunManifest) -> None:
    assert synchronous_diloco(manifest, [STEPS, 2]).num_tokens == (STEPS + 2) * 4 * 32


def test_data_parallel_with_one_learner_is_a_learner_alone(manifest: RunManifest) -> None:
    assert data_parallel(manifest, 1, STEPS) == alone(manifest, 0, STEPS)


def test_data_parallel_is_one_model_on_one_large_batch(manifest: RunManifest) -> None:
    """The mean of equal batches' gradients is the gradient of them joined: written out, with one optimizer."""
    model = build_model(manifest.model, with_weights=True)
    optimizer = make_optimizer(model, manifest.inner)
    streams = [TokenStream(manifest.data, share=share) for share in (0, 1)]
    for _ in range(STEPS):
        batch = torch.cat([stream.next_batch() for stream in streams])
        inner_step(model, optimizer, training_loss(model, batch), gradient_clip=manifest.inner.gradient_clip)
    result = data_parallel(manifest, 2, STEPS)
    assert result.heldout == pytest.approx(Evaluator(manifest).measure(model), abs=1e-5)
    assert abs(result.heldout - alone(manifest, 0, STEPS).heldout) > 1e-3
    assert result.num_tokens == 2 * STEPS * 4 * 32


def test_who_watches_is_told_of_every_synchronisation(manifest: RunManifest) -> None:
    heard: list[int] = []
    result = synchronous_diloco(manifest, [STEPS, STEPS], watch=lambda num_tokens, model: heard.append(num_tokens))
    assert heard == [result.num_tokens // 2, result.num_tokens]
    heard.clear()
    result = data_parallel(manifest, 2, 3, watch=lambda num_tokens, model: heard.append(num_tokens))
    assert heard == [256, 512, 768]
