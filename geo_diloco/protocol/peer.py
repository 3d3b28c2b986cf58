"""One peer as one state machine: `handle(event, now) -> effects`, one `deadline`, `check_invariants()`.

It routes: what is of the chain to `chain`, ballots to the election in it, messages to the learner (`session`) or to the
syncer of the term that this peer serves (`serving`). What all roles share is here: fencing by branch and term, leaving,
finishing. No I/O, no clock, no randomness: the same events give the same effects, which
is what `replay` proves.
"""

from __future__ import annotations

import typing
from typing import Literal

from geo_diloco.manifest import BootId, CodecSpec, Digest, FragmentId, MonoMs, PeerId, RunId, RunRules, Seq
from geo_diloco.protocol.amendments import codecs_up, rules_at
from geo_diloco.protocol.chain import Chain, Outcome, SyncerChanged
from geo_diloco.protocol.effects import Effect, Note, ReadyToLeave, RunFinished, Send
from geo_diloco.protocol.election.ballots import Ballot, Refuse
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.election.polls import Heard, SealOpen
from geo_diloco.protocol.events import (
    Adopted,
    AmendmentAsked,
    Applied,
    ApplyFailed,
    BlobArrived,
    ChainLoaded,
    Connected,
    ContributionChecked,
    DeltaEncoded,
    Disconnected,
    EntryArrived,
    EntryLost,
    EntryStored,
    Evaluated,
    Event,
    FoundRun,
    FragmentReplaced,
    HandoverAsked,
    Merged,
    MergeFailed,
    Received,
    Resumed,
    SampleTaken,
    Saved,
    Sealed,
    Sighted,
    SnapshotKept,
    SnapshotLoaded,
    StepDone,
    StopRequested,
    Tick,
    UpdateLost,
    UploadDone,
    UploadFailed,
    UploadSent,
    VotePersisted,
)
from geo_diloco.protocol.fold import Step
from geo_diloco.protocol.learner import Learner
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import ContributionId, Entry, Hello
from geo_diloco.protocol.pruning import SPARE_VERSIONS, Pruning
from geo_diloco.protocol.seat import HelloFacts, Seat, election_of
from geo_diloco.protocol.serving import Order, Serving
from geo_diloco.protocol.session import Session
from geo_diloco.protocol.status import FragmentTokens, PeerStatus
from geo_diloco.protocol.syncer import Syncer

Role = Literal["learner", "follower"]

LEAVE_MS = 1000
"""How long a learner that leaves may still hand in what it sampled, and a syncer may commit what it merged."""
BALLOTS = typing.get_args(Ballot)


