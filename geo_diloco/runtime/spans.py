"""Which bytes of a blob are still to be moved, and the spans of them that a stream takes at a time.

One request covers one span: each costs a round trip and the server a little work. A span is as long as takes a stream a
few seconds, and near the end of the blob shorter, so that all streams end at about the same time: the last ones are
parts of pieces, as are all of a blob that is small. A byte is with one stream or with nobody, which is how nothing is
moved twice; what broke off comes back. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from geo_diloco.runtime.pieces import PIECE_BYTES, piece_range
from geo_diloco.runtime.ranges import Range, joined, num_bytes, without

SPAN_BYTES_MAX = 16 << 20
SPAN_BYTES_MIN = 64 << 10
"""Shorter ones would cost more in requests than they gain."""
UNEVEN = 4
"""So many times slower than the mean a stream may be and yet end with the others: under BBR some are."""
SPAN_S = 2.0
"""What a span takes a stream, at most, unless the shortest takes longer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a blob, from `begin` to before `end`."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def pieces(self) -> range:
        return range(self.begin // PIECE_BYTES, -(-self.end // PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class Report:
    """What the receiving side lacks, by its own word."""

    lacking: list[Range]
    moved_before: list[Range]
    """`Missing.moved_so_far` when it was asked: what got there meanwhile it may not have counted."""


class Missing:
    """The bytes of one blob that nobody is moving, and those that somebody is."""

    def __init__(self, blob_size: int, free: Iterable[Range]) -> None:
        self._size = blob_size
        self._free = joined(free)
        self._taken: list[Span] = []
        self._moved: list[Range] = []
        self._alone: set[int] = set()
        """Pieces that are moved in one span each."""

    @property
    def is_over(self) -> bool:
        return not self._free and not self._taken

    @property
    def num_bytes(self) -> int:
        """That nobody is moving."""
        return num_bytes(self._free)

    @property
    def moved_so_far(self) -> list[Range]:
        return list(self._moved)

    def has_any_of(self, pieces: Collection[int] | None) -> bool:
        """`pieces`: None for all."""
        return next(self._allowed(pieces), None) is not None

    def take(
        self,
        num_streams: int,
        having: Collection[int] | None = None,
        *,
        bytes_per_s: float = 0.0,
        at_least: int = SPAN_BYTES_MIN,
    ) -> Span | None:
        """For one of so many streams, of the pieces in `having` (None: of all); None if there is none. `bytes_per_s`:
        of the one stream; while it is not known a span is one piece at most. `at_least`: what a stream has on its way,
        unless its share of the rest is less.

        A piece that was begun comes first, because its bytes are held in memory.
        """
        first: Range | None = None
        for each in self._allowed(having):
            first = first or each
            if each[0] % PIECE_BYTES:
                first = each
                break
        if first is None:
            return None
        share = self.num_bytes // max(1, num_streams)
        most = min(SPAN_BYTES_MAX, share // (UNEVEN if num_streams > 1 else 2))
        most = min(most, int(SPAN_S * bytes_per_s) if bytes_per_s else PIECE_BYTES)
        begin, end = first
        if not self._alone.intersection(Span(begin, end).pieces()):
            end = _end_of(begin, end, max(SPAN_BYTES_MIN, min(at_least, share), most))
        self._free = without(self._free, [(begin, end)])
        self._taken.append(Span(begin, end))
        return self._taken[-1]

    def _allowed(self, having: Collection[int] | None) -> Iterator[Range]:
        """What may be taken, in order; a piece that is to be alone by itself, if all of it is there."""
        if having is None and not self._alone:
            yield from self._free
            return
        self._complete_alone()
        for begin, end in self._free:
            run = begin
            for i in Span(begin, end).pieces():
                piece = piece_range(self._size, i)
                if (having is None or i in having) and i not in self._alone:
                    continue
                if run < piece[0]:
                    yield run, piece[0]
                if i in self._alone and (having is None or i in having) and begin <= piece[0] and piece[1] <= end:
                    yield piece
                run = piece[1]
            if run < end:
                yield run, end

    def _complete_alone(self) -> None:
        """Of a piece that is to be moved as a whole nothing counts that came otherwise."""
        for i in sorted(self._alone):
            piece = piece_range(self._size, i)
            is_under_way = any(span.begin < piece[1] and piece[0] < span.end for span in self._taken)
            if not is_under_way and without([piece], self._free) != [piece]:
                self._free = joined([*self._free, piece])
                self._moved = without(self._moved, [piece])

    def finished(self, span: Span) -> None:
        """It went through."""
        self._taken.remove(span)
        self.moved((span.begin, span.end))

    def moved(self, where: Range) -> None:
        """Those bytes are where they were to go, whoever brought them."""
        self._free = without(self._free, [where])
        self._moved = joined([*self._moved, where])

    def give_back(self, span: Span) -> None:
        """This one does not move it now. What of it got through meanwhile, or another moves too, is not missing."""
        self._taken.remove(span)
        others = [(each.begin, each.end) for each in self._taken]
        self._free = joined([*self._free, *without([(span.begin, span.end)], [*self._moved, *others])])

    def know(self, report: Report) -> None:
        """What nobody is moving is now what the receiving side says that it lacks."""
        meanwhile = without(self._moved, report.moved_before)
        taken = [(span.begin, span.end) for span in self._taken]
        self._free = without(report.lacking, [*taken, *meanwhile])
        self._moved = without(self._moved, self._free)

    def keep_whole(self, i: int) -> None:
        """From now on piece `i` is moved by one stream, all of it."""
        self._alone.add(i)


def _end_of(begin: int, end: int, size: int) -> int:
    """Where a span of about `size` ends that begins there: at the end of a piece, if it is long, and without leaving a
    crumb."""
    if end - begin < size + SPAN_BYTES_MIN:
        return end
    whole = (begin + size) // PIECE_BYTES * PIECE_BYTES
    return whole if size >= PIECE_BYTES and whole > begin else begin + size
