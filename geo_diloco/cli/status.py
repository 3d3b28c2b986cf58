"""`geo-diloco status`: what a run is doing, asked of its syncer, which the invite's bootstraps know, or a contact.

A peer's folder on this machine will do as well: its process is asked first, and a run that is over is told from there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from geo_diloco.cli import options
from geo_diloco.cli.options import answer
from geo_diloco.cli.status_text import status_text
from geo_diloco.errors import RemoteProtocolError


def status(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR|INVITE", help="A peer's folder on this machine, or the run's invite.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    contacts: options.Contacts = None,
) -> None:
    """Show where a run stands: held-out loss, who serves, learners, last rounds, and what it waits for."""
    from geo_diloco.node import fetch_status, folder_status
    from geo_diloco.runtime.invite import place_of

    place = place_of(run)
    known = contacts or ()
    found = folder_status(place, known) if isinstance(place, Path) else fetch_status(place, known)
    answer(json.dumps(found) if as_json else _readable(found))


def _readable(found: dict[str, Any]) -> str:
    """Anybody may answer at an address that was a peer's once. Raises RemoteProtocolError for what is no status."""
    try:
        return status_text(found)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        raise RemoteProtocolError(f"what was answered is not a run's status: {type(exc).__name__}: {exc}") from exc
