"""`geo-diloco simulate`: find out before asking real machines. The group; its three commands have files of their own,
and the simulators are in `geo_diloco/sim`."""

from __future__ import annotations

import typer

from geo_diloco.cli.simulate_goodput import goodput
from geo_diloco.cli.simulate_protocol import protocol
from geo_diloco.cli.simulate_train import train

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Find out before asking real machines."
)


@app.callback()
def _about() -> None:
    """Find out before asking real machines."""


app.command()(train)
app.command()(protocol)
app.command()(goodput)
