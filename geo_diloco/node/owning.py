"""What a run's owner does from beside it: with the founder's key and nothing else, from any machine.

The owner's key need not be where the syncer is. Whoever serves is found as anybody finds it: by the process of the run
directory if one was given, by what that one knows, and by the directory that the invite names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geo_diloco.config import checked_contacts, manifest_from_bytes
from geo_diloco.errors import (
    ConfigError,
    DirectoryError,
    InviteError,
    ManifestError,
    RefusedError,
    RemoteProtocolError,
    RunDirError,
    TransferError,
)
from geo_diloco.manifest import PeerId, RunId, RunManifest
from geo_diloco.node.addresses import read_ports
from geo_diloco.node.asking import known_contacts, likely_urls, named_in, visited_directory
from geo_diloco.node.claims import KeyNotShown, check_syncer
from geo_diloco.node.rundir import RunDir
from geo_diloco.protocol.amendments import AMENDABLE
from geo_diloco.runtime.contacts import Contacts
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite, place_of
from geo_diloco.runtime.records import by_claim
from geo_diloco.runtime.session import Session, fetch_manifest, fetch_status, make_session
from geo_diloco.runtime.wire import INTEGER_MAX, url_from_address

FIND_S = 30.0
"""A person waits for this."""
LOOK_S = 0.3
ANSWER_S = 5.0
"""For one peer to say how it is. Contacts from an earlier time may be gone."""
SILENT_S = 20.0
DOUBT_S = 3.0
"""After that a claim to serve is looked at again that was not shown before: it may have been elected since."""
DIRECTORY_S = 2.0
"""Until then only those are asked whose address is known already."""


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A run, and the key of its owner."""

    invite: Invite
    identity: Identity
    local_url: str
    """Of the process in the run directory; empty if none was given."""
    known: Contacts = field(default_factory=Contacts)
    """Who else may be asked."""

    @property
    def run(self) -> RunId:
        return self.invite.run


def owned(where: str, key: Path | None, contacts: Sequence[str] = ()) -> Owned:
    """From a run directory or an invite, and `HOST:PORT` of peers where no bootstrap answers.

    Raises ConfigError, InviteError or RunDirError.
    """
    place = place_of(where)
    folder = RunDir(place) if isinstance(place, Path) else None
    invite = place if isinstance(place, Invite) else _invite_in(RunDir(place))
    url = "" if folder is None else read_ports(folder).url
    key = key or (None if folder is None else folder.key)
    if key is None:
        raise ConfigError("an invite alone has no key: give --key with the founder's key.pem, or its run directory")
    if not key.is_file():
        raise ConfigError(f"{key} is no file: give --key with the founder's key.pem")
    known = known_contacts(invite.run, checked_contacts(contacts))
    return Owned(invite=invite, identity=Identity.load_or_create(key), local_url=url, known=known)


def _invite_in(folder: RunDir) -> Invite:
    try:
        return Invite.parse(folder.invite.read_text("utf-8").strip())
    except OSError as exc:
        raise RunDirError(f"{folder.root} is not the folder of a peer that can serve: no invite.txt in it") from exc
    except (UnicodeDecodeError, InviteError) as exc:
        why = "not text" if isinstance(exc, UnicodeDecodeError) else exc
        raise RunDirError(f"{folder.invite} is damaged: {why}; give the invite itself, and --key") from exc


@dataclass(frozen=True, kw_only=True)
class Found:
    """A peer of the run that answers."""

    url: str
    status: dict[str, Any]


Doubt = RemoteProtocolError | RefusedError | TransferError
"""Why a claim is not believed: what its peer shows contradicts it, or (TransferError) it shows nothing."""


