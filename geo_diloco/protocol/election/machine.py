"""Who may append to the chain? One state machine per peer, without I/O: `handle(event, now) -> effects`, one deadline.

It routes and fences: a higher term ends what an older one allowed, a lower one is refused, another branch is met by
showing it ours. The parts decide: `elector.py` (promise, vote, ack, offer), `candidacy.py` (when to ask),
`service.py` (lease, durable head, roster), `tenure.py` (what begins and ends a service), over `books.py` (record on
disk, outbox) and `forks.py` (the entries).
Raft's safety argument, on a topology where electors only dial out. Every decision has its reason, told by `status`.
"""

from __future__ import annotations

from geo_diloco.manifest import BranchId, Digest, MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.election.ballots import (
    Ack,
    Append,
    Ask,
    EntryFacts,
    Head,
    Need,
    Offer,
    Opened,
    PeerBoot,
    Refuse,
    Release,
    Roster,
    Serving,
    Use,
    Vote,
    VoteRecord,
)
from geo_diloco.protocol.election.books import Books, Deadline, ElectionRules, Myself
from geo_diloco.protocol.election.candidacy import Candidacy
from geo_diloco.protocol.election.elector import ElectorDuty
from geo_diloco.protocol.election.polls import (
    ChainMoved,
    EntriesArrived,
    EntrySealed,
    FoundingAsked,
    Heard,
    PollEffect,
    PollEvent,
    Started,
    TakeEntries,
)
from geo_diloco.protocol.election.status import ElectionRole, ElectionStatus
from geo_diloco.protocol.election.tenure import Tenure
from geo_diloco.protocol.events import EntryLost, EntryStored, HandoverAsked, Sighted, Tick, VotePersisted

LEAP_MAX = 1 << 20
"""Terms by which a ballot may be ahead of us: who missed more than that hears of them by entries. Terms are bounded on
the wire, and whoever could raise ours to the highest at once would end all elections for ever."""


