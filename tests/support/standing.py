"""A peer that may serve, spoken to by hand: it has the whole chain, and a seat beside two others who vote for it."""

from __future__ import annotations

from geo_diloco.manifest import ElectionSpec, EvalSpec, MonoMs, PeerId, RunRules, SyncSpec, Term
from geo_diloco.protocol.effects import ApplyUpdate, Effect, Evaluate, KeepEntry, Merge, Seal
from geo_diloco.protocol.election.ballots import (
    Ack,
    Ask,
    Ballot,
    Head,
    Offer,
    PeerBoot,
    Rank,
    Vote,
    VoteRecord,
)
from geo_diloco.protocol.events import Applied, EntryStored, Evaluated, Event, Sealed
from geo_diloco.protocol.peer import Peer
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.sim.fakes import LAYOUT, RUN, fake_digest
from tests.support.chains import BEN, CYD, FOUNDER, FOUNDER_SEAT, SYNC, ChainBuilder, seat
from tests.support.single import BOOT, Single, merged, said

BEN_SEAT = seat(BEN, "ben:1")
CYD_SEAT = seat(CYD, "cyd:1")
LEASE_MS = 15_000
PROMISE_MS = 15_300


def seated_chain() -> ChainBuilder:
    """Opened by the founder, with a roster of three."""
    chain = ChainBuilder.opened()
    chain.change_roster(FOUNDER_SEAT, BEN_SEAT, CYD_SEAT)
    return chain


class Standing(Single):
    """BEN, whose disk holds all of `chain`; up to the roster it knows to be durable."""

    def __init__(self, chain: ChainBuilder, sync: SyncSpec = SYNC, *, durable_seq: int = 2) -> None:
        rules = RunRules(
            sync=sync,
            evaluation=EvalSpec(every_seconds=0),
            num_shares=4,
            founder=FOUNDER,
            election=ElectionSpec(lease_seconds=LEASE_MS / 1000, electors=3),
        )
        head = chain.events[-1]
        rank = Rank(0, head.entry.header.term, head.entry.header.seq)
        record = VoteRecord(
            branch=chain.ledger().branch,
            lineage=0,
            term=head.entry.header.term,
            voted_for=None,
            held=rank,
            enrolment=BEN_SEAT.enrolment,
        )
        self.core = Peer(
            peer=BEN,
            boot=BOOT,
            role="follower",
            rules=rules,
            run=RUN,
            layout_digest=LAYOUT,
            hello=HelloFacts(address=BEN_SEAT.address),
            seat=Seat(may_serve=True, may_elect=True, record=record, machine=BEN_SEAT.host),
        )
        self.load(chain.fork(durable_seq).snapshot(whole_chain=True), chain.events)

    def answer(self, effect: Effect) -> Event | None:
        match effect:
            case Seal():
                return sealed(effect)
            case KeepEntry():
                return EntryStored(effect.digest)
            case ApplyUpdate():
                return Applied(effect.fragment, effect.version, effect.state_digest)
            case Evaluate():
                return Evaluated(effect.seq, None)
            case Merge():
                return merged(effect)
        return None

    @property
    def head(self) -> Head:
        return self.core.election.head

    def tell(self, ballot: Ballot, sender: PeerId = CYD, **fence: object) -> list[Effect]:
        """A ballot, in this peer's own term."""
        fence = {"term": self.core.election.record.term, **fence}
        return self.hear(ballot, sender, **fence)

    def offer(self, sender: PeerId = CYD) -> list[Effect]:
        """An elector that holds what this peer holds."""
        its = seat(sender)
        best = self.core.election.best
        offer = Offer(
            held=best.rank, can_serve=best, enrolment=its.enrolment, host=its.host, address=f"{sender[:8]}:1", free=True
        )
        return self.tell(offer, sender)

    def ask(self) -> list[Effect]:
        """Free since its start, with CYD's offer: it asks for votes. Time passes."""
        self.pass_time(PROMISE_MS)
        self.offer()
        effects = self.pass_time(1_000)
        assert said(effects, Ask)
        return effects

    def vote(self, sender: PeerId = CYD) -> list[Effect]:
        best = self.core.election.best
        vote = Vote(candidate=PeerBoot(BEN, BOOT), head=best.digest, enrolment=seat(sender).enrolment)
        return self.tell(vote, sender, evidence="signed")

    def ack(self, sender: PeerId = CYD, head: Head | None = None, address: str = "cyd:1") -> list[Effect]:
        """Everything up to the newest entry is on that elector's disk."""
        its = seat(sender)
        ack = Ack(
            acked=head or self.head,
            sent_at=MonoMs(self.now),
            enrolment=its.enrolment,
            host=its.host,
            address=address,
        )
        return self.tell(ack, sender)

    def elected(self) -> list[Effect]:
        """Votes, and acks of `open` by a majority: all of it is durable."""
        self.ask()
        return self.vote() + self.ack()

    def keep_lease(self, ms: int, step_ms: int = 1_000) -> list[Effect]:
        """Time passes, and CYD acks everything."""
        effects: list[Effect] = []
        for _ in range(ms // step_ms):
            effects += self.pass_time(step_ms) + self.ack()
        return effects


def sealed(seal: Seal) -> Sealed:
    header = seal.entry.header
    return Sealed(Term(header.term), header.seq, fake_digest(seal.entry))
