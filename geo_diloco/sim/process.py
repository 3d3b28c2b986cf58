"""One process start in a simulation: a real core, the clock it sees, and a shell that carries out its effects.

The shell here honours the orders that the real one does: writes of a disk are in order, an entry is on it before
`Sealed` and what a merge made is visible only then, a vote record is on it before `VotePersisted`, a snapshot is of one
moment, the fold goes first in, first out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from geo_diloco.manifest import BootId, MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.effects import (
    CloseConnection,
    Effect,
    Note,
    PersistVote,
    ReadyToLeave,
    RefusedForGood,
    RunFinished,
    SeekSyncer,
    Send,
    TokensDropped,
    TokensMerged,
)
from geo_diloco.protocol.events import (
    ChainLoaded,
    Connected,
    Disconnected,
    EntryArrived,
    Event,
    FoundRun,
    Resumed,
    Sighted,
    Sighting,
    SnapshotKept,
    SnapshotLoaded,
    StopRequested,
    Tick,
    VotePersisted,
)
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.protocol.tail import contained
from geo_diloco.sim.chainhands import ChainHands
from geo_diloco.sim.clock import Clockwork
from geo_diloco.sim.fakes import LAYOUT, RUN, fake_digest
from geo_diloco.sim.learnhands import LearnHands
from geo_diloco.sim.network import Link
from geo_diloco.sim.servehands import ServeHands

if TYPE_CHECKING:
    from geo_diloco.sim.disk import Checkpoint, Disk
    from geo_diloco.sim.world import Host, World

BACKLOG_MAX = 2_000
KEEP_ALIVE_MS = (4_000, 10_000)
STRANDED_MS = 10_000
"""Until a process that can't follow the owner's reform begins again. A real one waits a minute, and ends."""
"""How long a connection to a process that does not answer lasts."""
QUEUED_MAX = 64


class Process:
    """A peer's process. `handle` gives its core an event; `crash`, `freeze`, `thaw` and `leave` are what befalls it."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host = world, host
        host.starts += 1
        self.peer = host.peer
        self.boot = BootId(fake_digest(host.peer, host.starts)[:16])
        self.alive = True
        self.frozen = False
        self._frozen_at = 0
        self.is_leaving = False
        self.told_finished = False
        self.accepts_links = False
        plan = host.plan
        self.core = world.core(
            peer=host.peer,
            boot=self.boot,
            role="learner" if plan.step_ms else "follower",
            rules=world.rules,
            run=RUN,
            layout_digest=LAYOUT,
            hello=HelloFacts(host=f"host {host.index}, start {host.starts}", address=host.address),
            seat=Seat(
                may_serve=plan.serves,
                may_elect=plan.elects,
                record=host.disk.vote,
                fresh_enrolment=host.disk.enrolment,
                machine=f"host {host.index}",
                jitter=world.clock.random.randrange(2**32),
                updates_bytes_kept=world.plan.updates_bytes_kept,
                entries_kept=world.plan.entries_kept,
            ),
        )
        self.links: dict[PeerId, Link] = {}
        self.chain = ChainHands(self)
        self.serve = ServeHands(self)
        self.learn = LearnHands(self, plan.step_ms) if plan.step_ms else None
        self._backlog: deque[Event] = deque(maxlen=BACKLOG_MAX)
        self._tick_at: int | None = None
        self._written_at = 0
        self._fold_free_at = 0
        self._queued: dict[PeerId, deque[Send]] = {}
        self.sought: PeerId | None = None
        """The syncer's link, as this process takes it."""
        self._sought_link: Link | None = None
        self._hint: PeerId | None = None
        self._seeking = False
        self._is_stranded = False

    @property
    def clock(self) -> Clockwork:
        return self.world.clock

    @property
    def disk(self) -> Disk:
        return self.host.disk

    def mono(self) -> MonoMs:
        return self.host.mono(self.clock.now)

    # -- start and end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """From this disk if there is anything on it, else from somebody's snapshot."""
        disk, founds = self.disk, self.host.index == 0
        if disk.checkpoint is not None:
            self._resume(disk.checkpoint)
        elif disk.snapshot is not None:
            self._begin(disk.snapshot)
        elif founds and not self.world.entries:
            self._found()
        elif founds and disk.log:
            self._begin(self.world.theta_0())
        else:
            self._join()

    def _found(self) -> None:
        zero = self.world.theta_0()
        self.chain.take_state(zero.heads)
        self.accepts_links = True
        state = tuple(head.state_digest for head in zero.heads)
        momentum = tuple(head.momentum_digest for head in zero.heads)
        self.handle(FoundRun(state, momentum, zero.num_elements, LAYOUT))
        self._live()

    def _begin(self, snapshot: SnapshotLoaded) -> None:
        self.chain.take_state(snapshot.heads)
        self.handle(snapshot)
        needless = contained(((signed.digest, signed.entry) for signed in self.disk.log), snapshot)
        for signed in list(self.disk.log):
            if snapshot.whole_chain or signed.entry.header.seq > snapshot.seq:
                self.chain.signed[signed.digest] = signed
                stored = self.disk.is_stored(signed) or signed.digest in needless
                self.handle(EntryArrived(signed.entry, signed.digest, signed.signer, stored))
        self.handle(ChainLoaded())
        self._live()

    def _resume(self, checkpoint: Checkpoint) -> None:
        accounts, disk = checkpoint.accounts, self.disk
        self._begin(accounts.resume_at)
        lost_steps, lost_tokens = disk.steps_at_death - accounts.step, disk.tokens_at_death - accounts.tokens
        self.handle(Resumed(accounts.step, accounts.tokens, accounts.accounts, max(0, lost_steps), lost_tokens))
        assert self.learn is not None
        self.learn.resume(checkpoint)

    def _join(self) -> None:
        def attempt() -> None:
            if not self.alive:
                return
            donors = [each for each in self.world.donors(self) if each.serve.snapshot_now() is not None]
            snapshot = donors[0].serve.snapshot_now() if donors and not self.frozen else None
            if snapshot is None:
                self.clock.after(self.clock.between((100, 800)), attempt)
                return
            taken = replace(snapshot, whole_chain=self.host.plan.serves)
            if self.host.plan.elects:
                self.disk.snapshot = taken
            self._begin(taken)

        self.clock.after(self.clock.between(self.world.plan.transfer_ms), attempt)

    def _live(self) -> None:
        """Everything of the chain on this disk is given: look for the syncer, keep snapshots, look around."""
        self.accepts_links = True
        self._seek_soon((1, 50))
        if self.learn is None:
            self.clock.after(self.world.plan.snapshot_every_ms, self._keep_snapshot)
        if self.host.plan.elects:
            self._look_around()

    def crash(self) -> None:
        """The process dies; the disk stays."""
        if not self.alive:
            return
        self.alive = False
        tokens = self.core.status(self.mono()).tokens
        self.disk.tokens_at_death = tokens[0].trained if tokens else 0
        self.disk.steps_at_death = self.learn.training.step if self.learn is not None else 0
        self.world.ended(self)
        for peer in sorted(self.links):
            self.links[peer].break_off()
        if self.host.process is self:
            self.host.process = None

    def leave(self) -> None:
        """SIGTERM: a last checkpoint, then hand in what is sampled (or hand over), then Goodbye."""
        if not self.alive or self.is_leaving:
            return
        self.is_leaving = True
        if self.learn is not None:
            self.learn.training.stop_with_save()
        self.handle_after(100, StopRequested("SIGTERM"))

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Give the core an event now, and carry out what it asks for."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append(event)
            return
        effects = self.core.handle(event, self.mono())
        if self.world.num_events % self.world.events_per_check == 0:
            self.core.check_invariants()
        self.world.handled(self, event, effects)
        for effect in effects:
            if self.alive and not isinstance(effect, Note):
                self._do(effect)
        self._set_tick()
        if self.core.election.stranded is not None and not self._is_stranded:
            self._is_stranded = True
            self.clock.after(STRANDED_MS, self._end_if_stranded)

    def _end_if_stranded(self) -> None:
        self._is_stranded = self.core.election.stranded is not None
        if self.alive and self._is_stranded:
            if self.frozen:
                self.clock.after(STRANDED_MS, self._end_if_stranded)
            else:
                self.world.begin_again(self.host)

    def handle_after(self, ms: int, event: Event) -> None:
        self.clock.after(ms, lambda: self.handle(event))

    def freeze(self) -> None:
        """Nothing is handled any more; after a while the others' keep-alives go unanswered."""
        self.frozen = True
        since = self.clock.now
        self._frozen_at = since
        self.clock.after(self.clock.between(KEEP_ALIVE_MS), lambda: self._given_up(since))

    def _given_up(self, since: int) -> None:
        if self.alive and self.frozen and self._frozen_at == since:
            for peer in sorted(self.links):
                self.links[peer].break_off()

    def thaw(self) -> None:
        self.frozen = False
        backlog = list(self._backlog)
        self._backlog.clear()
        for event in backlog:
            self.handle(event)
        self.handle(Tick())

    def _set_tick(self) -> None:
        deadline = self.core.deadline
        if deadline is None or not self.alive:
            return
        now = self.clock.now
        when = max(now, self.host.real(deadline))
        if self._tick_at is not None and now < self._tick_at <= when:
            return
        self._tick_at = when
        self.clock.at(when, lambda: self._tick(when))

    def _tick(self, when: int) -> None:
        if self._tick_at == when:
            self._tick_at = None
            self.handle(Tick())

    # -- effects --------------------------------------------------------------------------------------------------

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case PersistVote():
                self.write(lambda: self._persist(effect))
            case CloseConnection():
                if (link := self.links.get(effect.peer)) is not None:
                    link.close_when_sent()
                if self.sought == effect.peer:
                    self.sought, self._sought_link = None, None
            case SeekSyncer():
                self.sought, self._sought_link, self._hint = None, None, effect.peer
                self._seek_soon((1, 400))
            case RunFinished():
                self.told_finished = self.world.was_told_finished = True
                if self.learn is not None:
                    self.on_fold(self.learn.training.finish)
            case ReadyToLeave():
                assert self.is_leaving
                self.clock.after(20, self.crash)
            case RefusedForGood():
                raise AssertionError(effect.reason)
            case TokensMerged() | TokensDropped():
                pass
            case _:
                handled = self.chain.do(effect) or self.serve.do(effect)
                assert handled or (self.learn is not None and self.learn.do(effect)), f"nobody carries out {effect!r}"

    def write(self, done: Callable[[], None]) -> None:
        """Writes of a disk are in order; a crash loses those that are not done."""
        slow_ms = 1_500 if self.clock.now < self.host.slow_disk_until else 0
        self._written_at = max(self._written_at, self.clock.now + slow_ms) + self.clock.between(
            self.world.plan.times.disk
        )
        self.clock.at(self._written_at, lambda: done() if self.alive else None)

    def _persist(self, effect: PersistVote) -> None:
        self.disk.vote = effect.record
        self.handle(VotePersisted(effect.number))

    def on_fold(self, action: Callable[[], None]) -> None:
        """On the thread for tensors: first in, first out, each after some work."""
        self._fold_free_at = max(self.clock.now, self._fold_free_at) + self.clock.between(self.world.plan.times.fold)
        self.clock.at(self._fold_free_at, lambda: action() if self.alive else None)

    # -- connections ----------------------------------------------------------------------------------------------

    def _send(self, effect: Send) -> None:
        link = self.links.get(effect.to)
        if link is not None and link.up:
            link.send(self, effect)
        elif effect.dial and effect.to in self.world.by_peer:
            queue = self._queued.setdefault(effect.to, deque(maxlen=QUEUED_MAX))
            queue.append(effect)
            if len(queue) == 1:
                self.world.network.dial(self, effect.to, lambda link: self._dialed(effect.to, link))

    def _dialed(self, peer: PeerId, link: Link | None) -> None:
        queue = self._queued.pop(peer, deque())
        if link is None or not self.alive:
            return
        self.handle(Connected(peer))
        for effect in queue:
            self._send(effect)

    def lost(self, link: Link, peer: PeerId) -> None:
        """One of our connections broke. An old one says nothing of whoever has a newer one, unless we sought it."""
        is_sought = link is self._sought_link
        if is_sought:
            self.sought, self._sought_link = None, None
        if self.links.get(peer) is link:
            del self.links[peer]
        elif not (is_sought and self.core.seeks):
            return
        self.handle(Disconnected(peer, "cut"))
        if is_sought and self.sought is None:
            self._seek_soon((200, 900))

    def _seek_soon(self, ms: tuple[int, int]) -> None:
        if not self._seeking:
            self._seeking = True
            self.clock.after(self.clock.between(ms), self._seek)

    def _seek(self) -> None:
        """Try whoever may be syncer, until one link is up."""
        self._seeking = False
        if not self.alive or self.sought is not None or not self.core.seeks:
            return
        if self.frozen:
            self._seek_soon((200, 900))
            return
        tried = self._hint if self._hint is not None else self.world.claimed_syncer(self)
        self._hint = None
        if tried is None or tried == self.peer:
            self._seek_soon((200, 900))
            return
        self._seeking = True
        self.world.network.dial(self, tried, lambda link: self._sought(tried, link))

    def _sought(self, peer: PeerId, link: Link | None) -> None:
        self._seeking = False
        if link is None or self.sought is not None or not self.core.seeks:
            self._seek_soon((200, 900))
            return
        self.sought, self._sought_link = peer, link
        self.handle(Connected(peer, seeking=True))

    def _look_around(self) -> None:
        """What the directory says."""
        if not self.alive:
            return
        sightings = tuple(
            Sighting(each.peer, each.core.election.best.rank, _serves(each)) for each in self.world.published(self)
        )
        self.handle(Sighted(sightings))
        self.clock.after(self.clock.between((2_000, 5_000)), self._look_around)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _keep_snapshot(self) -> None:
        if not self.alive:
            return
        ledger = self.core.state_ledger()
        if ledger is not None and 1 <= ledger.seq <= self.core.ledger.seq and not self.frozen:
            snapshot = self.snapshot_from(ledger)
            self.write(lambda: self._snapshot_kept(snapshot))
        self.clock.after(self.world.plan.snapshot_every_ms, self._keep_snapshot)

    def _snapshot_kept(self, snapshot: SnapshotLoaded) -> None:
        self.disk.snapshot = snapshot
        self.handle(SnapshotKept(Seq(snapshot.seq)))

    def snapshot_from(self, ledger: Ledger) -> SnapshotLoaded:
        """Of the outer state, which stands at that ledger."""
        held = tuple((each.version, each.state_digest) for each in ledger.heads)
        assert held == tuple((state.version, state.theta) for state in self.chain.outer), "not of one moment"
        return replace(ledger.snapshot(), whole_chain=self.host.plan.serves)


def _serves(process: Process) -> Term | None:
    return process.core.election.record.term if process.core.serves else None
