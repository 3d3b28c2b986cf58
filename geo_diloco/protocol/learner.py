"""What a learner decides: when to sample, what to hand in first, what to adopt, and where its tokens are.

The training thread only reports inner-step boundaries and obeys; the books (`accounts.py`) are kept here. A learner
never waits for anyone: it samples when a round asks and it has something new to show, uploads one contribution at a
time (newest round first), and adopts versions in order. One undecided contribution per fragment: it samples p again
only after the earlier one was merged or refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from geo_diloco.manifest import BranchId, CodecSpec, Digest, FragmentId, MonoMs, PeerId, RunRules, Seq, Term, Version
from geo_diloco.protocol.accounts import Account
from geo_diloco.protocol.amendments import Amended, rules_at
from geo_diloco.protocol.effects import (
    Adopt,
    Effect,
    ForgetBlob,
    Note,
    PersistAccounts,
    Reset,
    Send,
    StartTraining,
    TakeSample,
    TokensDropped,
    TokensMerged,
)
from geo_diloco.protocol.election.ballots import Elector, Opened
from geo_diloco.protocol.events import (
    Adopted,
    DeltaEncoded,
    Resumed,
    SampleTaken,
    Saved,
    SnapshotLoaded,
    StepDone,
    UploadDone,
    UploadFailed,
)
from geo_diloco.protocol.fold import Step
from geo_diloco.protocol.ledger import NO_SEQ, Ledger, head_of, id_of
from geo_diloco.protocol.messages import (
    Allotment,
    BlobRef,
    Commit,
    Contribution,
    ContributionId,
    Decision,
    Entry,
    FragmentHead,
    Message,
    Participant,
    Progress,
    RoundOpen,
    Sampled,
    Welcome,
)
from geo_diloco.protocol.status import FragmentTokens
from geo_diloco.protocol.uploads import Uploads

PROGRESS_EVERY_MS = 1000
MERGED_REMEMBERED = 4096
"""Commits with work of ours that could be taken back."""
CARRY_ALL = 1e30
"""As length of the others' deltas: nothing of the carry is cut."""


@dataclass(slots=True)
class _Adoption:
    """An adoption ordered from the training thread: what it will mean for the books."""

    step: Step
    taken: tuple[Participant, ...]
    """Our participations in its commits, oldest first."""
    remembered: bool
    """Whether all we took part with is the contribution in our books."""
    abandoned: bool = False
    """Its commits were left behind by the owner's reform before the training thread got there."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A sample that is being encoded."""

    contribution: Contribution
    """Its blob stands for none yet."""
    codec: CodecSpec


@dataclass(frozen=True, slots=True)
class _Position:
    """The chain after one entry."""

    term: Term
    seq: Seq
    head_digest: Digest
    tokens_per_fragment: tuple[int, ...]
    progress: float
    roster: tuple[Elector, ...]
    roster_seq: Seq
    opened: Opened | None
    amended: tuple[Amended, ...]
    lineage: int
    branch: BranchId
    commit: tuple[FragmentId, Version] | None


