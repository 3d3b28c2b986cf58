"""Which contribution goes up next: one at a time, newest round first, and none overtaken for ever.

The next begins when all of the last one's bytes are on their way: to wait for the syncer's word on each would leave the
link idle for a round trip every time.

It stands apart because it is about a thin link and nothing else: whatever is queued here is undecided in the books, and
may be let go of at any time by a commit that took it or by a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence

from geo_diloco.protocol.messages import BlobRef, Contribution


class Uploads:
    """A learner's queue of contributions, the one that is under way, and those that only lack the syncer's word."""

    def __init__(self) -> None:
        self.under_way: BlobRef | None = None
        self._sent: set[BlobRef] = set()
        """One for each undecided contribution at most, which is one for each fragment."""
        self._overtaken_max = 0
        self._queued: list[Contribution] = []
        self._overtaken: dict[BlobRef, int] = {}
        """How often each of those was passed over."""

    def start(self, num_fragments: int) -> None:
        """The others of a queue may be overtaken once per fragment."""
        self._overtaken_max = num_fragments

    @property
    def is_idle(self) -> bool:
        return not self._queued and self.under_way is None and not self._sent

    @property
    def queued_bytes(self) -> int:
        """Of those that have not begun."""
        return sum(queued.blob.size for queued in self._queued)

    def holds(self, contribution: Contribution) -> bool:
        """Whether it is queued, under way, or sent and not confirmed."""
        return self._has_begun(contribution.blob) or contribution in self._queued

    def _has_begun(self, blob: BlobRef) -> bool:
        return self.under_way == blob or blob in self._sent

    def add(self, contribution: Contribution) -> None:
        """Queue it. Two that have the same bytes go up as one."""
        if all(queued.blob != contribution.blob for queued in self._queued) and not self._has_begun(contribution.blob):
            self._queued.append(contribution)

    def begin_again(self, contributions: Sequence[Contribution]) -> None:
        """Whoever is syncer now may have none of these. What has begun ends first."""
        self._queued = list(contributions)

    def next(self) -> Contribution | None:
        """The one to be uploaded now, if the link is free. What was overtaken once per fragment goes first: on a link
        that is always behind, a round that lacks its quorum is an old one, and would always lose."""
        free = [queued for queued in self._queued if queued.blob not in self._sent]
        if self.under_way is not None or not free:
            return None
        overtaken = {queued.blob: self._overtaken.get(queued.blob, 0) for queued in self._queued}
        waited = [queued for queued in free if overtaken[queued.blob] >= self._overtaken_max]
        chosen = waited[0] if waited else max(free, key=lambda queued: (queued.round, queued.id.last_step))
        self._queued.remove(chosen)
        self._overtaken = {queued.blob: overtaken[queued.blob] + 1 for queued in self._queued}
        self.under_way = chosen.blob
        return chosen

    def sent(self, blob: BlobRef) -> None:
        """All of it is on its way. What was let go of, or is not the one under way, is nobody's business any more."""
        if self.under_way == blob:
            self.under_way = None
            self._sent.add(blob)

    def over(self, blob: BlobRef) -> None:
        """It has ended, however it did."""
        self._sent.discard(blob)
        if self.under_way == blob:
            self.under_way = None

    def let_go(self, blob: BlobRef) -> None:
        """It is decided: nobody waits for these bytes, and nothing may be heard of their upload again."""
        self._queued = [queued for queued in self._queued if queued.blob != blob]
        self.over(blob)
