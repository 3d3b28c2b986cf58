"""`geo-diloco reform`: the run's owner goes on without most of the electors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geo_diloco.cli import options
from geo_diloco.cli.options import answer


def reform(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR|INVITE", help="A run directory of a peer that can serve, or an invite.")
    ],
    electors: Annotated[
        str, typer.Option(metavar="PEER,PEER,...|all-live", help="Beginnings of peer ids; who shall be elector now.")
    ],
    key: Annotated[
        Path | None, typer.Option(help="The founder's key.pem. [default: the one in the run directory]")
    ] = None,
    contacts: options.Contacts = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if a majority of the electors is here.")] = False,
) -> None:
    """Go on with a run most of whose electors are gone for good; only its owner can."""
    from geo_diloco.node import reform as order

    def confirm(what: str) -> bool:
        typer.echo(what)
        return yes or typer.confirm("reform the run so?")

    names = [name.strip() for name in electors.split(",")]
    answer(order(run, names, key=key, contacts=contacts or (), dry_run=dry_run, force=force, confirm=confirm))
