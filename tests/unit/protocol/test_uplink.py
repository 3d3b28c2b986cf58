"""Which codec a learner takes for its link: the least lossy that keeps up, with its reason, and no flapping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import CodecSpec, Digest, FragmentId, MonoMs, RunRules, SyncSpec
from geo_diloco.protocol.events import UploadDone
from geo_diloco.protocol.messages import BlobRef, Contribution
from geo_diloco.protocol.uplink import (
    ROOM,
    STREAK,
    Choice,
    Link,
    Uplink,
    by_loss,
    choose,
    participation,
    typical_millibits,
)
from geo_diloco.protocol.uploads import Uploads
from tests.support.chains import FOUNDER, ChainBuilder, contribution

NONE, BF16, INT8 = CodecSpec(name="none"), CodecSpec(name="bf16"), CodecSpec(name="int8")
INT4, COARSE = CodecSpec(name="int4"), CodecSpec(name="int4", block=256)
ALL = (NONE, BF16, INT8, INT4, COARSE)

choices = st.lists(st.sampled_from(ALL), max_size=5)
rates = st.integers(0, 2**34)
intervals = st.integers(0, 3_600_000)
links = st.builds(Link, bytes_per_s=rates, interval_ms=intervals, num_elements=st.integers(1, 2**32))
states = (
    st.builds(Choice, st.sampled_from(ALL), better=st.none() | st.sampled_from(ALL), streak=st.integers(0, STREAK))
    | st.none()
)


def link(mbit: float, *, interval_ms: int = 30_000, num_elements: int = 50_000_000) -> Link:
    return Link(bytes_per_s=round(mbit * 125_000), interval_ms=interval_ms, num_elements=num_elements)


def settled(link: Link, *, before: Choice | None = None, times: int = 2 * STREAK) -> Choice:
    for _ in range(times):
        before = choose(before, INT4, (BF16, INT8, COARSE), link)
    assert before is not None
    return before


def test_the_order_of_loss_is_the_order_of_size() -> None:
    assert by_loss([COARSE, INT4, INT8, NONE, BF16, INT8]) == [NONE, BF16, INT8, INT4, COARSE]
    sizes = [typical_millibits(codec) for codec in by_loss(ALL)]
    assert all(more > less for more, less in pairwise(sizes))


def test_the_least_lossy_that_keeps_up_is_taken_and_the_reason_is_the_next_better_one() -> None:
    choice = settled(link(9.2))
    assert choice.codec == INT4
    assert choice.reason == "int4:64: int8:64 would take 43.1 s of 30 s a round at 9.2 Mbit/s"
    assert settled(link(100.0)).codec == BF16
    assert settled(link(100.0)).reason == "bf16:64: takes 5.55 s of 30 s a round at 100 Mbit/s"
    assert settled(link(20.0)).codec == INT8


def test_where_nothing_keeps_up_the_smallest_is_taken() -> None:
    assert settled(link(0.5)).codec == COARSE


def test_what_was_measured_counts_more_than_what_is_usual() -> None:
    large = Link(bytes_per_s=1_150_000, interval_ms=30_000, num_elements=50_000_000, measured={INT4: 6_000})
    assert choose(Choice(INT4), INT4, (COARSE,), large).codec == COARSE
    assert choose(Choice(INT4), INT4, (COARSE,), link(9.2)).codec == INT4


def test_an_upload_that_takes_all_of_its_time_keeps_up() -> None:
    for longer_ms, codec in ((0, INT4), (1, COARSE)):
        taken = {INT8: 16_000, INT4: 8_000}
        tight = Link(bytes_per_s=1_000, interval_ms=30_000, num_elements=30_000 + longer_ms, measured=taken)
        assert choose(Choice(INT4), INT4, (COARSE,), tight).codec == codec
        assert choose(Choice(INT8), INT4, (INT8, COARSE), tight).codec == codec, "of a lossier one, too"


def test_four_fifths_of_the_time_are_room() -> None:
    for longer_ms, streak in ((0, 1), (1, 0)):
        taken = {BF16: 8_000, INT4: 4_000}
        roomy = Link(bytes_per_s=1_000, interval_ms=30_000, num_elements=24_000 + longer_ms, measured=taken)
        assert choose(Choice(INT4), INT4, (BF16,), roomy).streak == streak


def test_a_run_with_one_codec_says_nothing_and_one_with_several_waits_for_a_measurement() -> None:
    assert choose(None, INT8, (), link(0.1)) == Choice(INT8)
    assert choose(None, INT8, (INT8,), link(0.1)) == Choice(INT8)
    assert choose(None, INT4, (BF16,), link(0.0)) == Choice(INT4, "int4:64: nothing is measured yet")
    assert choose(None, INT4, (COARSE,), link(1.0, interval_ms=0)) == Choice(INT4, "int4:64: nothing is measured yet")


def test_to_a_lossier_codec_at_once_and_back_only_with_room_several_times_in_a_row() -> None:
    fast, slow = link(30.0), link(9.2)
    choice = settled(fast)
    assert choice.codec == BF16
    choice = choose(choice, INT4, (BF16, INT8, COARSE), slow)
    assert choice.codec == INT4
    for _ in range(STREAK - 1):
        choice = choose(choice, INT4, (BF16, INT8, COARSE), fast)
        assert choice.codec == INT4
    interrupted = choose(choice, INT4, (BF16, INT8, COARSE), slow)
    assert interrupted.streak == 0
    assert choose(choice, INT4, (BF16, INT8, COARSE), fast).codec == BF16


def test_one_fast_round_at_the_end_of_a_streak_does_not_go_beyond_what_the_streak_had_room_for() -> None:
    choice = settled(link(9.2))
    for mbit in [20.0] * (STREAK - 1) + [1000.0]:
        choice = choose(choice, INT4, (NONE, BF16, INT8), link(mbit))
    assert choice.codec == INT8


def test_a_codec_that_is_not_allowed_any_more_is_given_up() -> None:
    assert choose(Choice(BF16), INT4, (INT8,), link(1000.0)).codec == INT4
    assert choose(Choice(BF16), INT4, (), link(1000.0)) == Choice(INT4)


@given(states, choices, links, st.integers(0, 2**34))
def test_a_faster_link_never_picks_a_lossier_codec(
    before: Choice | None, others: list[CodecSpec], slow: Link, more: int
) -> None:
    fast = Link(slow.bytes_per_s + more, slow.interval_ms, slow.num_elements)
    if not slow.is_known:
        return
    allowed = by_loss([INT4, *others])
    one, other = choose(before, INT4, others, slow), choose(before, INT4, others, fast)
    assert allowed.index(other.codec) <= allowed.index(one.codec)


@given(states, choices, links)
def test_what_is_chosen_is_allowed_and_keeps_up_if_anything_does(
    before: Choice | None, others: list[CodecSpec], link: Link
) -> None:
    allowed = by_loss([INT4, *others])
    choice = choose(before, INT4, others, link)
    assert choice.codec in allowed
    assert (choice.reason == "") == (len(allowed) == 1)
    if link.is_known and len(allowed) > 1:
        fits = [codec for codec in allowed if link.upload_ms(codec) <= link.interval_ms]
        held = before is not None and before.codec in allowed
        lossier = [codec for codec in fits if not held or allowed.index(codec) >= allowed.index(before.codec)]  # type: ignore[union-attr]
        if held and lossier:
            assert choice.codec in fits
        assert fits or choice.codec == allowed[-1] or allowed.index(choice.codec) > 0


@given(states, choices, links)
def test_the_same_input_settles_and_then_changes_nothing(
    before: Choice | None, others: list[CodecSpec], link: Link
) -> None:
    for _ in range(len(ALL) * (STREAK + 1)):
        before = choose(before, INT4, others, link)
    assert choose(before, INT4, others, link).codec == before.codec  # type: ignore[union-attr]


@given(st.integers(10_000, 2**30), st.lists(st.floats(0.9, 1.1), min_size=20, max_size=60))
def test_a_link_that_wobbles_by_a_tenth_changes_codec_twice_at_most(rate: int, wobbles: list[float]) -> None:
    """The first way down, and none back: what has room at four fifths of the time keeps up with a tenth less."""
    taken: list[CodecSpec] = []
    choice = settled(link(rate / 125_000))
    for wobble in wobbles:
        choice = choose(choice, INT4, (BF16, INT8, COARSE), Link(round(rate * wobble), 30_000, 50_000_000))
        taken.append(choice.codec)
    assert sum(one != other for one, other in pairwise(taken)) <= 2
    assert ROOM * 1.1 / 0.9 < 1.0


def test_how_many_rounds_a_slow_link_takes_part_in() -> None:
    assert participation(41_000, 14_000) == "takes part in 1 of 3 rounds: 41 s per upload"
    assert participation(14_001, 14_000) == "takes part in 1 of 2 rounds: 14 s per upload"
    assert participation(14_000, 14_000) == participation(1, 0) == ""


# ---- what is measured


def uplink(*, rate: int = 0, step_ms: int = 100) -> Uplink:
    """Of a learner of a run with two fragments of 100 and 300 elements and H = 8; with `none` 800 bytes on average, and
    400 ms from one sample to the next."""
    rules = RunRules(founder=FOUNDER, sync=SyncSpec(num_fragments=2, interval_steps=8), codec_up=CodecSpec(name="none"))
    it = Uplink(rules, ChainBuilder.opened().ledger())
    it.stepped(1000 * step_ms, MonoMs(0))
    it.done(UploadDone(BlobRef(Digest("b" * 64), 1), rate))
    it.take_codec(rules)
    it.encoded(CodecSpec(name="none"), sized(100, 400), MonoMs(0))
    it.encoded(CodecSpec(name="none"), sized(300, 1200), MonoMs(0))
    return it


def sized(elements: int, size: int) -> Contribution:
    claim = contribution(base=Digest("b" * 64), fragment=0 if elements == 100 else 1, blob=f"{size}")
    return replace(claim, blob=replace(claim.blob, size=size))


def busy(*waiting: int) -> Uploads:
    """800 bytes under way, and these."""
    uploads = Uploads()
    uploads.start(2)
    uploads.add(sized(100, 800))
    uploads.next()
    for size in waiting:
        uploads.add(sized(300, size))
    return uploads


@pytest.mark.parametrize(("rates", "known"), [((), 0), ((0,), 0), ((100,), 100), ((100, 200), 120), ((100, 0), 100)])
def test_the_rate_of_the_link_is_smoothed_and_never_unknown_again(rates: tuple[int, ...], known: int) -> None:
    it = uplink()
    for rate in rates:
        it.done(UploadDone(BlobRef(Digest("b" * 64), 1), rate))
    assert it.bytes_per_s == known


def test_until_a_rate_is_measured_there_is_room_for_one() -> None:
    it, idle = uplink(), Uploads()
    assert it.has_room(idle, being_encoded=0) and not it.has_room(idle, being_encoded=1)
    assert not it.has_room(busy(), being_encoded=0)


def test_where_uploads_keep_up_there_is_always_room() -> None:
    assert uplink(rate=2000).has_room(busy(800, 1200), being_encoded=2), "400 ms of 400 ms"
    assert not uplink(rate=1999).has_room(busy(800, 1200), being_encoded=2)


def test_where_they_do_not_there_is_when_all_is_through_but_for_two_steps() -> None:
    it, uploads = uplink(rate=800), busy()
    it.began()
    for now, has_room in ((0, False), (799, False), (800, True), (5_000, True)):
        it.stepped(100_000, MonoMs(now))
        assert it.has_room(uploads, being_encoded=0) is has_room, now
    assert not it.has_room(uploads, being_encoded=1)
    assert not it.has_room(busy(400), being_encoded=0), "half a second of the link"
    assert it.has_room(busy(160), being_encoded=0)


def test_what_takes_longer_to_encode_than_two_steps_is_sampled_that_much_earlier() -> None:
    """A moving average, as of rates: 1, 1 and then 1501 ms are 301 ms."""
    it, uploads = uplink(rate=800), busy()
    it.stepped(100_000, MonoMs(500))
    it.ordered(FragmentId(0))
    it.encoded(CodecSpec(name="none"), sized(100, 400), MonoMs(2_001))
    it.began()
    for now, has_room in ((1_198, False), (1_199, True)):
        it.stepped(100_000, MonoMs(now))
        assert it.has_room(uploads, being_encoded=0) is has_room, now
    it.ordered(FragmentId(0))
    it.encoded(CodecSpec(name="none"), sized(100, 400), MonoMs(10**8))
    assert not it.has_room(busy(1200), being_encoded=0), "never for more than one upload"


def test_a_fragment_rests_for_three_quarters_of_its_turn() -> None:
    """An upload of 1200 ms where 400 ms are for it: 3 rounds of 8 steps."""
    it = uplink(rate=800 * 1000 // 1200)
    assert it.turn() == 4 and it.text() == "takes part in 1 of 4 rounds: 1.2 s per upload", "1201 ms"
    assert it.rests(17) and not it.rests(18)
    assert not uplink(rate=2000).rests(0) and uplink(rate=2000).text() == ""
