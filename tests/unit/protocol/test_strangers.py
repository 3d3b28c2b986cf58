"""What any peer may say of itself, and what others get to hear of it: nothing grows without end, nothing overflows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import MonoMs, PeerId
from geo_diloco.protocol.effects import Effect, ForgetBlob
from geo_diloco.protocol.events import Disconnected, MergeFailed, StopRequested
from geo_diloco.protocol.membership import (
    AWAY_MS,
    CURSOR_MAX,
    DEPARTED_MAX,
    HOST_CHARACTERS_MAX,
    PASSES_MAX,
    Membership,
)
from geo_diloco.protocol.messages import Allotment, RoundOpen, Welcome
from geo_diloco.sim.fakes import fake_peer
from tests.support.chains import ANN, BEN, CYD, SYNC, contribution
from tests.support.single import BOOT, Syncing, hello, only, progress, said

WIRE_INTEGER_MAX = 2**53 - 1


def share_of(effects: list[Effect], to: PeerId) -> Allotment:
    (welcome,) = said(effects, Welcome, to)
    assert welcome.allotment is not None
    return welcome.allotment


@pytest.mark.parametrize(
    "lie",
    [
        {"cursor": WIRE_INTEGER_MAX},
        {"pass_number": WIRE_INTEGER_MAX},
        {"cursor": CURSOR_MAX + 1},
        {"pass_number": PASSES_MAX + 1},
        {"num_shares": 7},
        {"share": 4},
    ],
)
def test_a_share_that_nobody_can_hold_is_not_believed(lie: dict[str, int]) -> None:
    """Believed, it would go out to honest learners, in numbers that no envelope can carry."""
    syncing = Syncing.founding()
    holds = Allotment(share=0, num_shares=4, cursor=0, pass_number=0)
    liar = share_of(syncing.hear(hello(holds=replace(holds, **lie)), ANN), ANN)  # type: ignore[arg-type]
    assert (liar.num_shares, liar.cursor, liar.pass_number) == (4, 0, 0)
    for number in range(12):
        peer = fake_peer(f"honest {number}")
        given = share_of(syncing.hear(hello(), peer), peer)  # type: ignore[arg-type]
        assert given.cursor == 0 and given.pass_number < 12


def test_a_claimed_cursor_beyond_reason_is_not_handed_on() -> None:
    members = Membership(1)
    members.hello(ANN, BOOT, hello(), MonoMs(0))
    members.merged(ANN, CURSOR_MAX + 1)
    members.left(ANN, MonoMs(1))
    successor = members.hello(BEN, BOOT, hello(), MonoMs(2))
    assert successor.allotment is not None and successor.allotment.cursor == 0


def test_a_long_name_is_cut() -> None:
    syncing = Syncing.founding()
    syncing.hear(hello(host="x" * 4000))
    (learner,) = syncing.core.status(MonoMs(syncing.now)).learners
    assert len(learner.host) == HOST_CHARACTERS_MAX


def test_peers_that_come_and_go_are_forgotten_first_gone_first() -> None:
    syncing = Syncing.founding()
    syncing.join(ANN)
    for number in range(DEPARTED_MAX + 50):
        peer = fake_peer(f"passer-by {number}")
        syncing.now += 1
        syncing.hear(hello(), peer)
        syncing.give(Disconnected(peer, "gone"))
    syncing.pass_time(1)
    known = {learner.peer for learner in syncing.core.status(MonoMs(syncing.now)).learners}
    assert len(known) == DEPARTED_MAX + 1 and ANN in known
    assert fake_peer("passer-by 0") not in known and fake_peer(f"passer-by {DEPARTED_MAX + 49}") in known


def test_what_was_announced_and_never_came_goes_with_its_learner() -> None:
    syncing = Syncing.founding()
    syncing.join(ANN)
    syncing.join(BEN)
    asked = first_question(syncing)
    promised = contribution(BEN, base=asked.base, fragment=asked.fragment)
    syncing.hear(promised, BEN)
    syncing.give(Disconnected(BEN, "cut"))
    assert only(syncing.pass_time(AWAY_MS - 1000), ForgetBlob) == [], "a short absence costs nothing"
    assert only(syncing.pass_time(1000), ForgetBlob) == [ForgetBlob(promised.blob)]


def first_question(syncing: Syncing) -> RoundOpen:
    for _ in range(100):
        if asked := said(syncing.pass_time(100), RoundOpen):
            return asked[0]
        for peer in (ANN, BEN, CYD):
            syncing.hear(progress(syncing.now // 100), peer)
    raise AssertionError("no round was opened")


# ---- every wait has a reason ---------------------------------------------------------------------------------------


def reasons(syncing: Syncing) -> list[str]:
    waiting = syncing.core.status(MonoMs(syncing.now)).waiting
    assert [each.fragment for each in waiting] == [0, 1], "one for each fragment, at any time"
    return [each.reason for each in waiting]


def test_without_learners_it_is_said_that_nobody_trains() -> None:
    assert set(reasons(Syncing.founding())) == {"nobody trains: no learner is heard of"}


def test_a_fragment_that_is_not_due_says_when_it_will_be() -> None:
    syncing = Syncing.founding()
    syncing.hear(hello())
    assert set(reasons(syncing)) == {"no learner has told its step time yet"}
    syncing.hear(progress(1))
    assert reasons(syncing) == ["due in 0.8 s", "due in 0.4 s"]


def test_a_round_without_its_quorum_says_what_is_missing() -> None:
    syncing = Syncing.founding(replace(SYNC, quorum=2))
    syncing.join(ANN)
    asked = first_question(syncing)
    syncing.hand_in(contribution(ANN, base=asked.base, fragment=asked.fragment))
    assert reasons(syncing)[asked.fragment] == "quorum: 1 of 2 fresh, 1 live"


def test_a_fragment_that_is_due_and_has_no_room_says_so() -> None:
    syncing = Syncing.founding(replace(SYNC, rounds_in_flight_max=1))
    syncing.join(ANN)
    asked = first_question(syncing)
    syncing.pass_time(2_000)
    assert reasons(syncing)[1 - asked.fragment] == "due, but 1 rounds are open"


def test_a_merge_that_failed_says_why() -> None:
    syncing = Syncing.founding()
    syncing.join(ANN)
    asked = first_question(syncing)
    syncing.hand_in(contribution(ANN, base=asked.base, fragment=asked.fragment))
    assert reasons(syncing)[asked.fragment] == "merging"
    syncing.give(MergeFailed(asked.fragment, asked.round, asked.attempt, "disk full", None))
    assert reasons(syncing)[asked.fragment] == "the merge failed and is tried again: disk full"


def test_a_syncer_that_leaves_says_so() -> None:
    syncing = Syncing.founding()
    syncing.give(StopRequested("SIGTERM"))
    assert set(reasons(syncing)) == {"leaving"}
