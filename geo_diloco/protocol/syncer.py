"""What a syncer decides in its term: which rounds are open, when each closes, what is committed, when the run is over.

An object is one term's service and is thrown away with it. Its ledger runs ahead of the durable one, up to the newest
entry of the term; what may be sealed is the election's word (`gate`).

Every event is followed by `advance`, which looks at everything once: open what is due, close what may close, measure,
wind up, seal the next entry. Merging and sealing are asked for and answered by events, so rounds of other fragments
go on meanwhile; entries are sealed one at a time, because each names the one before.
"""

from __future__ import annotations

from geo_diloco.manifest import WIRE_VERSION, FragmentId, MonoMs, PeerId, RunRules, Seq, Term
from geo_diloco.protocol.amending import Amending
from geo_diloco.protocol.amendments import stretch_of
from geo_diloco.protocol.crediting import Crediting
from geo_diloco.protocol.effects import CloseConnection, Effect, Evaluate, Note, Send
from geo_diloco.protocol.election.ballots import Refuse, Roster, SignedVote
from geo_diloco.protocol.events import (
    AmendmentAsked,
    BlobArrived,
    ContributionChecked,
    Evaluated,
    Event,
    FoundRun,
    Merged,
    MergeFailed,
    Received,
    Sealed,
)
from geo_diloco.protocol.holdings import Holdings
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.measuring import Measuring
from geo_diloco.protocol.membership import Membership
from geo_diloco.protocol.messages import (
    Amendment,
    Commit,
    Contribution,
    Durable,
    Entry,
    EntryHeader,
    Finished,
    Goodbye,
    Hello,
    Message,
    Open,
    Progress,
    Record,
    RosterChange,
    Sampled,
    Welcome,
)
from geo_diloco.protocol.office import Office
from geo_diloco.protocol.open_rounds import OpenRounds
from geo_diloco.protocol.rounds import Round, commit_of, participants_of
from geo_diloco.protocol.sealing import Make, Sealing, always
from geo_diloco.protocol.status import LearnerStatus, RoundStatus, Waiting
from geo_diloco.protocol.winding import StopRule


