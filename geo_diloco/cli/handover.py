"""`geo-diloco handover`: has the syncer on this machine give its run to another peer, before it is shut down, say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geo_diloco.cli.options import answer


def handover(
    run_dir: Annotated[Path, typer.Argument(help="The run's folder of the syncer on this machine.")],
    to: Annotated[str, typer.Option(help="Beginning of a peer id. [default: whoever is best placed]")] = "",
) -> None:
    """Have the syncer of this folder hand over to a standby; it goes on as a peer."""
    from geo_diloco.node import hand_over

    answer(hand_over(run_dir, to=to))
