"""What an election shows of itself: every decision with its reason, so that nobody has to guess what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_diloco.manifest import BranchId, PeerId, Seq, Term
from geo_diloco.protocol.election.ballots import Elector, Head, Rank

ElectionRole = Literal["peer", "candidate", "syncer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectionStatus:
    """What `status` shows of an election."""

    role: ElectionRole
    branch: BranchId
    term: Term
    head: Head
    held: Rank
    durable_seq: Seq | None
    roster: tuple[PeerId, ...]
    follows: PeerId | None
    syncer: tuple[PeerId, str] | None
    """Who serves the newest term that counts, as its `open` proves, and its address."""
    seat: Elector
    """This peer as an elector, whether it is one or not."""
    best: Head
    """The highest entry that is whole on its disk."""
    offers: tuple[tuple[Elector, Rank], ...]
    """Who has offered lately, and how far its disk goes."""
    candidacy: str
    """Why it asks, or does not."""
    vote: str
    """Its last decision on a vote, or what binds it now."""
    append: str
    """Why nothing may be appended, for a syncer; empty if it may."""
    roster_plan: str
