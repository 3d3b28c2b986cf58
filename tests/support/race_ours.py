"""Our side of the averaging race: a syncer and learners as `bench star` runs them, production but for the compute.

What is timed is what the run's own tapes say: when a learner's training thread took a sample, and when it had taken the
merged version into its model.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from geo_diloco.cli.bench_star_plan import RigPlan, StarPlan, rig_plan
from geo_diloco.cli.bench_star_rig import SYNCER, Rig
from geo_diloco.cli.demo_processes import Children
from geo_diloco.errors import GeoDilocoError
from geo_diloco.manifest import CodecSpec
from geo_diloco.protocol.events import Adopted, DeltaEncoded, SampleTaken, Sealed
from geo_diloco.protocol.messages import Commit
from geo_diloco.runtime.chain import read_entries
from geo_diloco.runtime.driver import now_ms
from geo_diloco.tape import read_tape
from tests.support.namespace_links import Line, NamespaceLinks
from tests.support.namespaces import Namespaces
from tests.support.race_figures import Hand, Merge, Turn, Usage, sweeps_of, within
from tests.support.race_meter import Meter

PACE_MS = 30
SETTLE_SWEEPS = 3
"""Until the run goes at its pace: while all join, links are wide."""
PATIENCE = 20
"""A turn may last so many times as long as its sweeps are apart; a busy machine needs that."""
BYTES_PER_PARAM = {"int4": 0.47, "int8": 0.95, "bf16": 1.40}
"""Of this benchmark's noise, to find an interval."""


Syncer = Literal["shared", "own", "wide"]


@dataclass(frozen=True, kw_only=True)
class Ours:
    """What is run."""

    name: str
    codec: str
    syncer: Syncer
    """It has the first learner's host and shares its link, or a host of its own with such a link, or one with a link
    as wide as all learners' together."""
    peers: int
    parameters: int
    bytes_per_s: float
    round_trip_s: float
    fragments: int
    congestion: str
    room: float
    """An interval is so many times as long as the busiest link needs for a sweep. Where it is hardly longer, rounds
    queue up behind each other, and each takes the longer."""
    sweeps: int
    """That are counted in a turn."""

    @property
    def sweep_s(self) -> float:
        """For which the busiest link is full, each way."""
        times = {"shared": self.peers - 1, "own": self.peers, "wide": 1}[self.syncer]
        return times * self.parameters * BYTES_PER_PARAM[self.codec] / self.bytes_per_s

    @property
    def interval_steps(self) -> int:
        each_ms = 1000 * self.room * self.sweep_s / self.fragments
        return max(1, math.ceil(each_ms / PACE_MS)) * self.fragments


def plan_for(ours: Ours) -> RigPlan:
    """All learners are the quorum: what is merged is merged of all, as theirs is."""
    plan = StarPlan(
        learners=ours.peers,
        parameters=ours.parameters,
        bytes_per_s=ours.bytes_per_s,
        round_trip_s=ours.round_trip_s,
        pace_ms=PACE_MS,
        quorum=ours.peers,
        fragments=ours.fragments,
        interval=ours.interval_steps,
        slow_one=1.0,
        mirrors=0,
        choices=False,
        congestion=ours.congestion,
        warm_up_s=0.0,
        seconds=0.0,
    )
    codec = CodecSpec(name=ours.codec, block=256 if ours.codec == "int8" else 64)
    rig = rig_plan(plan)
    return replace(rig, run=replace(rig.run, codec_up=codec, codec_down=codec))


