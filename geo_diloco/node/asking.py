"""Asking a run how it is, without taking part in it.

Whoever serves it is mostly where it was: on this machine, or at the default port of a machine that the invite names.
So that is asked first, by plain HTTP in a moment; a peer of the DHT, which takes seconds to start, only after that.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from geo_diloco.errors import DirectoryError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import RunId
from geo_diloco.node.addresses import read_ports
from geo_diloco.node.rundir import RunDir, default_root
from geo_diloco.runtime.bootstrap import DEFAULT_HTTP_PORT
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.directory import OnStatus
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.records import by_claim, maddr_of, tcp_of_maddr
from geo_diloco.runtime.session import Session, fetch_manifest, make_session
from geo_diloco.runtime.session import fetch_status as ask_status
from geo_diloco.runtime.wire import url_from_address

LIMIT_S = 30.0
"""A person waits for this; it is no transfer."""
LIKELY_S = 2.0
"""For the likely places, all at once. Who is not there mostly says so at once."""
PAUSE_S = 0.5


def fetch_status(invite: str | Invite) -> dict[str, Any]:
    """The run's status, found through the invite. Raises DirectoryError if nobody answers in time."""
    parsed = Invite.parse(invite) if isinstance(invite, str) else invite
    return asyncio.run(_fetch(parsed))


async def _fetch(invite: Invite) -> dict[str, Any]:
    session = make_session()
    try:
        return await _from_likely(session, invite) or await _from_directory(session, invite)
    finally:
        await session.close()


def likely_urls(invite: Invite) -> list[str]:
    """Where the syncer may well be: where this machine's own founder of the run listened, and at the default port of
    the invite's machines, of which one is the founder's."""
    places = [place for maddr in invite.bootstraps if (place := tcp_of_maddr(maddr)) is not None]
    hosts = [f"[{host}]" if ":" in host else host for host, _ in places]
    urls = [read_ports(RunDir(default_root(invite.run))).url, *(f"http://{host}:{DEFAULT_HTTP_PORT}" for host in hosts)]
    return [url for url in dict.fromkeys(urls) if url]


async def _from_likely(session: Session, invite: Invite) -> dict[str, Any] | None:
    """The syncer's, if it is found so."""

    async def ask(url: str) -> dict[str, Any] | None:
        try:
            status = await _status_at(session, url, invite.run)
        except (TransferError, RefusedError, RemoteProtocolError):
            return None
        return status if status.get("role") == "syncer" else None

    asked = [asyncio.ensure_future(ask(url)) for url in likely_urls(invite)]
    try:
        async with asyncio.timeout(LIKELY_S):
            for answer in asyncio.as_completed(asked):
                if (status := await answer) is not None:
                    return status
    except TimeoutError:
        pass
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return None


async def _status_at(session: Session, url: str, run: RunId) -> dict[str, Any]:
    await fetch_manifest(session, url, run)  # it is the run's, or refused
    return await ask_status(session, url)


async def _from_directory(session: Session, invite: Invite) -> dict[str, Any]:
    said = ["no bootstrap has answered yet"]
    try:
        async with asyncio.timeout(LIMIT_S), visited_directory(invite, said.append) as directory:
            return await _ask(session, directory, invite, said)
    except TimeoutError as exc:
        raise DirectoryError(f"no status of run {invite.run[:12]} in {LIMIT_S:.0f} s: {said[-1]}") from exc


@asynccontextmanager
async def visited_directory(invite: Invite, on_status: OnStatus) -> AsyncIterator[Directory]:
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
