"""This peer as syncer: from the election's orders to entries on disk, term by term, and how it hands over.

The election says when a term may begin and is over, and what may be sealed; a `Syncer` decides what is in it. Here are
the things between them that outlive a term: the one entry that the disk is writing, and a hand-over that is asked for.
"""

from __future__ import annotations

from typing import TypeAlias

from geo_diloco.manifest import BootId, MonoMs, PeerId, RunId, RunRules
from geo_diloco.protocol.amendments import rules_at
from geo_diloco.protocol.chain import Chain, Outcome
from geo_diloco.protocol.effects import Announce, Effect, Note, Seal, SeekSyncer, Send
from geo_diloco.protocol.election.ballots import Refuse
from geo_diloco.protocol.election.polls import (
    DurableReached,
    SealFound,
    SealOpen,
    SealRoster,
    ServiceBegan,
    ServiceEnded,
)
from geo_diloco.protocol.events import AmendmentAsked, FoundRun, HandoverAsked, Received, Sealed
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Commit, Durable, Entry, Hello
from geo_diloco.protocol.office import Office
from geo_diloco.protocol.syncer import Syncer

Order: TypeAlias = SealFound | SealOpen | SealRoster | ServiceBegan | ServiceEnded | DurableReached
"""What the election tells whoever serves."""


