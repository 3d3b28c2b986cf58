"""Arms side by side: the same data in the same order, the same budget of tokens, one result for each arm and seed.

The baselines don't exchange messages here, they are the formulas themselves (`training/baselines.py`); their virtual
time is what waiting for the slowest learner and the slowest link would cost, and for those away (`timetable.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from geo_diloco.errors import ConfigError
from geo_diloco.manifest import RunManifest
from geo_diloco.sim.train.arms import Arm
from geo_diloco.sim.train.budget import Budget
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.sim.train.keeping import Kept
from geo_diloco.sim.train.results import ArmResult
from geo_diloco.sim.train.run import CurvePoint, Gauge, Simulation
from geo_diloco.sim.train.timetable import FLOAT32_BYTES, Timetable, Turn
from geo_diloco.tape.figures import TokenFigures, chain_figures, token_figures
from geo_diloco.training.baselines import BaselineResult, Watch, elastic_data_parallel, synchronous_diloco
from geo_diloco.training.models import build_model

NUM_POINTS = 20
"""Of a curve, besides the last."""
TURNS_MAX = 5_000_000
"""Of a baseline: days of training, and all of its timetable is in memory."""

Ended = Callable[[nn.Module], None]
"""Told of Theta at the end, as a model. Must not change it."""
Progress = Callable[[float], None]
"""Told how much of an arm's budget is spent, from 0 to 1, now and then."""


def run_arm(
    arm: Arm,
    fleet: Fleet,
    seed: int,
    progress: Progress = lambda share: None,
    *,
    num_points: int = NUM_POINTS,
    ended: Ended = lambda theta: None,
) -> ArmResult:
    """One arm with one seed; deterministic but for `wall_s`. Uses one thread. Raises ConfigError if it gets stuck."""
    theirs = (fleet if arm.under_faults else fleet.without_faults()).with_links(arm.links)
    try:
        return (_decoupled if arm.kind == "decoupled" else _baseline)(arm, theirs, seed, progress, num_points, ended)
    except ConfigError as exc:
        raise ConfigError(f"--arm {arm.text}, seed {seed}: {exc}") from exc


def _decoupled(arm: Arm, fleet: Fleet, seed: int, progress: Progress, num_points: int, ended: Ended) -> ArmResult:
    simulation = Simulation(arm.seeded(seed), fleet, seed, num_points, progress)
    outcome = simulation.go()
    ended(simulation.trained_model())
    num_elements = simulation.world.layout.num_elements
    chain = chain_figures(link.entry for link in outcome.syncer.chain)
    updates_bytes = sum(len(frame) for frame in outcome.syncer.updates.values())
    return _result(
        arm,
        seed,
        outcome.curve,
        token_figures(outcome.tokens, num_elements),
        commits=chain.commits,
        participants_mean=chain.participants_mean,
        bytes_per_param_up=chain.bytes_per_param_up,
        bytes_per_param_down=chain.bytes_per_param_down,
        bytes_up=chain.bytes_up,
        bytes_down=updates_bytes * fleet.num_learners,
        rho_mean=chain.rho_mean,
        mu_mean=chain.mu_mean,
        wall_s=outcome.wall_s,
        effects_digest=outcome.effects_digest,
    )


