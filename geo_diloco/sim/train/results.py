"""What an arm came to with one seed, and all of them together: the lines of `simulate train --json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from geo_diloco.sim.train.arms import Arm
from geo_diloco.sim.train.pairing import difference


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What an arm came to with one seed: the keys of a line of `--json`."""

    arm: str
    kind: str
    seed: int
    heldout: float | None
    """Of Theta at the end, mean nats per token; none if it is not finite."""
    accuracy: float | None
    """Of Theta at the end, share of the held-out images told right; none of a language model."""
    curve: tuple[tuple[int, int, float | None], ...]
    """(tokens trained, virtual milliseconds, held-out loss), from Theta_0 to the end."""
    curve_accuracy: tuple[float | None, ...]
    """At the same points; empty for a language model."""
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


def summarize(arms: tuple[Arm, ...], results: list[ArmResult], facts: dict[str, Any]) -> dict[str, Any]:
    """The last line of `--json`: for each arm its held-out losses, in the order of the seeds, their mean, and how far
    they are from the first arm's."""
    rows = []
    losses_of = {arm.text: [each.heldout for each in results if each.arm == arm.text] for arm in arms}
    for arm in arms:
        losses = losses_of[arm.text]
        paired = None if arm is arms[0] else difference(losses, losses_of[arms[0].text])
        against = None if paired is None else asdict(paired)
        row = {"arm": arm.text, "heldout": losses, "heldout_mean": mean_loss(losses), "against_first": against}
        accuracies = [each.accuracy for each in results if each.arm == arm.text]
        if any(accuracy is not None for accuracy in accuracies):
            row |= {"accuracy": accuracies, "accuracy_mean": mean_loss(accuracies)}
        rows.append(row)
    return {"summary": True, **facts, "arms": rows, "tokens_balance": all(each.tokens_balance for each in results)}


def mean_loss(losses: list[float | None]) -> float | None:
    """None if any of them is: an arm that diverged with one seed has no mean worth printing."""
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None
