"""The invariants of an election, checked from outside, event by event. They share no code with the core.

Numbers are those of the list in the election's design: I1 one process start appends in a term; I2 seq, prev and term
grow along a chain, and a version by one; I3 what is durable in a term is on every later syncer's chain; I4 durable
heads lie on one chain; I5 `held` and `term` of a disk never sink; I6 durable bytes are on a majority's disks; I7 no
append after a hand-over; I8 one lease at a time; I9 a durable commit soon after faults stop (these two and the next
in `election_run.py`); I10 of two branches that meet exactly one yields. Besides: a disk votes
once a term (I0; I1 rests on it), an `open` proves itself (I12), and no work is consumed twice along a chain (I11).
Four rules are also checked as they are written, because what breaking them leads to needs several more accidents: R0
what a ballot says is on disk before it leaves; R4 acks are of the own term; R15 only entries of its own term are called
durable; R21 when a roster may change.
"""

from __future__ import annotations

from geo_diloco.manifest import Digest, PeerId
from geo_diloco.protocol.effects import Note
from geo_diloco.protocol.election.ballots import Ack, Append, Ask, EntryFacts, Rank, Release, Vote
from geo_diloco.protocol.election.polls import DurableReached, PollEffect, PollEvent, Tell
from tests.support.election_process import Process
from tests.support.election_world import Watcher, World


class AppendChecker(Watcher):
    """I1, I2, I7, and what an entry itself must prove."""

    def __init__(self, world: World, durables: DurableChecker) -> None:
        self._world = world
        self.durables = durables
        self._owners: dict[tuple[str, int], tuple[PeerId, str]] = {}
        self._released: set[tuple[str, int]] = set()
        self._used: dict[Digest, frozenset[object]] = {}
        self.num_elections = 0
        self.num_rosters = 0

    def told(self, process: Process, tell: Tell) -> None:
        """Who yields to a later branch may have an entry under way, that nobody will hear of."""
        if isinstance(tell.ballot, Release) and tell.branch == process.machine.record.branch:
            self._released.add((tell.branch, tell.term))

    def reformed(self, entry: EntryFacts) -> None:
        self._used[entry.digest] = self._used[entry.prev]

    def drafted(self, process: Process, entry: EntryFacts) -> None:
        book, record = self._world.book, process.machine.record
        lineage = 0 if entry.kind == "found" else book.lineage(entry.prev)
        assert lineage == record.lineage, f"I10: an append to branch {lineage} by one of branch {record.lineage}"

    def sealed(self, process: Process, entry: EntryFacts) -> None:
        book = self._world.book
        branch = book.branch(entry.digest)
        place = (branch, entry.term)
        owner = self._owners.setdefault(place, (process.peer, process.boot))
        assert owner == (process.peer, process.boot), f"I1: two appended in term {entry.term}"
        assert place not in self._released, f"I7: an append in term {entry.term} after its hand-over"
        if entry.kind == "found":
            self._used[entry.digest] = frozenset()
            return
        parent = book.entries[entry.prev]
        assert entry.seq == parent.seq + 1, f"I2: seq {entry.seq} after {parent.seq}"
        if entry.kind == "open":
            assert entry.term > parent.term or parent.kind == "found", f"I2: term {entry.term} after {parent.term}"
            self._proven(entry)
            self.num_elections += 1
        else:
            assert entry.term == parent.term and parent.kind != "found", f"I2: term {entry.term} was not opened"
        if entry.kind == "roster":
            self.num_rosters += 1
            self._one_at_a_time(process, entry)
        if entry.kind == "commit":
            before, after = book.versions(entry.prev), book.versions(entry.digest)
            assert after[entry.fragment] == before[entry.fragment] + 1, "I2: version"
        used = self._used[entry.prev]
        twice = [use for use in entry.uses if use in used]
        assert not twice, "I11: work consumed twice along a chain"
        self._used[entry.digest] = used | frozenset(entry.uses) if entry.uses else used

    def _one_at_a_time(self, process: Process, entry: EntryFacts) -> None:
        book = self._world.book
        old, new = set(book.roster(entry.prev)), set(entry.roster or ())
        alone = {(elector.peer, elector.enrolment) for elector in old} == {(process.peer, process.host.disk.enrolment)}
        assert alone or len(old ^ new) == 1, f"R21: {len(old ^ new)} electors came or went at once"
        claim = self.durables.claim(book.branch(entry.prev), entry.term)
        assert claim is not None, f"R21: a roster before anything of term {entry.term} is durable"
        at = book.entries[entry.prev]
        while at.roster is None:
            at = book.entries[at.prev]
        assert book.is_ancestor(at.digest, claim), "R21: a roster before the last one is durable"

    def _proven(self, entry: EntryFacts) -> None:
        opened = entry.opened
        assert opened is not None
        roster = self._world.book.roster(entry.prev)
        seats = {(elector.peer, elector.enrolment) for elector in roster}
        votes = {
            (vote.elector, vote.enrolment)
            for vote in opened.votes
            if vote.head == entry.prev and vote.term == entry.term and vote.candidate.boot == opened.boot
        }
        assert 2 * len(votes & seats) > len(roster), f"I12: open of term {entry.term} is not proven"


