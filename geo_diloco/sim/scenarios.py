"""Named scenarios: what befalls a run, and what must come of it. The data is in `scenarios.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from geo_diloco.manifest import ElectionSpec, StopSpec, SyncSpec
from geo_diloco.protocol.amendments import Changes
from geo_diloco.protocol.history import ENTRIES_KEPT
from geo_diloco.sim.plans import FOR_GOOD_MS, FOUNDER, SYNCER, Fault, HostPlan, Odds, Plan
from geo_diloco.sim.run import Outcome, Run, Violation

SYNC = SyncSpec(interval_steps=8, num_fragments=2, overlap_steps=2)
RECOVERY_S = 5.0
"""Faults count as over so long after the last one ends."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Bounds on what a scenario comes to."""

    elections: tuple[int, int]
    commits: int
    gap_s: float | None = None
    participants: float | None = None
    fresh: float | None = None
    round_s: float | None = None
    admitted: float | None = None
    amendments: int = 0
    pruned: int = 0
    branches: int = 1


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row of the failure table. Those that are no business of the core name a test instead of a plan."""

    name: str
    row: str
    plan: Plan | None
    expected: Expected | None
    test: str = ""


def scenarios() -> dict[str, Scenario]:
    """All of them, by name, in the order of the table."""
    text = resources.files("geo_diloco.sim").joinpath("scenarios.toml").read_text("utf-8")
    return {name: _scenario(name, data) for name, data in tomllib.loads(text).items()}


def play(scenario: Scenario, *, seed: int) -> Outcome:
    """Run it. Raises Violation if an invariant breaks or what comes of it is not what was expected."""
    assert scenario.plan is not None and scenario.expected is not None
    run = Run(replace(scenario.plan, seed=seed))
    outcome = run.go()
    why_not = _disappointment(outcome, scenario.expected)
    if why_not is not None:
        raise Violation(run.world, f"{scenario.name}: {why_not}")
    return outcome


def _disappointment(outcome: Outcome, expected: Expected) -> str | None:
    least, most = expected.elections
    if not least <= outcome.num_elections <= most:
        return f"{outcome.num_elections} terms were opened, expected {least} to {most}"
    if outcome.num_commits < expected.commits:
        return f"{outcome.num_commits} commits, expected {expected.commits} or more"
    if expected.gap_s is not None and outcome.gap_ms > expected.gap_s * 1000:
        return f"{outcome.gap_ms / 1000:.1f} s without a durable commit, expected at most {expected.gap_s} s"
    mean = sum(outcome.participants) / max(1, len(outcome.participants))
    if expected.participants is not None and mean < expected.participants:
        return f"{mean:.2f} participants a round, expected {expected.participants} or more"
    if (why_not := _poor_rounds(outcome, expected)) is not None:
        return why_not
    if outcome.num_amendments != expected.amendments:
        return f"{outcome.num_amendments} amendments, expected {expected.amendments}"
    if outcome.num_pruned < expected.pruned:
        return f"{outcome.num_pruned} updates were let go of, expected {expected.pruned} or more"
    if outcome.num_branches != expected.branches:
        return f"{outcome.num_branches} branches, expected {expected.branches}"
    return None


def _poor_rounds(outcome: Outcome, expected: Expected) -> str | None:
    fresh = sum(outcome.fresh) / max(1, len(outcome.fresh))
    if expected.fresh is not None and fresh < expected.fresh:
        return f"{fresh:.2f} fresh participants a round, expected {expected.fresh} or more"
    if expected.round_s is not None and outcome.round_ms > expected.round_s * 1000:
        return f"{outcome.round_ms / 1000:.2f} s a round, expected at most {expected.round_s} s"
    least = min(outcome.admitted.values(), default=1.0)
    if expected.admitted is not None and least < expected.admitted:
        return f"{least:.0%} of somebody's contributions were merged, expected {expected.admitted:.0%} or more"
    return None


def _scenario(name: str, data: Mapping[str, Any]) -> Scenario:
    if "test" in data:
        return Scenario(name=name, row=data["row"], plan=None, expected=None, test=data["test"])
    faults = tuple(_fault(each) for each in data.get("faults", ()))
    ends = [fault.at_ms + fault.for_ms for fault in faults if fault.for_ms < FOR_GOOD_MS]
    ends += [fault.at_ms for fault in faults]
    seconds = float(data["seconds"])
    sync = replace(SYNC, **data.get("sync", {}))
    plan = Plan(
        hosts=tuple(host for each in data["hosts"] for host in _hosts(each)),
        sync=sync,
        num_elements=tuple(100 + p % 2 * 200 for p in range(sync.num_fragments)),
        stop=StopSpec(minutes=seconds / 60),
        election=ElectionSpec(lease_seconds=float(data.get("lease_seconds", 5)), electors=data.get("electors", 3)),
        faults=faults,
        odds=Odds(**data.get("odds", {})),
        updates_bytes_kept=data.get("updates_bytes_kept"),
        entries_kept=data.get("entries_kept", ENTRIES_KEPT),
        faults_until_ms=max(ends) + int(RECOVERY_S * 1000) if ends else 0,
    )
    expect = data["expect"]
    expected = Expected(
        elections=tuple(expect["elections"]),
        commits=expect["commits"],
        gap_s=expect.get("gap_s"),
        participants=expect.get("participants"),
        fresh=expect.get("fresh"),
        round_s=expect.get("round_s"),
        admitted=expect.get("admitted"),
        amendments=expect.get("amendments", 0),
        pruned=expect.get("pruned", 0),
        branches=expect.get("branches", 1),
    )
    return Scenario(name=name, row=data["row"], plan=plan, expected=expected)


def _hosts(text: str) -> list[HostPlan]:
    many, times, kind = text.rpartition(" x ")
    return [_host(kind)] * (int(many) if times else 1)


def _host(text: str) -> HostPlan:
    kind, *numbers = text.split()
    rate_ppm = next((int(each) for each in numbers if each[0] in "+-"), 0)
    step_ms = next((int(each) for each in numbers if each.isdecimal()), 0)
    upload_ms = next((int(each[1:]) for each in numbers if each[0] == "^"), 0)
    match kind:
        case "founder":
            return FOUNDER
        case "standby":
            return HostPlan(serves=True, elects=True, rate_ppm=rate_ppm)
        case "elector":
            return HostPlan(step_ms=step_ms, elects=True, rate_ppm=rate_ppm, upload_ms=upload_ms)
        case "learner":
            return HostPlan(step_ms=step_ms, rate_ppm=rate_ppm, upload_ms=upload_ms, is_mute="mute" in numbers)
        case "follower":
            return HostPlan(rate_ppm=rate_ppm)
        case _:
            raise ValueError(f"no such host: {text}")


def _fault(data: Mapping[str, Any]) -> Fault:
    return Fault(
        kind=data["kind"],
        at_ms=int(data["at_s"] * 1000),
        for_ms=int(data["for_s"] * 1000) if "for_s" in data else FOR_GOOD_MS,
        host=_index(data.get("host", "syncer")),
        side=tuple(_index(each) for each in data.get("side", ())),
        changes=Changes(**data["changes"]) if "changes" in data else None,
    )


def _index(host: str | int) -> int:
    return SYNCER if host == "syncer" else int(host)