class Finder:
    """Asks the peers of a run how they are. Their answers are what they say, nothing more; but whoever serves shows
    it."""

    def __init__(self, owned: Owned, session: Session) -> None:
        self._owned = owned
        self.session = session
        self._known: list[str] = [owned.local_url] if owned.local_url else likely_urls(owned.invite, owned.known)
        """URLs, most promising first."""
        self._silent_until: dict[str, float] = {}
        """Who let us wait for nothing, and until when that is not tried again."""
        self._shown: set[tuple[object, ...]] = set()
        """Claims to serve that were proven."""
        self._doubts: dict[tuple[object, ...], tuple[float, Doubt]] = {}
        """Those that were not, and when they may be looked at again."""
        self._runs: set[str] = set()
        """URLs that have shown the run's manifest."""
        self.manifest: RunManifest | None = None
        self.why_not = "nobody has answered yet"

    def learn(self, address: str) -> None:
        """An address that somebody named."""
        try:
            url = url_from_address(address)
        except RemoteProtocolError:
            return
        if url not in self._known:
            self._known.append(url)

    async def ask(self, url: str) -> Found | None:
        """None if it does not answer, or serves another run."""
        if time.monotonic() < self._silent_until.get(url, 0.0):
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                if url not in self._runs:
                    canonical = await fetch_manifest(self.session, url, self._owned.run)
                    self.manifest = manifest_from_bytes(canonical)
                    self._runs.add(url)
                status = await fetch_status(self.session, url)
                _check_status(status, url)
        except TimeoutError:
            self.why_not = f"{url} does not answer in {ANSWER_S:.0f} s"
            self._silent_until[url] = time.monotonic() + SILENT_S
            return None
        except (TransferError, RefusedError, RemoteProtocolError, ManifestError) as exc:
            self.why_not = str(exc)
            return None
        for address in named_in(status):
            self.learn(address)
        return Found(url=url, status=status)

    async def answers(self) -> list[Found]:
        """Everybody whose address is known, and whom they name."""
        found: list[Found | None] = []
        asked: list[str] = []
        while new := [url for url in self._known if url not in asked]:
            asked += new
            async with asyncio.TaskGroup() as group:  # one that is gone costs time: all at once
                tasks = [group.create_task(self.ask(url)) for url in new]
            found += [task.result() for task in tasks]
        return [each for each in found if each is not None]

    async def syncer(self) -> Found | None:
        """Whoever serves and shows it, of the highest term: a liar must not keep the owner from him. If nobody shows
        that he is the one whom the chain names, one of those who say so: strangers may have taken all his doors."""
        claims = [each for each in await self.answers() if each.status.get("role") == "syncer"]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.doubt(each)) for each in claims]
        doubts = [(each, task.result()) for each, task in zip(claims, tasks, strict=True)]
        shown = [each for each, doubt in doubts if doubt is None]
        named = [each for each, doubt in doubts if isinstance(doubt, KeyNotShown)]
        return max(shown or named, key=lambda each: int(each.status.get("term", 0)), default=None)

    async def doubt(self, found: Found) -> Doubt | None:
        """Why it is not to be believed that this peer serves; none if it has shown that it does."""
        assert self.manifest is not None
        status = found.status
        claim = (found.url, status.get("peer"), status.get("branch"), status.get("term"))
        until, doubt = self._doubts.get(claim, (0.0, None))
        if claim in self._shown or (doubt is not None and time.monotonic() < until):
            return doubt
        try:
            peer, invite, founder = PeerId(str(status.get("peer"))), self._owned.invite, self.manifest.founder
            await check_syncer(self.session, found.url, peer, invite=invite, founder=founder)
        except (RemoteProtocolError, RefusedError, TransferError) as exc:
            self._doubts[claim] = time.monotonic() + DOUBT_S, exc
            self.why_not = str(exc)
            return exc
        self._shown.add(claim)
        self._doubts.pop(claim, None)
        return None


