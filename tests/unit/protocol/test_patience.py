"""A learner that answers and never delivers is waited for, but not for ever."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import Version
from geo_diloco.protocol.effects import Effect, Merge
from geo_diloco.protocol.events import Disconnected
from geo_diloco.protocol.messages import RoundOpen
from geo_diloco.protocol.patience import INTERVALS, Patience
from geo_diloco.protocol.schedule import MICRO
from tests.support.chains import ANN, BEN, CYD, SYNC, contribution
from tests.support.single import Syncing, only, progress, said

H = 10
LIMIT = INTERVALS * H * MICRO


def test_it_ends_after_so_many_intervals_and_says_so_once() -> None:
    patience = Patience(H)
    patience.awaited(ANN, 5)
    patience.awaited(BEN, 7)
    patience.awaited(ANN, 9)
    assert patience.next_end == 5 + LIMIT
    assert patience.take_changed(5 + LIMIT - 1) == [] and not patience.is_over(ANN)
    assert patience.take_changed(5 + LIMIT) == [ANN] and patience.is_over(ANN) and not patience.is_over(BEN)
    assert patience.take_changed(6 + LIMIT) == [] and patience.next_end == 7 + LIMIT


def test_a_delivery_makes_it_begin_again() -> None:
    patience = Patience(H)
    patience.awaited(ANN, 0)
    patience.take_changed(LIMIT)
    patience.awaited(ANN, LIMIT)
    assert patience.is_over(ANN) and patience.next_end is None, "being awaited further does not"
    patience.begin_again(ANN)
    assert not patience.is_over(ANN) and patience.take_changed(LIMIT) == [ANN] and patience.next_end is None
    patience.begin_again(ANN)
    assert patience.take_changed(LIMIT) == [], "nothing had begun"
    patience.awaited(ANN, LIMIT + 3)
    assert patience.next_end == 2 * LIMIT + 3


# ---- what a syncer makes of it


def with_only_late_work() -> tuple[Syncing, int]:
    """Ann's work missed the round that Cyd closed, and Cyd is gone; Ben trains, and delivers nothing. The number of
    inner steps when Ben was asked first."""
    syncing = Syncing.founding(replace(SYNC, grace=False))
    for peer in (ANN, BEN, CYD):
        syncing.join(peer)
    asked = syncing.asked()
    asked_at = syncing.now // 100
    (merge,) = only(syncing.hand_in(contribution(CYD, base=asked.base, fragment=1, blob="of Cyd")), Merge)
    syncing.merged(merge)
    syncing.hand_in(contribution(ANN, base=asked.base, fragment=1, blob="of Ann"))
    syncing.give(Disconnected(CYD, "gone"))
    return syncing, asked_at


def train(syncing: Syncing, until_step: int) -> list[Effect]:
    """Ann and Ben say how far they are after every inner step."""
    effects: list[Effect] = []
    while syncing.now // 100 < until_step:
        effects += syncing.pass_time(100)
        for peer in (ANN, BEN):
            effects += syncing.hear(progress(syncing.now // 100), peer)
    return effects


def test_a_round_with_only_late_work_closes_without_who_never_delivers() -> None:
    syncing, asked_at = with_only_late_work()
    given_up_at = asked_at + INTERVALS * SYNC.interval_steps
    before = train(syncing, given_up_at - 1)
    assert [each.version for each in said(before, RoundOpen, ANN) if each.fragment == 1] == [Version(1)]
    assert only(before, Merge) == []
    (merge,) = only(train(syncing, given_up_at + 1), Merge)
    assert [each.peer for each in merge.inputs] == [ANN]


def test_whoever_delivered_meanwhile_is_waited_for_as_before() -> None:
    syncing, asked_at = with_only_late_work()
    given_up_at = asked_at + INTERVALS * SYNC.interval_steps
    (asked,) = [each for each in said(train(syncing, given_up_at - 10), RoundOpen, BEN) if each.fragment == 0]
    (merge,) = only(syncing.hand_in(contribution(BEN, base=asked.base, fragment=0)), Merge)
    syncing.merged(merge)
    assert [each for each in only(train(syncing, given_up_at + 20), Merge) if each.fragment == 1] == []
    assert [each.peer for each in only(train(syncing, 2 * given_up_at), Merge)[0].inputs] == [ANN]
