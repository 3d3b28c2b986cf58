"""Results that outlive a command: one JSON line for each arm and seed that is done, under a key of all that it came
from.

A second command with the same folder takes over what has the same key, and runs the rest. The key is of what was asked
for (the manifest with its seed, the machines, the plan of faults, the version of this package), not of how an arm was
typed: `K=1` and `quorum=1` are the same arm, and with another learner or plan every arm is another one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from geo_diloco.errors import ConfigError
from geo_diloco.sim.train.arms import Arm
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.sim.train.results import ArmResult

FILE_NAME = "results.jsonl"
_NUMBER = (int, float)


def key_of(arm: Arm, fleet: Fleet, seed: int, *, version: str) -> str:
    """Of one result of this version of the package."""
    theirs = fleet if arm.under_faults else fleet.without_faults()
    plan = asdict(theirs.plan) | {"faults": [fault.model_dump() for fault in theirs.plan.faults]}
    how = {field.name: getattr(arm, field.name) for field in fields(arm) if field.name not in ("text", "manifest")}
    asked = {
        "version": version,
        "arm": how,
        "manifest": asdict(arm.seeded(seed)),
        "machines": [asdict(machine) for machine in theirs.machines],
        "joins": theirs.joins,
        "plan": plan,
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=repr).encode()).hexdigest()[:32]


class Kept:
    """The results of one folder. Several commands may add to it at once."""

    def __init__(self, folder: Path, warn: Callable[[str], None], *, version: str) -> None:
        """`warn` hears of lines that can't be read; their arms are run again. Raises ConfigError."""
        self._version = version
        self._path = folder / FILE_NAME
        self._results: dict[str, ArmResult] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
            with self._path.open("ab"):
                pass  # can it be written? Better to know before hours of training
        except OSError as exc:
            raise ConfigError(f"--out {folder}: {exc.strerror or exc}; choose another folder") from exc
        for number, line in enumerate(lines, 1):
            read = _read(line)
            if read is not None:
                self._results[read[0]] = read[1]
            elif line.strip():
                warn(f"{self._path}, line {number}: no result that can be read; its arm is run again")

    def key(self, arm: Arm, fleet: Fleet, seed: int) -> str:
        return key_of(arm, fleet, seed, version=self._version)

    def get(self, key: str, arm: Arm) -> ArmResult | None:
        """Under the name by which it is asked for now."""
        found = self._results.get(key)
        return None if found is None else replace(found, arm=arm.text)

    def add(self, key: str, result: ArmResult) -> None:
        """On the disk when this returns, after whatever a command that was killed left there. Raises ConfigError."""
        self._results[key] = result
        line = json.dumps({"key": key} | result.to_json()).encode() + b"\n"
        try:
            with self._path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                end = file.seek(0, os.SEEK_END)
                if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                    line = b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as exc:
            raise ConfigError(
                f"--out {self._path.parent}: {exc.strerror or exc}; free some space, and run it again"
            ) from exc


def _read(line: bytes) -> tuple[str, ArmResult] | None:
    """(key, result) of a line; none if it is not whole, or not of these fields."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(key := values.pop("key", None), str):
        return None
    if set(values) != {field.name for field in fields(ArmResult)}:
        return None
    kinds = {field.name: str(field.type) for field in fields(ArmResult)}
    if not all(_fits(values[name], kind) for name, kind in kinds.items()):
        return None
    curve = tuple((tokens, ms, loss) for tokens, ms, loss in values["curve"])
    return key, ArmResult(**values | {"curve": curve, "curve_accuracy": tuple(values["curve_accuracy"])})


def _fits(value: Any, kind: str) -> bool:
    """Is it what the field's annotation says?"""
    match kind:
        case "str":
            return isinstance(value, str)
        case "str | None":
            return value is None or isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "int":
            return type(value) is int
        case "float":
            return type(value) in _NUMBER
        case "float | None":
            return value is None or type(value) in _NUMBER
        case "dict[str, int]":
            return isinstance(value, dict) and all(type(each) is int for each in value.values())
        case "tuple[float | None, ...]":
            return isinstance(value, list) and all(_fits(each, "float | None") for each in value)
        case _:  # the curve
            return isinstance(value, list) and bool(value) and all(_is_point(each) for each in value)


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and type(value[0]) is type(value[1]) is int
        and _fits(value[2], "float | None")
    )
