"""What may follow an entry (rules 1, 14, 21, 27): what a liar's chain is refused for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import Digest, Seq, Term
from geo_diloco.protocol.election.ballots import EntryFacts, Roster
from geo_diloco.protocol.election.validity import Before, why_not_next, why_not_next_roster
from tests.support.election_parts import OWNER, THREE, A, B, C, Chain, D, E, boot, seat

SEVEN = tuple(seat(letter * 64) for letter in "abcdefg")


def before(chain: Chain) -> Before:
    """What the chain's last entry leaves in force."""
    opened = next((entry.opened for entry in reversed(chain.entries) if entry.opened is not None), None)
    opened = None if chain.entries[-1].kind in ("found", "reform") else opened
    return Before(chain.entries[-1], chain.branch, chain.lineage, chain.roster, opened)


def why_not(chain: Chain, entry: EntryFacts) -> str | None:
    return why_not_next(entry, before(chain), OWNER)


def opened_chain() -> Chain:
    chain = Chain()
    chain.open(A, 2)
    return chain


def next_entry(chain: Chain, kind: str = "commit", **facts: object) -> EntryFacts:
    """What would follow, if it is valid."""
    return chain.fork().add(kind, **facts)  # type: ignore[arg-type]


def test_a_commit_of_the_terms_syncer_follows() -> None:
    chain = opened_chain()
    assert why_not(chain, next_entry(chain)) is None


def test_seq_grows_by_one() -> None:
    chain = opened_chain()
    assert why_not(chain, next_entry(chain, seq=Seq(3))) == "seq 3 does not follow 1"


def test_an_entry_of_a_term_is_signed_by_its_syncer() -> None:
    chain = opened_chain()
    assert why_not(chain, next_entry(chain, signer=B)) == "entry 2 is not signed by the syncer of term 2"


def test_no_entry_before_its_term_is_opened() -> None:
    found = Chain()
    assert why_not(found, next_entry(found)) == "term 1 was not opened before entry 1"
    chain = opened_chain()
    assert why_not(chain, next_entry(chain, term=Term(3))) == "term 3 was not opened before entry 2"


def test_an_entry_names_its_branch() -> None:
    chain = opened_chain()
    assert "branch" in (why_not(chain, next_entry(chain, branch="another")) or "")


def test_nothing_follows_the_end_of_the_run_not_even_a_reform() -> None:
    chain = opened_chain()
    chain.add("finished")
    assert why_not(chain, next_entry(chain)) == "the run is finished"
    reform = next_entry(chain, "reform", branch="", term=Term(1), signer=OWNER, roster=THREE, lineage=1)
    assert why_not(chain, reform) == "the run is finished"


# ---- open ------------------------------------------------------------------------------------------------------


def test_an_open_shows_votes_of_a_majority() -> None:
    chain = Chain()
    assert why_not(chain, chain.fork().open(B, 2, voters=(seat(B), seat(C)))) is None
    assert why_not(chain, chain.fork().open(B, 2, voters=(seat(B),))) == "open of term 2 shows 1 of 2 votes"


def test_votes_of_those_off_the_roster_count_nothing() -> None:
    chain = Chain()
    assert why_not(chain, chain.fork().open(B, 2, voters=(seat(B), seat(D), seat(E)))) is not None
    other_disk = seat(C, enrolment="new disk")
    assert why_not(chain, chain.fork().open(B, 2, voters=(seat(B), other_disk))) is not None


def test_the_same_vote_twice_counts_once() -> None:
    chain = Chain()
    assert why_not(chain, chain.fork().open(B, 2, voters=(seat(B), seat(B)))) is not None


@pytest.mark.parametrize("lie", [{"term": Term(3)}, {"candidate": boot(B, 2)}, {"head": Digest("other")}])
def test_votes_are_for_this_term_this_process_start_and_this_head(lie: dict[str, object]) -> None:
    chain = Chain()
    entry = chain.fork().open(B, 2)
    assert entry.opened is not None
    votes = tuple(replace(vote, **lie) for vote in entry.opened.votes)  # type: ignore[arg-type]
    assert why_not(chain, replace(entry, opened=replace(entry.opened, votes=votes))) is not None


def test_an_open_is_signed_by_the_syncer_it_names() -> None:
    chain = Chain()
    assert why_not(chain, replace(chain.fork().open(B, 2), signer=C)) is not None
    assert why_not(chain, replace(chain.fork().open(B, 2), opened=None)) is not None


def test_terms_grow_and_only_founding_opens_its_own() -> None:
    chain = Chain()
    chain.open(A, 1)
    assert why_not(chain, chain.fork().open(B, 1)) == "term 1 is not above 1"
    assert why_not(chain, chain.fork().open(B, 5)) is None


# ---- reform ----------------------------------------------------------------------------------------------------


def reform(chain: Chain, **facts: object) -> str | None:
    return why_not(chain, next_entry(chain, "reform", **{**REFORM, **facts}))


REFORM: dict[str, object] = {"branch": "", "term": Term(1), "signer": OWNER, "roster": THREE, "lineage": 1}


def test_only_the_owner_reforms() -> None:
    assert reform(opened_chain()) is None
    assert reform(opened_chain(), signer=B) == "a reform is signed by the run's owner"


def test_a_reform_has_a_number_above_its_branch_and_begins_with_term_one() -> None:
    assert reform(opened_chain(), lineage=0) is not None
    assert reform(opened_chain(), term=Term(3)) is not None


@pytest.mark.parametrize("roster", [None, (), (seat(A), seat(A)), (*SEVEN, seat("h" * 64))])
def test_a_reform_names_one_to_seven_electors(roster: Roster | None) -> None:
    assert reform(opened_chain(), roster=roster) == "a reform names its electors"


# ---- roster ----------------------------------------------------------------------------------------------------


def test_a_roster_changes_by_one_elector() -> None:
    assert why_not_next_roster(THREE, (*THREE, seat(D)), A) is None
    assert why_not_next_roster(THREE, THREE[:2], A) is None
    assert why_not_next_roster(THREE, (*THREE, seat(D), seat(E)), A) == "roster changes by 2 electors at once"
    assert why_not_next_roster(THREE, (seat(A), seat(B), seat(D)), A) is not None
    assert why_not_next_roster(THREE, THREE, A) is not None


def test_another_disk_of_the_same_peer_is_a_second_change() -> None:
    assert why_not_next_roster(THREE, (seat(A), seat(B), seat(C, enrolment="new disk")), A) is not None


def test_a_syncer_that_is_the_whole_roster_goes_to_any_size_and_stays_on_it() -> None:
    assert why_not_next_roster((seat(A),), THREE, A) is None
    assert why_not_next_roster((seat(A),), THREE[1:], A) is not None
    assert why_not_next_roster((seat(A),), THREE, B) is not None


def test_a_roster_has_one_to_seven_electors_each_once() -> None:
    assert why_not_next_roster(SEVEN, (*SEVEN, seat("h" * 64)), A) == "a roster of 8"
    assert why_not_next_roster((seat(A),), (), A) == "a roster of 0"
    assert why_not_next_roster(THREE, (*THREE, seat(C, enrolment="x")), A) == "a roster of 4"


def test_a_roster_entry_on_the_chain_obeys_the_same() -> None:
    chain = opened_chain()
    assert why_not(chain, next_entry(chain, "roster", roster=(*THREE, seat(D)))) is None
    assert why_not(chain, next_entry(chain, "roster", roster=(seat(A),))) is not None
