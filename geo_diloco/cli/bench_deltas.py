"""Real numbers for the benchmarks: what two learners hand in after H inner steps from a model that has begun to learn.

Random numbers would not do: how far a delta compresses depends on how its magnitudes are spread, block by block. Nor
would a model's first steps: AdamW then moves nearly all parameters by the same amount.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from geo_diloco.manifest import ModelSpec, RunManifest
from geo_diloco.numerics.fragments import Layout, gather, layout_from_module, named_trainable
from geo_diloco.numerics.merge import StreamingMerge, outer_gradient
from geo_diloco.numerics.outer import outer_update
from geo_diloco.training.data import TokenStream
from geo_diloco.training.loop import inner_step, make_optimizer, training_loss
from geo_diloco.training.models import build_model
from geo_diloco.training.presets import demo_manifest, demo_model_config

NUM_LEARNERS = 2
ANCHOR_STEPS = 120
INNER_STEPS = 24


@dataclass(frozen=True)
class TrainedDeltas:
    """Flat float32 vectors of the whole model as one fragment. `delta_N`: local minus anchor; `update_N`: of the outer
    step that merges all learners' deltas."""

    layout: Layout
    delta_N: Tensor
    update_N: Tensor


def trained_deltas(*, hidden_size: int, num_layers: int, say: Callable[[str], None]) -> TrainedDeltas:
    """Train a Llama over bytes of the standard library's source to an anchor, and on from there on each learner's own
    data, with the optimizer state as it was."""
    manifest = _manifest(hidden_size, num_layers)
    anchor = build_model(manifest.model)
    layout = layout_from_module(anchor, num_fragments=1)
    say(f"training {layout.num_elements[0]:,} parameters for {ANCHOR_STEPS + NUM_LEARNERS * INNER_STEPS} inner steps")
    optimizer = make_optimizer(anchor, manifest.inner)
    _train(anchor, optimizer, manifest, share=0, num_steps=ANCHOR_STEPS)
    theta_N = gather(named_trainable(anchor), layout, 0)
    merging = StreamingMerge(layout, 0, manifest.sync.merge, embeddings=manifest.sync.merge_embeddings)
    for share in range(1, 1 + NUM_LEARNERS):
        replica = copy.deepcopy(anchor)
        own = make_optimizer(replica, manifest.inner)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _train(replica, own, manifest, share=share, num_steps=INNER_STEPS)
        delta_N = gather(named_trainable(replica), layout, 0) - theta_N
        merging.add(outer_gradient(delta_N, form="base-relative", drift=None), 1.0)
    update_N = outer_update(merging.result().gradient, None, None, eta=manifest.outer.eta, mu=manifest.outer.mu)
    return TrainedDeltas(layout, delta_N, update_N)


def _manifest(hidden_size: int, num_layers: int) -> RunManifest:
    demo = demo_manifest()
    size = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers}
    return replace(
        demo,
        model=ModelSpec(config=demo_model_config() | size),
        data=replace(demo.data, batch_size=4),
        inner=replace(demo.inner, learning_rate=1e-3),
    )


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, manifest: RunManifest, *, share: int, num_steps: int
) -> None:
    batches: Iterator[Tensor] = iter(TokenStream(manifest.data, share=share))
    model.train()
    for _ in range(num_steps):
        inner_step(model, optimizer, training_loss(model, next(batches)), gradient_clip=manifest.inner.gradient_clip)


def one_thread() -> None:
    """All figures are for one thread: a learner shares its machine with training."""
    torch.set_num_threads(1)
