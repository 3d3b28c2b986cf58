"""What acknowledgements prove: lease and durability (rules 6, 15, 17)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import MonoMs, PeerId, Seq
from geo_diloco.protocol.election.lease import Acker, acked_by_majority, confirmed_at, durable, of_majority
from tests.support.election_parts import THREE, A, B, C, D, seat

NOW = MonoMs(10_000)


def acker(peer: PeerId, *, sent_at: int | None = None, acked: int = -1, enrolment: str | None = None) -> Acker:
    sent = None if sent_at is None else MonoMs(sent_at)
    return Acker(seat(peer, enrolment=enrolment), MonoMs(0), NOW, sent, Seq(acked))


def ackers(*each: Acker) -> dict[PeerId, Acker]:
    return {one.elector.peer: one for one in each}


def test_the_majority_of_a_roster_has_reached_what_its_middle_elector_has() -> None:
    assert of_majority([1, 5, 3], 3) == 3
    assert of_majority([1, 5, 3, 2], 4) == 2
    assert of_majority([5], 3) is None


def test_a_lease_counts_from_the_newest_heartbeat_that_a_majority_acked() -> None:
    known = ackers(acker(B, sent_at=7_000), acker(C, sent_at=9_000))
    assert confirmed_at(THREE, known, seat(A), NOW) == 9_000
    assert confirmed_at(THREE, ackers(acker(B, sent_at=7_000)), seat(A), NOW) == 7_000


def test_without_a_majority_there_is_no_lease() -> None:
    assert confirmed_at(THREE, {}, seat(A), NOW) is None
    assert confirmed_at(THREE, ackers(acker(B)), seat(A), NOW) is None


def test_a_syncer_that_is_the_roster_confirms_itself() -> None:
    assert confirmed_at((seat(A),), {}, seat(A), NOW) == NOW


def test_those_off_the_roster_confirm_nothing() -> None:
    assert confirmed_at(THREE, ackers(acker(D, sent_at=9_000)), seat(A), NOW) is None
    assert acked_by_majority(THREE, ackers(acker(D, acked=9)), seat(A), Seq(9)) is None


def test_a_peer_with_another_disk_is_not_that_elector() -> None:
    other = ackers(acker(B, sent_at=9_000, acked=9, enrolment="new disk"))
    assert confirmed_at(THREE, other, seat(A), NOW) is None
    assert acked_by_majority(THREE, other, seat(A), Seq(9)) is None


def test_a_syncer_without_its_seat_does_not_count_itself() -> None:
    mine = seat(A, enrolment="new disk")
    assert acked_by_majority(THREE, ackers(acker(B, acked=9)), mine, Seq(9)) is None
    assert acked_by_majority(THREE, ackers(acker(B, acked=9), acker(C, acked=4)), mine, Seq(9)) == 4


def test_durable_is_what_a_majority_has_with_the_syncers_own_disk_as_one_of_it() -> None:
    known = ackers(acker(B, acked=5), acker(C, acked=2))
    assert acked_by_majority(THREE, known, seat(A), Seq(8)) == 5
    assert acked_by_majority(THREE, known, seat(A), Seq(3)) == 3


def test_entries_of_older_terms_are_durable_only_by_way_of_one_of_the_own_term() -> None:
    assert durable(Seq(9), Seq(10), Seq(-1)) == -1
    assert durable(Seq(10), Seq(10), Seq(-1)) == 10


def test_the_durable_head_never_sinks() -> None:
    assert durable(Seq(11), Seq(10), Seq(12)) == 12
    assert durable(None, Seq(10), Seq(12)) == 12


@given(st.lists(st.integers(0, 20), max_size=7), st.integers(1, 7))
def test_more_than_half_have_reached_what_a_majority_has(values: list[int], num_electors: int) -> None:
    values = values[:num_electors]
    reached = of_majority(values, num_electors)
    if reached is None:
        assert 2 * len(values) <= num_electors
    else:
        assert 2 * sum(value >= reached for value in values) > num_electors
        assert 2 * sum(value > reached for value in values) <= num_electors
