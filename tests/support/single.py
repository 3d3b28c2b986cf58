"""One core at a time, spoken to by hand: for tests of a single rule."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from geo_diloco.manifest import (
    WIRE_VERSION,
    BootId,
    BranchId,
    EvalSpec,
    FragmentId,
    MonoMs,
    PeerId,
    RunRules,
    Seq,
    StopSpec,
    SyncSpec,
    Term,
    Version,
)
from geo_diloco.protocol.effects import ApplyUpdate, Effect, Evaluate, FetchUpdate, Merge, Seal, Send, TakeSample
from geo_diloco.protocol.events import (
    Adopted,
    Applied,
    BlobArrived,
    Connected,
    ContributionChecked,
    DeltaEncoded,
    EntryArrived,
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
    UpdateFetched,
    UploadDone,
)
from geo_diloco.protocol.messages import (
    Allotment,
    BlobRef,
    Contribution,
    Hello,
    Message,
    Participant,
    Progress,
    RoundOpen,
    Welcome,
)
from geo_diloco.protocol.peer import Peer
from tests.support.chains import ANN, SYNC, ChainBuilder, participant
from tests.support.cluster import FOUNDER, LAYOUT, RUN, fake_digest

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


class Syncing:
    """A founder whose seals and measurements succeed at once."""

    def __init__(self, sync: SyncSpec = SYNC, stop: StopSpec | None = None) -> None:
        rules = RunRules(
            sync=sync, stop=stop or StopSpec(), evaluation=EvalSpec(every_seconds=0), num_shares=4, founder=FOUNDER
        )
        self.core = Peer(peer=FOUNDER, boot=BOOT, role="syncer", rules=rules, run=RUN, layout_digest=LAYOUT)
        self.now = 0
        self.effects: list[Effect] = []

    @classmethod
    def founding(cls, sync: SyncSpec = SYNC, stop: StopSpec | None = None) -> Syncing:
        """`effects` are those of founding."""
        syncing = cls(sync, stop)
        theta = tuple(fake_digest("theta", p, 0) for p in range(2))
        momentum = tuple(fake_digest("momentum", p, 0) for p in range(2))
        syncing.effects = syncing.give(FoundRun(theta, momentum, (100, 300), LAYOUT))
        return syncing

    def give(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, MonoMs(self.now))
        self.core.check_invariants()
        for seal in only(effects, Seal):
            effects = effects + self.give(Sealed(seal.entry.header.seq, fake_digest(seal.entry)))
        for evaluate in only(effects, Evaluate):
            effects = effects + self.give(Evaluated(evaluate.seq, None))
        return effects

    def hear(self, message: Message, sender: PeerId = ANN, boot: BootId = BOOT, **fence: object) -> list[Effect]:
        ledger = self.core.ledger
        event = Received(sender, ledger.branch, ledger.term, boot, message)
        return self.give(replace(event, **fence))  # type: ignore[arg-type]

    def join(self, peer: PeerId = ANN, step_time_us: int = 100_000) -> list[Effect]:
        effects = self.hear(hello(), peer)
        return effects + self.hear(progress(1, step_time_us), peer)

    def pass_time(self, ms: int) -> list[Effect]:
        self.now += ms
        return self.give(Tick())

    def hand_in(self, claim: Contribution) -> list[Effect]:
        """Announced, arrived and valid."""
        sender = claim.id.peer
        effects = self.hear(claim, sender)
        effects += self.give(BlobArrived(claim.blob))
        return effects + self.give(ContributionChecked(claim.id, True, "", 1.0))

    def merged(self, merge: Merge) -> list[Effect]:
        return self.give(
            Merged(
                merge.fragment,
                merge.round,
                merge.attempt,
                BlobRef(fake_digest("update", merge.fragment, merge.version), 10),
                fake_digest("theta", merge.fragment, merge.version),
                fake_digest("momentum", merge.fragment, merge.version),
                1.0,
                None,
            )
        )


def progress(step: int, step_time_us: int = 100_000) -> Progress:
    return Progress(
        step=step, tokens=10 * step, step_time_us=step_time_us, upload_bytes_per_s=0, loss=2.0, cursor=10 * step
    )


class Learning:
    """A learner's core, welcomed by the founder unless told otherwise."""

    def __init__(self, snapshot: SnapshotLoaded, sync: SyncSpec = SYNC, peer: PeerId = ANN) -> None:
        rules = RunRules(sync=sync, num_shares=4, founder=FOUNDER)
        self.core = Peer(peer=peer, boot=BOOT, role="learner", rules=rules, run=RUN, layout_digest=LAYOUT)
        self.now = 0
        self.step = self.tokens = 0
        self.give(snapshot)

    def give(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, MonoMs(self.now))
        self.core.check_invariants()
        return effects

    def hear(self, message: Message, sender: PeerId = FOUNDER, **fence: object) -> list[Effect]:
        ledger = self.core.ledger
        event = Received(sender, BranchId(ledger.branch), Term(ledger.term), BOOT, message)
        return self.give(replace(event, **fence))  # type: ignore[arg-type]

    def connect(self, **welcome: object) -> list[Effect]:
        ledger = self.core.ledger
        plain = Welcome(
            head_seq=ledger.seq,
            head_digest=ledger.head_digest,
            merged_until=tuple(0 for _ in ledger.heads),
            resume_step=0,
            allotment=Allotment(share=0, num_shares=4, cursor=0, pass_number=0),
        )
        return self.give(Connected(FOUNDER)) + self.hear(replace(plain, **welcome))  # type: ignore[arg-type]

    def train(self, steps: int = 1) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(steps):
            self.step += 1
            self.tokens += 100
            self.now += 100
            effects += self.give(StepDone(self.step, self.tokens, 100_000, 2.0, self.tokens))
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


def take(learning: Learning, event: EntryArrived) -> list[Effect]:
    """A commit, from its entry to the order to adopt."""
    effects = learning.give(event)
    for fetch in only(effects, FetchUpdate):
        effects += learning.give(UpdateFetched(fetch.fragment, fetch.version))
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
