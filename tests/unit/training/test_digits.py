"""The digits: the same split and model as the example's, shares that don't overlap, a stream that can be taken up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_diloco.errors import DataError
from geo_diloco.manifest import DataSpec, ModelSpec
from geo_diloco.training import digits as module
from geo_diloco.training.data import TokenStream, batches_for
from geo_diloco.training.digits import NUM_PATCHES, DigitStream, digits
from geo_diloco.training.evaluate import heldout_accuracy
from geo_diloco.training.loop import inner_step, make_optimizer, training_loss
from geo_diloco.training.models import build_model
from geo_diloco.training.presets import preset_manifest

SPEC = DataSpec(sequence_length=NUM_PATCHES, batch_size=10, num_shares=4, seed=3)


def images_of(stream: DigitStream, batches: int) -> list[int]:
    return [int(row[0]) // NUM_PATCHES for _ in range(batches) for row in stream.next_batch()]


def test_model_and_split_are_those_of_the_example(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.syspath_prepend(str(repository / "examples"))
    import vit_digits  # type: ignore[import-not-found]

    try:
        for held_out in (True, False):
            for mine, example in zip(digits(held_out=held_out), vit_digits.digits(held_out=held_out), strict=True):
                assert torch.equal(mine, example)
        spec = preset_manifest("vit").model
        arguments = {"width": 32, "num_layers": 2}
        its_model: Any = build_model(
            ModelSpec(factory="vit_digits:build_vit", factory_arguments=arguments, seed=spec.seed)
        )
        our_model: Any = build_model(spec)
        images, _ = digits(held_out=True)
        assert torch.equal(our_model(images), its_model(images))
    finally:
        sys.modules.pop("vit_digits", None)


def test_shares_are_disjoint_and_each_image_comes_once_per_round() -> None:
    rounds = [images_of(DigitStream(SPEC, share=share), 75) for share in range(4)]
    seen = [set(images[:375]) for images in rounds]
    assert [len(each) for each in seen] == [375] * 4
    assert len(set().union(*seen)) == 1500
    for images in rounds:
        assert set(images[375:750]) == set(images[:375])
        assert images[375:750] != images[:375], "another order"


def test_a_stream_is_taken_up_where_it_was_left() -> None:
    whole = DigitStream(SPEC, share=1, pass_number=2)
    first = [whole.next_batch() for _ in range(40)]
    assert whole.cursor == sum(batch.numel() for batch in first) == 40 * 10 * NUM_PATCHES
    again = DigitStream(SPEC, share=1, pass_number=2, cursor=whole.cursor)
    assert torch.equal(again.next_batch(), whole.next_batch())
    assert images_of(DigitStream(SPEC, share=1, pass_number=3), 5) != images_of(DigitStream(SPEC, share=1), 5)


def test_a_model_that_brings_its_data_is_trained_on_it_and_others_on_text() -> None:
    vit, dense = (build_model(preset_manifest(name).model) for name in ("vit", "dense"))
    assert isinstance(batches_for(vit, SPEC, share=0), DigitStream)
    assert isinstance(batches_for(dense, DataSpec(), share=0), TokenStream)


def test_the_model_learns_to_tell_digits_it_has_not_seen() -> None:
    manifest = preset_manifest("vit")
    model = build_model(manifest.model)
    optimizer = make_optimizer(model, manifest.inner)
    before = heldout_accuracy(model)
    losses = []
    for _, batch in zip(range(150), iter(DigitStream(SPEC, share=0).next_batch, None), strict=False):
        loss = training_loss(model, batch)
        inner_step(model, optimizer, loss, gradient_clip=1.0)
        losses.append(float(loss.detach()))
    after = heldout_accuracy(model)
    assert before is not None and after is not None
    assert before < 0.2 and after > 0.4
    assert losses[-1] < losses[0]


def test_digits_that_are_not_installed_are_asked_for_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.cache_clear()
    with pytest.raises(DataError, match="scikit-learn, which has the images, is not installed; install") as caught:
        DigitStream(SPEC, share=0)
    assert "\n" not in str(caught.value)


def test_more_shares_than_images_are_refused() -> None:
    with pytest.raises(DataError, match="1500 images, none in share 1500"):
        DigitStream(DataSpec(sequence_length=NUM_PATCHES, num_shares=2000), share=1500)
