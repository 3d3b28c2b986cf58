"""A bootstrap: a long-lived DHT peer at a known address, and nothing more.

It holds no state of any run that it could lose, serves every run that uses it, and keeps one thing: its libp2p
identity, which is part of its address. Restarted with that identity at the same port, it is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from geo_diloco.runtime.dht import Directory

DEFAULT_HTTP_PORT = 31340
"""TCP port of a peer's HTTP side."""


async def run_bootstrap(
    *,
    listen: Sequence[str],
    announce: Sequence[str],
    state_dir: Path,
    on_ready: Callable[[list[str]], None],
    on_status: Callable[[str], None] | None = None,
) -> None:
    """Runs until cancelled; `on_ready` gets the multiaddrs that belong into invites, once they can be dialled.

    `listen` and `announce` are multiaddrs without identity (`records.maddr_of`). If p2pd ends it is started again.
    Raises DirectoryError if it can't be started at first: a port in use, a folder in use.
    """
    directory = await Directory.start(
        initial_peers=(),
        listen=listen,
        announce=announce,
        identity_path=state_dir / "identity.key",
        state_dir=state_dir,
        on_status=on_status,
    )
    try:
        on_ready(directory.visible_maddrs)
        await directory.keep_alive()
    finally:
        await directory.close()
