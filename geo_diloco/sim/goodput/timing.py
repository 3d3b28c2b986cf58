"""How often a fleet's rounds close and who is in them: the production core, run on the fleet's own times.

It stands apart because no formula here knows the rules. Whom a round waits for follows from quorum, grace, habits, late
work, turns on thin lines and the round trips of the election, and the core itself decides on all of it, in the world of
`simulate protocol` (`sim/world.py`): a syncer that only serves and a learner on each machine, nothing fails, and all
times are a machine's own. What shells and disks take (`Fleet.shell`) is the only thing measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_diloco.manifest import ElectionSpec, EvalSpec, PeerId, StopSpec, SyncSpec
from geo_diloco.protocol.effects import Effect
from geo_diloco.protocol.events import Event
from geo_diloco.protocol.messages import Commit
from geo_diloco.sim.fakes import SignedEntry
from geo_diloco.sim.goodput.fleet import BLOB_S, Fleet, Machine, Timing, by_rates
from geo_diloco.sim.goodput.relived import Phase, Relived, Watching
from geo_diloco.sim.plans import HostPlan, Plan, ShellTimes
from geo_diloco.sim.process import Process
from geo_diloco.sim.world import Watch, World

JOIN_MS = 20_000
"""All have joined, and the electors are chosen."""
STEP_MS_MAX = 2_000
"""Of the median machine. What counts is how times compare, and every second costs: slower fleets run at a scale."""
SWEEPS_BEFORE, SWEEPS, ROUNDS = 2, 4, 100
"""Not counted, and counted: so many times every fragment at least, and so many rounds..."""
STEPS = 3_000
"""...unless that takes more inner steps of all machines together."""
SEEDS = (0, 1, 2, 3)
"""Each has its machines begin as they happen to."""
COST_MAX = 60_000
"""About ten seconds of one core."""
AHEAD_BYTES = 64 << 10
"""Of an upload the kernel has so much before the line has carried it: 32 KiB that are not sent yet (`runtime.sockets`),
and as much again on the way."""
NEVER = 10**9
"""A core's books are checked by the simulator of the protocol."""
LEARNERS_MAX = 24
"""Of more machines every n-th by speed stands for n: a core's cost grows with the learners."""