def _baseline(arm: Arm, fleet: Fleet, seed: int, progress: Progress, num_points: int, ended: Ended) -> ArmResult:
    began = time.perf_counter()
    torch.set_num_threads(1)  # with more, sums depend on the machine
    manifest = arm.seeded(seed)
    theta = build_model(manifest.model, with_weights=True)
    num_elements = sum(parameter.numel() for parameter in theta.parameters())
    table = Timetable(manifest, fleet, num_elements=num_elements)
    coming = table.in_rounds() if arm.kind == "diloco" else table.in_step(elastic=arm.kind == "elastic-data-parallel")
    turns = list(islice(coming, TURNS_MAX + 1))
    if len(turns) > TURNS_MAX:
        raise ConfigError(f"more than {TURNS_MAX} exchanges; give fewer tokens or seconds")
    gauge, budget = Gauge(manifest, num_points=num_points), Budget.of(manifest)
    gauge.look(0, 0, lambda: theta)
    ended_at = iter([turn.ended_at for turn in turns])
    newest, now = theta, 0

    def watch(num_tokens: int, theta: nn.Module) -> None:
        nonlocal newest, now
        newest, now = theta, next(ended_at)
        progress(budget.share(num_tokens, now))
        if not budget.is_spent(num_tokens, now):
            gauge.look(num_tokens, now, lambda: theta)

    result = _train(arm, manifest, fleet, turns, watch)
    gauge.end(result.num_tokens, now, newest)
    ended(newest)
    exchanged = FLOAT32_BYTES * num_elements * sum(len(turn.learners) for turn in turns)
    return _result(
        arm,
        seed,
        tuple(gauge.curve),
        TokenFigures(trained=result.num_tokens, merged=result.num_tokens),
        commits=len(turns),
        participants_mean=sum(len(turn.learners) for turn in turns) / max(1, len(turns)),
        bytes_per_param_up=float(FLOAT32_BYTES),
        bytes_per_param_down=float(FLOAT32_BYTES),
        bytes_up=exchanged,
        bytes_down=exchanged,
        wall_s=time.perf_counter() - began,
        effects_digest=None,
    )


def _train(arm: Arm, manifest: RunManifest, fleet: Fleet, turns: list[Turn], watch: Watch) -> BaselineResult:
    if arm.kind != "diloco":
        num_batches = sum(len(turn.learners) for turn in turns)
        return elastic_data_parallel(manifest, (turn.learners for turn in turns), num_batches, watch=watch)
    num_steps, begins = [], []
    for learner in range(fleet.num_learners):
        num_steps.append(sum(turn.steps for turn in turns if learner in turn.learners))
        begins.append(sum(turn.steps for turn in turns if learner not in turn.learners))
    return synchronous_diloco(manifest, num_steps, begins=begins, watch=watch)


def _result(arm: Arm, seed: int, curve: tuple[CurvePoint, ...], tokens: TokenFigures, **figures: Any) -> ArmResult:
    return ArmResult(
        arm=arm.text,
        kind=arm.kind,
        seed=seed,
        heldout=curve[-1].heldout,
        accuracy=curve[-1].accuracy,
        curve=tuple((point.tokens, point.virtual_ms, point.heldout) for point in curve),
        curve_accuracy=() if curve[-1].accuracy is None else tuple(point.accuracy for point in curve),
        tokens_trained=tokens.trained,
        tokens_merged=tokens.merged,
        tokens_in_flight=tokens.in_flight,
        tokens_carried=tokens.carried,
        tokens_dropped=sum(tokens.dropped_by_reason.values()),
        dropped_by_reason=tokens.dropped_by_reason,
        tokens_balance=tokens.balance,
        virtual_ms=curve[-1].virtual_ms,
        **figures,
    )


class Audience(Protocol):
    """Who is told how far a comparison is."""

    def begins(self, arm: Arm, seed: int) -> None: ...

    def progress(self, share: float) -> None:
        """How much of its budget is spent, from 0 to 1."""

    def ends(self, result: ArmResult, *, kept: bool) -> None:
        """`kept`: it was there before."""


def compare(
    arms: tuple[Arm, ...], fleet: Fleet, seeds: list[int], audience: Audience, *, kept: Kept | None = None
) -> list[ArmResult]:
    """Every arm with every seed, but for those whose results are kept; the others are kept as they come."""
    results = []
    for seed in seeds:
        for arm in arms:
            known = None if kept is None else kept.get(kept.key(arm, fleet, seed), arm)
            if known is None:
                audience.begins(arm, seed)
                results.append(run_arm(arm, fleet, seed, audience.progress))
                if kept is not None:
                    kept.add(kept.key(arm, fleet, seed), results[-1])
            else:
                results.append(known)
            audience.ends(results[-1], kept=known is not None)
    return results
