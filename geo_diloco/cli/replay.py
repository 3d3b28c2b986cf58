"""`geo-diloco replay`: feeds a tape to a fresh core, redoes its updates and merges, and names what differs first."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geo_diloco.cli.options import answer
from geo_diloco.errors import TapeError

if TYPE_CHECKING:
    from geo_diloco.tape import ReplayResult


def replay(
    tape: Annotated[Path, typer.Argument(help="A peer's run folder, or the tape.jsonl in it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Replay a peer's tape: the same decisions, and for every update and contribution still held the same bits."""
    from geo_diloco.node import replay as replay_tape

    result = replay_tape(tape / "tape.jsonl" if tape.is_dir() else tape)
    if as_json:
        answer(json.dumps(dataclasses.asdict(result)))
    if result.divergence is not None:
        raise TapeError(f"{tape}: diverges at {result.divergence}")
    if not as_json:
        answer(
            f"{tape}: {result.num_events} events of {result.num_boots} starts gave the same {result.num_effects} "
            f"effects; {result.updates_checked} updates redone, every digest as committed{_merges(result)}"
        )


def _merges(result: ReplayResult) -> str:
    """Of a peer that was syncer: what became of its merges."""
    if not result.merges_redone + result.merges_missing:
        return ""
    redone = f"; {result.merges_redone} merges redone, to the same bits"
    if not result.merges_missing:
        return redone
    return (
        f"{redone}; {result.merges_missing} could not be redone, because contributions are not held here "
        "(a syncer keeps them with --keep-contributions)"
    )
