"""What a syncer may conclude from its electors' acknowledgements: how long it may commit, and what is durable.

Pure functions of the roster of the newest entry. An elector counts by its enrolment: the same peer with another disk
is nobody. The syncer's own disk counts like any other, and it hears itself at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from geo_diloco.manifest import MonoMs, PeerId, Seq
from geo_diloco.protocol.election.ballots import Elector, Roster, majority


@dataclass(slots=True)
class Acker:
    """A peer that offers or acks, as the syncer of this term knows it."""

    elector: Elector
    first_heard: MonoMs
    heard_at: MonoMs
    sent_at: MonoMs | None = None
    """When the newest Append that it acked was sent."""
    acked: Seq = Seq(-1)
    """It has everything up to here of our chain on disk."""


def of_majority(values: list[int], num_electors: int) -> int | None:
    """The highest value that a majority of that many electors has reached."""
    needed = majority(num_electors)
    return sorted(values, reverse=True)[needed - 1] if len(values) >= needed else None


def seated(roster: Roster, ackers: Mapping[PeerId, Acker], me: Elector) -> list[Acker | None]:
    """Those of the roster that were heard of; none stands for ourselves."""
    found: list[Acker | None] = []
    for elector in roster:
        acker = ackers.get(elector.peer)
        if elector.peer == me.peer:
            found += [None] if elector.enrolment == me.enrolment else []
        elif acker is not None and acker.elector.enrolment == elector.enrolment:
            found.append(acker)
    return found


def confirmed_at(roster: Roster, ackers: Mapping[PeerId, Acker], me: Elector, now: MonoMs) -> MonoMs | None:
    """Sending time of the newest heartbeat that a majority has acked."""
    times: list[int] = []
    for acker in seated(roster, ackers, me):
        if acker is None:
            times.append(now)
        elif acker.sent_at is not None:
            times.append(acker.sent_at)
    newest = of_majority(times, len(roster))
    return None if newest is None else MonoMs(newest)


def acked_by_majority(roster: Roster, ackers: Mapping[PeerId, Acker], me: Elector, own: Seq) -> Seq | None:
    """The highest entry that a majority has on disk with all before it. `own`: how far our own disk goes."""
    reached = [own if acker is None else acker.acked for acker in seated(roster, ackers, me)]
    highest = of_majority([int(seq) for seq in reached], len(roster))
    return None if highest is None or highest < 0 else Seq(highest)


def durable(acked: Seq | None, opened_at: Seq, before: Seq) -> Seq:
    """Rule 15: an entry of an older term is durable only by way of one of ours."""
    return acked if acked is not None and acked >= opened_at and acked > before else before
