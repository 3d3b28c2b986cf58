"""Arms side by side: the same data in the same order, the same budget of tokens, one result for each arm and seed.

The baselines don't exchange messages here, they are the formulas themselves (`training/baselines.py`); their virtual
time is what waiting for the slowest learner and the slowest link would cost, without faults.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from geo_diloco.errors import ConfigError
from geo_diloco.manifest import RunManifest
from geo_diloco.sim.train.arms import Arm
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.sim.train.run import CurvePoint, Gauge, Simulation
from geo_diloco.tape.figures import TokenFigures, chain_figures, token_figures
from geo_diloco.training.baselines import BaselineResult, Watch, data_parallel, synchronous_diloco
from geo_diloco.training.models import build_model

NUM_POINTS = 20
"""Of a curve, besides the last."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What an arm came to with one seed: the keys of a line of `--json`."""

    arm: str
    kind: str
    seed: int
    heldout: float | None
    """Of Theta at the end, mean nats per token; none if it is not finite."""
    curve: tuple[tuple[int, int, float | None], ...]
    """(tokens trained, virtual milliseconds, held-out loss), from Theta_0 to the end."""
    tokens_trained: int
    tokens_merged: int
    tokens_in_flight: int
    tokens_carried: int
    tokens_dropped: int
    dropped_by_reason: dict[str, int]
    tokens_balance: bool
    """Trained = merged + in flight + carried + dropped, in integers, for every learner and fragment."""
    commits: int
    participants_mean: float
    bytes_per_param_up: float
    """Of a contribution, per parameter of its fragment."""
    bytes_per_param_down: float
    bytes_up: int
    """All that was merged."""
    bytes_down: int
    """All updates, to all learners."""
    virtual_ms: int
    wall_s: float
    effects_digest: str | None
    """Of every effect of every core; none for a baseline, which has no core."""
    rho_mean: float | None = None
    """Cosine between successive updates of a fragment, over all commits; none for a baseline, which tells no rho."""
    mu_mean: float | None = None
    """Momentum that was used."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_arm(arm: Arm, fleet: Fleet, seed: int, *, num_points: int = NUM_POINTS) -> ArmResult:
    """One arm with one seed; deterministic but for `wall_s`. Uses one thread. Raises ConfigError if it gets stuck."""
    if arm.kind == "decoupled":
        return _decoupled(arm, fleet, seed, num_points)
    return _baseline(arm, fleet, seed, num_points)


def _decoupled(arm: Arm, fleet: Fleet, seed: int, num_points: int) -> ArmResult:
    simulation = Simulation(arm.seeded(seed), fleet, seed, num_points)
    try:
        outcome = simulation.go()
    except ConfigError as exc:
        raise ConfigError(f"--arm {arm.text}, seed {seed}: {exc}") from exc
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


def _baseline(arm: Arm, fleet: Fleet, seed: int, num_points: int) -> ArmResult:
    began = time.perf_counter()
    torch.set_num_threads(1)  # with more, sums depend on the machine
    manifest = arm.seeded(seed)
    model = build_model(manifest.model, with_weights=True)
    model_bytes = FLOAT32_BYTES * sum(parameter.numel() for parameter in model.parameters())
    gauge = Gauge(manifest, model, num_points=num_points)
    gauge.look(0, 0, lambda: gauge.measure_model(model))
    clock = _SlowestClock(fleet, exchange_ms=fleet.exchange_ms(model_bytes))
    tokens_per_step = manifest.rules().tokens_per_step * fleet.num_learners

    def watch(num_tokens: int, theta: nn.Module) -> None:
        clock.exchanged(num_tokens // tokens_per_step)
        if num_tokens < manifest.stop.tokens:
            gauge.look(num_tokens, clock.now_ms, lambda: gauge.measure_model(theta))

    result = _train(arm, manifest, fleet.num_learners, watch)
    gauge.end(result.num_tokens, clock.now_ms, result.heldout if math.isfinite(result.heldout) else None)
    return _result(
        arm,
        seed,
        tuple(gauge.curve),
        TokenFigures(trained=result.num_tokens, merged=result.num_tokens),
        commits=clock.num_exchanges,
        participants_mean=float(fleet.num_learners),
        bytes_per_param_up=float(FLOAT32_BYTES),
        bytes_per_param_down=float(FLOAT32_BYTES),
        bytes_up=clock.num_exchanges * model_bytes * fleet.num_learners,
        bytes_down=clock.num_exchanges * model_bytes * fleet.num_learners,
        wall_s=time.perf_counter() - began,
        effects_digest=None,
    )


def _train(arm: Arm, manifest: RunManifest, num_learners: int, watch: Watch) -> BaselineResult:
    num_steps = manifest.stop.tokens // (manifest.rules().tokens_per_step * num_learners)
    if arm.kind == "diloco":
        return synchronous_diloco(manifest, [num_steps] * num_learners, watch=watch)
    return data_parallel(manifest, num_learners, num_steps, watch=watch)


def _result(arm: Arm, seed: int, curve: tuple[CurvePoint, ...], tokens: TokenFigures, **figures: Any) -> ArmResult:
    return ArmResult(
        arm=arm.text,
        kind=arm.kind,
        seed=seed,
        heldout=curve[-1].heldout,
        curve=tuple((point.tokens, point.virtual_ms, point.heldout) for point in curve),
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


class _SlowestClock:
    """Virtual time where everybody waits for everybody at each exchange."""

    def __init__(self, fleet: Fleet, *, exchange_ms: int) -> None:
        self._step_ms = fleet.slowest_step_ms
        self._exchange_ms = exchange_ms
        self._num_steps = 0
        self.num_exchanges = 0

    def exchanged(self, num_steps: int) -> None:
        """After so many steps of each learner."""
        self._num_steps = num_steps
        self.num_exchanges += 1

    @property
    def now_ms(self) -> int:
        return self._num_steps * self._step_ms + self.num_exchanges * self._exchange_ms


def summarize(arms: tuple[Arm, ...], results: list[ArmResult], facts: dict[str, Any]) -> dict[str, Any]:
    """The last line of `--json`: for each arm its held-out losses, in the order of the seeds, and their mean."""
    rows = []
    for arm in arms:
        losses = [each.heldout for each in results if each.arm == arm.text]
        rows.append({"arm": arm.text, "heldout": losses, "heldout_mean": mean_loss(losses)})
    return {"summary": True, **facts, "arms": rows, "tokens_balance": all(each.tokens_balance for each in results)}


def mean_loss(losses: list[float | None]) -> float | None:
    """None if any of them is: an arm that diverged with one seed has no mean worth printing."""
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def compare(
    arms: tuple[Arm, ...], fleet: Fleet, seeds: list[int], told: Callable[[ArmResult], None]
) -> list[ArmResult]:
    """Every arm with every seed; `told` hears of each result as it comes."""
    results = []
    for seed in seeds:
        for arm in arms:
            results.append(run_arm(arm, fleet, seed))
            told(results[-1])
    return results
