"""Bulk held below a rate that this machine's owner set, so that others in the house can still use the line.

Everything that is bulk, in a direction, goes through one bucket, however many transfers and streams there are: who
takes more than there is goes into debt with the rest, and waits his turn. The bucket is pure; `Shaper` waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BURST_S = 0.1
"""What may go at once after a pause, in seconds of the rate."""
PORTION_BYTES = 16 << 10
"""Bulk that is held back is moved in portions of that size, or one stream would wait for ever behind another."""
_SLEEP_S_MAX = 1.0


class Bucket:
    """So many bytes per second, by a clock that the caller reads."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self._rate = bytes_per_s
        self._free_at = now
        """When all that was taken so far is paid for, at the rate."""

    def wait_s(self, size: int, now: float) -> float:
        """Take `size` bytes; how long to wait before they may go."""
        begin = max(self._free_at, now - BURST_S)
        self._free_at = begin + size / self._rate
        return max(0.0, begin - now)


class Shaper:
    """One direction's limit; none if the rate is 0. For the event loop's thread."""

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        *,
        spend: Callable[[int], None] = lambda size: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spend` is told of all that goes through."""
        self.bytes_per_s = bytes_per_s
        self._spend = spend
        self._clock = clock
        self._bucket = Bucket(bytes_per_s, clock()) if bytes_per_s else None

    @property
    def is_open(self) -> bool:
        return self._bucket is None

    def portion(self, unlimited: int) -> int:
        """How many bytes to move at a time, where without a limit it would be `unlimited`."""
        return unlimited if self._bucket is None else min(unlimited, PORTION_BYTES)

    async def take(self, size: int, *, touch: Callable[[], None] = lambda: None) -> None:
        """Wait until so many bytes may go. `touch` is called meanwhile: being held back is no standstill."""
        self._spend(size)
        if self._bucket is None:
            return
        wait_s = self._bucket.wait_s(size, self._clock())
        while wait_s > 0.0:
            await asyncio.sleep(min(wait_s, _SLEEP_S_MAX))
            wait_s -= _SLEEP_S_MAX
            touch()