def time_rounds(fleet: Fleet, *, seeds: Sequence[int] = SEEDS) -> Timing:
    """The same fleet and seeds give the same timing. By rates alone where following the core would take minutes: with
    very many steps or fragments between two merges, be it because of the lines."""
    chosen, every = _few(fleet.machines)
    quorum = max(1, round(fleet.quorum / every))
    if _cost(fleet, chosen, quorum) > COST_MAX:
        return by_rates(fleet)
    counts = [_watch(fleet, chosen, quorum, seed) for seed in seeds]
    rounds = sum(each.rounds for each in counts)
    seconds = sum(each.seconds for each in counts)
    joins = [sum(each.joins[i] for each in counts) / max(1, rounds) for i in range(len(chosen))]
    fresh = [sum(each.fresh[i] for each in counts) / max(1, rounds) for i in range(len(chosen))]
    stands_for = [place // every for place in _places(fleet.machines)]
    scale = _scale(chosen)
    return Timing(
        rounds_per_s=rounds / seconds,
        joins=tuple(joins[i] for i in stands_for),
        fresh=tuple(fresh[i] for i in stands_for),
        phases_ms={phase: scale * ms for phase, ms in _phases(counts).items()},
    )


def _phases(counts: Sequence[_Counts]) -> dict[Phase, float]:
    all_seen = Relived()
    for each in counts:
        for phase, dated in each.watching.seen.phases.items():
            all_seen.phases[phase] += dated
    return all_seen.medians()


def _places(machines: Sequence[Machine]) -> list[int]:
    """Of each machine: its place when they are sorted by how fast they and their lines are."""
    order = sorted(range(len(machines)), key=lambda i: (machines[i].pace_s, -machines[i].up_mbit, i))
    places = [0] * len(machines)
    for place, i in enumerate(order):
        places[i] = place
    return places


def _few(machines: Sequence[Machine]) -> tuple[list[Machine], int]:
    """Those that are followed, in the order of their places, and for how many each stands."""
    every = -(-len(machines) // LEARNERS_MAX)
    by_place = sorted(zip(_places(machines), machines, strict=True), key=lambda each: each[0])
    return [machine for _, machine in by_place[::every]], every


def _cost(fleet: Fleet, machines: Sequence[Machine], quorum: int) -> float:
    """Inner steps and deltas, of all machines together."""
    joining = JOIN_MS / (1000 * _median_s(machines) / _scale(machines))
    sweep = _sweep_s(fleet, machines, quorum) / _median_s(machines) + fleet.fragments
    return len(machines) * (joining + (SWEEPS_BEFORE + SWEEPS) * sweep)


@dataclass
class _Counts(Watch):
    """What was committed from some moment on."""

    peers: list[PeerId]
    rounds: int = 0
    seconds: float = 0.0
    watching: Watching = field(default_factory=Watching)

    def __post_init__(self) -> None:
        self.joins = [0] * len(self.peers)
        self.fresh = [0] * len(self.peers)
        self._places = {peer: i for i, peer in enumerate(self.peers)}

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if process.host.index == 0:
            self.watching.look(event, effects, process.clock.now)

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        if isinstance(signed.entry, Commit):
            self.rounds += 1
            for each in signed.entry.participants:
                self.joins[self._places[each.peer]] += 1
                self.fresh[self._places[each.peer]] += each.base_version == signed.entry.version - 1


def _watch(fleet: Fleet, machines: Sequence[Machine], quorum: int, seed: int) -> _Counts:
    sweep_s, scale = _sweep_s(fleet, machines, quorum), _scale(machines)
    world = World(plan_from_fleet(fleet, machines, quorum=quorum, seed=seed, scale=scale))
    world.events_per_check = NEVER
    counts = _Counts([host.peer for host in world.hosts[1:]])
    begins_ms = round(JOIN_MS + 1000 * SWEEPS_BEFORE * sweep_s / scale)
    affordable = STEPS / (fleet.interval_steps * len(machines))
    sweeps = max(SWEEPS, min(ROUNDS / fleet.fragments, affordable))
    ends_ms = begins_ms + round(1000 * sweeps * sweep_s / scale)
    world.begin()
    world.clock.run(begins_ms)
    world.watches = (counts,)
    world.clock.run(ends_ms)
    counts.seconds = scale * (ends_ms - begins_ms) / 1000
    return counts


def _median_s(machines: Sequence[Machine]) -> float:
    """The slower of two, as for the core."""
    return sorted(machine.pace_s for machine in machines)[len(machines) // 2]


def _scale(machines: Sequence[Machine]) -> float:
    """How many seconds pass in one of the simulation."""
    return max(1.0, 1000 * _median_s(machines) / STEP_MS_MAX)


def _sweep_s(fleet: Fleet, machines: Sequence[Machine], quorum: int) -> float:
    """About how long it takes until every fragment was merged once: as the schedule has it, or as K steps and uplinks
    let it."""
    kth = min(quorum, len(machines)) - 1
    step_s = sorted(machine.pace_s for machine in machines)[kth]
    line_s = sorted(fleet.model_up_s(machine) for machine in machines)[kth]
    return max(
        fleet.interval_steps * _median_s(machines), line_s, step_s * fleet.fragments / SyncSpec().rounds_in_flight_max
    )


def plan_from_fleet(fleet: Fleet, machines: Sequence[Machine], *, quorum: int, seed: int, scale: float = 1.0) -> Plan:
    """The run as `simulate protocol` has it: a syncer that trains nothing, and a learner for each machine."""
    sync = SyncSpec(interval_steps=fleet.interval_steps, num_fragments=fleet.fragments, quorum=quorum)
    return Plan(
        seed=seed,
        hosts=(HostPlan(serves=True, elects=True), *(_host(fleet, machine, scale) for machine in machines)),
        sync=sync,
        stop=StopSpec(),
        evaluation=EvalSpec(every_seconds=0.0),
        election=ElectionSpec(one_machine=True),
        num_elements=(100,) * fleet.fragments,
        save_every_ms=0,
        is_watched=False,
        times=_scaled(fleet.shell, scale),
        step_spread=(-round(100 * fleet.step_spread), round(100 * fleet.step_spread)),
        tells_each_step=True,
    )


def _scaled(times: ShellTimes, scale: float) -> ShellTimes:
    """They count beside a step as the machines' own times do."""
    disk, fold, check, merge = (
        (round(least / scale), round(most / scale))
        for least, most in (times.disk, times.fold, times.check, times.merge)
    )
    return ShellTimes(disk=disk, fold=fold, check=check, merge=merge)


def _host(fleet: Fleet, machine: Machine, scale: float) -> HostPlan:
    def ms(seconds: float) -> int:
        return max(1, round(1000 * seconds / scale))

    up_s, down_s = (each / fleet.fragments for each in (fleet.model_up_s(machine), fleet.model_down_s(machine)))
    return HostPlan(
        step_ms=ms(machine.pace_s),
        upload_ms=ms(BLOB_S + machine.rtt_s / 2),
        uplink_ms=ms(up_s),
        ahead_ms=ms(8e-6 * AHEAD_BYTES / machine.up_mbit),
        download_ms=ms(down_s),
        delay_ms=ms(machine.rtt_s / 2),
        elects=True,
    )
