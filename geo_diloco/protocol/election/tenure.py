"""From when to when is this process candidate, syncer or neither? What begins a service, and everything that ends one.

It stands apart because the answer must never depend on which message brought the news: a higher term, a later branch,
a lapsed lease and a hand-over all end here, in one place, and each says why.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import BranchId, MonoMs, PeerId, Term
from geo_diloco.protocol.election.ballots import EntryFacts, Rank, SignedVote
from geo_diloco.protocol.election.books import Books, Deadline
from geo_diloco.protocol.election.candidacy import Candidacy
from geo_diloco.protocol.election.elector import ElectorDuty
from geo_diloco.protocol.election.polls import SealFound, SealOpen, ServiceEnded
from geo_diloco.protocol.election.service import Service

PARTED_MS = 5_000
"""How long we look for the entries between ours and a later reform."""

RELEASE_AGAIN_MS = 500
RELEASES = 4


@dataclass(slots=True)
class _Handed:
    """A hand-over that is done: a Release that is lost would cost a whole promise, so it is said again."""

    service: Service
    to: PeerId
    again_at: MonoMs
    left: int = RELEASES - 1


class Tenure:
    """The service of this process, if it has one."""

    def __init__(self, books: Books, elector: ElectorDuty, candidacy: Candidacy) -> None:
        self.service: Service | None = None
        self.stranded: str | None = None
        self._parted_since: MonoMs | None = None
        """When we first heard of a later reform that does not fit on what we have."""
        self._handed: _Handed | None = None
        self._books = books
        self._elector = elector
        self._candidacy = candidacy

    # -- what ends it ---------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        if self.service is not None:
            self._books.drop_seals()
            self._books.ask_for(ServiceEnded(self.service.term, reason))
            self._books.note("election", f"serves no more: {reason}")
            self.service = None

    def lapse(self, now: MonoMs) -> None:
        """Rule 17: checked before anything else, also after a pause."""
        reason = None if self.service is None else self.service.lapsed(now)
        if reason is not None:
            self.end(reason)
            self._candidacy.stand_down(reason)

    def raise_term(self, term: Term, now: MonoMs, why: str) -> None:
        """Rule 2. A syncer that holds its lease when an elector knows a higher term asks again at once (rule 18)."""
        renews = self.service is not None and self.service.has_lease(now)
        self._books.raise_term(term)
        self.end(f"{why}: term {term}")
        self._candidacy.give_up(f"{why}: term {term}")
        if renews:
            self._candidacy.ask(now)
            self.look_won(now)

    def learn_terms(self, now: MonoMs) -> None:
        """Rule 3: an adopted entry of a higher term raises ours; one of a later branch takes us there."""
        books, head = self._books, self._books.forks.head.rank
        if head.seq < 0:
            return
        if head.lineage > books.record.lineage or (self.stranded and head.lineage == books.record.lineage):
            self.stranded = self._parted_since = None
        if head.lineage > books.record.lineage or books.record.branch == "":
            self._enter(books.forks.branch, head, now)
        elif head.lineage == books.record.lineage and head.term > books.record.term:
            self.end(f"term {head.term} was opened")
            self._candidacy.give_up(f"term {head.term} was opened")
            books.raise_term(head.term)

    def _enter(self, branch: BranchId, head: Rank, now: MonoMs) -> None:
        """Rules 28 and 29. Whoever followed us is free at once, and told where the run goes on."""
        books, record = self._books, self._books.record
        first = record.branch == ""
        opened = books.forks.opened(branch, head.term)
        self._yield(branch, opened.syncer if opened is not None else books.forks.roster[0].peer, now)
        term = Term(max(head.term, record.term)) if first else head.term
        voted_for = record.voted_for if first and term == record.term else None
        books.enter_branch(branch, head.lineage, term)
        if voted_for is not None:
            books.vote_for(voted_for)
        if not first:
            self._elector.promise = None

    def _yield(self, branch: BranchId, to: PeerId, now: MonoMs) -> None:
        if self.service is not None:
            self.service.release(to, now)
        self.end(f"branch {branch[:8]} goes on")
        self._candidacy.give_up("another branch goes on")

    def part(self, reform: EntryFacts, now: MonoMs) -> None:
        """The owner's signature is enough to leave a branch, if what came before can't be had in time."""
        books, branch = self._books, BranchId(reform.digest)
        assert reform.roster
        if self._parted_since is None:
            self._parted_since = now
        # An earlier process of this disk may have been in that branch, and left no snapshot of it.
        entered = books.record.lineage >= reform.lineage
        if now - self._parted_since < PARTED_MS or (entered and self.stranded is not None):
            return
        if not entered:
            self._yield(branch, reform.roster[0].peer, now)
            books.enter_branch(branch, reform.lineage, reform.term)
            self._elector.promise = None
        self.stranded = f"nothing here connects to branch {branch[:8]}, which goes on"
        books.note("chain", self.stranded, alarm=True)

    def somebody_serves(self, new: tuple[EntryFacts, ...], now: MonoMs) -> None:
        """A term as high as ours was opened by another: its syncer will be heard of soon."""
        term = self._books.record.term
        if self.service is None and any(entry.kind == "open" and entry.term >= term for entry in new):
            self._candidacy.give_up(f"term {term} was opened")
            self._candidacy.defer(now)

    def hand_over(self, now: MonoMs) -> None:
        """Rule 20: if one is under way and everything is where it must be."""
        service = self.service
        to = None if service is None else service.released_to(now)
        if service is None or to is None:
            return
        service.release(to, now)
        self._handed = _Handed(service, to, MonoMs(now + RELEASE_AGAIN_MS))
        self.end(f"handed over to {to[:8]}")
        self._elector.hint(to, self._books.record.term, now)
        self._candidacy.defer(now)

    def release_again(self, now: MonoMs) -> None:
        """Until somebody else's term is heard of."""
        handed = self._handed
        if handed is None or now < handed.again_at:
            return
        if handed.left == 0 or self.service is not None or self._books.record.term != handed.service.term:
            self._handed = None
            return
        handed.service.release(handed.to, now)
        handed.left, handed.again_at = handed.left - 1, MonoMs(now + RELEASE_AGAIN_MS)

    def deadline(self) -> Deadline:
        return Deadline(None if self._handed is None else self._handed.again_at)

    # -- what begins it -------------------------------------------------------------------------------------------

    def look_won(self, now: MonoMs) -> None:
        """Rule 14."""
        votes, asking = self._candidacy.won(), self._candidacy.asking
        if votes is None or asking is None:
            return
        books = self._books
        self._candidacy.stand_down(f"serves term {asking.term}")
        self._elector.promise = None
        self.service = Service(books, asking.term, now)
        books.note("election", f"elected in term {asking.term} by {len(votes)} of {len(books.forks.best_roster)}")
        books.ask_for(SealOpen(asking.term, asking.head, votes))

    def found(self) -> None:
        """Rule 24: our vote for ourselves first. In term 1, unless an earlier start died between vote and entry."""
        books = self._books
        if books.forks.head.rank.seq >= 0 or books.record.held.seq >= 0:
            books.note("found", "there was a chain here: the run is not founded again", alarm=True)
            return
        self._elector.promise = None
        term = Term(books.record.term + 1)
        books.raise_term(term, books.me.peer)
        books.ask_for(SealFound(term, (books.seat,)))

    def founded(self, entry: EntryFacts, now: MonoMs) -> None:
        """`found` is on our disk: its term is ours, by our own vote."""
        books, me, term = self._books, self._books.me.peer, entry.term
        books.enter_branch(books.forks.branch, 0, term)
        books.vote_for(me)
        books.note_held()
        own = SignedVote(me.peer, books.record.enrolment, term, me, entry.digest)
        self.service = Service(books, term, now)
        books.ask_for(SealOpen(term, books.forks.head, (own,)))
