"""Asking a run how it is, without taking part in it.

Whoever serves it is mostly where it was: on this machine, where peers of this machine have seen it, or at the default
port of a machine that the invite names. So that is asked first, by plain HTTP in a moment, and whom the answers name;
a peer of the DHT, which takes seconds to start, only after that.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from geo_diloco.config import checked_contacts
from geo_diloco.errors import (
    DirectoryError,
    InviteError,
    RefusedError,
    RemoteProtocolError,
    RunDirError,
    TransferError,
)
from geo_diloco.manifest import RunId
from geo_diloco.node.addresses import read_ports
from geo_diloco.node.ended import ended_status, folders_of
from geo_diloco.node.rundir import RunDir, default_root, read_manifest
from geo_diloco.runtime.bootstrap import DEFAULT_HTTP_PORT
from geo_diloco.runtime.contacts import Contacts, read_contacts
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.directory import OnStatus
from geo_diloco.runtime.invite import BOOTSTRAPS_MAX, Invite
from geo_diloco.runtime.records import by_claim, maddr_of, tcp_of_maddr
from geo_diloco.runtime.session import Session, fetch_manifest, make_session
from geo_diloco.runtime.session import fetch_status as ask_status
from geo_diloco.runtime.wire import url_from_address

LIMIT_S = 30.0
"""A person waits for this; it is no transfer."""
LIKELY_S = 2.0
"""For the likely places, all at once. Who is not there mostly says so at once."""
ASKED_MAX = 64
WITH_STANDBY_S = 10.0
"""For the directory, where somebody of the run has answered who does not serve."""
PAUSE_S = 0.5
NOWHERE = "/ip4/127.0.0.1/tcp/1/p2p/none"
"""Stands in an invite for bootstraps that are not known."""


def fetch_status(invite: str | Invite, contacts: Sequence[str] = ()) -> dict[str, Any]:
    """The run's status, found through the invite, or through `contacts` (`HOST:PORT` of peers) where no bootstrap
    answers. Raises DirectoryError if nobody answers in time."""
    parsed = Invite.parse(invite) if isinstance(invite, str) else invite
    return asyncio.run(_fetch(parsed, known_contacts(parsed.run, checked_contacts(contacts))))


def folder_status(root: Path, contacts: Sequence[str] = ()) -> dict[str, Any]:
    """The same by the folder of a peer on this machine: its process is asked, and whom it knows. Of a run that is over
    and nobody serves any more, what the folder holds. Raises RunDirError for a folder that is none, DirectoryError."""
    folder = RunDir(root)
    if not root.is_dir():
        raise RunDirError(f"{root}: no such folder")
    run = read_manifest(folder).run_id()
    kept = Contacts()
    with suppress(OSError, RemoteProtocolError):
        kept = read_contacts(folder.contacts)
    known = Contacts(tuple(checked_contacts(contacts))).before(kept).before(known_contacts(run, ()))
    return asyncio.run(_fetch(_invite_of(folder, run, known), known, folders=(folder,)))


def _invite_of(folder: RunDir, run: RunId, known: Contacts) -> Invite:
    """The founder's or standby's; a learner keeps none, but where others can be reached. Raises RunDirError."""
    with suppress(OSError, UnicodeDecodeError, InviteError):
        invite = Invite.parse(folder.invite.read_text("utf-8").strip())
        if invite.run == run:
            return invite
    try:
        return Invite(run=run, bootstraps=known.maddrs[:BOOTSTRAPS_MAX] or (NOWHERE,))
    except InviteError as exc:
        raise RunDirError(f"{folder.contacts} is damaged: {exc}; ask with the run's invite") from exc


async def _fetch(invite: Invite, known: Contacts, *, folders: Sequence[RunDir] = ()) -> dict[str, Any]:
    """`folders`: of this run, on this machine, beside those that are among this user's state."""
    session = make_session()
    try:
        syncer, standby = await _from_likely(session, invite, known, [read_ports(each).url for each in folders])
        if syncer is None and standby is None:
            ended = ended_status(invite.run, folders or folders_of(invite.run))
            if ended is not None and ended["end_is_durable"]:
                return ended
            try:
                return await _from_directory(session, invite, known, standby)
            except DirectoryError as exc:
                if ended is not None:
                    return ended
                more = "where a peer of it has been, `geo-diloco status RUN_DIR` tells of a run that is over"
                if folders:
                    more = f"{folders[0].root} has not heard of its end"
                raise DirectoryError(f"{exc}; {more}") from exc
        return syncer or await _from_directory(session, invite, known, standby)
    finally:
        await session.close()


def known_contacts(run: RunId, given: Sequence[str]) -> Contacts:
    """Those given by hand, and those that peers of this machine have kept."""
    kept = Contacts()
    with suppress(OSError, RemoteProtocolError):  # damaged: the next peer that joins here says so
        kept = read_contacts(RunDir(default_root(run)).contacts)
    return Contacts(tuple(given)).before(kept)


