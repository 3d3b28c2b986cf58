"""Who should be elector next (rules 22, 23): one at a time, odd sizes, nobody removed without need."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import PeerId
from geo_diloco.protocol.election.ballots import Elector, Roster
from geo_diloco.protocol.election.roster import RosterFacts, next_roster
from geo_diloco.protocol.election.validity import why_not_next_roster
from tests.support.election_parts import A, B, C, D, E, seat

FACTS = RosterFacts(
    roster=(seat(A), seat(B), seat(C)), syncer=seat(A), standbys=(), silent=(), gone=(), wanted=3, one_machine=False
)


def after(facts: RosterFacts) -> list[PeerId] | None:
    roster = next_roster(facts).roster
    return None if roster is None else [elector.peer for elector in roster]


def test_enough_electors_stay() -> None:
    plan = next_roster(FACTS)
    assert (plan.roster, plan.reason) == (None, "3 electors as wanted")


def test_a_lone_syncer_takes_two_electors_at_once_but_never_one() -> None:
    alone = replace(FACTS, roster=(seat(A),))
    assert (
        next_roster(replace(alone, standbys=(seat(B),))).reason
        == "alone: two more peers, learners too, come in together, and 1 is here"
    )
    assert after(replace(alone, standbys=(seat(B), seat(C), seat(D)))) == [A, B, C]
    assert after(replace(alone, standbys=(seat(B), seat(C), seat(D), seat(E)), wanted=5)) == [A, B, C, D, E]


def test_a_roster_grows_only_if_it_can_become_odd_again() -> None:
    short = replace(FACTS, wanted=5)
    assert next_roster(replace(short, standbys=(seat(D),))).reason == (
        "3 of 5 electors: two more peers, learners too, come in together, and 1 is here"
    )
    assert after(replace(short, standbys=(seat(D), seat(E)))) == [A, B, C, D]
    assert after(replace(short, roster=(*FACTS.roster, seat(D)), standbys=(seat(E),))) == [A, B, C, D, E]


def test_an_even_number_does_not_stay() -> None:
    four = replace(FACTS, roster=(*FACTS.roster, seat(D)))
    assert after(four) == [A, B, C]
    assert next_roster(four).reason == f"remove {D[:8]}: no even number stays"


def test_two_electors_wait_for_a_third_because_one_would_bear_less() -> None:
    two = replace(FACTS, roster=(seat(A), seat(B)))
    assert next_roster(two).reason == "2 electors: one more peer is needed, none is here"
    assert after(replace(two, standbys=(seat(C),))) == [A, B, C]


def test_a_silent_elector_is_replaced_by_adding_first() -> None:
    silent = replace(FACTS, silent=(seat(C),), standbys=(seat(D),))
    assert after(silent) == [A, B, C, D]
    assert after(replace(silent, roster=(*FACTS.roster, seat(D)), standbys=())) == [A, B, D]


def test_a_silent_elector_stays_if_nobody_can_take_its_place() -> None:
    plan = next_roster(replace(FACTS, silent=(seat(C),)))
    assert (plan.roster, plan.reason) == (None, f"{C[:8]} is silent and nobody can take its place")


def test_at_seven_the_silent_one_is_removed_first() -> None:
    seven = tuple(seat(PeerId(letter * 64)) for letter in "abcdefg")
    facts = replace(FACTS, roster=seven, silent=(seven[3],), standbys=(seat(PeerId("h" * 64)),), wanted=7)
    assert after(facts) == [each.peer for each in seven if each != seven[3]]


def test_the_syncer_is_never_removed_for_silence() -> None:
    assert after(replace(FACTS, silent=(seat(A),), standbys=(seat(D),))) is None


def test_a_seat_whose_disk_is_gone_is_removed_and_its_peer_added_anew() -> None:
    lost = replace(FACTS, gone=(seat(B),))
    assert after(lost) == [A, C]
    anew = seat(B, enrolment="new disk")
    assert after(replace(FACTS, roster=(seat(A), seat(C)), standbys=(anew,))) == [A, C, B]


def test_too_many_electors_become_fewer() -> None:
    five = replace(FACTS, roster=(*FACTS.roster, seat(D), seat(E)))
    assert after(five) == [A, B, C, D]


def test_no_two_electors_share_a_host_unless_all_peers_do() -> None:
    beside = replace(FACTS, roster=(seat(A), seat(B)), standbys=(seat(C, host="host b"),))
    assert after(beside) is None
    assert after(replace(beside, one_machine=True)) == [A, B, C]
    twins = (seat(D, host="x"), seat(E, host="x"))
    assert after(replace(FACTS, roster=(seat(A),), standbys=twins)) is None


PEERS = [PeerId(letter * 64) for letter in "abcdefghi"]
SEATS = st.lists(st.sampled_from(PEERS), min_size=1, max_size=7, unique=True).map(lambda p: tuple(map(seat, p)))


@given(
    roster=SEATS,
    standbys=SEATS,
    silent=st.lists(st.sampled_from(PEERS), max_size=3, unique=True),
    gone=st.lists(st.sampled_from(PEERS), max_size=2, unique=True),
    wanted=st.sampled_from((1, 3, 5, 7)),
)
def test_whatever_is_planned_the_chain_accepts_and_it_comes_to_rest(
    roster: Roster, standbys: Roster, silent: list[PeerId], gone: list[PeerId], wanted: int
) -> None:
    """One at a time, and after a few changes the plan is to change nothing."""
    syncer = roster[0]
    for _ in range(20):
        others = [elector for elector in roster if elector != syncer]
        facts = RosterFacts(
            roster=roster,
            syncer=syncer,
            standbys=tuple(each for each in standbys if each.peer not in silent),
            silent=_of(others, silent),
            gone=_of(others, gone),
            wanted=wanted,
            one_machine=False,
        )
        plan = next_roster(facts)
        assert plan.reason
        if plan.roster is None:
            return
        assert why_not_next_roster(roster, plan.roster, syncer.peer) is None, plan
        assert syncer in plan.roster
        roster = plan.roster
        gone = [peer for peer in gone if peer in [elector.peer for elector in roster]]
        standbys = tuple(each for each in standbys if each.peer not in gone)
    raise AssertionError(f"still changing: {plan}")


def _of(electors: list[Elector], peers: list[PeerId]) -> Roster:
    return tuple(elector for elector in electors if elector.peer in peers)
