"""What this process remembers of the way to each address: how fast it was, with how many streams, and how it failed.

A transfer begins with what helped the last time, and whoever chooses among donors chooses by this. It is a memory of
this process alone: links change, and a fresh guess is soon corrected.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from geo_diloco.runtime.streams import STREAMS_FIRST, STREAMS_MAX

ROUTES_MAX = 1024
IN_VAIN_MAX = 3
"""Who did not get so many blobs while we waited for it is asked, but nobody waits for it any more."""
REST_S = 5.0
REST_S_MAX = 300.0
MEASURED_BYTES_MIN = 256 << 10
"""Less says more about the round trip than about the rate."""
_UNKNOWN = 1.0
"""Weight of an address that nothing is known of, among those of which something is: the mean of theirs."""
_WEIGHT_MIN = 0.05
"""Nobody is left out for good: how else would we learn that he has become faster?"""


@dataclass
class Route:
    """The way to one address."""

    bytes_per_s: float = 0.0
    """0 while nothing is known."""
    streams: int = STREAMS_FIRST
    round_trip_s: float = 0.0
    """The shortest wait for an answer; 0 while nothing is known."""
    failures: int = 0
    """Transfers in a row that this address failed."""
    rests_until: float = 0.0
    waited_in_vain: int = 0
    """Times in a row that it did not get what it hadn't got yet while we waited."""
    transfers: int = 0
    """Under way now."""
    upload_over_at: float = 0.0
    """When the last upload there had its answer."""

    @property
    def is_worth_waiting_for(self) -> bool:
        return self.waited_in_vain < IN_VAIN_MAX

    def answered(self, took_s: float) -> None:
        """A small question, or the last word on bytes that were all written so long ago."""
        self.round_trip_s = min(self.round_trip_s or took_s, took_s)

    def streams_max(self) -> int:
        """Of one more transfer: those to one address share what is of use there."""
        return max(1, STREAMS_MAX // max(1, self.transfers))


class Routes:
    """For the event loop's thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._routes: dict[str, Route] = {}

    def to(self, url: str) -> Route:
        route = self._routes.pop(url, None) or Route()
        self._routes[url] = route
        while len(self._routes) > ROUTES_MAX:
            del self._routes[next(iter(self._routes))]
        return route

    def worked(self, url: str, moved: int, elapsed_s: float, *, streams: int) -> None:
        """It moved so much, all streams together."""
        route = self.to(url)
        route.failures, route.rests_until = 0, 0.0
        if moved:
            route.waited_in_vain = 0
        if moved < MEASURED_BYTES_MIN:
            return
        rate = moved / max(elapsed_s, 1e-6)
        route.bytes_per_s = rate if not route.bytes_per_s else (route.bytes_per_s + rate) / 2
        route.streams = streams

    def failed(self, url: str) -> None:
        """It stalled, broke off for good or lied: it is not asked for a while, longer each time."""
        route = self.to(url)
        route.failures += 1
        route.rests_until = self._clock() + min(REST_S_MAX, REST_S * 2 ** (route.failures - 1))

    def is_resting(self, url: str) -> bool:
        return self.to(url).rests_until > self._clock()

    def ordered(self, urls: Sequence[str]) -> list[str]:
        """Each once, drawn without replacement with the measured rates as weights: the fast ones tend to come first,
        and many who choose do not all choose the same. Who rests comes last."""
        routes = {url: self.to(url) for url in urls}
        known = [route.bytes_per_s for route in routes.values() if route.bytes_per_s]
        mean = sum(known) / len(known) if known else _UNKNOWN
        keys = {}
        for url, route in routes.items():
            weight = max(_WEIGHT_MIN, (route.bytes_per_s or mean) / mean)
            keys[url] = (self.is_resting(url), -(self._rng.random() ** (1 / weight)))
        return sorted(routes, key=keys.__getitem__)