class Learner:
    """The learner's part of a peer. Methods return effects; `peer.Peer` routes events here."""

    def __init__(self, peer: PeerId, rules: RunRules, ledger: Ledger) -> None:
        self._peer = peer
        self._rules = rules
        self._sync = rules.sync
        self._ledger = ledger
        self._uploads = Uploads(rules, ledger)
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
        self._syncer: PeerId | None = None
        """Set while welcomed on a control connection."""
        self._term = Term(0)
        """The syncer's. Its `open` need not be durable yet, so the ledger's may be lower."""
        self._asked: dict[FragmentId, RoundOpen] = {}
        self._sampled_at: dict[FragmentId, int] = {}
        """Inner step."""
        self._again_at: dict[FragmentId, int] = {}
        """After a refusal: the inner step from which the fragment may be sampled again."""
        self._sampling: dict[FragmentId, RoundOpen] = {}
        self._encoding: dict[FragmentId, _Draft] = {}
        self._adoptions: list[deque[_Adoption]] = []
        self._adopted_heads: list[FragmentHead] = []
        self._taken: list[dict[ContributionId, Version]] = []
        """Own work that commits on our ledger took, and the version they made, until that is adopted."""
        self._unadopted: deque[_Position] = deque()
        """Entries not known to be adopted yet, oldest first, and where the chain stood with each."""
        self._merged: deque[tuple[Seq, FragmentId, int]] = deque(maxlen=MERGED_REMEMBERED)
        """Tokens of ours that commits took, by their seq: if they are abandoned, so is that work."""
        self._floor = _Position(Term(0), NO_SEQ, Digest(""), (), 0.0, (), NO_SEQ, None, (), 0, BranchId(""), None)
        """The newest position up to which every commit is adopted: where a checkpoint resumes."""

    # -- start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The ledger is loaded: a learner with nothing behind it stands at the snapshot's versions."""
        self.accounts = [
            Account(FragmentId(p), adopted_version=head.version) for p, head in enumerate(self._ledger.heads)
        ]
        self._adoptions = [deque() for _ in self.accounts]
        self._adopted_heads = list(self._ledger.heads)
        self._taken = [{} for _ in self.accounts]
        self._floor = self._position(None)

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
        self._uploads.collected_at(message.fragment, message.collect_at)
        return self._sample_if_ready(message.fragment)

    def _sample_if_ready(self, fragment: FragmentId) -> list[Effect]:
        """Sample once the asked-for version is adopted and at least one inner step was done on it. What was refused is
        tried again, with what was trained since, if the round is still open then; H steps later at the earliest, so
        that a learner whose work is never accepted does not spend its link on it."""
        asked = self._asked.get(fragment)
        account = self.accounts[fragment]
        if asked is None or fragment in self._sampling or fragment in self._encoding:
            return []
        if account.undecided is not None:
            return []
        if account.adopted_version > asked.version:
            del self._asked[fragment]
            return []
        if account.adopted_version < asked.version or self._adoptions[fragment] or self.step <= account.adopted_step:
            return []
        if self.step < self._again_at.get(fragment, 0) or not self._has_room(fragment):
            return []
        self._sampling[fragment] = asked
        return [TakeSample(fragment, asked.round)]

    def _has_room(self, fragment: FragmentId) -> bool:
        """On a link that can't keep up every n-th round of a fragment is taken part in. The oldest open round goes
        first: others with such a link take the same one then, and are merged together. In lockstep the schedule alone
        decides."""
        if self._sync.lockstep:
            return True
        sampled_at = self._sampled_at.get(fragment)
        if sampled_at is not None and self._uploads.rests(self.step - sampled_at):
            return False
        return self._uploads.has_room(being_encoded=len(self._sampling) + len(self._encoding))

    def sample_taken(self, event: SampleTaken) -> list[Effect]:
        asked = self._sampling.pop(event.fragment, None)
        if asked is None:
            return []
        account = self.accounts[event.fragment]
        self._boundary(event.step, event.tokens, event.cursor)
        self._sampled_at[event.fragment] = event.step
        steps, tokens = event.step - account.adopted_step, event.tokens - account.adopted_tokens
        undecided = account.sample(event.step, event.tokens)
        draft = Contribution(
            id=ContributionId(self._peer, event.fragment, self._adopted_heads[event.fragment].base, event.step),
            round=asked.round,
            attempt=asked.attempt,
            base_version=account.adopted_version,
            first_step=account.first_step,
            steps=steps,
            tokens=tokens,
            tokens_unmerged=undecided.tokens,
            cursor=event.cursor,
            blob=BlobRef(self._adopted_heads[event.fragment].base, 0),
        )
        codec = self._uploads.take_codec(rules_at(self._rules, self._ledger.amended))
        self._encoding[event.fragment] = _Draft(draft, codec)
        return self._tell(Sampled(round=asked.round, fragment=event.fragment, attempt=asked.attempt))

    def codec_for(self, fragment: FragmentId) -> CodecSpec | None:
        """Of a sample that is to be encoded; none if none is."""
        draft = self._encoding.get(fragment)
        return None if draft is None else draft.codec

    def delta_encoded(self, event: DeltaEncoded) -> list[Effect]:
        draft = self._encoding.pop(event.fragment, None)
        undecided = self.accounts[event.fragment].undecided
        if draft is None or undecided is None:
            return [ForgetBlob(event.blob), *self._sample_if_ready(event.fragment)]
        contribution = replace(draft.contribution, blob=event.blob)
        undecided.contribution = contribution
        self._uploads.encoded(draft.codec, contribution)
        if self._syncer is None:
            return []
        self._uploads.add(contribution)
        return [self._send(contribution), *self._next_upload()]

    # -- uploads --------------------------------------------------------------------------------------------------

    def _next_upload(self) -> list[Effect]:
        return [] if self._syncer is None else [*self._uploads.next()]

    def upload_done(self, event: UploadDone) -> list[Effect]:
        self._uploads.done(event)
        for account in self.accounts:
            if account.undecided is not None and account.contribution_blob() == event.blob:
                account.undecided.uploaded = True
        return self._upload_over(event.blob)

    def upload_failed(self, event: UploadFailed) -> list[Effect]:
        note = Note("upload", f"upload of {event.blob.digest[:12]} failed: {event.reason}", "warning")
        return [note, *self._upload_over(event.blob)]

    def _hand_in_again(self) -> list[Effect]:
        """What is neither uploaded nor on its way: its upload failed, so it is announced and tried again."""
        effects: list[Effect] = []
        for account in self.accounts:
            undecided = account.undecided
            if undecided is None or undecided.contribution is None or undecided.uploaded:
                continue
            contribution = undecided.contribution
            if not self._uploads.has(contribution) and not self._merged_already(account, contribution):
                effects.append(self._send(contribution))
                self._uploads.add(contribution)
        return effects + self._next_upload()

    def _upload_over(self, blob: BlobRef) -> list[Effect]:
        self._uploads.over(blob)
        return self._next_upload()

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
        if self._merged_already(account, undecided.contribution):
            return []
        blob = undecided.contribution.blob
        dropped = account.refuse()
        self._again_at[account.fragment] = self.step + self._sync.interval_steps
        self._uploads.withdraw(blob)
        note = Note("contribution", f"fragment {account.fragment} refused, carried on: {message.reason}")
        effects: list[Effect] = [*dropped, ForgetBlob(blob), note, *self._next_upload()]
        return effects + self._sample_if_ready(account.fragment)

    def _merged_already(self, account: Account, contribution: Contribution) -> bool:
        """A commit that takes it is on our chain already, only not adopted yet: that outranks a refusal. The
        ledger's own memory does not reach as far back as one who was away for long may need."""
        return contribution.id in self._taken[account.fragment]

    # -- adoption -------------------------------------------------------------------------------------------------

    def reached(self, step: Step) -> list[Effect]:
        """The fold reached a version: order its adoption."""
        fragment = step.fragment
        undecided = self.accounts[fragment].undecided
        mine = tuple(taken for commit in step.commits for taken in commit.participants if taken.peer == self._peer)
        contribution = None if undecided is None else undecided.contribution
        known = None if contribution is None else contribution.id
        remembered = all(id_of(taken, fragment) == known for taken in mine)
        self._adoptions[fragment].append(_Adoption(step, mine, remembered))
        if not remembered:
            return [Reset(fragment, step.version)]
        if not step.commits:
            return [Adopt(fragment, step.version, None, CARRY_ALL)]
        blob = contribution.blob if mine and contribution is not None else None
        return [Adopt(fragment, step.version, blob, step.commits[-1].rbar)]

    def adopted(self, event: Adopted) -> list[Effect]:
        queue = self._adoptions[event.fragment]
        if not queue or queue[0].step.version != event.version:
            return [Note("adopt", f"adoption of version {event.version} was not asked for", "error")]
        adoption = queue.popleft()
        account = self.accounts[event.fragment]
        self._boundary(event.step, event.tokens, None)
        if adoption.step.commits and not adoption.abandoned:
            self._adopted_heads[event.fragment] = head_of(adoption.step.commits[-1], adoption.step.base)
            self._taken[event.fragment] = {
                claim: version for claim, version in self._taken[event.fragment].items() if version > event.version
            }
        effects = self._book(account, adoption, event)
        self._move_floor()
        return effects + self._sample_if_ready(event.fragment)

    def _book(self, account: Account, adoption: _Adoption, event: Adopted) -> list[Effect]:
        taken = adoption.taken
        if adoption.abandoned:
            return self._book_abandoned(account, adoption, event)
        for commit in adoption.step.commits:
            mine = sum(each.tokens_unmerged for each in commit.participants if each.peer == self._peer)
            if mine:
                self._merged.append((commit.header.seq, account.fragment, mine))
        if not taken:
            return list(account.adopt(event.version, event.step, event.tokens, event.scale_ppm))
        forget: list[Effect] = []
        if (blob := account.contribution_blob()) is not None:
            self._uploads.withdraw(blob)
            forget = [ForgetBlob(blob), *self._next_upload()]
        if adoption.remembered:
            credited = sum(each.tokens_unmerged for each in taken)
            merged, dropped = account.merge(event.version, event.step, event.tokens, event.scale_ppm, credited)
            return [TokensMerged(account.fragment, event.version, merged), *dropped, *forget]
        merged, last_step = sum(each.tokens_unmerged for each in taken), taken[-1].last_step
        corrections = account.restart(event.version, event.step, event.tokens, merged=merged, last_step=last_step)
        return [TokensMerged(account.fragment, event.version, merged), *corrections, *forget]

    def _book_abandoned(self, account: Account, adoption: _Adoption, event: Adopted) -> list[Effect]:
        """Adopted after all, on the way back to what goes on: what its commits took of ours is in nobody's Theta."""
        effects = self._book(account, replace(adoption, abandoned=False), event)
        merged = sum(each.tokens for each in effects if isinstance(each, TokensMerged))
        self._merged = deque((each for each in self._merged if each[0] <= self._ledger.seq), maxlen=MERGED_REMEMBERED)
        account.adopted_version = self._adopted_heads[account.fragment].version
        return [*effects, *self._take_back(account, merged)]

    def _take_back(self, account: Account, merged: int) -> list[Effect]:
        if not merged:
            return []
        account.merged -= merged
        fragment = account.fragment
        return [TokensMerged(fragment, account.adopted_version, -merged), TokensDropped(fragment, merged, "abandoned")]

    def rewound(self, to: Seq) -> list[Effect]:
        """The owner's reform left behind what came after `to`, and our ledger is back there. Fragments that differ are
        on their way and what the replica carries stays; work that the abandoned commits took is lost with them."""
        self._unadopted = deque(each for each in self._unadopted if each.seq <= to)
        if self._floor.seq > to:
            self._floor = self._position(None)
        effects: list[Effect] = []
        for account, head in zip(self.accounts, self._ledger.heads, strict=True):
            p = account.fragment
            for adoption in self._adoptions[p]:
                adoption.abandoned = adoption.abandoned or adoption.step.version > head.version
            if account.adopted_version > head.version:
                self._adopted_heads[p], account.adopted_version = head, head.version
            self._asked.pop(p, None)
            self._taken[p] = {claim: version for claim, version in self._taken[p].items() if version <= head.version}
            effects += self._take_back(account, sum(n for seq, q, n in self._merged if q == p and seq > to))
        self._merged = deque((each for each in self._merged if each[0] <= to), maxlen=MERGED_REMEMBERED)
        return effects

    def entry_taken(self, entry: Entry) -> None:
        """An entry is new on our ledger. No checkpoint resumes beyond the last commit of a run: that it is finished is
        for whoever resumes to hear from the chain."""
        if isinstance(entry, Commit):
            for each in entry.participants:
                if each.peer == self._peer:
                    self._taken[entry.fragment][id_of(each, entry.fragment)] = entry.version
        if self._ledger.finished is not None:
            return
        commit = (entry.fragment, entry.version) if isinstance(entry, Commit) else None
        self._unadopted.append(self._position(commit))

    def _position(self, commit: tuple[FragmentId, Version] | None) -> _Position:
        ledger = self._ledger
        return _Position(
            term=ledger.term,
            seq=ledger.seq,
            head_digest=ledger.head_digest,
            tokens_per_fragment=tuple(ledger.tokens),
            progress=ledger.progress,
            roster=ledger.roster,
            roster_seq=ledger.roster_seq,
            opened=ledger.opened,
            amended=ledger.amended,
            lineage=ledger.lineage,
            branch=ledger.branch,
            commit=commit,
        )

    def _move_floor(self) -> None:
        """To the newest position with no unadopted commit before it."""
        while self._unadopted:
            commit = self._unadopted[0].commit
            if commit is not None and self._adopted_heads[commit[0]].version < commit[1]:
                break
            self._floor = self._unadopted.popleft()

    def _resume_at(self) -> SnapshotLoaded:
        """Commits after it that are adopted already are in `heads`: the ledger passes over them."""
        self._move_floor()
        assert self._floor.opened is not None
        return SnapshotLoaded(
            branch=self._floor.branch,
            term=self._floor.term,
            seq=self._floor.seq,
            head_digest=self._floor.head_digest,
            heads=tuple(self._adopted_heads),
            num_elements=self._ledger.num_elements,
            layout_digest=self._ledger.layout_digest,
            tokens_per_fragment=self._floor.tokens_per_fragment,
            progress=self._floor.progress,
            roster=self._floor.roster,
            roster_seq=self._floor.roster_seq,
            opened=self._floor.opened,
            amended=self._floor.amended,
            lineage=self._floor.lineage,
        )

    # -- inner steps ----------------------------------------------------------------------------------------------

    def step_done(self, event: StepDone, now: MonoMs) -> list[Effect]:
        self._boundary(event.step, event.tokens, event.cursor)
        self._step_time_us = event.step_time_us
        self._uploads.stepped(event.step_time_us, now)
        self._loss = event.loss
        effects: list[Effect] = []
        for fragment in sorted(self._asked, key=lambda p: self._asked[p].round):
            effects += self._sample_if_ready(fragment)
        due = self._progress_at is None or now - self._progress_at >= PROGRESS_EVERY_MS
        if due and self._syncer is not None and event.step_time_us > 0:
            self._progress_at = now
            effects += [*self._tell(self._progress()), *self._hand_in_again()]
        return effects

    def _progress(self) -> Progress:
        return Progress(
            step=self.step,
            tokens=self.tokens,
            step_time_us=self._step_time_us,
            upload_bytes_per_s=self._uploads.bytes_per_s,
            loss=self._loss,
            cursor=self._cursor,
            turn=self._uploads.turn(),
            uplink=self.uplink(),
        )

    def uplink(self) -> str:
        """What it makes of its way up, for people."""
        return self._uploads.text()

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
                resume_at=self._resume_at(),
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
