"""The owner's reform, from beside the run: it goes on without most of its electors.

Whoever is left is asked how far his disk goes; the owner signs an entry on the best of these heads that names the new
electors, and gives it to those who hold what it follows. They elect, and the rest of the run finds them. What the chain
had beyond that head is abandoned, so this is for electors that are gone for good, and is refused while a majority of
them is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_diloco.errors import ConfigError, DirectoryError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import BranchId, Digest, PeerId, Seq, Term
from geo_diloco.node import owning
from geo_diloco.node.claims import SHOW_S, KeyNotShown, check_head
from geo_diloco.node.owning import DOUBT_S, FIND_S, LOOK_S, Finder, Owned, finding, owned
from geo_diloco.protocol.election.ballots import ELECTORS_MAX, Elector, Rank
from geo_diloco.protocol.messages import EntryHeader, Found, Reform
from geo_diloco.runtime.session import fetch_entries, give_order
from geo_diloco.runtime.wire import Order, Signed, open_entry, seal_entry, seal_order

LOOK_AROUND_S = 12.0
OFFERED_S = 6.0
"""Offers come every 5 s at least, and a peer shows what it was offered for 4 s: who is gone is not seen any more at the
end of the look around."""
CATCH_UP_S = 30.0
"""Those who could serve fetch by themselves what others offer."""
SERVES_S = 120.0
ALL_LIVE = "all-live"
LINEAGE_LEAP_MAX = 1000
"""By how much a peer's reform may be later than the one that is gone on with: a claim beyond is a lie, and a reform
that counts from it could be the last one, because numbers end."""


Offers = dict[str, tuple[float, Any]]
"""By peer: what it has offered to somebody, and when that was seen last."""


@dataclass(frozen=True, kw_only=True)
class Present:
    """A peer that is here, as an elector to be."""

    elector: Elector
    held: Rank
    """How far its disk goes."""
    url: str
    """Empty if it only dials out: others have told of it."""
    head: tuple[Rank, Digest] | None = None
    """The highest entry that is whole on its disk; of those with a URL."""


@dataclass(frozen=True, kw_only=True)
class Intended:
    """A reform before it is signed."""

    parent: tuple[Rank, Digest]
    lineage: int
    roster: tuple[Present, ...]
    gone: tuple[str, ...]
    """Electors that are not here."""
    num_old: int
    left_out: tuple[str, ...] = ()
    """Electors that are here only by the word of whoever serves: they follow him, and are not offered to anybody."""

    def text(self) -> str:
        names = ", ".join(each.elector.peer[:8] for each in self.roster)
        gone = ", ".join(peer[:8] for peer in self.gone) or "none"
        rank = self.parent[0]
        behind = [each.elector.peer[:8] for each in self.roster if each.held > rank]
        lines = [
            f"reform {self.lineage}: the run goes on after entry {rank.seq} of term {rank.term}",
            f"new electors: {names}",
            f"gone for good are then {len(self.gone)} of {self.num_old} electors: {gone}",
            "what the run had after that entry, if anything, is abandoned; work that it took is lost with it",
        ]
        if self.left_out:
            names = ", ".join(peer[:8] for peer in self.left_out)
            lines.insert(3, f"following whoever serves now, and no electors any more: {names}")
        return "\n".join(lines + ([f"warning: {', '.join(behind)} holds more than that entry"] if behind else []))


def reform(
    where: str,
    electors: Sequence[str],
    *,
    key: Path | None = None,
    contacts: Sequence[str] = (),
    dry_run: bool = False,
    force: bool = False,
    confirm: Callable[[str], bool],
) -> str:
    """Reform a run; returns what came of it. `electors`: beginnings of peer ids, or `all-live`. `contacts`:
    `HOST:PORT` of peers, where no bootstrap answers. `confirm` is shown what would be done.

    Raises UserError of some kind, DirectoryError or TransferError.
    """
    run = owned(where, key, contacts)
    return asyncio.run(_reform(run, electors, dry_run=dry_run, force=force, confirm=confirm))


async def _reform(
    run: Owned, electors: Sequence[str], *, dry_run: bool, force: bool, confirm: Callable[[str], bool]
) -> str:
    async with finding(run) as finder:
        offers: Offers = {}
        statuses = await _look_around(finder, offers)
        assert finder.manifest is not None
        if run.identity.peer_id != finder.manifest.founder:
            raise ConfigError(f"the key given is not that of the run's owner, {finder.manifest.founder[:8]}")
        believed = await _believed(finder, run, statuses)
        if (ended := next((url for url, status in believed.items() if status.get("finished")), "")) and not force:
            raise ConfigError(f"the run is finished, says {ended}: there is nothing to go on with; --force tries it")
        if (served := await _served(finder, believed)) and not force:
            if dry_run:
                return f"{served}: there is nothing to reform"
            raise ConfigError(f"{served}: a reform would abandon what is durable; --force does it all the same")
        intended = await _caught_up(finder, run, electors, offers)
        present = intended.num_old - len(intended.gone)
        if 2 * present > intended.num_old and not force:
            raise ConfigError(
                f"{present} of {intended.num_old} electors are here, which is a majority: the run elects without a "
                "reform, which would abandon what is durable; --force does it all the same"
            )
        if dry_run:
            return intended.text()
        if not await asyncio.to_thread(confirm, intended.text()):
            return "nothing is reformed"
        signed = await _signed(finder, run, intended)
        await _give(finder, run, intended, signed)
        return await _wait_served(finder, run, intended, signed)


async def _served(finder: Finder, statuses: Mapping[str, Mapping[str, Any]]) -> str:
    """How the run is served, if it is: then it needs no reform. Empty if it is not."""
    for url, status in statuses.items():
        if not (text := _claim(status)):
            continue
        doubt = await finder.doubt(owning.Found(url=url, status=dict(status)))
        if doubt is None:
            return text
        if isinstance(doubt, TransferError):  # the network's fault, perhaps: it may serve all the same
            return f"{text}; so it says, and does not prove it ({doubt})"
    return ""


def _claim(status: Mapping[str, Any]) -> str:
    """That a peer serves, in its own words; empty if it does not say so."""
    election = status["election"]
    lease_ms = election.get("lease_ms")
    if status.get("role") != "syncer" or not isinstance(lease_ms, int) or lease_ms <= 0:
        return ""
    here, num = len(_told_here(status)), len(election["roster"])
    return f"{str(status['peer'])[:8]} serves the run, and {here} of {num} electors answer it, a majority"


def _told_here(status: Mapping[str, Any]) -> set[str]:
    """Electors that are here by the word of the one who was asked."""
    return {str(each["peer"]) for each in status["election"].get("electors", ()) if each["here"]}


# ---- who is here -------------------------------------------------------------------------------------------------


async def _look_around(finder: Finder, offers: Offers, *, for_s: float = LOOK_AROUND_S) -> dict[str, dict[str, Any]]:
    """Status by URL of everybody who answers; what they have been offered is noted in `offers`. Raises DirectoryError
    if nobody does."""
    begun = time.monotonic()
    while True:
        statuses = {each.url: each.status for each in await finder.answers() if each.status.get("election")}
        for status in statuses.values():
            offers |= {str(each["peer"]): (time.monotonic(), each) for each in status["election"]["offers"]}
        waited_s = time.monotonic() - begun
        if statuses and waited_s >= for_s:
            return statuses
        if waited_s >= FIND_S + for_s:
            raise DirectoryError(f"no peer of this run that could serve answers: {finder.why_not}")
        await asyncio.sleep(LOOK_S)


def _present(statuses: Mapping[str, Mapping[str, Any]], offers: Mapping[str, Any]) -> dict[PeerId, Present]:
    """Everybody, those who can be reached first."""
    found: dict[PeerId, Present] = {}
    for url, status in sorted(statuses.items()):
        election = status["election"]
        elector, best = _elector(election["seat"]), election["best"]
        head = (Rank(best[0], Term(best[1]), Seq(best[2])), Digest(best[3]))
        found[elector.peer] = Present(elector=elector, held=_rank(election["held"]), url=url, head=head)
    for _, offer in sorted(offers.items()):
        elector = _elector(offer)
        if elector.peer not in found:
            found[elector.peer] = Present(elector=elector, held=_rank(offer["held"]), url="")
    return found


def _elector(said: Mapping[str, Any]) -> Elector:
    return Elector(PeerId(said["peer"]), str(said["enrolment"]), str(said["host"]), str(said["address"]))


def _rank(said: Sequence[int]) -> Rank:
    return Rank(int(said[0]), Term(int(said[1])), Seq(int(said[2])))


async def _believed(
    finder: Finder, run: Owned, statuses: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Without those who show something else than they say: what they say of electors would count, too."""
    async with asyncio.TaskGroup() as group:
        tasks = {url: group.create_task(_shown(finder, run, url, status)) for url, status in statuses.items()}
    believed: dict[str, Mapping[str, Any]] = {}
    for url, task in tasks.items():
        shown = task.result()
        if isinstance(shown, RemoteProtocolError | RefusedError):
            finder.why_not = f"{url} is left out: {shown}"
        else:
            believed[url] = shown
    return believed


