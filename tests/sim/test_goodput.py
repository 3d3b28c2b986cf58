"""The goodput simulation against closed forms that share no code with it, and what must hold whatever the numbers."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_diloco.sim.goodput.lanes import Watched, events_of_a_lane, watch
from geo_diloco.sim.goodput.model import DAY_S, HOUR_S, Group, Outcome, System, Times, World
from geo_diloco.sim.goodput.rounds import draw_rounds, slowest_step
from geo_diloco.sim.goodput.systems import share_of_time_with, simulate

NO_STOPS = Times(downscale_s=0.0, upscale_s=0.0, return_s=100.0)
STOPS = Times(downscale_s=15.0, upscale_s=25.0, return_s=70.0)
QUICK = World(days=3.0, seeds=(0,))


def watched(group: Group, times: Times, *, groups: int = 4, days: float = 20.0) -> Watched:
    return watch(group, times, groups=groups, seconds=days * DAY_S, random=np.random.default_rng(7))


def expected_goodput(rate: float, times: Times, most_away: int = 40) -> float:
    """Of an elastic group with slices without number: the stationary state of the chain of its stops, solved."""
    moves = np.zeros((most_away, most_away))
    between, stops = np.zeros(most_away), np.zeros(most_away)
    for away in range(most_away):
        back = away / times.return_s
        between[away] = 1 / (rate + back)
        for after, weight, stop in (
            (min(away + 1, most_away - 1), rate * between[away], times.downscale_s),
            (away - 1, back * between[away], times.upscale_s),
        ):
            stops[away] += weight * stop
            for returned in range(after + 1 if weight else 0):
                one = -math.expm1(-stop / times.return_s)
                chance = math.comb(after, returned) * one**returned * (1 - one) ** (after - returned)
                moves[away, after - returned] += weight * chance
    balance = np.vstack([moves.T - np.eye(most_away), np.ones(most_away)])
    visits = np.linalg.lstsq(balance, np.append(np.zeros(most_away), 1.0), rcond=None)[0]
    return float(visits @ between / (visits @ (between + stops)))


def test_one_machine_is_there_mtbf_of_mtbf_plus_repair() -> None:
    found = watched(Group(slices=1, slice_rate=1 / 400, elastic=True), NO_STOPS)
    assert found.work.mean() == pytest.approx(400 / 500, abs=0.005)
    assert found.training == pytest.approx(found.work)
    assert found.failures_per_s.mean() == pytest.approx(1 / 500, rel=0.03)


def test_many_machines_without_stops_are_each_there_that_share_of_the_time() -> None:
    found = watched(Group(slices=50, slice_rate=1 / 400, elastic=True), NO_STOPS, groups=1, days=3.0)
    assert found.work.mean() == pytest.approx(400 / 500, abs=0.005)
    assert found.training.mean() == pytest.approx(1.0, abs=1e-6), "somebody is always there"


@pytest.mark.parametrize("lost_s", [0.0, 30.0])
def test_data_parallel_waits_for_the_slice_and_starts_again(lost_s: float) -> None:
    rate = 1 / 200
    found = watched(Group(slices=10, slice_rate=rate / 10, elastic=False), replace(STOPS, lost_s=lost_s))
    assert found.work.mean() == pytest.approx(math.exp(-rate * lost_s) / (1 + rate * (70 + 25)), abs=0.005)
    assert found.training.mean() == pytest.approx(1 / (1 + rate * (70 + 25)), abs=0.005)


@pytest.mark.parametrize("mean_s", [500.0, 60.0, 15.0])
def test_an_elastic_group_is_what_its_chain_of_stops_comes_to(mean_s: float) -> None:
    slices = 100_000  # so many that those away take nothing from the work
    found = watched(Group(slices=slices, slice_rate=1 / mean_s / slices, elastic=True), STOPS, days=5.0)
    assert found.work.mean() == pytest.approx(expected_goodput(1 / mean_s, STOPS), abs=0.006)


def test_lanes_don_t_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(slices=8, slice_rate=1 / 2000, elastic=True)
    many = watched(group, STOPS, days=10.0)
    monkeypatch.setattr("geo_diloco.sim.goodput.lanes.LANES_MAX", 1)
    assert watched(group, STOPS, groups=16, days=3.0).work.mean() == pytest.approx(many.work.mean(), abs=0.01)


@given(
    slices=st.integers(1, 200),
    mean_s=st.floats(20.0, 1e6),
    times=st.builds(
        Times,
        downscale_s=st.floats(0.0, 100.0),
        upscale_s=st.floats(0.0, 100.0),
        return_s=st.floats(0.0, 1000.0),
        lost_s=st.floats(0.0, 50.0),
    ),
    elastic=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_time_is_conserved(slices: int, mean_s: float, times: Times, elastic: bool) -> None:
    """Nobody trains more than all the time, nor does more work than training allows; stops fit into what is left."""
    group = Group(slices=slices, slice_rate=1 / mean_s / slices, elastic=elastic)
    found = watch(group, times, groups=2, seconds=6 * HOUR_S, random=np.random.default_rng(0))
    assert (found.training >= 0).all() and (found.training <= 1 + 1e-9).all()
    assert (found.work >= -1e-9).all() and (found.work <= found.training + 1e-9).all()


@given(st.sampled_from([75_000, 300_000, 1_200_000]), st.sampled_from([1, 2, 4, 8]), st.floats(5.0, 30.0))
@settings(max_examples=12, deadline=None)
def test_goodput_falls_with_chips_and_rises_with_learners(chips: int, learners: int, reshape_s: float) -> None:
    world = replace(QUICK, times=Times(downscale_s=reshape_s, upscale_s=reshape_s, return_s=60.0))

    def goodput(number: int, m: int) -> float:
        return simulate(System(kind="decoupled", chips=number, learners=m), world).goodput

    here = goodput(chips, learners)
    assert goodput(2 * chips, learners) < here < goodput(chips, 2 * learners)


def test_a_learner_is_an_elastic_group_of_its_chips() -> None:
    """The paper's rule: M learners do as well as one on an M-th of the chips."""
    whole = simulate(System(kind="elastic data-parallel", chips=150_000), QUICK)
    parts = simulate(System(kind="decoupled", chips=1_200_000, learners=8), QUICK)
    assert parts.goodput == pytest.approx(whole.goodput, abs=0.006)
    assert whole.uptime < 0.95 and parts.uptime > 0.99999


