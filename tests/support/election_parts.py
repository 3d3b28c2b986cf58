"""Chains and machines for tests of single election rules: short to write, and valid unless a test breaks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from geo_diloco.manifest import BootId, BranchId, Digest, MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.effects import PersistVote, SendEntries
from geo_diloco.protocol.election.ballots import (
    NO_RANK,
    Ballot,
    Elector,
    EntryFacts,
    EntryKind,
    Head,
    Need,
    Offer,
    Opened,
    PeerBoot,
    Rank,
    Roster,
    SignedVote,
    VoteRecord,
)
from geo_diloco.protocol.election.books import ElectionRules, Myself
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.election.polls import (
    EntriesArrived,
    EntrySealed,
    FoundingAsked,
    Heard,
    PollEffect,
    PollEvent,
    Started,
    Tell,
)
from geo_diloco.protocol.events import EntryStored, Tick, VotePersisted
from tests.support.election_process import digest_of

OWNER = PeerId("a" * 64)
A, B, C, D, E = (PeerId(letter * 64) for letter in "abcde")


def seat(peer: PeerId, *, host: str | None = None, enrolment: str | None = None) -> Elector:
    """An elector on a host of its own."""
    return Elector(peer, enrolment or f"disk {peer[0]}", host or f"host {peer[0]}", f"{peer[0]}:1")


def boot(peer: PeerId, start: int = 1) -> PeerBoot:
    return PeerBoot(peer, BootId(f"{peer[0]}{start}"))


THREE = (seat(A), seat(B), seat(C))


class Chain:
    """A valid chain in the making."""

    def __init__(self, roster: Roster = THREE, *, owner: PeerId = OWNER) -> None:
        self.entries: list[EntryFacts] = []
        self.roster = roster
        self.branch = BranchId("")
        self.signer = owner
        self.term = Term(1)
        self.add("found", roster=roster)
        self.branch = BranchId(self.entries[0].digest)

    @property
    def head(self) -> Head:
        last = self.entries[-1]
        return Head(Rank(self.lineage, last.term, last.seq), last.digest)

    lineage = 0

    def add(self, kind: EntryKind, **facts: Any) -> EntryFacts:
        prev = self.entries[-1] if self.entries else None
        seq = Seq(0 if prev is None else prev.seq + 1)
        entry = EntryFacts(
            kind=kind,
            branch=self.branch,
            term=self.term,
            seq=seq,
            prev=Digest("") if prev is None else prev.digest,
            digest=Digest(""),
            signer=self.signer,
        )
        entry = replace(entry, **facts)
        entry = replace(entry, digest=digest_of(entry))
        self.entries.append(entry)
        if entry.roster is not None:
            self.roster = entry.roster
        return entry

    def open(self, syncer: PeerId, term: int, *, start: int = 1, voters: Roster | None = None) -> EntryFacts:
        """The next term, with the votes of everybody on the roster."""
        self.term, self.signer = Term(term), syncer
        who, head = boot(syncer, start), self.entries[-1].digest
        votes = tuple(
            SignedVote(each.peer, each.enrolment, self.term, who, head)
            for each in (self.roster if voters is None else voters)
        )
        return self.add("open", opened=Opened(who.peer, who.boot, "", votes))

    def commits(self, number: int = 1, **facts: Any) -> list[EntryFacts]:
        return [self.add("commit", **facts) for _ in range(number)]

    def fork(self) -> Chain:
        """Another chain with the same past."""
        other = Chain.__new__(Chain)
        other.__dict__.update(self.__dict__)
        other.entries = list(self.entries)
        return other

    def facts(self) -> tuple[EntryFacts, ...]:
        return tuple(self.entries)


RULES = ElectionRules(owner=OWNER, lease_ms=15_000, electors_wanted=3)


class Bench:
    """One machine, a clock to turn, and a disk that answers at once (or when told to)."""

    def __init__(
        self,
        peer: PeerId = A,
        *,
        start: int = 1,
        record: VoteRecord | None = None,
        chain: Chain | None = None,
        stored: bool = True,
        rules: ElectionRules = RULES,
        may_serve: bool = True,
    ) -> None:
        me = Myself(
            peer=boot(peer, start),
            fresh_enrolment=f"disk {peer[0]}",
            host=f"host {peer[0]}",
            address=f"{peer[0]}:1" if may_serve else "",
            may_serve=may_serve,
            may_elect=True,
        )
        self.now = MonoMs(1_000_000)
        self.machine = Election(me, rules, record, jitter=7)
        self.disk_answers = True
        self.said: list[Tell] = []
        self.effects: list[PollEffect] = []
        entries = () if chain is None else chain.facts()
        self.give(Started(entries, tuple(entry.digest for entry in entries) if stored else ()))

    @property
    def role(self) -> str:
        return self.machine.role

    def give(self, event: PollEvent) -> list[PollEffect]:
        """Handle it, and what the disk answers to it. Returns all effects."""
        effects = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        every = list(effects)
        for effect in effects:
            if isinstance(effect, PersistVote) and self.disk_answers:
                every += self.give(VotePersisted(effect.number))
        if not isinstance(event, VotePersisted):
            self.effects += every
            self.said += [effect for effect in every if isinstance(effect, Tell)]
        return every

    def hear(
        self, sender: PeerId, ballot: Ballot, *, term: int, start: int = 1, branch: str | None = None
    ) -> list[Tell]:
        """What it says in answer to a ballot."""
        at = self.machine.record.branch if branch is None else BranchId(branch)
        effects = self.give(Heard(sender, at, Term(term), boot(sender, start).boot, ballot))
        return [effect for effect in effects if isinstance(effect, Tell)]

    def give_need(self, sender: PeerId, points: tuple[Head, ...]) -> list[SendEntries]:
        """What it sends to one who needs entries."""
        at = self.machine.record
        effects = self.give(Heard(sender, at.branch, at.term, boot(sender).boot, Need(points=points)))
        return [effect for effect in effects if isinstance(effect, SendEntries)]

    def take(self, chain: Chain, sender: PeerId = B, *, stored: bool = True) -> list[PollEffect]:
        effects = self.give(EntriesArrived(sender, chain.facts()))
        for entry in chain.entries if stored else ():
            effects += self.give(EntryStored(entry.digest))
        return effects

    def wait(self, ms: int) -> list[PollEffect]:
        """Let time pass, with a Tick at every deadline."""
        until, effects = self.now + ms, []
        while self.machine.deadline is not None and self.machine.deadline <= until:
            self.now = MonoMs(max(self.now, self.machine.deadline))
            effects += self.give(Tick())
        self.now = MonoMs(until)
        return effects + self.give(Tick())


def ballots(effects: list[Any], kind: type) -> list[tuple[PeerId, Any]]:
    """Ballots of a kind among effects, with whom they go to."""
    return [(each.to, each.ballot) for each in effects if isinstance(each, Tell) and isinstance(each.ballot, kind)]


def offer_of(peer: PeerId, *, held: Rank | None = None, free: bool = True, enrolment: str | None = None) -> Offer:
    """What that elector offers."""
    mine, rank = seat(peer, enrolment=enrolment), held or NO_RANK
    return Offer(
        held=rank,
        can_serve=Head(rank, Digest("")),
        enrolment=mine.enrolment,
        host=mine.host,
        address=mine.address,
        free=free,
    )


def founded(peer: PeerId = OWNER) -> tuple[Bench, Chain]:
    """A machine that has founded the run and serves its first term alone, and its chain."""
    bench = Bench(peer)
    bench.give(FoundingAsked())
    chain = Chain((seat(peer),), owner=peer)
    bench.give(EntrySealed(chain.entries[0]))
    chain.open(peer, 1)
    bench.give(EntrySealed(chain.entries[1]))
    return bench, chain
