"""The outer step: bit-exact application, equal to Nesterov SGD without encoding, close to it with."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError
from geo_diloco.manifest import CodecName, CodecSpec, Digest
from geo_diloco.numerics.codec import decode, encode
from geo_diloco.numerics.fragments import fragment_digest
from geo_diloco.numerics.outer import apply_update, foresee_update, outer_update, residual_after

LAYOUT = Digest("0123456789abcdef" * 4)
ORDINARY = st.floats(-(2.0**60), 2.0**60, width=32)
Floats = NDArray[np.float32]


def numpy_reference(theta: Floats, momentum: Floats, step: Floats, eta: float, mu: float) -> tuple[Floats, Floats]:
    """Each operation rounds once to float32, element by element: float64 holds a product of two float32 exactly."""
    m, c1, c2 = np.float32(mu), np.float32(1.0 / eta), np.float32(1.0 / (1.0 + mu))

    def product(a: Floats, b: np.float32) -> Floats:
        return (a.astype(np.float64) * np.float64(b)).astype(np.float32)

    def total(a: Floats, b: Floats) -> Floats:
        return np.array([np.float32(x) + np.float32(y) for x, y in zip(a, b, strict=True)], dtype=np.float32)

    return total(theta, -step), product(total(product(momentum, m), product(step, c1)), c2)


def bits(values: Tensor | Floats | None) -> list[int]:
    array = values.numpy() if isinstance(values, Tensor) else values
    assert array is not None
    return [int(word) for word in array.view(np.uint32)]


@settings(max_examples=60, deadline=None)
@given(
    columns=hnp.arrays(np.float32, st.tuples(st.just(3), st.integers(1, 70)), elements=ORDINARY),
    eta=st.sampled_from([0.7, 0.4, 1.0, 0.1, 0.33]),
    mu=st.sampled_from([0.0, 0.5, 0.9, 0.3]),
)
def test_applying_an_update_gives_the_bits_of_single_rounded_float32(columns: Floats, eta: float, mu: float) -> None:
    theta, momentum, step = (np.ascontiguousarray(column) for column in columns)
    expected = numpy_reference(theta, momentum, step, eta, mu)
    tensors = [torch.from_numpy(column) for column in (theta, momentum, step)]
    theta_next, momentum_next = apply_update(*tensors, eta=eta, mu=mu)
    assert bits(theta_next) == bits(expected[0])
    assert bits(momentum_next) == bits(expected[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_neither_length_nor_alignment_nor_threads_change_a_bit(threads: int) -> None:
    """Vector units treat the ends of an array apart from its middle; a fused operation in one of them would show."""
    generator = torch.Generator().manual_seed(0)
    theta, momentum, step = (torch.randn(100_003, generator=generator) for _ in range(3))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = apply_update(theta, momentum, step, eta=0.7, mu=0.5)
        for start, end in ((0, 1), (1, 8), (3, 100_003), (50_001, 50_018), (99_999, 100_003)):
            part = apply_update(theta[start:end], momentum[start:end], step[start:end], eta=0.7, mu=0.5)
            for result, all_of_it in zip(part, whole, strict=True):
                assert result is not None and all_of_it is not None
                assert torch.equal(result, all_of_it[start:end])
        numpy_theta, numpy_momentum = numpy_reference(theta.numpy(), momentum.numpy(), step.numpy(), 0.7, 0.5)
        assert whole[1] is not None
        assert fragment_digest(whole[0]) == fragment_digest(torch.from_numpy(numpy_theta))
        assert fragment_digest(whole[1]) == fragment_digest(torch.from_numpy(numpy_momentum))
    finally:
        torch.set_num_threads(before)


def test_a_state_folded_from_known_updates_has_a_known_digest() -> None:
    """Guards the bits across versions of this package and of its libraries."""
    index = torch.arange(1000, dtype=torch.float64)
    theta, momentum = (index * 0.001).float(), torch.zeros(1000)
    for turn in range(1, 6):
        update = ((index * 7919 * turn % 1009) / 1009 - 0.5).float() * 0.01
        frame = encode(update, CodecSpec(name="int4", block=64), layout_digest=LAYOUT, fragment=0)
        update_hat = decode(frame, num_elements=1000, layout_digest=LAYOUT, fragment=0)
        theta, after = apply_update(theta, momentum, update_hat, eta=0.7, mu=0.5)
        assert after is not None
        momentum = after
    assert fragment_digest(theta) == "911b9a479a02cc9a5f06b7371d7b4de05d6117a75f71d23114f2af32eb0442a2"
    assert fragment_digest(momentum) == "eb3099f6a6be5ad4f6ea45afb0415bb484709eb302abd198beb2b3ac54e9c7f0"


def test_nothing_is_changed_in_place_and_no_momentum_stays_none() -> None:
    theta, momentum, step = torch.ones(3), torch.ones(3), torch.full((3,), 0.25)
    theta_next, nothing = apply_update(theta, None, step, eta=0.7, mu=0.5)
    assert nothing is None
    assert torch.equal(theta_next, apply_update(theta, momentum, step, eta=0.7, mu=0.5)[0])
    gradient, residual = torch.ones(3), torch.ones(3)
    outer_update(gradient, momentum, residual, eta=0.7, mu=0.5)
    residual_after(gradient, step)
    for tensor in (theta, momentum, gradient, residual):
        assert torch.equal(tensor, torch.ones(3))
    assert torch.equal(step, torch.full((3,), 0.25))


def test_what_is_written_to_given_vectors_has_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    theta, momentum, step, residual = (torch.randn(70_000, generator=generator) for _ in range(4))
    theta_next, momentum_next = apply_update(theta, momentum, step, eta=0.7, mu=0.5)
    out = apply_update(theta, momentum, step, eta=0.7, mu=0.5, theta_out=residual, momentum_out=momentum)
    assert out[0] is residual and out[1] is momentum
    assert bits(residual) == bits(theta_next) and bits(momentum) == bits(momentum_next)
    with pytest.raises(LayoutError):
        apply_update(theta, momentum, step, eta=0.7, mu=0.5, theta_out=torch.empty(69_999))


def test_the_update_is_nesterovs_step_plus_the_residual() -> None:
    gradient, momentum, residual = torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([0.25])
    # b' = 0.5*4 + 2 = 4; u = 0.75*(2 + 0.5*4) + 0.25
    assert outer_update(gradient, momentum, residual, eta=0.75, mu=0.5).item() == 3.25
    assert outer_update(gradient, torch.zeros(1), None, eta=0.75, mu=0.5).item() == 2.25
    assert outer_update(gradient, None, None, eta=0.75, mu=0.5).item() == 2.25


def noisy_gradients(num_steps: int, size: int) -> Iterator[Tensor]:
    """A steady drift, as pseudo-gradients have, under noise twice as large."""
    generator = torch.Generator().manual_seed(4)
    drift = torch.randn(size, generator=generator)
    for _ in range(num_steps):
        yield (drift + 2.0 * torch.randn(size, generator=generator)) * 0.01


def fold(
    codec: CodecName, num_steps: int, *, eta: float, mu: float, keep_residual: bool = True, block: int = 64
) -> tuple[Tensor, Tensor]:
    """(Theta, b) after the steps, each through a real frame."""
    theta, momentum = torch.linspace(-1, 1, 2000), torch.zeros(2000)
    residual: Tensor | None = None
    for gradient in noisy_gradients(num_steps, 2000):
        update = outer_update(gradient, momentum, residual, eta=eta, mu=mu)
        frame = encode(update, CodecSpec(name=codec, block=block), layout_digest=LAYOUT, fragment=0)
        update_hat = decode(frame, num_elements=2000, layout_digest=LAYOUT, fragment=0)
        if keep_residual:
            residual = residual_after(update, update_hat)
        theta, after = apply_update(theta, momentum, update_hat, eta=eta, mu=mu)
        assert after is not None
        momentum = after
    return theta, momentum


def torch_sgd(num_steps: int, *, eta: float, mu: float) -> tuple[Tensor, Tensor]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 2000))
    optimizer = torch.optim.SGD([parameter], lr=eta, momentum=mu, nesterov=mu > 0)
    for gradient in noisy_gradients(num_steps, 2000):
        parameter.grad = gradient
        optimizer.step()
    buffer = optimizer.state[parameter].get("momentum_buffer")
    return parameter.detach(), gradient if buffer is None else buffer


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.5), (0.7, 0.9), (0.4, 0.9), (1.0, 0.0)])
def test_without_encoding_the_fold_is_torchs_nesterov_sgd(eta: float, mu: float) -> None:
    theta, momentum = fold("none", 50, eta=eta, mu=mu)
    expected, buffer = torch_sgd(50, eta=eta, mu=mu)
    assert relative(theta, expected) <= 1e-6
    assert relative(momentum, buffer) <= 2e-6


def test_with_int4_the_fold_tracks_nesterov_because_the_residual_comes_back() -> None:
    steps = 100
    exact = torch_sgd(steps, eta=0.7, mu=0.5)[0]
    travelled = (exact - torch.linspace(-1, 1, 2000)).norm().item()
    off = (fold("int4", steps, eta=0.7, mu=0.5)[0] - exact).norm().item()
    off_without = (fold("int4", steps, eta=0.7, mu=0.5, keep_residual=False)[0] - exact).norm().item()
    assert off < 0.02 * travelled
    assert off_without > 1.5 * off, "the residual is what keeps it there"


@pytest.mark.parametrize(
    ("eta", "mu"), [(0.0, 0.5), (-1.0, 0.5), (math.nan, 0.5), (math.inf, 0.5), (0.7, 1.0), (0.7, -0.1)]
)
def test_an_eta_or_mu_that_cannot_be_folded_is_refused(eta: float, mu: float) -> None:
    with pytest.raises(LocalProtocolError, match="eta > 0"):
        apply_update(torch.ones(1), None, torch.ones(1), eta=eta, mu=mu)
    with pytest.raises(LocalProtocolError, match="eta > 0"):
        outer_update(torch.ones(1), None, None, eta=eta, mu=mu)


@pytest.mark.parametrize("other", [torch.ones(1), torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, 2)])
def test_vectors_of_another_length_or_dtype_are_not_broadcast(other: Tensor) -> None:
    good = torch.ones(2)
    with pytest.raises(LayoutError):
        apply_update(good, None, other, eta=0.7, mu=0.5)
    with pytest.raises(LayoutError):
        apply_update(good, other, good, eta=0.7, mu=0.5)
    with pytest.raises(LayoutError):
        outer_update(good, None, other, eta=0.7, mu=0.5)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 100_000), seed=st.integers(0, 2**31), eta=st.sampled_from([0.7, 0.33]))
def test_what_is_foreseen_is_what_applying_makes(size: int, seed: int, eta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta, momentum, step = (torch.randn(size, generator=generator) for _ in range(3))
    foreseen = foresee_update(theta, momentum, step, eta=eta, mu=0.5)
    theta_next, momentum_next = apply_update(theta, momentum, step, eta=eta, mu=0.5)
    assert momentum_next is not None
    assert (foreseen.state_digest, foreseen.momentum_digest) == (
        fragment_digest(theta_next),
        fragment_digest(momentum_next),
    )
    assert foreseen.is_finite
    kept = apply_update(theta, momentum, step, eta=eta, mu=0.5, momentum_out=momentum)[1]
    assert kept is momentum and torch.equal(momentum, momentum_next)


@pytest.mark.parametrize("where", [0, 40_000, 99_999])
def test_a_value_that_will_not_be_finite_is_foreseen(where: int) -> None:
    theta, momentum, step = torch.zeros(100_000), torch.zeros(100_000), torch.zeros(100_000)
    theta[where], step[where] = 3e38, -3e38
    assert not foresee_update(theta, momentum, step, eta=0.7, mu=0.5).is_finite


@pytest.mark.parametrize("has_momentum", [True, False])
def test_an_update_made_in_the_gradients_own_room_has_the_same_bits(has_momentum: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    gradient, momentum, residual = (torch.randn(70_001, generator=generator) for _ in range(3))
    kept = momentum if has_momentum else None
    expected = outer_update(gradient, kept, residual, eta=0.7, mu=0.9)
    assert outer_update(gradient, kept, residual, eta=0.7, mu=0.9, out=gradient) is gradient
    assert bits(gradient) == bits(expected)
