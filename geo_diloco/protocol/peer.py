"""One peer as one state machine: `handle(event, now) -> effects`, one `deadline`, `check_invariants()`.

It routes: chain events to the follower, messages to the learner or the syncer, and it keeps what all roles share:
term and branch fencing, leaving, finishing. Lower terms are refused with our term; a higher one makes us fetch the
chain, whose `open` entry alone raises the term. No I/O, no clock, no randomness: the same events give the same
effects, which is what `replay` proves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_diloco.manifest import WIRE_VERSION, BootId, Digest, MonoMs, PeerId, RunId, RunRules
from geo_diloco.protocol.effects import (
    CloseConnection,
    Effect,
    Note,
    ReadyToLeave,
    RefusedForGood,
    RunFinished,
    Send,
)
from geo_diloco.protocol.events import (
    Adopted,
    Applied,
    ApplyFailed,
    BlobArrived,
    Connected,
    ContributionChecked,
    DeltaEncoded,
    Disconnected,
    EntryArrived,
    Evaluated,
    Event,
    FoundRun,
    FragmentReplaced,
    Merged,
    MergeFailed,
    Received,
    Resumed,
    SampleTaken,
    Saved,
    Sealed,
    Serve,
    SnapshotLoaded,
    StepDone,
    StopRequested,
    Tick,
    UpdateFetched,
    UpdateLost,
    UploadDone,
    UploadFailed,
)
from geo_diloco.protocol.follow import Follower, Step
from geo_diloco.protocol.learner import Learner
from geo_diloco.protocol.ledger import NO_SEQ, Ledger
from geo_diloco.protocol.messages import (
    ContributionId,
    Decision,
    Goodbye,
    Hello,
    Message,
    Open,
    Refuse,
    RoundOpen,
    Welcome,
)
from geo_diloco.protocol.status import PeerStatus
from geo_diloco.protocol.syncer import Syncer

Role = Literal["syncer", "learner", "follower"]

LEAVE_MS = 1000
"""How long a learner that leaves may still hand in what it sampled."""
REFUSED_FOR_GOOD = frozenset({"layout", "wire", "token", "run"})


@dataclass(frozen=True, kw_only=True, slots=True)
class HelloFacts:
    """What this process says of itself in Hello."""

    host: str = ""
    software: str = ""
    address: str = ""
    proof: str = ""


class Peer:
    """The core of one process.

    The first event is `FoundRun` (a founder), `EntryArrived` for the whole chain and then `Serve` (a founder that
    resumes), or `SnapshotLoaded` followed by the entries after it (everyone else; a learner that resumes is given
    `Resumed` right after `SnapshotLoaded`).
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
    ) -> None:
        self.peer = peer
        self.boot = boot
        self.role: Role = role
        self.ledger = Ledger(founder=rules.founder)
        self._run = run
        self._layout_digest = layout_digest
        self._facts = hello or HelloFacts()
        self._follower = Follower(self.ledger)
        self._learner = Learner(peer, rules, self.ledger) if role == "learner" else None
        address = self._facts.address
        self._syncer = Syncer(peer, boot, rules, run, self.ledger, address=address) if role == "syncer" else None
        self._connected: PeerId | None = None
        self._welcomed = False
        self._leaving_until: MonoMs | None = None
        self._told_finished = False
        self._ready_to_leave = False

    @property
    def deadline(self) -> MonoMs | None:
        """Give `Tick` by then."""
        waits = [self._leaving_until, self._syncer.deadline if self._syncer is not None else None]
        known = [wait for wait in waits if wait is not None]
        return min(known) if known else None

    def handle(self, event: Event, now: MonoMs) -> list[Effect]:
        effects = self._route(event, now)
        if self._syncer is not None:
            effects += self._syncer.advance(now)
        return effects + self._finish() + self._leave(now)

    # -- routing --------------------------------------------------------------------------------------------------

    def _route(self, event: Event, now: MonoMs) -> list[Effect]:
        match event:
            case Tick():
                return []
            case EntryArrived():
                return self._entry_arrived(event)
            case SnapshotLoaded():
                return self._snapshot_loaded(event)
            case Connected():
                return self._on_connected(event)
            case Disconnected():
                return self._on_disconnected(event, now)
            case Received():
                return self._received(event, now)
            case StopRequested():
                return self._stop_requested(now)
            case UpdateFetched():
                return self._follower.update_fetched(event)
            case UpdateLost():
                return self._follower.update_lost(event)
            case ApplyFailed():
                return self._follower.apply_failed(event)
            case Applied():
                return self._reached(*self._follower.applied(event))
            case FragmentReplaced():
                return self._reached(*self._follower.replaced(event))
            case FoundRun() | Serve() | Sealed() | BlobArrived() | ContributionChecked():
                return [] if self._syncer is None else self._syncer.handle(event, now)
            case Merged() | MergeFailed() | Evaluated():
                return [] if self._syncer is None else self._syncer.handle(event, now)
            case _:
                return self._learner_event(event, now)

    def _learner_event(self, event: Event, now: MonoMs) -> list[Effect]:
        learner = self._learner
        if learner is None:
            return []
        match event:
            case Resumed():
                return learner.resumed(event)
            case StepDone():
                return learner.step_done(event, now)
            case SampleTaken():
                return learner.sample_taken(event)
            case DeltaEncoded():
                return learner.delta_encoded(event)
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

    # -- chain ----------------------------------------------------------------------------------------------------

    def _snapshot_loaded(self, event: SnapshotLoaded) -> list[Effect]:
        if self.ledger.seq != NO_SEQ:
            return [Note("chain", "a second snapshot is ignored", "warning")]
        self.ledger.load(event)
        self._follower.start()
        if self._learner is not None:
            self._learner.start()
        return []

    def _entry_arrived(self, event: EntryArrived) -> list[Effect]:
        if self._syncer is not None:
            return self._syncer.load_entry(event)
        term = self.ledger.term
        taken, effects = self._follower.entry_arrived(event)
        if self._learner is not None:
            for entry in taken:
                self._learner.entry_taken(entry)
        if self.ledger.term > term and any(isinstance(entry, Open) for entry in taken):
            effects += self._say_hello()
        return effects

    def _reached(self, step: Step | None, effects: list[Effect]) -> list[Effect]:
        if step is None or self._learner is None:
            return effects
        return self._learner.reached(step) + effects

    # -- connections ----------------------------------------------------------------------------------------------

    def _on_connected(self, event: Connected) -> list[Effect]:
        if self._syncer is not None:
            return []
        self._connected, self._welcomed = event.peer, False
        if self._learner is not None:
            self._learner.disconnected()
        return self._say_hello()

    def _on_disconnected(self, event: Disconnected, now: MonoMs) -> list[Effect]:
        if self._syncer is not None:
            return self._syncer.disconnected(event.peer, now)
        if self._connected == event.peer:
            self._connected, self._welcomed = None, False
            if self._learner is not None:
                self._learner.disconnected()
        return []

    def _say_hello(self) -> list[Effect]:
        if self._connected is None or self._welcomed:
            return []
        learner = self._learner
        hello = Hello(
            wire_version=WIRE_VERSION,
            layout_digest=self._layout_digest,
            trains=learner is not None,
            host=self._facts.host,
            software=self._facts.software,
            address=self._facts.address,
            step=0 if learner is None else learner.step,
            tokens=0 if learner is None else learner.tokens,
            head_seq=self.ledger.seq,
            undecided=() if learner is None else learner.undecided_ids(),
            proof=self._facts.proof,
            holds=None if learner is None else learner.holds(),
        )
        return [self._send(self._connected, hello)]

    def _send(self, to: PeerId, message: Message) -> Send:
        return Send(to, self.ledger.branch, self.ledger.term, message)

    # -- messages -------------------------------------------------------------------------------------------------

    def _received(self, event: Received, now: MonoMs) -> list[Effect]:
        if isinstance(event.message, Refuse):
            return self._refused(event.sender, event.message)
        if event.branch != self.ledger.branch:
            detail = f"branch {event.branch[:12]}, here {self.ledger.branch[:12]}"
            return [self._refuse(event.sender, "branch", detail)]
        if event.term < self.ledger.term:
            detail = f"term {event.term} is over, this is term {self.ledger.term}"
            return [self._refuse(event.sender, "term", detail)]
        if event.term > self.ledger.term:
            return [] if self._syncer is not None else [self._follower.ask_again()]
        if self._syncer is not None:
            return self._syncer.received(event, now)
        return self._from_syncer(event)

    def _refuse(self, to: PeerId, reason: str, detail: str) -> Send:
        return self._send(to, Refuse(reason=reason, detail=detail, term=self.ledger.term))

    def _refused(self, sender: PeerId, refuse: Refuse) -> list[Effect]:
        if self._syncer is not None or sender != self._connected or sender != self.ledger.founder:
            return []
        if refuse.reason in REFUSED_FOR_GOOD:
            return [RefusedForGood(f"{refuse.reason}: {refuse.detail}")]
        note = Note("refused", f"{refuse.reason}: {refuse.detail}", "warning")
        if refuse.reason == "hello":
            self._welcomed = False
            return [note, *self._say_hello()]
        return [note, self._follower.ask_again()]

    def _from_syncer(self, event: Received) -> list[Effect]:
        if event.sender != self._connected or event.sender != self.ledger.founder:
            return []
        learner, message = self._learner, event.message
        match message:
            case Welcome():
                self._welcomed = True
                effects: list[Effect] = []
                if message.head_seq > self.ledger.seq:
                    effects.append(self._follower.ask_again())
                return effects + ([] if learner is None else learner.welcomed(event.sender, message))
            case RoundOpen():
                return [] if learner is None else learner.round_open(message)
            case Decision():
                return [] if learner is None else learner.decision(message)
            case _:
                return [Note("message", f"{message.kind} is not for a {self.role}", "warning")]

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> list[Effect]:
        if self._told_finished or self.ledger.finished is None or self._follower.pending():
            return []
        if self._syncer is not None and not self._syncer.idle():
            return []
        self._told_finished = True
        return [RunFinished(self.ledger.finished)]

    def _stop_requested(self, now: MonoMs) -> list[Effect]:
        if self._leaving_until is None:
            self._leaving_until = MonoMs(now + LEAVE_MS)
            if self._syncer is not None:
                self._syncer.stop()
        return []

    def _leave(self, now: MonoMs) -> list[Effect]:
        """Leave as soon as nothing is in the way, at the latest when time is up."""
        if self._leaving_until is None or self._ready_to_leave:
            return []
        busy = self._learner.handing_in() if self._learner is not None else False
        if self._syncer is not None:
            busy = not self._syncer.idle()
        if busy and now < self._leaving_until:
            return []
        self._ready_to_leave, self._leaving_until = True, None
        goodbye: list[Effect] = []
        if self._connected is not None:
            goodbye = [
                self._send(self._connected, Goodbye(reason="leaving")),
                CloseConnection(self._connected, "leaving"),
            ]
        return [*goodbye, ReadyToLeave()]

    # -- for people and tests -------------------------------------------------------------------------------------

    def status(self, now: MonoMs) -> PeerStatus:
        ledger = self.ledger
        return PeerStatus(
            role=self.role,
            branch=ledger.branch,
            term=ledger.term,
            seq=ledger.seq,
            finished=ledger.finished,
            num_commits=ledger.num_commits,
            tokens_total=ledger.tokens_total() if ledger.heads else 0,
            progress=ledger.progress,
            heldout=tuple(ledger.heldout),
            versions=tuple(head.version for head in ledger.heads),
            learners=() if self._syncer is None else self._syncer.learner_status(now),
            rounds=() if self._syncer is None else self._syncer.round_status(),
            waiting=() if self._syncer is None else self._syncer.waiting(now),
            tokens=() if self._learner is None else self._learner.fragment_tokens(),
        )

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
        if self._syncer is not None:
            self._syncer.check_invariants()