def test_every_way_loses_less_than_the_one_before() -> None:
    data, elastic, decoupled = (
        simulate(System(kind=kind, chips=600_000, learners=m), QUICK)
        for kind, m in (("data-parallel", 1), ("elastic data-parallel", 1), ("decoupled", 4))
    )
    assert data.goodput + 0.2 < elastic.goodput < decoupled.goodput - 0.1


def test_uptime_is_the_chance_that_k_train_at_once() -> None:
    shares = [0.9, 0.5, 0.2, 0.7]
    for least in range(6):
        by_hand = sum(
            math.prod(p if up else 1 - p for p, up in zip(shares, ups, strict=True))
            for ups in itertools.product((0, 1), repeat=4)
            if sum(ups) >= least
        )
        assert share_of_time_with(least, shares) == pytest.approx(by_hand)


def test_the_slowest_slice_sets_the_pace() -> None:
    world = World(step_spread=0.1)
    sigma = math.sqrt(math.log1p(0.01))
    drawn = np.random.default_rng(1).lognormal(-(sigma**2) / 2, sigma, (2000, 64)).max(axis=1)
    found = slowest_step(world, groups=20_000, slices=64, random=np.random.default_rng(2))
    assert found.mean() == pytest.approx(drawn.mean(), abs=0.005)
    assert (slowest_step(World(), groups=3, slices=64, random=np.random.default_rng(2)) == 1.0).all()
    spread, even = (
        simulate(System(kind="elastic data-parallel", chips=1280), replace(QUICK, step_spread=s)) for s in (0.1, 0.0)
    )
    assert spread.goodput < even.goodput - 0.05


def rounds(training: list[float], steps: list[float], **rules: object) -> tuple[float, float]:
    found = draw_rounds(
        replace(World(), **rules),  # type: ignore[arg-type]
        training=np.array(training),
        steps=np.array(steps),
        random=np.random.default_rng(3),
    )
    return found.participants, found.in_time


def test_quorum_and_grace_decide_who_is_in_a_merge() -> None:
    four = [1.0] * 4, [1.0] * 4
    assert rounds(*four, quorum=4) == (4.0, 1.0)
    assert rounds(*four, quorum=1, grace=False) == (1.0, 0.25)
    participants, in_time = rounds(*four, quorum=1, grace=True)
    assert participants > 3.5 and in_time == pytest.approx(participants / 4)
    assert rounds([1.0] * 4, [1.0, 1.0, 1.0, 8.0], quorum=1)[0] < 3.5, "grace waits for nobody that long"
    assert rounds([0.5] * 4, [1.0] * 4, quorum=4)[1] == pytest.approx(0.5**3, abs=0.02), "no quorum, no round"


def test_the_same_seed_gives_the_same_outcome_whatever_the_hash_seed() -> None:
    code = (
        "from geo_diloco.sim.goodput.systems import simulate\n"
        "from geo_diloco.sim.goodput.model import System, World\n"
        "world = World(days=1.0, seeds=(3, 4), step_spread=0.05)\n"
        "print([simulate(System(kind='decoupled', chips=200_000, learners=3), world)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and "goodput" in said.pop()
    one, other = (simulate(System(kind="data-parallel", chips=10**6), replace(QUICK, seeds=(s,))) for s in (0, 1))
    assert one.goodput != other.goodput


def test_a_lane_s_events_are_foreseen() -> None:
    """The estimate by which a command refuses what would take hours is an upper bound, and no wild one."""
    group = Group(slices=100, slice_rate=1 / 6000, elastic=True)
    lane_s = 3 * DAY_S / 128
    happened = 2 * watched(group, STOPS, days=3.0).failures_per_s.mean() * lane_s
    assert happened < events_of_a_lane(group, STOPS, seconds=3 * DAY_S) < 10 * happened


def test_an_outcome_tells_the_spread_of_its_seeds() -> None:
    outcome = simulate(System(kind="data-parallel", chips=300_000), replace(QUICK, days=0.5, seeds=(0, 1, 2)))
    assert isinstance(outcome, Outcome)
    assert len(outcome.goodput_by_seed) == 3
    assert outcome.spread == max(outcome.goodput_by_seed) - min(outcome.goodput_by_seed) > 0
