"""There is one chain, whoever serves: who may append, what is durable, who has the lease, which branch goes on.

Checked from outside, as in `checkers.py`, which watches what the entries of that chain say. Numbers are those of
`protocol/README.md`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from geo_diloco.manifest import Digest, Term
from geo_diloco.protocol.effects import Effect
from geo_diloco.protocol.election.ballots import Elector
from geo_diloco.protocol.events import Event
from geo_diloco.protocol.messages import Entry, Finished, Found, Open, Reform, RosterChange
from geo_diloco.sim.fakes import SignedEntry
from geo_diloco.sim.process import Process
from geo_diloco.sim.world import Watch, World


class AppendChecker(Watch):
    """1 and 2 (I1, I2): one process appends in a term; seq and term grow along every chain; a term is opened first, by
    votes of a majority of the electors then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owners: dict[tuple[str, int], str] = {}
        self.num_opens = 0

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        entry, header = signed.entry, signed.entry.header
        owner = self._owners.setdefault((header.branch or signed.digest, header.term), process.boot)
        assert owner == process.boot, f"two processes append in term {header.term}"
        if isinstance(entry, Found):
            assert header.seq == 0
            return
        last = self._world.entries[Digest(header.prev)].entry
        assert header.seq == last.header.seq + 1, f"seq {header.seq} after {last.header.seq}"
        assert not isinstance(last, Finished) or isinstance(entry, Open), "an entry after the end"
        if isinstance(entry, Open):
            self.num_opens += 1
            assert header.term > last.header.term or isinstance(last, Found), "term went back"
            seats = {(elector.peer, elector.enrolment) for elector in roster_at(self._world, Digest(header.prev))}
            votes = {(vote.elector, vote.enrolment) for vote in entry.votes if vote.head == header.prev}
            assert 2 * len(votes & seats) > len(seats), f"open of term {header.term} without a majority"
        else:
            assert header.term == last.header.term and not isinstance(last, Found), f"term {header.term} is not open"


