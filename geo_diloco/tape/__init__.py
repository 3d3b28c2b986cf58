"""The tape: every event a peer's core was given, with its time, and a short hash of what it asked for in return.

A core without I/O is a function of its events, so a tape is enough to live any moment of a run again: fed to a fresh
core it must ask for the same effects, and `replay` names the first record where it does not. The tape is written
*before* the core sees the event, unbuffered, so it survives the death of its process; a torn last line is what such
a death leaves behind and is ignored.

One JSON object a line. `boot` opens the tape of one process start and holds all that builds the core; `event` has the
time `t` in milliseconds of that process's monotonic clock; `effects` follows an event that asked for something, with
a hash of that and one over every line of the boot so far: a changed event shows even where nothing else was asked for
because of it. (Events after a boot's last `effects` have no such witness.) The parser is our own and typed by the
dataclasses themselves: the same text gives the same objects, or `TapeError`.
Nothing but facts is in it: no tensors, no keys, no tokens.
"""

from __future__ import annotations

from geo_diloco.tape.balance import (
    FragmentBalance,
    LearnerBalance,
    TokenSummary,
    summarize_boots,
    summarize_tokens,
    tokens_lost_after,
)
from geo_diloco.tape.form import build, effects_hash, from_json, plain, to_json
from geo_diloco.tape.record import TAPE_VERSION, Boot, TapeBoot, TapeEvent, TapeWriter, read_tape
from geo_diloco.tape.replaying import ReplayResult, replay, replay_boot

__all__ = [
    "TAPE_VERSION",
    "Boot",
    "FragmentBalance",
    "LearnerBalance",
    "ReplayResult",
    "TapeBoot",
    "TapeEvent",
    "TapeWriter",
    "TokenSummary",
    "build",
    "effects_hash",
    "from_json",
    "plain",
    "read_tape",
    "replay",
    "replay_boot",
    "summarize_boots",
    "summarize_tokens",
    "to_json",
    "tokens_lost_after",
]
