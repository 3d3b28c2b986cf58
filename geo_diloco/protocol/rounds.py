"""A round: what the quorum's decision and the commit need to know of it. Facts, no decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, FragmentId, MonoMs, OuterSpec, PeerId, SyncSpec, Version
from geo_diloco.protocol.effects import (
    MergeInput,
)
from geo_diloco.protocol.events import Merged
from geo_diloco.protocol.holdings import Held
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import Member
from geo_diloco.protocol.messages import Commit, EntryHeader, LeftOut, Participant
from geo_diloco.protocol.plausibility import Counted
from geo_diloco.protocol.quorum import RoundFacts

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
    sampled: set[PeerId] = field(default_factory=set)
    quorum_at: MonoMs | None = None
    closing: Closing | None = None
    """Set while it is being merged or sealed."""
    retry_at: MonoMs | None = None
    """Not merged again before then, after a failure that is nobody's fault."""
    look_at: MonoMs | None = None
    """When the quorum's decision changes by time alone."""
    reason: str = "opened"

    def is_fresh(self, held: Held) -> bool:
        return held.contribution.id.base == self.base


@dataclass(frozen=True, slots=True)
class Estimates:
    """Moving averages behind the grace window, in milliseconds; none until measured."""

    quorum_ms: int | None = None
    sync_ms: int | None = None


def round_facts(
    round_: Round,
    held: dict[PeerId, Held],
    live: list[Member],
    *,
    now: MonoMs,
    due_again_ms: int | None,
    estimates: Estimates,
    sync: SyncSpec,
) -> RoundFacts:
    """Everything `quorum.decide` asks for. Notes in the round when its quorum was reached."""
    ready = {peer: item for peer, item in held.items() if item.ready}
    fresh = [peer for peer, item in ready.items() if round_.is_fresh(item)]
    if len(fresh) < sync.quorum:
        round_.quorum_at = None
    elif round_.quorum_at is None:
        round_.quorum_at = now
    missing = [member for member in live if _could_deliver(member, round_, held)]
    due_again_at = None if due_again_ms is None else MonoMs(now + due_again_ms)
    step_times_us = {member.peer: member.step_time_us for member in live}
    fresh_step_times_us = [step_times_us.get(peer, 0) for peer in fresh]
    return RoundFacts(
        now=now,
        opened_at=round_.opened_at,
        quorum_at=round_.quorum_at,
        fresh=len(fresh),
        late=len(ready) - len(fresh),
        live=len(live),
        missing=len(missing),
        expected_missing=sum(_expected(member, round_, held, due_again_at, sync) for member in missing),
        slack_ms=_slack_ms(sorted(step_times_us.values()), estimates, sync),
        cap_ms=max(fresh_step_times_us, default=0) // 1000,
        due_again_at=due_again_at,
    )


def _could_deliver(member: Member, round_: Round, held: dict[PeerId, Held]) -> bool:
    """Not delivered yet, and not kept from sampling by an undecided contribution to an older version."""
    item = held.get(member.peer)
    return item is None or (not item.ready and round_.is_fresh(item))


def _expected(
    member: Member, round_: Round, held: dict[PeerId, Held], due_again_at: MonoMs | None, sync: SyncSpec
) -> bool:
    """It said that it sampled, or it usually delivers before the window must close."""
    if member.peer in round_.sampled or member.peer in held:
        return True
    if due_again_at is None or member.delivery_ms is None:
        return member.delivery_ms is None
    latest_ms = int(sync.grace_gamma * (due_again_at - round_.opened_at))
    return member.delivery_ms <= latest_ms


def _slack_ms(step_times_us: list[int], estimates: Estimates, sync: SyncSpec) -> int | None:
    """Eq. 3 of arXiv 2604.21428."""
    if not step_times_us or estimates.quorum_ms is None or estimates.sync_ms is None:
        return None
    median_us = step_times_us[len(step_times_us) // 2]
    return sync.overlap_steps * median_us // 1000 - (estimates.quorum_ms + estimates.sync_ms)


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
    """As the commit lists them, weights normalised."""
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
            weight=counted.weight / total,
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


def merged_or_merging(ledger: Ledger, peer: PeerId, rounds: dict[FragmentId, Round]) -> tuple[int, ...]:
    """Per fragment: the last inner step of a peer that is merged or about to be."""
    until = [ledger.merged_until.get((peer, FragmentId(p)), 0) for p in range(len(ledger.heads))]
    for fragment, round_ in rounds.items():
        for item in round_.closing.taken if round_.closing is not None else ():
            if item.contribution.id.peer == peer:
                until[fragment] = max(until[fragment], item.contribution.id.last_step)
    return tuple(until)