class Peer:
    """The core of one process.

    The first event is `FoundRun` (a founder's first start), or `SnapshotLoaded`, the entries after it that lie on this
    disk (with `whole_chain`: from `found` on) and `ChainLoaded`. A learner that resumes is given `Resumed` then.
    """

    def __init__(
        self,
        *,
        peer: PeerId,
        boot: BootId,
        role: Role,
        rules: RunRules,
        run: RunId,
        layout_digest: Digest,
        hello: HelloFacts | None = None,
        seat: Seat | None = None,
    ) -> None:
        self.peer = peer
        self.boot = boot
        self.role: Role = role
        seat, facts = seat or Seat(), hello or HelloFacts()
        election = election_of(peer, boot, rules, seat, facts.address)
        pruning = Pruning(versions_kept=rules.sync.staleness_max + SPARE_VERSIONS, bytes_kept=seat.updates_bytes_kept)
        self._chain = Chain(
            election,
            self._on_folded,
            self._on_rewound,
            pruning,
            entries_kept=seat.entries_kept,
            remembers=None if seat.may_serve else peer,
            gain_max=rules.outer.gain_max,
        )
        self._learner = Learner(peer, rules, self.ledger) if role == "learner" else None
        self._session = Session(facts, layout_digest, self._chain, self._learner)
        self._serving = Serving(peer, boot, run, rules, self._chain, address=facts.address)
        self._rules = rules
        self._leaving_until: MonoMs | None = None
        self._told_finished = False
        self._ready_to_leave = False

    @property
    def ledger(self) -> Ledger:
        """Of what is durable."""
        return self._chain.ledger

    @property
    def election(self) -> Election:
        return self._chain.election

    @property
    def _syncer(self) -> Syncer | None:
        return self._serving.syncer

    @property
    def rules(self) -> RunRules:
        """In force here: as syncer from its newest entry on, else on the durable chain."""
        return rules_at(self._rules, self.ledger.amended) if self._syncer is None else self._syncer.amending.rules

    @property
    def codecs_up(self) -> tuple[CodecSpec, ...]:
        """What a contribution may be encoded with here, what is in force first."""
        ledger = self.ledger if self._syncer is None else self._syncer.ledger
        return codecs_up(self._rules, ledger.amended)

    def codec_for(self, fragment: FragmentId) -> CodecSpec:
        """What a learner encodes its sample of that fragment with."""
        chosen = None if self._learner is None else self._learner.codec_for(fragment)
        return chosen or self.rules.codec_up

    def why_not_amend(self, asked: AmendmentAsked) -> str | None:
        """Why this peer can't append that amendment now, for whoever asks; none if it can."""
        return self._serving.why_not_amend(asked)

    @property
    def serves(self) -> bool:
        """Whether it is syncer, of a term that is durable."""
        return self._syncer is not None and self._syncer.serving

    @property
    def seeks(self) -> bool:
        """Whether it wants a connection to the syncer: it is not syncer itself, and the run goes on."""
        return self._syncer is None and not self._ready_to_leave

    def state_ledger(self) -> Ledger | None:
        """The ledger that the outer state stands at exactly; none while it is between two. A syncer's may not be
        durable yet: a snapshot made of it is handed out when `ledger` has got there. It does not go beyond the end of
        a run: that it is finished is for whoever loads a snapshot to hear from the chain."""
        if self._serving.being_sealed is not None:
            return None
        if self.serves:
            assert self._syncer is not None
            ledger = self._syncer.ledger
        elif self._chain.fold.is_level:
            ledger = self.ledger
        else:
            return None
        return ledger.before_the_end or ledger

    @property
    def deadline(self) -> MonoMs | None:
        """Give `Tick` by then."""
        waits = [self._leaving_until, self._session.deadline, self.election.deadline]
        if self._syncer is not None:
            waits.append(self._syncer.deadline)
        known = [wait for wait in waits if wait is not None]
        return min(known) if known else None

    def handle(self, event: Event, now: MonoMs) -> list[Effect]:
        effects = self._carry_out(self._route(event, now), now)
        effects += self._carry_out(self._serving.advance(now), now)
        return effects + self._session.advance(now) + self._finish() + self._leave(now)

    # -- routing --------------------------------------------------------------------------------------------------

    def _route(self, event: Event, now: MonoMs) -> Outcome:
        chain = self._chain
        match event:
            case FoundRun():
                self._serving.founding = event
                return chain.found(event, now)
            case EntryArrived():
                self._serving.heard_of(event.entry, now)
                if self._learner is not None and not (event.stored or self.election.knows(event.digest)):
                    self._learner.downlink.heard(event.entry, event.digest, now)
                return chain.arrived(event, now)
            case EntryStored():
                if self._learner is not None:
                    self._learner.downlink.came(event.digest, now)
                return chain.stored(event, now)
            case UpdateLost():
                if self._learner is not None:
                    self._learner.downlink.came(event.digest, now, lost=True)
                return chain.update_lost(event)
            case Applied():
                return chain.applied(event)
            case ApplyFailed():
                return chain.apply_failed(event)
            case FragmentReplaced():
                if self._learner is not None:
                    self._learner.fragment_came(event.fragment, event.version, now)
                return chain.replaced(event)
            case Tick() | VotePersisted() | Sighted() | EntryLost():
                return chain.poll(event, now)
            case HandoverAsked():
                return self._serving.hand_over(event)
            case AmendmentAsked():
                return self._serving.amend(event)
            case SnapshotKept():
                return chain.kept(event)
            case SnapshotLoaded():
                return self._snapshot_loaded(event)
            case ChainLoaded():
                self._serving.quiet_since(MonoMs(now - event.away_ms))
                return chain.loaded(now)
            case _:
                return [*self._route_more(event, now)]

    def _route_more(self, event: Event, now: MonoMs) -> Outcome:
        match event:
            case Connected():
                return [*self._session.connected(event.peer, now)] if event.seeking and self._syncer is None else []
            case Disconnected():
                return [*self._on_disconnected(event, now)]
            case Received():
                return self._received(event, now)
            case StopRequested():
                return self._stop_requested(now)
            case Sealed():
                return self._serving.sealed(event, now)
            case BlobArrived() | ContributionChecked() | Merged() | MergeFailed() | Evaluated():
                return [] if self._syncer is None else [*self._syncer.handle(event, now)]
            case _:
                return [] if self._learner is None else [*_learner_event(self._learner, event, now)]

    def _snapshot_loaded(self, event: SnapshotLoaded) -> Outcome:
        if self._chain.began:
            return [Note("chain", "a second snapshot is ignored", "warning")]
        self._chain.load(event)
        if self._learner is not None:
            self._learner.start()
        return []

    def _on_folded(self, entry: Entry) -> None:
        if self._learner is not None:
            self._learner.entry_taken(entry)

    def _on_rewound(self, to: Seq) -> list[Effect]:
        return [] if self._learner is None else self._learner.rewound(to)

    def _carry_out(self, outcome: Outcome, now: MonoMs) -> list[Effect]:
        effects: list[Effect] = []
        for item in outcome:
            if isinstance(item, Step):
                effects += [] if self._learner is None else self._learner.reached(item)
            elif isinstance(item, SyncerChanged):
                effects += [] if item.peer == self.peer else self._session.syncer_changed(item, now)
            elif isinstance(item, Order):
                effects += self._serving.heed(item)
                if isinstance(item, SealOpen):
                    effects += self._session.close("elected")
            else:
                effects.append(item)
        return effects

    # -- connections ----------------------------------------------------------------------------------------------

    def _on_disconnected(self, event: Disconnected, now: MonoMs) -> list[Effect]:
        if self._syncer is not None:
            return self._serving.disconnected(self._syncer, event.peer, now)
        if self._session.syncer == event.peer:
            self._session.disconnected()
        return []

    # -- messages -------------------------------------------------------------------------------------------------

    def _received(self, event: Received, now: MonoMs) -> Outcome:
        if isinstance(event.message, BALLOTS):
            refuses = isinstance(event.message, Refuse) and self._syncer is None
            refused = self._session.refused(event.sender, event.message, now) if refuses else []
            heard = Heard(event.sender, event.branch, event.term, event.boot, event.message, event.evidence)
            return [*refused, *self._chain.poll(heard, now)]
        chain = self._chain
        if chain.began and event.branch != chain.branch:
            return [self._refuse(event.sender, "branch", f"branch {event.branch[:12]}, here {chain.branch[:12]}")]
        if isinstance(event.message, Hello) and self._syncer is None:
            return [self._refuse(event.sender, "not_serving", "this peer is not syncer")]
        if event.term < chain.term:
            return [self._refuse(event.sender, "term", f"term {event.term} is over, this is term {chain.term}")]
        if event.term > chain.term and self._syncer is None:
            return [chain.ask_again()]
        if event.term > chain.term:
            return [self._refuse(event.sender, "not_serving", f"term {event.term} is known there, {chain.term} here")]
        if self._syncer is not None:
            return [*self._serving.received(self._syncer, event, now)]
        return self._session.heard(event)

    def _refuse(self, to: PeerId, reason: str, detail: str) -> Send:
        chain = self._chain
        return Send(to, chain.branch, chain.term, Refuse(reason=reason, detail=detail, term=chain.term))

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> list[Effect]:
        if self._told_finished or self.ledger.finished is None or self._chain.fold.pending():
            return []
        if self._syncer is not None and not self._syncer.idle():
            return []
        self._told_finished = True
        return [RunFinished(self.ledger.finished)]

    def _stop_requested(self, now: MonoMs) -> Outcome:
        """A syncer hands over first, if there is somebody to hand over to."""
        if self._leaving_until is not None or self._ready_to_leave:
            return []
        self._leaving_until, self._serving.leaves = MonoMs(now + LEAVE_MS), True
        return [] if self._syncer is None else self._serving.hand_over(HandoverAsked(None))

    def _leave(self, now: MonoMs) -> list[Effect]:
        """Leave as soon as nothing is in the way, at the latest when time is up."""
        if self._leaving_until is None or self._ready_to_leave:
            return []
        busy = self._learner.handing_in() if self._learner is not None else False
        if (busy or self._serving.is_busy(now)) and now < self._leaving_until:
            return []
        self._ready_to_leave, self._leaving_until = True, None
        return [*self._session.leave(), ReadyToLeave()]

    # -- for people and tests -------------------------------------------------------------------------------------

    def status(self, now: MonoMs) -> PeerStatus:
        ledger = self.ledger
        return PeerStatus(
            role="syncer" if self._syncer is not None else self.role,
            branch=ledger.branch,
            lineage=ledger.lineage,
            term=ledger.term,
            seq=ledger.seq,
            finished=ledger.finished,
            num_commits=ledger.num_commits,
            tokens_total=ledger.tokens_total() if ledger.heads else 0,
            progress=ledger.progress,
            rules=rules_at(self._rules, ledger.amended),
            amended=ledger.amended,
            heldout=tuple(ledger.heldout),
            versions=tuple(head.version for head in ledger.heads),
            learners=() if self._syncer is None else self._syncer.learner_status(now),
            rounds=() if self._syncer is None else self._syncer.round_status(),
            waiting=() if self._syncer is None else self._syncer.waiting(now),
            tokens=self.tokens(),
            uplink="" if self._learner is None else self._learner.uplink(),
            training=None if self._learner is None else self._learner.training_status(),
            election=self.election.status(now),
        )

    def tokens(self) -> tuple[FragmentTokens, ...]:
        """A learner's books, per fragment."""
        return () if self._learner is None else self._learner.fragment_tokens()

    def undecided(self) -> tuple[ContributionId, ...]:
        """A learner's own contributions that are neither merged nor refused, as far as it knows."""
        return () if self._learner is None else self._learner.undecided_ids()

    def check_invariants(self) -> None:
        """Raise AssertionError if this peer's own books contradict themselves."""
        ledger = self.ledger
        assert len(ledger.heads) == len(ledger.tokens) == len(ledger.bases)
        for fragment, head in enumerate(ledger.heads):
            if head.version >= ledger.contained[fragment]:
                assert head.base in ledger.bases[fragment] or head.version == ledger.contained[fragment]
        for account in self._learner.accounts if self._learner is not None else []:
            assert account.unmerged >= account.restored >= 0, account
            assert account.undecided is None or account.undecided.tokens >= 0, account
        self.election.check_invariants()
        if self._syncer is not None:
            self._syncer.check_invariants()


def _learner_event(learner: Learner, event: Event, now: MonoMs) -> list[Effect]:
    match event:
        case Resumed():
            return learner.resumed(event)
        case StepDone():
            return learner.step_done(event, now)
        case SampleTaken():
            return learner.sample_taken(event)
        case DeltaEncoded():
            return learner.delta_encoded(event, now)
        case UploadSent():
            return learner.upload_sent(event)
        case UploadDone():
            return learner.upload_done(event)
        case UploadFailed():
            return learner.upload_failed(event)
        case Adopted():
            return learner.adopted(event)
        case Saved():
            return learner.saved(event)
        case _:
            raise AssertionError(f"unrouted event {event!r}")
