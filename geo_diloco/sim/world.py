"""A simulated run's world: hosts with disks and clocks, the network between them, faults, and whoever watches.

The same plan gives the same run, event for event: all chance comes from the one clockwork, and whatever is iterated is
in a fixed order.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from geo_diloco.manifest import BranchId, Digest, MonoMs, PeerId, RunRules, Seq, Term, Version
from geo_diloco.protocol.effects import Effect, Note
from geo_diloco.protocol.events import Event, HandoverAsked, SnapshotLoaded
from geo_diloco.protocol.messages import FragmentHead, Reform
from geo_diloco.protocol.peer import Peer
from geo_diloco.sim.clock import Clockwork
from geo_diloco.sim.disk import Disk
from geo_diloco.sim.fakes import LAYOUT, SignedEntry, fake_digest, fake_peer
from geo_diloco.sim.liar import LIAR, Liar
from geo_diloco.sim.network import Network
from geo_diloco.sim.owner import Amender, Reformer, reform_if_stuck
from geo_diloco.sim.plans import SYNCER, Fault, HostPlan, Plan
from geo_diloco.sim.process import Process
from geo_diloco.sim.work import Work

FILM_LINES = 400
OWNER_LOOKS_MS = (4_000, 8_000)
EVENTS_PER_CHECK = 8
"""A core's own books are checked after one event in so many, which finds what is wrong a moment later..."""
MANY_HOSTS = 16
"""...and in one of as many as there are hosts in sixteen, because that looks at everybody."""


