"""`geo-diloco bootstrap`: the long-lived address at which peers enter the directory. It knows no run and no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from geo_diloco.cli.options import BOOTSTRAP_PORT, say, warn_if_exposed
from geo_diloco.errors import ConfigError


def bootstrap(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 takes a free one.")] = BOOTSTRAP_PORT,
    announce: Annotated[str, typer.Option(help="HOST or HOST:PORT under which others reach this machine.")] = "",
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder for the identity. [default: among this user's state]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one JSON object.")] = False,
) -> None:
    """Host a bootstrap: peers of any run find each other through it."""
    from geo_diloco.config import load_peer_config, split_announce, state_root

    load_peer_config({"host": host, "announce": announce}, environment={})  # its rules are theirs, too
    announced_host, announced_port = split_announce(announce)
    if announce and not (announced_port or port):
        raise ConfigError("--port = 0; allowed with --announce is a fixed port, which others can dial")
    warn_if_exposed(host, announce)

    def on_ready(maddrs: list[str]) -> None:
        if as_json:
            say(json.dumps({"maddrs": maddrs}))
            return
        say("bootstrap is up; start a run with")
        for maddr in maddrs:
            say(f"  geo-diloco start run.toml --bootstrap {maddr}")

    from geo_diloco.runtime.bootstrap import run_bootstrap
    from geo_diloco.runtime.dht import load_library
    from geo_diloco.runtime.records import maddr_of

    load_library()
    asyncio.run(
        _until_told(
            run_bootstrap(
                listen=[maddr_of(host, port)],
                announce=[maddr_of(announced_host, announced_port or port)] if announce else [],
                state_dir=state_dir if state_dir is not None else state_root() / "bootstrap",
                on_ready=on_ready,
                on_status=lambda reason: say(reason, err=True),
            )
        )
    )


async def _until_told(serving: Coroutine[Any, Any, None]) -> None:
    """Until SIGINT or SIGTERM. A second one finds it leaving already."""
    task = asyncio.ensure_future(serving)
    told = asyncio.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(told.set)

    loop = asyncio.get_running_loop()
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    telling = asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait((task, telling), return_when=asyncio.FIRST_COMPLETED)
        telling.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