class Election:
    """The election of one process. The first event is `Started`."""

    def __init__(self, me: Myself, rules: ElectionRules, record: VoteRecord | None, *, jitter: int) -> None:
        self._books = Books(me, rules, record, jitter)
        self._elector = ElectorDuty(self._books)
        self._candidacy = Candidacy(self._books)
        self._tenure = Tenure(self._books, self._elector, self._candidacy)
        self.deadline: MonoMs | None = None

    # -- what others in this process ask --------------------------------------------------------------------------

    @property
    def role(self) -> ElectionRole:
        if self._tenure.service is not None:
            return "syncer"
        return "candidate" if self._candidacy.asking is not None else "peer"

    @property
    def record(self) -> VoteRecord:
        return self._books.record

    @property
    def head(self) -> Head:
        """Of the chain that counts: what follows it is appended here."""
        return self._books.forks.head

    @property
    def best(self) -> Head:
        """The highest entry that is whole on disk."""
        return self._books.forks.best

    @property
    def roster(self) -> Roster:
        return self._books.forks.roster

    @property
    def is_elector(self) -> bool:
        """Whether the chain that counts gives this disk a vote."""
        return self._books.seated()

    @property
    def branch(self) -> BranchId:
        return self._books.forks.branch

    @property
    def opened(self) -> Opened | None:
        """Who serves the newest term that counts, as its `open` proves."""
        forks = self._books.forks
        return forks.opened(forks.branch, forks.head.rank.term)

    def knows(self, digest: Digest) -> bool:
        """Whether that entry is one of those taken in, on whichever chain."""
        return self._books.forks.knows(digest)

    def digest_at(self, seq: Seq) -> Digest | None:
        """Of the entry there on the chain that counts; none if that is not known."""
        return self._books.forks.digest_at(seq)

    def unfounded(self) -> None:
        """The newest snapshot on this disk is of a branch that was left: nothing is acked until there is one of this,
        or who is killed meanwhile could not go on with what it acked."""
        self._books.forks.unfounded()
        self._books.note_held()
        self._candidacy.look_frozen()

    def head_at(self, seq: Seq) -> Head | None:
        """The same with its rank."""
        return self._books.forks.head_at(seq)

    def based_on(self, digest: Digest) -> None:
        """A snapshot as of that entry is on this disk: no update up to it is needed any more."""
        self._books.forks.based_on(digest)
        self._books.note_held()

    @property
    def handing_over(self) -> bool:
        return self._tenure.service is not None and self._tenure.service.handing_over

    def has_successor(self, now: MonoMs) -> bool:
        """Whether somebody who could serve listens."""
        return self._tenure.service is not None and self._tenure.service.has_successor(now)

    def can_hand_over(self, now: MonoMs) -> bool:
        """Whether a hand-over is under way that somebody here could take."""
        return self._tenure.service is not None and self._tenure.service.can_hand_over(now)

    @property
    def durable_seq(self) -> Seq | None:
        """As this syncer knows it."""
        service = self._tenure.service
        return None if service is None or service.durable_seq < 0 else service.durable_seq

    @property
    def durable_heard(self) -> Head | None:
        """As an elector or standby: the highest entry, whole here, that the syncer followed has called durable."""
        return self._elector.durable_heard()

    @property
    def stranded(self) -> str | None:
        """Why this process can't follow the run with the chain it remembers: it needs a snapshot of the branch that
        goes on, and a new start from there with the same record. None if it can."""
        return self._tenure.stranded

    def lease_until(self, now: MonoMs) -> MonoMs | None:
        service = self._tenure.service
        return None if service is None else service.lease_until(now)

    def why_not_append(self, term: Term, now: MonoMs) -> str | None:
        """Why no commit may be appended in that term now; none if one may. For opening rounds and for `status`."""
        service = self._tenure.service
        if service is None or service.term != term:
            return f"not syncer of term {term}"
        return service.why_not_append(now)

    def begin_append(self, term: Term, now: MonoMs, *, roster: bool = False) -> str | None:
        """Asked when an entry is drafted. None: it may be sealed, and EntrySealed will follow, before which no other
        may; else the reason, and it must be dropped."""
        service = self._tenure.service
        if service is None or service.term != term:
            return f"not syncer of term {term}"
        return service.begin_append(now, roster=roster)

    def drop_append(self, term: Term) -> None:
        """The entry that `begin_append` allowed will not be sealed after all: nothing of it is on disk."""
        service = self._tenure.service
        if service is not None and service.term == term:
            service.drop_append()

    def why_not_use(self, use: Use) -> str | None:
        """Rule 26: why that work can't be consumed by the next commit; none if it can."""
        return self._books.forks.why_not_use(use)

    def forget(self, below: Seq) -> tuple[Digest, ...]:
        """Drop entries before `below`, which is durable, from memory, but for their digests. Returns which."""
        return self._books.forks.forget(below)

    # -- the machine ----------------------------------------------------------------------------------------------

    def handle(self, event: PollEvent, now: MonoMs) -> list[PollEffect]:
        self._tenure.lapse(now)
        self._route(event, now)
        self._look(now)
        self.deadline = self._next_deadline(now)
        return self._books.flush()

    def _route(self, event: PollEvent, now: MonoMs) -> None:
        match event:
            case Tick():
                pass
            case Started():
                self._started(event, now)
            case FoundingAsked():
                self._tenure.found()
            case Heard():
                self._heard(event, now)
            case EntriesArrived():
                self._entries_arrived(event, now)
            case EntryStored():
                self._stored(event)
            case EntryLost():
                self._books.forks.lost(event.digest)
                self._candidacy.look_frozen()
            case EntrySealed():
                self._sealed(event.entry, now)
            case VotePersisted():
                self._books.persisted(event.number)
            case Sighted():
                self._elector.sighted(event.sightings, now)
            case HandoverAsked():
                if self._tenure.service is not None:
                    self._tenure.service.hand_over(event, now)

    def _look(self, now: MonoMs) -> None:
        """What time and circumstances make due."""
        self._tenure.release_again(now)
        if self._tenure.service is not None:
            self._tenure.service.advance(now)
            self._tenure.hand_over(now)
            return
        if self._books.me.may_serve and self._elector.bound(now) is None:
            self._candidacy.advance(now, self._elector.better_than(self._books.forks.best.rank))
            self._tenure.look_won(now)
        if self._tenure.service is None:
            self._elector.advance(now)

    def _next_deadline(self, now: MonoMs) -> MonoMs | None:
        if self._tenure.service is not None:
            return self._tenure.service.deadline(now).at
        deadline = self._elector.deadline(now).or_by(self._tenure.deadline().at)
        candidacy = self._candidacy.deadline(now) if self._elector.bound(now) is None else Deadline()
        return deadline.or_by(candidacy.at).at

    # -- start ----------------------------------------------------------------------------------------------------

    def _started(self, event: Started, now: MonoMs) -> None:
        """Rule 7: whatever this peer was before, it is nothing now."""
        books = self._books
        if event.root is not None:
            books.forks.plant(event.root)
        taken = books.forks.take(event.entries)
        if taken.why_not is not None:
            books.note("chain", f"the log is read up to what is not valid: {taken.why_not}", alarm=True)
        for digest in event.stored:
            books.forks.stored(digest)
        self._tenure.learn_terms(now)
        books.note_held()
        self._elector.bind_at_start(now)

    # -- ballots --------------------------------------------------------------------------------------------------

    def _heard(self, heard: Heard, now: MonoMs) -> None:
        if heard.term > self._books.record.term + LEAP_MAX:
            self._books.note("election", f"{heard.sender[:8]} speaks of term {heard.term}, which no run gets to")
            return
        if self._fenced(heard, now):
            return
        sender, ballot = heard.sender, heard.ballot
        speaker = PeerBoot(sender, heard.boot)
        match ballot:
            case Offer():
                self._offered(sender, ballot, now)
            case Need():
                self._elector.need(sender, ballot, now, serving=self.role != "peer")
            case Ask():
                self._asked(speaker, heard.term, ballot, now)
            case Vote():
                self._candidacy.vote(sender, heard.term, ballot, heard.evidence)
                self._tenure.look_won(now)
            case Append():
                self._append(speaker, heard.term, ballot, now)
            case Ack():
                if self._tenure.service is not None:
                    self._tenure.service.ack(sender, ballot, now)
            case Release():
                self._released(speaker, ballot, now)
            case Serving():
                self._elector.hint(ballot.syncer, ballot.term, now)
            case Refuse():
                self._refused(sender, ballot, now)

    def _fenced(self, heard: Heard, now: MonoMs) -> bool:
        """Rule 2 and 28: whether the ballot is of another term or branch and thereby dealt with. Offers and Needs
        speak of bytes, not of terms: they are heard from any."""
        books, ballot = self._books, heard.ballot
        neutral = isinstance(ballot, Offer | Need | Serving | Refuse)
        if heard.branch != books.record.branch and (books.record.branch != "" or isinstance(ballot, Ask)):
            return self._other_branch(heard, now) if not neutral else self._stray(heard)
        if heard.term > books.record.term and books.is_elector(heard.sender) and not isinstance(ballot, Ask):
            self._tenure.raise_term(heard.term, now, f"{heard.sender[:8]} is in a higher one")
        if heard.term < books.record.term and not neutral:
            detail = f"term {heard.term} is over, this is term {books.record.term}"
            books.say(heard.sender, Refuse(reason="term", detail=detail, term=books.record.term))
            return True
        return False

    def _other_branch(self, heard: Heard, now: MonoMs) -> bool:
        """Rule 29: who is of an earlier branch fetches the later one from whoever speaks of it. An elector named by a
        reform hears of it first from the candidate that asks."""
        books, ballot = self._books, heard.ballot
        if isinstance(ballot, Append | Ask) and ballot.head.rank.lineage >= books.record.lineage:
            if books.record.branch == "" and ballot.head.rank.lineage == 0:
                return False
            books.need(heard.sender, books.forks.points(), now)
        else:
            self._refuse_branch(heard)
        return True

    def _stray(self, heard: Heard) -> bool:
        """An Offer from an earlier branch is of use to nobody, but shows whom to tell of ours."""
        books = self._books
        if not isinstance(heard.ballot, Offer) or heard.ballot.held.lineage >= books.record.lineage:
            return False
        self._refuse_branch(heard)
        return True

    def _refuse_branch(self, heard: Heard) -> None:
        books = self._books
        detail = f"branch {heard.branch[:8]}, here {books.record.branch[:8]}"
        books.say(heard.sender, Refuse(reason="branch", detail=detail, term=books.record.term))

    def _offered(self, sender: PeerId, offer: Offer, now: MonoMs) -> None:
        if self._tenure.service is not None:
            self._tenure.service.offer(sender, offer, now)
            return
        follows = self._elector.follows(now)
        if follows is not None:
            self._candidacy.note_offer(sender, offer, now)
            self._books.say(sender, Serving(term=self._books.record.term, syncer=follows.peer))
        elif self._books.me.may_serve:
            self._candidacy.offer(sender, offer, now)

    def _asked(self, candidate: PeerBoot, term: Term, ask: Ask, now: MonoMs) -> None:
        """A vote in a higher term ends what we were. A refusal raises the term only if nothing bound us: whoever asks
        while a majority still follows its syncer must not end that service."""
        books, service = self._books, self._tenure.service
        higher = term > books.record.term and books.is_elector(candidate.peer)
        if service is not None and higher and not service.has_lease(now):
            self._tenure.raise_term(term, now, f"{candidate.peer[:8]} asks")
        elif service is not None:
            detail = f"no vote: I serve term {service.term}"
            books.say(candidate.peer, Refuse(reason="vote", detail=detail, term=books.record.term))
        elif self._elector.ask(candidate, term, ask, now):
            self._candidacy.give_up(f"{candidate.peer[:8]} asks in term {term}")
            self._candidacy.defer(now)
        elif higher and term > books.record.term and self._elector.bound(now) is None:
            self._tenure.raise_term(term, now, f"{candidate.peer[:8]} asks")

    def _append(self, syncer: PeerBoot, term: Term, append: Append, now: MonoMs) -> None:
        """Only from whom a proven `open` names; one who can't show it sends us its chain first."""
        books = self._books
        opened = books.forks.opened(books.record.branch, term)
        if opened is None:
            if books.is_elector(syncer.peer) or books.record.voted_for == syncer:
                self._candidacy.defer(now)
            books.need(syncer.peer, books.forks.points(), now)
        elif PeerBoot(opened.syncer, opened.boot) != syncer:
            books.note("election", f"ALARM: {syncer.peer[:8]} appends in term {term} of another", alarm=True)
            books.say(syncer.peer, Refuse(reason="term", detail="another serves it", term=books.record.term))
        elif self._tenure.service is None and term == books.record.term:
            self._candidacy.stand_down(f"{syncer.peer[:8]} serves term {term}")
            self._elector.append(syncer, append, now)

    def _released(self, syncer: PeerBoot, release: Release, now: MonoMs) -> None:
        if not self._elector.released(syncer, release.to, now):
            return
        if release.to == self._books.me.peer.peer:
            self._candidacy.hurry(now)
        else:
            self._candidacy.defer(now)

    def _refused(self, sender: PeerId, refuse: Refuse, now: MonoMs) -> None:
        if refuse.reason == "branch":
            self._books.need(sender, self._books.forks.points(), now)
        elif self._candidacy.asking is not None:
            self._candidacy.reason = f"{sender[:8]}: {refuse.detail}"

    # -- entries --------------------------------------------------------------------------------------------------

    def _entries_arrived(self, event: EntriesArrived, now: MonoMs) -> None:
        books = self._books
        taken = books.forks.take(event.entries)
        books.note_held()
        if taken.new:
            books.ask_for(TakeEntries(taken.new))
        if taken.fork is not None:
            books.ask_for(ChainMoved(taken.fork, books.forks.head))
            self._tenure.learn_terms(now)
            self._tenure.somebody_serves(taken.new, now)
        if taken.parted is not None:
            self._tenure.part(taken.parted, now)
        if taken.gap:
            books.need(event.sender, books.forks.points(), now)
        elif taken.why_not is not None:
            books.note("chain", f"from {event.sender[:8]}: {taken.why_not}", alarm=taken.why_not.startswith("ALARM"))
        self._candidacy.look_frozen()

    def _stored(self, event: EntryStored) -> None:
        books, whole = self._books, self._books.forks.whole
        books.forks.stored(event.digest)
        books.note_held()
        self._candidacy.look_frozen()
        if self._tenure.service is not None:
            self._tenure.service.look_durable()
        elif books.forks.whole != whole:
            self._elector.ack()

    def _sealed(self, entry: EntryFacts, now: MonoMs) -> None:
        """Ours, on our disk. One sealed for a service that has ended meanwhile does not count: nobody was told."""
        books, service = self._books, self._tenure.service
        founds = entry.kind == "found" and service is None
        if not founds and (service is None or (entry.branch, entry.term) != (books.record.branch, service.term)):
            books.note("chain", f"entry {entry.seq} of term {entry.term} came too late and is dropped")
            return
        taken = books.forks.take((entry,))
        assert taken.why_not is None, taken.why_not
        if taken.fork is not None and taken.fork != entry.seq - 1:
            books.ask_for(ChainMoved(taken.fork, books.forks.head))
        books.forks.stored(entry.digest)
        if service is None:
            self._tenure.founded(entry, now)
        else:
            books.note_held()
            service.sealed(entry, now)

    # -- for people and tests -------------------------------------------------------------------------------------

    def status(self, now: MonoMs) -> ElectionStatus:
        forks, record, service = self._books.forks, self._books.record, self._tenure.service
        bound, follows = self._elector.bound(now), self._elector.follows(now)
        followed = None if follows is None else follows.peer
        return ElectionStatus(
            role=self.role,
            branch=record.branch,
            term=record.term,
            head=forks.head,
            held=record.held,
            durable_seq=self.durable_seq,
            roster=tuple(elector.peer for elector in forks.roster),
            seats=self._candidacy.seats(forks.roster, followed, now) if service is None else service.seats(now),
            standbys=self._candidacy.standbys(now) if service is None else service.standbys(now),
            follows=followed,
            syncer=None if self.opened is None else (self.opened.syncer, self.opened.address),
            seat=self._books.seat,
            best=forks.best,
            offers=self._candidacy.offers(now),
            candidacy=self._candidacy.reason if self._books.me.may_serve else "not admitted as syncer",
            vote=self._elector.vote_reason if bound is None else f"no vote: {bound}",
            append="" if service is None else service.why_not_append(now) or "",
            roster_plan="" if service is None else service.roster_reason,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if this machine contradicts itself."""
        books, service = self._books, self._tenure.service
        books.forks.check_invariants()
        assert service is None or self._candidacy.asking is None
        assert service is None or service.term == books.record.term
        assert books.record.held >= books.forks.best.rank
        entered = books.forks.head.rank.lineage <= books.record.lineage or books.record.branch == ""
        assert entered, "it follows a branch that it has not entered"
