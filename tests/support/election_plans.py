"""What happens in an election world, as data: sizes, links, and mishaps, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from geo_diloco.manifest import PeerId
from geo_diloco.protocol.election.books import ElectionRules

MishapKind = Literal[
    "crash", "lose", "pause", "cut", "slow disk", "lose blob", "wall", "handover", "bounce", "amnesia", "reform"
]
FOR_GOOD_MS = 10**9


@dataclass(frozen=True, kw_only=True)
class Mishap:
    """Something that befalls one host, or the links around some, for a while."""

    kind: MishapKind
    at_ms: int
    for_ms: int
    host: int = 0
    syncer: bool = False
    """It befalls whoever is syncer then."""
    side: tuple[int, ...] = ()
    one_way: bool = False
    outwards: bool = False
    gone: bool = False
    """Of a reform: the lost majority is gone with its machines, not behind a cut."""


@dataclass(frozen=True, kw_only=True)
class ElectionPlan:
    """Everything about one simulated run. The same plan gives the same run."""

    seed: int = 0
    dialable: tuple[bool, ...] = (True, True, True)
    """One per peer; the first founds the run. Those that can't be dialled can't be candidates."""
    electors_wanted: int = 3
    lease_ms: int = 15_000
    silent_ms: int = 60_000
    num_learners: int = 2
    commit_ms: tuple[int, int] = (300, 500)
    delay_ms: tuple[int, int] = (2, 60)
    blob_ms: tuple[int, int] = (10, 200)
    loss: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    late_ms: tuple[int, int] = (100, 4_000)
    remembered: int | None = None
    """Entries before the durable head that stay in memory; none: all of them."""
    provoke: float = 0.0
    """Chance of something bad right after a decisive moment."""
    mishaps: tuple[Mishap, ...] = ()
    faults_until_ms: int = 60_000

    def rules(self, founder: PeerId) -> ElectionRules:
        return ElectionRules(
            owner=founder,
            lease_ms=self.lease_ms,
            silent_ms=self.silent_ms,
            tail_max=24,
            electors_wanted=self.electors_wanted,
        )


def swarm_plan(seed: int, *, faults_until_ms: int = 60_000) -> ElectionPlan:
    """All of it from one seed: random mishaps, plots that aim at the syncer, lost majorities, or all of these."""
    chance = random.Random(seed * 7919 + 1)
    num_peers = chance.randint(5, 9)
    style = chance.choice(("random", "random", "random", "plots", "plots", "both", "both", "reform", "amnesia"))
    two_doors = style == "amnesia"
    dialable = tuple(index < 2 or (chance.random() < 0.6 and not two_doors) for index in range(num_peers))
    lease_ms = chance.choice((4_000, 4_000, 6_000, 6_000, 10_000, 15_000))
    mishaps: tuple[Mishap, ...] = ()
    if style in ("random", "both", "reform"):
        mishaps += _storms(chance, num_peers, lease_ms, faults_until_ms)
    if style in ("plots", "both"):
        mishaps += _plots(chance, lease_ms, faults_until_ms)
    if style == "reform" or chance.random() < 0.15:
        mishaps += _reforms(chance, lease_ms, faults_until_ms)
    if style == "amnesia":
        at_ms = chance.randint(12_000, 20_000)
        mishaps += (Mishap(kind="amnesia", at_ms=at_ms, for_ms=lease_ms * 9 // 4, syncer=True),)
    return ElectionPlan(
        seed=seed,
        dialable=dialable,
        electors_wanted=chance.choice((3, 3, 5)) if not two_doors else 5,
        lease_ms=lease_ms,
        silent_ms=chance.choice((2, 4)) * lease_ms,
        commit_ms=chance.choice(((150, 400), (300, 1_000))),
        delay_ms=chance.choice(((1, 30), (5, 150), (20, 600))),
        blob_ms=chance.choice(((5, 60), (30, 300), (200, 1_200))),
        loss=chance.choice((0.0, 0.02, 0.1)),
        twice=chance.choice((0.0, 0.05)),
        late=chance.choice((0.0, 0.05, 0.2)),
        remembered=chance.choice((None, None, 30)),
        provoke=chance.choice((0.0, 0.1, 0.3, 0.5)) if style != "amnesia" else 0.0,
        mishaps=mishaps,
        faults_until_ms=faults_until_ms,
    )


def _reforms(chance: random.Random, lease_ms: int, until_ms: int) -> tuple[Mishap, ...]:
    """The majority of the electors is lost, and the owner reforms; sometimes they come back, and the branches meet."""
    mishaps: list[Mishap] = []
    at_ms = chance.randint(15_000, 25_000)
    while at_ms < until_ms - 10_000 and len(mishaps) < 3:
        for_ms = chance.choice((chance.randint(4, 7) * lease_ms, FOR_GOOD_MS)) if not mishaps else 5 * lease_ms
        mishaps.append(Mishap(kind="reform", at_ms=at_ms, for_ms=for_ms, gone=chance.random() < 0.5))
        at_ms += chance.randint(6, 10) * lease_ms
    return tuple(mishaps)


def _plots(chance: random.Random, lease_ms: int, until_ms: int) -> tuple[Mishap, ...]:
    """Mishaps that together are worse than each: they aim at a syncer that is cut off with its lease."""
    mishaps: list[Mishap] = []
    at = chance.randint(12_000, 20_000)
    while at < until_ms:
        plot = chance.choice(("coup", "bounce", "long tail", "late coup"))
        promise = lease_ms * 102 // 100
        if plot == "coup":
            if chance.random() < 0.7:
                mishaps.append(Mishap(kind="wall", at_ms=at - 20, for_ms=chance.randint(1_000, 12_000), syncer=True))
            mishaps.append(_cut_off(at, lease_ms * 5 // 2))
        elif plot == "bounce":
            mishaps.append(_cut_off(at, 2 * lease_ms))
            for_ms = chance.randint(100, 300)
            mishaps.append(Mishap(kind="bounce", at_ms=at + chance.randint(0, 400), for_ms=for_ms, syncer=True))
        elif plot == "long tail":
            mishaps.append(_cut_off(at, 2 * lease_ms + 1_000))
            crash_at = at + promise + chance.randint(2_000, 6_000)
            mishaps.append(Mishap(kind="crash", at_ms=crash_at, for_ms=4 * lease_ms, syncer=True))
        else:
            mishaps.append(_cut_off(at, promise + chance.randint(1_200, 4_000)))
            crash_at = at + promise + chance.randint(1_200, 5_000)
            mishaps.append(Mishap(kind="crash", at_ms=crash_at, for_ms=2 * lease_ms, syncer=True))
            mishaps.append(Mishap(kind="crash", at_ms=at + 3 * lease_ms, for_ms=lease_ms, syncer=True))
        at += chance.randint(2, 5) * lease_ms
    return tuple(mishaps)


def _cut_off(at_ms: int, for_ms: int) -> Mishap:
    return Mishap(kind="cut", at_ms=at_ms, for_ms=for_ms, syncer=True, side=(0,))


def _storms(chance: random.Random, num_peers: int, lease_ms: int, until_ms: int) -> tuple[Mishap, ...]:
    """Random mishaps in storms, with lulls between them that are long enough, often, for somebody to be elected."""
    kinds: list[MishapKind] = ["crash", "crash", "pause", "cut", "cut", "cut", "slow disk", "handover", "wall"]
    kinds += ["lose blob"] if chance.random() < 0.5 else []
    kinds += ["lose"] if chance.random() < 0.5 else []
    mishaps: list[Mishap] = []
    at_ms = chance.randint(6_000, 12_000)
    while at_ms < until_ms:
        storm_until = at_ms + chance.randint(4_000, 20_000)
        pace_ms = chance.choice((800, 1_500, 3_000, 6_000))
        while at_ms < min(storm_until, until_ms):
            for_ms = int(1_000 * chance.choice((1, 1, 2, 5, 10, 25)) * chance.uniform(1, 1.5))
            mishaps.append(_mishap(chance, chance.choice(kinds), num_peers, at_ms, for_ms))
            at_ms += int(chance.expovariate(1 / pace_ms)) + 50
        at_ms = storm_until + 3_000 + lease_ms * chance.choice((2, 4, 6)) // 4
        ends_at = at_ms - 3_000 - chance.choice((0, lease_ms))
        mishaps = [replace(m, for_ms=max(1_000, min(m.for_ms, ends_at - m.at_ms))) for m in mishaps]
    return tuple(mishaps)


def _mishap(chance: random.Random, kind: MishapKind, num_peers: int, at_ms: int, for_ms: int) -> Mishap:
    size = chance.randint(1, max(1, num_peers // 2))
    return Mishap(
        kind=kind,
        at_ms=at_ms,
        for_ms=for_ms,
        host=chance.randrange(num_peers),
        syncer=chance.random() < 0.4,
        side=tuple(chance.sample(range(num_peers), size)),
        one_way=chance.random() < 0.3,
        outwards=chance.random() < 0.5,
    )
