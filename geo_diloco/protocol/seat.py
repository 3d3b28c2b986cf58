"""Who this process is, to the others and in an election."""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import BootId, PeerId, RunRules
from geo_diloco.protocol.election.ballots import PeerBoot, VoteRecord
from geo_diloco.protocol.election.books import ElectionRules, Myself
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.history import ENTRIES_KEPT


@dataclass(frozen=True, kw_only=True, slots=True)
class HelloFacts:
    """What this process says of itself in Hello."""

    host: str = ""
    software: str = ""
    address: str = ""
    """`host:port` where it serves; empty if it only dials out."""
    proof: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """What this process brings to an election. By default it takes no part."""

    may_serve: bool = False
    """Can be syncer: it is reachable, admitted, and has the whole chain."""
    may_elect: bool = False
    """Willing to be elector: it keeps the chain and the updates on its disk."""
    record: VoteRecord | None = None
    """From its disk."""
    fresh_enrolment: str = ""
    """Random; for a disk that has no record yet."""
    machine: str = ""
    """What tells hosts apart."""
    jitter: int = 0
    """Random."""
    updates_bytes_kept: int | None = None
    """What updates may take on its disk once snapshots contain them; all of them stay, if none is given."""
    entries_kept: int = ENTRIES_KEPT
    """How many entries stay in memory for a way back once snapshots contain them; each participant of a commit counts
    for one."""


def election_of(peer: PeerId, boot: BootId, rules: RunRules, seat: Seat, address: str) -> Election:
    """The election machine of this process, by the run's rules."""
    me = Myself(
        peer=PeerBoot(peer, boot),
        fresh_enrolment=seat.fresh_enrolment,
        host=seat.machine,
        address=address if seat.may_serve else "",
        may_serve=seat.may_serve,
        may_elect=seat.may_elect,
    )
    spec = rules.election
    times = ElectionRules(
        owner=rules.founder,
        lease_ms=round(spec.lease_seconds * 1000),
        tail_max=rules.sync.num_fragments,
        electors_wanted=spec.electors,
        one_machine=spec.one_machine,
    )
    return Election(me, times, seat.record, jitter=seat.jitter)