class Syncer:
    """The syncer's part of a peer, for one term."""

    def __init__(self, office: Office, rules: RunRules, ledger: Ledger) -> None:
        """`rules`: in force at that ledger."""
        self._office, self._rules = office, rules
        self._sync = rules.sync
        self._ledger = ledger
        self._membership = Membership(rules.num_shares)
        self._holdings = Holdings(ledger, rules.sync)
        self._crediting = Crediting(rules, ledger, self._membership)
        self._rounds = OpenRounds(rules, ledger, self._membership, self._holdings, self._crediting)
        self._sealing = Sealing(office.run, office.term, ledger)
        self._serving = False
        self._opened_seq = Seq(2**62)
        self._durable: Durable | None = None
        self._lonely_since: MonoMs | None = None
        self._draining = False
        self._stop = StopRule(rules, stretch_of(ledger.amended))
        self.amending = Amending(office.run, rules, ledger, self._stop)
        self._measuring = Measuring(rules.evaluation)
        self.deadline: MonoMs | None = None

    # -- start and end ----------------------------------------------------------------------------------------

    @property
    def term(self) -> Term:
        return self._office.term

    @property
    def ledger(self) -> Ledger:
        """Up to the newest entry of this term."""
        return self._ledger

    @property
    def serving(self) -> bool:
        return self._serving

    @property
    def opened_seq(self) -> Seq:
        """Of this term's `open`; before it is sealed, one that is not reached yet."""
        return self._opened_seq

    def handle(self, event: Event, now: MonoMs) -> list[Effect]:
        match event:
            case BlobArrived():
                return self._holdings.arrived(event)
            case ContributionChecked():
                return self._checked(event, now)
            case Merged():
                return self._merged(event, now)
            case MergeFailed():
                return self._rounds.merge_failed(event, now)
            case Evaluated():
                return self._evaluated(event)
            case _:
                raise AssertionError(f"unrouted event {event!r}")

    def found(self, event: FoundRun, roster: Roster) -> None:
        """Draft the first entry of the run."""
        self._sealing.draft(self._office.found(event, roster), always)

    def open(self, votes: tuple[SignedVote, ...]) -> None:
        """Draft the first entry of the term."""
        self._sealing.draft(self._office.open(votes), always)

    def change_roster(self, roster: Roster) -> None:
        """Not sealed at once it is out of date: the election asks again."""

        def make(header: EntryHeader) -> Entry:
            return RosterChange(header=header, roster=roster)

        if self._ledger.finished is None:
            self._sealing.draft(make, lambda: self._office.gate(True), now_or_never=True)

    def amend(self, asked: AmendmentAsked) -> None:
        """Draft an amendment that `amending` has nothing against."""
        self._draft(self.amending.draft(asked))

    def begin(self, now: MonoMs, *, away_ms: int) -> None:
        """The term is open and durable, and all that came before is in the outer state: rounds may be opened, unless
        the run is finished. Then this term only tells so, to whoever did not hear of it."""
        self._serving = True
        self._measuring.begin(now)
        self._crediting.begin(away_ms=away_ms)
        self._holdings.begin()
        self._rounds.begin(now)

    def end(self, reason: str) -> list[Effect]:
        """The term is over: nobody waits here any more for what was announced, and learners look elsewhere."""
        goodbye = [self._refuse(member.peer, "not_serving", reason) for member in self._membership.connected()]
        return [*self._holdings.let_go_of_all(), *goodbye]

    def is_lonely(self, now: MonoMs) -> bool:
        """Too few learners are heard of here, though enough have been and none of those said Goodbye: they may train on
        where somebody else is reached. Nobody trains once the run is finished."""
        patience_ms = 2 * round(self._rules.election.lease_seconds * 1000)
        live = self._membership.num_live(now)
        is_enough = live >= self._sync.quorum or live == self._membership.num_known_learners()
        if not self._serving or self._ledger.finished is not None or is_enough:
            self._lonely_since = None
            return False
        if self._lonely_since is None:
            self._lonely_since = now
        return self._membership.num_known_learners() >= self._sync.quorum and now - self._lonely_since >= patience_ms

    def tell_all(self, durable: Durable) -> list[Effect]:
        self._durable = durable
        return [self._send(member.peer, durable) for member in self._membership.connected()]

    def stop(self) -> None:
        """This process leaves or hands over: nothing new is opened or closed, what is being merged is committed."""
        self._draining = True

    def resume(self) -> None:
        """Nobody took over."""
        self._draining = False

    def idle(self) -> bool:
        """Nothing is being merged, sealed or wound up."""
        return not self._rounds.is_merging() and self._sealing.idle()

    def advance(self, now: MonoMs) -> list[Effect]:
        """Look at everything once; called after every event."""
        effects: list[Effect] = []
        if self._serving and self._ledger.finished is None:
            for peer in self._membership.forget_away(now):
                effects += self._holdings.left(peer)
            self._membership.look_at_silent(now)
            self._rounds.move_clock(now)
            if self._membership.median_us(told=True) is not None:
                self._stop.begin(self._ledger, now)
            self._stop.look(self._ledger, now)
            if not self._draining:
                effects += self._rounds.open_due(now) if self._stop.reason is None else []
                effects += self._rounds.close_due(now, ending=self._stop.reason)
                effects += self._evaluate(now) + self._wind_up()
        self.deadline = self._next_deadline(now)
        return effects

    def next_seal(self) -> list[Effect]:
        """What to seal next, if nothing is being sealed."""
        return self._sealing.next()

    def _next_deadline(self, now: MonoMs) -> MonoMs | None:
        if not self._serving or self._ledger.finished is not None or self._draining:
            return None
        waits: list[int | None] = [self._measuring.deadline, self._membership.away_until(), self._stop.deadline]
        waits += self._rounds.waits(now, is_ending=self._stop.reason is not None)
        known = [wait for wait in waits if wait is not None and wait > now]
        return MonoMs(min(known)) if known else None

    # -- sealing --------------------------------------------------------------------------------------------------

    def _draft(self, make: Make) -> None:
        self._sealing.draft(make, lambda: self._office.gate(False))

    def sealed(self, event: Sealed, now: MonoMs) -> list[Effect]:
        """An entry of this term is on disk, and the election has taken it in."""
        entry = self._sealing.sealed(event)
        if entry is None:
            return [Note("seal", f"entry {event.seq} was not being sealed", "error")]
        if isinstance(entry, Open):
            self._opened_seq = entry.header.seq
        if isinstance(entry, Amendment):
            self._rules = self.amending.sealed(entry)
            self._sync = self._rules.sync
            self._rounds.amend(self._rules)
        return self._committed(entry, now) if isinstance(entry, Commit) else []

    # -- messages -------------------------------------------------------------------------------------------------

    def received(self, event: Received, now: MonoMs) -> list[Effect]:
        message, sender = event.message, event.sender
        if isinstance(message, Hello):
            return self._hello(event, message, now)
        member = self._membership.get(sender)
        if member is None or member.boot != event.boot or not member.connected:
            return [self._refuse(sender, "hello", "say Hello first")]
        match message:
            case Progress():
                self._membership.progress(sender, message, now)
            case Sampled():
                self._rounds.sampled(sender, message, now)
            case Contribution():
                if not member.trains:
                    return [self._refuse(sender, "unexpected", "said in Hello that it does not train")]
                return self._holdings.announced(sender, message)
            case Goodbye():
                self._membership.left(sender, now)
                return self._holdings.left(sender)
            case _:
                return [self._refuse(sender, "unexpected", f"{message.kind} is not for a syncer")]
        return []

    def disconnected(self, peer: PeerId, now: MonoMs) -> list[Effect]:
        self._membership.disconnected(peer, now)
        return []

    def _send(self, to: PeerId, message: Message) -> Send:
        return Send(to, self._ledger.branch, self._ledger.term, message)

    def _refuse(self, to: PeerId, reason: str, detail: str) -> Send:
        return self._send(to, Refuse(reason=reason, detail=detail, term=self._ledger.term))

    def _hello(self, event: Received, hello: Hello, now: MonoMs) -> list[Effect]:
        sender = event.sender
        if not self._serving:
            return [self._refuse(sender, "not_serving", "this term is not open yet")]
        if hello.wire_version != WIRE_VERSION:
            detail = f"wire version {hello.wire_version}, this run speaks {WIRE_VERSION}"
            return [self._refuse(sender, "wire", detail), CloseConnection(sender, detail)]
        if hello.layout_digest != self._ledger.layout_digest:
            detail = f"layout {hello.layout_digest[:12]}, this run has {self._ledger.layout_digest[:12]}"
            return [self._refuse(sender, "layout", detail), CloseConnection(sender, detail)]
        self._crediting.met(sender, now)
        member = self._membership.hello(sender, event.boot, hello, now)
        effects = self._holdings.drop_forgotten(sender, hello.undecided)
        merged_until = self._holdings.merged_or_merging(sender)
        held = [item.contribution.id.last_step for item in self._holdings.of_peer(sender)]
        welcome = Welcome(
            head_seq=self._ledger.seq,
            head_digest=self._ledger.head_digest,
            merged_until=merged_until,
            resume_step=max([*merged_until, *held], default=0),
            allotment=member.allotment,
        )
        effects.append(self._send(sender, welcome))
        if self._durable is not None:
            effects.append(self._send(sender, self._durable))
        if member.trains:
            effects += [self._send(sender, self._rounds.question(round_)) for round_ in self._rounds.asking()]
        return effects

    # -- contributions --------------------------------------------------------------------------------------------

    def _checked(self, event: ContributionChecked, now: MonoMs) -> list[Effect]:
        item, effects = self._holdings.checked(event)
        if item is not None:
            self._membership.delivered(event.id.peer, event.id.fragment, now)
            self._rounds.delivered(event.id.peer)
        return effects

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _merged(self, event: Merged, now: MonoMs) -> list[Effect]:
        round_ = self._rounds.merging(event)
        if round_ is not None:
            self._draft(self._commit(round_, event, now))
        return []

    def _commit(self, round_: Round, merged: Merged, now: MonoMs) -> Make:
        def make(header: EntryHeader) -> Entry:
            ledger, more = self._ledger, sum(each.tokens_unmerged for each in participants_of(round_))
            tokens_total = ledger.tokens_total(round_.fragment, more=more)
            # The first commit of a term may come before anybody's step time, and so before its minutes have begun.
            progress = max(ledger.progress, self._stop.progress(tokens_total, ledger.num_commits + 1, now))
            return commit_of(round_, merged, header, tokens_total=tokens_total, progress=progress)

        return make

    def _committed(self, entry: Commit, now: MonoMs) -> list[Effect]:
        effects: list[Effect] = []
        for item in self._rounds.committed(entry, now).taken:
            self._membership.merged(item.contribution.id.peer, item.contribution.cursor)
            effects += self._holdings.let_go(item)
        return effects + self._holdings.keep_late(entry)

    # -- measuring and winding up -----------------------------------------------------------------------------

    def _evaluate(self, now: MonoMs) -> list[Effect]:
        last = self._stop.reason is not None and self.idle()
        if not self._measuring.due(self._ledger.num_commits, now, last=last):
            return []
        return [Evaluate(self._ledger.seq)]

    def _evaluated(self, event: Evaluated) -> list[Effect]:
        self._measuring.done()
        loss = event.loss
        if loss is not None and self._ledger.finished is None:
            self._draft(lambda header: Record(header=header, measured_seq=event.seq, heldout_loss=loss))
        return []

    def _wind_up(self) -> list[Effect]:
        """The stop rule holds: give up what has no quorum, and when all is quiet and measured, finish."""
        reason = self._stop.reason
        if reason is None or not self.idle() or not self._measuring.up_to_date(self._ledger.num_commits):
            return []
        self._rounds.give_up()
        tokens_total = self._ledger.tokens_total()
        self._draft(lambda header: Finished(header=header, reason=reason, tokens_total=tokens_total))
        return []

    # -- for people -----------------------------------------------------------------------------------------------

    def learner_status(self, now: MonoMs) -> tuple[LearnerStatus, ...]:
        return tuple(
            member.status(self._doing(member.peer, now), now) for member in self._membership.all() if member.trains
        )

    def _doing(self, peer: PeerId, now: MonoMs) -> str:
        member = self._membership[peer]
        if not member.connected:
            return "away"
        if not member.live(now):
            return "silent"
        uploading = self._holdings.uploading(peer)
        return "training" if uploading is None else f"training, uploading fragment {uploading}"

    def round_status(self) -> tuple[RoundStatus, ...]:
        return self._rounds.remembered()

    def waiting(self, now: MonoMs) -> tuple[Waiting, ...]:
        """Every fragment, while the run goes on: nothing stands still without a reason that can be read."""
        if self._ledger.finished is not None:
            return ()
        return tuple(
            Waiting(fragment=FragmentId(p), reason=self._why_waiting(FragmentId(p), now))
            for p in range(len(self._ledger.heads))
        )

    def _why_waiting(self, fragment: FragmentId, now: MonoMs) -> str:
        round_ = self._rounds.get(fragment)
        if round_ is not None and round_.closing is not None:
            return self._sealing.held_up or "merging"
        if self._draining or not self._serving:
            return "leaving" if self._draining else "this term is not open yet"
        if self._stop.reason is not None:
            return f"the run ends: {self._stop.reason}"
        return self._rounds.why_waiting(fragment, now)

    def check_invariants(self) -> None:
        self._rounds.check_invariants()
        self._holdings.check_invariants()
