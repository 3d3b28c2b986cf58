"""One core at a time, spoken to by hand: for tests of a single rule."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from geo_diloco.manifest import (
    WIRE_VERSION,
    BootId,
    EvalSpec,
    FragmentId,
    MonoMs,
    OuterSpec,
    PeerId,
    RunRules,
    Seq,
    StopSpec,
    SyncSpec,
    Version,
)
from geo_diloco.protocol.effects import (
    ApplyUpdate,
    Effect,
    Evaluate,
    Merge,
    PersistVote,
    Seal,
    Send,
    TakeSample,
)
from geo_diloco.protocol.election.ballots import PeerBoot, Rank, VoteRecord
from geo_diloco.protocol.events import (
    Adopted,
    Applied,
    BlobArrived,
    ChainLoaded,
    Connected,
    ContributionChecked,
    DeltaEncoded,
    EntryArrived,
    EntryStored,
    Evaluated,
    Event,
    FoundRun,
    Merged,
    Received,
    SampleTaken,
    Sealed,
    SnapshotLoaded,
    StepDone,
    Tick,
    UploadDone,
    VotePersisted,
)
from geo_diloco.protocol.messages import (
    Allotment,
    BlobRef,
    Contribution,
    Durable,
    Hello,
    Message,
    Participant,
    Progress,
    RoundOpen,
    Welcome,
)
from geo_diloco.protocol.peer import Peer
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.sim.fakes import LAYOUT, RUN, fake_digest
from tests.support.chains import ANN, FOUNDER, FOUNDER_BOOT, FOUNDER_SEAT, SYNC, ChainBuilder, participant

T = TypeVar("T")
BOOT = BootId("1" * 16)
P0 = FragmentId(0)
PPM = 1_000_000


def only(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def said(effects: list[Effect], kind: type[T], to: PeerId | None = None) -> list[T]:
    """Messages of a kind among the effects."""
    sends = [effect for effect in only(effects, Send) if to is None or effect.to == to]
    return [send.message for send in sends if isinstance(send.message, kind)]


def hello(**changes: object) -> Hello:
    plain = Hello(
        wire_version=WIRE_VERSION,
        layout_digest=LAYOUT,
        trains=True,
        host="machine",
        software="",
        address="",
        step=0,
        tokens=0,
        head_seq=Seq(0),
        undecided=(),
        proof="",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


class Single:
    """A core and a shell that has a vote on disk at once, and carries out at once whatever `answer` knows."""

    core: Peer
    now = 0
    slow: frozenset[type] = frozenset()
    """Effects of these kinds are not answered."""

    def give(self, event: Event) -> list[Effect]:
        """All effects, in order, but for votes to persist."""
        effects: list[Effect] = []
        for effect in self.core.handle(event, MonoMs(self.now)):
            if isinstance(effect, PersistVote) and PersistVote not in self.slow:
                effects += self.give(VotePersisted(effect.number))
                continue
            effects.append(effect)
            answer = None if type(effect) in self.slow else self.answer(effect)
            if answer is not None:
                effects += self.give(answer)
        self.core.check_invariants()
        return effects

    def answer(self, effect: Effect) -> Event | None:
        return None

    def pass_time(self, ms: int) -> list[Effect]:
        self.now += ms
        return self.give(Tick())

    def hear(self, message: Message, sender: PeerId, boot: BootId = BOOT, **fence: object) -> list[Effect]:
        """In the branch and term of this core's chain, unless `fence` says otherwise."""
        election = self.core.election
        event = Received(sender, election.branch, election.head.rank.term, boot, message)
        return self.give(replace(event, **fence))  # type: ignore[arg-type]

    def load(self, snapshot: SnapshotLoaded, events: list[EntryArrived], away_ms: int = 0) -> list[Effect]:
        """What the disk of a process that starts has: the snapshot, then these entries, all stored."""
        effects = self.give(snapshot)
        for event in events:
            effects += self.give(replace(event, stored=True))
        return effects + self.give(ChainLoaded(away_ms))

    # -- to one who serves ----------------------------------------------------------------------------------------

    def join(self, peer: PeerId = ANN, step_time_us: int = 100_000) -> list[Effect]:
        effects = self.hear(hello(), peer)
        return effects + self.hear(progress(1, step_time_us), peer)

    def asked(self, fragment: int = 1) -> RoundOpen:
        """The first question for a fragment; fragment 1 of two is due after half an interval."""
        for _ in range(100):
            asked = [each for each in said(self.pass_time(100), RoundOpen) if each.fragment == fragment]
            self.hear(progress(self.now // 100), ANN)
            if asked:
                return asked[0]
        raise AssertionError("no round was opened")

    def hand_in(self, claim: Contribution) -> list[Effect]:
        """Announced, arrived and valid."""
        sender = claim.id.peer
        effects = self.hear(claim, sender)
        effects += self.give(BlobArrived(claim.blob))
        return effects + self.give(ContributionChecked(claim.id, True, "", 1.0))


class Syncing(Single):
    """A founder, the only elector of its run, whose seals and measurements succeed at once."""

    def __init__(
        self,
        sync: SyncSpec = SYNC,
        stop: StopSpec | None = None,
        *,
        record: VoteRecord | None = None,
        tokens_per_step: int = 0,
        outer: OuterSpec | None = None,
    ) -> None:
        rules = RunRules(
            sync=sync,
            outer=outer or OuterSpec(),
            stop=stop or StopSpec(),
            evaluation=EvalSpec(every_seconds=0),
            num_shares=4,
            tokens_per_step=tokens_per_step,
            founder=FOUNDER,
        )
        seat = Seat(
            may_serve=True,
            may_elect=True,
            record=record,
            fresh_enrolment=FOUNDER_SEAT.enrolment,
            machine=FOUNDER_SEAT.host,
        )
        self.core = Peer(
            peer=FOUNDER,
            boot=BOOT if record else FOUNDER_BOOT,
            role="follower",
            rules=rules,
            run=RUN,
            layout_digest=LAYOUT,
            hello=HelloFacts(address=FOUNDER_SEAT.address),
            seat=seat,
        )
        self.effects: list[Effect] = []

    @classmethod
    def founding(
        cls,
        sync: SyncSpec = SYNC,
        stop: StopSpec | None = None,
        *,
        tokens_per_step: int = 0,
        outer: OuterSpec | None = None,
    ) -> Syncing:
        """`effects` are those of founding."""
        syncing = cls(sync, stop, tokens_per_step=tokens_per_step, outer=outer)
        theta = tuple(fake_digest("theta", p, 0) for p in range(2))
        momentum = tuple(fake_digest("momentum", p, 0) for p in range(2))
        syncing.effects = syncing.give(FoundRun(theta, momentum, (100, 300), LAYOUT))
        return syncing

    @classmethod
    def resuming(cls, chain: ChainBuilder, away_ms: int = 0, *, tokens_per_step: int = 0) -> Syncing:
        """The founder's next process, with its chain on disk. It is elected, by itself, a moment later."""
        syncing = cls(record=vote_record(chain), tokens_per_step=tokens_per_step)
        syncing.effects = syncing.load(chain.snapshot(whole_chain=True), chain.events, away_ms)
        return syncing

    def answer(self, effect: Effect) -> Event | None:
        match effect:
            case Seal():
                header = effect.entry.header
                return Sealed(header.term, header.seq, fake_digest(effect.entry))
            case Evaluate():
                return Evaluated(effect.seq, None)
        return None

    def hear(self, message: Message, sender: PeerId = ANN, boot: BootId = BOOT, **fence: object) -> list[Effect]:
        return super().hear(message, sender, boot, **fence)

    def merged(self, merge: Merge) -> list[Effect]:
        return self.give(merged(merge))


def merged(merge: Merge) -> Merged:
    """That merge is done."""
    return Merged(
        merge.fragment,
        merge.round,
        merge.attempt,
        BlobRef(fake_digest("update", merge.fragment, merge.version), 10),
        fake_digest("theta", merge.fragment, merge.version),
        fake_digest("momentum", merge.fragment, merge.version),
        1.0,
        None,
    )


def vote_record(chain: ChainBuilder) -> VoteRecord:
    """Of the founder's disk, with all of that chain on it."""
    ledger = chain.ledger()
    return VoteRecord(
        branch=ledger.branch,
        lineage=0,
        term=ledger.term,
        voted_for=None if ledger.opened is None else PeerBoot(ledger.opened.syncer, ledger.opened.boot),
        held=Rank(0, ledger.term, ledger.seq),
        enrolment=FOUNDER_SEAT.enrolment,
    )


def progress(step: int, step_time_us: int = 100_000) -> Progress:
    return Progress(
        step=step, tokens=10 * step, step_time_us=step_time_us, upload_bytes_per_s=0, loss=2.0, cursor=10 * step
    )


class Learning(Single):
    """A learner's core, welcomed by the founder unless told otherwise."""

    def __init__(self, snapshot: SnapshotLoaded, sync: SyncSpec = SYNC, peer: PeerId = ANN) -> None:
        rules = RunRules(sync=sync, num_shares=4, founder=FOUNDER)
        self.core = Peer(peer=peer, boot=BOOT, role="learner", rules=rules, run=RUN, layout_digest=LAYOUT)
        self.step = self.tokens = 0
        self.load(snapshot, [])

    def hear(
        self, message: Message, sender: PeerId = FOUNDER, boot: BootId = FOUNDER_BOOT, **fence: object
    ) -> list[Effect]:
        return super().hear(message, sender, boot, **fence)

    def connect(self, **welcome: object) -> list[Effect]:
        ledger = self.core.ledger
        plain = Welcome(
            head_seq=ledger.seq,
            head_digest=ledger.head_digest,
            merged_until=tuple(0 for _ in ledger.heads),
            resume_step=0,
            allotment=Allotment(share=0, num_shares=4, cursor=0, pass_number=0),
        )
        connected = self.give(Connected(FOUNDER, seeking=True))
        return connected + self.hear(replace(plain, **welcome))  # type: ignore[arg-type]

    def durable(self, event: EntryArrived) -> list[Effect]:
        """The syncer says that everything up to that entry is durable."""
        return self.hear(Durable(seq=event.entry.header.seq, digest=event.digest))

    def train(self, steps: int = 1, *, step_time_us: int = 100_000) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(steps):
            self.step += 1
            self.tokens += 100
            self.now += 100
            effects += self.give(StepDone(self.step, self.tokens, step_time_us, 2.0, self.tokens))
        return effects

    def asked(self, fragment: int = 0, round_: int = 1) -> RoundOpen:
        """The question for the version that this learner's chain has."""
        head = self.core.ledger.heads[fragment]
        return RoundOpen(
            round=round_,
            fragment=FragmentId(fragment),
            attempt=1,
            version=Version(head.version),
            base=head.base,
            collect_at="",
        )

    def sample(self, fragment: int = 0, round_: int = 1) -> list[Effect]:
        """The training thread carries out TakeSample at this boundary, and the delta is encoded."""
        p = FragmentId(fragment)
        effects = self.give(SampleTaken(p, round_, self.step, self.tokens, self.tokens))
        blob = BlobRef(fake_digest("delta", fragment, self.step), 50)
        return effects + self.give(DeltaEncoded(p, round_, blob, 1.0))


def begun(chain: ChainBuilder | None = None, **welcome: object) -> tuple[Learning, ChainBuilder]:
    chain = chain or ChainBuilder.opened()
    learning = Learning(chain.snapshot())
    learning.connect(**welcome)
    return learning, chain


def handed_in(learning: Learning, fragment: int = 0, round_: int = 1) -> Contribution:
    """Asked, sampled, encoded, announced and uploaded."""
    effects = learning.hear(learning.asked(fragment, round_)) + learning.train()
    assert only(effects, TakeSample) == [TakeSample(FragmentId(fragment), round_)]
    (claim,) = said(learning.sample(fragment, round_), Contribution)
    learning.give(UploadDone(claim.blob, 1_000))
    return claim


def known(learning: Learning, *events: EntryArrived) -> list[Effect]:
    """Entries arrive, are kept, and are said to be durable."""
    effects: list[Effect] = []
    for event in events:
        effects += learning.give(event)
        effects += learning.give(EntryStored(event.digest))
        effects += learning.durable(event)
    return effects


def take(learning: Learning, event: EntryArrived) -> list[Effect]:
    """A commit, from its entry to the order to adopt."""
    effects = known(learning, event)
    for apply in only(effects, ApplyUpdate):
        effects += learning.give(Applied(apply.fragment, apply.version, apply.state_digest))
    return effects


def adopt(learning: Learning, version: int, scale_ppm: int = PPM, fragment: int = 0) -> list[Effect]:
    return learning.give(Adopted(FragmentId(fragment), Version(version), learning.step, learning.tokens, scale_ppm))


def of(claim: Contribution) -> Participant:
    """That contribution as a commit lists it."""
    return replace(
        participant(claim.id.peer, claim.id.base, claim.base_version, claim.first_step, claim.id.last_step),
        tokens_unmerged=claim.tokens_unmerged,
        contribution=claim.blob,
    )