class Serving:
    """The terms of one process. `syncer` is there from the votes (or the founding) to the end of the term."""

    def __init__(self, peer: PeerId, boot: BootId, run: RunId, rules: RunRules, chain: Chain, *, address: str) -> None:
        self._peer, self._boot, self._run, self._rules = peer, boot, run, rules
        self._chain = chain
        self._address = address
        self.syncer: Syncer | None = None
        self.founding: FoundRun | None = None
        self.leaves = False
        """The process ends: a hand-over that nobody takes is not followed by more service."""
        self.being_sealed: Entry | None = None
        self._may_begin = False
        """Our term is durable; service begins when the outer state is there."""
        self._early: dict[PeerId, Received] = {}
        """Who said Hello before the term is open."""
        self._quiet_since: MonoMs | None = None
        """When a commit was last heard of."""
        self._handover: HandoverAsked | None = None
        self._is_handing_over = False
        self._now = MonoMs(0)

    def heard_of(self, entry: Entry, now: MonoMs) -> None:
        if isinstance(entry, Commit):
            self._quiet_since = now

    def quiet_since(self, at: MonoMs) -> None:
        """The newest entry on this disk is that old."""
        self._quiet_since = at

    # -- orders ---------------------------------------------------------------------------------------------------

    def heed(self, order: Order) -> list[Effect]:
        syncer = self.syncer
        match order:
            case SealFound():
                assert self.founding is not None
                self.syncer = self._new_syncer(order, self._chain.ledger.copy())
                self.syncer.found(self.founding, order.roster)
            case SealOpen():
                return self._open(order)
            case SealRoster():
                if syncer is not None and syncer.term == order.term:
                    syncer.change_roster(order.roster)
            case ServiceBegan():
                self._may_begin = syncer is not None and syncer.term == order.term
            case DurableReached():
                return [] if syncer is None else syncer.tell_all(Durable(seq=order.seq, digest=order.digest))
            case ServiceEnded():
                return self._end(order)
        return []

    def _new_syncer(self, order: SealFound | SealOpen, ledger: Ledger) -> Syncer:
        term = order.term
        office = Office(
            peer=self._peer,
            boot=self._boot,
            run=self._run,
            term=term,
            address=self._address,
            gate=lambda roster: self._chain.election.begin_append(term, self._now, roster=roster),
        )
        return Syncer(office, rules_at(self._rules, ledger.amended), ledger)

    def _open(self, order: SealOpen) -> list[Effect]:
        """Elected: the term's own ledger goes up to the head that the votes are for."""
        if self.syncer is None or self.syncer.ledger.head_digest != order.head.digest:
            ledger = self._chain.ledger.copy()
            for entry, digest in self._chain.tail(order.head):
                why_not = ledger.why_not(entry)
                if why_not is not None:
                    return [Note("chain", f"ALARM: can't serve on this chain: {why_not}", "error")]
                ledger.apply(entry, digest)
            self.syncer = self._new_syncer(order, ledger)
        self.syncer.open(order.votes)
        return []

    def _end(self, order: ServiceEnded) -> list[Effect]:
        syncer = self.syncer
        if syncer is None or syncer.term != order.term:
            return []
        self.syncer, self._may_begin = None, False
        self._handover, self._is_handing_over = None, False
        refuse = Refuse(reason="not_serving", detail=order.reason, term=self._chain.term)
        early = [Send(peer, self._chain.branch, self._chain.term, refuse) for peer in sorted(self._early)]
        self._early.clear()
        return [*syncer.end(order.reason), *early, SeekSyncer(None, "")]

    # -- messages -------------------------------------------------------------------------------------------------

    def received(self, syncer: Syncer, event: Received, now: MonoMs) -> list[Effect]:
        """Hello waits for the term to be open. Whoever says it so early is often one of those whose acks open it: a
        refusal would send it away, over whose connection they come."""
        if isinstance(event.message, Hello) and not syncer.serving:
            self._early[event.sender] = event
            return []
        return syncer.received(event, now)

    def disconnected(self, syncer: Syncer, peer: PeerId, now: MonoMs) -> list[Effect]:
        self._early.pop(peer, None)
        return syncer.disconnected(peer, now)

    # -- entries --------------------------------------------------------------------------------------------------

    def sealed(self, event: Sealed, now: MonoMs) -> Outcome:
        """The shell's answer to Seal."""
        entry, self.being_sealed = self.being_sealed, None
        if entry is None or (entry.header.seq, entry.header.term) != (event.seq, event.term):
            return [Note("seal", f"entry {event.seq} was not being sealed", "error")]
        self.heard_of(entry, now)
        reverted = self._chain.made(entry, event.digest) if isinstance(entry, Commit) else []
        if self.syncer is None or self.syncer.term != event.term:
            return [Note("chain", f"entry {event.seq} of term {event.term} came too late and is dropped"), *reverted]
        effects = self.syncer.sealed(event, now)
        return [Announce(event.seq), *effects, *self._chain.sealed(entry, event.digest, self._peer, now)]

    # -- time -----------------------------------------------------------------------------------------------------

    def advance(self, now: MonoMs) -> Outcome:
        """Look at everything once; called after every event."""
        self._now = now
        outcome: Outcome = [] if self.syncer is None else self._hand_over(self.syncer, now)
        if any(isinstance(item, ServiceEnded) for item in outcome) or self.syncer is None:
            return outcome
        syncer = self.syncer
        outcome += self._begin_if_ready(syncer, now)
        outcome += syncer.advance(now)
        outcome += self._resign_if_lonely(syncer, now)
        if self.being_sealed is None:
            sealing = syncer.next_seal()
            self.being_sealed = next((each.entry for each in sealing if isinstance(each, Seal)), None)
            outcome += sealing
        return outcome

    def _begin_if_ready(self, syncer: Syncer, now: MonoMs) -> list[Effect]:
        if not (self._may_begin and self._chain.fold.is_level and self._chain.ledger.seq >= syncer.opened_seq):
            return []
        self._may_begin = False
        quiet_since = now if self._quiet_since is None else self._quiet_since
        syncer.begin(now, away_ms=now - quiet_since)
        early = [self._early[peer] for peer in sorted(self._early)]
        self._early.clear()
        return [effect for hello in early for effect in syncer.received(hello, now)]

    # -- amending -------------------------------------------------------------------------------------------------

    def why_not_amend(self, asked: AmendmentAsked) -> str | None:
        """Why an owner's order can't be followed here and now; none if it can."""
        if self.syncer is None or not self.syncer.serving or self._handover is not None:
            return "this peer is not the syncer now"
        return self.syncer.amending.why_not(asked)

    def amend(self, asked: AmendmentAsked) -> Outcome:
        why_not = self.why_not_amend(asked)
        if why_not is not None or self.syncer is None:
            return [Note("amend", f"amendment {asked.order.number} is refused: {why_not}", "warning")]
        self.syncer.amend(asked)
        return []

    # -- handing over ---------------------------------------------------------------------------------------------

    def hand_over(self, asked: HandoverAsked) -> Outcome:
        """What is being merged is committed first."""
        if self.syncer is None:
            return [Note("handover", "this peer is not syncer", "warning")]
        self._handover = asked
        self.syncer.stop()
        return []

    def _hand_over(self, syncer: Syncer, now: MonoMs) -> Outcome:
        if self._handover is None:
            return []
        if not self._is_handing_over:
            if not syncer.idle() and not self._handover.resign:
                return []
            self._is_handing_over = True
            return self._chain.poll(self._handover, now)
        if not self.leaves and not self._chain.election.handing_over:
            self._handover, self._is_handing_over = None, False
            syncer.resume()
        return []

    def _resign_if_lonely(self, syncer: Syncer, now: MonoMs) -> Outcome:
        if self._handover is not None or not syncer.is_lonely(now) or not self._chain.election.has_successor(now):
            return []
        note = Note("handover", "learners do not get through to this peer any more")
        return [note, *self.hand_over(HandoverAsked(None, resign=True))]

    def is_busy(self, now: MonoMs) -> bool:
        """Whether leaving now would lose something, or a hand-over that is under way."""
        return self.syncer is not None and (not self.syncer.idle() or self._chain.election.can_hand_over(now))
