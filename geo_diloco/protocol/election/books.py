"""What all parts of the election share: who we are, the record on disk, the tree of entries, and what goes out.

One rule for everything that leaves the process: it waits until the record as it stands in memory is on disk. So no
vote, ack, offer or entry can be known to anybody whose reason a crash could make us forget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from geo_diloco.manifest import BranchId, MonoMs, PeerId, Term
from geo_diloco.protocol.effects import Note, PersistVote, SendEntries
from geo_diloco.protocol.election.ballots import NO_RANK, Ack, Ballot, Elector, Head, Need, PeerBoot, VoteRecord
from geo_diloco.protocol.election.forks import Forks
from geo_diloco.protocol.election.polls import (
    PollEffect,
    SealFound,
    SealOpen,
    SealRoster,
    Tell,
)

NEED_MS = 500
"""The same need isn't told to the same peer again for that long: it may have no more than it has sent."""
NEEDS_MAX = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectionRules:
    """Times and numbers of an election; the same for all peers of a run."""

    owner: PeerId
    """Who founds and reforms."""
    lease_ms: int = 15_000
    """L."""
    silent_ms: int = 60_000
    """An elector not heard for that long is replaced."""
    tail_max: int = 24
    """P: entries beyond the durable head."""
    electors_wanted: int = 5
    one_machine: bool = False
    """All peers share a machine: electors may share a host."""

    @property
    def promise_ms(self) -> int:
        """L_e = 1.02 L, so that a promise outlasts any lease at clock rates within 0.99 %."""
        return -(-self.lease_ms * 102 // 100)

    @property
    def heartbeat_ms(self) -> int:
        return self.lease_ms // 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Myself:
    """This process, as the election needs it."""

    peer: PeerBoot
    fresh_enrolment: str
    """Random; used if there is no record on disk."""
    host: str
    address: str
    """Empty if it only dials out."""
    may_serve: bool
    """Admitted as syncer, and reachable."""
    may_elect: bool
    """Willing to be an elector."""


class Jitter:
    """Numbers to spread attempts by, from one seeded integer (a 64-bit linear congruential generator)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & (2**64 - 1)

    def below(self, bound: int) -> int:
        """In [0, bound)."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self._state >> 33) % max(1, bound)


class Books:
    """Shared state of one election machine, and its outbox."""

    def __init__(self, me: Myself, rules: ElectionRules, record: VoteRecord | None, jitter: int) -> None:
        self.me = me
        self.rules = rules
        self.forks = Forks(rules.owner)
        self.jitter = Jitter(jitter)
        self.record = record or VoteRecord(
            branch=BranchId(""),
            lineage=0,
            term=Term(0),
            voted_for=None,
            held=NO_RANK,
            enrolment=me.fresh_enrolment,
        )
        self._needs: dict[PeerId, tuple[tuple[Head, ...], MonoMs]] = {}
        self._dirty = False
        self._asked = 0
        self._written = 0
        self._leaving: deque[tuple[int, PollEffect]] = deque()
        self._effects: list[PollEffect] = []

    @property
    def seat(self) -> Elector:
        """Ourselves as an elector."""
        return Elector(self.me.peer.peer, self.record.enrolment, self.me.host, self.me.address)

    def seated(self) -> bool:
        """Whether our disk is on the roster of the chain."""
        return any(self.is_me(elector) for elector in self.forks.roster)

    def is_me(self, elector: Elector) -> bool:
        return elector.peer == self.me.peer.peer and elector.enrolment == self.record.enrolment

    def is_elector(self, peer: PeerId) -> bool:
        """Whether that peer has a seat on the roster of our head."""
        return any(elector.peer == peer for elector in self.forks.roster)

    # -- the record -----------------------------------------------------------------------------------------------

    def raise_term(self, term: Term, voted_for: PeerBoot | None = None) -> None:
        self._change(replace(self.record, term=term, voted_for=voted_for))

    def vote_for(self, candidate: PeerBoot) -> None:
        self._change(replace(self.record, voted_for=candidate))

    def enter_branch(self, branch: BranchId, lineage: int, term: Term) -> None:
        """Votes, promises and terms hold inside a branch; the one left is never voted in again."""
        self._change(replace(self.record, branch=branch, lineage=lineage, term=term, voted_for=None))

    def note_held(self) -> None:
        """What is complete on disk now counts for ever."""
        if self.forks.best.rank > self.record.held:
            self._change(replace(self.record, held=self.forks.best.rank))

    def _change(self, record: VoteRecord) -> None:
        if record != self.record:
            self.record, self._dirty = record, True

    def persisted(self, number: int) -> None:
        self._written = max(self._written, number)

    # -- the outbox -----------------------------------------------------------------------------------------------

    def say(self, to: PeerId, ballot: Ballot) -> None:
        self._effects.append(Tell(to, self.record.branch, self.record.term, ballot))

    def need(self, to: PeerId, points: tuple[Head, ...], now: MonoMs) -> None:
        """Ask for the chain after those entries."""
        before = self._needs.pop(to, None)
        if before is not None and before[0] == points and now - before[1] < NEED_MS:
            self._needs[to] = before
            return
        self._needs[to] = points, now
        if len(self._needs) > NEEDS_MAX:
            del self._needs[next(iter(self._needs))]
        self.say(to, Need(points=points))

    def ask_for(self, effect: PollEffect) -> None:
        self._effects.append(effect)

    def drop_seals(self) -> None:
        """What was to be sealed and has not been asked for yet is of a service that is over."""
        self._effects = [
            effect for effect in self._effects if not isinstance(effect, SealFound | SealOpen | SealRoster)
        ]
        kept = [each for each in self._leaving if not isinstance(each[1], SealFound | SealOpen | SealRoster)]
        self._leaving = deque(kept)

    def note(self, topic: str, text: str, *, alarm: bool = False) -> None:
        self._effects.append(Note(topic, text, "error" if alarm else "info"))

    def flush(self) -> list[PollEffect]:
        """Everything that may go out now."""
        out: list[PollEffect] = []
        if self._dirty:
            self._asked, self._dirty = self._asked + 1, False
            out.append(PersistVote(self._asked, self.record))
        while self._leaving and self._leaving[0][0] <= self._written:
            effect = self._leaving.popleft()[1]
            if not self._outlived(effect):
                out.append(effect)
        for effect in self._effects:
            leaves = isinstance(effect, Tell | SendEntries | SealFound | SealOpen | SealRoster)
            if leaves and self._written < self._asked:
                self._leaving.append((self._asked, effect))
            else:
                out.append(effect)
        self._effects = []
        return out

    def _outlived(self, effect: PollEffect) -> bool:
        """Rule 4: an ack that waited for the disk while we went on to another term or branch."""
        if not isinstance(effect, Tell) or not isinstance(effect.ballot, Ack):
            return False
        return (effect.branch, effect.term) != (self.record.branch, self.record.term)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The earliest of some points in time."""

    at: MonoMs | None = None

    def or_by(self, at: int | None) -> Deadline:
        if at is None or (self.at is not None and self.at <= at):
            return self
        return Deadline(MonoMs(at))
