"""One simulated election run: faults first, watched for safety; then they stop and progress is demanded in time.

Many of them, from a command line:
    python -m tests.support.election_run --seeds 2000 --seconds 120    the swarm
    python -m tests.support.election_run --timings 100                 how long nothing is committed
    python -m tests.support.election_run --mutants 500                 the first seed that finds each broken rule
Each ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import dataclass

from tests.support.election_checkers import AppendChecker, DurableChecker, LeaseChecker, RecordChecker
from tests.support.election_plans import ElectionPlan, swarm_plan
from tests.support.election_world import World

CATCH_UP_MS = 10_000
AFTER_MS = 5_000
MEET_MS = 15_000
"""What may be added where there is more than one branch: until those who matter have heard of the later."""


class Violation(AssertionError):
    """What broke, with the seed and the last lines of the film."""

    def __init__(self, plan: ElectionPlan, world: World, what: str) -> None:
        self.what = what
        film = "\n".join(list(world.film)[-40:])
        super().__init__(f"seed {plan.seed} at {world.clockwork.now} ms: {what}\n{film}")


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    seed: int
    num_events: int
    num_elections: int
    num_durable: int
    healed_ms: int | None
    """From the end of faults to a durable commit; none where nothing could be demanded."""
    num_rosters: int
    num_reforms: int
    digest: str


def run_election(plan: ElectionPlan) -> Outcome:
    """Raises Violation."""
    world = World(plan)
    durables = DurableChecker(world)
    appends = AppendChecker(world, durables)
    world.watchers = (appends, durables, RecordChecker(), LeaseChecker(world))
    try:
        world.begin()
        world.clockwork.run(plan.faults_until_ms)
        healed_ms = _heal(world, durables)
    except AssertionError as error:
        raise Violation(plan, world, str(error)) from error
    return Outcome(
        seed=plan.seed,
        num_events=world.num_events,
        num_elections=appends.num_elections,
        num_rosters=appends.num_rosters,
        num_reforms=world.mishaps.num_reforms,
        num_durable=durables.num_durable,
        healed_ms=healed_ms,
        digest=world.effects_digest(),
    )


def _heal(world: World, durables: DurableChecker) -> int | None:
    """I9: 2 L after healing, and what catching up takes. I10: within that, everybody is in one branch. Nothing of this
    if the newest reform was lost with a disk, and only the owner can bring it again."""
    since = durables.since = world.clockwork.now
    world.heal()
    durables.lineage = _lineage(world)
    lost_reform = durables.lineage < world.mishaps.num_reforms
    demanded = electable(world) and _durable_left(world, durables) and not lost_reform
    until = since + 2 * world.plan.lease_ms + CATCH_UP_MS + world.plan.late_ms[1] + MEET_MS * (durables.lineage > 0)
    world.clockwork.run(until, lambda: durables.commit_at is not None)
    if durables.commit_at is None:
        assert not demanded, f"I9: no durable commit {until - since} ms after faults stopped\n{describe(world)}"
        return None
    healed_ms = durables.commit_at - since
    world.clockwork.run(world.clockwork.now + AFTER_MS)
    world.clockwork.run(max(until, world.clockwork.now), lambda: _together(world, durables.lineage))
    assert lost_reform or _together(world, durables.lineage), (
        f"I10: not everybody follows the later branch\n{describe(world)}"
    )
    return healed_ms


def _lineage(world: World) -> int:
    """The latest branch that anybody who is here knows of."""
    tips = [digest for host in world.hosts if host.process is not None for digest in host.disk.tips()]
    return max((world.book.lineage(digest) for digest in tips), default=0)


def _together(world: World, lineage: int) -> bool:
    here = [host.process.machine for host in world.hosts if host.process is not None]
    return all(machine.record.lineage == lineage for machine in here if machine.record.branch)


def electable(world: World) -> bool:
    """Whether every roster that may count has a majority of its disks here."""
    up = [host for host in world.hosts if host.process is not None]
    seats, lineage = {(host.peer, host.disk.enrolment) for host in up}, _lineage(world)
    tips = {digest for host in up for digest in host.disk.tips()}
    rosters = {world.book.roster(digest) for digest in tips if world.book.lineage(digest) == lineage}
    whole = all(2 * sum((e.peer, e.enrolment) in seats for e in roster) > len(roster) for roster in rosters)
    return bool(tips) and whole and _bytes_left(world)


def _bytes_left(world: World) -> bool:
    """Lost blobs are excused only if no copy of what somebody held is left. In place of what came before a snapshot
    there must be one that can be fetched: here nobody uploads snapshots."""
    up = [host for host in world.hosts if host.process is not None]
    stored = {digest for host in up for digest in host.disk.stored}
    fetched = {digest for host in up if host.dialable for digest in host.disk.whole}
    roots = {host.disk.root.head.digest for host in up if host.disk.root is not None}
    return roots <= stored | fetched and all(set(host.disk.known) & host.disk.whole <= stored for host in up)


def _durable_left(world: World, durables: DurableChecker) -> bool:
    """What was durable on one disk alone, before others had come to the roster, may be gone with that disk."""
    tops = [digest for digest in durables.tops() if world.book.lineage(digest) == durables.lineage]
    return all(any(digest in host.disk.whole for host in world.hosts if host.process is not None) for digest in tops)


def describe(world: World) -> str:
    """One line a peer."""
    lines = []
    for host in world.hosts:
        process = host.process
        if process is not None:
            status = process.machine.status(process.mono())
            lines.append(
                f"  {host.index}{'' if host.dialable else ' nat'} {status.role} term {status.term} head "
                f"{tuple(status.head.rank)} held {tuple(status.held)} best {tuple(process.machine.best.rank)} "
                f"candidacy: {status.candidacy}; vote: {status.vote}; append: {status.append}; {status.roster_plan}"
            )
    return "\n".join(lines)


# ---- the command ------------------------------------------------------------------------------------------------


def swarm(first: int, num_seeds: int, seconds: int) -> dict[str, object]:
    """Many seeds; prints each violation with its film and goes on."""
    began, violations, healed = time.perf_counter(), [], []
    totals = {"durable": 0, "elections": 0, "rosters": 0, "reforms": 0, "events": 0}
    digest = hashlib.sha256()
    for seed in range(first, first + num_seeds):
        try:
            outcome = run_election(swarm_plan(seed, faults_until_ms=1_000 * seconds))
        except Violation as violation:
            print(violation, flush=True)
            violations.append(seed)
            continue
        for name in totals:
            totals[name] += getattr(outcome, f"num_{name}")
        healed += [] if outcome.healed_ms is None else [outcome.healed_ms]
        digest.update(outcome.digest.encode())
    spread = sorted(healed) or [0]
    return {
        "seeds": num_seeds,
        "seconds": seconds,
        "violations": violations,
        **totals,
        "healed": len(healed),
        "healed_ms_p50": spread[len(spread) // 2],
        "healed_ms_p95": spread[len(spread) * 95 // 100],
        "digest": digest.hexdigest(),
        "wall_s": round(time.perf_counter() - began, 1),
        "processor_s": round(time.process_time(), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated elections")
    parser.add_argument("--seeds", type=int, default=150, help="how many runs")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=int, default=60, help="simulated seconds with faults, each run")
    parser.add_argument("--timings", type=int, metavar="SEEDS", help="gaps between commits instead")
    parser.add_argument("--mutants", type=int, metavar="SEEDS", help="search that many seeds for each mutant instead")
    wanted = parser.parse_args()
    if wanted.timings is not None:
        from tests.support.election_timings import timings

        print(json.dumps(timings(wanted.timings)))
    elif wanted.mutants is not None:
        from tests.support.election_mutants import search

        print(json.dumps(search(wanted.mutants)))
    else:
        print(json.dumps(swarm(wanted.first, wanted.seeds, wanted.seconds)))


if __name__ == "__main__":
    main()
