"""What a syncer decides in its term: which rounds are open, when each closes, what is committed, when the run is over.

An object is one term's service and is thrown away with it. Its ledger runs ahead of the durable one, up to the newest
entry of the term; what may be sealed is the election's word (`gate`).

Every event is followed by `advance`, which looks at everything once: open what is due, close what may close, measure,
wind up, seal the next entry. Merging and sealing are asked for and answered by events, so rounds of other fragments
go on meanwhile; entries are sealed one at a time, because each names the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from geo_diloco.manifest import WIRE_VERSION, BootId, FragmentId, MonoMs, PeerId, RunId, RunRules, Seq, Term, Version
from geo_diloco.protocol.crediting import Crediting
from geo_diloco.protocol.effects import (
    CloseConnection,
    Effect,
    Evaluate,
    Merge,
    Note,
    Send,
)
from geo_diloco.protocol.election.ballots import Refuse, Roster, SignedVote
from geo_diloco.protocol.events import (
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
from geo_diloco.protocol.holdings import Held, Holdings
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.measuring import Measuring
from geo_diloco.protocol.membership import Membership, moving_average
from geo_diloco.protocol.messages import (
    Commit,
    Contribution,
    Durable,
    Entry,
    EntryHeader,
    Finished,
    Found,
    Goodbye,
    Hello,
    Message,
    Open,
    Progress,
    Record,
    RosterChange,
    RoundOpen,
    Sampled,
    Welcome,
)
from geo_diloco.protocol.quorum import decide
from geo_diloco.protocol.rounds import (
    Estimates,
    Round,
    close_round,
    commit_of,
    merge_inputs,
    merged_or_merging,
    participants_of,
    round_facts,
)
from geo_diloco.protocol.schedule import MICRO, InnerClock, first_dues
from geo_diloco.protocol.sealing import Make, Sealing, always
from geo_diloco.protocol.status import LearnerStatus, RoundStatus, Waiting
from geo_diloco.protocol.winding import StopRule

MERGE_RETRY_MS = 1000
ROUNDS_REMEMBERED = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Office:
    """Whose term it is."""

    peer: PeerId
    boot: BootId
    run: RunId
    term: Term
    address: str
    gate: Callable[[bool], str | None]
    """Why no entry may be appended now (given True: no roster change); none if one may, and then it will be."""


class Syncer:
    """The syncer's part of a peer, for one term."""

    def __init__(self, office: Office, rules: RunRules, ledger: Ledger) -> None:
        self._office, self._rules = office, rules
        self._sync = rules.sync
        self._ledger = ledger
        self._membership = Membership(rules.sync, rules.num_shares)
        self._clock = InnerClock()
        self._estimates = Estimates()
        self._rounds: dict[FragmentId, Round] = {}
        self._holdings = Holdings(ledger, rules.sync)
        self._next_due: list[int] = []
        self._round_number = 0
        self._remembered: deque[RoundStatus] = deque(maxlen=ROUNDS_REMEMBERED)
        self._sealing = Sealing(office.run, office.term, ledger)
        self._serving = False
        self._opened_seq = Seq(2**62)
        self._durable: Durable | None = None
        self._lonely_since: MonoMs | None = None
        self._crediting = Crediting(rules, ledger, self._membership)
        self._draining = False
        self._stop = StopRule(rules)
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
                return self._merge_failed(event, now)
            case Evaluated():
                return self._evaluated(event)
            case _:
                raise AssertionError(f"unrouted event {event!r}")

    def found(self, event: FoundRun, roster: Roster) -> None:
        """Draft the first entry of the run."""

        def make(header: EntryHeader) -> Entry:
            return Found(
                header=header,
                boot=self._office.boot,
                state_digests=event.state_digests,
                momentum_digests=event.momentum_digests,
                layout_digest=event.layout_digest,
                num_elements=event.num_elements,
                roster=roster,
            )

        self._sealing.draft(make, always)

    def open(self, votes: tuple[SignedVote, ...]) -> None:
        """Draft the first entry of the term."""
        office = self._office

        def make(header: EntryHeader) -> Entry:
            return Open(header=header, syncer=office.peer, boot=office.boot, address=office.address, votes=votes)

        self._sealing.draft(make, always)

    def change_roster(self, roster: Roster) -> None:
        """Not sealed at once it is out of date: the election asks again."""

        def make(header: EntryHeader) -> Entry:
            return RosterChange(header=header, roster=roster)

        if self._ledger.finished is None:
            self._sealing.draft(make, lambda: self._office.gate(True), now_or_never=True)

    def begin(self, now: MonoMs, *, away_ms: int) -> None:
        """The term is open and durable, and all that came before is in the outer state: rounds may be opened, unless
        the run is finished. Then this term only tells so, to whoever did not hear of it."""
        self._serving = True
        self._clock = InnerClock(at=now)
        self._measuring.begin(now)
        self._crediting.begin(away_ms=away_ms)
        self._holdings.begin()
        versions = [head.version for head in self._ledger.heads]
        self._next_due = [steps * MICRO for steps in first_dues(versions, self._sync)]

    def end(self, reason: str) -> list[Effect]:
        """The term is over: nobody waits here any more for what was announced, and learners look elsewhere."""
        goodbye = [self._refuse(member.peer, "not_serving", reason) for member in self._membership.connected()]
        return [*self._holdings.let_go_of_all(), *goodbye]

    def is_lonely(self, now: MonoMs) -> bool:
        """Too few learners are heard of here, though enough have been and none of those said Goodbye: they may train on
        where somebody else is reached."""
        patience_ms = 2 * round(self._rules.election.lease_seconds * 1000)
        live = len(self._membership.live(now))
        if not self._serving or live >= self._sync.quorum or live == self._membership.num_known_learners():
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
        merging = any(round_.closing is not None for round_ in self._rounds.values())
        return not merging and self._sealing.idle()

    def advance(self, now: MonoMs) -> list[Effect]:
        """Look at everything once; called after every event."""
        effects: list[Effect] = []
        if self._serving and self._ledger.finished is None:
            for peer in self._membership.forget_away(now):
                effects += self._holdings.left(peer)
            live = self._membership.live(now)
            self._clock.advance(now, [member.step_time_us for member in live if member.step_time_us > 0])
            if any(member.step_time_us > 0 for member in live):
                self._stop.begin(self._ledger, now)
            self._stop.look(self._ledger, now)
            if not self._draining:
                effects += self._open_due(now) + self._close_due(now) + self._evaluate(now) + self._wind_up()
        self.deadline = self._next_deadline(now)
        return effects

    def next_seal(self) -> list[Effect]:
        """What to seal next, if nothing is being sealed."""
        return self._sealing.next()

    def _next_deadline(self, now: MonoMs) -> MonoMs | None:
        if not self._serving or self._ledger.finished is not None or self._draining:
            return None
        waits: list[int | None] = [self._measuring.deadline, self._membership.away_until(), self._stop.deadline]
        for round_ in self._rounds.values():
            waits += [round_.retry_at, round_.look_at]
        for fragment, due in enumerate(self._next_due):
            if fragment not in self._rounds and len(self._rounds) < self._sync.rounds_in_flight_max:
                wait = self._clock.ms_until(due)
                waits.append(None if wait is None else now + max(1, wait))
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
                round_ = self._rounds.get(message.fragment)
                if round_ is not None and round_.number == message.round:
                    round_.sampled.add(sender)
            case Contribution():
                if not member.trains:
                    return [self._refuse(sender, "unexpected", "said in Hello that it does not train")]
                return self._holdings.announced(sender, message, self._being_merged)
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
        effects = self._holdings.drop_forgotten(sender, hello.undecided, self._being_merged)
        merged_until = merged_or_merging(self._ledger, sender, self._rounds)
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
            open_rounds = [self._rounds[p] for p in sorted(self._rounds) if self._rounds[p].closing is None]
            effects += [self._send(sender, self._round_open(round_)) for round_ in open_rounds]
        return effects

    # -- contributions --------------------------------------------------------------------------------------------

    def _checked(self, event: ContributionChecked, now: MonoMs) -> list[Effect]:
        item, effects = self._holdings.checked(event)
        round_ = self._rounds.get(event.id.fragment)
        if item is not None and round_ is not None and round_.is_fresh(item):
            self._membership.delivered(event.id.peer, now - round_.opened_at)
        return effects

    def _being_merged(self, item: Held) -> bool:
        round_ = self._rounds.get(item.contribution.id.fragment)
        return round_ is not None and round_.closing is not None and item in round_.closing.taken

    # -- rounds ---------------------------------------------------------------------------------------------------

    def _open_due(self, now: MonoMs) -> list[Effect]:
        if self._stop.reason is not None or not (self._sync.lockstep or self._membership.live(now)):
            return []
        due = [
            (self._next_due[p], FragmentId(p))
            for p in range(len(self._next_due))
            if p not in self._rounds and (self._sync.lockstep or self._next_due[p] <= self._clock.micro_steps)
        ]
        room = self._sync.rounds_in_flight_max - len(self._rounds)
        if self._sync.lockstep:
            room = len(due)
        effects: list[Effect] = []
        for _, fragment in sorted(due)[: max(0, room)]:
            effects += self._open_round(fragment, now)
        return effects

    def _open_round(self, fragment: FragmentId, now: MonoMs) -> list[Effect]:
        head = self._ledger.heads[fragment]
        self._round_number += 1
        due_again = self._clock.micro_steps + self._sync.interval_steps * MICRO
        self._next_due[fragment] = due_again
        round_ = Round(self._round_number, fragment, head.version, head.base, now, due_again)
        self._rounds[fragment] = round_
        return self._ask(round_)

    def _ask(self, round_: Round) -> list[Effect]:
        message = self._round_open(round_)
        return [self._send(member.peer, message) for member in self._membership.connected() if member.trains]

    def _round_open(self, round_: Round) -> RoundOpen:
        return RoundOpen(
            round=round_.number,
            fragment=round_.fragment,
            attempt=round_.attempt,
            version=round_.version,
            base=round_.base,
            collect_at="",
        )

    def _close_due(self, now: MonoMs) -> list[Effect]:
        live = self._membership.live(now)
        effects: list[Effect] = []
        for fragment in sorted(self._rounds):
            round_ = self._rounds[fragment]
            if round_.closing is not None or (round_.retry_at is not None and now < round_.retry_at):
                continue
            held = self._holdings.of_fragment(fragment)
            facts = round_facts(
                round_,
                held,
                live,
                now=now,
                due_again_ms=self._clock.ms_until(round_.due_again),
                estimates=self._estimates,
                sync=self._sync,
            )
            decision = decide(facts, self._sync)
            round_.reason, round_.look_at = decision.reason, decision.until
            close, reason = decision.close, decision.reason
            if self._stop.reason is not None and facts.fresh >= self._sync.quorum:
                close, reason = True, f"the run ends: {self._stop.reason}"
            if close and self._may_commit_more():
                closing = close_round(round_, held, live, now=now, reason=reason)
                round_.closing = replace(closing, counted=self._crediting.count(closing.taken, fragment, now))
                round_.retry_at = round_.look_at = None
                effects.append(self._merge(round_))
        return effects

    def _may_commit_more(self) -> bool:
        """A run that stops after a number of commits stops at exactly that number."""
        limit = self._rules.stop.commits
        under_way = sum(round_.closing is not None for round_ in self._rounds.values())
        return limit == 0 or self._ledger.num_commits + under_way < limit

    def _merge(self, round_: Round) -> Merge:
        assert round_.closing is not None
        return Merge(
            fragment=round_.fragment,
            round=round_.number,
            attempt=round_.attempt,
            version=Version(round_.version + 1),
            inputs=merge_inputs(round_.closing),
            eta=self._rules.outer.eta,
            mu=self._rules.outer.mu,
        )

    def _merging(self, fragment: FragmentId, number: int, attempt: int) -> Round | None:
        """The round that this answer is for; none if that attempt was given up."""
        round_ = self._rounds.get(fragment)
        if round_ is None or round_.closing is None or (round_.number, round_.attempt) != (number, attempt):
            return None
        return round_

    def _merged(self, event: Merged, now: MonoMs) -> list[Effect]:
        round_ = self._merging(event.fragment, event.round, event.attempt)
        if round_ is not None:
            self._draft(self._commit(round_, event, now))
        return []

    def _commit(self, round_: Round, merged: Merged, now: MonoMs) -> Make:
        def make(header: EntryHeader) -> Entry:
            ledger, more = self._ledger, sum(each.tokens_unmerged for each in participants_of(round_))
            tokens_total = ledger.tokens_total(round_.fragment, more=more)
            progress = self._stop.progress(tokens_total, ledger.num_commits + 1, now)
            return commit_of(
                round_, merged, header, outer=self._rules.outer, tokens_total=tokens_total, progress=progress
            )

        return make

    def _merge_failed(self, event: MergeFailed, now: MonoMs) -> list[Effect]:
        round_ = self._merging(event.fragment, event.round, event.attempt)
        if round_ is None:
            return []
        round_.closing, round_.attempt = None, round_.attempt + 1
        effects: list[Effect] = [Note("merge", f"fragment {event.fragment}: {event.reason}", "warning")]
        held = self._holdings.of_fragment(event.fragment)
        culprit = None if event.culprit is None else held.get(event.culprit)
        if culprit is None:
            round_.retry_at = MonoMs(now + MERGE_RETRY_MS)
            round_.reason = f"the merge failed and is tried again: {event.reason}"
        else:
            effects += self._holdings.refuse(culprit, f"invalid: {event.reason}")
        return effects + self._ask(round_)

    def _committed(self, entry: Commit, now: MonoMs) -> list[Effect]:
        round_ = self._rounds.pop(entry.fragment)
        closing = round_.closing
        assert closing is not None
        self._estimates = Estimates(
            moving_average(self._estimates.quorum_ms, closing.quorum_wait_ms),
            moving_average(self._estimates.sync_ms, now - closing.at),
        )
        self._remembered.append(
            RoundStatus(
                round=round_.number,
                fragment=entry.fragment,
                version=entry.version,
                seq=entry.header.seq,
                participants=len(entry.participants),
                live=closing.live,
                quorum_wait_ms=closing.quorum_wait_ms,
                grace_ms=closing.grace_ms,
                reason=closing.reason,
            )
        )
        effects: list[Effect] = []
        self._crediting.merged(entry.fragment, closing.taken, closing.counted)
        for item in closing.taken:
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
        self._rounds.clear()
        tokens_total = self._ledger.tokens_total()
        self._draft(lambda header: Finished(header=header, reason=reason, tokens_total=tokens_total))
        return []

    # -- for people -----------------------------------------------------------------------------------------------

    def learner_status(self, now: MonoMs) -> tuple[LearnerStatus, ...]:
        return tuple(member.status(self._doing(member.peer, now)) for member in self._membership.all() if member.trains)

    def _doing(self, peer: PeerId, now: MonoMs) -> str:
        member = self._membership[peer]
        if not member.connected:
            return "away"
        if not member.live(now):
            return "silent"
        uploading = [item.contribution.id.fragment for item in self._holdings.of_peer(peer) if not item.arrived]
        return f"training, uploading fragment {uploading[0]}" if uploading else "training"

    def round_status(self) -> tuple[RoundStatus, ...]:
        return tuple(self._remembered)

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
        if round_ is not None:
            return round_.reason
        if not self._membership.live(now):
            return "nobody trains: no learner is heard of"
        wait_ms = self._clock.ms_until(self._next_due[fragment])
        if wait_ms is None:
            return "no learner has told its step time yet"
        if wait_ms == 0 and len(self._rounds) >= self._sync.rounds_in_flight_max:
            return f"due, but {len(self._rounds)} rounds are open"
        return f"due in {wait_ms / 1000:.1f} s"

    def check_invariants(self) -> None:
        for fragment, round_ in self._rounds.items():
            assert round_.version == self._ledger.heads[fragment].version, (fragment, round_.version)
        self._holdings.check_invariants()
