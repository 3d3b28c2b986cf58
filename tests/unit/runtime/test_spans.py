"""The queue of missing bytes: each is with one stream or with nobody."""

from __future__ import annotations

import heapq
import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from geo_diloco.runtime.pieces import PIECE_BYTES, by_piece, piece_size
from geo_diloco.runtime.ranges import joined, num_bytes, without
from geo_diloco.runtime.spans import SPAN_BYTES_MAX, SPAN_BYTES_MIN, Missing, Report, Span

FAST = 1e12


def test_a_span_is_shorter_towards_the_end_so_that_all_streams_end_together() -> None:
    missing = Missing(100 * PIECE_BYTES, [(0, 100 * PIECE_BYTES)])
    lengths = []
    while (span := missing.take(4, bytes_per_s=FAST)) is not None:
        lengths.append(span.num_bytes)
    assert lengths[0] == 6 * PIECE_BYTES and lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert max(lengths[-4:]) < 2 * SPAN_BYTES_MIN and sum(lengths) == 100 * PIECE_BYTES


def test_a_span_is_no_longer_than_a_stream_does_in_a_few_seconds() -> None:
    missing = Missing(1000 * PIECE_BYTES, [(0, 1000 * PIECE_BYTES)])
    lengths = []
    for rate in (0.0, 1e3, 2.2e6, FAST):
        span = missing.take(1, bytes_per_s=rate)
        assert span is not None
        lengths.append(span.num_bytes)
    assert lengths[:2] == [PIECE_BYTES, SPAN_BYTES_MIN], "while the rate is not known it is one piece"
    assert 4e6 < lengths[2] <= 4.4e6 and SPAN_BYTES_MAX - PIECE_BYTES < lengths[3] <= SPAN_BYTES_MAX


def test_streams_that_are_fast_and_slow_end_together() -> None:
    size, rates = 100_000_000, [4e5, 8e5, 9e5, 1e6, 1.4e6, 1.6e6, 2.9e6, 3e6]
    missing = Missing(size, [(0, size)])
    at_work: list[tuple[float, float, Span | None]] = [(0.0, rate, None) for rate in rates]
    while at_work:
        now, rate, span = heapq.heappop(at_work)
        if span is not None:
            missing.finished(span)
        span = missing.take(len(rates), bytes_per_s=1.5e6, at_least=150_000)
        if span is not None:
            heapq.heappush(at_work, (now + span.num_bytes / rate, rate, span))
    assert missing.is_over and now < size / sum(rates) + 0.18