@dataclass
class Host:
    """A machine: its disk, its clock, and the process on it, if one runs."""

    index: int
    plan: HostPlan
    peer: PeerId
    offset: int
    disk: Disk
    process: Process | None = None
    starts: int = 0
    slow_disk_until: int = 0

    @property
    def address(self) -> str:
        return f"host{self.index}:1" if self.plan.serves else ""

    def mono(self, now: int) -> MonoMs:
        return MonoMs(self.offset + now + now * self.plan.rate_ppm // 1_000_000)

    def real(self, mono: int) -> int:
        """The first real time at which this host's clock shows that."""
        now = (mono - self.offset) * 1_000_000 // (1_000_000 + self.plan.rate_ppm)
        while self.mono(now) < mono:
            now += 1
        return now


class Watch:
    """What watches a world from outside. Every method may raise AssertionError."""

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        """A core was given an event."""

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        """An entry is on its syncer's disk."""

    def durable(self, process: Process, signed: SignedEntry) -> None:
        """An entry was folded somewhere for the first time."""

    def state(self, process: Process, fragment: int, version: int, digest: Digest) -> None:
        """A process holds that Theta."""

    def saved(self, process: Process, save: int) -> None:
        """A learner's checkpoint is on its disk."""

    def ended(self, process: Process) -> None:
        """A process died or left."""

    def began_again(self, host: Host) -> None:
        """A host's folder was moved away."""

    def abandoned(self, chain: list[SignedEntry]) -> None:
        """The owner's reform left all behind that was durable after these."""


class World:
    """Everything that the processes share."""

    def __init__(self, plan: Plan, core: type[Peer] = Peer) -> None:
        self.plan = plan
        self.core = core
        """What every process runs."""
        self.clock = Clockwork(plan.seed)
        self.network = Network(self)
        self.hosts = [self._host(index, each) for index, each in enumerate(plan.hosts)]
        self.able = [host for host in self.hosts if host.plan.serves]
        """Hosts that can be dialed, and may be syncer."""
        self.by_peer = {host.peer: host for host in self.hosts}
        self.rules = RunRules(
            sync=plan.sync,
            outer=plan.outer,
            stop=plan.stop,
            evaluation=plan.evaluation,
            num_shares=4,
            tokens_per_step=plan.tokens_per_step,
            founder=self.hosts[0].peer,
            election=plan.election,
        )
        self.watches: tuple[Watch, ...] = ()
        self.contents: dict[Digest, Work] = {}
        """What each contribution's blob holds."""
        self.bad_blobs: set[Digest] = set()
        self.entries: dict[Digest, SignedEntry] = {}
        """All that were ever sealed."""
        self.lineages: dict[Digest, int] = {}
        """Number of the reform behind an entry, as far as anybody asked (`chaincheckers.lineage_at`)."""
        self.lineage = 0
        """Of what is durable."""
        self.film: deque[str] = deque(maxlen=FILM_LINES)
        self.num_events = 0
        self.events_per_check = max(EVENTS_PER_CHECK, len(self.hosts) // MANY_HOSTS)
        self.num_acts = 0
        """Of people: reforms that were signed, folders that were moved away."""
        self.was_told_finished = False
        """Somebody heard that the run is over."""
        self._effects = hashlib.sha256()
        self.gone: set[int] = set()
        """Hosts that never come back."""

    def _host(self, index: int, plan: HostPlan) -> Host:
        offset = self.clock.random.randrange(1, 10_000_000)
        return Host(index, plan, fake_peer(f"host {index}"), offset, Disk(enrolment=f"disk {index}"))

    def theta_0(self) -> SnapshotLoaded:
        """What the founder starts from: no entry yet."""
        heads = tuple(
            FragmentHead(
                version=Version(0),
                base=Digest(""),
                state_digest=fake_digest("theta_0", p),
                momentum_digest=fake_digest("momentum_0", p),
            )
            for p in range(len(self.plan.num_elements))
        )
        return SnapshotLoaded(
            branch=BranchId(""),
            term=Term(0),
            seq=Seq(-1),
            head_digest=Digest(""),
            heads=heads,
            num_elements=self.plan.num_elements,
            layout_digest=LAYOUT,
            tokens_per_fragment=(0,) * len(heads),
            progress=0.0,
            roster=(),
            roster_seq=Seq(-1),
            opened=None,
            whole_chain=True,
        )

    # -- who finds whom -------------------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        return [host.process for host in self.hosts if host.process is not None]

    def able_processes(self) -> list[Process]:
        """Those that run on the hosts that can be dialed."""
        return [host.process for host in self.able if host.process is not None]

    def mirrors(self, process: Process) -> list[Process]:
        """Everybody whom that process can dial."""
        others = [
            each for each in self.able_processes() if each is not process and each.accepts_links and not each.frozen
        ]
        return [each for each in others if self.network.can_dial(process.host, each.host)]

    def donors(self, process: Process) -> list[Process]:
        """The same, those that serve in the highest term first."""
        return sorted(self.mirrors(process), key=lambda each: (not each.core.serves, -each.core.ledger.term))

    def published(self, process: Process) -> list[Process]:
        """Candidates in the part of the directory that it reaches."""
        others = [each for each in self.able_processes() if each is not process]
        return [each for each in others if self.network.reaches(process.host, each.host)]

    def claimed_syncer(self, process: Process) -> PeerId | None:
        """Whoever the directory says serves; now and then it is out of date."""
        serving = [each for each in self.published(process) if each.core.serves]
        able = [host for host in self.able if host is not process.host]
        if serving and self.clock.random.random() < 0.8:
            return max(serving, key=lambda each: each.core.election.record.term).peer
        return self.clock.random.choice(able).peer if able else None

    def collector(self, process: Process) -> Process | None:
        """The syncer that this process talks to, if bytes get through."""
        host = None if process.sought is None else self.by_peer[process.sought]
        if host is None or host.process is None or host.process.frozen:
            return None
        return host.process if self.network.can_dial(process.host, host) else None

    def syncer(self) -> Process | None:
        """Whoever serves, in the highest term."""
        serving = [each for each in self.able_processes() if each.core.serves]
        return max(serving, key=lambda each: each.core.election.record.term, default=None)

    # -- faults ---------------------------------------------------------------------------------------------------

    @property
    def faults_on(self) -> bool:
        return self.clock.now < self.plan.faults_until_ms

    def mishap(self, odds: float) -> bool:
        return odds > 0 and self.faults_on and self.clock.random.random() < odds

    def begin(self) -> None:
        """Start everyone, and let the plan's faults come."""
        for host in self.hosts:
            self.start(host)
        if self.plan.has_liar:
            Liar(self).start()
        for fault in self.plan.faults:
            self.clock.at(fault.at_ms, lambda fault=fault: self._befall(fault))  # type: ignore[misc]

    def start(self, host: Host) -> None:
        if host.process is None and host.index not in self.gone:
            host.process = Process(self, host)
            host.process.start()

    def _host_of(self, index: int) -> Host:
        if index != SYNCER:
            return self.hosts[index]
        syncer = self.syncer()
        return self.hosts[0] if syncer is None else syncer.host

    def _befall(self, fault: Fault) -> None:
        host, process = self._host_of(fault.host), self._host_of(fault.host).process
        self.film.append(f"{self.clock.now:>7} {fault.kind} {host.index} {fault.side or ''} for {fault.for_ms} ms")
        until = self.clock.now + fault.for_ms
        back = lambda: self.start(host)  # noqa: E731
        match fault.kind:
            case "crash" | "lose disk":
                if process is not None:
                    process.crash()
                if fault.kind == "lose disk":
                    host.disk = Disk(enrolment=f"disk {host.index}, {host.starts}")
                self._after(fault, host, back)
            case "leave":
                if process is not None:
                    process.leave()
                self._after(fault, host, lambda: self._start_when_gone(host))
            case "freeze":
                if process is not None:
                    process.freeze()
                    self._after(fault, host, lambda: process.thaw() if process.alive and process.frozen else None)
            case "cut":
                self.network.cut({host.index}, until)
            case "cut apart":
                self.network.cut({self._host_of(index).index for index in fault.side}, until)
            case "unreachable":
                self.network.make_undialable(host.index, until)
            case "slow disk":
                host.slow_disk_until = until
            case "hand over":
                if process is not None:
                    process.handle(HandoverAsked(None))
            case "amend":
                assert fault.changes is not None
                Amender(self, fault.changes).go()
            case "reform":
                Reformer(self).go()

    def _after(self, fault: Fault, host: Host, back: Callable[[], None]) -> None:
        """When it is over; what lasts beyond the faults is for good."""
        if self.clock.now + fault.for_ms > self.plan.faults_until_ms:
            self.gone.add(host.index)
        else:
            self.clock.after(fault.for_ms, back)

    def _start_when_gone(self, host: Host) -> None:
        process = host.process
        if process is not None and process.is_leaving:
            self.clock.after(500, lambda: self._start_when_gone(host))
        else:
            self.start(host)

    def begin_again(self, host: Host) -> None:
        """What a process that can't follow the owner's reform asks for as it ends: its folder is moved away."""
        if host.process is not None:
            host.process.crash()
        host.disk = Disk(enrolment=f"disk {host.index}, {host.starts}")
        self.num_acts += 1
        for watch in self.watches:
            watch.began_again(host)
        self.start(host)
        self.clock.after(self.clock.between(OWNER_LOOKS_MS), lambda: reform_if_stuck(self))

    def heal(self) -> None:
        """Faults stop: links work, and whoever is not gone for good runs."""
        self.network.heal()
        for host in self.hosts:
            host.slow_disk_until = 0
            if host.process is not None and host.process.frozen and host.index not in self.gone:
                host.process.thaw()
            self.start(host)

    # -- watching -------------------------------------------------------------------------------------------------

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        self.num_events += 1
        if effects and self.plan.is_watched:
            self._effects.update(f"{self.clock.now} {process.host.index} {effects!r}\n".encode())
        for effect in effects:
            if isinstance(effect, Note):
                self.film.append(f"{self.clock.now:>7} {process.host.index}: {effect.topic}: {effect.text}")
                of_liar = self.plan.has_liar and LIAR[:8] in effect.text
                assert not effect.text.startswith("ALARM") or of_liar, effect.text
        for watch in self.watches:
            watch.handled(process, event, effects)

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        header = signed.entry.header
        self.film.append(
            f"{self.clock.now:>7} {process.host.index}: seals {signed.entry.kind} {header.seq} of term {header.term}"
        )
        self.entries[signed.digest] = signed
        for watch in self.watches:
            watch.sealed(process, signed)

    def reformed(self, signed: SignedEntry) -> None:
        """The owner has signed it."""
        self.num_acts += 1
        header = signed.entry.header
        self.film.append(f"{self.clock.now:>7} the owner reforms after {header.seq - 1}: {signed.entry}")
        self.entries[signed.digest] = signed

    def abandoned(self, chain: list[SignedEntry]) -> None:
        self.film.append(f"{self.clock.now:>7} abandoned is all after entry {len(chain) - 1}")
        for watch in self.watches:
            watch.abandoned(chain)

    def durable(self, process: Process, signed: SignedEntry) -> None:
        if isinstance(signed.entry, Reform):
            self.lineage = signed.entry.lineage
        for watch in self.watches:
            watch.durable(process, signed)

    def state(self, process: Process, fragment: int, version: int, digest: Digest) -> None:
        for watch in self.watches:
            watch.state(process, fragment, version, digest)

    def saved(self, process: Process, save: int) -> None:
        for watch in self.watches:
            watch.saved(process, save)

    def ended(self, process: Process) -> None:
        for watch in self.watches:
            watch.ended(process)

    def effects_digest(self) -> str:
        """Of every effect so far, in order, with its time."""
        return self._effects.hexdigest()
