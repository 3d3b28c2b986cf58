"""Which contribution goes up next: one at a time, newest round first, and none overtaken for ever.

It stands apart because it is about a thin link and nothing else: whatever is queued here is undecided in the books, and
may be let go of at any time by a commit that took it or by a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence

from geo_diloco.protocol.messages import BlobRef, Contribution


class Uploads:
    """A learner's queue of contributions, and the one that is under way."""

    def __init__(self) -> None:
        self.under_way: BlobRef | None = None
        self._overtaken_max = 0
        self._queued: list[Contribution] = []
        self._overtaken: dict[BlobRef, int] = {}
        """How often each of those was passed over."""

    def start(self, num_fragments: int) -> None:
        """The others of a queue may be overtaken once per fragment."""
        self._overtaken_max = num_fragments

    @property
    def is_idle(self) -> bool:
        return not self._queued and self.under_way is None

    @property
    def queued_bytes(self) -> int:
        """Of those that are not under way."""
        return sum(queued.blob.size for queued in self._queued)

    def holds(self, contribution: Contribution) -> bool:
        """Whether it is queued or under way."""
        return self.under_way == contribution.blob or contribution in self._queued

    def add(self, contribution: Contribution) -> None:
        """Queue it. Two that have the same bytes go up as one."""
        if all(queued.blob != contribution.blob for queued in self._queued) and self.under_way != contribution.blob:
            self._queued.append(contribution)

    def begin_again(self, contributions: Sequence[Contribution]) -> None:
        """Whoever is syncer now may have none of these. What is under way ends first."""
        self._queued = list(contributions)

    def next(self) -> Contribution | None:
        """The one to be uploaded now, if the link is free. What was overtaken once per fragment goes first: on a link
        that is always behind, a round that lacks its quorum is an old one, and would always lose."""
        if self.under_way is not None or not self._queued:
            return None
        overtaken = {queued.blob: self._overtaken.get(queued.blob, 0) for queued in self._queued}
        waited = [queued for queued in self._queued if overtaken[queued.blob] >= self._overtaken_max]
        chosen = waited[0] if waited else max(self._queued, key=lambda queued: (queued.round, queued.id.last_step))
        self._queued.remove(chosen)
        self._overtaken = {queued.blob: overtaken[queued.blob] + 1 for queued in self._queued}
        self.under_way = chosen.blob
        return chosen

    def over(self, blob: BlobRef) -> None:
        """It is not under way any more, however it ended."""
        if self.under_way == blob:
            self.under_way = None

    def let_go(self, blob: BlobRef) -> None:
        """It is decided: nobody waits for these bytes, and nothing may be heard of their upload again."""
        self._queued = [queued for queued in self._queued if queued.blob != blob]
        self.over(blob)
