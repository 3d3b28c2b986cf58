"""A world for elections: real machines over an abstract chain, and everything that can go wrong between them.

A seeded heap drives a few processes. Each has a clock of its own (offset and rate), a disk that a crash may spare or
take, blobs that need time to arrive, and links that lose, double, delay, reorder and break one way. Processes behind a
NAT can only be spoken to over a connection that they opened. Hosts and their processes are in
`election_process.py`; mishaps are drawn from a seed (`election_plans.py`) and carried out in `election_mishaps.py`; how
peers catch up is in `election_catching_up.py`; watchers see everything from outside (`election_checkers.py`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from geo_diloco.manifest import BootId, Digest, FragmentId, PeerId
from geo_diloco.protocol.effects import Note
from geo_diloco.protocol.election.ballots import EntryFacts, Use
from geo_diloco.protocol.election.forks import Forks
from geo_diloco.protocol.election.polls import DurableReached, FoundingAsked, PollEffect, PollEvent, Started, Tell
from geo_diloco.protocol.events import Sighted, Sighting
from geo_diloco.sim.clock import Clockwork
from tests.support.election_catching_up import CatchingUp
from tests.support.election_mishaps import Mishaps
from tests.support.election_plans import ElectionPlan
from tests.support.election_process import FRAGMENTS, Book, Disk, Host, Process, digest_of


class LearnerView:
    """A learner: follows the highest chain that `open` entries prove, and hands in work until it sees it merged."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.peer = PeerId(digest_of("learner", index))
        self.forks = Forks(world.founder)
        self._read: dict[int, tuple[Disk, int]] = {}
        self._work: dict[int, Use] = {}

    def act(self) -> None:
        """Read on at some peer, then hand in work to some peer that says that it is syncer."""
        world, chance = self.world, self.world.clockwork.random
        host = world.hosts[chance.randrange(len(world.hosts))]
        if host.process is not None and not host.process.paused:
            disk, read = self._read.get(host.index, (host.disk, 0))
            read = read if disk is host.disk and read <= len(disk.log) else 0
            before = self.forks.head.rank
            self.forks.take(tuple(host.disk.log[read:]))
            assert self.forks.head.rank >= before, "learner: its chain sank"
            self._read[host.index] = (host.disk, len(host.disk.log))
        if self.forks.head.rank.seq < 0:
            return
        for fragment in range(FRAGMENTS):
            use = self._work.get(fragment)
            if use is None or self.forks.why_not_use(use) is not None:
                use = self._work[fragment] = Use(self.peer, FragmentId(fragment), self.forks.head.digest)
            for each in world.hosts:
                process = each.process
                if process is not None and process.machine.role == "syncer" and chance.random() < 0.7:
                    process.pool[use] = None


class Watcher:
    """What watches from outside. Any method may raise AssertionError."""

    def handled(self, process: Process, event: PollEvent, effects: list[PollEffect]) -> None:
        """A machine was given an event."""

    def told(self, process: Process, tell: Tell) -> None:
        """A ballot left a process."""

    def drafted(self, process: Process, entry: EntryFacts) -> None:
        """A syncer begins to seal an entry."""

    def sealed(self, process: Process, entry: EntryFacts) -> None:
        """An entry is on its syncer's disk."""

    def reformed(self, entry: EntryFacts) -> None:
        """The owner signed a reform."""


