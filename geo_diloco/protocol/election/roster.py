"""Who should be electors next? One pure function, with its reason.

One elector comes or goes at a time; sizes are odd except in passing; a silent elector is replaced, never just missed:
with nobody to take its place the roster stays, because a smaller one would need the same electors and bear less.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.protocol.election.ballots import ELECTORS_MAX, Elector, Roster


@dataclass(frozen=True, kw_only=True, slots=True)
class RosterFacts:
    """What the decision depends on."""

    roster: Roster
    syncer: Elector
    standbys: tuple[Elector, ...]
    """Peers that ack from disk, up to the durable head at least, longest-lived first."""
    silent: tuple[Elector, ...]
    """Electors not heard for long, longest silent first."""
    gone: tuple[Elector, ...]
    """Electors whose peer is here with another disk: that seat will never ack again."""
    wanted: int
    """Electors aimed at: 1, 3, 5 or 7."""
    one_machine: bool
    """All peers share one: the rule about hosts is off."""


@dataclass(frozen=True, slots=True)
class RosterPlan:
    """The next roster, none to leave it, and why."""

    roster: Roster | None
    reason: str


def next_roster(facts: RosterFacts) -> RosterPlan:
    """Rule 23."""
    roster, size = facts.roster, len(facts.roster)
    standbys = _eligible(facts)
    silent = [elector for elector in facts.silent if elector in roster and elector.peer != facts.syncer.peer]
    if size == 1 and roster[0].enrolment == facts.syncer.enrolment:
        return _from_alone(facts, standbys)
    if facts.gone:
        return _without(roster, facts.gone[0], "its disk is gone")
    if silent and (size % 2 == 0 or size >= ELECTORS_MAX):
        return _without(roster, silent[0], "silent")
    if silent and standbys:
        return _with(roster, standbys[0], f"in place of {silent[0].peer[:8]}, silent")
    if size % 2 == 0:
        if standbys and size < facts.wanted:
            return _with(roster, standbys[0], "no even number stays")
        if size == 2:
            return RosterPlan(None, "2 electors: one more peer is needed, none is here")
        newest = next(elector for elector in reversed(roster) if elector.peer != facts.syncer.peer)
        return _without(roster, newest, "no even number stays")
    if silent:
        return RosterPlan(None, f"{silent[0].peer[:8]} is silent and nobody can take its place")
    if size < facts.wanted and len(standbys) >= 2:
        return _with(roster, standbys[0], f"{size} of {facts.wanted} electors")
    if size > facts.wanted:
        return _without(roster, next(e for e in reversed(roster) if e.peer != facts.syncer.peer), "too many")
    if size < facts.wanted:
        return RosterPlan(None, f"{size} of {facts.wanted} electors: {_two_more(standbys)}")
    return RosterPlan(None, f"{size} electors as wanted")


def _from_alone(facts: RosterFacts, standbys: list[Elector]) -> RosterPlan:
    size = min(facts.wanted, 1 + len(standbys))
    size -= 1 - size % 2
    if size == 1:
        return RosterPlan(None, f"alone: {_two_more(standbys)}")
    return RosterPlan((*facts.roster, *standbys[: size - 1]), f"from one elector to {size}")


def _two_more(standbys: list[Elector]) -> str:
    """For people, to whom a standby is a peer that could serve. Whoever keeps the chain on its disk will do here."""
    here = "1 is" if len(standbys) == 1 else f"{len(standbys) or 'none'} are"
    return f"two more peers, learners too, come in together, and {here} here"


def _eligible(facts: RosterFacts) -> list[Elector]:
    """Standbys not on the roster, on hosts of their own."""
    hosts = {elector.host for elector in facts.roster}
    peers = {elector.peer for elector in facts.roster}
    eligible: list[Elector] = []
    for standby in facts.standbys:
        if standby.peer in peers or (standby.host in hosts and not facts.one_machine):
            continue
        hosts.add(standby.host)
        peers.add(standby.peer)
        eligible.append(standby)
    return eligible


def _with(roster: Roster, elector: Elector, why: str) -> RosterPlan:
    return RosterPlan((*roster, elector), f"add {elector.peer[:8]}: {why}")


def _without(roster: Roster, gone: Elector, why: str) -> RosterPlan:
    return RosterPlan(tuple(each for each in roster if each != gone), f"remove {gone.peer[:8]}: {why}")
