"""What the processes of a simulated run share (the clock, the rules, the record of what happened), and what one is.

A process is a core and the shell that carries out its effects. The shells here owe the core what the real ones owe it
(protocol/README.md), and they are wrong in the same way or not at all: no process reads another's memory except
through a link, a blob or the disk that a dead process left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from geo_diloco.manifest import BootId, Digest, MonoMs, PeerId, RunManifest
from geo_diloco.numerics.fragments import Layout
from geo_diloco.protocol.effects import Effect, Note, Send
from geo_diloco.protocol.events import Event, Received, Tick
from geo_diloco.protocol.peer import Role
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.sim.clock import Clockwork
from geo_diloco.sim.train.budget import Budget
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.tape import Boot, TapeBoot, TapeEvent, effects_hash

HOP_MS = 1
"""From the training thread to the node's, and back."""
WORK_MS = 1
"""Encoding, decoding, merging or applying a fragment."""
FSYNC_MS = 2
"""Having an entry, signed, or a vote on disk."""
CUT_NOTICED_MS = 2_000
"""Until both ends of a connection know that it is gone."""


def peer_named(name: str) -> PeerId:
    """An id without a key pair: nothing is signed here, and merges happen in the order of ids."""
    return PeerId(hashlib.sha256(name.encode()).hexdigest())


@dataclass
class World:
    """One simulated run's surroundings. `manifest.founder` is the syncer, and alone on the roster; `manifest.stop` is
    the budget, of tokens trained or of time: when it is spent nobody begins another inner step."""

    manifest: RunManifest
    layout: Layout
    fleet: Fleet
    clock: Clockwork
    on_trained: Callable[[int], None] = lambda num_tokens: None
    """Told of all tokens trained so far, after each inner step."""
    cut: set[PeerId] = field(default_factory=set)
    """Whose link is cut."""
    tapes: dict[PeerId, list[TapeBoot]] = field(default_factory=dict)
    """What every core was given, process start by process start, as a real peer's tape has it."""
    num_tokens: int = 0
    """Trained by all learners, whatever became of it."""
    budget: Budget = field(init=False)
    _effects: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.budget = Budget.of(self.manifest)

    @property
    def is_over(self) -> bool:
        return self.budget.is_spent(self.num_tokens, self.clock.now)

    @property
    def steps_max(self) -> int | None:
        """Of one learner: in lockstep all take the same number, otherwise whoever is quick takes more."""
        if not self.manifest.sync.lockstep:
            return None
        return self.manifest.stop.tokens // (self.manifest.rules().tokens_per_step * self.fleet.num_learners)

    def trained(self, tokens: int) -> None:
        self.num_tokens += tokens
        self.on_trained(self.num_tokens)

    def record(self, process: Process, event: Event, effects: list[Effect]) -> None:
        asked = effects_hash(effects) if effects else None
        events = self.tapes[process.peer][-1].events
        events.append(TapeEvent(len(events) + 2, process.now(), event, asked))
        self._effects.update(f"{self.clock.now} {process.peer} {asked}\n".encode())

    def effects_digest(self) -> str:
        """Of every effect so far, in order, with its time."""
        return self._effects.hexdigest()


class Process:
    """One process start. Subclasses carry out effects in `do`."""

    def __init__(self, world: World, peer: PeerId, role: Role, *, hello: HelloFacts, seat: Seat) -> None:
        tape = world.tapes.setdefault(peer, [])
        boot = Boot(
            peer=peer,
            boot=BootId(peer_named(f"{peer} {len(tape)}")[:16]),
            role=role,
            run=world.manifest.run_id(),
            layout_digest=world.layout.digest,
            hello=hello,
            rules=world.manifest.rules(),
            seat=seat,
        )
        tape.append(TapeBoot(1, boot))
        self.world = world
        self.peer = peer
        self.boot = boot.boot
        self.core = boot.fresh_core()
        self.is_alive = True
        self.is_frozen = False
        self._backlog: list[Event] = []
        self._tick_at: int | None = None

    @property
    def clock(self) -> Clockwork:
        return self.world.clock

    def now(self) -> MonoMs:
        return MonoMs(self.clock.now)

    def handle(self, event: Event) -> None:
        """Give the core an event now, and carry out what it asks for. What a frozen process hears it hears later."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._backlog.append(event)
            return
        effects = self.core.handle(event, self.now())
        self.core.check_invariants()
        self.world.record(self, event, effects)
        for effect in effects:
            if isinstance(effect, Note):
                assert effect.level != "error", effect.text
            else:
                self.do(effect)
        self._set_tick()

    def handle_after(self, ms: int, event: Event) -> None:
        self.clock.after(ms, lambda: self.handle(event))

    def do(self, effect: Effect) -> None:
        """Carry out one effect; what it is answered by must come through the clock."""
        raise NotImplementedError

    def lost(self, link: ControlLink) -> None:
        """One of its links broke, and it has noticed."""
        raise NotImplementedError

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        backlog, self._backlog = self._backlog, []
        for event in [*backlog, Tick()]:
            self.handle(event)

    def _set_tick(self) -> None:
        deadline = self.core.deadline
        if deadline is None:
            return
        when = max(self.clock.now, deadline)
        if self._tick_at is not None and self.clock.now < self._tick_at <= when:
            return
        self._tick_at = when
        self.clock.at(when, lambda: self._tick(when))

    def _tick(self, when: int) -> None:
        if self._tick_at == when:
            self._tick_at = None
            self.handle(Tick())


class ControlLink:
    """A control connection: in order each way, and what is under way is lost when it breaks."""

    def __init__(self, learner: Process, syncer: Process, delay_ms: int) -> None:
        self.learner, self.syncer = learner, syncer
        self._delay_ms = delay_ms
        self.is_up = True

    def send(self, sender: Process, effect: Send) -> None:
        self.deliver(sender, Received(sender.peer, effect.branch, effect.term, sender.boot, effect.message))

    def deliver(self, sender: Process, event: Event) -> None:
        """The delay is the same for all, so the clock's counter keeps them in order."""
        receiver = self.syncer if sender is self.learner else self.learner

        def arrive() -> None:
            if self.is_up:
                receiver.handle(event)

        self.learner.clock.after(self._delay_ms, arrive)

    def break_off(self, *, noticed_ms: int) -> None:
        if not self.is_up:
            return
        self.is_up = False
        self.learner.clock.after(noticed_ms, lambda: self.learner.lost(self))
        self.learner.clock.after(noticed_ms, lambda: self.syncer.lost(self))

    def close_when_sent(self) -> None:
        self.learner.clock.after(self._delay_ms, lambda: self.break_off(noticed_ms=0))


def entry_digest(entry: object) -> Digest:
    """Stands for the digest of an entry's signed bytes: as good a name, and the same in every process."""
    return Digest(hashlib.sha256(repr(entry).encode()).hexdigest())
