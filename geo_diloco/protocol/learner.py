"""What a learner decides: when to sample and what to hand in, and what each decision means for its books.

The training thread only reports inner-step boundaries and obeys; the books (`accounts.py`) are kept here. A learner
never waits for anyone: it samples when a round asks and it has something new to show, hands that in (`uploads.py`), and
adopts versions in order (`adoptions.py`). One undecided contribution per fragment: it samples p again only after the
earlier one was merged or refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from geo_diloco.manifest import CodecSpec, FragmentId, MonoMs, PeerId, RunRules, Seq, Term, Version
from geo_diloco.protocol.accounts import Account
from geo_diloco.protocol.adoptions import Adoptions
from geo_diloco.protocol.amendments import rules_at
from geo_diloco.protocol.downlink import Downlink
from geo_diloco.protocol.effects import (
    Effect,
    ForgetBlob,
    Note,
    PersistAccounts,
    Send,
    StartTraining,
    TakeSample,
    TokensDropped,
    Upload,
)
from geo_diloco.protocol.events import (
    Adopted,
    DeltaEncoded,
    Resumed,
    SampleTaken,
    Saved,
    StepDone,
    UploadDone,
    UploadFailed,
    UploadSent,
)
from geo_diloco.protocol.fold import Step
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import (
    Allotment,
    BlobRef,
    Commit,
    Contribution,
    ContributionId,
    Decision,
    Entry,
    Message,
    Progress,
    RoundOpen,
    Sampled,
    Welcome,
)
from geo_diloco.protocol.resume_point import ResumePoint
from geo_diloco.protocol.schedule import PROGRESS_MS, progress_due_ms
from geo_diloco.protocol.status import FragmentTokens, TrainingStatus
from geo_diloco.protocol.uplink import Uplink
from geo_diloco.protocol.uploads import Uploads


@dataclass(frozen=True, slots=True)
class _Draft:
    """A sample that is being encoded."""

    contribution: Contribution
    """Its blob stands for none yet."""
    codec: CodecSpec


class Learner:
    """The learner's part of a peer. Methods return effects; `peer.Peer` routes events here."""

    def __init__(self, peer: PeerId, rules: RunRules, ledger: Ledger) -> None:
        self._peer = peer
        self._rules = rules
        self._sync = rules.sync
        self._ledger = ledger
        self.accounts: list[Account] = []
        self.step = 0
        self.tokens = 0
        self.allotment: Allotment | None = None
        self.started = False
        self._base_tokens = 0
        self._cursor = 0
        self._step_time_us = 0
        self._loss: float | None = None
        self._progress_at: MonoMs | None = None
        self._progress_ms = PROGRESS_MS
        """What the syncer asks for."""
        self._told_step_time_us = 0
        """It counts a silence in steps of that length."""
        self._syncer: PeerId | None = None
        """Set while welcomed on a control connection."""
        self._term = Term(0)
        """The syncer's. Its `open` need not be durable yet, so the ledger's may be lower."""
        self._asked: dict[FragmentId, RoundOpen] = {}
        self._sampled_at: dict[FragmentId, int] = {}
        """Inner step."""
        self._again_at: dict[FragmentId, int] = {}
        """After a refusal: the inner step from which the fragment may be sampled again."""
        self._collect_at: dict[FragmentId, str] = {}
        self._sampling: dict[FragmentId, RoundOpen] = {}
        self._encoding: dict[FragmentId, _Draft] = {}
        self._uploads = Uploads()
        self._uplink = Uplink(rules, ledger)
        self.downlink = Downlink()
        self._adoptions = Adoptions(peer, ledger)
        self._resume_point = ResumePoint(ledger)

    # -- start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The ledger is loaded: a learner with nothing behind it stands at the snapshot's versions."""
        self.accounts = [
            Account(FragmentId(p), adopted_version=head.version) for p, head in enumerate(self._ledger.heads)
        ]
        self._uploads.start(len(self.accounts))
        self._adoptions.start()
        self._resume_point.start()

    def resumed(self, event: Resumed) -> list[Effect]:
        self.step, self.tokens, self._base_tokens = event.step, event.tokens, event.tokens
        self.accounts = [Account.restored_from(FragmentId(p), saved) for p, saved in enumerate(event.accounts)]
        if event.lost_tokens == 0:
            return []
        return [TokensDropped(account.fragment, event.lost_tokens, "crashed") for account in self.accounts]

    def undecided_ids(self) -> tuple[ContributionId, ...]:
        return tuple(contribution.id for contribution in self._undecided())

    def _undecided(self) -> list[Contribution]:
        return [
            account.undecided.contribution
            for account in self.accounts
            if account.undecided is not None and account.undecided.contribution is not None
        ]

    # -- the control connection ---------------------------------------------------------------------------------

    def welcomed(self, syncer: PeerId, term: Term, welcome: Welcome) -> list[Effect]:
        """(Re)admitted. Everything undecided is announced and uploaded again, for this may be another process than the
        one that has it; where it is not, both cost next to nothing."""
        self._syncer, self._term = syncer, term
        self._progress_at = None
        effects: list[Effect] = []
        if welcome.resume_step > self.step and not self.started:
            for account in self.accounts:
                account.skip_steps(welcome.resume_step - self.step)
            self.step = welcome.resume_step
        self._skip_merged(welcome.merged_until)
        if welcome.allotment is not None and not self._holds_share_of(welcome.allotment):
            effects.append(self._start_training(welcome.allotment))
        for account in self.accounts:
            if account.undecided is not None and account.undecided.contribution is not None:
                account.undecided.uploaded = False
                effects.append(self._send(account.undecided.contribution))
        self._uploads.begin_again(self._undecided())
        return effects + self._next_upload()

    def _skip_merged(self, merged_until: tuple[int, ...]) -> None:
        """An earlier process of ours that left no checkpoint handed in work up to there. Where something is carried
        from before, the commit that took that work is still ahead of us and resets the fragment."""
        for account, until in zip(self.accounts, merged_until, strict=False):
            if account.undecided is None and account.restored == 0:
                account.first_step = max(account.first_step, min(until, self.step))

    def _start_training(self, allotment: Allotment) -> StartTraining:
        self.allotment = allotment
        self.started = True
        return StartTraining(
            resume_step=self.step,
            share=allotment.share,
            num_shares=allotment.num_shares,
            cursor=allotment.cursor,
            pass_number=allotment.pass_number,
        )

    def _holds_share_of(self, allotment: Allotment) -> bool:
        held = self.allotment
        return held is not None and (held.share, held.pass_number) == (allotment.share, allotment.pass_number)

    def disconnected(self) -> None:
        self._syncer = None
        self._asked.clear()

    def holds(self) -> Allotment | None:
        """For Hello: the share in use, with the cursor as it is now."""
        return None if self.allotment is None else replace(self.allotment, cursor=self._cursor)

    def _send(self, message: Message) -> Send:
        assert self._syncer is not None
        return Send(self._syncer, self._ledger.branch, self._term, message)

    def _tell(self, message: Message) -> list[Effect]:
        return [self._send(message)] if self._syncer is not None else []

    # -- rounds ---------------------------------------------------------------------------------------------------

    def round_open(self, message: RoundOpen) -> list[Effect]:
        if not 0 <= message.fragment < len(self.accounts):
            return [Note("round", f"asked for fragment {message.fragment} of {len(self.accounts)}", "warning")]
        self._asked[message.fragment] = message
        self._progress_ms = message.progress_ms
        self._collect_at[message.fragment] = message.collect_at
        return self._sample_if_ready(message.fragment)

    def _sample_if_ready(self, fragment: FragmentId) -> list[Effect]:
        """Sample once the asked-for version is adopted, at the next inner-step boundary; one step is done on it
        by then. It is ordered before that step: who takes longer for one than a round lasts has another version
        to adopt at every boundary, and its sample must come first. What was refused is tried again, with what was
        trained since, if the round is still open then; H steps later at the earliest, so that a learner whose work is
        never accepted does not spend its link on it."""
        asked = self._asked.get(fragment)
        account = self.accounts[fragment]
        if asked is None or fragment in self._sampling or fragment in self._encoding:
            return []
        if account.undecided is not None:
            return []
        if account.adopted_version > asked.version:
            del self._asked[fragment]
            return []
        if account.adopted_version < asked.version or self._adoptions.is_ordered(fragment):
            return []
        if self.step < self._again_at.get(fragment, 0) or not self._has_room(fragment):
            return []
        self._sampling[fragment] = asked
        self._uplink.ordered(fragment)
        return [TakeSample(fragment, asked.round)]

    def _has_room(self, fragment: FragmentId) -> bool:
        """On a link that can't keep up every n-th round of a fragment is taken part in. The oldest open round goes
        first: others with such a link take the same one then, and are merged together. In lockstep the schedule alone
        decides."""
        if self._sync.lockstep:
            return True
        sampled_at = self._sampled_at.get(fragment)
        if sampled_at is not None and self._uplink.rests(self.step - sampled_at):
            return False
        return self._uplink.has_room(self._uploads, being_encoded=len(self._sampling) + len(self._encoding))

    def sample_taken(self, event: SampleTaken) -> list[Effect]:
        asked = self._sampling.pop(event.fragment, None)
        if asked is None:
            return []
        account = self.accounts[event.fragment]
        self._boundary(event.step, event.tokens, event.cursor)
        if event.step <= account.adopted_step:
            return []  # the last orders of a process are carried out without a step before them
        self._sampled_at[event.fragment] = event.step
        steps, tokens = event.step - account.adopted_step, event.tokens - account.adopted_tokens
        undecided = account.sample(event.step, event.tokens)
        base = self._adoptions.heads[event.fragment].base
        draft = Contribution(
            id=ContributionId(self._peer, event.fragment, base, event.step),
            round=asked.round,
            attempt=asked.attempt,
            base_version=account.adopted_version,
            first_step=account.first_step,
            steps=steps,
            tokens=tokens,
            tokens_unmerged=undecided.tokens,
            cursor=event.cursor,
            blob=BlobRef(base, 0),
        )
        codec = self._uplink.take_codec(rules_at(self._rules, self._ledger.amended))
        self._encoding[event.fragment] = _Draft(draft, codec)
        return self._tell(Sampled(round=asked.round, fragment=event.fragment, attempt=asked.attempt))

    def codec_for(self, fragment: FragmentId) -> CodecSpec | None:
        """Of a sample that is to be encoded; none if none is."""
        draft = self._encoding.get(fragment)
        return None if draft is None else draft.codec

    def delta_encoded(self, event: DeltaEncoded, now: MonoMs) -> list[Effect]:
        draft = self._encoding.pop(event.fragment, None)
        undecided = self.accounts[event.fragment].undecided
        if draft is None or undecided is None:
            return [ForgetBlob(event.blob), *self._sample_if_ready(event.fragment)]
        contribution = replace(draft.contribution, blob=event.blob)
        undecided.contribution = contribution
        self._uplink.encoded(draft.codec, contribution, now)
        if self._syncer is None:
            return []
        self._uploads.add(contribution)
        return [self._send(contribution), *self._next_upload()]

    # -- uploads --------------------------------------------------------------------------------------------------

    def _next_upload(self) -> list[Effect]:
        chosen = None if self._syncer is None else self._uploads.next()
        if chosen is None:
            return []
        self._uplink.began()
        return [Upload(chosen.blob, self._collect_at.get(chosen.id.fragment, ""))]

    def upload_sent(self, event: UploadSent) -> list[Effect]:
        """The next one begins while the syncer's word on this one is awaited: a round trip is a good part of what a
        fragment takes."""
        self._uploads.sent(event.blob)
        return self._next_upload()

    def upload_done(self, event: UploadDone) -> list[Effect]:
        for account in self.accounts:
            if account.undecided is not None and account.contribution_blob() == event.blob:
                account.undecided.uploaded = True
        self._uplink.done(event)
        self._uploads.over(event.blob)
        return self._next_upload()

    def upload_failed(self, event: UploadFailed) -> list[Effect]:
        note = Note("upload", f"upload of {event.blob.digest[:12]} failed: {event.reason}", "warning")
        self._uploads.over(event.blob)
        return [note, *self._next_upload()]

    def _hand_in_again(self) -> list[Effect]:
        """What is neither uploaded nor on its way: its upload failed, so it is announced and tried again."""
        effects: list[Effect] = []
        for account in self.accounts:
            undecided = account.undecided
            if undecided is None or undecided.contribution is None or undecided.uploaded:
                continue
            contribution = undecided.contribution
            if not self._uploads.holds(contribution) and not self._adoptions.has_taken(contribution.id):
                effects.append(self._send(contribution))
                self._uploads.add(contribution)
        return effects + self._next_upload()

    def handing_in(self) -> bool:
        """Whether sampled work is still on its way to the syncer."""
        if self._syncer is None:
            return False
        return bool(self._encoding) or not self._uploads.is_idle

    # -- decisions ------------------------------------------------------------------------------------------------

    def decision(self, message: Decision) -> list[Effect]:
        account = next((account for account in self.accounts if account.fragment == message.id.fragment), None)
        undecided = None if account is None else account.undecided
        if account is None or undecided is None or undecided.contribution is None:
            return []
        if undecided.contribution.id != message.id or message.verdict != "refused":
            return []
        if self._adoptions.has_taken(message.id):
            return []  # the chain outranks a refusal
        blob = undecided.contribution.blob
        dropped = account.refuse()
        self._again_at[account.fragment] = self.step + self._sync.interval_steps
        self._uploads.let_go(blob)
        note = Note("contribution", f"fragment {account.fragment} refused, carried on: {message.reason}")
        effects: list[Effect] = [*dropped, ForgetBlob(blob), note, *self._next_upload()]
        return effects + self._sample_if_ready(account.fragment)

    # -- adoption -------------------------------------------------------------------------------------------------

    def entry_taken(self, entry: Entry) -> None:
        """An entry is new on our ledger."""
        if isinstance(entry, Commit):
            self._adoptions.folded(entry)
        self._resume_point.folded(entry)

    def reached(self, step: Step) -> list[Effect]:
        """The fold reached a version: order its adoption."""
        undecided = self.accounts[step.fragment].undecided
        return self._adoptions.reached(step, None if undecided is None else undecided.contribution)

    def adopted(self, event: Adopted) -> list[Effect]:
        adoption = self._adoptions.done(event.fragment, event.version)
        if adoption is None:
            return [Note("adopt", f"adoption of version {event.version} was not asked for", "error")]
        account = self.accounts[event.fragment]
        self._boundary(event.step, event.tokens, None)
        blob = account.contribution_blob() if adoption.taken else None
        booked, over = self._adoptions.book(adoption, account, event), list[Effect]()
        if blob is not None:
            self._uploads.let_go(blob)
            over = [ForgetBlob(blob), *self._next_upload()]
        taken_back = self._adoptions.take_back(adoption, account) if adoption.abandoned else []
        self._resume_point.adopted(self._adoptions.heads)
        return [*booked, *over, *taken_back, *self._sample_if_ready(event.fragment)]

    def rewound(self, to: Seq) -> list[Effect]:
        """The owner's reform left behind what came after `to`, and our ledger is back there."""
        self._asked.clear()
        self._resume_point.rewound(to)
        return self._adoptions.rewound(to, self.accounts)

    # -- inner steps ----------------------------------------------------------------------------------------------

    def step_done(self, event: StepDone, now: MonoMs) -> list[Effect]:
        self._boundary(event.step, event.tokens, event.cursor)
        self._step_time_us = event.step_time_us
        self._uplink.stepped(event.step_time_us, now)
        self.downlink.look(now)
        self._loss = event.loss
        effects: list[Effect] = []
        for fragment in sorted(self._asked, key=lambda p: self._asked[p].round):
            effects += self._sample_if_ready(fragment)
        step_time_us = min(event.step_time_us, self._told_step_time_us)
        every_ms = progress_due_ms(self._progress_ms, step_time_us)
        due = self._progress_at is None or now - self._progress_at >= every_ms
        if due and self._syncer is not None and event.step_time_us > 0:
            self._progress_at, self._told_step_time_us = now, event.step_time_us
            effects += [*self._tell(self._progress()), *self._hand_in_again()]
        return effects

    def _progress(self) -> Progress:
        return Progress(
            step=self.step,
            tokens=self.tokens,
            step_time_us=self._step_time_us,
            upload_bytes_per_s=self._uplink.bytes_per_s,
            loss=self._loss,
            cursor=self._cursor,
            turn=self._uplink.turn(),
            uplink=self.uplink(),
        )

    def uplink(self) -> str:
        """What it makes of its way down, where that is too thin, and up: for people."""
        down = self.downlink.text(rules_at(self._rules, self._ledger.amended).codec_down)
        return "; ".join(filter(None, (down, self._uplink.text())))

    def training_status(self) -> TrainingStatus:
        """For people."""
        return TrainingStatus(step=self.step, tokens=self.tokens, loss=self._loss)

    def fragment_came(self, fragment: FragmentId, version: Version, now: MonoMs) -> None:
        """Whole, instead of the updates to that version."""
        self.downlink.replaced(fragment, version, 4 * self._ledger.num_elements[fragment], now)

    def _boundary(self, step: int, tokens: int, cursor: int | None) -> None:
        self.step, self.tokens = max(self.step, step), max(self.tokens, tokens)
        if cursor is not None:
            self._cursor = cursor

    def saved(self, event: Saved) -> list[Effect]:
        self._boundary(event.step, event.tokens, None)
        return [
            PersistAccounts(
                save=event.save,
                step=event.step,
                tokens=event.tokens,
                resume_at=self._resume_point.snapshot(self._adoptions.heads),
                accounts=tuple(account.saved(event.tokens) for account in self.accounts),
            )
        ]

    def fragment_tokens(self) -> tuple[FragmentTokens, ...]:
        """Where this process's tokens are, per fragment, as of the last boundary."""
        return tuple(
            FragmentTokens(
                trained=self.tokens,
                merged=account.merged,
                in_flight=0 if account.undecided is None else account.undecided.tokens,
                carried=account.unmerged + self.tokens - account.mark,
                restored=account.restored,
                version=account.adopted_version,
            )
            for account in self.accounts
        )
