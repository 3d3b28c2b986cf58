"""Which pieces of a blob are still to be moved, and the runs of them that a stream takes at a time.

One request covers several pieces: each costs a round trip and the server a little work. A run is as long as takes a
stream a few seconds, and near the end of the blob shorter, so that all streams end at about the same time. A piece is
with one stream or with nobody, which is how nothing is moved twice; one that broke off comes back with the offset that
was reached. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from geo_diloco.runtime.pieces import PIECE_BYTES, piece_size

SPAN_PIECES_MAX = 16
SPAN_S = 2.0
"""What a run takes a stream, at most, unless one piece takes longer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Pieces `first` to `last`, from `offset` within the first one on."""

    first: int
    last: int
    offset: int = 0

    def pieces(self) -> range:
        return range(self.first, self.last + 1)

    def num_bytes(self, blob_size: int) -> int:
        """From the offset on."""
        whole = (self.last - self.first) * PIECE_BYTES + piece_size(blob_size, self.last)
        return whole - self.offset


class Missing:
    """The pieces of one blob that nobody is moving, and the count of those that somebody is."""

    def __init__(self, blob_size: int, pieces: Iterable[int], offsets: Mapping[int, int] | None = None) -> None:
        self._size = blob_size
        self._free: dict[int, int] = {i: (offsets or {}).get(i, 0) for i in sorted(pieces)}
        """Piece -> offset reached; in order."""
        self._begun: dict[int, None] = {}
        """Those of them that begin beyond 0."""
        self._taken: set[int] = set()
        self._note_begun()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_over(self) -> bool:
        return not self._free and not self._taken

    @property
    def num_bytes(self) -> int:
        """Of pieces that nobody is moving."""
        return sum(piece_size(self._size, i) - offset for i, offset in self._free.items())

    def has_any_of(self, pieces: Collection[int] | None) -> bool:
        """`pieces`: None for all."""
        return bool(self._free) if pieces is None else any(i in self._free for i in pieces)

    def take(self, num_streams: int, having: Collection[int] | None = None, *, bytes_per_s: float = 0.0) -> Span | None:
        """For one of so many streams, of the pieces in `having` (None: of all); None if there is none. `bytes_per_s`:
        of the one stream; while it is not known a run is one piece.

        A piece that was begun comes first, because its bytes are held in memory, and begins a run of its own.
        """
        begun = (i for i in self._begun if having is None or i in having)
        first = next(begun, None)
        if first is None:
            first = next((i for i in self._free if having is None or i in having), None)
        if first is None:
            return None
        most = min(SPAN_PIECES_MAX, len(self._free) // (2 * max(1, num_streams)))
        most = max(1, min(most, int(SPAN_S * bytes_per_s / PIECE_BYTES)))
        last = first
        while last - first + 1 < most and self._free.get(last + 1) == 0 and (having is None or last + 1 in having):
            last += 1
        span = Span(first, last, self._free[first])
        for i in span.pieces():
            del self._free[i]
            self._taken.add(i)
        self._begun.pop(first, None)
        return span

    def moved(self, i: int) -> None:
        """Piece `i` is where it was to go, whoever brought it."""
        self._free.pop(i, None)
        self._begun.pop(i, None)
        self._taken.discard(i)

    def give_back(self, pieces: Iterable[int], offsets: Mapping[int, int] | None = None) -> None:
        """They are still missing and nobody moves them now. A piece that was moved meanwhile stays so."""
        for i in pieces:
            if i in self._taken:
                self._taken.discard(i)
                self._free[i] = (offsets or {}).get(i, 0)
        self._free = dict(sorted(self._free.items()))
        self._note_begun()

    def know(self, held: Collection[int], offsets: Mapping[int, int]) -> None:
        """What the receiving side says it holds; about pieces that are under way it may be out of date."""
        for i in list(self._free):
            if i in held:
                del self._free[i]
            else:
                self._free[i] = offsets.get(i, 0)
        self._note_begun()

    def _note_begun(self) -> None:
        self._begun = {i: None for i, offset in self._free.items() if offset > 0}
