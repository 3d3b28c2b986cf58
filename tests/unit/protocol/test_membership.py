"""Who is here, and whose share of the data is whose."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import BootId, MonoMs, PeerId, Seq
from geo_diloco.protocol.membership import AWAY_MS, PACE_MS, Member, Membership, moving_average
from geo_diloco.protocol.messages import Allotment, Hello, Progress
from geo_diloco.protocol.schedule import LIVE_MS
from geo_diloco.sim.fakes import LAYOUT
from tests.support.chains import ANN, BEN, CYD

HELLO = Hello(
    wire_version=1,
    layout_digest=LAYOUT,
    trains=True,
    host="machine",
    software="",
    address="",
    step=0,
    tokens=0,
    head_seq=Seq(0),
    undecided=(),
    proof="",
)
PROGRESS = Progress(step=1, tokens=10, step_time_us=100_000, upload_bytes_per_s=0, loss=2.0, cursor=10)
BOOT, NEXT_BOOT = BootId("1" * 16), BootId("2" * 16)


def at(ms: int) -> MonoMs:
    return MonoMs(ms)


def membership(num_shares: int = 2) -> Membership:
    return Membership(num_shares)


def join(members: Membership, peer: PeerId, ms: int = 0, boot: BootId = BOOT, hello: Hello = HELLO) -> Member:
    return members.hello(peer, boot, hello, at(ms))


def share(member: Member) -> tuple[int, int, int]:
    assert member.allotment is not None
    return member.allotment.share, member.allotment.pass_number, member.allotment.cursor


def test_each_learner_gets_a_share_of_its_own_while_there_are_any() -> None:
    members = membership()
    assert [share(join(members, peer)) for peer in (ANN, BEN)] == [(0, 0, 0), (1, 0, 0)]


def test_more_learners_than_shares_read_a_share_in_another_order() -> None:
    members = membership(num_shares=1)
    assert [share(join(members, peer)) for peer in (ANN, BEN, CYD)] == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]


def test_the_same_hello_twice_changes_nothing() -> None:
    members = membership()
    first = replace(join(members, ANN))
    assert join(members, ANN) == first
    assert share(join(members, BEN)) == (1, 0, 0)


def test_a_follower_gets_no_data_and_is_never_live() -> None:
    members = membership()
    follower = join(members, ANN, hello=replace(HELLO, trains=False))
    assert follower.allotment is None and members.live(at(0)) == []
    assert [member.peer for member in members.connected()] == [ANN]


def test_a_short_absence_keeps_the_share_even_over_a_restart() -> None:
    members = membership()
    join(members, ANN)
    members.merged(ANN, 500)
    members.disconnected(ANN, at(1_000))
    members.forget_away(at(1_000 + AWAY_MS - 1))
    assert share(join(members, ANN, 30_000, NEXT_BOOT)) == (0, 0, 500)


def test_a_long_absence_hands_the_share_on_from_its_merged_cursor() -> None:
    members = membership(num_shares=1)
    join(members, ANN)
    members.merged(ANN, 700)
    members.disconnected(ANN, at(1_000))
    assert members.away_until() == 1_000 + AWAY_MS
    members.forget_away(at(1_000 + AWAY_MS))
    assert members.away_until() is None
    assert share(join(members, BEN, 70_000)) == (0, 0, 700)
    assert share(join(members, ANN, 80_000)) == (0, 1, 0)


def test_goodbye_frees_the_share_at_once() -> None:
    members = membership()
    join(members, ANN)
    members.left(ANN, at(10))
    assert share(join(members, BEN, 20)) == (0, 0, 0)


def test_what_a_learner_holds_already_is_honoured_by_a_syncer_that_just_started() -> None:
    members = membership()
    holds = Allotment(share=1, num_shares=2, cursor=40, pass_number=0)
    assert share(join(members, ANN, hello=replace(HELLO, holds=holds))) == (1, 0, 40)
    assert share(join(members, BEN)) == (0, 0, 0)
    assert share(join(members, CYD, hello=replace(HELLO, holds=replace(holds, share=99)))) == (0, 1, 0)


def test_work_of_another_pass_does_not_move_the_cursor_of_the_first() -> None:
    members = membership(num_shares=1)
    join(members, ANN)
    join(members, BEN)
    members.merged(BEN, 900)
    members.left(ANN, at(1))
    members.left(BEN, at(1))
    assert share(join(members, CYD, 2))[2] == 0


def test_a_learner_is_live_while_its_steps_are_heard_of() -> None:
    members = membership()
    join(members, ANN)
    members.progress(ANN, PROGRESS, at(5_000))
    assert [member.peer for member in members.live(at(5_000 + LIVE_MS))] == [ANN]
    assert members.live(at(5_001 + LIVE_MS)) == []
    members.progress(ANN, PROGRESS, at(30_000))
    assert members.live(at(30_000)) == [], "the same step again is no sign of life"
    members.progress(ANN, replace(PROGRESS, step=2), at(31_000))
    assert members.live(at(31_000)) != []


def test_who_is_silent_holds_up_a_round_for_five_seconds_at_most() -> None:
    """Rounds with late work alone wait for whoever is live and could still deliver."""
    assert 3_000 <= LIVE_MS <= 5_000, "progress comes every second, and a link may lose a few"


def test_a_slow_learner_is_given_as_long_as_its_steps_take() -> None:
    members = membership()
    join(members, ANN)
    members.progress(ANN, replace(PROGRESS, step_time_us=60_000_000), at(0))
    assert members.live(at(8 * 60_000)) != []


def test_progress_of_an_earlier_moment_changes_nothing() -> None:
    members = membership()
    join(members, ANN)
    members.progress(ANN, replace(PROGRESS, step=9, tokens=90), at(10))
    members.progress(ANN, replace(PROGRESS, step=8, tokens=80), at(20))
    assert (members[ANN].step, members[ANN].tokens, members[ANN].heard_at) == (9, 90, 10)


def test_a_claimed_step_time_is_kept_within_reason() -> None:
    members = membership()
    join(members, ANN)
    members.progress(ANN, replace(PROGRESS, step_time_us=-5), at(0))
    assert members[ANN].step_time_us == 1
    members.progress(ANN, replace(PROGRESS, step=2, step_time_us=10**30), at(0))
    assert members[ANN].step_time_us == 3_600 * 10**6


def test_iteration_is_in_sorted_order() -> None:
    members = membership(num_shares=4)
    for peer in (CYD, ANN, BEN):
        join(members, peer)
    assert [member.peer for member in members.all()] == [ANN, BEN, CYD]


def test_habits_are_moving_averages_of_weight_a_fifth() -> None:
    assert moving_average(None, 50) == 50
    assert moving_average(100, 200) == 120


def test_being_told_twice_that_a_peer_is_gone_changes_nothing() -> None:
    members = membership()
    join(members, ANN)
    members.disconnected(ANN, at(5))
    members.disconnected(ANN, at(50))
    members.disconnected(BEN, at(50))
    assert members[ANN].gone_at == 5


# ---- for people --------------------------------------------------------------------------------------------------


def test_tokens_per_second_are_over_a_while_and_fall_as_soon_as_a_learner_stalls() -> None:
    members = membership()
    member = join(members, ANN)
    for second in range(61):
        uneven = 1000 * second + (400 if second % 2 else 0)
        members.progress(ANN, replace(PROGRESS, step=second + 1, tokens=uneven), at(1000 * second))
        rate = member.tokens_per_s(at(1000 * second))
        assert rate is None if second < PACE_MS // 3000 else 900 < (rate or 0) < 1100, second
    assert member.tokens_per_s(at(120_000)) in range(150, 500)
    assert member.status("training", at(60_000)).tokens_per_s == member.tokens_per_s(at(60_000))
