"""Plans drawn from a seed: everything that can go wrong, for a while."""

from __future__ import annotations

import random
from dataclasses import replace

from geo_diloco.manifest import CodecSpec, ElectionSpec, OuterSpec, StopSpec, SyncSpec
from geo_diloco.protocol.amendments import Changes
from geo_diloco.sim.plans import FOR_GOOD_MS, FOUNDER, SYNCER, Fault, FaultKind, HostPlan, Odds, Plan

SETTLED_MS = 8_000
"""Before that the roster is still growing; some faults come earlier all the same."""


def drawn_plan(seed: int, *, seconds: float = 60.0, num_hosts: tuple[int, int] = (5, 9)) -> Plan:
    """Hosts, rules, links and faults of one run. Faults end at three fifths of it."""
    chance = random.Random(f"swarm {seed}")
    hosts = _hosts(chance, chance.randint(*num_hosts))
    lease_s = chance.choice((3.0, 3.0, 5.0, 8.0))
    until_ms = int(seconds * 600)
    num_fragments = chance.choice((1, 2, 4))
    num_learners = sum(host.step_ms > 0 for host in hosts)
    sync = SyncSpec(
        interval_steps=chance.choice((4, 8, 12)),
        num_fragments=num_fragments,
        overlap_steps=chance.choice((0, 1, 2)),
        quorum=chance.choice((1, 1, min(2, num_learners))),
        grace=chance.random() < 0.8,
        kappa=chance.choice((1.0, 1.0, 0.0)),
        rounds_in_flight_max=chance.choice((1, 2, 8)),
        staleness_max=chance.choice((1, 3, 8)),
    )
    plan = Plan(
        seed=seed,
        hosts=hosts,
        sync=sync,
        outer=_outer(seed),
        stop=StopSpec(minutes=seconds / 60),
        election=ElectionSpec(lease_seconds=lease_s, electors=chance.choice((3, 3, 5))),
        num_elements=tuple(chance.choice((64, 100, 256)) for _ in range(num_fragments)),
        tokens_per_step=chance.choice((24, 24, 1)),
        save_every_ms=chance.choice((1_500, 4_000, 9_000)),
        snapshot_every_ms=chance.choice((2_000, 7_000)),
        delay_ms=chance.choice(((1, 20), (1, 60), (20, 250))),
        transfer_ms=chance.choice(((5, 100), (5, 600), (300, 2_000))),
        faults=(
            *_faults(chance, hosts, until_ms),
            *_amendments(seed, sync, seconds, until_ms),
            *_reforms(seed, hosts, until_ms),
        ),
        odds=_odds(chance),
        faults_until_ms=until_ms,
        forgets_uploads=chance.random() < 0.5,
        updates_bytes_kept=chance.choice((0, 0, 20_000, None)),
    )
    return replace(plan, entries_kept=0) if plan.updates_bytes_kept == 0 else plan


def _outer(seed: int) -> OuterSpec:
    """In two runs of three momentum has a limit that it meets."""
    chance = random.Random(f"outer {seed}")
    return OuterSpec(mu=chance.choice((0.5, 0.9)), gain_max=chance.choice((0.0, 1.25, 2.0)))