async def _shown(
    finder: Finder, run: Owned, url: str, status: Mapping[str, Any]
) -> Mapping[str, Any] | RemoteProtocolError | RefusedError:
    """Its status, with the roster that its chain shows; or what contradicts it. Asked twice, because a chain may move
    on between two questions. What can't be told it is believed."""
    for pause_s in (0.0, DOUBT_S):
        await asyncio.sleep(pause_s)
        try:
            if _claim(status):
                doubt = await finder.doubt(owning.Found(url=url, status=dict(status)))
                if isinstance(doubt, RemoteProtocolError | RefusedError):
                    raise doubt
            roster = await _roster_shown(finder, run, url, status["election"]["best"])
        except (RemoteProtocolError, RefusedError) as exc:
            lie = exc
            continue
        return status if roster is None else {**status, "election": {**status["election"], "roster": roster}}
    return lie


async def _roster_shown(finder: Finder, run: Owned, url: str, best: Sequence[Any]) -> list[str] | None:
    """In force at the head that it claims; none if it shows another head by now, or nothing. Raises
    RemoteProtocolError if that head is none of this run, or not of that rank: the highest is gone on with."""
    try:
        async with asyncio.timeout(SHOW_S):
            signed = await _entry_at(finder, url, max(0, best[2]))
            if signed is None or signed.digest != best[3]:
                return None
            founder = run.identity.peer_id
            authority = await check_head(finder.session, url, signed, Rank(*best[:3]), run=run.run, founder=founder)
    except (TimeoutError, TransferError):
        return None
    return [elector.peer for elector in authority.rosters[-1][1]]


