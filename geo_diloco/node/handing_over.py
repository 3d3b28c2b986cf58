"""Asking a syncer, from beside it, to hand its run over to another peer: by the key in its run directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geo_diloco.errors import ConfigError, RunDirError, TransferError
from geo_diloco.manifest import PeerId, RunId
from geo_diloco.node.addresses import read_ports
from geo_diloco.node.rundir import RunDir, read_manifest
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import Session, fetch_status, give_order, make_session
from geo_diloco.runtime.wire import Order, seal_order

LOOK_S = 0.2
ELECTED_S = 10.0
"""After that whoever takes over has been heard of, or something is wrong."""


def hand_over(run_dir: Path, *, to: str = "", limit_s: float = 60.0) -> str:
    """Have the process of that folder hand over and wait until it serves no more; returns what came of it.

    `to`: the beginning of a peer id; by default whoever is best placed. Raises RunDirError, ConfigError or
    TransferError.
    """
    folder = RunDir(run_dir)
    key = next((path for path in (folder.key, folder.identity_key) if path.exists()), None)
    url = read_ports(folder).url
    if key is None or not url:
        if not run_dir.exists():
            raise RunDirError(f"{run_dir}: no such folder")
        raise RunDirError(f"{run_dir} is not the folder of a peer that can serve: no key, or no port in it")
    manifest = read_manifest(folder)
    identity = Identity.load_or_create(key)
    return asyncio.run(_hand_over(run_dir, identity, url, manifest.run_id(), to=to, limit_s=limit_s))


async def _hand_over(root: Path, identity: Identity, url: str, run: RunId, *, to: str, limit_s: float) -> str:
    session = make_session()
    try:
        try:
            status = await fetch_status(session, url)
        except TransferError as exc:
            raise RunDirError(f"the peer of {root} does not run, so it has nothing to hand over: {exc}") from exc
        if status.get("peer") != identity.peer_id:
            raise RunDirError(f"at {url} is another peer than the one of this folder: it does not run")
        if status.get("role") != "syncer":
            raise ConfigError("this peer is not the syncer now, so it has nothing to hand over")
        target = _named(to, status)
        if (status.get("election") or {}).get("standbys") == []:
            raise ConfigError(
                "nobody is here who could take over: a standby is wanted (join --no-train --announce HOST:PORT); this "
                "peer goes on serving"
            )

        def order(nonce: str) -> str:
            return seal_order(Order(run=run, nonce=nonce, wish="hand_over", to=target), identity)

        answer = await give_order(session, url, order)
        return await _wait_handed_over(session, url, answer, limit_s)
    finally:
        await session.close()


def _named(to: str, status: Mapping[str, Any]) -> PeerId | None:
    if not to:
        return None
    electors = [str(peer) for peer in (status.get("election") or {}).get("roster", [])]
    found = [peer for peer in electors if peer.startswith(to)]
    if len(found) != 1:
        raise ConfigError(f"--to {to}: names {len(found)} of the electors {', '.join(peer[:8] for peer in electors)}")
    if found[0] == status.get("peer"):
        raise ConfigError(f"--to {to}: that is this peer itself, which serves already; name another elector")
    return PeerId(found[0])


async def _wait_handed_over(session: Session, url: str, answer: str, limit_s: float) -> str:
    deadline, is_over = time.monotonic() + limit_s, False
    while time.monotonic() < deadline:
        status = await fetch_status(session, url)
        if status.get("role") != "syncer":
            if not is_over:
                is_over, deadline = True, time.monotonic() + ELECTED_S
            served = status.get("served_by") or {}
            if peer := str(served.get("peer") or "")[:8]:
                where = f" at {served['address']}" if served.get("address") else ""
                return f"handed over: {peer} serves{where}"
        await asyncio.sleep(LOOK_S)
    if is_over:
        return "handed over, and nobody serves yet: see `geo-diloco status`"
    raise TransferError(
        f"{answer}, and it still serves after {limit_s:.0f} s: is a standby there? see `geo-diloco status`"
    )
