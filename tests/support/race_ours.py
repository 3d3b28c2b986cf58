"""Our side of the averaging race: a syncer and learners as `bench star` runs them, production but for the compute.

What is timed is what the run's own tapes say: when a learner's training thread took a sample, and when it had taken the
merged version into its model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from geo_diloco.cli.bench_star import SYNCER, Rig
from geo_diloco.cli.bench_star_plan import StarPlan, star_run
from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.cli.demo_processes import Children
from geo_diloco.manifest import CodecSpec, RunManifest
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
BYTES_PER_PARAM = {"int4": 0.47, "int8": 0.97, "bf16": 1.75}
"""Of this benchmark's noise, to find an interval."""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """What is run."""

    name: str
    codec: str
    syncer: Literal["shared", "own"]
    """It has the first learner's host and shares its link, or a host of its own."""
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
        """For which the syncer's link is full, each way."""
        remote = self.peers - (1 if self.syncer == "shared" else 0)
        return remote * self.parameters * BYTES_PER_PARAM[self.codec] / self.bytes_per_s

    @property
    def interval_steps(self) -> int:
        each_ms = 1000 * self.room * self.sweep_s / self.fragments
        return max(1, math.ceil(each_ms / PACE_MS)) * self.fragments


def manifest_for(ours: Ours) -> tuple[StarPlan, RunManifest]:
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
    return plan, replace(star_run(plan), codec_up=codec, codec_down=codec)


def run_ours(ours: Ours, folder: Path) -> Turn:
    """One turn: a run of its own, in a new folder. Raises GeoDilocoError if it doesn't get to work."""
    plan, manifest = manifest_for(ours)
    folder.mkdir()
    (folder / "run.toml").write_text(toml_from_manifest(manifest), encoding="utf-8")
    hosts = {f"learner-{number}": number - 1 for number in range(1, 1 + ours.peers)}
    hosts[SYNCER] = 0 if ours.syncer == "shared" else ours.peers
    line = Line(delay_ms=250 * ours.round_trip_s, mbit_per_s=ours.bytes_per_s * 8 / 1e6)
    with Namespaces(max(hosts.values()) + 1) as namespaces, Children(folder) as children:
        links = NamespaceLinks(namespaces, hosts, {host: line for host in hosts.values()})
        rig = Rig(plan, folder, links, children)
        rig.begin()
        interval_s = ours.interval_steps * PACE_MS / 1000
        rig.wait(SETTLE_SWEEPS * interval_s)
        began_ms = int(now_ms())
        meter = Meter(namespaces, by_host={host: links.pids[name] for name, host in hosts.items()}, roots=links.pids)
        rig.wait((1 + ours.sweeps) * interval_s)
        usage, ended_ms = meter.end(), int(now_ms())
        rig.end()
    return _turn(ours, folder, usage, began_ms, ended_ms)


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
