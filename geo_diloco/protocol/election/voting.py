"""May an elector vote for this candidate, now? Pure, with its reason: the decision that all safety rests on."""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import MonoMs, Term
from geo_diloco.protocol.election.ballots import PeerBoot, Rank, VoteRecord


@dataclass(frozen=True, slots=True)
class Promise:
    """Until then no vote for anybody but `holder`, because a lease may rest on it."""

    until: MonoMs
    holder: PeerBoot | None
    """None after a start: whoever it was is forgotten."""
    term: Term


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and why."""

    yes: bool
    reason: str


def seconds(ms: int) -> str:
    """`6.2 s`, for people."""
    return f"{ms // 1000}.{ms % 1000 // 100} s"


def binds(promise: Promise | None, candidate: PeerBoot | None, now: MonoMs) -> str | None:
    """Why a promise forbids that candidate; none if it does not."""
    if promise is None or now >= promise.until:
        return None
    left = seconds(promise.until - now)
    if promise.holder is None:
        return f"bound since the start for {left} more"
    if promise.holder == candidate:
        return None
    return f"promise to term {promise.term} for {left} more"


def may_vote(
    record: VoteRecord, *, term: Term, candidate: PeerBoot, rank: Rank, promise: Promise | None, now: MonoMs
) -> Verdict:
    """Rule 13: a vote a term, for one process start, on a chain that has all this elector ever held."""
    if term < record.term:
        return Verdict(False, f"no vote: term {term} is over, this is term {record.term}")
    if term == record.term and record.voted_for not in (None, candidate):
        assert record.voted_for is not None
        return Verdict(False, f"no vote: {record.voted_for.peer[:8]} has it in term {term}")
    if rank.lineage != record.lineage:
        return Verdict(False, f"no vote: {text(rank)} is of another branch")
    bound = binds(promise, candidate, now)
    if bound is not None:
        return Verdict(False, f"no vote: {bound}")
    if rank < record.held:
        return Verdict(False, f"no vote: {text(rank)} ranks below {text(record.held)}, held here")
    return Verdict(True, f"vote for {candidate.peer[:8]} in term {term}")


def text(rank: Rank) -> str:
    """A rank for people."""
    return f"entry {rank.seq} of term {rank.term}"