def test_a_small_blob_is_shared_by_all_streams_without_crumbs() -> None:
    for size in (1, SPAN_BYTES_MIN, 2 * SPAN_BYTES_MIN - 1, 300_000, PIECE_BYTES - 7):
        missing = Missing(size, [(0, size)])
        spans = []
        while (span := missing.take(8)) is not None:
            spans.append(span)
        assert len(spans) == max(1, size // SPAN_BYTES_MIN)
        assert min(span.num_bytes for span in spans) >= min(size, SPAN_BYTES_MIN)


def test_a_piece_that_was_begun_comes_first_and_goes_on_where_it_was() -> None:
    lacking = [(0, 4 * PIECE_BYTES), (4 * PIECE_BYTES + 77, 5 * PIECE_BYTES), (5 * PIECE_BYTES + 88, 20 * PIECE_BYTES)]
    missing = Missing(20 * PIECE_BYTES, lacking)
    assert missing.take(1, bytes_per_s=FAST) == Span(4 * PIECE_BYTES + 77, 5 * PIECE_BYTES)
    assert missing.take(1, bytes_per_s=FAST) == Span(5 * PIECE_BYTES + 88, 14 * PIECE_BYTES), "to the end of a piece"
    assert missing.take(1, bytes_per_s=FAST) == Span(0, 4 * PIECE_BYTES)


def test_who_has_only_some_pieces_gets_spans_of_these() -> None:
    missing = Missing(10 * PIECE_BYTES - 5, [(0, 10 * PIECE_BYTES - 5)])
    assert missing.take(1, {2, 3, 9}, bytes_per_s=FAST) == Span(2 * PIECE_BYTES, 4 * PIECE_BYTES)
    assert missing.take(1, {2, 3, 9}, bytes_per_s=FAST) == Span(9 * PIECE_BYTES, 10 * PIECE_BYTES - 5)
    assert missing.take(1, {2, 3, 9}, bytes_per_s=FAST) is None
    assert missing.has_any_of({0}) and not missing.has_any_of({3})


def test_what_broke_off_goes_back_but_for_what_got_through() -> None:
    missing = Missing(4 * PIECE_BYTES, [(0, 4 * PIECE_BYTES)])
    span = missing.take(1, bytes_per_s=FAST)
    assert span == Span(0, 2 * PIECE_BYTES)
    missing.moved((0, PIECE_BYTES))
    missing.give_back(span)
    assert missing.take(1, bytes_per_s=FAST) == Span(PIECE_BYTES, 2 * PIECE_BYTES)


def test_what_the_receiver_lacks_counts_for_bytes_that_nobody_is_moving_or_moved_meanwhile() -> None:
    missing = Missing(4 * PIECE_BYTES, [(0, 4 * PIECE_BYTES)])
    first, second = missing.take(1, bytes_per_s=FAST), missing.take(1, bytes_per_s=FAST)
    assert first == Span(0, 2 * PIECE_BYTES) and second == Span(2 * PIECE_BYTES, 3 * PIECE_BYTES)
    before = missing.moved_so_far
    missing.finished(second)
    missing.know(Report([(PIECE_BYTES, 3 * PIECE_BYTES), (3 * PIECE_BYTES + 9, 4 * PIECE_BYTES)], before))
    third, fourth = missing.take(1, bytes_per_s=FAST), missing.take(1, {3})
    assert third and fourth and third.begin == 3 * PIECE_BYTES + 9 and third.end == fourth.begin
    missing.moved((fourth.end, 4 * PIECE_BYTES))
    assert missing.num_bytes == 0 and not missing.is_over
    missing.know(Report([(2 * PIECE_BYTES, 2 * PIECE_BYTES + 5)], missing.moved_so_far))
    assert missing.num_bytes == 5, "it was dropped there"
    missing.moved((0, 4 * PIECE_BYTES))
    missing.finished(first)
    missing.finished(third)
    missing.finished(fourth)
    assert missing.is_over


def test_a_piece_that_is_kept_whole_is_one_span_and_waits_until_all_of_it_is_there() -> None:
    size = 3 * PIECE_BYTES
    missing = Missing(size, [(0, size)])
    missing.keep_whole(1)
    assert missing.take(8) == Span(0, 3 * PIECE_BYTES // 32)
    assert [missing.take(8, {1}), missing.take(8, {1})] == [Span(PIECE_BYTES, 2 * PIECE_BYTES), None]
    missing = Missing(size, [(PIECE_BYTES, size)])
    begun = missing.take(8)
    assert begun is not None and begun.begin == PIECE_BYTES
    missing.keep_whole(1)
    assert missing.take(1, {1}) is None, "a part of it is under way"
    missing.finished(begun)
    assert missing.take(1, {1}) == Span(PIECE_BYTES, 2 * PIECE_BYTES), "what came otherwise does not count"


@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_no_byte_is_with_two_and_none_is_lost(num_pieces: int, streams: int, data: st.DataObject) -> None:
    size = num_pieces * PIECE_BYTES - 17
    missing = Missing(size, [(0, size)])
    under_way: list[Span] = []
    done: list[tuple[int, int]] = []
    for _ in range(200):
        if missing.is_over:
            break
        if under_way and data.draw(st.booleans()):
            span = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            kept = data.draw(st.sampled_from([0, 1, span.num_bytes // 2, span.num_bytes]))
            done.append((span.begin, span.begin + kept))
            if kept == span.num_bytes:
                missing.finished(span)
            else:
                before = missing.moved_so_far
                lacking = without([(0, size)], done)
                missing.give_back(span)
                missing.know(Report(lacking, before))
        elif (taken := missing.take(streams, bytes_per_s=FAST)) is not None:
            others = [(span.begin, span.end) for span in under_way]
            assert without([(taken.begin, taken.end)], [*others, *done]) == [(taken.begin, taken.end)]
            under_way.append(taken)
    assert num_bytes(joined(done)) + sum(span.num_bytes for span in under_way) + missing.num_bytes == size


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))),
)
def test_ranges_are_sets_of_bytes(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    def members(ranges: list[tuple[int, int]]) -> set[int]:
        return {i for begin, end in ranges for i in range(begin, end)}

    left, whole = without(some, others), joined(some)
    assert members(left) == members(some) - members(others) and members(whole) == members(some)
    for ranges in (left, whole):
        assert all(one[1] < two[0] for one, two in itertools.pairwise(ranges)) and num_bytes(ranges) == len(
            members(ranges)
        )


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
    for i, offset, part in by_piece(blob_size, at, chunk):
        assert i * PIECE_BYTES + offset == at + came
        assert 0 < len(part) <= piece_size(blob_size, i) - offset
        came += len(part)
    assert came == size
