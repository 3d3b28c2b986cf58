"""Small chains for unit tests, entry by entry, without a syncer.

The founder serves and is the only elector unless told otherwise; every elector votes for whoever opens a term.
"""

from __future__ import annotations

from typing import Any

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, PeerId, Seq, SyncSpec, Term, Version
from geo_diloco.protocol.amendments import UNSTRETCHED, Changes
from geo_diloco.protocol.election.ballots import Elector, Opened, PeerBoot, Roster, SignedVote
from geo_diloco.protocol.events import EntryArrived, SnapshotLoaded
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import (
    Amendment,
    BlobRef,
    Commit,
    Contribution,
    ContributionId,
    Entry,
    EntryHeader,
    Finished,
    Found,
    Open,
    Participant,
    Record,
    Reform,
    RosterChange,
)
from geo_diloco.sim.fakes import LAYOUT, RUN, fake_digest, fake_peer

FOUNDER = fake_peer("founder")
FOUNDER_BOOT = BootId("b" * 16)
ANN, BEN, CYD = sorted(fake_peer(name) for name in ("ann", "ben", "cyd"))
SYNC = SyncSpec(interval_steps=8, num_fragments=2, overlap_steps=2, staleness_max=2)


def participant(
    peer: PeerId, base: Digest, base_version: int, first_step: int, last_step: int, tokens: int = 100
) -> Participant:
    return Participant(
        peer=peer,
        base=base,
        base_version=Version(base_version),
        first_step=first_step,
        last_step=last_step,
        steps=last_step - first_step,
        tokens=tokens,
        tokens_unmerged=tokens,
        contribution=BlobRef(fake_digest("contribution", peer, base, last_step), 50),
        weight=1.0,
        norm=1.0,
    )


def seat(peer: PeerId, address: str = "") -> Elector:
    """An elector whose disk is called after it."""
    return Elector(peer, f"disk of {peer[:8]}", f"machine of {peer[:8]}", address)


FOUNDER_SEAT = seat(FOUNDER, "founder:1")