def likely_urls(invite: Invite, known: Contacts) -> list[str]:
    """Where the syncer may well be: at a contact, where this machine's own founder of the run listened, and at the
    default port of the invite's machines, of which one is the founder's."""
    contacts = [url_from_address(address) for address in known.addresses]
    places = [place for maddr in invite.bootstraps if (place := tcp_of_maddr(maddr)) is not None]
    hosts = [f"[{host}]" if ":" in host else host for host, _ in places]
    urls = [read_ports(RunDir(default_root(invite.run))).url, *(f"http://{host}:{DEFAULT_HTTP_PORT}" for host in hosts)]
    return [url for url in dict.fromkeys((*contacts, *urls)) if url]


def named_in(status: Mapping[str, Any]) -> list[str]:
    """Addresses of others that a status names: the syncer, and who offers a vote. They are what that peer says."""
    election = status.get("election")
    if not isinstance(election, dict):
        return []
    syncer, offers = election.get("syncer"), election.get("offers")
    addresses = [syncer[1]] if isinstance(syncer, list) and len(syncer) == 2 else []
    addresses += [each.get("address") for each in offers if isinstance(each, dict)] if isinstance(offers, list) else []
    return list(Contacts(tuple(str(address) for address in addresses)).addresses)


Status = dict[str, Any] | None


async def _from_likely(
    session: Session, invite: Invite, known: Contacts, more: Sequence[str] = ()
) -> tuple[Status, Status]:
    """The syncer's, if it is found so, else that of somebody else in the run, if one is found. `more`: URLs to ask
    beside the likely ones."""

    async def ask(url: str) -> Status:
        try:
            return await _status_at(session, url, invite.run)
        except (TransferError, RefusedError, RemoteProtocolError):
            return None

    urls = dict.fromkeys([*(url for url in more if url), *likely_urls(invite, known)])
    asked = {url: asyncio.ensure_future(ask(url)) for url in urls}
    waiting, other = set(asked.values()), None
    try:
        async with asyncio.timeout(LIKELY_S):
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for status in [answer for task in done if (answer := task.result()) is not None]:
                    if status.get("role") == "syncer":
                        return status, None
                    other = other or status
                    named = [url_from_address(address) for address in named_in(status)]
                    for url in [url for url in named if url not in asked][: ASKED_MAX - len(asked)]:
                        asked[url] = asyncio.ensure_future(ask(url))
                        waiting.add(asked[url])
    except TimeoutError:
        pass
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
    return None, other


async def _status_at(session: Session, url: str, run: RunId) -> dict[str, Any]:
    await fetch_manifest(session, url, run)  # it is the run's, or refused
    return await ask_status(session, url)


async def _from_directory(session: Session, invite: Invite, known: Contacts, standby: Status) -> dict[str, Any]:
    """`standby`: who will do if nobody is found by the directory."""
    said = ["no bootstrap has answered yet"]
    try:
        async with (
            asyncio.timeout(LIMIT_S if standby is None else WITH_STANDBY_S),
            visited_directory(invite, known, said.append) as directory,
        ):
            return await _ask(session, directory, invite, said)
    except TimeoutError as exc:
        if standby is not None:
            return standby
        hint = "" if known.addresses else "; --contact HOST:PORT names a peer to be asked"
        raise DirectoryError(f"no status of run {invite.run[:12]} in {LIMIT_S:.0f} s: {said[-1]}{hint}") from exc


@asynccontextmanager
async def visited_directory(invite: Invite, known: Contacts, on_status: OnStatus) -> AsyncIterator[Directory]:
    """The directory as one who only looks sees it."""
    with tempfile.TemporaryDirectory(prefix="geo-diloco-visit-") as folder:
        directory = await Directory.start(
            initial_peers=invite.bootstraps,
            listen=(maddr_of("127.0.0.1", 0),),
            client_mode=True,
            state_dir=Path(folder),
            on_status=on_status,
        )
        try:
            directory.learn(known.maddrs)
            await directory.wait_joined()
            yield directory
        finally:
            await directory.close()


async def _ask(session: Session, directory: Directory, invite: Invite, said: list[str]) -> dict[str, Any]:
    """The syncer's; while nobody serves, that of the standby who knows most, which says why."""
    while True:
        standby: dict[str, Any] | None = None
        for record in by_claim(await directory.find(invite.run)):
            try:
                url = url_from_address(record.address, peer=record.peer)
                status = await _status_at(session, url, invite.run)
            except (TransferError, RefusedError, RemoteProtocolError) as exc:
                said.append(str(exc))
                continue
            if status.get("role") == "syncer":
                return status
            standby = standby or status
        if standby is not None:
            return standby
        said.append("no syncer of that run is in the directory")
        await asyncio.sleep(PAUSE_S)
