"""The queue to a thin link: what goes up next, what is queued once, and that nothing starves in it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import Digest
from geo_diloco.protocol.messages import BlobRef, Contribution
from geo_diloco.protocol.uploads import Uploads
from tests.support.chains import contribution

BASE = Digest("b" * 64)


def sampled(fragment: int, round_: int, last_step: int = 8) -> Contribution:
    claim = contribution(base=BASE, fragment=fragment, last_step=last_step, blob=f"round {round_}")
    return replace(claim, round=round_)


def queue(*contributions: Contribution, num_fragments: int = 4) -> Uploads:
    uploads = Uploads()
    uploads.start(num_fragments)
    for each in contributions:
        uploads.add(each)
    return uploads


def in_order(uploads: Uploads) -> list[Contribution]:
    """Each goes up until nothing is left."""
    gone: list[Contribution] = []
    while (chosen := uploads.next()) is not None:
        uploads.over(chosen.blob)
        gone.append(chosen)
    return gone


def test_the_newest_round_goes_first_and_of_one_round_the_newest_sample() -> None:
    first, second, third = sampled(0, 1), sampled(1, 2, last_step=9), sampled(2, 2, last_step=10)
    assert in_order(queue(second, first, third)) == [third, second, first]


def test_one_at_a_time() -> None:
    uploads = queue(sampled(0, 1), sampled(1, 2))
    assert not uploads.is_idle
    running = uploads.next()
    assert running is not None and uploads.next() is None
    uploads.over(BlobRef(Digest("f" * 64), 1))
    assert uploads.next() is None, "another one ended"
    uploads.over(running.blob)
    assert uploads.next() == sampled(0, 1)
    assert not uploads.is_idle, "the last is still under way"
    uploads.over(sampled(0, 1).blob)
    assert uploads.next() is None and uploads.is_idle


def test_the_next_begins_when_the_last_is_sent_and_sent_is_not_over() -> None:
    uploads = queue(sampled(0, 1), sampled(1, 2), sampled(2, 3))
    first = uploads.next()
    assert first is not None
    uploads.sent(first.blob)
    second = uploads.next()
    assert second == sampled(1, 2) and uploads.holds(first)
    uploads.add(first)
    uploads.sent(first.blob)
    assert uploads.next() is None, "said twice: it is another that is under way now"
    uploads.over(second.blob)
    assert uploads.next() == sampled(0, 1)
    uploads.over(sampled(0, 1).blob)
    assert uploads.next() is None and not uploads.is_idle, "the first lacks the syncer's word, and was not queued again"
    uploads.over(first.blob)
    assert uploads.is_idle


def test_that_one_was_sent_is_heard_too_late() -> None:
    done, decided, last = sampled(0, 3), sampled(1, 2), sampled(2, 1)
    uploads = queue(done, decided, last)
    uploads.next()
    uploads.over(done.blob)
    uploads.sent(done.blob)
    assert uploads.next() == decided
    uploads.sent(decided.blob)
    uploads.let_go(decided.blob)
    uploads.sent(decided.blob)
    assert in_order(uploads) == [last] and uploads.is_idle


def test_what_is_sent_goes_up_for_another_syncer_when_it_is_over() -> None:
    sent, running, waiting = sampled(0, 3), sampled(1, 2), sampled(2, 1)
    uploads = queue(sent, running, waiting)
    uploads.next()
    uploads.sent(sent.blob)
    uploads.next()
    uploads.begin_again([sent, running, waiting])
    uploads.over(running.blob)
    assert uploads.next() == running, "the newest is still being sent to somebody"
    uploads.over(running.blob)
    uploads.over(sent.blob)
    assert in_order(uploads) == [sent, waiting]


@given(fragments=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_whoever_waits_is_not_overtaken_for_ever(fragments: list[int]) -> None:
    """Each turn a newer sample of some fragment comes, if that fragment has none in the queue. Overtaken once per
    fragment it goes before newer ones, behind no more than the others that were overtaken as often."""
    uploads = queue(num_fragments=4)
    waiting: dict[int, tuple[Contribution, int]] = {}
    for turn, fragment in enumerate(fragments):
        if fragment not in waiting:
            waiting[fragment] = sampled(fragment, turn, last_step=turn), 0
            uploads.add(waiting[fragment][0])
        chosen = uploads.next()
        assert chosen is not None
        uploads.over(chosen.blob)
        del waiting[chosen.id.fragment]
        waiting = {p: (each, overtaken + 1) for p, (each, overtaken) in waiting.items()}
        assert max((overtaken for _, overtaken in waiting.values()), default=0) < 2 * 4


def test_an_old_one_goes_before_newer_ones_once_it_was_overtaken_once_per_fragment() -> None:
    old = sampled(0, 1)
    uploads = queue(old, num_fragments=3)
    gone: list[Contribution] = []
    for round_ in range(2, 8):
        uploads.add(sampled(1 + round_ % 2, round_, last_step=round_))
        chosen = uploads.next()
        assert chosen is not None
        uploads.over(chosen.blob)
        gone.append(chosen)
    assert gone.index(old) == 3


def test_the_same_bytes_are_queued_once() -> None:
    claim = sampled(0, 1)
    twin = replace(claim, id=replace(claim.id, last_step=99))
    uploads = queue(claim, claim, twin)
    assert uploads.next() == claim
    uploads.add(claim)
    uploads.over(claim.blob)
    assert uploads.next() is None


def test_it_knows_what_is_queued_or_under_way() -> None:
    running, waiting, other = sampled(0, 2), sampled(1, 1), sampled(2, 3)
    uploads = queue(running, waiting)
    uploads.next()
    assert [uploads.holds(each) for each in (running, waiting, other)] == [True, True, False]
    uploads.over(running.blob)
    assert not uploads.holds(running)


def test_what_is_decided_waits_no_more_and_frees_the_link() -> None:
    running, waiting, last = sampled(0, 3), sampled(1, 2), sampled(2, 1)
    uploads = queue(running, waiting, last)
    uploads.next()
    uploads.let_go(waiting.blob)
    assert uploads.next() is None, "the one under way is another"
    uploads.let_go(running.blob)
    assert in_order(uploads) == [last]


def test_for_another_syncer_everything_goes_up_again_after_what_is_under_way() -> None:
    running, waiting = sampled(0, 2), sampled(1, 1)
    uploads = queue(running, waiting)
    uploads.next()
    uploads.begin_again([running, waiting])
    assert uploads.next() is None
    uploads.over(running.blob)
    assert in_order(uploads) == [running, waiting]
