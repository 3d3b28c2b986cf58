"""The band of a picture: the mean of the seeds, from the lowest to the highest."""

from __future__ import annotations

from geo_diloco.cli.simulate_plot import spread


def test_seeds_are_compared_where_all_are_known() -> None:
    one = [(0.0, 4.0), (1.0, 2.0), (2.0, 1.0)]
    other = [(0.0, 6.0), (2.0, 2.0), (3.0, 0.0)]
    assert spread([one, other]) == [(0.0, 5.0, 4.0, 6.0), (1.0, 3.0, 2.0, 4.0), (2.0, 1.5, 1.0, 2.0)]


def test_a_seed_that_diverged_is_left_out_and_two_points_at_one_place_are_no_matter() -> None:
    assert spread([[(0.0, 4.0), (1.0, 3.0)], []]) == [(0.0, 4.0, 4.0, 4.0), (1.0, 3.0, 3.0, 3.0)]
    assert spread([[(0.0, 4.0), (0.0, 3.0), (1.0, 2.0)]])[-1] == (1.0, 2.0, 2.0, 2.0)
    assert spread([[], []]) == []
    assert spread([[(0.0, 1.0)], [(2.0, 1.0)]]) == []
