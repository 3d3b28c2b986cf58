"""A peer that could serve: who offers to it, when it asks for votes, and on which head.

It asks only when that can succeed: fresh offers of a majority of its own roster rank no higher than what it holds
whole. Until then it fetches what is better. While it asks, that head is frozen; anything new ends the attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.manifest import MonoMs, PeerId, Term
from geo_diloco.protocol.election.ballots import (
    Ask,
    Elector,
    Head,
    Offer,
    Rank,
    Roster,
    SignedVote,
    Vote,
    majority,
)
from geo_diloco.protocol.election.books import Books, Deadline
from geo_diloco.protocol.election.status import SeatStatus
from geo_diloco.protocol.election.voting import Verdict, text

OFFER_FRESH_MS = 4_000
ASK_MS = 3_000
ASK_AGAIN_MS = 1_000
DELAY_MS = 1_000
DEFER_MS = 2_000
BACKOFF_MAX = 8
OFFERS_MAX = 64
"""Remembered; those off the roster make room first, oldest first."""
HASTE_MS = 5_000
"""How long a released target asks without delay."""


@dataclass(frozen=True, slots=True)
class _Offered:
    offer: Offer
    at: MonoMs


@dataclass(slots=True)
class Asking:
    """One attempt."""

    term: Term
    head: Head
    until: MonoMs
    again_at: MonoMs
    votes: dict[PeerId, SignedVote] = field(default_factory=dict)


class Candidacy:
    """Offers, the wait before asking, and the attempt itself."""

    def __init__(self, books: Books) -> None:
        self.asking: Asking | None = None
        self.reason = "nothing heard yet"
        self._books = books
        self._offers: dict[PeerId, _Offered] = {}
        self._ask_at: MonoMs | None = None
        self._backoff = 1
        self._hasty_until: MonoMs | None = None
        self._deferred_until = MonoMs(0)

    def note_offer(self, sender: PeerId, offer: Offer, now: MonoMs) -> None:
        """Bound ourselves we remember who is here: if our syncer releases us as well, it counts."""
        self._offers.pop(sender, None)
        self._offers[sender] = _Offered(offer, now)
        if len(self._offers) > OFFERS_MAX:
            others = [peer for peer in self._offers if not self._books.is_elector(peer)]
            del self._offers[others[0]]

    def offers(self, now: MonoMs) -> tuple[tuple[Elector, Rank], ...]:
        """Fresh ones, sorted by peer."""
        return tuple(
            (Elector(peer, each.offer.enrolment, each.offer.host, each.offer.address), each.offer.held)
            for peer, each in sorted(self._offers.items())
            if self._fresh(each, now)
        )

    def seats(self, roster: Roster, follows: PeerId | None, now: MonoMs) -> tuple[SeatStatus, ...]:
        """Of that roster, for people: whom we follow is here, and whoever offers is."""
        found: list[SeatStatus] = []
        for elector in roster:
            known = self._offers.get(elector.peer)
            heard_ms = None if known is None or known.offer.enrolment != elector.enrolment else now - known.at
            if self._books.is_me(elector) or elector.peer == follows:
                heard_ms = 0
            here = heard_ms is not None and heard_ms < OFFER_FRESH_MS
            found.append(SeatStatus(elector=elector, heard_ms=heard_ms, here=here))
        return tuple(found)

    def standbys(self, now: MonoMs) -> tuple[SeatStatus, ...]:
        """Who could serve, for people: ourselves, and whoever offers and can be reached."""
        own = [SeatStatus(elector=self._books.seat, heard_ms=0, here=True)] if self._books.me.may_serve else []
        fresh = [elector for elector, _ in self.offers(now) if elector.address]
        return (*own, *(SeatStatus(elector=e, heard_ms=now - self._offers[e.peer].at, here=True) for e in fresh))

    def offer(self, sender: PeerId, offer: Offer, now: MonoMs) -> None:
        """An elector is here; if its disk goes further than ours, it sends what we need."""
        books = self._books
        self.note_offer(sender, offer, now)
        if self.asking is not None:
            if sender not in self.asking.votes and books.is_elector(sender):
                books.say(sender, Ask(head=self.asking.head))
        elif self._behind(offer):
            books.need(sender, books.forks.points(whole=True), now)

    def _behind(self, offer: Offer) -> bool:
        return offer.held > self._books.forks.best.rank or offer.can_serve.rank > self._books.forks.best.rank

    def defer(self, now: MonoMs) -> None:
        """Our vote went to somebody else, or somebody has just won: let that come to something first."""
        self._ask_at, self._hasty_until = None, None
        self._deferred_until = MonoMs(now + ASK_MS)

    def hurry(self, now: MonoMs) -> None:
        """The syncer released its electors to us."""
        self._hasty_until = MonoMs(now + HASTE_MS)
        self._deferred_until = now

    # -- asking ---------------------------------------------------------------------------------------------------

    def may_ask(self, now: MonoMs) -> Verdict:
        """Rule 11: whether an attempt can succeed."""
        books = self._books
        best, roster = books.forks.best, books.forks.best_roster
        if not roster:
            return Verdict(False, "no chain here yet")
        if best.rank.lineage != books.record.lineage:
            return Verdict(False, "the reform is not whole here yet")
        needed = majority(len(roster))
        if any(books.is_me(elector) for elector in roster) and best.rank < books.record.held:
            return Verdict(False, f"bytes of {text(books.record.held)} are lost here")
        offered, level = self._count(now)
        if offered < needed:
            return Verdict(False, f"{offered} of the {needed} electors needed are here")
        if level < needed:
            return Verdict(False, f"catching up: {offered - level} of {offered} that offer hold more")
        return Verdict(True, f"{level} of {len(roster)} electors hold no more than {text(best.rank)}")

    def _count(self, now: MonoMs) -> tuple[int, int]:
        """Electors of our best chain that offer, and those of them that hold no more than it."""
        offered = level = 0
        best = self._books.forks.best.rank
        for elector in self._books.forks.best_roster:
            known = self._offers.get(elector.peer)
            if self._books.is_me(elector):
                offered, level = offered + 1, level + 1
            elif known is not None and known.offer.enrolment == elector.enrolment and self._fresh(known, now):
                offered += known.offer.free
                level += known.offer.free and known.offer.held <= best
        return offered, level

    def _fresh(self, offered: _Offered, now: MonoMs) -> bool:
        return now - offered.at < OFFER_FRESH_MS

    def advance(self, now: MonoMs, better: Rank | None) -> None:
        """Wait, ask, or give up. `better`: rank of the best other candidate known alive."""
        if self.asking is not None:
            self._go_on(now)
            return
        verdict = self.may_ask(now)
        if verdict.yes and now < self._deferred_until:
            verdict = Verdict(False, "somebody else is being elected")
        self.reason = verdict.reason
        if not verdict.yes:
            self._ask_at = None
            return
        if self._ask_at is None:
            defer = DEFER_MS if better is not None and better > self._books.forks.best.rank else 0
            self._ask_at = MonoMs(now + self._books.jitter.below(DELAY_MS * self._backoff) + defer)
        hasty = self._hasty_until is not None and now < self._hasty_until
        if hasty or now >= self._ask_at:
            self._hasty_until = None
            self.ask(now)

    def ask(self, now: MonoMs) -> None:
        """Begin an attempt in the next term, on what we hold whole. Our own vote obeys the rule for all votes."""
        books = self._books
        self._ask_at = None
        term, head, me = Term(books.record.term + 1), books.forks.best, books.me.peer
        books.raise_term(term, me)
        self.asking = Asking(term, head, MonoMs(now + ASK_MS), MonoMs(now + ASK_AGAIN_MS))
        self.reason = f"asking for term {term}"
        books.note("election", f"asks for term {term} on {text(head.rank)}")
        if any(books.is_me(elector) for elector in books.forks.best_roster) and head.rank >= books.record.held:
            own = SignedVote(me.peer, books.record.enrolment, term, me, head.digest)
            self.asking.votes[me.peer] = own
        self._ask_all()

    def _ask_all(self) -> None:
        assert self.asking is not None
        peers = dict.fromkeys([elector.peer for elector in self._books.forks.best_roster])
        for peer in peers:
            if peer not in self.asking.votes and peer != self._books.me.peer.peer:
                self._books.say(peer, Ask(head=self.asking.head))

    def _go_on(self, now: MonoMs) -> None:
        asking = self.asking
        assert asking is not None
        if now >= asking.until:
            needed = majority(len(self._books.forks.best_roster))
            self.give_up(f"{len(asking.votes)} of {needed} votes in {ASK_MS // 1000} s")
        elif now >= asking.again_at:
            asking.again_at = MonoMs(now + ASK_AGAIN_MS)
            self._ask_all()

    def give_up(self, reason: str) -> None:
        """The attempt is over; the next one waits longer."""
        if self.asking is None:
            return
        self._books.note("election", f"term {self.asking.term} not won: {reason}")
        self.asking = None
        self.reason = f"last attempt: {reason}"
        self._backoff = min(BACKOFF_MAX, 2 * self._backoff)

    def look_frozen(self) -> None:
        """Rule 12: what we hold changed while we asked."""
        if self.asking is not None and self._books.forks.best != self.asking.head:
            self.give_up("the chain changed meanwhile")

    def vote(self, sender: PeerId, term: Term, vote: Vote, evidence: str) -> None:
        """Count a vote, if it is for this attempt and from a seat."""
        asking, books = self.asking, self._books
        if asking is None or term != asking.term or vote.candidate != books.me.peer or vote.head != asking.head.digest:
            return
        if any(e.peer == sender and e.enrolment == vote.enrolment for e in books.forks.best_roster):
            asking.votes[sender] = SignedVote(sender, vote.enrolment, term, vote.candidate, vote.head, evidence)

    def won(self) -> tuple[SignedVote, ...] | None:
        """The votes, if they are of a majority of the frozen head's roster."""
        if self.asking is None or len(self.asking.votes) < majority(len(self._books.forks.best_roster)):
            return None
        return tuple(self.asking.votes[peer] for peer in sorted(self.asking.votes))

    def stand_down(self, reason: str) -> None:
        """Somebody serves, or we do: start afresh later."""
        self.asking, self._ask_at, self._hasty_until = None, None, None
        self._backoff = 1
        self.reason = reason

    def deadline(self, now: MonoMs) -> Deadline:
        if self.asking is not None:
            return Deadline().or_by(self.asking.until).or_by(self.asking.again_at)
        ages_at = [each.at + OFFER_FRESH_MS for each in self._offers.values() if self._fresh(each, now)]
        deferred = self._deferred_until if now < self._deferred_until else None
        return Deadline().or_by(self._ask_at).or_by(deferred).or_by(min(ages_at) if ages_at else None)
