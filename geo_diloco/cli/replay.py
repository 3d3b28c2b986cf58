"""`geo-diloco replay`: feeds a tape to a fresh core, redoes its updates, and names the first record that differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from geo_diloco.cli.options import answer
from geo_diloco.errors import TapeError


def replay(
    tape: Annotated[Path, typer.Argument(help="A peer's tape.jsonl, in its run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Replay a peer's tape: the same decisions, and for every update still held the same bits."""
    from geo_diloco.node import replay as replay_tape

    result = replay_tape(tape)
    if as_json:
        answer(json.dumps(dataclasses.asdict(result)))
    if result.divergence is not None:
        raise TapeError(f"{tape}: diverges at {result.divergence}")
    if not as_json:
        answer(
            f"{tape}: {result.num_events} events of {result.num_boots} starts gave the same {result.num_effects} "
            f"effects; {result.updates_checked} updates redone, every digest as committed"
        )
