"""The queue of missing pieces: each is with one stream or with nobody."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from geo_diloco.runtime.pieces import PIECE_BYTES, by_piece, piece_size
from geo_diloco.runtime.spans import SPAN_PIECES_MAX, Missing, Span

FAST = 1e12


def test_a_run_is_shorter_towards_the_end_so_that_all_streams_end_together() -> None:
    missing = Missing(100 * PIECE_BYTES, range(100))
    lengths = []
    while (span := missing.take(4, bytes_per_s=FAST)) is not None:
        lengths.append(len(span.pieces()))
    assert lengths[0] == 12 and lengths == sorted(lengths, reverse=True) and lengths[-4:] == [1, 1, 1, 1]


def test_a_run_is_no_longer_than_a_stream_does_in_a_few_seconds() -> None:
    missing = Missing(1000 * PIECE_BYTES, range(1000))
    lengths = []
    for rate in (0.0, 1e3, 2.2e6, FAST):
        span = missing.take(1, bytes_per_s=rate)
        assert span is not None
        lengths.append(len(span.pieces()))
    assert lengths == [1, 1, 4, SPAN_PIECES_MAX], "while the rate is not known a run is one piece"


def test_a_piece_that_was_begun_comes_first_and_goes_on_where_it_was() -> None:
    missing = Missing(10 * PIECE_BYTES, range(10), {4: 77, 5: 88})
    assert missing.take(1, bytes_per_s=FAST) == Span(4, 4, 77)
    assert missing.take(1, bytes_per_s=FAST) == Span(5, 8, 88)
    assert missing.take(1, bytes_per_s=FAST) == Span(0, 1, 0)
    assert Span(4, 4, 77).num_bytes(10 * PIECE_BYTES) == PIECE_BYTES - 77


def test_who_has_only_some_pieces_gets_runs_of_these() -> None:
    missing = Missing(10 * PIECE_BYTES, range(10))
    assert missing.take(1, {2, 3, 7}, bytes_per_s=FAST) == Span(2, 3)
    assert missing.take(1, {2, 3, 7}, bytes_per_s=FAST) == Span(7, 7)
    assert missing.take(1, {2, 3, 7}, bytes_per_s=FAST) is None
    assert missing.has_any_of({0}) and not missing.has_any_of({3})


def test_what_broke_off_goes_back_with_its_offset_unless_somebody_moved_it() -> None:
    missing = Missing(4 * PIECE_BYTES, range(4))
    span = missing.take(1, bytes_per_s=FAST)
    assert span == Span(0, 1)
    missing.moved(0)
    missing.give_back(span.pieces(), {1: 5})
    assert missing.take(1, bytes_per_s=FAST) == Span(1, 1, 5)


def test_what_the_receiver_says_counts_for_pieces_that_nobody_is_moving() -> None:
    missing = Missing(4 * PIECE_BYTES, range(4))
    assert missing.take(1, bytes_per_s=FAST) == Span(0, 1)
    missing.know({0, 2}, {1: 9, 3: 9})
    assert missing.take(1, bytes_per_s=FAST) == Span(3, 3, 9)
    assert missing.num_free == 0 and not missing.is_over
    for i in range(4):
        missing.moved(i)
    assert missing.is_over


@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_no_piece_is_with_two_and_none_is_lost(num_pieces: int, streams: int, data: st.DataObject) -> None:
    size = num_pieces * PIECE_BYTES - 17
    missing = Missing(size, range(num_pieces))
    under_way: list[Span] = []
    done: set[int] = set()
    for _ in range(200):
        if missing.is_over:
            break
        if under_way and data.draw(st.booleans()):
            span = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            kept = data.draw(st.integers(0, len(span.pieces())))
            for i in span.pieces()[:kept]:
                missing.moved(i)
                done.add(i)
            missing.give_back(span.pieces()[kept:], {i: 3 for i in span.pieces()[kept : kept + 1]})
        elif (taken := missing.take(streams, bytes_per_s=FAST)) is not None:
            assert not {i for span in under_way for i in span.pieces()} & set(taken.pieces())
            assert not done & set(taken.pieces())
            under_way.append(taken)
    held = {i for span in under_way for i in span.pieces()}
    assert len(done) + len(held) + missing.num_free == num_pieces


@given(
    blob_size=st.integers(1, 4 * PIECE_BYTES),
    at=st.integers(0, 4 * PIECE_BYTES),
    size=st.integers(0, 3 * PIECE_BYTES),
)
@example(blob_size=3 * PIECE_BYTES, at=PIECE_BYTES // 2, size=2 * PIECE_BYTES)
@example(blob_size=3 * PIECE_BYTES, at=0, size=PIECE_BYTES - 1)
@example(blob_size=PIECE_BYTES + 7, at=PIECE_BYTES - 1, size=8)
def test_bytes_are_cut_where_pieces_end_and_none_is_lost(blob_size: int, at: int, size: int) -> None:
    at = min(at, blob_size)
    size = min(size, blob_size - at)
    chunk = bytes(size)
    came = 0
    for i, offset, part, is_last in by_piece(blob_size, at, chunk):
        assert i * PIECE_BYTES + offset == at + came
        assert 0 < len(part) <= piece_size(blob_size, i) - offset
        assert is_last == (offset + len(part) == piece_size(blob_size, i))
        came += len(part)
    assert came == size
