"""The learner's replica: what a delta is, and that no inner step is lost or counted twice when versions change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from geo_diloco.errors import LayoutError
from geo_diloco.manifest import CodecSpec
from geo_diloco.numerics.codec import decode, encode
from geo_diloco.training.replica import SCALE_ONE, Replica

from .toy import Toy, layout_of, make_toy, vectors_of


def make_replica(seed: int = 0) -> tuple[Toy, Replica, list[Tensor]]:
    model = make_toy(seed)
    layout = layout_of(model)
    theta = vectors_of(make_toy(seed + 100), layout)
    replica = Replica(model, layout)
    for fragment, vector in enumerate(theta):
        replica.reset(fragment, vector)
    return model, replica, theta


def work(model: Toy, amount: float) -> None:
    """Stands for inner steps: every weight moves."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


def test_reset_puts_theta_into_the_model_and_leaves_no_delta() -> None:
    model, replica, theta = make_replica()
    for fragment, vector in enumerate(vectors_of(model, replica.layout)):
        assert torch.equal(vector, theta[fragment])
        assert not replica.sample(fragment).any()


def test_a_delta_is_local_minus_anchor() -> None:
    model, replica, _ = make_replica()
    work(model, 0.25)
    torch.testing.assert_close(replica.sample(1), torch.full_like(replica.anchor(1), 0.25), atol=1e-6, rtol=0)


def test_a_sample_is_a_copy_that_later_steps_do_not_touch() -> None:
    model, replica, _ = make_replica()
    work(model, 0.25)
    delta = replica.sample(0)
    before = delta.clone()
    work(model, 1.0)
    assert torch.equal(delta, before)


def test_adoption_never_writes_to_an_anchor_or_to_theta() -> None:
    model, replica, theta = make_replica()
    old, new = replica.anchor(0), theta[0] + 1.0
    kept, given = old.clone(), new.clone()
    work(model, 0.5)
    replica.adopt(0, new, None, kappa=1.0, rbar=10.0)
    work(model, 0.5)
    assert torch.equal(old, kept) and torch.equal(new, given) and replica.anchor(0) is new


def test_a_participant_carries_only_the_steps_since_its_sample() -> None:
    model, replica, theta = make_replica()
    work(model, 0.25)
    delta = replica.sample(0)
    work(model, 0.125)
    scale = replica.adopt(0, theta[0] + 2.0, delta, kappa=1.0, rbar=100.0)
    assert scale == SCALE_ONE
    torch.testing.assert_close(replica.sample(0), torch.full_like(delta, 0.125), atol=1e-5, rtol=0)


def test_a_learner_that_missed_the_round_carries_all_its_work() -> None:
    model, replica, theta = make_replica()
    work(model, 0.25)
    replica.adopt(0, theta[0] - 3.0, None, kappa=1.0, rbar=100.0)
    expected = theta[0] - 3.0 + 0.25
    torch.testing.assert_close(vectors_of(model, replica.layout)[0], expected, atol=1e-5, rtol=0)


def test_at_kappa_zero_theta_overwrites_the_replica() -> None:
    model, replica, theta = make_replica()
    work(model, 0.25)
    new = theta[0] + 0.5
    assert replica.adopt(0, new, None, kappa=0.0, rbar=1.0) == 0
    assert torch.equal(vectors_of(model, replica.layout)[0], new)


def test_merging_late_work_after_a_shrunk_adoption_conserves_the_work() -> None:
    """Sample, miss a commit that shrinks the carry, be merged in the next: what is left is only later work."""
    model, replica, theta = make_replica()
    work(model, 0.5)
    delta = replica.sample(0)
    norm = float(delta.norm())
    scale = replica.adopt(0, theta[0], None, kappa=1.0, rbar=norm / 4)  # s = 1/2
    assert scale == pytest.approx(SCALE_ONE / 2, abs=2)
    work(model, 0.125)
    replica.adopt(0, theta[0], delta, kappa=1.0, rbar=100.0)
    torch.testing.assert_close(replica.sample(0), torch.full_like(delta, 0.125), atol=1e-5, rtol=0)
    assert replica.undecided_scale[0] == 1.0


CODECS = [
    CodecSpec(name="int4", block=256),
    CodecSpec(name="bf16"),
    CodecSpec(name="int8"),
    CodecSpec(name="none"),
    CodecSpec(name="int4", block=16),
]


def test_what_encoding_loses_is_carried_into_the_next_sample_whatever_its_codec() -> None:
    """The carry is the error feedback: what was handed in so far, and what is carried now, is all that was trained."""
    model, replica, theta = make_replica()
    layout, trained, handed_in = replica.layout, torch.zeros_like(theta[0]), torch.zeros_like(theta[0])
    for turn, codec in enumerate(CODECS * 2):
        generator = torch.Generator().manual_seed(turn)
        with torch.no_grad():
            before = vectors_of(model, layout)[0].clone()
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
        trained += vectors_of(model, layout)[0] - before
        delta = replica.sample(0)
        frame = encode(delta, codec, layout_digest=layout.digest, fragment=0)
        d_hat = decode(frame, num_elements=len(delta), layout_digest=layout.digest, fragment=0)
        lost = float((delta - d_hat).norm())
        replica.adopt(0, theta[0], d_hat, kappa=1.0, rbar=1e6)
        handed_in += d_hat
        carried = replica.sample(0)
        torch.testing.assert_close(handed_in + carried, trained, atol=1e-5, rtol=0)
        assert float(carried.norm()) == pytest.approx(lost, abs=1e-5)
    assert float(carried.norm()) > 1e-4, "the last codec loses something, else this shows nothing"


def test_a_new_sample_forgets_the_scale_of_the_last_one() -> None:
    model, replica, theta = make_replica()
    work(model, 0.5)
    norm = float(replica.sample(0).norm())
    replica.adopt(0, theta[0], None, kappa=1.0, rbar=norm / 4)
    delta = replica.sample(0)
    replica.adopt(0, theta[0], delta, kappa=1.0, rbar=100.0)
    assert float(replica.sample(0).norm()) < 1e-5


def test_fragments_are_adopted_one_by_one() -> None:
    model, replica, theta = make_replica()
    work(model, 0.25)
    other = vectors_of(model, replica.layout)[1]
    replica.adopt(0, theta[0] + 1.0, None, kappa=1.0, rbar=100.0)
    assert torch.equal(vectors_of(model, replica.layout)[1], other)
    assert torch.equal(replica.anchor(1), theta[1])


def test_another_model_is_refused_by_name_of_the_first_difference() -> None:
    with pytest.raises(LayoutError, match=r"embedding\.weight"):
        Replica(Toy(vocab_size=12), layout_of(make_toy()))


def test_a_replica_without_theta_can_not_be_sampled() -> None:
    model = make_toy()
    with pytest.raises(LayoutError, match="no anchor"):
        Replica(model, layout_of(model)).sample(0)
