"""A round: what the quorum's decision and the commit need to know of it. Facts, no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, FragmentId, MonoMs, OuterSpec, PeerId, SyncSpec, Version
from geo_diloco.protocol.effects import MergeInput
from geo_diloco.protocol.events import Merged
from geo_diloco.protocol.holdings import Held
from geo_diloco.protocol.membership import Member
from geo_diloco.protocol.messages import Commit, EntryHeader, LeftOut, Participant
from geo_diloco.protocol.plausibility import Counted
from geo_diloco.protocol.quorum import RoundFacts
from geo_diloco.protocol.tally import Outlook, Tally

LEFT_OUT_MAX = 128
"""Named in a commit; more are left out of the list as well: everyone keeps the chain."""


@dataclass(frozen=True, slots=True)
class Closing:
    """What was known when a round closed; goes into its commit."""

    at: MonoMs
    taken: tuple[Held, ...]
    """Sorted by peer id."""
    left_out: tuple[LeftOut, ...]
    quorum_wait_ms: int
    grace_ms: int
    reason: str
    live: int
    outer: OuterSpec
    """In force then; an amendment is for rounds that close later."""
    counted: tuple[Counted, ...] = ()
    """What of each of `taken` counts."""
    portion: float = 1.0
    """Of those who train, how much of their work is in it (`portion.py`)."""


@dataclass(slots=True)
class Round:
    """An open round of one fragment."""

    number: int
    fragment: FragmentId
    version: Version
    """Current version: what a fresh contribution is based on."""
    base: Digest
    opened_at: MonoMs
    due_again: int
    """Reading of the inner clock, in micro-steps, at which the fragment is due again."""
    attempt: int = 1
    sampled: dict[PeerId, int] = field(default_factory=dict)
    """Who said that it sampled, and how many milliseconds after opening."""
    quorum_at: MonoMs | None = None
    was_due: bool = False
    """Whether the fragment was due again by then, because of a slow uplink."""
    closing: Closing | None = None
    """Set while it is being merged or sealed."""
    retry_at: MonoMs | None = None
    """Not merged again before then, after a failure that is nobody's fault."""
    look_at: MonoMs | None = None
    """When the quorum's decision changes by time alone."""
    reason: str = "opened"

    touched: bool = True
    """Whether anything happened to it since it was looked at last."""
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally(self.base)

    def is_fresh(self, held: Held) -> bool:
        return held.contribution.id.base == self.base

    def facts(self, now: MonoMs, outlook: Outlook, due_again_ms: int | None, sync: SyncSpec) -> RoundFacts:
        """Everything `quorum.decide` asks for. Notes when the quorum was reached."""
        if self.tally.fresh < sync.quorum:
            self.quorum_at, self.was_due = None, False
        elif self.quorum_at is None:
            self.quorum_at, self.was_due = now, due_again_ms == 0 and self.tally.num_slow > 0
        return self.tally.facts(
            now,
            outlook,
            opened_at=self.opened_at,
            quorum_at=self.quorum_at,
            due_again_at=None if due_again_ms is None else MonoMs(now + due_again_ms),
            was_due=self.was_due,
            sync=sync,
        )


def close_round(
    round_: Round,
    held: dict[PeerId, Held],
    live: list[Member],
    *,
    now: MonoMs,
    reason: str,
    outer: OuterSpec,
) -> Closing:
    """Freeze what goes into the merge."""
    taken = tuple(held[peer] for peer in sorted(held) if held[peer].ready)
    taken_peers = {item.contribution.id.peer for item in taken}
    left_out = tuple(
        LeftOut(peer=member.peer, reason=_why_left_out(member, round_, held))
        for member in live
        if member.peer not in taken_peers
    )[:LEFT_OUT_MAX]
    quorum_at = now if round_.quorum_at is None else round_.quorum_at
    return Closing(
        at=now,
        taken=taken,
        left_out=left_out,
        quorum_wait_ms=quorum_at - round_.opened_at,
        grace_ms=now - quorum_at,
        reason=reason,
        live=len(live),
        outer=outer,
    )


def _why_left_out(member: Member, round_: Round, held: dict[PeerId, Held]) -> str:
    if member.peer in held:
        return "uploading"
    return "encoding" if member.peer in round_.sampled else "not sampled yet"


def merge_inputs(closing: Closing) -> tuple[MergeInput, ...]:
    return tuple(
        MergeInput(
            peer=item.contribution.id.peer,
            blob=item.contribution.blob,
            base_version=item.contribution.base_version,
            weight=counted.weight,
            scale=counted.scale,
        )
        for item, counted in zip(closing.taken, closing.counted, strict=True)
    )


def participants(closing: Closing) -> tuple[Participant, ...]:
    """As the commit lists them: weights sum to the merge's portion."""
    total = sum(counted.weight for counted in closing.counted)
    return tuple(
        Participant(
            peer=item.contribution.id.peer,
            base=item.contribution.id.base,
            base_version=item.contribution.base_version,
            first_step=item.contribution.first_step,
            last_step=item.contribution.id.last_step,
            steps=item.contribution.steps,
            tokens=counted.tokens,
            tokens_unmerged=counted.tokens_unmerged,
            contribution=item.contribution.blob,
            weight=counted.weight / total * closing.portion,
            norm=counted.norm,
        )
        for item, counted in zip(closing.taken, closing.counted, strict=True)
    )


def participants_of(round_: Round) -> tuple[Participant, ...]:
    """Of a round that is being merged."""
    assert round_.closing is not None
    return participants(round_.closing)


def commit_of(round_: Round, merged: Merged, header: EntryHeader, *, tokens_total: int, progress: float) -> Commit:
    """The entry of a round that was merged."""
    closing = round_.closing
    assert closing is not None
    return Commit(
        header=header,
        fragment=round_.fragment,
        version=Version(round_.version + 1),
        round=round_.number,
        attempt=round_.attempt,
        update=merged.update,
        state_digest=merged.state_digest,
        momentum_digest=merged.momentum_digest,
        eta=closing.outer.eta,
        mu=closing.outer.mu,
        participants=participants(closing),
        left_out=closing.left_out,
        quorum_wait_ms=closing.quorum_wait_ms,
        grace_ms=closing.grace_ms,
        close_reason=closing.reason,
        rbar=merged.rbar,
        rho=merged.rho,
        tokens_total=tokens_total,
        progress=progress,
    )
