"""Adoption: what is carried, how the cap works, and that no work is lost or counted twice."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError
from geo_diloco.manifest import CodecSpec, Digest
from geo_diloco.numerics.adopt import PPM, carry_scale_ppm, shrink_to_carry_
from geo_diloco.numerics.codec import decode, encode
from geo_diloco.numerics.merge import l2_norm

LAYOUT = Digest("0123456789abcdef" * 4)


@dataclass(frozen=True)
class Adoption:
    """What `Replica.adopt` makes of a fragment."""

    theta: Tensor
    scale_ppm: int


def adopt(
    theta: Tensor, old: Tensor, new: Tensor, d_hat: Tensor | None, *, kappa: float, rbar: float, cap: float = 2.0
) -> Adoption:
    delta = theta - old
    scale_ppm = shrink_to_carry_(delta, d_hat, kappa=kappa, rbar=rbar, cap=cap)
    return Adoption(new + delta if scale_ppm else new.clone(), scale_ppm)


def test_kappa_0_overwrites_the_replica() -> None:
    new = torch.tensor([5.0, 6.0])
    adoption = adopt(torch.tensor([1.0, 2.0]), torch.zeros(2), new, None, kappa=0.0, rbar=100.0)
    assert torch.equal(adoption.theta, new) and adoption.scale_ppm == 0


def test_kappa_1_carries_all_that_was_not_merged() -> None:
    theta, old, new = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([10.0, 20.0])
    missed = adopt(theta, old, new, None, kappa=1.0, rbar=1.0)
    assert missed.theta.tolist() == [12.0, 20.0] and missed.scale_ppm == PPM
    took_part = adopt(theta, old, new, torch.tensor([1.5, 0.0]), kappa=1.0, rbar=1.0)
    assert took_part.theta.tolist() == [10.5, 20.0]


def test_a_carry_longer_than_twice_rbar_is_shortened_to_it() -> None:
    theta, new = torch.tensor([30.0, 40.0]), torch.tensor([100.0, 100.0])
    adoption = adopt(theta, torch.zeros(2), new, None, kappa=1.0, rbar=5.0)
    assert adoption.scale_ppm == 200_000
    assert adoption.theta.tolist() == pytest.approx([106.0, 108.0])
    half = adopt(theta, torch.zeros(2), new, None, kappa=0.5, rbar=5.0)
    assert half.scale_ppm == 100_000
    wide = adopt(theta, torch.zeros(2), new, None, kappa=1.0, rbar=5.0, cap=8.0)
    assert wide.scale_ppm == 800_000


@pytest.mark.parametrize(
    ("norm", "kappa", "rbar", "ppm"),
    [
        (0.0, 1.0, 0.0, PPM),
        (0.0, 0.25, 7.0, 250_000),
        (2.0, 1.0, 1.0, PPM),
        (3.0, 1.0, 1.0, 666_666),
        (3.0, 0.5, 1.0, 333_333),
        (1.0, 1.0, 0.0, 0),
        (1e-300, 1.0, 1e-310, 0),
        (1e9, 1.0, 1e-9, 0),
        (math.inf, 1.0, 1.0, 0),
        (math.nan, 1.0, 1.0, 0),
    ],
)
def test_s_is_floored_to_whole_parts_per_million(norm: float, kappa: float, rbar: float, ppm: int) -> None:
    assert carry_scale_ppm(norm, kappa=kappa, rbar=rbar) == ppm


@settings(max_examples=80, deadline=None)
@given(norm=st.floats(0, 1e30), kappa=st.floats(0, 1), rbar=st.floats(0, 1e30))
def test_s_never_exceeds_kappa_nor_the_cap(norm: float, kappa: float, rbar: float) -> None:
    scale = carry_scale_ppm(norm, kappa=kappa, rbar=rbar) / PPM
    assert 0.0 <= scale <= kappa
    assert scale * norm <= 2 * rbar * (1 + 1e-12)
    if norm <= 2 * rbar:
        assert scale > kappa - 2 / PPM


def test_the_scale_used_is_the_scale_told() -> None:
    generator = torch.Generator().manual_seed(0)
    theta, old, new = (torch.randn(100, generator=generator) for _ in range(3))
    adoption = adopt(theta, old, new, None, kappa=1.0, rbar=l2_norm(theta - old) / 7)
    assert adoption.scale_ppm == 285_714
    expected = new.double() + (theta - old).double() * (adoption.scale_ppm / PPM)
    assert torch.allclose(adoption.theta.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_replica_that_is_not_finite_is_healed() -> None:
    new = torch.tensor([1.0, 2.0])
    for bad in (math.nan, math.inf, -math.inf):
        adoption = adopt(torch.tensor([0.0, bad]), torch.zeros(2), new, None, kappa=1.0, rbar=1.0)
        assert torch.equal(adoption.theta, new) and adoption.scale_ppm == 0


def test_adoption_leaves_the_merged_delta_alone() -> None:
    for kappa, rbar in ((1.0, 100.0), (1.0, 0.01), (0.0, 1.0)):
        delta, d_hat = torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0])
        shrink_to_carry_(delta, d_hat, kappa=kappa, rbar=rbar)
        assert d_hat.tolist() == [2.0, 1.0] and delta[1] == 0.0


def test_impossible_arguments_are_our_own_fault() -> None:
    for kappa, rbar in ((-0.1, 1.0), (1.1, 1.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan)):
        with pytest.raises(LocalProtocolError, match="kappa"):
            carry_scale_ppm(1.0, kappa=kappa, rbar=rbar)
    good = torch.zeros(2)
    for wrong in (torch.zeros(3), torch.zeros(1), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(LayoutError):
            shrink_to_carry_(good, wrong, kappa=1.0, rbar=1.0)
    with pytest.raises(LayoutError):
        shrink_to_carry_(torch.zeros(2, dtype=torch.float64), None, kappa=1.0, rbar=1.0)


# ---- conservation ------------------------------------------------------------------------------------------------


class Books:
    """One fragment of a learner, beside float64 books that know where every piece of its work is.

    in flight: what the sampled delta stands for, whole until it is decided; carried: the rest of the learner's work,
    multiplied by the s of every adoption. The rules under test say that after any history theta - anchor is what is
    carried plus what is in flight times the s of the adoptions since sampling.
    """

    SIZE = 300

    def __init__(self, seed: int, *, scale_undecided: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.anchor = torch.randn(self.SIZE, generator=self.generator)
        self.theta = self.anchor.clone()
        self.d_hat: Tensor | None = None
        self.undecided_scale = 1.0
        self.scale_undecided = scale_undecided
        self.in_flight = torch.zeros(self.SIZE, dtype=torch.float64)
        self.carried = torch.zeros(self.SIZE, dtype=torch.float64)
        self.merged = torch.zeros(self.SIZE, dtype=torch.float64)
        self.dropped = torch.zeros(self.SIZE, dtype=torch.float64)
        self.trained = torch.zeros(self.SIZE, dtype=torch.float64)
        self.num_shrunk = 0

    def train(self) -> None:
        step = torch.randn(self.SIZE, generator=self.generator) * 0.01
        before = self.theta.clone()
        self.theta += step
        done = self.theta.double() - before.double()
        self.carried += done
        self.trained += done

    def sample(self) -> None:
        if self.d_hat is not None:
            return  # one undecided contribution per fragment
        delta = self.theta - self.anchor
        frame = encode(delta, CodecSpec(name="int4", block=64), layout_digest=LAYOUT, fragment=0)
        self.d_hat = decode(frame, num_elements=self.SIZE, layout_digest=LAYOUT, fragment=0)
        self.undecided_scale = 1.0
        self.in_flight += self.d_hat.double()
        self.carried -= self.d_hat.double()  # what encoding lost stays with the learner

    def adopt(self, *, takes_part: bool, rbar: float) -> None:
        takes_part = takes_part and self.d_hat is not None
        d_hat = self.d_hat * self.undecided_scale if takes_part and self.d_hat is not None else None
        anchor_new = self.anchor + torch.randn(self.SIZE, generator=self.generator) * 0.05
        adoption = adopt(self.theta, self.anchor, anchor_new, d_hat, kappa=1.0, rbar=rbar)
        self.theta, self.anchor = adoption.theta, anchor_new
        scale = adoption.scale_ppm / PPM
        self.num_shrunk += scale < 1.0
        self.dropped += (1 - scale) * self.carried
        self.carried *= scale
        if takes_part:
            self.merged += self.in_flight
            self.in_flight.zero_()
            self.d_hat = None
        elif self.d_hat is not None and self.scale_undecided:
            self.undecided_scale *= scale

    def refuse(self) -> None:
        """The delta comes back: as much of it as the replica still holds is carried, the rest dropped."""
        if self.d_hat is None:
            return
        self.carried += self.in_flight * self.undecided_scale
        self.dropped += self.in_flight * (1 - self.undecided_scale)
        self.in_flight.zero_()
        self.d_hat = None
        self.undecided_scale = 1.0

    def replica_error(self) -> float:
        """Largest difference between the replica and its books."""
        held = self.carried + self.in_flight * (self.undecided_scale if self.d_hat is not None else 1.0)
        return ((self.theta.double() - self.anchor.double()) - held).abs().max().item()

    def balance_error(self) -> float:
        return (self.trained - self.merged - self.in_flight - self.carried - self.dropped).abs().max().item()


def live(books: Books, seed: int, num_events: int) -> None:
    choice = random.Random(seed)
    for _ in range(num_events):
        event = choice.choice(["train", "train", "train", "sample", "adopt", "merge", "refuse"])
        if event == "train":
            books.train()
        elif event == "sample":
            books.sample()
        elif event == "refuse":
            if choice.random() < 0.3:
                books.refuse()
        else:
            books.adopt(takes_part=event == "merge", rbar=choice.choice([1.0, 0.05, 0.02]))


@pytest.mark.parametrize("seed", range(8))
def test_work_is_merged_in_flight_carried_or_dropped_and_the_replica_holds_what_the_books_say(seed: int) -> None:
    books = Books(seed)
    live(books, seed, 300)
    assert books.num_shrunk > 10, "the history contains shrunk carries"
    assert books.merged.norm() > 0 and books.dropped.norm() > 0
    assert books.balance_error() < 1e-9
    assert books.replica_error() < 1e-4 * books.trained.abs().max().item()


def test_without_scaling_the_undecided_delta_the_replica_is_off() -> None:
    books = Books(0, scale_undecided=False)
    live(books, 0, 300)
    assert books.replica_error() > 1e-2 * books.trained.abs().max().item()


def test_two_learners_and_theta_conserve_all_work_when_nothing_is_shrunk() -> None:
    """Theta moves by -u; with plain sums as updates, Theta plus all carries is the sum of all training."""
    generator = torch.Generator().manual_seed(9)
    size = 200
    start = torch.randn(size, generator=generator)
    theta_global = start.clone()
    replicas, anchors = [start.clone(), start.clone()], [start.clone(), start.clone()]
    trained = torch.zeros(size, dtype=torch.float64)

    def train(index: int) -> None:
        step = torch.randn(size, generator=generator) * 0.01
        replicas[index] += step
        trained.add_(step.double())

    for turn in range(30):
        train(0)
        train(1)
        sender = turn % 2
        frame = encode(
            replicas[sender] - anchors[sender],
            CodecSpec(name="int4", block=64),
            layout_digest=LAYOUT,
            fragment=0,
        )
        d_hat = decode(frame, num_elements=size, layout_digest=LAYOUT, fragment=0)
        train(sender)  # during the overlap
        theta_global = theta_global + d_hat
        for index in range(2):
            mine = d_hat if index == sender else None
            adoption = adopt(replicas[index], anchors[index], theta_global, mine, kappa=1.0, rbar=100.0)
            assert adoption.scale_ppm == PPM
            replicas[index], anchors[index] = adoption.theta, theta_global
    carried = sum(((r - a).double() for r, a in zip(replicas, anchors, strict=True)), torch.zeros(size).double())
    total = theta_global.double() - start.double() + carried
    assert (total - trained).norm() < 1e-5 * trained.norm()
