"""Three elections in one world where Hypothesis decides what happens next: any order, loss, repetition, crash, clock.

The swarm (`test_swarm.py`) draws likely accidents; here nothing is likely, and a failure shrinks to the few steps that
matter. The same outside checkers watch: I1, I2, I3, I4, I5, I6, one vote a term, and what must be on disk first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, MonoMs, PeerId, Seq, Term, Version
from geo_diloco.protocol.effects import PersistVote, SendEntries
from geo_diloco.protocol.election.ballots import EntryFacts, Opened, PeerBoot
from geo_diloco.protocol.election.books import ElectionRules, Myself
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.election.polls import (
    EntriesArrived,
    EntrySealed,
    FoundingAsked,
    Heard,
    PollEvent,
    SealFound,
    SealOpen,
    SealRoster,
    Started,
    TakeEntries,
    Tell,
)
from geo_diloco.protocol.events import EntryLost, EntryStored, HandoverAsked, Sighted, Sighting, Tick, VotePersisted
from tests.support.election_checkers import AppendChecker, DurableChecker, RecordChecker
from tests.support.election_process import Book, Disk, digest_of

PEERS = 3
INDEX = st.integers(0, PEERS - 1)
RULES = ElectionRules(owner=PeerId(digest_of("peer", 0)), lease_ms=2_000, silent_ms=10**9, electors_wanted=3)


@dataclass
class Member:
    """A process and its disk, as the checkers look at them. Writes wait until somebody says that they are done."""

    index: int
    disk: Disk
    starts: int = 0
    now: int = 1_000
    writes: deque[Callable[[], None]] = field(default_factory=deque)
    sealing: bool = False
    machine: Election = field(init=False)

    @property
    def peer(self) -> PeerId:
        return PeerId(digest_of("peer", self.index))

    @property
    def boot(self) -> BootId:
        return BootId(digest_of(self.index, self.starts)[:16])

    @property
    def host(self) -> Member:
        return self


class Elections(RuleBasedStateMachine):
    """Whatever Hypothesis does to three peers."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()
        self.members = [Member(index, Disk(f"disk {index}")) for index in range(PEERS)]
        self.flying: list[tuple[int, PollEvent]] = []
        whole = {(each.peer, each.disk.enrolment): each.disk.whole for each in self.members}
        seen: Any = SimpleNamespace(book=self.book, whole=whole, clockwork=SimpleNamespace(now=0))
        durables = DurableChecker(seen)
        self.watchers = (AppendChecker(seen, durables), durables, RecordChecker())

    # -- the shell ------------------------------------------------------------------------------------------------

    def start(self, member: Member) -> None:
        member.starts += 1
        member.writes.clear()
        member.sealing = False
        me = Myself(
            peer=PeerBoot(member.peer, member.boot),
            fresh_enrolment=member.disk.enrolment,
            host=f"host {member.index}",
            address="here",
            may_serve=True,
            may_elect=True,
        )
        member.machine = Election(me, RULES, member.disk.record, jitter=member.starts * 7 + member.index)
        self.give(member, Started(tuple(member.disk.log), tuple(member.disk.stored)))

    def give(self, member: Member, event: PollEvent) -> None:
        effects = member.machine.handle(event, MonoMs(member.now))
        member.machine.check_invariants()
        for watcher in self.watchers:
            watcher.handled(member, event, effects)  # type: ignore[arg-type]
        for effect in effects:
            match effect:
                case PersistVote():
                    member.writes.append(lambda effect=effect: self._persist(member, effect))
                case TakeEntries():
                    member.writes.append(lambda effect=effect: self._take(member, effect.entries))
                case SealFound() | SealOpen() | SealRoster():
                    member.writes.append(lambda effect=effect: self._seal(member, effect))
                case Tell():
                    for watcher in self.watchers:
                        watcher.told(member, effect)  # type: ignore[arg-type]
                    heard = Heard(member.peer, effect.branch, effect.term, member.boot, effect.ballot)
                    self._send(effect.to, heard)
                case SendEntries():
                    known = member.disk.known
                    entries = tuple(known[each] for each in effect.digests if each in known)
                    self._send(effect.to, EntriesArrived(member.peer, entries))
                case _:
                    pass

    def _send(self, to: PeerId, event: PollEvent) -> None:
        self.flying += [(each.index, event) for each in self.members if each.peer == to]
        del self.flying[:-60]

    def _persist(self, member: Member, effect: PersistVote) -> None:
        member.disk.record = effect.record
        self.give(member, VotePersisted(effect.number))

    def _take(self, member: Member, entries: tuple[EntryFacts, ...]) -> None:
        for entry in entries:
            member.disk.write(entry)
            if entry.kind != "commit":
                self._store(member, entry.digest)

    def _store(self, member: Member, digest: Digest) -> None:
        member.disk.store(digest)
        self.give(member, EntryStored(digest))

    def _seal(self, member: Member, effect: SealFound | SealOpen | SealRoster | Term) -> None:
        """Draft an entry; it is on disk with the next write but those that wait already."""
        machine, now = member.machine, MonoMs(member.now)
        head, facts = machine.head, {}  # type: ignore[var-annotated]
        match effect:
            case SealFound():
                kind, term, facts = "found", effect.term, {"roster": effect.roster}
            case SealOpen():
                opened = Opened(member.peer, member.boot, "here", effect.votes)
                kind, term, head, facts = "open", effect.term, effect.head, {"opened": opened}
            case SealRoster():
                kind, term, facts = "roster", effect.term, {"roster": effect.roster}
            case _:
                kind, term = "commit", effect
        if kind in ("roster", "commit"):
            if member.sealing or machine.begin_append(term, now, roster=kind == "roster") is not None:
                return
            facts["fragment"] = FragmentId(0)
            if kind == "commit":
                facts["version"] = Version(self.book.versions(head.digest)[0] + 1)
        branch = BranchId("") if kind == "found" else self.book.branch(head.digest)
        entry = EntryFacts(
            kind=kind,  # type: ignore[arg-type]
            branch=branch,
            term=term,
            seq=Seq(head.rank.seq + 1),
            prev=head.digest,
            digest=digest_of(kind, term, head.digest, member.boot, len(self.book.entries)),
            signer=member.peer,
            **facts,
        )
        member.sealing = True
        member.writes.append(lambda: self._sealed(member, entry))

    def _put(self, member: Member, entry: EntryFacts) -> None:
        member.disk.write(entry)
        member.disk.store(entry.digest)
        self.book.add(entry, 0)
        for watcher in self.watchers:
            watcher.sealed(member, entry)  # type: ignore[arg-type]

    def _sealed(self, member: Member, entry: EntryFacts) -> None:
        member.sealing = False
        self._put(member, entry)
        self.give(member, EntrySealed(entry))

    # -- what may happen ------------------------------------------------------------------------------------------

    @initialize(settled=st.booleans())
    def found(self, settled: bool) -> None:
        for member in self.members:
            self.start(member)
        self.give(self.members[0], FoundingAsked())
        if settled:
            self.calm(seconds=12)

    @rule(index=INDEX, number=st.integers(1, 4))
    def write(self, index: int, number: int) -> None:
        """Some writes are done, in their order."""
        member = self.members[index]
        for _ in range(min(number, len(member.writes))):
            member.writes.popleft()()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), copies=st.integers(0, 2))
    def deliver(self, data: st.DataObject, copies: int) -> None:
        """Any message arrives, or is lost, or arrives twice."""
        index, event = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        for _ in range(copies):
            self.give(self.members[index], event)

    @rule(index=INDEX, ms=st.sampled_from((1, 100, 700, 1_000, 2_100)))
    def wait(self, index: int, ms: int) -> None:
        """One clock goes on."""
        member = self.members[index]
        member.now += ms
        self.give(member, Tick())

    @rule(index=INDEX)
    def crash(self, index: int) -> None:
        self.start(self.members[index])

    @rule(index=INDEX)
    def commit(self, index: int) -> None:
        member = self.members[index]
        if member.machine.role == "syncer" and not member.sealing:
            self._seal(member, member.machine.record.term)

    @rule(index=INDEX, source=INDEX)
    def fetch(self, index: int, source: int) -> None:
        """A blob that another has."""
        disk, other = self.members[index].disk, self.members[source].disk
        missing = [digest for digest in disk.known if digest not in disk.stored and digest in other.stored]
        if missing:
            self._store(self.members[index], missing[0])

    @rule(index=INDEX, back=st.integers(1, 4))
    def lose(self, index: int, back: int) -> None:
        """A blob went bad."""
        disk = self.members[index].disk
        commits = [digest for digest in disk.stored if disk.known[digest].kind == "commit"]
        if len(commits) >= back:
            del disk.stored[commits[-back]]
            self.give(self.members[index], EntryLost(commits[-back]))

    @rule(index=INDEX, to=st.none() | INDEX)
    def hand_over(self, index: int, to: int | None) -> None:
        self.give(self.members[index], HandoverAsked(None if to is None else self.members[to].peer))

    @rule(seconds=st.integers(1, 6))
    def calm(self, seconds: int) -> None:
        """Everything works for a while: else nobody would ever be elected here."""
        for tenth in range(10 * seconds):
            for member in self.members:
                member.now += 100
                self.give(member, Sighted(self._sightings()) if tenth % 10 == 0 else Tick())
                if tenth % 5 == 0:
                    self.commit(member.index)
                while member.writes:
                    member.writes.popleft()()
                for source in range(PEERS):
                    self.fetch(member.index, source)
            arrived, self.flying = self.flying, []
            for index, event in arrived:
                self.give(self.members[index], event)

    def _sightings(self) -> tuple[Sighting, ...]:
        found = []
        for member in self.members:
            machine = member.machine
            serves = machine.record.term if machine.role == "syncer" else None
            found.append(Sighting(member.peer, machine.best.rank, serves))
        return tuple(found)


Elections.TestCase.settings = settings(max_examples=12, stateful_step_count=60, deadline=None)
TestElections = Elections.TestCase