def _hosts(chance: random.Random, num_hosts: int) -> tuple[HostPlan, ...]:
    """The founder, some standbys, and learners, a few of whom are electors behind a NAT."""
    hosts = [FOUNDER]
    num_standbys = chance.randint(1, max(1, num_hosts // 2 - 1))
    for index in range(num_hosts - 1):
        rate_ppm = chance.choice((0, 0, 500, -500, 4_000, -4_000))
        if index < num_standbys:
            hosts.append(HostPlan(serves=True, elects=True, rate_ppm=rate_ppm))
        else:
            step_ms = chance.choice((60, 100, 150, 400))
            hosts.append(HostPlan(step_ms=step_ms, elects=chance.random() < 0.5, rate_ppm=rate_ppm))
    return tuple(hosts)


def _faults(chance: random.Random, hosts: tuple[HostPlan, ...], until_ms: int) -> tuple[Fault, ...]:
    kinds: list[FaultKind] = ["crash", "crash", "freeze", "cut", "cut apart", "cut apart", "leave", "hand over"]
    kinds += ["slow disk", "unreachable"]
    pace_ms = chance.choice((1_500, 3_000, 6_000))
    at_ms = chance.choice((1_500, SETTLED_MS, SETTLED_MS))
    faults: list[Fault] = []
    while at_ms < until_ms - 500:
        for_ms = min(int(chance.choice((300, 1_000, 2_500, 7_000, 15_000)) * chance.uniform(1, 1.5)), until_ms - at_ms)
        side = chance.sample(range(len(hosts)), chance.randint(1, max(1, len(hosts) // 2)))
        if chance.random() < 0.4:
            side[0] = SYNCER
        host = SYNCER if chance.random() < 0.45 else chance.randrange(len(hosts))
        faults.append(Fault(kind=chance.choice(kinds), at_ms=at_ms, for_ms=for_ms, host=host, side=tuple(side)))
        at_ms += int(chance.expovariate(1 / pace_ms)) + 50
    if chance.random() < 0.15:
        learners = [index for index, host in enumerate(hosts) if host.step_ms and not host.elects]
        if len(learners) > 1:
            faults.append(Fault(kind="crash", at_ms=until_ms // 2, for_ms=FOR_GOOD_MS, host=learners[-1]))
    return tuple(faults)


def _amendments(seed: int, sync: SyncSpec, seconds: float, until_ms: int) -> tuple[Fault, ...]:
    """In one run of three the owner changes his mind, once or more."""
    chance = random.Random(f"owner {seed}")
    if chance.random() > 0.33:
        return ()
    wishes = (
        Changes(quorum=1, grace=not sync.grace),
        Changes(quorum=sync.quorum, eta=0.5, mu=0.25),
        Changes(minutes=seconds / 60 * chance.choice((0.7, 1.0, 1.1)), grace_gamma=0.25),
        Changes(commits=chance.choice((60, 300)), codec_up=CodecSpec(name="int8"), codec_down=CodecSpec(name="bf16")),
        Changes(tokens=chance.choice((5_000, 50_000, 0)), minutes=seconds / 60),
    )
    times = sorted(chance.randrange(3_000, until_ms) for _ in range(chance.choice((1, 1, 2, 4))))
    return tuple(Fault(kind="amend", at_ms=at_ms, for_ms=0, changes=chance.choice(wishes)) for at_ms in times)


def _reforms(seed: int, hosts: tuple[HostPlan, ...], until_ms: int) -> tuple[Fault, ...]:
    """In one run of eight the founder and others are away, the owner reforms, and some time later they come back."""
    chance = random.Random(f"reform {seed}")
    able = [index for index, host in enumerate(hosts) if host.serves]
    if chance.random() > 0.125 or len(able) < 2 or until_ms < 3 * SETTLED_MS:
        return ()
    at_ms = chance.randrange(SETTLED_MS, until_ms // 2)
    away = [0, *chance.sample(able[1:], len(able) // 2 if len(able) > 2 else 0)]
    gone = [
        Fault(kind="crash", at_ms=at_ms, for_ms=chance.randrange(until_ms // 8, until_ms // 3), host=index)
        for index in away
    ]
    return (*gone, Fault(kind="reform", at_ms=at_ms + chance.randrange(500, 4_000), for_ms=0))


def _odds(chance: random.Random) -> Odds:
    return Odds(
        update_lost=chance.choice((0.0, 0.0, 0.05)),
        apply_failed=chance.choice((0.0, 0.02)),
        upload_failed=chance.choice((0.0, 0.1)),
        bad_frame=chance.choice((0.0, 0.1)),
        merge_failed=chance.choice((0.0, 0.1)),
        twice=chance.choice((0.0, 0.1)),
        shrink=chance.choice((0.0, 0.0, 0.2)),
    )
