"""Feeding a tape to fresh cores: the same events must ask for the same effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_diloco.errors import TapeError
from geo_diloco.protocol.effects import Effect
from geo_diloco.protocol.peer import Peer
from geo_diloco.tape.form import effects_hash
from geo_diloco.tape.record import TapeBoot, TapeEvent, read_tape


@dataclass
class ReplayResult:
    """What a replay found. `divergence` names the first record that differs, or is none."""

    num_boots: int = 0
    num_events: int = 0
    num_effects: int = 0
    updates_checked: int = 0
    """Filled in, as what follows, by whoever can redo updates and merges (`node.replay`)."""
    merges_redone: int = 0
    """Commits of this peer that were merged again, to the same bits."""
    merges_missing: int = 0
    """Commits of this peer that could not be: contributions are not held here."""
    divergence: str | None = None


Watch = Callable[[TapeBoot, TapeEvent, Sequence[Effect]], str | None]
"""Is told every record and what it caused, in order; what it finds to differ, if anything, ends the replay."""


def replay(path: Path, *, watch: Watch | None = None) -> ReplayResult:
    """Feed a tape to fresh cores, one per boot; stop at the first record whose effects differ. Raises TapeError."""
    result = ReplayResult()
    for part in read_tape(path):
        result.num_boots += 1
        for record, effects in _replayed(part, path):
            result.num_events += 1
            result.num_effects += len(effects)
            difference = _changed(record) or _difference(record, effects, is_last=record is part.events[-1])
            if difference is None and watch is not None:
                difference = watch(part, record, effects)
            if difference is not None:
                result.divergence = f"{path.name}:{record.line}: {type(record.event).__name__}: {difference}"
                return result
    if not result.num_boots:
        raise TapeError(f"{path}: no tape, there is not one record in it")
    return result


def _replayed(part: TapeBoot, path: Path) -> Iterator[tuple[TapeEvent, list[Effect]]]:
    try:
        yield from replay_boot(part)
    except TapeError as exc:
        raise TapeError(f"{path.name}:{exc}") from exc


def replay_boot(part: TapeBoot, core: Peer | None = None) -> Iterator[tuple[TapeEvent, list[Effect]]]:
    """Each recorded event with the effects that a fresh core (the one given, if any) asks for.

    Raises TapeError, beginning with the line, for an event that no core was ever given.
    """
    core = core or part.boot.fresh_core()
    last = part.line
    for record in part.events:
        last = record.line
        try:
            effects = core.handle(record.event, record.at)
        except Exception as exc:  # a core trusts its shell; a tape may have been through anybody's hands
            raise TapeError(f"{last}: {type(record.event).__name__}: no core was given this: {_said(exc)}") from exc
        yield record, effects
    try:
        core.check_invariants()
    except Exception as exc:
        raise TapeError(f"{last}: the books don't add up after this record: {_said(exc)}") from exc


def _said(exc: Exception) -> str:
    return f"{type(exc).__name__} {' '.join(str(exc).split())[:200]}".strip()


def _changed(record: TapeEvent) -> str | None:
    after = record.changed_after
    return None if after is None else f"what stands after line {after} is not as it was written"


def _difference(record: TapeEvent, effects: list[Effect], *, is_last: bool) -> str | None:
    ours = effects_hash(effects) if effects else None
    if ours == record.effects or (record.effects is None and is_last):
        return None
    names = ", ".join(type(effect).__name__ for effect in effects) or "nothing"
    return f"asked for {names} ({ours}), the tape says {record.effects}"