class DurableChecker(Watcher):
    """I3, I4, I6."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tops: dict[str, Digest] = {}
        self._claims: dict[tuple[str, int], Digest] = {}
        """Highest entry called durable by the syncer of a term."""
        self._opens: list[EntryFacts] = []
        self.num_durable = 0
        self.commit_at: int | None = None
        """When a commit sealed after `since` was first called durable."""
        self.since: int | None = None
        self.lineage = 0
        """Only commits of that branch count after `since`."""
        self.since_term = 0
        """And only those of this term or a later one."""
        self.last_commit_at = 0

    def handled(self, process: Process, event: PollEvent, effects: list[PollEffect]) -> None:
        for effect in effects:
            if isinstance(effect, DurableReached):
                self._durable(process, effect)

    def tops(self) -> list[Digest]:
        """The highest durable entry of each branch."""
        return list(self._tops.values())

    def claim(self, branch: str, term: int) -> Digest | None:
        """The highest entry called durable in that term."""
        return self._claims.get((branch, term))

    def _durable(self, process: Process, claim: DurableReached) -> None:
        book = self._world.book
        entry = book.entries[claim.digest]
        assert entry.seq == claim.seq, "I4: an entry of another seq"
        branch, term = book.branch(claim.digest), process.machine.record.term
        self._own_term(entry, term)
        self._on_disks(process, claim)
        top = self._tops.get(branch)
        if top is not None:
            low, high = sorted((top, claim.digest), key=lambda digest: book.entries[digest].seq)
            assert book.is_ancestor(low, high), f"I4: entry {claim.seq} of term {term} is off the durable chain"
            self._tops[branch] = high
        else:
            self._tops[branch] = claim.digest
        self._claims[branch, term] = claim.digest
        for opened in self._opens:
            if opened.term > term and book.branch(opened.digest) == branch:
                assert book.is_ancestor(claim.digest, opened.digest), f"I3: term {opened.term} lacks entry {claim.seq}"
        self.num_durable += 1
        self._note_commit(claim)

    def _own_term(self, entry: EntryFacts, term: int) -> None:
        assert entry.term == term, f"R15: term {term} calls an entry of term {entry.term} durable"

    def _note_commit(self, claim: DurableReached) -> None:
        book, now = self._world.book, self._world.clockwork.now
        at = book.entries.get(claim.digest)
        while at is not None and (self.since is None or book.sealed_at[at.digest] > self.since):
            if at.kind == "commit" and (self.since is None or self._counts(at)):
                if self.since is not None and self.commit_at is None:
                    self.commit_at = now
                self.last_commit_at = now
                return
            at = book.entries.get(at.prev)

    def _counts(self, entry: EntryFacts) -> bool:
        return self._world.book.lineage(entry.digest) >= self.lineage and entry.term >= self.since_term

    def _on_disks(self, process: Process, claim: DurableReached) -> None:
        world = self._world
        roster = world.book.roster(process.machine.head.digest)
        having = [e for e in roster if claim.digest in world.whole.get((e.peer, e.enrolment), ())]
        assert 2 * len(having) > len(roster), f"I6: entry {claim.seq} is whole on {len(having)} of {len(roster)} disks"

    def sealed(self, process: Process, entry: EntryFacts) -> None:
        book = self._world.book
        if entry.kind != "open":
            return
        for (branch, term), digest in self._claims.items():
            if term < entry.term and branch == book.branch(entry.digest):
                lacks = f"I3: term {entry.term} lacks entry {book.entries[digest].seq}, durable in term {term}"
                assert book.is_ancestor(digest, entry.digest), lacks
        self._opens.append(entry)


class RecordChecker(Watcher):
    """I5, and one vote a term for each disk."""

    def __init__(self) -> None:
        self._seen: dict[tuple[PeerId, str], tuple[Rank, tuple[int, int]]] = {}
        self._votes: dict[tuple[PeerId, str, str, int], object] = {}

    def handled(self, process: Process, event: PollEvent, effects: list[PollEffect]) -> None:
        written, memory = process.host.disk.record, process.machine.record
        if written is None:
            return
        now = (written.held, (written.lineage, written.term))
        before = self._seen.get((process.peer, written.enrolment), now)
        assert now[0] >= before[0] and now[1] >= before[1], f"I5: {now} after {before}"
        assert memory.held >= now[0] and (memory.lineage, memory.term) >= now[1], f"I5: {memory}, on disk {written}"
        self._seen[process.peer, written.enrolment] = now

    def told(self, process: Process, tell: Tell) -> None:
        written, ballot = process.host.disk.record, tell.ballot
        if isinstance(ballot, Vote | Ask | Ack | Append):
            assert written is not None and written.term >= tell.term, f"R0: term {tell.term} left before it was on disk"
        if isinstance(ballot, Ack):
            assert written is not None and written.term == tell.term, f"R4: an ack of term {tell.term} in a later one"
            assert written is not None and written.held >= ballot.acked.rank, "R0: an ack left before it was on disk"
        if isinstance(ballot, Vote):
            voted_for = None if written is None or written.term > tell.term else written.voted_for
            assert voted_for in (None, ballot.candidate), "R0: a vote left before it was on disk"
        if isinstance(tell.ballot, Vote):
            key = (process.peer, tell.ballot.enrolment, tell.branch, tell.term)
            voted = self._votes.setdefault(key, tell.ballot.candidate)
            assert voted == tell.ballot.candidate, f"I0: a disk voted twice in term {tell.term}"


class LeaseChecker(Watcher):
    """I8: at any real time at most one process believes that it holds the lease."""

    def __init__(self, world: World) -> None:
        self._world = world

    def handled(self, process: Process, event: PollEvent, effects: list[PollEffect]) -> None:
        """A second lease begins with an event of whoever takes it."""
        if process.machine.role != "syncer":
            return
        holders: dict[str, Process] = {}
        for host in self._world.hosts:
            each = host.process
            if each is None or each.machine.role != "syncer":
                continue
            now = each.mono()
            until = each.machine.lease_until(now)
            if until is not None and now < until:
                other = holders.setdefault(each.machine.record.branch, each)
                assert other is each, f"I8: {other.host.index} and {each.host.index} both hold a lease"


class ReasonChecker(Watcher):
    """Everybody can say what they wait for."""

    def handled(self, process: Process, event: PollEvent, effects: list[PollEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Note):
                assert effect.text, "a note says nothing"