class DurableChecker(Watch):
    """3 (I3, I4, I6): what was durable once is on every later syncer's chain, everybody folds the same entries in the
    same order, and a majority of the electors holds them on disk."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.chain: list[SignedEntry] = []
        """What is durable, as far as anybody has folded it."""
        self._durable_in: list[tuple[int, Term]] = []
        """Of each: lineage and term in which it became durable, for that may be a later one than its own."""
        self._folded: dict[str, Digest] = {}
        """Entry folded last, by process start."""
        self.num_branches = 0

    @property
    def _head(self) -> Digest:
        return self.chain[-1].digest if self.chain else Digest("")

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        ledger = process.core.ledger
        if ledger.seq < 0 or self._folded.get(process.boot) == ledger.head_digest:
            return
        self._folded[process.boot] = ledger.head_digest
        self.num_branches = max(self.num_branches, lineage_at(self._world, ledger.head_digest) + 1)
        if lineage_at(self._world, ledger.head_digest) < lineage_at(self._world, self._head):
            return  # of what the owner's reform has left behind, as this process will hear
        if ledger.seq >= len(self.chain) or ledger.lineage > lineage_at(self._world, self._head):
            self._extend(process, ledger.head_digest)
        assert self.chain[ledger.seq].digest == ledger.head_digest, (
            f"host {process.host.index} folded another entry {ledger.seq} than others"
        )

    def _extend(self, process: Process, head: Digest) -> None:
        new: list[SignedEntry] = []
        at: Digest | str = head
        while at and not self._holds(Digest(at)):
            new.append(self._world.entries[Digest(at)])
            at = new[-1].entry.header.prev
        if at != self._head:
            reforms = lineage_at(self._world, head) > lineage_at(self._world, self._head)
            assert reforms, "what became durable leaves the durable chain"
            del self.chain[new[-1].entry.header.seq :], self._durable_in[new[-1].entry.header.seq :]
            self._world.abandoned(self.chain)
        durable_in = lineage_at(self._world, head), self._world.entries[head].entry.header.term
        for signed in reversed(new):
            self.chain.append(signed)
            self._durable_in.append(durable_in)
            self._world.durable(process, signed)
        self._on_disks(process, head)

    def _holds(self, digest: Digest) -> bool:
        seq = self._world.entries[digest].entry.header.seq
        return seq < len(self.chain) and self.chain[seq].digest == digest

    def _on_disks(self, process: Process, head: Digest) -> None:
        newest = process.core.election.head.digest if process.core.serves else head
        roster = roster_at(self._world, newest)
        disks = [(self._world.by_peer[elector.peer].disk, elector.enrolment) for elector in roster]
        having = [disk for disk, enrolment in disks if disk.enrolment == enrolment and disk.holds_up_to(head)]
        lost = [disk for disk, enrolment in disks if disk.enrolment != enrolment]
        assert 2 * (len(having) + len(lost)) > len(roster), f"durable on {len(having)} of {len(roster)} disks"

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        """Of the entries that became durable in earlier terms: who was elected, and slept, may open its term when a
        later one is under way. Nothing of that will ever be durable."""
        term = signed.entry.header.term
        if not isinstance(signed.entry, Open):
            return
        lineage = lineage_at(self._world, signed.digest)
        num_before = bisect_left(self._durable_in, (lineage, term))
        if not num_before or lineage != lineage_at(self._world, self._head):
            return  # of another branch, or the first
        at: Digest | str = signed.entry.header.prev
        last = self.chain[num_before - 1]
        while at and self._world.entries[Digest(at)].entry.header.seq > last.entry.header.seq:
            at = self._world.entries[Digest(at)].entry.header.prev
        assert at == last.digest, f"term {term} lacks the durable entry {last.entry.header.seq}"


class LeaseChecker(Watch):
    """I8: at any real time at most one process of a branch believes that it holds the lease."""

    def __init__(self, world: World) -> None:
        self._world = world

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if process.core.election.role != "syncer":
            return
        holders = []
        for each in self._world.able_processes():
            if each.core.election.role != "syncer" or each.core.election.branch != process.core.election.branch:
                continue
            until = each.core.election.lease_until(each.mono())
            if until is not None and each.mono() < until:
                holders.append(each.host.index)
        assert len(holders) <= 1, f"hosts {holders} hold a lease"


class BranchChecker(Watch):
    """I10: of two branches that meet the earlier yields. Whoever has entered a later one never goes back, and opens no
    more terms in the one it left, not as another process of the same disk either."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._entered: dict[str, int] = defaultdict(int)
        """By disk."""

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        record = process.core.election.record
        assert record.lineage >= self._entered[record.enrolment], (
            f"host {process.host.index} went from branch {self._entered[record.enrolment]} to {record.lineage}"
        )
        if process.disk.vote is not None and process.disk.vote.enrolment == record.enrolment:
            # What is not on its disk yet it has told nobody.
            self._entered[record.enrolment] = process.disk.vote.lineage

    def sealed(self, process: Process, signed: SignedEntry) -> None:
        if isinstance(signed.entry, Open):
            lineage = lineage_at(self._world, signed.digest)
            entered = self._entered[process.core.election.record.enrolment]
            assert lineage >= entered, f"host {process.host.index} opens a term in branch {lineage} after {entered}"


def lineage_at(world: World, digest: Digest) -> int:
    """Number of the reform that began the branch of that entry."""
    if digest not in world.lineages:
        entry = world.entries[digest].entry if digest else None
        before = lineage_at(world, Digest(entry.header.prev)) if entry is not None and entry.header.prev else 0
        world.lineages[digest] = entry.lineage if isinstance(entry, Reform) else before
    return world.lineages[digest]


def roster_at(world: World, digest: Digest) -> tuple[Elector, ...]:
    """The electors in force at that entry."""
    entry: Entry = world.entries[digest].entry
    while not isinstance(entry, Found | RosterChange | Reform):
        entry = world.entries[Digest(entry.header.prev)].entry
    return entry.roster
