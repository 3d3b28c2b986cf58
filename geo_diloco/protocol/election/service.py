"""The syncer's side of an election: one term, from the majority of votes to the loss of the lease or the hand-over.

It says when entries may be appended, which are durable and who should be electors; it merges nothing. An object is
one term's service and is thrown away with it, so nothing of a term can leak into the next.
"""

from __future__ import annotations

from collections import deque

from geo_diloco.manifest import MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.election import lease
from geo_diloco.protocol.election.ballots import Ack, Append, Elector, EntryFacts, Offer, Release, Roster
from geo_diloco.protocol.election.books import Books, Deadline
from geo_diloco.protocol.election.lease import Acker
from geo_diloco.protocol.election.polls import DurableReached, SealRoster, ServiceBegan
from geo_diloco.protocol.election.roster import RosterFacts, next_roster
from geo_diloco.protocol.election.status import SeatStatus
from geo_diloco.protocol.election.voting import seconds
from geo_diloco.protocol.events import HandoverAsked

STANDBYS_MAX = 3
ACKERS_MAX = 64
"""Remembered; those off the roster make room first, the longest silent first."""
HANDOVER_LEASES = 2
"""A hand-over that takes longer is given up."""
ROSTER_MS = 1_000
"""How often the roster is looked at."""


class Service:
    """This process as syncer of `term`."""

    def __init__(self, books: Books, term: Term, now: MonoMs) -> None:
        self.term = term
        self.opened_at: Seq | None = None
        self.durable_seq = Seq(-1)
        self.roster_reason = "not looked at yet"
        self._books = books
        self._began_at = now
        self._durable_past: deque[tuple[MonoMs, Seq]] = deque(maxlen=64)
        """The durable head as it was, at each look at the roster."""
        self._ackers: dict[PeerId, Acker] = {}
        self._heartbeat_at = now
        self._roster_at = now
        self._roster_asked = False
        self._sealing = False
        self._handover_until: MonoMs | None = None
        self._handover_to: PeerId | None = None
        self._resigns_at: MonoMs | None = None
        """From when on a hand-over does not wait for anything."""

    # -- what may be appended -------------------------------------------------------------------------------------

    def lease_until(self, now: MonoMs) -> MonoMs | None:
        """Rule 17. None as long as no majority has acked a heartbeat of this term."""
        books = self._books
        if self.opened_at is None:
            return None
        confirmed = lease.confirmed_at(books.forks.roster, self._ackers, books.seat, now)
        return None if confirmed is None else MonoMs(confirmed + books.rules.lease_ms)

    def has_lease(self, now: MonoMs) -> bool:
        until = self.lease_until(now)
        return until is not None and now < until

    def why_not_append(self, now: MonoMs) -> str | None:
        """Why no commit, record or roster may be appended now; none if it may."""
        if self.opened_at is None or self.durable_seq < self.opened_at:
            return f"open of term {self.term} is not durable yet"
        if not self.has_lease(now):
            until = self.lease_until(now)
            since = "" if until is None else f" for {seconds(now - until)}"
            return f"no lease{since}: a majority of {len(self._books.forks.roster)} electors does not answer"
        if self._handover_until is not None:
            return "handing over"
        behind = self._books.forks.head.rank.seq - self.durable_seq
        if behind >= self._books.rules.tail_max:
            return f"electors behind: {behind} entries are not durable"
        return None

    def why_not_roster(self, now: MonoMs) -> str | None:
        """Rule 21."""
        why_not = self.why_not_append(now)
        if why_not is None and self.durable_seq < self._books.forks.roster_seq:
            why_not = "the last roster is not durable yet"
        return why_not

    def begin_append(self, now: MonoMs, *, roster: bool) -> str | None:
        """The gate itself: from here until it is sealed an entry is under way."""
        why_not = self.why_not_roster(now) if roster else self.why_not_append(now)
        if why_not is None and self._sealing:
            why_not = "an entry is being sealed"
        if why_not is None:
            self._sealing = True
        elif roster:
            self._roster_asked = False
        return why_not

    def drop_append(self) -> None:
        self._sealing = self._roster_asked = False

    # -- what electors say ----------------------------------------------------------------------------------------

    def offer(self, sender: PeerId, offer: Offer, now: MonoMs) -> None:
        """An elector (or one who would be) is here: it gets our chain."""
        self._meet(Elector(sender, offer.enrolment, offer.host, offer.address), now)
        self._append_to(sender, now)

    def ack(self, sender: PeerId, ack: Ack, now: MonoMs) -> None:
        if self.opened_at is None:
            return
        acker = self._meet(Elector(sender, ack.enrolment, ack.host, ack.address), now)
        echoed = min(ack.sent_at, now)
        acker.sent_at = MonoMs(max(echoed, -1 if acker.sent_at is None else acker.sent_at))
        if self._counts(ack):
            acker.acked = Seq(max(acker.acked, ack.acked.rank.seq))
            if acker.acked > self._books.forks.whole.rank.seq:
                self._books.need(sender, self._books.forks.points(whole=True), now)
        self.look_durable()

    def _counts(self, ack: Ack) -> bool:
        return self._books.forks.on_chain(ack.acked)

    def _meet(self, elector: Elector, now: MonoMs) -> Acker:
        acker = self._ackers.pop(elector.peer, None)
        if acker is None or acker.elector.enrolment != elector.enrolment:
            acker = Acker(elector, now, now)
        self._ackers[elector.peer] = acker
        acker.elector, acker.heard_at = elector, now
        if len(self._ackers) > ACKERS_MAX:
            others = [peer for peer in self._ackers if not self._books.is_elector(peer)]
            del self._ackers[others[0]]
        return acker

    def look_durable(self) -> None:
        """Rule 15."""
        if self.opened_at is None:
            return
        books, before = self._books, self.durable_seq
        own = books.forks.whole.rank.seq
        acked = lease.acked_by_majority(books.forks.roster, self._ackers, books.seat, own)
        self.durable_seq = lease.durable(acked, self.opened_at, before)
        if self.durable_seq > before:
            head = books.forks.head_at(self.durable_seq)
            assert head is not None, self.durable_seq
            books.ask_for(DurableReached(self.durable_seq, head.digest))
            if before < self.opened_at:
                books.ask_for(ServiceBegan(self.term))

    # -- what we say ----------------------------------------------------------------------------------------------

    def sealed(self, entry: EntryFacts, now: MonoMs) -> None:
        """An entry of ours is on our disk and on our chain."""
        self._sealing = False
        if entry.kind == "open":
            self.opened_at = entry.seq
        elif entry.kind == "roster":
            self._roster_asked = False
        self.look_durable()
        self._heartbeat(now)

    def _heartbeat(self, now: MonoMs) -> None:
        for peer in self.audience(now):
            self._append_to(peer, now)
        self._heartbeat_at = MonoMs(now + self._books.rules.heartbeat_ms)

    def _append_to(self, peer: PeerId, now: MonoMs) -> None:
        if self.opened_at is not None:
            head = self._books.forks.head
            self._books.say(peer, Append(head=head, durable_seq=self.durable_seq, sent_at=now))

    def audience(self, now: MonoMs) -> list[PeerId]:
        """Electors, and a few standbys, longest-lived first."""
        books = self._books
        electors = [elector.peer for elector in books.forks.roster if not books.is_me(elector)]
        heard_from = now - 2 * books.rules.lease_ms
        others = [acker for acker in self._ackers.values() if acker.heard_at >= heard_from]
        others = [acker for acker in others if acker.elector.peer not in electors]
        others.sort(key=lambda acker: (acker.first_heard, acker.elector.peer))
        return electors + [acker.elector.peer for acker in others[:STANDBYS_MAX]]

    # -- time -----------------------------------------------------------------------------------------------------

    def lapsed(self, now: MonoMs) -> str | None:
        """Why the service is over by itself; none if it is not."""
        until = self.lease_until(now)
        since = self._began_at if until is None else max(self._began_at, until)
        if now < since + self._books.rules.lease_ms:
            return None
        return f"no lease for {seconds(now - since)}"

    def advance(self, now: MonoMs) -> None:
        if self.opened_at is None:
            return
        if now >= self._heartbeat_at:
            self._heartbeat(now)
        if now >= self._roster_at:
            self._roster_at = MonoMs(now + ROSTER_MS)
            self._look_at_roster(now)
        if self._handover_until is not None and now >= self._handover_until:
            self._handover_until = None
            self._books.note("handover", "given up: it took too long")

    def deadline(self, now: MonoMs) -> Deadline:
        until = self.lease_until(now)
        since = self._began_at if until is None else max(self._began_at, until)
        deadline = Deadline().or_by(since + self._books.rules.lease_ms).or_by(self._handover_until)
        if self._resigns_at is not None and now < self._resigns_at:
            deadline = deadline.or_by(self._resigns_at)
        return deadline if self.opened_at is None else deadline.or_by(self._heartbeat_at).or_by(self._roster_at)

    # -- roster ---------------------------------------------------------------------------------------------------

    def _look_at_roster(self, now: MonoMs) -> None:
        self._durable_past.append((now, self.durable_seq))
        why_not = "an entry is being sealed" if self._roster_asked else self.why_not_roster(now)
        if why_not is not None:
            self.roster_reason = why_not
            return
        plan = next_roster(self.roster_facts(now))
        self.roster_reason = plan.reason
        if plan.roster is not None:
            self._seal_roster(plan.roster)

    def _seal_roster(self, roster: Roster) -> None:
        self._roster_asked = True
        self._books.ask_for(SealRoster(self.term, roster))

    def roster_facts(self, now: MonoMs) -> RosterFacts:
        books = self._books
        others = [elector for elector in books.forks.roster if not books.is_me(elector)]
        gone = [each for each in others if self._enrolment_now(each) not in (None, each.enrolment)]
        gone += [e for e in books.forks.roster if e.peer == books.seat.peer and not books.is_me(e)]
        quiet = [each for each in others if now - self._heard_at(each) >= books.rules.silent_ms]
        return RosterFacts(
            roster=books.forks.roster,
            syncer=books.seat,
            standbys=self._standbys(now),
            silent=tuple(sorted(quiet, key=self._heard_at)),
            gone=tuple(gone),
            wanted=books.rules.electors_wanted,
            one_machine=books.rules.one_machine,
        )

    def seats(self, now: MonoMs) -> tuple[SeatStatus, ...]:
        """Of the roster, for people."""
        return tuple(self._seat_status(elector, now) for elector in self._books.forks.roster)

    def standbys(self, now: MonoMs) -> tuple[SeatStatus, ...]:
        """Who could take over, for people."""
        able = sorted(self._able(now))
        return tuple(self._seat_status(self._ackers[peer].elector, now) for peer in able)

    def _seat_status(self, elector: Elector, now: MonoMs) -> SeatStatus:
        acker = self._ackers.get(elector.peer)
        if self._books.is_me(elector):
            return SeatStatus(elector=elector, heard_ms=0, here=True)
        if acker is None or acker.elector.enrolment != elector.enrolment:
            return SeatStatus(elector=elector, heard_ms=None, here=False)
        heard_ms = now - acker.heard_at
        return SeatStatus(elector=elector, heard_ms=heard_ms, here=heard_ms < self._books.rules.lease_ms)

    def _enrolment_now(self, elector: Elector) -> str | None:
        acker = self._ackers.get(elector.peer)
        return None if acker is None else acker.elector.enrolment

    def _heard_at(self, elector: Elector) -> MonoMs:
        acker = self._ackers.get(elector.peer)
        return self._began_at if acker is None else acker.heard_at

    def _standbys(self, now: MonoMs) -> tuple[Elector, ...]:
        """Rule 22: an ack from disk, younger than L, that covers what was durable two heartbeats ago (nobody ever
        covers what became durable just now). We ourselves, if we serve without a seat, are one."""
        books = self._books
        fresh = now - books.rules.lease_ms
        past = [seq for at, seq in self._durable_past if at <= now - 2 * books.rules.heartbeat_ms]
        covers = past[-1] if past else self.durable_seq
        able = [
            acker
            for acker in self._ackers.values()
            if acker.sent_at is not None and acker.sent_at > fresh and acker.acked >= covers
        ]
        able.sort(key=lambda acker: (acker.first_heard, acker.elector.peer))
        own = [books.seat] if books.me.may_elect and not books.seated() else []
        return (*own, *(acker.elector for acker in able))

    # -- hand-over ------------------------------------------------------------------------------------------------

    @property
    def handing_over(self) -> bool:
        return self._handover_until is not None

    def has_successor(self, now: MonoMs) -> bool:
        """Whether somebody who could serve listens."""
        return bool(self._able(now))

    def can_hand_over(self, now: MonoMs) -> bool:
        """Whether a hand-over is under way that somebody could take."""
        return self.handing_over and self.has_successor(now)

    def _able(self, now: MonoMs) -> list[PeerId]:
        return [peer for peer, acker in self._ackers.items() if acker.elector.address and self._in_time(acker, now)]

    def hand_over(self, asked: HandoverAsked, now: MonoMs) -> None:
        """Begin one, if there is somebody: commits wait from here until it is done or given up."""
        to, able = asked.to, self._able(now)
        if to not in able if to is not None else not able:
            who = "nobody" if to is None else f"{to[:8]} not"
            self._books.note("handover", f"refused: {who} heard from of late that could serve")
            return
        self._handover_to = to
        self._resigns_at = MonoMs(now + self._books.rules.lease_ms) if asked.resign else None
        self._handover_until = MonoMs(now + HANDOVER_LEASES * self._books.rules.lease_ms)

    def released_to(self, now: MonoMs) -> PeerId | None:
        """Rule 20: whom the run may go to now, if a hand-over is under way and everything is durable and there."""
        head = self._books.forks.head.rank.seq
        if self._handover_until is None or self.opened_at is None or self._sealing:
            return None
        if self._resigns_at is not None and now >= self._resigns_at:
            head = Seq(-1)
        elif self.durable_seq < head:
            return None
        ready = [
            acker.elector.peer
            for acker in self._ackers.values()
            if acker.elector.address and acker.acked >= head and self._in_time(acker, now)
        ]
        if self._handover_to is not None:
            return self._handover_to if self._handover_to in ready else None
        ready.sort(key=lambda peer: (not self._books.is_elector(peer), self._ackers[peer].first_heard, peer))
        return ready[0] if ready else None

    def _in_time(self, acker: Acker, now: MonoMs) -> bool:
        return acker.sent_at is not None and acker.sent_at > now - self._books.rules.lease_ms

    def release(self, to: PeerId, now: MonoMs) -> None:
        """Say so to everybody who heard us; the term is over."""
        for peer in dict.fromkeys([to, *self.audience(now), *self._ackers]):
            if peer != self._books.me.peer.peer:
                self._books.say(peer, Release(to=to))
