"""How many parallel streams a transfer uses: as many as help on that link, and no more.

Lossy links carry several streams far better than one (facts: cubic at 100 ms and 0.5 % loss 3 / 19 / 32 Mbit/s with
1 / 4 / 8), a clean or narrow one gains nothing and every stream more is a queue more in front of everybody else. So the
number is climbed to: double while that gains a tenth, fall back when it doesn't, look again later, and less often the
less there was to find. Pure: who measures says how much was moved in how long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STREAMS_MAX = 16
STREAMS_FIRST = 8
"""For a link that nothing is known of."""
WINDOW_S = 1.0
WINDOW_ROUND_TRIPS = 5
"""A window lasts at least that many: a new stream needs some to get going."""
GAIN = 1.10
KEPT = 0.97
"""Fewer streams that carry this much of what more of them did are as good."""
CHANGED = 0.7
"""A rate below this share of the one we knew, or above its inverse, is another link."""
TRIAL_WINDOWS = 10
"""A trial costs a window of new connections getting going; with less than that many left it can't pay."""
REST_WINDOWS = 4
REST_WINDOWS_MAX = 32


def window_s(round_trip_s: float) -> float:
    return max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s)


@dataclass(frozen=True, slots=True)
class Climb:
    """Where the search stands. Begin with `Climb(first)`; `judged` gives the next after each window."""

    streams: int = STREAMS_FIRST
    """To be used now."""
    reason: str = "a first guess"
    settled: int = 0
    """Number of streams that the last trial came from; 0 while there is nothing to compare with."""
    rate: float = 0.0
    """Bytes per second with that many."""
    rest: int = 0
    """Windows until the next trial."""
    pause: int = REST_WINDOWS
    """How long the next rest is."""
    has_begun: bool = False
    """A window has passed with this many streams, in which they got going."""
    down_next: bool = False
    """Which way the next trial goes."""

    def judged(self, moved: int, elapsed_s: float, *, left: int) -> Climb:
        """After a window in which `moved` bytes went through, with all streams at work throughout. `left`: bytes that
        are still to be moved."""
        rate = moved / max(elapsed_s, 1e-6)
        if self.streams == (self.settled or self.streams) and left < TRIAL_WINDOWS * moved:
            return replace(self, reason="too little is left for a trial")
        if not self.has_begun:
            return replace(self, has_begun=True)
        if self.settled == 0:
            return self._grown(self.streams, rate)
        if self.streams == self.settled:
            return self._rested(rate)
        if self.streams > self.settled:
            if rate >= GAIN * self.rate:
                return replace(self._grown(self.streams, rate), pause=REST_WINDOWS)
            return self._back(f"{self.streams} streams carry {_times(rate, self.rate)}")
        if rate >= KEPT * self.rate:
            return self._shrunk(rate)
        return self._back(f"{self.streams} streams carry {_times(rate, self.rate)}")

    def _grown(self, at: int, rate: float) -> Climb:
        """The next trial upwards from `at`."""
        more = min(STREAMS_MAX, 2 * at)
        if more == at:
            return replace(self, streams=at, settled=at, rate=rate, rest=self.pause, reason=f"{at} is the most")
        reason = f"{at} carry {rate / 1e6:.2f} MB/s: do more carry more?"
        return replace(self, streams=more, settled=at, rate=rate, has_begun=False, reason=reason)

    def _shrunk(self, rate: float) -> Climb:
        """Fewer are as good: try fewer still."""
        at = self.streams
        if at == 1:
            return replace(self, settled=1, rate=rate, rest=self.pause, down_next=False, reason="one is as good")
        reason = f"{at} are as good as {self.settled}: are fewer?"
        return replace(self, streams=at // 2, settled=at, rate=rate, has_begun=False, reason=reason)

    def _back(self, reason: str) -> Climb:
        """The trial brought nothing."""
        return replace(
            self,
            streams=self.settled,
            rest=self.pause,
            pause=min(REST_WINDOWS_MAX, 2 * self.pause),
            has_begun=False,
            down_next=self.streams > self.settled and self.settled > 1,
            reason=reason,
        )

    def _rested(self, rate: float) -> Climb:
        if not CHANGED <= rate / max(self.rate, 1e-6) <= 1 / CHANGED:
            return replace(self._grown(self.streams, rate), pause=REST_WINDOWS)
        known = (self.rate + rate) / 2
        if self.rest > 1:
            return replace(self, rest=self.rest - 1, rate=known)
        if self.down_next or self.streams == STREAMS_MAX:
            reason = f"{self.streams} carry {known / 1e6:.2f} MB/s: do fewer?"
            return replace(self, streams=self.streams // 2, rate=known, has_begun=False, reason=reason)
        return self._grown(self.streams, known)


def _times(rate: float, before: float) -> str:
    return f"{rate / max(before, 1e-6):.2f} times as much"
