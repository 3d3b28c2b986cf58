"""A fault plan that the goodput simulator writes costs each way to train what the simulator says it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.config import fault_plan_text, load_fault_plan
from geo_diloco.config.faults import RESHAPE_S
from geo_diloco.sim.goodput import model
from geo_diloco.sim.goodput.model import System, World
from geo_diloco.sim.goodput.plans import draw_plan, goodput_by_plan
from geo_diloco.sim.goodput.systems import simulate

EIGHT = System(kind="decoupled", chips=1_200_000, learners=8)


@pytest.mark.parametrize("system", [EIGHT, System(kind="decoupled", chips=300_000, learners=2)], ids=["1.2M", "300k"])
def test_each_way_to_train_loses_as_much_as_by_itself(system: System) -> None:
    world = World(days=2.0, seeds=(1,))
    seconds = 6000.0
    found = goodput_by_plan(draw_plan(system, world, seconds=seconds, scale=25.0), system.learners, seconds=seconds)
    kinds = {
        "data-parallel": System(kind="data-parallel", chips=system.chips),
        "elastic data-parallel": System(kind="elastic data-parallel", chips=system.chips),
        "decoupled": system,
    }
    for name, each in kinds.items():
        assert found[name] == pytest.approx(simulate(each, world).goodput, abs=0.015), name


def test_another_scale_is_another_clock_and_the_same_shares() -> None:
    shares = [
        goodput_by_plan(draw_plan(EIGHT, World(), seconds=50_000 / scale, scale=scale), 8, seconds=50_000 / scale)
        for scale in (10.0, 40.0)
    ]
    for name, share in shares[0].items():
        assert shares[1][name] == pytest.approx(share, abs=0.003)


def test_the_seed_draws_the_plan_and_a_file_holds_all_of_it(tmp_path: Path) -> None:
    plan = draw_plan(EIGHT, World(), seconds=60.0, scale=25.0)
    assert plan == draw_plan(EIGHT, World(), seconds=60.0, scale=25.0)
    assert plan.faults != draw_plan(EIGHT, World(seeds=(7,)), seconds=60.0, scale=25.0).faults
    path = tmp_path / "plan.toml"
    path.write_text(fault_plan_text(plan, ["drawn"]))
    assert load_fault_plan(path, num_learners=8) == plan
    assert {fault.learner for fault in plan.faults} == set(range(1, 9))


def test_stops_that_a_plan_does_not_tell_are_those_that_were_fitted() -> None:
    assert model.RESHAPE_S / model.PLAN_SCALE == RESHAPE_S
    plan = draw_plan(EIGHT, World(times=replace(model.FITTED, upscale_s=50.0)), seconds=60.0, scale=25.0)
    assert (plan.downscale_s, plan.upscale_s, plan.repeat_s) == (RESHAPE_S, 2.0, 60.0)
