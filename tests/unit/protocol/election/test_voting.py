"""May an elector vote? Every refusal and its reason (rules 8, 13, 28)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import BranchId, MonoMs, Seq, Term
from geo_diloco.protocol.election.ballots import PeerBoot, Rank, VoteRecord
from geo_diloco.protocol.election.voting import Promise, Verdict, binds, may_vote, seconds
from tests.support.election_parts import A, B, boot

HELD = Rank(0, Term(2), Seq(10))
RECORD = VoteRecord(branch=BranchId("b"), lineage=0, term=Term(3), voted_for=None, held=HELD, enrolment="disk")
NOW = MonoMs(1_000)
ANN = boot(A)


def vote(
    *,
    record: VoteRecord = RECORD,
    term: int = 4,
    candidate: PeerBoot = ANN,
    rank: Rank = HELD,
    promise: Promise | None = None,
) -> Verdict:
    return may_vote(record, term=Term(term), candidate=candidate, rank=rank, promise=promise, now=NOW)


def test_a_free_elector_votes_in_a_new_term_for_a_chain_as_good_as_its_own() -> None:
    assert vote() == Verdict(True, f"vote for {A[:8]} in term 4")


def test_a_vote_never_goes_to_a_lower_term() -> None:
    assert vote(term=2).reason == "no vote: term 2 is over, this is term 3"


def test_in_its_own_term_an_elector_may_give_the_vote_it_has_not_given() -> None:
    assert vote(term=3).yes


def test_a_vote_is_given_once_a_term() -> None:
    voted = replace(RECORD, voted_for=boot(B))
    assert vote(record=voted, term=3).reason == f"no vote: {B[:8]} has it in term 3"
    assert vote(record=voted, term=4).yes


def test_the_same_vote_may_be_given_again() -> None:
    assert vote(record=replace(RECORD, voted_for=boot(A)), term=3).yes


def test_a_vote_is_for_a_process_start_not_for_a_peer() -> None:
    assert not vote(record=replace(RECORD, voted_for=boot(A, 1)), term=3, candidate=boot(A, 2)).yes


def test_a_chain_below_what_was_ever_held_gets_no_vote() -> None:
    longer_but_older = Rank(0, Term(1), Seq(99))
    assert vote(rank=longer_but_older).reason == "no vote: entry 99 of term 1 ranks below entry 10 of term 2, held here"
    assert not vote(rank=Rank(0, Term(2), Seq(9))).yes
    assert vote(rank=Rank(0, Term(3), Seq(1))).yes


def test_a_chain_of_another_branch_gets_no_vote() -> None:
    assert vote(rank=Rank(1, Term(1), Seq(50))).reason == "no vote: entry 50 of term 1 is of another branch"


def test_a_promise_binds_against_everybody_but_its_holder_until_it_ends() -> None:
    promise = Promise(MonoMs(7_200), boot(B), Term(3))
    assert vote(promise=promise).reason == "no vote: promise to term 3 for 6.2 s more"
    assert vote(promise=promise, candidate=boot(B)).yes
    assert not vote(promise=promise, candidate=boot(B, 2)).yes
    assert vote(promise=replace(promise, until=NOW)).yes


def test_after_a_start_an_elector_is_bound_to_nobody() -> None:
    promise = Promise(MonoMs(2_000), None, Term(3))
    assert vote(promise=promise).reason == "no vote: bound since the start for 1.0 s more"
    assert binds(promise, None, NOW) is not None


def test_seconds_are_cut_not_rounded() -> None:
    assert (seconds(0), seconds(1_999), seconds(15_300)) == ("0.0 s", "1.9 s", "15.3 s")


RANKS = st.builds(Rank, st.integers(0, 1), st.integers(0, 4).map(Term), st.integers(-1, 6).map(Seq))
BOOTS = st.builds(boot, st.sampled_from((A, B)), st.integers(1, 2))


@given(
    term=st.integers(0, 5),
    candidate=BOOTS,
    rank=RANKS,
    voted_for=st.none() | BOOTS,
    promise=st.none() | st.builds(Promise, st.integers(0, 2_000).map(MonoMs), st.none() | BOOTS, st.just(Term(3))),
)
def test_whatever_comes_a_vote_keeps_the_promise_the_term_and_what_is_held(
    term: int, candidate: PeerBoot, rank: Rank, voted_for: PeerBoot | None, promise: Promise | None
) -> None:
    verdict = vote(
        record=replace(RECORD, voted_for=voted_for), term=term, candidate=candidate, rank=rank, promise=promise
    )
    assert verdict.reason
    if verdict.yes:
        assert rank >= HELD and rank.lineage == 0
        assert term > 3 or (term == 3 and voted_for in (None, candidate))
        assert promise is None or promise.until <= NOW or promise.holder == candidate