# ---- what is intended --------------------------------------------------------------------------------------------


async def _caught_up(finder: Finder, run: Owned, electors: Sequence[str], offers: Offers) -> Intended:
    """As soon as no new elector's disk goes further than the best that can be served, or time is up."""
    assert finder.manifest is not None
    one_machine = finder.manifest.election.one_machine
    deadline = time.monotonic() + CATCH_UP_S
    while True:
        statuses = await _believed(finder, run, await _look_around(finder, offers, for_s=0.0))
        recent = {peer: said for peer, (at, said) in offers.items() if time.monotonic() - at < OFFERED_S}
        intended = _intended(statuses, _present(statuses, recent), electors, one_machine=one_machine)
        behind = any(each.held > intended.parent[0] for each in intended.roster)
        if not behind or time.monotonic() >= deadline:
            return intended
        await asyncio.sleep(1.0)


def _intended(
    statuses: Mapping[str, Mapping[str, Any]],
    present: Mapping[PeerId, Present],
    electors: Sequence[str],
    *,
    one_machine: bool,
) -> Intended:
    roster = _all_live(present, one_machine=one_machine) if list(electors) == [ALL_LIVE] else _named(electors, present)
    heads = [each.head for each in roster if each.head is not None]
    if not heads:
        raise ConfigError("no elector named can serve: at least one must be reachable (a founder or standby)")
    parent = max(heads)
    newest = max(statuses.values(), key=lambda status: tuple(status["election"]["best"][:3]))
    old = [str(peer) for peer in newest["election"]["roster"]]
    number = parent[0].lineage
    lineages = [each.held.lineage for each in present.values() if each.held.lineage <= number + LINEAGE_LEAP_MAX]
    told_here = {peer for status in statuses.values() for peer in _told_here(status)}
    missing = [peer for peer in old if PeerId(peer) not in present]
    return Intended(
        parent=parent,
        lineage=1 + max([number, *lineages]),
        roster=tuple(roster),
        gone=tuple(peer for peer in missing if peer not in told_here),
        num_old=len(old),
        left_out=tuple(peer for peer in missing if peer in told_here),
    )


