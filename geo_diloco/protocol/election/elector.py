"""The elector's side: whom it follows, what it has promised, to whom it offers and hands on its bytes.

Electors may be behind a NAT, so everything begins with a dial of theirs: they offer, the candidate answers.
"""

from __future__ import annotations

from geo_diloco.manifest import MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.effects import SendEntries
from geo_diloco.protocol.election.ballots import Ack, Append, Ask, Head, Need, Offer, PeerBoot, Rank, Refuse, Vote
from geo_diloco.protocol.election.books import Books, Deadline
from geo_diloco.protocol.election.voting import Promise, binds, may_vote, text
from geo_diloco.protocol.events import Sighting

OFFER_MS = 1_000
OFFER_OUTSIDE_MS = 5_000
"""For a peer whose head names it no elector."""
CANDIDATES_MAX = 3
SUPPLY_MS = 4_000
"""An elector whose bytes go to one candidate turns to another when that one has not asked for so long."""
HINT_MS = 5_000
VOTED_MS = 3_000
"""As long as the attempt voted for may last, nobody else is offered the vote."""
QUIET_HEARTBEATS = 2
"""Heartbeats missed before an elector dials its syncer again."""


class ElectorDuty:
    """Promise, votes, acks and offers of this disk."""

    def __init__(self, books: Books) -> None:
        self.promise: Promise | None = None
        self.vote_reason = "not asked yet"
        self._books = books
        self._offer_at = MonoMs(0)
        self._heard: tuple[PeerBoot, MonoMs] | None = None
        """The syncer followed, and its sending time of the newest Append."""
        self._heard_at = MonoMs(0)
        self._durable_seq = Seq(-1)
        """As the syncer followed last told."""
        self._sightings: tuple[Sighting, ...] = ()
        self._hint: tuple[PeerId, MonoMs] | None = None
        """Whom to offer to first, and until when that is worth trying."""
        self._released: tuple[PeerId, Term] | None = None
        """Who serves no more, and the term: others may not know yet."""
        self._voted: tuple[PeerBoot, MonoMs] | None = None
        """For whom, and until when that attempt may last."""
        self._supplying: tuple[PeerId, MonoMs] | None = None

    # -- promise --------------------------------------------------------------------------------------------------

    def bind_at_start(self, now: MonoMs) -> None:
        """Rule 8: we may have promised before; to whom is forgotten."""
        books = self._books
        roster, voted = books.forks.best_roster, books.record.voted_for
        alone = len(roster) == 1 and books.is_me(roster[0])
        own = voted is not None and voted.peer == books.me.peer.peer == books.forks.last_syncer()
        if not (alone and own):
            self.promise = Promise(MonoMs(now + books.rules.promise_ms), None, books.record.term)

    def bound(self, now: MonoMs) -> str | None:
        """Why we are neither free to vote nor a candidate now; none if we are."""
        return binds(self.promise, None, now)

    def follows(self, now: MonoMs) -> PeerBoot | None:
        """The syncer that we have promised to."""
        promise = self.promise
        return promise.holder if promise is not None and now < promise.until else None

    # -- the syncer -----------------------------------------------------------------------------------------------

    def append(self, syncer: PeerBoot, append: Append, now: MonoMs) -> None:
        """Our term's syncer speaks: promise, and say what we have of its chain."""
        books = self._books
        self.promise = Promise(MonoMs(now + books.rules.promise_ms), syncer, books.record.term)
        self._hint = None
        self._heard_at = now
        if self._heard is None or self._heard[0] != syncer or append.sent_at > self._heard[1]:
            self._heard = syncer, append.sent_at
            self._durable_seq = append.durable_seq
        if not books.forks.knows(append.head.digest):
            books.need(syncer.peer, books.forks.points(), now)
        self.ack()

    def ack(self) -> None:
        """What is whole here of the chain, in the term of its syncer; at once, and again when more is stored."""
        books, promise, heard = self._books, self.promise, self._heard
        if heard is None or promise is None or promise.holder != heard[0] or promise.term != books.record.term:
            return
        seat = books.seat
        ack = Ack(
            acked=self.may_ack(),
            sent_at=heard[1],
            enrolment=seat.enrolment,
            host=seat.host,
            address=seat.address,
        )
        books.say(heard[0].peer, ack)

    def may_ack(self) -> Head:
        """Rule 4: the highest entry of our chain with all records and blobs on disk."""
        return self._books.forks.whole

    def durable_heard(self) -> Head | None:
        """The highest entry whole here that our term's syncer called durable; our chain holds its `open`, so it is
        on it."""
        promise, heard, forks = self.promise, self._heard, self._books.forks
        if heard is None or promise is None or (promise.holder, promise.term) != (heard[0], self._books.record.term):
            return None
        return forks.head_at(Seq(min(self._durable_seq, forks.whole.rank.seq)))

    def released(self, syncer: PeerBoot, to: PeerId, now: MonoMs) -> bool:
        """Rule 20: the promise is ours again. False if it was not this syncer's."""
        if self.promise is None or self.promise.holder != syncer:
            return False
        self.promise, self._heard = None, None
        self._released = syncer.peer, self._books.record.term
        self._hint, self._offer_at = (to, MonoMs(now + HINT_MS)), MonoMs(0)
        return True

    # -- candidates -----------------------------------------------------------------------------------------------

    def ask(self, candidate: PeerBoot, term: Term, ask: Ask, now: MonoMs) -> bool:
        """Vote or refuse; true if it was a vote."""
        books = self._books
        rank = self.rank_of(ask)
        if rank is None:
            books.need(candidate.peer, books.forks.points(), now)
            self.vote_reason = f"no vote: {text(ask.head.rank)} is not known here"
            books.say(candidate.peer, Refuse(reason="vote", detail=self.vote_reason, term=books.record.term))
            return False
        verdict = may_vote(books.record, term=term, candidate=candidate, rank=rank, promise=self.promise, now=now)
        self.vote_reason = verdict.reason
        if not verdict.yes:
            books.say(candidate.peer, Refuse(reason="vote", detail=verdict.reason, term=books.record.term))
            return False
        if term > books.record.term:
            books.raise_term(term, candidate)
        else:
            books.vote_for(candidate)
        self._voted = candidate, MonoMs(now + VOTED_MS)
        vote = Vote(candidate=candidate, head=ask.head.digest, enrolment=books.record.enrolment)
        books.say(candidate.peer, vote)
        return True

    def rank_of(self, ask: Ask) -> Rank | None:
        """Of the head that is asked with, by our own tree; none if it is not known here. A candidate could claim
        anything, and be elected on a head that lacks what is durable. In a branch of which we can have no entry, as
        the owner's signature alone brought us there, it is believed: he has named us to go on with."""
        forks = self._books.forks
        blind = forks.head.rank.lineage != self._books.record.lineage
        return ask.head.rank if blind else forks.rank_of(ask.head.digest)

    def need(self, sender: PeerId, need: Need, now: MonoMs, *, serving: bool) -> None:
        """Hand on entries; a candidate gets the blobs too, one candidate at a time. `serving`: or asking for votes."""
        if not serving and self._supplying is not None:
            to, until = self._supplying
            if to != sender and now < until:
                return
        digests = self._books.forks.after(need.points)
        if digests:
            if not serving:
                self._supplying = (sender, MonoMs(now + SUPPLY_MS))
            self._books.ask_for(SendEntries(sender, digests, upload=not serving))

    # -- offers ---------------------------------------------------------------------------------------------------

    def sighted(self, sightings: tuple[Sighting, ...], now: MonoMs) -> None:
        """Candidates to offer to. One of a later branch is asked for it: nobody else may tell a syncer about it."""
        books = self._books
        self._sightings = tuple(each for each in sightings if each.peer != books.me.peer.peer)
        for each in self._sightings:
            if each.rank.lineage > books.record.lineage:
                books.need(each.peer, books.forks.points(), now)

    def better_than(self, rank: Rank) -> Rank | None:
        """Rank of the best other candidate known alive, if it is better."""
        best = max((each.rank for each in self._sightings), default=None)
        return best if best is not None and best > rank else None

    def hint(self, peer: PeerId, term: Term, now: MonoMs) -> None:
        """Somebody says who is syncer: offer there next."""
        over = self._released is not None and (peer, term) == self._released
        if term >= self._books.record.term and peer != self._books.me.peer.peer and not over:
            self._hint = peer, MonoMs(now + HINT_MS)

    def advance(self, now: MonoMs) -> None:
        """Offer, if it is time."""
        if not self._books.me.may_elect or now < self._offers_at(now):
            return
        books, seat = self._books, self._books.seat
        inside = books.seated()
        self._offer_at = MonoMs(now + (OFFER_MS if inside else OFFER_OUTSIDE_MS))
        for peer in self.candidates(now):
            offer = Offer(
                held=books.record.held,
                can_serve=books.forks.best,
                enrolment=seat.enrolment,
                host=seat.host,
                address=seat.address,
                free=self.bound(now) is None and not self._voted_for_other(peer, now),
            )
            books.say(peer, offer)

    def _voted_for_other(self, peer: PeerId, now: MonoMs) -> bool:
        return self._voted is not None and now < self._voted[1] and self._voted[0].peer != peer

    def _offers_at(self, now: MonoMs) -> MonoMs:
        """Bound to a syncer we only offer (to it) when it is quiet; bound since the start we offer as if free, to
        find it."""
        if self.follows(now) is None:
            return self._offer_at
        quiet_at = self._heard_at + QUIET_HEARTBEATS * self._books.rules.heartbeat_ms
        return MonoMs(max(self._offer_at, quiet_at))

    def candidates(self, now: MonoMs) -> list[PeerId]:
        """Rule 9: the best published ones and one at random; the roster's reachable electors if none is published."""
        follows = self.follows(now)
        if follows is not None:
            return [follows.peer]
        books = self._books
        published = sorted(self._sightings, key=lambda each: (-(each.serves or 0), _down(each.rank), each.peer))
        names = [each.peer for each in published]
        names += [elector.peer for elector in books.forks.roster if elector.address]
        names = [peer for peer in dict.fromkeys(names) if peer != books.me.peer.peer]
        chosen = [self._hint[0]] if self._hint is not None and now < self._hint[1] else []
        chosen = [peer for peer in chosen if peer != books.me.peer.peer]
        chosen += [peer for peer in names if peer not in chosen][: CANDIDATES_MAX - 1 - len(chosen)]
        rest = [peer for peer in names if peer not in chosen]
        if rest:
            chosen.append(rest[books.jitter.below(len(rest))])
        return chosen

    def deadline(self, now: MonoMs) -> Deadline:
        deadline = Deadline(self._offers_at(now)) if self._books.me.may_elect else Deadline()
        return deadline.or_by(self.promise.until if self.promise is not None and now < self.promise.until else None)


def _down(rank: Rank) -> tuple[int, ...]:
    return tuple(-field for field in rank)
