"""`geo-diloco amend`: the run's owner changes its rules while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geo_diloco.cli import options
from geo_diloco.cli.options import answer, say
from geo_diloco.cli.status_text import amended_lines


def amend(
    run: Annotated[str, typer.Argument(metavar="RUN_DIR|INVITE", help="The founder's run directory, or an invite.")],
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="May be given several times. NAME: commits, tokens, minutes, eta, mu, quorum, grace, grace_gamma, "
            "codec_up, codec_up_choices, codec_down.",
        ),
    ],
    key: Annotated[
        Path | None, typer.Option(help="The founder's key.pem. [default: the one in the run directory]")
    ] = None,
    contacts: options.Contacts = None,
    wait: Annotated[bool, typer.Option(help="Wait until a majority of the electors has it on disk.")] = True,
) -> None:
    """Change the stop rule, eta, mu, quorum, grace or codecs of a run that goes on; only its owner can."""
    from geo_diloco.node import amend as order

    done = order(run, settings, key=key, contacts=contacts or (), wait=wait)
    for warning in done["warnings"]:
        say(f"warning: {warning}", err=True)
    if done["rules"] is None:
        answer(f"amendment {done['number']} is being appended: see `geo-diloco status`")
    else:
        answer("\n".join([f"amendment {done['number']} is in force:", *amended_lines(done["rules"])]))