class ChainBuilder:
    """Builds entries that follow each other; `events` are as a peer hears of them."""

    def __init__(self, num_elements: tuple[int, ...] = (100, 300)) -> None:
        self.num_elements = num_elements
        self.events: list[EntryArrived] = []
        self.versions = [0] * len(num_elements)
        self.bases: list[Digest] = []
        self.branch = BranchId("")
        self.term = 1
        self.syncer = FOUNDER
        self.roster: Roster = (FOUNDER_SEAT,)

    @classmethod
    def opened(cls, num_elements: tuple[int, ...] = (100, 300)) -> ChainBuilder:
        chain = cls(num_elements)
        chain.found()
        chain.open()
        return chain

    def fork(self, seq: int) -> ChainBuilder:
        """Another chain with the same entries up to `seq`."""
        other = ChainBuilder(self.num_elements)
        for event in self.events[: seq + 1]:
            other.take(event)
        return other

    def take(self, event: EntryArrived) -> None:
        """Go on from there."""
        entry = event.entry
        self.events.append(event)
        self.term = entry.header.term
        match entry:
            case Found():
                self.branch = BranchId(event.digest)
                self.bases = [event.digest for _ in self.num_elements]
            case Reform():
                self.branch, self.roster = BranchId(event.digest), entry.roster
            case Open():
                self.syncer = entry.syncer
            case RosterChange():
                self.roster = entry.roster
            case Commit():
                self.versions[entry.fragment] = entry.version
                self.bases[entry.fragment] = event.digest

    def header(self) -> EntryHeader:
        return EntryHeader(
            run=RUN,
            branch=self.branch,
            term=Term(self.term),
            seq=Seq(len(self.events)),
            prev=self.events[-1].digest if self.events else "",
        )

    def add(self, entry: Entry) -> EntryArrived:
        event = EntryArrived(entry, fake_digest(entry), self.syncer)
        self.take(event)
        return event

    def found(self) -> EntryArrived:
        fragments = range(len(self.num_elements))
        return self.add(
            Found(
                header=self.header(),
                boot=FOUNDER_BOOT,
                state_digests=tuple(fake_digest("theta", p, 0) for p in fragments),
                momentum_digests=tuple(fake_digest("momentum", p, 0) for p in fragments),
                layout_digest=LAYOUT,
                num_elements=self.num_elements,
                roster=self.roster,
            )
        )

    def open(self, term: int = 1, syncer: PeerId = FOUNDER, boot: BootId = FOUNDER_BOOT) -> EntryArrived:
        self.term, self.syncer = term, syncer
        header = self.header()
        votes = tuple(
            SignedVote(each.peer, each.enrolment, header.term, PeerBoot(syncer, boot), Digest(header.prev))
            for each in self.roster
        )
        return self.add(Open(header=header, syncer=syncer, boot=boot, address="", votes=votes))

    def change_roster(self, *roster: Elector) -> EntryArrived:
        return self.add(RosterChange(header=self.header(), roster=roster))

    def commit(self, fragment: int = 0, *participants: Participant) -> EntryArrived:
        return self.add(self.commit_entry(fragment, *participants))

    def commit_entry(self, fragment: int, *participants: Participant) -> Commit:
        version = self.versions[fragment] + 1
        return Commit(
            header=self.header(),
            fragment=FragmentId(fragment),
            version=Version(version),
            round=version,
            attempt=1,
            update=BlobRef(fake_digest("update", fragment, version, self.term), 10),
            state_digest=fake_digest("theta", fragment, version),
            momentum_digest=fake_digest("momentum", fragment, version),
            eta=0.7,
            mu=0.5,
            participants=participants,
            left_out=(),
            quorum_wait_ms=1,
            grace_ms=1,
            close_reason="all who could deliver have",
            rbar=1.0,
            rho=None,
            tokens_total=0,
            progress=min(1.0, len(self.events) / 100),
        )

    def record(self, loss: float = 2.0) -> EntryArrived:
        header = self.header()
        return self.add(Record(header=header, measured_seq=Seq(header.seq - 1), heldout_loss=loss))

    def amendment(self, number: int = 1, owner: PeerId = FOUNDER, **changes: Any) -> EntryArrived:
        """By the founder; progress goes on as if nothing had been done yet."""
        return self.add(
            Amendment(
                header=self.header(),
                owner=owner,
                number=number,
                changes=Changes(**changes),
                stretch=UNSTRETCHED,
                order=f"order {number}",
            )
        )

    def finished(self) -> EntryArrived:
        return self.add(Finished(header=self.header(), reason="enough", tokens_total=0))

    def ledger(self) -> Ledger:
        """One that took it all."""
        ledger = Ledger()
        for event in self.events:
            assert ledger.why_not(event.entry) is None
            ledger.apply(event.entry, event.digest)
        return ledger

    def snapshot(self, *, whole_chain: bool = False) -> SnapshotLoaded:
        """Of the state after all entries so far."""
        ledger = self.ledger()
        assert isinstance(ledger.opened, Opened)
        return SnapshotLoaded(
            branch=ledger.branch,
            term=ledger.term,
            seq=ledger.seq,
            head_digest=ledger.head_digest,
            heads=tuple(ledger.heads),
            num_elements=ledger.num_elements,
            layout_digest=LAYOUT,
            tokens_per_fragment=tuple(ledger.tokens),
            progress=ledger.progress,
            roster=ledger.roster,
            roster_seq=ledger.roster_seq,
            opened=ledger.opened,
            whole_chain=whole_chain,
            amended=ledger.amended,
            lineage=ledger.lineage,
        )


def contribution(
    peer: PeerId = ANN,
    *,
    base: Digest,
    fragment: int = 0,
    base_version: int = 0,
    first_step: int = 0,
    last_step: int = 8,
    steps: int = 8,
    tokens: int = 100,
    tokens_unmerged: int = 100,
    size: int = 50,
    blob: str = "delta",
) -> Contribution:
    return Contribution(
        id=ContributionId(peer, FragmentId(fragment), base, last_step),
        round=1,
        attempt=1,
        base_version=Version(base_version),
        first_step=first_step,
        steps=steps,
        tokens=tokens,
        tokens_unmerged=tokens_unmerged,
        cursor=tokens,
        blob=BlobRef(fake_digest(blob, peer, fragment, last_step), size),
    )