def run_ours(ours: Ours, folder: Path) -> Turn:
    """One turn: a run of its own, in a new folder. Raises GeoDilocoError if it doesn't get to work."""
    plan = plan_for(ours)
    folder.mkdir()
    hosts = {f"learner-{number}": number - 1 for number in range(1, 1 + ours.peers)}
    hosts[SYNCER] = 0 if ours.syncer == "shared" else ours.peers
    rates = {host: ours.bytes_per_s for host in hosts.values()}
    if ours.syncer == "wide":
        rates[hosts[SYNCER]] *= ours.peers
    delay_ms = 250 * ours.round_trip_s
    lines = {host: Line(delay_ms=delay_ms, mbit_per_s=rate * 8 / 1e6) for host, rate in rates.items()}
    with Namespaces(len(lines)) as namespaces, Children(folder) as children:
        links = NamespaceLinks(namespaces, hosts, lines)
        rig = Rig(plan, folder, links, children)
        rig.begin()
        chain = folder / SYNCER / "chain.jsonl"
        interval_s = ours.interval_steps * PACE_MS / 1000
        _wait_for(SETTLE_SWEEPS, rig, chain, ours)
        began_ms = int(now_ms())
        by_host = {host: (links.pids[name], rates[host]) for name, host in hosts.items()}
        meter = Meter(namespaces, by_host=by_host, roots=links.pids.values())
        _wait_for(1 + ours.sweeps, rig, chain, ours)  # the one under way is not watched from its beginning on
        rig.wait(interval_s)  # for the last one to be adopted
        usage, ended_ms = meter.end(), int(now_ms())
        rig.end()
    return _turn(ours, folder, usage, began_ms, ended_ms)


def _wait_for(sweeps: int, rig: Rig, chain: Path, ours: Ours) -> None:
    """Until so many more are committed, whole. Raises GeoDilocoError if that takes too long."""
    each_s = ours.interval_steps * PACE_MS / 1000
    deadline = time.monotonic() + PATIENCE * (1 + sweeps) * each_s
    wanted = max(_versions(chain, ours.fragments)) + sweeps
    while min(_versions(chain, ours.fragments)) < wanted:
        if time.monotonic() > deadline:
            raise GeoDilocoError(f"{ours.name}: {sweeps} sweeps took longer than {PATIENCE} times what they should")
        rig.wait(max(1.0, each_s / 4))


def _versions(chain: Path, num_fragments: int) -> list[int]:
    """Newest committed, by fragment."""
    found = dict.fromkeys(range(num_fragments), 0)
    found |= {entry.fragment: entry.version for entry in read_entries(chain) if isinstance(entry, Commit)}
    return list(found.values())


def _turn(ours: Ours, folder: Path, usage: Usage, began_ms: int, ended_ms: int) -> Turn:
    """From what the processes left on disk."""
    sealed: dict[tuple[int, int], int] = {}
    for boot in read_tape(folder / SYNCER / "tape.jsonl"):
        sealed |= {(e.event.term, e.event.seq): e.at for e in boot.events if isinstance(e.event, Sealed)}
    commits = [entry for entry in read_entries(folder / SYNCER / "chain.jsonl") if isinstance(entry, Commit)]
    hands = [_hand(folder / f"learner-{number}" / "tape.jsonl") for number in range(1, 1 + ours.peers)]
    merges = [
        Merge(
            fragment=each.fragment,
            version=each.version,
            fresh=frozenset(p.contribution.digest for p in each.participants if p.base_version == each.version - 1),
        )
        for each in commits
    ]
    times = [sealed.get((each.header.term, each.header.seq), 0) for each in commits]
    sweeps = within(sweeps_of(merges, hands, num_fragments=ours.fragments), began_ms, ended_ms)
    return Turn(
        side=ours.name,
        seconds=tuple(each.took_s for each in sweeps),
        usage=usage,
        rounds=sum(began_ms < at <= ended_ms for at in times) / ours.fragments,
        fragment_s=tuple(each.fragment_s for each in sweeps),
    )


def _hand(tape: Path) -> Hand:
    taken: dict[tuple[int, int], int] = {}
    sampled: dict[str, int] = {}
    adopted: dict[tuple[int, int], int] = {}
    for record in (record for boot in read_tape(tape) for record in boot.events):
        event = record.event
        if isinstance(event, SampleTaken):
            taken[event.fragment, event.round] = record.at
        elif isinstance(event, DeltaEncoded):
            sampled[event.blob.digest] = taken[event.fragment, event.round]
        elif isinstance(event, Adopted):
            adopted[event.fragment, event.version] = record.at
    return Hand(sampled_ms=sampled, adopted_ms=adopted)
