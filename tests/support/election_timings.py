"""How long nothing is committed: after the syncer is killed, after links heal, and at a planned hand-over.

Timed at the default lease, over links like those of the internet, from outside: from what happens to the first durable
commit that was sealed after it. The swarm (`election_run.py`) proves that nothing is lost; this says what it costs.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.election_checkers import DurableChecker
from tests.support.election_plans import ElectionPlan, Mishap, swarm_plan
from tests.support.election_run import run_election
from tests.support.election_world import World

LEASE_MS = 15_000
LONGEST_MS = 120_000


def calm_plan(seed: int) -> ElectionPlan:
    """Five peers, two of which only dial out; nothing goes wrong by itself."""
    return ElectionPlan(
        seed=seed,
        dialable=(True, True, True, False, False),
        electors_wanted=random.Random(seed).choice((3, 5)),
        lease_ms=LEASE_MS,
        commit_ms=(300, 500),
        delay_ms=(5, 150),
        blob_ms=(30, 300),
        loss=0.01,
        faults_until_ms=LONGEST_MS,
    )


def gap_after(seed: int, kind: str) -> int:
    """Milliseconds from a mishap of the syncer to the first durable commit sealed after it; for a hand-over, between
    the last durable commit before and the first after it."""
    world = World(calm_plan(seed))
    durables = DurableChecker(world)
    world.watchers = (durables,)
    world.begin()
    world.clockwork.run(30_000 + random.Random(seed).randrange(3_000))
    assert durables.last_commit_at and world.syncer() is not None, f"seed {seed}: nobody serves after 30 s"
    terms = {world.book.entries[digest].term for digest in durables.tops()}
    began_at = durables.since = world.clockwork.now
    before_at = durables.last_commit_at
    world.mishaps.befall(Mishap(kind=kind, at_ms=began_at, for_ms=LONGEST_MS, syncer=True))  # type: ignore[arg-type]
    if kind == "handover":
        durables.since_term = max(terms) + 1
    world.clockwork.run(LONGEST_MS, lambda: durables.commit_at is not None)
    assert durables.commit_at is not None, f"seed {seed}: no durable commit after {kind}"
    return durables.commit_at - (before_at if kind == "handover" else began_at)


def healing_ms(seed: int) -> int | None:
    """From the end of a swarm run's faults to a durable commit, at the default lease; none if nothing is demanded."""
    plan = replace(swarm_plan(seed), lease_ms=LEASE_MS, silent_ms=4 * LEASE_MS)
    return run_election(plan).healed_ms


def quantile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def timings(num_seeds: int) -> dict[str, dict[str, int]]:
    """p50, p95 and the longest, in ms."""
    measured = {
        "after a kill of the syncer": [gap_after(seed, "crash") for seed in range(num_seeds)],
        "at a planned hand-over": [gap_after(seed, "handover") for seed in range(num_seeds)],
        "after healing": [ms for ms in map(healing_ms, range(num_seeds)) if ms is not None],
    }
    return {
        name: {"runs": len(gaps), "p50": quantile(gaps, 0.5), "p95": quantile(gaps, 0.95), "longest": max(gaps)}
        for name, gaps in measured.items()
    }