@dataclass
class World:
    """Everything, from one plan."""

    plan: ElectionPlan
    watchers: tuple[Watcher, ...] = ()
    clockwork: Clockwork = field(init=False)
    hosts: list[Host] = field(default_factory=list)
    book: Book = field(default_factory=Book)
    cut: dict[tuple[int, int], int] = field(default_factory=dict)
    """Directed links that carry nothing, and until when."""
    faults_on: bool = True
    num_events: int = 0
    whole: dict[tuple[PeerId, str], set[Digest]] = field(default_factory=dict)
    """What each disk there ever was has had without a gap."""
    film: deque[str] = field(default_factory=lambda: deque(maxlen=400))

    def __post_init__(self) -> None:
        plan = self.plan
        self.clockwork = Clockwork(plan.seed)
        chance = self.clockwork.random
        for index, dialable in enumerate(plan.dialable):
            peer = PeerId(digest_of("peer", index))
            rate = chance.randint(-9_900, 9_900)
            disk = Disk(digest_of("disk", index, 0)[:16])
            self.hosts.append(Host(index, peer, dialable, rate, chance.randrange(1, 10_000_000), disk))
            self.whole[peer, disk.enrolment] = disk.whole
        self.founder = self.hosts[0].peer
        self.by_peer = {host.peer: host for host in self.hosts}
        self._connections: dict[tuple[int, int], tuple[BootId, BootId]] = {}
        self._effects = hashlib.sha256()
        self.mishaps = Mishaps(self)
        self.catching_up = CatchingUp(self)
        self.learners = [LearnerView(self, index) for index in range(plan.num_learners)]

    # -- running --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for host in self.hosts:
            self.start(host)
        founder = self.hosts[0].process
        assert founder is not None
        for host in self.hosts:
            host.process.handle(Sighted(self.sightings()))  # type: ignore[union-attr]
        founder.handle(FoundingAsked())
        self._every(self.plan.commit_ms, self._commits)
        self._every((900, 1_100), self._learn)
        self._every((200, 600), self._sight)
        self._every((300, 900), self.catching_up.gossip)
        for mishap in self.plan.mishaps:
            self.clockwork.at(mishap.at_ms, lambda mishap=mishap: self.mishaps.befall(mishap))  # type: ignore[misc]

    def _every(self, bounds: tuple[int, int], action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.clockwork.after(self.clockwork.between(bounds), again)

        self.clockwork.after(self.clockwork.between(bounds), again)

    def _commits(self) -> None:
        for host in self.hosts:
            if host.process is not None:
                host.process.commit()

    def _learn(self) -> None:
        for learner in self.learners:
            learner.act()

    def _sight(self) -> None:
        """The directory tells one peer what it knows; it knows nothing of cuts."""
        host = self.hosts[self.clockwork.random.randrange(len(self.hosts))]
        if host.process is not None:
            host.process.handle(Sighted(self.sightings()))

    def sightings(self) -> tuple[Sighting, ...]:
        found = []
        for host in self.hosts:
            process = host.process
            if process is not None and host.dialable:
                serves = process.machine.record.term if process.machine.role == "syncer" else None
                found.append(Sighting(host.peer, process.machine.best.rank, serves))
        return tuple(found)

    def start(self, host: Host) -> None:
        if not host.disk.log and host.disk.root is None and self.clockwork.random.random() < 0.5:
            self.catching_up.take_snapshot(host)
        process = host.process = Process(self, host)
        process.handle(Started(tuple(host.disk.log), tuple(host.disk.stored), host.disk.root))
        process.handle(Sighted(self.sightings()))
        process._fetch_soon()

    def crash(self, host: Host, *, lose_disk: bool = False) -> None:
        if host.process is not None:
            host.process.crash(torn=self.clockwork.random.random() < 0.5)
            host.process = None
        if lose_disk:
            host.disk = Disk(digest_of("disk", host.index, host.starts, self.clockwork.now)[:16])
            self.whole[host.peer, host.disk.enrolment] = host.disk.whole

    # -- network --------------------------------------------------------------------------------------------------

    def is_cut(self, a: int, b: int) -> bool:
        return self.cut.get((a, b), -1) > self.clockwork.now

    def reaches(self, a: Host, b: Host) -> bool:
        """Whether a could fetch over HTTP from b now."""
        up = b.process is not None and not b.process.paused and b.dialable
        return up and not self.is_cut(a.index, b.index) and not self.is_cut(b.index, a.index)

    def donors(self, process: Process, digest: Digest) -> list[Host]:
        return [
            host
            for host in self.hosts
            if host is not process.host and digest in host.disk.stored and self.reaches(process.host, host)
        ]

    def blob_ms(self) -> int:
        return self.clockwork.between(self.plan.blob_ms)

    def send(self, sender: Process, to: PeerId, deliver: Callable[[Process], None], *, reliable: bool = False) -> None:
        """Over the dialled connection, or dial. Lost if neither works, or by chance."""
        plan, chance = self.plan, self.clockwork.random
        receiver = self.by_peer.get(to)
        if receiver is None or receiver.process is None or receiver is sender.host:
            return
        if not receiver.dialable and not self._connected(receiver, sender.host):
            return
        copies = 1
        if self.faults_on and not reliable:
            copies = 0 if chance.random() < plan.loss else 1 + (chance.random() < plan.twice)
        for _ in range(copies):
            delay = self.clockwork.between(plan.delay_ms)
            if self.faults_on and chance.random() < plan.late:
                delay += self.clockwork.between(plan.late_ms)
            self.clockwork.after(delay, lambda: self._deliver(sender, receiver, deliver))

    def _connected(self, dialler: Host, listener: Host) -> bool:
        boots = self._connections.get((dialler.index, listener.index))
        ends = (dialler.process, listener.process)
        return boots is not None and all(end is not None and end.boot in boots for end in ends)

    def _deliver(self, sender: Process, receiver: Host, deliver: Callable[[Process], None]) -> None:
        process = receiver.process
        if process is None or self.is_cut(sender.host.index, receiver.index):
            return
        if sender.alive and receiver.dialable:
            self._connections[sender.host.index, receiver.index] = (sender.boot, process.boot)
        deliver(process)

    def break_connections(self, a: int, b: int) -> None:
        self._connections.pop((a, b), None)
        self._connections.pop((b, a), None)

    # -- mishaps --------------------------------------------------------------------------------------------------

    def syncer(self) -> Host | None:
        """Whoever says that it is, in the highest term."""
        serving = [h for h in self.hosts if h.process is not None and h.process.machine.role == "syncer"]
        return max(serving, key=lambda h: h.process.machine.record.term if h.process else 0, default=None)

    def restart(self, host: Host) -> None:
        if host.process is None and host.gone_until <= self.clockwork.now:
            self.start(host)

    def heal(self) -> None:
        """Faults stop: links work, everyone runs."""
        self.faults_on = False
        self.cut.clear()
        for host in self.hosts:
            host.slow_disk_until = 0
            if host.gone_until > self.clockwork.now:
                continue
            if host.process is None:
                self.start(host)
            elif host.process.paused:
                host.process.resume()

    # -- watching -------------------------------------------------------------------------------------------------

    def handled(self, process: Process, event: PollEvent, effects: list[PollEffect]) -> None:
        self.num_events += 1
        if effects:
            self._effects.update(f"{self.clockwork.now} {process.host.index} {effects!r}\n".encode())
        for effect in effects:
            if isinstance(effect, Note):
                self.film.append(f"{self.clockwork.now} {process.host.index}: {effect.topic}: {effect.text}")
                assert not effect.text.startswith("ALARM"), effect.text
            elif isinstance(effect, DurableReached):
                self.film.append(f"{self.clockwork.now} {process.host.index}: durable {effect.seq}")
        for watcher in self.watchers:
            watcher.handled(process, event, effects)
        if process.machine.stranded is not None and process.alive:
            self.catching_up.rescue(process)

    def watch_tell(self, process: Process, tell: Tell) -> None:
        for watcher in self.watchers:
            watcher.told(process, tell)

    def drafted(self, process: Process, entry: EntryFacts) -> None:
        for watcher in self.watchers:
            watcher.drafted(process, entry)

    def sealed(self, process: Process, entry: EntryFacts) -> None:
        self.film.append(f"{self.clockwork.now} {process.host.index}: sealed {entry.kind} {entry.term} {entry.seq}")
        self.book.add(entry, self.clockwork.now)
        for watcher in self.watchers:
            watcher.sealed(process, entry)

    def effects_digest(self) -> str:
        return self._effects.hexdigest()
