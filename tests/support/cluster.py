"""A run in memory: real cores, simulated everything else, one seeded heap of things to come.

Ties in the heap break on a counter and all chance comes from one seeded generator, so the same plan gives the same
effects, event for event. Time is integer milliseconds; every process start has a clock of its own, off by a random
amount. The shells here honour the same orders as the real ones: an entry is on disk before `Sealed`, what a merge
made is visible only after its commit, a snapshot's entries come before the snapshot.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from geo_diloco.manifest import BootId, Digest, MonoMs, PeerId, RunId, RunRules
from geo_diloco.protocol.effects import Effect, Note
from geo_diloco.protocol.events import Disconnected, Event, Received, Tick
from geo_diloco.protocol.messages import Entry, Message
from geo_diloco.protocol.peer import HelloFacts, Peer, Role
from geo_diloco.sim.clock import Clockwork
from tests.support.plans import Plan
from tests.support.work import Work

RUN = RunId("ab" * 20)
LAYOUT = Digest("1a" * 32)


def fake_digest(*parts: object) -> Digest:
    """64 hex characters that stand for the parts."""
    return Digest(hashlib.sha256(repr(parts).encode()).hexdigest())


def fake_peer(name: str) -> PeerId:
    return PeerId(hashlib.sha256(name.encode()).hexdigest())


FOUNDER = fake_peer("founder")


@dataclass(frozen=True, slots=True)
class SignedEntry:
    """An entry as it lies on a disk."""

    entry: Entry
    digest: Digest


class Process:
    """One process start: a core and the clock it sees. Subclasses carry out effects."""

    def __init__(self, cluster: Cluster, peer: PeerId, role: Role, start: int) -> None:
        self.cluster = cluster
        self.peer = peer
        self.role: Role = role
        self.boot = BootId(fake_digest(peer, start)[:16])
        self.alive = True
        self.frozen = False
        self.core = Peer(
            peer=peer,
            boot=self.boot,
            role=role,
            rules=cluster.rules,
            run=RUN,
            layout_digest=LAYOUT,
            hello=HelloFacts(host=f"{role} {start}"),
        )
        self._clock_offset = cluster.clockwork.random.randrange(1, 10_000_000)
        self._backlog: list[Event] = []
        self._tick_at: int | None = None

    @property
    def clock(self) -> Clockwork:
        return self.cluster.clockwork

    def mono(self) -> MonoMs:
        return MonoMs(self.clock.now + self._clock_offset)

    def handle(self, event: Event) -> None:
        """Give the core an event now, and carry out what it asks for."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(event)
            return
        effects = self.core.handle(event, self.mono())
        self.core.check_invariants()
        self.cluster.record(self, event, effects)
        for effect in effects:
            if not isinstance(effect, Note):
                self.do(effect)
        self._set_tick()

    def handle_after(self, ms: int, event: Event) -> None:
        self.clock.after(ms, lambda: self.handle(event))

    def do(self, effect: Effect) -> None:
        raise NotImplementedError

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.handle(event)
        self.handle(Tick())

    def _set_tick(self) -> None:
        if self.core.deadline is None:
            return
        when = max(self.clock.now, self.core.deadline - self._clock_offset)
        if self._tick_at is not None and self.clock.now < self._tick_at <= when:
            return
        self._tick_at = when
        self.clock.at(when, lambda: self._tick(when))

    def _tick(self, when: int) -> None:
        if self._tick_at == when:
            self._tick_at = None
            self.handle(Tick())


class Link:
    """A control connection: in order each way, and what is under way is lost when it breaks."""

    def __init__(self, cluster: Cluster, member: Process, syncer: Process) -> None:
        self.cluster = cluster
        self.member, self.syncer = member, syncer
        self.up = True
        self._arrives = {member.peer: 0, syncer.peer: 0}

    def send(self, sender: Process, message: Message, branch: Digest | str, term: int) -> None:
        event = Received(sender.peer, branch, term, sender.boot, message)  # type: ignore[arg-type]
        self.deliver(sender, event)
        if self.cluster.mishap(self.cluster.plan.odds.twice):
            self.deliver(sender, event)

    def deliver(self, sender: Process, event: Event) -> None:
        receiver = self.syncer if sender is self.member else self.member
        clockwork = self.cluster.clockwork
        when = max(self._arrives[receiver.peer], clockwork.now + clockwork.between(self.cluster.plan.delay_ms))
        self._arrives[receiver.peer] = when
        clockwork.at(when, lambda: self._arrive(receiver, event))

    def _arrive(self, receiver: Process, event: Event) -> None:
        if self.up:
            receiver.handle(event)

    def break_off(self) -> None:
        """Either side notices in its own time; the syncer perhaps only after the peer is back."""
        if not self.up:
            return
        self.up = False
        clockwork = self.cluster.clockwork
        self.member.handle_after(clockwork.between((0, 500)), Disconnected(self.syncer.peer, "cut"))
        self.syncer.handle_after(clockwork.between((0, 2_500)), Disconnected(self.member.peer, "cut"))

    def close_when_sent(self) -> None:
        self.cluster.clockwork.at(max(self._arrives.values()), self.break_off)


class Watch:
    """What watches a cluster from outside. Every method may raise AssertionError."""

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        """A core was given an event."""

    def sealed(self, signed: SignedEntry) -> None:
        """An entry is on the syncer's disk."""

    def state(self, process: Process, fragment: int, version: int, digest: Digest) -> None:
        """A process holds that Theta."""

    def saved(self, process: Process, save: int) -> None:
        """A learner's checkpoint is on its disk."""

    def ended(self, process: Process) -> None:
        """A process died or left."""


@dataclass
class Cluster:
    """The world that the processes share: heap, blobs, watchers."""

    plan: Plan
    watches: tuple[Watch, ...] = ()
    clockwork: Clockwork = field(init=False)
    rules: RunRules = field(init=False)
    contents: dict[Digest, Work] = field(default_factory=dict)
    """What each contribution's blob holds."""
    bad_blobs: set[Digest] = field(default_factory=set)
    num_events: int = 0
    _effects: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.clockwork = Clockwork(self.plan.seed)
        self.rules = RunRules(
            sync=self.plan.sync,
            stop=self.plan.stop,
            evaluation=self.plan.evaluation,
            num_shares=4,
            tokens_per_step=self.plan.tokens_per_step,
            founder=FOUNDER,
        )

    @property
    def faults_on(self) -> bool:
        return self.clockwork.now < self.plan.faults_until_ms

    def mishap(self, odds: float) -> bool:
        return odds > 0 and self.faults_on and self.clockwork.random.random() < odds

    def record(self, process: Process, event: Event, effects: list[Effect]) -> None:
        self.num_events += 1
        self._effects.update(f"{self.clockwork.now} {process.peer[:8]} {effects!r}\n".encode())
        for watch in self.watches:
            watch.handled(process, event, effects)

    def effects_digest(self) -> str:
        """Of every effect so far, in order, with its time."""
        return self._effects.hexdigest()
