"""Who serves a run, shown to one who knows nothing but its manifest.

A proof is every `found`, `roster`, `open` and `reform` entry of the chain, in order. `found` and `reform` are signed by
the founder, whose key is in the manifest; each `open` shows signed votes of a majority of the roster before it; a
roster is signed by the syncer of its term. So whoever is syncer of the last term shown was made so, step by step, by
those that the founder began with. It does not show that nobody was elected since: that the joiner hears when it says
Hello.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_diloco.errors import RemoteProtocolError
from geo_diloco.manifest import BranchId, PeerId, RunId, Seq, Term
from geo_diloco.protocol.election.ballots import Opened, Roster
from geo_diloco.protocol.election.validity import why_not_elected, why_not_next_roster
from geo_diloco.protocol.ledger import facts_of, opened_of
from geo_diloco.protocol.messages import Entry, Found, Open, Reform, RosterChange, Snapshot
from geo_diloco.runtime.wire import Signed, open_entry

PROOF_ENTRIES_MAX = 65_536


@dataclass
class Authority:
    """What a proof shows."""

    found: Found
    branch: BranchId
    rosters: list[tuple[Seq, Roster]]
    """From which entry on each was in force, oldest first."""
    founder: PeerId
    lineage: int = 0
    opened: dict[Term, Opened] = field(default_factory=dict)
    """Of this branch."""
    _last: tuple[Term, Seq] = (Term(0), Seq(0))

    @property
    def term(self) -> Term:
        """The highest that is shown to be open."""
        return max(self.opened, default=Term(0))

    @property
    def seq(self) -> Seq:
        """Of the newest entry shown."""
        return self._last[1]

    def roster_at(self, seq: Seq) -> tuple[Seq, Roster]:
        return [each for each in self.rosters if each[0] <= seq][-1]

    def add(self, signed: Signed, entry: Entry) -> None:
        """Raises RemoteProtocolError unless what was shown before allows it."""
        header = entry.header
        place = header.term, header.seq
        if header.run != self.found.header.run or header.branch != self.branch or place[1] <= self._last[1]:
            raise _wrong(signed, f"entry {header.seq} of another chain, or out of order")
        self._last = place
        if isinstance(entry, Reform):
            self._add_reform(signed, entry)
        elif isinstance(entry, Open):
            self._add_open(signed, entry)
        elif isinstance(entry, RosterChange):
            self._add_roster(signed, entry)
        else:
            raise _wrong(signed, f"an entry of kind {entry.kind}")

    def _add_reform(self, signed: Signed, entry: Reform) -> None:
        if signed.signer != self.founder or entry.lineage <= self.lineage or not entry.roster:
            raise _wrong(signed, f"a reform of number {entry.lineage} that the run's owner did not sign")
        self.branch, self.lineage, self.opened = BranchId(signed.digest), entry.lineage, {}
        self.rosters.append((entry.header.seq, entry.roster))

    def _add_open(self, signed: Signed, entry: Open) -> None:
        term = entry.header.term
        if term <= self.term:
            raise _wrong(signed, f"term {term} after {self.term}")
        opened = opened_of(entry)
        facts = facts_of(entry, signed.digest, signed.signer)
        if why_not := why_not_elected(facts, opened, self.rosters[-1][1]):
            raise _wrong(signed, why_not)
        self.opened[term] = opened

    def _add_roster(self, signed: Signed, entry: RosterChange) -> None:
        opened = self.opened.get(entry.header.term)
        if opened is None or opened.syncer != signed.signer:
            raise _wrong(signed, f"a roster that the syncer of term {entry.header.term} did not sign")
        if why_not := why_not_next_roster(self.rosters[-1][1], entry.roster, signed.signer):
            raise _wrong(signed, why_not)
        self.rosters.append((entry.header.seq, entry.roster))


def read_proof(entries: Sequence[Signed], *, run: RunId, founder: PeerId) -> Authority:
    """Raises RemoteProtocolError if it proves nothing."""
    if not entries or len(entries) > PROOF_ENTRIES_MAX:
        raise RemoteProtocolError(f"a proof of {len(entries)} entries")
    first = open_entry(entries[0])
    if not isinstance(first, Found) or entries[0].signer != founder or first.header.run != run or not first.roster:
        raise _wrong(entries[0], "it does not begin with the founder's `found` of this run")
    authority = Authority(first, BranchId(entries[0].digest), [(first.header.seq, first.roster)], founder)
    for signed in entries[1:]:
        authority.add(signed, open_entry(signed))
    return authority


def check_entry(signed: Signed, entry: Entry, authority: Authority) -> None:
    """Raises RemoteProtocolError unless whoever served its term signed it, or the owner what is his to sign."""
    if isinstance(entry, Found | Reform):
        if BranchId(signed.digest) != authority.branch or entry.header.seq > authority.seq:
            raise _wrong(signed, f"a {entry.kind} that does not begin the branch")
        return
    opened = authority.opened.get(entry.header.term)
    if entry.header.branch != authority.branch or opened is None or opened.syncer != signed.signer:
        raise _wrong(signed, f"an entry that the syncer of term {entry.header.term} did not sign")


def check_snapshot(signed: Signed, snapshot: Snapshot, authority: Authority) -> None:
    """Raises RemoteProtocolError unless the syncer of its term signed it, and it says of that what the proof says."""
    opened = authority.opened.get(snapshot.term)
    if opened is None or opened.syncer != signed.signer:
        raise _wrong(signed, f"a snapshot that the syncer of term {snapshot.term} did not sign")
    said = snapshot.run, (snapshot.branch, snapshot.lineage), snapshot.opened, (snapshot.roster_seq, snapshot.roster)
    branch = authority.branch, authority.lineage
    shown = authority.found.header.run, branch, opened, authority.roster_at(snapshot.seq)
    if said != shown:
        raise _wrong(signed, "a snapshot that names another run, branch, syncer or roster than the proof")
    numbers = [each.number for each in snapshot.amended]
    strange = [each for each in snapshot.amended if each.owner != authority.founder or each.seq > snapshot.seq]
    if strange or numbers != sorted(set(numbers)):
        raise _wrong(signed, "a snapshot with amendments that the run's owner did not order")
    parts = {len(part) for part in (snapshot.heads, snapshot.theta, snapshot.momentum, snapshot.num_elements)}
    if len(parts) != 1 or len(snapshot.tokens_per_fragment) not in parts:
        raise _wrong(signed, "a snapshot whose parts don't fit together")


def _wrong(signed: Signed, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"not proven: {why}", peer=signed.signer)


def is_of_proof(entry: Entry) -> bool:
    return isinstance(entry, Found | Open | RosterChange | Reform)
