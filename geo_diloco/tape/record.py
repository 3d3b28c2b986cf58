"""A tape as a file: one JSON object a line, appended before the core hears of it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from geo_diloco.errors import TapeError
from geo_diloco.manifest import BootId, Digest, MonoMs, PeerId, RunId, RunRules
from geo_diloco.protocol.effects import Effect
from geo_diloco.protocol.events import Event
from geo_diloco.protocol.peer import Peer, Role
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.tape.form import build, effects_hash, from_json, plain, to_json

TAPE_VERSION = 3
WAITING_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 8 * 1024 * 1024
"""No honest record is near this: an entry is at most 4 MiB."""


@dataclass(frozen=True, kw_only=True)
class Boot:
    """What a process start fixed: enough to build the same core again."""

    peer: PeerId
    boot: BootId
    role: Role
    run: RunId
    layout_digest: Digest
    hello: HelloFacts
    rules: RunRules
    seat: Seat = field(default_factory=Seat)
    version: int = TAPE_VERSION

    def fresh_core(self) -> Peer:
        return Peer(
            peer=self.peer,
            boot=self.boot,
            role=self.role,
            rules=self.rules,
            run=self.run,
            layout_digest=self.layout_digest,
            hello=self.hello,
            seat=self.seat,
        )


@dataclass
class TapeEvent:
    """One event as recorded. `effects` is the hash of what it caused; none if nothing was asked for or recorded."""

    line: int
    at: MonoMs
    event: Event
    effects: str | None = None
    changed_after: int | None = None
    """A record after that line, up to this event's, is not as it was written."""


@dataclass
class TapeBoot:
    """The part of a tape that one process start wrote."""

    line: int
    boot: Boot
    events: list[TapeEvent] = field(default_factory=list)


# ---- writing -------------------------------------------------------------------------------------------------------


class TapeWriter:
    """Appends to a tape, from one thread. Each record is one `write`, so a killed process loses at most a line.

    A disk that is full for a while is waited out in memory; for longer, the tape ends there, and the run goes on.
    """

    def __init__(self, path: Path, boot: Boot) -> None:
        torn = path.exists() and _ends_torn(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._waiting = bytearray()
        self._inputs = _inputs_hash()
        if torn:
            os.write(self._fd, b"\n")
        self._write({"kind": "boot", **plain(boot)})

    def event(self, event: Event, at: MonoMs) -> None:
        self._write({"kind": "event", "t": at, **to_json(event)})

    def effects(self, effects: Sequence[Effect]) -> None:
        """To be called after `event` if it caused any."""
        record = {"n": len(effects), "hash": effects_hash(effects), "inputs": self._inputs.hexdigest()}
        self._write({"kind": "effects", **record})

    def close(self) -> None:
        if self._fd >= 0:
            self._flush()
            os.close(self._fd)
            self._fd = -1

    def _write(self, record: dict[str, Any]) -> None:
        if self._fd < 0:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self._inputs.update(line)
        self._waiting += line
        self._flush()
        if len(self._waiting) > WAITING_BYTES_MAX:
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting)]
        except OSError:
            return  # tried again with the next record


def _inputs_hash() -> hashlib.blake2s:
    """Runs over the lines of one boot. An event that changes nothing asked for would else be nobody's witness."""
    return hashlib.blake2s(digest_size=8)


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


# ---- reading -------------------------------------------------------------------------------------------------------


def read_tape(path: Path) -> Iterator[TapeBoot]:
    """The boots of a tape, oldest first. A torn line at a boot's end is ignored, anything else raises TapeError.

    What a kill tears is the last line a process wrote, so there is one at most, and at the end of the file it has no
    end of line: a next process has that written before its own first record.
    """
    current: TapeBoot | None = None
    seen = _Seen(0)
    torn: int | None = None
    is_cut = False
    for line, data in _lines(path):
        record = _parse_line(data)
        if record is None:
            if torn is not None or current is None:
                raise TapeError(f"{path.name}:{torn or line}: not a JSON record")
            torn, is_cut = line, not data.endswith(b"\n")
            continue
        kind = record.pop("kind", None)
        if torn is not None and kind != "boot":
            raise TapeError(f"{path.name}:{torn}: not a JSON record")
        torn = None
        if kind == "boot":
            if current is not None:
                yield current
            current, seen = TapeBoot(line, _boot_from_record(record, f"{path.name}:{line}")), _Seen(line - 1)
        elif current is None:
            raise TapeError(f"{path.name}:{line}: a tape begins with a boot record, this one with {kind!r}")
        else:
            _take(current, kind, record, line=line, where=f"{path.name}:{line}")
            if kind == "effects":
                current.events[-1].changed_after = seen.why_changed(record, line)
        seen.lines.update(data)
    if torn is not None and not is_cut:
        raise TapeError(f"{path.name}:{torn}: not a JSON record")
    if current is not None:
        yield current


@dataclass
class _Seen:
    """The lines of one boot, as read."""

    verified: int
    """The last line up to which all is as written."""
    lines: hashlib.blake2s = field(default_factory=_inputs_hash)

    def why_changed(self, record: dict[str, Any], line: int) -> int | None:
        """At a record of effects, before it is seen itself: the line after which one was changed, if one was."""
        if record.get("inputs") != self.lines.hexdigest():
            return self.verified
        self.verified = line
        return None


def _take(current: TapeBoot, kind: object, record: dict[str, Any], *, line: int, where: str) -> None:
    if kind == "event":
        at = record.pop("t", None)
        if type(at) is not int:
            raise TapeError(f"{where}: t must be whole milliseconds, not {at!r}")
        current.events.append(TapeEvent(line, MonoMs(at), cast(Event, from_json(record, where=where))))
    elif kind == "effects" and current.events and isinstance(record.get("hash"), str):
        current.events[-1].effects = record["hash"]
    else:
        raise TapeError(f"{where}: unexpected record {kind!r}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(data) > LINE_BYTES_MAX:
                    raise TapeError(f"{path.name}:{number}: a line of more than {LINE_BYTES_MAX} bytes")
                if data.strip():
                    yield number, data
    except OSError as exc:
        raise TapeError(f"can't read the tape {path}: {exc.strerror or exc}") from exc


def _parse_line(data: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _boot_from_record(record: dict[str, Any], where: str) -> Boot:
    if record.get("version") != TAPE_VERSION:
        raise TapeError(f"{where}: tape version {record.get('version')!r}, this program reads {TAPE_VERSION}")
    try:
        return cast(Boot, build(Boot, record, where))
    except TapeError as exc:
        raise TapeError(f"{exc}; a tape is for the version of this program that wrote it") from exc