def _check_status(status: Mapping[str, Any], url: str) -> None:
    """What the owner's commands read of it is of the form that `status_json` gives it: anybody may answer at an address
    that is in the directory, and must not end the command. Raises RemoteProtocolError."""
    election = status.get("election")
    fine = {
        "role": isinstance(status.get("role"), str),
        "peer": _is_hex(status.get("peer"), 64),
        "term": _are_counts([status.get("term", 0), status.get("lineage", 0)]),
        "branch": _is_hex(status.get("branch"), 0, 64),
        "rules": _are_rules(status.get("rules")),
        "amended": _are(
            status.get("amended"), lambda each: _are_counts([each["number"]]) and isinstance(each["order"], str)
        ),
        "election": election is None or _is_election(election),
    }
    for name, is_fine in fine.items():
        if not is_fine:
            raise RemoteProtocolError(f"{url} answers a status whose {name} makes no sense")


def _is_hex(value: object, *lengths: int) -> bool:
    return isinstance(value, str) and len(value) in lengths and not set(value) - set("0123456789abcdef")


def _are_counts(values: object, number: int | None = None) -> bool:
    """Integers as the wire allows them; -1 is the place before the first entry."""
    listed = isinstance(values, list) and number in (None, len(values))
    return listed and all(type(each) is int and -1 <= each <= INTEGER_MAX for each in values)  # type: ignore[attr-defined]


def _are(values: object, is_one: Callable[[dict[str, Any]], bool]) -> bool:
    """A list of objects, each of that form."""
    try:
        return isinstance(values, list) and all(isinstance(each, dict) and is_one(each) for each in values)
    except KeyError:
        return False


def _are_rules(rules: object) -> bool:
    return isinstance(rules, dict) and _are(
        [rules.get(name) for name in AMENDABLE], lambda each: isinstance(each["value"], int | float | str)
    )


def _is_election(election: object) -> bool:
    def is_seat(seat: dict[str, Any]) -> bool:
        texts = (seat[name] for name in ("enrolment", "host", "address"))
        return _is_hex(seat["peer"], 64) and all(isinstance(text, str) and len(text) < 1024 for text in texts)

    def is_election(each: dict[str, Any]) -> bool:
        best, syncer = each["best"], each["syncer"]
        return (
            _are([each["seat"]], is_seat)
            and _are(
                each.get("electors", []), lambda seat: _is_hex(seat["peer"], 64) and isinstance(seat["here"], bool)
            )
            and _are(each["offers"], lambda offer: is_seat(offer) and _are_counts(offer["held"], 3))
            and _are_counts(each["held"], 3)
            and (isinstance(best, list) and _are_counts(best[:3], 3) and _is_hex("".join(map(str, best[3:])), 0, 64))
            and (isinstance(each["roster"], list) and all(_is_hex(peer, 64) for peer in each["roster"]))
            and (syncer is None or (isinstance(syncer, list) and len(syncer) == 2))
        )

    return _are([election], is_election)


@asynccontextmanager
async def finding(owned: Owned) -> AsyncIterator[Finder]:
    """Also by the directory, as soon as it takes long."""
    session = make_session()
    finder = Finder(owned, session)
    looking = asyncio.create_task(_look(owned, finder))
    try:
        yield finder
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await session.close()


async def _look(owned: Owned, finder: Finder) -> None:
    """Learn addresses: those that are known from an earlier time, then from the directory, again and again."""
    await asyncio.sleep(DIRECTORY_S)
    for address in owned.known.addresses:
        finder.learn(address)
    async with visited_directory(owned.invite, owned.known, lambda status: None) as directory:
        while True:
            try:
                for record in by_claim(await directory.find(owned.run)):
                    finder.learn(record.address)
            except DirectoryError as exc:
                finder.why_not = str(exc)
            await asyncio.sleep(1.0)


async def wait_syncer(finder: Finder, *, limit_s: float = FIND_S) -> Found:
    """Raises DirectoryError if nobody serves now."""
    deadline = time.monotonic() + limit_s
    while True:
        found = await finder.syncer()
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            raise DirectoryError(f"nobody serves this run now, in {limit_s:.0f} s: {finder.why_not}")
        await asyncio.sleep(LOOK_S)
