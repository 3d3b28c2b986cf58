"""How much bulk may go over this machine's line in a day, remembered over restarts.

What is used up ends being a mirror for others and nothing else: a run that its owner wants to take part in must not
stop for it. A day is one of UTC, so that a restart or a clock change does not give it twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from geo_diloco.runtime.disk import atomic_write

WRITE_EVERY_BYTES = 16 << 20
"""A process that is killed forgets at most that much."""
_FILE_BYTES_MAX = 1024
_DAY_S = 86_400


class Quota:
    """For the event loop's thread."""

    def __init__(self, path: Path | None, bytes_per_day: int, *, clock: Callable[[], float] = time.time) -> None:
        """No limit if `bytes_per_day` is 0; without a path nothing is remembered."""
        self._path = path if bytes_per_day else None
        self.bytes_per_day = bytes_per_day
        self._clock = clock
        self._day, self._used = self._read()
        self._written = self._used

    @property
    def used(self) -> int:
        """Bytes, today."""
        self._turn_day()
        return self._used

    def spend(self, size: int) -> None:
        self._turn_day()
        self._used += size
        if self._used - self._written >= WRITE_EVERY_BYTES:
            self.save()

    def why_used_up(self) -> str:
        """Empty while there is some left."""
        if not self.bytes_per_day or self.used < self.bytes_per_day:
            return ""
        left_h = (_DAY_S - self._clock() % _DAY_S) / 3600
        return f"the quota of {self.bytes_per_day / 1e9:g} GB a day is used up for another {left_h:.1f} h"

    def save(self) -> None:
        """A disk that can't take it costs the memory of a day, no more."""
        self._written = self._used
        if self._path is None:
            return
        try:
            atomic_write(self._path, json.dumps({"day": self._day, "bytes": self._used}).encode(), syncs=False)
        except OSError:
            return

    def _turn_day(self) -> None:
        day = int(self._clock() // _DAY_S)
        if not day <= self._day <= day + 1:  # a clock that was far ahead is right again
            self._day, self._used, self._written = day, 0, 0

    def _read(self) -> tuple[int, int]:
        today = int(self._clock() // _DAY_S)
        if self._path is None:
            return today, 0
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(_FILE_BYTES_MAX))
            day, used = found["day"], found["bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return today, 0
        if not isinstance(day, int) or not isinstance(used, int) or not today <= day <= today + 1 or used < 0:
            return today, 0
        return day, used
