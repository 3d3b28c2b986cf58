"""May a round close now? One pure function, with its reason: the decision of the protocol most worth arguing about.

Quorum counts *fresh* contributions only; late ones ride along. After the quorum a grace window may stay open for
those who are about to deliver, as long as that costs nobody an inner step (Decoupled DiLoCo, arXiv 2604.21428, Eq. 3:
slack = tau * step_time - (time_to_quorum + time_to_sync)). Where transfers don't fit into tau steps Eq. 3 gives zero
and every round would merge one learner; there the window closes when everyone *expected* has delivered (numerics.md,
section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import MonoMs, SyncSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFacts:
    """What the decision depends on. Times in milliseconds of the syncer's monotonic clock."""

    now: MonoMs
    opened_at: MonoMs
    quorum_at: MonoMs | None
    """When the K-th fresh contribution was delivered and valid; none if it has not been."""
    fresh: int
    late: int
    """Delivered and valid, by freshness."""
    live: int
    """Learners that train and are heard of."""
    missing: int
    """Live learners that have not delivered and still could."""
    given_up: int
    """Those of them that have been awaited for long and delivered nothing (`patience`)."""
    expected_missing: int
    """Those of them whose habits predict delivery before the window ends, from when they said that they sampled if they
    did; and those without habits."""
    slack_ms: int | None
    """Eq. 3 of the paper; none until there are estimates."""
    cap_ms: int
    """One inner step of the slowest fresh learner."""
    due_again_at: MonoMs | None
    """When the fragment's next turn comes at the present pace; none if unknown."""
    was_due: bool
    """Whether it had come before the quorum was there, because of a slow uplink."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`until`: look again then, even if nothing happens."""

    close: bool
    reason: str
    until: MonoMs | None = None


def decide(facts: RoundFacts, sync: SyncSpec) -> Decision:
    """Close the round now, or wait, and why."""
    if facts.fresh < sync.quorum or facts.quorum_at is None:
        return _below_quorum(facts, sync)
    if facts.missing == 0:
        return Decision(True, f"all {facts.fresh + facts.late} who could deliver have")
    if sync.lockstep or not sync.grace:
        return Decision(True, f"quorum of {sync.quorum}, no grace")
    if facts.slack_ms is None:
        return _window(facts, facts.quorum_at + facts.cap_ms, f"grace {facts.cap_ms} ms, no estimates yet")
    if facts.slack_ms > 0:
        grace_ms = min(int(sync.grace_gamma * facts.slack_ms), facts.cap_ms)
        return _window(facts, facts.quorum_at + grace_ms, f"grace {grace_ms} ms of {facts.slack_ms} ms slack")
    return _slow_links(facts, facts.quorum_at, sync)


def _below_quorum(facts: RoundFacts, sync: SyncSpec) -> Decision:
    waiting = Decision(False, f"quorum: {facts.fresh} of {sync.quorum} fresh, {facts.live} live")
    only_late_left = facts.live > 0 and facts.missing == facts.given_up and facts.late > 0
    if not only_late_left or facts.fresh + facts.late < sync.quorum or facts.due_again_at is None:
        return waiting
    until = MonoMs(facts.opened_at + int(sync.grace_gamma * max(0, facts.due_again_at - facts.opened_at)))
    if facts.now >= until:
        never = f", {facts.given_up} never deliver" if facts.given_up else ""
        return Decision(True, f"only late work: {facts.late} contributions{never}")
    return Decision(False, f"only late work so far: {facts.late} contributions", until)


def _slow_links(facts: RoundFacts, quorum_at: MonoMs, sync: SyncSpec) -> Decision:
    if facts.expected_missing == 0:
        return Decision(True, "everyone expected has delivered")
    latest_ms = window_ms(facts.opened_at, quorum_at, facts.due_again_at, sync, was_due=facts.was_due)
    until = quorum_at if latest_ms is None else facts.opened_at + latest_ms
    return _window(facts, until, f"{facts.expected_missing} expected are on their way")


def window_ms(
    opened_at: MonoMs, quorum_at: MonoMs | None, due_again_at: MonoMs | None, sync: SyncSpec, *, was_due: bool
) -> int | None:
    """How long after opening the window ends where transfers don't fit into tau steps, if there is anybody to wait for;
    before the quorum, how long it would last if that were there at once. None if the pace is not known.

    It never lasts until the fragment is due again. Where links are so slow that it was due before the quorum was there,
    uplinks set the pace, and nothing is won by closing at once: equal learners are up to an upload apart, and each
    would be alone in its round. Then the window is as long as it took to the quorum, before gamma.
    """
    if due_again_at is None:
        return None
    quorum_ms = 0 if quorum_at is None else quorum_at - opened_at
    left_ms = quorum_ms if was_due else max(0, due_again_at - opened_at - quorum_ms)
    return quorum_ms + int(sync.grace_gamma * left_ms)


def _window(facts: RoundFacts, until: int, why: str) -> Decision:
    if facts.now >= until:
        return Decision(True, f"window over: {why}")
    return Decision(False, why, MonoMs(until))
