"""Asking a run how it is, without taking part in it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from geo_diloco.errors import DirectoryError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.records import by_claim, maddr_of
from geo_diloco.runtime.session import fetch_manifest, make_session
from geo_diloco.runtime.session import fetch_status as ask_status
from geo_diloco.runtime.wire import url_from_address

LIMIT_S = 30.0
"""A person waits for this; it is no transfer."""
PAUSE_S = 0.5


def fetch_status(invite: str | Invite) -> dict[str, Any]:
    """The run's status, found through the invite's bootstraps. Raises DirectoryError if nobody answers in time."""
    parsed = Invite.parse(invite) if isinstance(invite, str) else invite
    return asyncio.run(_fetch(parsed))


async def _fetch(invite: Invite) -> dict[str, Any]:
    said = ["no bootstrap has answered yet"]
    with tempfile.TemporaryDirectory(prefix="geo-diloco-status-") as folder:
        try:
            async with asyncio.timeout(LIMIT_S):
                directory = await Directory.start(
                    initial_peers=invite.bootstraps,
                    listen=(maddr_of("127.0.0.1", 0),),
                    client_mode=True,
                    state_dir=Path(folder),
                    on_status=said.append,
                )
                try:
                    return await _ask(directory, invite, said)
                finally:
                    await directory.close()
        except TimeoutError as exc:
            raise DirectoryError(f"no status of run {invite.run[:12]} in {LIMIT_S:.0f} s: {said[-1]}") from exc


async def _ask(directory: Directory, invite: Invite, said: list[str]) -> dict[str, Any]:
    """The syncer's; while nobody serves, that of the standby who knows most, which says why."""
    session = make_session()
    try:
        while True:
            standby: dict[str, Any] | None = None
            for record in by_claim(await directory.find(invite.run)):
                try:
                    url = url_from_address(record.address, peer=record.peer)
                    await fetch_manifest(session, url, invite.run)  # it is the run's, or refused
                    status = await ask_status(session, url)
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
    finally:
        await session.close()
