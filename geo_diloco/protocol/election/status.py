"""What an election shows of itself: every decision with its reason, so that nobody has to guess what it waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_diloco.manifest import BranchId, PeerId, Seq, Term
from geo_diloco.protocol.election.ballots import Elector, Head, Rank

ElectionRole = Literal["peer", "candidate", "syncer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatStatus:
    """An elector, or a peer that could serve, as the peer that is asked hears it."""

    elector: Elector
    heard_ms: int | None
    """Since it was heard of last, 0 for this peer itself; none if it was not, by this peer in this term."""
    here: bool
    """Heard of lately enough to count."""


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
    seats: tuple[SeatStatus, ...] = ()
    """Of the roster. Electors tell the syncer that they are here, and a peer that could serve if nobody does: one that
    follows somebody else knows of itself and of him."""
    standbys: tuple[SeatStatus, ...] = ()
    """Beside whoever serves: the peers that are here and could."""
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
