"""A learner that computes nothing still has a whole delta to hand in."""

from __future__ import annotations

import pytest
import torch

from geo_diloco.cli.bench_star_learner import Walk, noise
from geo_diloco.cli.bench_star_plan import num_rows_for


def test_every_parameter_has_moved_once_after_a_cycle_and_none_twice() -> None:
    model = noise(num_parameters=30_000)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert sum(len(each.view(-1)) for each in before) == num_rows_for(30_000) * 48 * 256
    walk = Walk(model, 100)
    for _ in range(99):
        walk.step()
    assert sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) == 47
    walk.step()
    moved = [parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)]
    assert all(float(each.std()) == pytest.approx(1e-3, rel=0.2) for each in moved), "by one portion of noise each"
    assert all(int((each == 0).sum()) < 10 for each in moved)
