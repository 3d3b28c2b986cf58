"""Who has been waited for in vain for so long that a round which has only late work does not wait for it any more.

A learner whose uplink is broken, or who lies, may train and answer for ever and deliver nothing; by what it says it
looks like one whose first work is on its way. Only its record tells: it was asked for a fragment again and again, and
nothing of it became valid. Whatever it delivers wipes that out, as does absence, in which nobody waits for it.
"""

from __future__ import annotations

from geo_diloco.manifest import PeerId
from geo_diloco.protocol.schedule import MICRO

INTERVALS = 8
"""So many times a fragment came due while somebody was awaited: H inner steps of the median learner each."""


class Patience:
    """Of one term, with all learners; times are readings of the inner clock, in micro-steps."""

    def __init__(self, interval_steps: int) -> None:
        self._limit = INTERVALS * interval_steps * MICRO
        self._since: dict[PeerId, int] = {}
        """Who has been awaited since when, without a delivery; the first of them longest."""
        self._over: set[PeerId] = set()
        self._changed: dict[PeerId, None] = {}

    def awaited(self, peer: PeerId, now: int) -> None:
        """Some round waits for its work."""
        if peer not in self._over:
            self._since.setdefault(peer, now)

    def begin_again(self, peer: PeerId) -> None:
        """It delivered, or is not here to be waited for."""
        if self._since.pop(peer, None) is not None or peer in self._over:
            self._over.discard(peer)
            self._changed[peer] = None

    def is_over(self, peer: PeerId) -> bool:
        """As of when changes were taken last."""
        return peer in self._over

    @property
    def next_end(self) -> int | None:
        """When it is over with the next of them."""
        since = next(iter(self._since.values()), None)
        return None if since is None else since + self._limit

    def take_changed(self, now: int) -> list[PeerId]:
        """With whom it has begun again, or come to an end by now, since this was asked last."""
        while (end := self.next_end) is not None and end <= now:
            peer = next(iter(self._since))
            del self._since[peer]
            self._over.add(peer)
            self._changed[peer] = None
        changed, self._changed = self._changed, {}
        return list(changed)
