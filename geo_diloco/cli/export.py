"""`geo-diloco export`: writes a run's model as a `save_pretrained` folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geo_diloco.cli.options import answer


def export(
    run_dir: Annotated[Path, typer.Argument(help="The founder's run folder; the run must not be going on.")],
    to: Annotated[Path, typer.Option(help="Folder to write, new or empty.")],
) -> None:
    """Export the model that was trained, for AutoModelForCausalLM.from_pretrained."""
    from geo_diloco.node import export as export_run

    answer(f"wrote {export_run(run_dir, to)}")
