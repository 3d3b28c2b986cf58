"""What an arm came to: figures of a run and of a baseline mean the same things."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.config import Fault
from geo_diloco.errors import ConfigError
from geo_diloco.sim.train.arms import Arm, ArmKind
from geo_diloco.sim.train.comparing import run_arm
from geo_diloco.sim.train.fleet import Fleet, Machine
from geo_diloco.sim.train.results import mean_loss
from geo_diloco.training.models import build_model

from .runs import TOKENS_PER_STEP, fleet, small_manifest

STEPS = 20
TOKENS = 2 * STEPS * TOKENS_PER_STEP


def arm(kind: ArmKind) -> Arm:
    """Two learners, twenty steps each, H = 8."""
    return Arm(text=kind, kind=kind, manifest=small_manifest(tokens=TOKENS))


@pytest.mark.parametrize(("kind", "num_exchanges"), [("diloco", 3), ("data-parallel", STEPS)])
def test_a_baseline_waits_for_the_slowest_machine_and_link_at_every_exchange(kind: ArmKind, num_exchanges: int) -> None:
    slow = Machine(step_ms=300, up_mbit=0.5, down_mbit=2.0, delay_ms=40)
    two = Fleet(machines=(Machine(step_ms=100, up_mbit=10.0, down_mbit=10.0, delay_ms=5), slow))
    model_bytes = 4 * sum(each.numel() for each in build_model(arm(kind).manifest.model).parameters())
    exchange_ms = round(8 * model_bytes / 500) + round(8 * model_bytes / 2000) + 2 * 40
    result = run_arm(arm(kind), two, 1)
    assert result.commits == num_exchanges
    assert result.virtual_ms == STEPS * 300 + num_exchanges * exchange_ms
    assert result.bytes_up == result.bytes_down == num_exchanges * 2 * model_bytes
    assert result.tokens_trained == result.tokens_merged == TOKENS


def test_an_arm_with_thinner_links_trains_alike_and_waits_for_them() -> None:
    as_given, thin = (run_arm(replace(arm("diloco"), links=links), fleet(100, 100), 1) for links in (1.0, 0.01))
    assert (as_given.heldout, as_given.bytes_up) == (thin.heldout, thin.bytes_up)
    assert thin.virtual_ms > as_given.virtual_ms


def test_arms_begin_at_the_same_theta_and_end_at_the_same_tokens() -> None:
    results = [run_arm(arm(kind), fleet(100, 100), 3) for kind in ("decoupled", "diloco", "data-parallel")]
    assert len({result.curve[0] for result in results}) == 1
    assert {result.curve[-1][0] for result in results} == {TOKENS}
    assert all(result.heldout == result.curve[-1][2] < result.curve[0][2] for result in results)  # type: ignore[operator]
    assert len({result.heldout for result in results}) == 3


def test_figures_of_a_decoupled_run_add_up() -> None:
    result = run_arm(arm("decoupled"), fleet(100, 100), 3)
    accounted = result.tokens_merged + result.tokens_in_flight + result.tokens_carried + result.tokens_dropped
    assert accounted == result.tokens_trained
    assert result.tokens_balance
    assert 0.4 < result.bytes_per_param_up < 0.7, "int4, block 64"
    assert 1.0 < result.participants_mean <= 2.0
    assert result.virtual_ms > 0.9 * STEPS * 100
    assert run_arm(arm("decoupled"), fleet(100, 100), 3).effects_digest == result.effects_digest


def test_an_arm_that_gets_stuck_is_named() -> None:
    gone = fleet(100, faults=(Fault(learner=1, kind="crash", from_s=0.5),))
    with pytest.raises(ConfigError, match="--arm decoupled, seed 4: nobody trains any more"):
        run_arm(arm("decoupled"), gone, 4)


def test_an_arm_that_diverged_with_one_seed_has_no_mean() -> None:
    assert mean_loss([2.0, 3.0]) == 2.5
    assert mean_loss([2.0, None]) is None


def test_faults_are_for_every_arm_but_those_that_leave_them_out() -> None:
    away = fleet(100, 100, delay_ms=0, faults=(Fault(learner=2, kind="freeze", from_s=0.5, until_s=2.5),))
    ms = {}
    for kind in ("diloco", "data-parallel", "elastic-data-parallel"):
        hit, calm = run_arm(arm(kind), away, 3), run_arm(replace(arm(kind), under_faults=False), away, 3)
        ms[kind] = hit.virtual_ms - calm.virtual_ms
        assert calm.heldout == run_arm(arm(kind), fleet(100, 100, delay_ms=0), 3).heldout
        assert (hit.heldout == calm.heldout) == (kind != "elastic-data-parallel"), "only it trains on other batches"
    upscale_ms = 560
    assert ms["data-parallel"] == ms["diloco"] == 2000 + upscale_ms
    assert 0 < ms["elastic-data-parallel"] < ms["data-parallel"]


def test_an_elastic_group_that_loses_nobody_is_data_parallel_to_the_bit() -> None:
    whole, elastic = (run_arm(arm(kind), fleet(100, 100), 3) for kind in ("data-parallel", "elastic-data-parallel"))
    assert (whole.curve, whole.virtual_ms) == (elastic.curve, elastic.virtual_ms)


def test_more_exchanges_than_can_be_held_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geo_diloco.sim.train.comparing.TURNS_MAX", 19)
    with pytest.raises(ConfigError, match="--arm data-parallel, seed 3: more than 19 exchanges; give fewer tokens"):
        run_arm(arm("data-parallel"), fleet(100, 100), 3)
