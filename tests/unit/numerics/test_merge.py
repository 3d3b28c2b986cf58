"""Merging: token weights, the two rules with their check values, memory and exactness."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError, NonFiniteFrame
from geo_diloco.manifest import MergeRule
from geo_diloco.numerics.fragments import Layout, TensorSpec
from geo_diloco.numerics.merge import MergeResult, StreamingMerge, l2_norm, outer_gradient, quick_norm


def flat_layout(*sizes: int, embeddings: tuple[int, ...] = ()) -> Layout:
    specs, offset = [], 0
    for index, size in enumerate(sizes):
        specs.append(TensorSpec(f"t{index:02d}", (size,), "float32", 0, offset, size, index in embeddings))
        offset += size
    return Layout(tuple(specs))


def merged(
    gradients: list[list[float]], weights: list[float], rule: MergeRule = "rda", layout: Layout | None = None
) -> MergeResult:
    merge = StreamingMerge(layout or flat_layout(len(gradients[0])), 0, rule)
    for gradient, weight in zip(gradients, weights, strict=True):
        merge.add(torch.tensor(gradient), weight)
    return merge.result()


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_a_portion_of_a_merge_is_that_much_of_it(rule: MergeRule) -> None:
    def merge_of(portion: float) -> Tensor:
        merge = StreamingMerge(flat_layout(2, 2, embeddings=(1,)), 0, rule)
        merge.add(torch.tensor([1.0, 0.0, 3.0, 1.0]), 2.0)
        merge.add(torch.tensor([0.5, 2.0, -1.0, 1.0]), 3.0)
        return merge.result(portion=portion).gradient

    assert torch.equal(merge_of(0.25), 0.25 * merge_of(1.0))


@pytest.mark.parametrize("portion", [0.0, -0.5, 1.001, math.nan, math.inf])
def test_a_portion_that_is_none_is_refused(portion: float) -> None:
    merge = StreamingMerge(flat_layout(1), 0, "rda")
    merge.add(torch.ones(1), 1.0)
    with pytest.raises(LocalProtocolError, match="above 0 and at most 1"):
        merge.result(portion=portion)


def reference_rda(gradients: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """Straight from the formula, in float64."""
    total = sum(weights)
    lengths = [np.linalg.norm(g) for g in gradients]
    radius = sum(w * n for w, n in zip(weights, lengths, strict=True)) / total
    zero = np.zeros_like(gradients[0])
    direction = sum((w * (g / n if n else zero) for w, g, n in zip(weights, gradients, lengths, strict=True)), zero)
    return radius * direction / np.linalg.norm(direction)


@pytest.mark.parametrize(
    ("gradients", "weights", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], [0.70711, 0.70711]),
        ([[2.0, 0.0], [0.0, 2.0]], [3.0, 1.0], [1.89737, 0.63246]),
        ([[3.0, -4.0], [3.0, -4.0]], [1.0, 1.0], [3.0, -4.0]),
        ([[0.0, 0.0], [1.0, 0.0]], [1.0, 1.0], [0.5, 0.0]),
    ],
    ids=["orthogonal", "weighted", "equal", "one is zero"],
)
def test_radial_directional_averaging_gives_the_listed_values(
    gradients: list[list[float]], weights: list[float], expected: list[float]
) -> None:
    result = merged(gradients, weights)
    assert result.gradient.tolist() == pytest.approx(expected, abs=5e-6)
    assert result.num_degenerate == 0


def test_mean_is_the_weighted_mean() -> None:
    assert merged([[2.0, 0.0], [0.0, 2.0]], [3.0, 1.0], "mean").gradient.tolist() == [1.5, 0.5]


def test_directions_that_cancel_give_zero_and_are_counted() -> None:
    layout = flat_layout(2, 2, 2)
    result = merged([[1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [-1.0, 0.0, 1.0, 1.0, 0.0, 0.0]], [1.0, 1.0], "rda", layout)
    assert result.gradient.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    assert result.num_degenerate == 2, "one tensor cancels, one is zero for all"


def test_each_tensor_is_averaged_on_its_own_and_embeddings_take_the_mean() -> None:
    gradients = [[1.0, 0.0, 100.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 100.0, 0.0, 1.0]]
    result = merged(gradients, [1.0, 1.0], "rda", flat_layout(2, 2, 2, embeddings=(1,)))
    root = math.sqrt(0.5)
    assert result.gradient.tolist() == pytest.approx([root, root, 50.0, 50.0, root, root])
    plain = merged(gradients, [1.0, 1.0], "mean", flat_layout(2, 2, 2, embeddings=(1,)))
    assert plain.gradient.tolist() == [0.5, 0.5, 50.0, 50.0, 0.5, 0.5]


def test_by_fragment_all_that_is_no_embedding_has_one_direction_and_one_length() -> None:
    """Two tensors that are 3 : 4 in each gradient: by tensor they stay so, by fragment both turn with the longer."""
    layout = flat_layout(2, 1, 2, embeddings=(1,))
    gradients = [[3.0, 0.0, 8.0, 4.0, 0.0], [0.0, 3.0, 0.0, -4.0, 0.0]]
    merge = StreamingMerge(layout, 0, "rda-fragment")
    for gradient in gradients:
        merge.add(torch.tensor(gradient), 1.0)
    result = merge.result()
    root = 5.0 * math.sqrt(0.5)  # the directions add to (0.6, 0.6, 0, 0), what cancels is no longer there
    assert result.gradient.tolist() == pytest.approx([root, root, 4.0, 0.0, 0.0])
    by_tensor = merged(gradients, [1.0, 1.0], "rda", layout)
    assert (by_tensor.num_degenerate, result.num_degenerate) == (1, 0)
    assert by_tensor.gradient.tolist() == pytest.approx([3 * math.sqrt(0.5), 3 * math.sqrt(0.5), 4.0, 0.0, 0.0])


@pytest.mark.parametrize("rule", ["rda", "rda-fragment"])
def test_embeddings_are_merged_like_the_rest_if_the_run_says_so(rule: MergeRule) -> None:
    layout = flat_layout(2, embeddings=(0,))
    merge = StreamingMerge(layout, 0, rule, embeddings="rda")
    merge.add(torch.tensor([1.0, 0.0]), 1.0)
    merge.add(torch.tensor([0.0, 1.0]), 1.0)
    assert merge.result().gradient.tolist() == pytest.approx([math.sqrt(0.5)] * 2)


@settings(max_examples=40, deadline=None)
@given(
    num_participants=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    weights=st.lists(st.floats(0.01, 1e6), min_size=6, max_size=6),
    unit=st.sampled_from([1e-12, 1.0, 1e9]),
)
def test_streaming_agrees_with_the_formula_whatever_the_weights_unit(
    num_participants: int, seed: int, weights: list[float], unit: float
) -> None:
    generator = np.random.default_rng(seed)
    gradients = [generator.normal(size=40).astype(np.float32) for _ in range(num_participants)]
    used = [weight * unit for weight in weights[:num_participants]]
    merge = StreamingMerge(flat_layout(30, 10, embeddings=(1,)), 0, "rda")
    for gradient, weight in zip(gradients, used, strict=True):
        merge.add(torch.from_numpy(gradient), weight)
    result = merge.result().gradient.numpy()
    wide = [gradient.astype(np.float64) for gradient in gradients]
    directional = reference_rda([gradient[:30] for gradient in wide], used)
    mean = sum(w * g[30:] for w, g in zip(used, wide, strict=True)) / sum(used)
    np.testing.assert_allclose(result[:30], directional, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result[30:], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e-20, 1e15, 1e30])
def test_very_small_and_very_large_gradients_keep_their_direction(size: float) -> None:
    result = merged([[size, 0.0], [0.0, size]], [4e10, 4e10]).gradient
    assert (result.double() / size).tolist() == pytest.approx([math.sqrt(0.5)] * 2, rel=2e-3)


def test_a_zero_weight_adds_nothing() -> None:
    gradients = [[1.0, 2.0], [50.0, -80.0], [3.0, 1.0]]
    with_zero = merged(gradients, [2.0, 0.0, 1.0]).gradient
    assert torch.equal(with_zero, merged([gradients[0], gradients[2]], [2.0, 1.0]).gradient)
    nothing = merged(gradients, [0.0, 0.0, 0.0])
    assert nothing.gradient.tolist() == [0.0, 0.0] and nothing.num_degenerate == 1


def test_one_participant_keeps_its_gradient() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for rule in ("rda", "mean"):
        merge = StreamingMerge(flat_layout(600, 400), 0, rule)
        merge.add(gradient, 123.0)
        assert torch.allclose(merge.result().gradient, gradient, rtol=1e-6, atol=0)


def test_the_same_inputs_in_the_same_order_give_the_same_bits() -> None:
    def once() -> Tensor:
        generator = torch.Generator().manual_seed(3)
        merge = StreamingMerge(flat_layout(90_000, 10), 0, "rda")
        for weight in (3.0, 1e5, 7.0):
            merge.add(torch.randn(90_010, generator=generator), weight)
        return merge.result().gradient

    first = once()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(once(), first), "nor does the number of threads matter"
    finally:
        torch.set_num_threads(threads)


def test_adding_leaves_the_gradient_alone_and_memory_does_not_grow_with_participants() -> None:
    size = 500_000
    merge = StreamingMerge(flat_layout(size), 0, "rda")
    gradient = torch.ones(size)
    kept = [value for value in vars(merge).values() if isinstance(value, Tensor)]
    assert sum(tensor.numel() for tensor in kept) == size
    tracemalloc.start()
    try:
        for _ in range(8):
            merge.add(gradient, 1.0)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    kept = [value for value in vars(merge).values() if isinstance(value, Tensor)]
    assert sum(tensor.numel() for tensor in kept) == size
    assert torch.equal(gradient, torch.ones(size))


def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace() -> None:
    merge = StreamingMerge(flat_layout(2, 2), 0, "rda")
    merge.add(torch.tensor([1.0, 0.0, 1.0, 0.0]), 1.0)
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteFrame):
            merge.add(torch.tensor([5.0, 5.0, 5.0, bad]), 1.0)
    assert merge.result().gradient.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_a_merge_of_nothing_or_with_impossible_weights_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="merge of nothing"):
        StreamingMerge(flat_layout(2), 0, "rda").result()
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(LocalProtocolError, match="weight"):
            StreamingMerge(flat_layout(2), 0, "rda").add(torch.ones(2), weight)
    for gradient in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(LayoutError):
            StreamingMerge(flat_layout(2), 0, "rda").add(gradient, 1.0)


def test_only_the_fragment_asked_for_is_merged() -> None:
    layout = Layout((TensorSpec("a", (3,), "float32", 0, 0, 3, False), TensorSpec("b", (2,), "float32", 1, 0, 2, True)))
    merge = StreamingMerge(layout, 1, "rda")
    merge.add(torch.tensor([1.0, 0.0]), 1.0)
    merge.add(torch.tensor([0.0, 1.0]), 1.0)
    assert merge.result().gradient.tolist() == [0.5, 0.5]


def test_the_outer_gradient_points_uphill_and_late_work_follows_its_form() -> None:
    delta, drift = torch.tensor([1.0, -2.0]), torch.tensor([10.0, 20.0])
    assert outer_gradient(delta, form="base-relative", drift=None).tolist() == [-1.0, 2.0]
    assert outer_gradient(delta, form="base-relative", drift=drift).tolist() == [-1.0, 2.0]
    assert outer_gradient(delta, form="paper", drift=None).tolist() == [-1.0, 2.0]
    # Theta_now - (Theta_base + d)
    base = torch.tensor([5.0, 5.0])
    assert outer_gradient(delta, form="paper", drift=drift).tolist() == ((base + drift) - (base + delta)).tolist()


def test_norms_accumulate_in_float64() -> None:
    big = torch.ones(3_000_000)
    big[0] = 4096.0
    assert l2_norm(big) == pytest.approx(math.sqrt(4096.0**2 + 2_999_999), rel=1e-14)
    assert l2_norm(torch.tensor([1e30, 1e30])) == pytest.approx(math.sqrt(2) * 1e30, rel=1e-6)
    assert l2_norm(torch.zeros(5)) == 0.0
    assert math.isnan(l2_norm(torch.tensor([1.0, math.nan])))
    assert l2_norm(torch.tensor([1.0, -math.inf])) == math.inf


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9000),
    exponent=st.integers(-40, 37),
    zeros=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
)
def test_the_quick_norm_is_the_norm_whatever_the_size_of_the_values(
    size: int, exponent: int, zeros: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator).mul_(10.0**exponent)
    values[torch.rand(size, generator=generator) < zeros] = 0.0
    values = values.clamp(-3e38, 3e38)
    assert quick_norm(values) == pytest.approx(l2_norm(values), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 2047, 2048, 4999])
def test_the_quick_norm_hides_nothing_that_is_not_finite(value: float, where: int) -> None:
    values = torch.ones(5000)
    values[where] = value
    assert not math.isfinite(quick_norm(values))


@pytest.mark.parametrize("rule", ["mean", "rda"])
def test_adding_a_delta_is_adding_the_gradient_it_stands_for(rule: MergeRule) -> None:
    generator = torch.Generator().manual_seed(7)
    layout = Layout((TensorSpec("a", (3000,), "float32", 0, 0, 3000, False),))
    by_gradient, by_delta = StreamingMerge(layout, 0, rule), StreamingMerge(layout, 0, rule)
    for weight in (3.0, 1.0):
        delta = torch.randn(3000, generator=generator)
        expected = l2_norm(delta)
        assert by_gradient.add(-delta, weight) == pytest.approx(expected, rel=1e-6)
        assert by_delta.add_delta(delta, weight) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(by_gradient.result().gradient, by_delta.result().gradient)
