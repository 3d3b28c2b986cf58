"""How far arms are from the first: within a seed, and what that says of seeds not tried."""

from __future__ import annotations

import pytest

from geo_diloco.sim.train.pairing import difference


def test_differences_are_shares_of_the_others_loss_within_each_seed() -> None:
    paired = difference([2.02, 4.0, 1.98], [2.0, 4.0, 2.0])
    assert paired is not None
    assert paired.by_seed == pytest.approx((0.01, 0.0, -0.01))
    assert paired.mean == pytest.approx(0.0)
    assert paired.margin == pytest.approx(4.303 * 0.01 / 3**0.5), "t with two degrees of freedom"


def test_a_single_seed_has_no_interval() -> None:
    paired = difference([2.2], [2.0])
    assert paired is not None
    assert (paired.mean, paired.margin) == (pytest.approx(0.1), None)


def test_many_seeds_go_beyond_the_table() -> None:
    losses = [2.0, 2.02] * 50
    paired = difference(losses, [2.0] * 100)
    assert paired is not None and paired.margin is not None
    assert paired.margin == pytest.approx(1.984 * 0.005 * (100 / 99) ** 0.5 / 10, rel=1e-3)


@pytest.mark.parametrize(("losses", "others"), [([], []), ([2.0], [2.0, 2.0]), ([None], [2.0]), ([2.0], [None])])
def test_what_diverged_or_is_not_paired_says_nothing(losses: list[float | None], others: list[float | None]) -> None:
    assert difference(losses, others) is None