def _all_live(present: Mapping[PeerId, Present], *, one_machine: bool) -> list[Present]:
    """Those who can be reached first; one of a machine; an odd number."""
    chosen: list[Present] = []
    for each in present.values():
        if one_machine or all(each.elector.host != other.elector.host for other in chosen):
            chosen.append(each)
    chosen = chosen[:ELECTORS_MAX]
    return chosen if len(chosen) % 2 else chosen[:-1]


def _named(electors: Sequence[str], present: Mapping[PeerId, Present]) -> list[Present]:
    here = ", ".join(peer[:8] for peer in present)
    chosen: dict[PeerId, Present] = {}
    for name in electors:
        found = [each for peer, each in present.items() if name and peer.startswith(name)]
        if len(found) != 1:
            raise ConfigError(f"--electors {name}: names {len(found)} of the peers that are here, {here}")
        chosen[found[0].elector.peer] = found[0]
    if not 1 <= len(chosen) <= ELECTORS_MAX:
        raise ConfigError(f"--electors: 1 to {ELECTORS_MAX} peers are wanted of those that are here, {here}")
    return list(chosen.values())


# ---- signed and given --------------------------------------------------------------------------------------------


async def _signed(finder: Finder, run: Owned, intended: Intended) -> Signed:
    """On the parent itself, read from whoever holds it, not on what anybody says of it."""
    rank, digest = intended.parent
    for each in intended.roster:
        entry = await _entry_at(finder, each.url, rank.seq)
        if entry is None or entry.digest != digest:
            continue
        parent = open_entry(entry)
        try:
            founder = run.identity.peer_id
            await check_head(finder.session, each.url, entry, rank, run=run.run, founder=founder)
        except (TransferError, RemoteProtocolError) as exc:
            finder.why_not = str(exc)
            continue
        begins = isinstance(parent, Found | Reform)
        branch = BranchId(digest) if begins else parent.header.branch
        header = EntryHeader(run=run.run, branch=branch, term=Term(1), seq=Seq(rank.seq + 1), prev=digest)
        roster = tuple(elector.elector for elector in intended.roster)
        return seal_entry(Reform(header=header, lineage=intended.lineage, roster=roster), run.identity)
    raise TransferError(
        f"nobody shows entry {rank.seq} as one of this run: {finder.why_not or 'try again'}; --electors may name "
        "those who are left without whoever claims it"
    )


async def _entry_at(finder: Finder, url: str, seq: int) -> Signed | None:
    if not url:
        return None
    try:
        found = await fetch_entries(finder.session, url, seq, limit=1)
    except (TransferError, RemoteProtocolError) as exc:
        finder.why_not = str(exc)
        return None
    return found[0] if found else None


async def _give(finder: Finder, run: Owned, intended: Intended, signed: Signed) -> None:
    """To those who hold its parent: others would not know what it follows, and hear of it from these."""

    def order(nonce: str) -> str:
        return seal_order(Order(run=run.run, nonce=nonce, wish="reform", signed=signed.to_line()), run.identity)

    rank, digest = intended.parent
    for each in intended.roster:
        entry = await _entry_at(finder, each.url, rank.seq)
        if entry is not None and entry.digest == digest:
            with contextlib.suppress(TransferError):
                await give_order(finder.session, each.url, order)


async def _wait_served(finder: Finder, run: Owned, intended: Intended, signed: Signed) -> str:
    """Until somebody serves the new branch, and that is durable."""
    deadline = time.monotonic() + SERVES_S
    while time.monotonic() < deadline:
        for each in await finder.answers():
            status = each.status
            serves = int(status.get("lineage", 0)) >= intended.lineage and status.get("role") == "syncer"
            if serves and isinstance(await finder.doubt(each), KeyNotShown | None):
                return f"reformed: {str(status['peer'])[:8]} serves the run from entry {intended.parent[0].seq} on"
        await _give(finder, run, intended, signed)
        await asyncio.sleep(1.0)
    raise TransferError(
        f"the reform is signed and given, and nobody serves after {SERVES_S:.0f} s: {finder.why_not}; "
        "see `geo-diloco status`"
    )
