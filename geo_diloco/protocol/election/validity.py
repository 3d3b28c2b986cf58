"""May this entry follow that one? Pure, with the reason: what everybody checks before an entry is on anybody's chain.

It stands apart from the tree because it is what a liar is measured by: who may sign, in which term, on whose votes,
with which roster. Signatures themselves, and those of the votes, the shell has verified before.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import BranchId, PeerId
from geo_diloco.protocol.amendments import why_not_changes
from geo_diloco.protocol.election.ballots import ELECTORS_MAX, EntryFacts, Opened, PeerBoot, Roster, majority


@dataclass(frozen=True, slots=True)
class Before:
    """The entry that is followed, and what is in force after it."""

    entry: EntryFacts
    branch: BranchId
    lineage: int
    roster: Roster
    opened: Opened | None
    """Of its term; none between `found` or `reform` and the first `open`."""
    amendments: int = 0
    """Number of the newest."""


def why_not_next(entry: EntryFacts, before: Before, owner: PeerId) -> str | None:
    """Rules 1, 14, 21 and 27: everything about an entry but what the rest of the tree says of it."""
    if entry.seq != before.entry.seq + 1:
        return f"seq {entry.seq} does not follow {before.entry.seq}"
    if before.entry.kind == "finished" and entry.kind != "open":
        return "the run is finished"
    if entry.kind == "reform":
        return _why_not_reform(entry, before, owner)
    if entry.branch != before.branch:
        return f"branch {entry.branch[:12]}, not {before.branch[:12]}"
    if entry.kind == "open":
        return _why_not_open(entry, before)
    why_not = _why_not_served(entry, before)
    return _why_not_amendment(entry, before, owner) if why_not is None and entry.kind == "amendment" else why_not


def _why_not_reform(entry: EntryFacts, before: Before, owner: PeerId) -> str | None:
    if entry.signer != owner:
        return "a reform is signed by the run's owner"
    if entry.lineage <= before.lineage or entry.term != 1:
        return f"reform {entry.lineage} after {before.lineage}, term {entry.term}"
    peers = {elector.peer for elector in entry.roster or ()}
    named = entry.roster is not None and 1 <= len(peers) == len(entry.roster) <= ELECTORS_MAX
    return None if named else "a reform names its electors"


def _why_not_open(entry: EntryFacts, before: Before) -> str | None:
    opened = entry.opened
    if opened is None or opened.syncer != entry.signer:
        return f"open of term {entry.term} is not signed by its syncer"
    first = before.entry.kind == "found"
    if entry.term <= before.entry.term and not (first and entry.term == before.entry.term):
        return f"term {entry.term} is not above {before.entry.term}"
    return why_not_elected(entry, opened, before.roster)


def why_not_elected(entry: EntryFacts, opened: Opened, roster: Roster) -> str | None:
    """Whether the votes in `open` are of a majority of that roster, for this process start, on this head."""
    candidate = PeerBoot(opened.syncer, opened.boot)
    seats = {elector.peer: elector.enrolment for elector in roster}
    voters = {
        vote.elector
        for vote in opened.votes
        if (vote.term, vote.candidate, vote.head) == (entry.term, candidate, entry.prev)
        and seats.get(vote.elector) == vote.enrolment
    }
    needed = majority(len(roster))
    return None if len(voters) >= needed else f"open of term {entry.term} shows {len(voters)} of {needed} votes"


def _why_not_served(entry: EntryFacts, before: Before) -> str | None:
    if before.opened is None or entry.term != before.entry.term:
        return f"term {entry.term} was not opened before entry {entry.seq}"
    if entry.signer != before.opened.syncer:
        return f"entry {entry.seq} is not signed by the syncer of term {entry.term}"
    if entry.kind == "roster":
        return why_not_next_roster(before.roster, entry.roster or (), entry.signer)
    return None


def _why_not_amendment(entry: EntryFacts, before: Before, owner: PeerId) -> str | None:
    """Who signed the order that it shows, the shell has verified."""
    amends = entry.amends
    if amends is None or amends.owner != owner:
        return "an amendment is ordered by the run's owner"
    if amends.number != before.amendments + 1:
        return f"amendment {amends.number} does not follow {before.amendments}"
    return why_not_changes(amends.changes)


def why_not_next_roster(old: Roster, new: Roster, syncer: PeerId) -> str | None:
    """Rosters change by one elector at a time, unless the syncer was the whole of it."""
    peers = [elector.peer for elector in new]
    if not 1 <= len(peers) <= ELECTORS_MAX or len(set(peers)) != len(peers):
        return f"a roster of {len(peers)}"
    alone = len(old) == 1 and old[0].peer == syncer
    if alone and old[0] in new:
        return None
    came = [elector for elector in new if elector not in old]
    went = [elector for elector in old if elector not in new]
    if len(came) + len(went) != 1:
        return f"roster changes by {len(came) + len(went)} electors at once"
    return None
