"""The machine as a whole: founding, restarts, fences of term and branch, what liars can't do (rules 1-3, 7, 24-29)."""

from __future__ import annotations

import pytest

from geo_diloco.manifest import Digest, FragmentId, MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.effects import Note, PersistVote
from geo_diloco.protocol.election.ballots import (
    NO_HEAD,
    Ack,
    Append,
    Ask,
    Ballot,
    Head,
    Need,
    Rank,
    Refuse,
    Release,
    Serving,
    Use,
    Vote,
)
from geo_diloco.protocol.election.polls import (
    ChainMoved,
    EntriesArrived,
    EntrySealed,
    FoundingAsked,
    PollEffect,
    SealFound,
    SealOpen,
    ServiceBegan,
    ServiceEnded,
    TakeEntries,
)
from geo_diloco.protocol.election.tenure import PARTED_MS
from geo_diloco.protocol.events import EntryStored, Sighted, Sighting
from tests.support.election_parts import (
    OWNER,
    RULES,
    THREE,
    A,
    B,
    Bench,
    C,
    Chain,
    D,
    ballots,
    boot,
    founded,
    offer_of,
    seat,
)


def served(*, term: int = 1, num_commits: int = 2) -> Chain:
    chain = Chain()
    chain.open(A, term)
    chain.commits(num_commits)
    return chain


def notes(effects: list[PollEffect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note)]


# ---- founding ---------------------------------------------------------------------------------------------------


def test_a_founder_votes_for_itself_on_disk_before_it_founds() -> None:
    bench = Bench(OWNER)
    bench.disk_answers = False
    effects = bench.give(FoundingAsked())
    assert [type(effect) for effect in effects] == [PersistVote]
    record = bench.machine.record
    assert (record.term, record.voted_for) == (1, boot(OWNER))


def test_founding_opens_term_one_and_is_durable_by_its_own_disk() -> None:
    bench, _ = founded()
    [seal] = [effect for effect in bench.effects if isinstance(effect, SealFound)]
    assert (seal.term, [elector.peer for elector in seal.roster]) == (1, [OWNER])
    [opened] = [effect for effect in bench.effects if isinstance(effect, SealOpen)]
    assert [vote.elector for vote in opened.votes] == [OWNER]
    assert ServiceBegan(Term(1)) in bench.effects
    assert bench.machine.why_not_append(Term(1), bench.now) is None


def test_a_run_is_not_founded_twice() -> None:
    bench, chain = founded()
    again = Bench(OWNER, start=2, record=bench.machine.record, chain=chain)
    effects = again.give(FoundingAsked())
    assert not [effect for effect in effects if isinstance(effect, SealFound)]
    lost_log = Bench(OWNER, start=2, record=bench.machine.record)
    assert "not founded again" in notes(lost_log.give(FoundingAsked()))[0]


def test_a_founder_that_died_before_it_founded_does_so_in_a_later_term() -> None:
    first = Bench(OWNER)
    first.give(FoundingAsked())
    again = Bench(OWNER, start=2, record=first.machine.record)
    [seal] = [effect for effect in again.give(FoundingAsked()) if isinstance(effect, SealFound)]
    assert seal.term == 2


def test_a_founder_that_restarts_is_elected_in_a_later_term_and_appends_nothing_in_the_old_one() -> None:
    bench, chain = founded()
    again = Bench(OWNER, start=2, record=bench.machine.record, chain=chain)
    assert again.machine.begin_append(Term(1), again.now) == "not syncer of term 1"
    effects = again.wait(2_000)
    assert [effect.term for effect in effects if isinstance(effect, SealOpen)] == [2]


@pytest.mark.parametrize("num_entries", [1, 2, 4])
def test_a_restarted_process_is_nothing_whatever_it_was(num_entries: int) -> None:
    bench, chain = founded()
    chain.commits(2)
    chain.entries = chain.entries[:num_entries]
    again = Bench(OWNER, start=2, record=bench.machine.record, chain=chain)
    assert again.role == "peer" and again.machine.durable_seq is None


def test_a_disk_without_its_record_is_another_elector() -> None:
    bench = Bench(B, chain=served())
    assert bench.machine._books.seated()
    record = bench.machine.record
    assert Bench(B, record=record).machine.record.enrolment == record.enrolment
    stranger = Bench(D, chain=served())
    assert not stranger.machine._books.seated()


# ---- terms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ballot",
    [
        Ask(head=NO_HEAD),
        Vote(candidate=boot(B), head=Digest(""), enrolment=""),
        Append(head=NO_HEAD, durable_seq=Seq(0), sent_at=MonoMs(0)),
        Ack(acked=NO_HEAD, sent_at=MonoMs(0), enrolment="", host="", address=""),
        Release(to=B),
    ],
    ids=lambda ballot: ballot.kind,
)
def test_a_ballot_of_a_lower_term_is_refused_and_otherwise_ignored(ballot: Ballot) -> None:
    bench = Bench(B, chain=served(term=5))
    before = bench.machine.status(bench.now)
    [(to, refuse)] = ballots(list(bench.hear(C, ballot, term=4)), Refuse)
    assert (to, refuse.reason, refuse.term) == (C, "term", 5)
    assert bench.machine.status(bench.now) == before


def test_a_higher_term_of_an_elector_raises_the_own_and_clears_the_vote() -> None:
    bench = Bench(B, chain=served())
    bench.wait(RULES.promise_ms)
    bench.hear(C, Ask(head=served().head), term=2)
    assert bench.machine.record.voted_for == boot(C)
    bench.hear(A, Serving(term=Term(6), syncer=A), term=6)
    assert (bench.machine.record.term, bench.machine.record.voted_for) == (6, None)


def test_a_higher_term_of_a_stranger_raises_nothing() -> None:
    bench = Bench(B, chain=served())
    bench.hear(D, Serving(term=Term(6), syncer=A), term=6)
    bench.hear(D, Append(head=NO_HEAD, durable_seq=Seq(0), sent_at=MonoMs(0)), term=6)
    assert bench.machine.record.term == 1


def test_an_adopted_entry_raises_the_term() -> None:
    chain = served()
    bench = Bench(B, chain=chain)
    longer = chain.fork()
    longer.open(C, 8)
    bench.give(EntriesArrived(D, longer.facts()))
    assert bench.machine.record.term == 8


def test_a_syncer_never_takes_a_chain_within_its_term_and_ends_for_a_higher_one() -> None:
    bench, chain = founded()
    longer = chain.fork()
    longer.open(A, 2, start=2)
    effects = bench.give(EntriesArrived(D, longer.facts()))
    assert ServiceEnded(Term(1), "term 2 was opened") in effects
    assert bench.role == "peer"


# ---- entries ----------------------------------------------------------------------------------------------------


def test_new_entries_are_written_and_the_move_of_the_chain_is_told() -> None:
    chain = served()
    bench = Bench(B, chain=chain)
    rival = Chain()
    rival.entries = chain.entries[:2]
    rival.branch = chain.branch
    rival.open(C, 2)
    effects = bench.give(EntriesArrived(C, rival.facts()))
    assert TakeEntries((rival.entries[-1],)) in effects
    assert ChainMoved(Seq(1), rival.head) in effects
    assert not [e for e in bench.give(EntriesArrived(C, rival.facts())) if isinstance(e, TakeEntries | ChainMoved)]


def test_a_gap_is_asked_for_and_not_without_end() -> None:
    chain = served()
    bench = Bench(B, chain=served(num_commits=0))
    needs = [to for to, _ in ballots(bench.give(EntriesArrived(C, chain.facts()[3:])), Need)]
    assert needs == [C]
    assert not ballots(bench.give(EntriesArrived(C, chain.facts()[3:])), Need)


def test_two_entries_of_one_place_are_an_alarm() -> None:
    chain = served()
    other = served(num_commits=1)
    use = Use(B, FragmentId(0), other.entries[1].digest)
    other.add("commit", uses=(use,))
    bench = Bench(B, chain=chain)
    effects = bench.give(EntriesArrived(C, other.facts()))
    assert [(e.level, e.text.split(": ")[1]) for e in effects if isinstance(e, Note)] == [("error", "ALARM")]


def test_whoever_appends_in_anothers_term_is_named() -> None:
    chain = served()
    bench = Bench(B, chain=chain)
    before = len(bench.effects)
    bench.hear(C, Append(head=chain.head, durable_seq=Seq(0), sent_at=MonoMs(0)), term=1)
    effects = bench.effects[before:]
    assert any(text.startswith("ALARM") for text in notes(effects))
    assert ballots(effects, Refuse)[0][0] == C


def test_a_log_with_an_invalid_entry_is_read_around_it_and_said_so() -> None:
    chain = served()
    forged = chain.fork()
    forged.add("commit", signer=C)
    bench = Bench(B, chain=forged)
    assert bench.machine.head == chain.head
    assert any("read up to" in text for text in notes(bench.effects))


def test_forgetting_keeps_what_elections_need() -> None:
    chain = served(num_commits=5)
    bench = Bench(B, chain=chain)
    assert len(bench.machine.forget(Seq(4))) == 4
    assert (bench.machine.head, bench.machine.roster) == (chain.head, THREE)
    chain.commits(1)
    bench.take(chain)
    assert bench.machine.best == chain.head


# ---- branches ---------------------------------------------------------------------------------------------------


def reformed(chain: Chain, roster: tuple[PeerId, ...] = (B, C, D), *, number: int = 1, at: int | None = None) -> Chain:
    """The owner's reform on top of that chain (or of its first entries)."""
    new = chain.fork()
    new.entries = new.entries[:at]
    new.add("reform", branch="", term=Term(1), signer=OWNER, roster=tuple(map(seat, roster)), lineage=number)
    new.branch, new.lineage = new.entries[-1].digest, number  # type: ignore[assignment]
    return new


def test_a_reform_takes_an_elector_to_the_new_branch_free_of_votes_and_promises() -> None:
    chain = served(term=4)
    bench = Bench(B, chain=chain)
    bench.hear(A, Append(head=chain.head, durable_seq=Seq(0), sent_at=MonoMs(0)), term=4)
    new = reformed(chain)
    bench.take(new)
    record = bench.machine.record
    assert (record.branch, record.lineage, record.term, record.voted_for) == (new.branch, 1, 1, None)
    assert bench.machine.status(bench.now).follows is None
    assert ballots(list(bench.hear(C, Ask(head=new.head), term=2)), Vote)


def test_whoever_left_a_branch_never_votes_or_acks_in_it_again() -> None:
    chain = served(term=4)
    bench = Bench(B, chain=chain)
    bench.take(reformed(chain))
    old = Append(head=chain.head, durable_seq=Seq(0), sent_at=MonoMs(0))
    for ballot in (old, Ask(head=chain.head)):
        said = list(bench.hear(A, ballot, term=9, branch=chain.branch))
        assert not ballots(said, Vote) and not ballots(said, Ack)
        assert ballots(said, Refuse)[0][1].reason == "branch"
    again = Bench(B, start=2, record=bench.machine.record, chain=chain)
    again.wait(RULES.promise_ms)
    assert not ballots(list(again.hear(A, Ask(head=chain.head), term=9, branch=chain.branch)), Vote)


def test_a_syncer_that_meets_a_later_branch_releases_its_electors_and_stops() -> None:
    bench, chain = founded()
    bench.hear(B, offer_of(B), term=1)
    new = reformed(chain)
    new.open(C, 2)
    before = len(bench.effects)
    bench.give(EntriesArrived(D, new.facts()))
    effects = bench.effects[before:]
    assert (B, Release(to=C)) in ballots(effects, Release)
    assert ServiceEnded(Term(1), f"branch {new.branch[:8]} goes on") in effects
    assert bench.role == "peer" and bench.machine.record.branch == new.branch


def test_a_syncer_of_the_later_branch_goes_on_and_shows_it_to_who_is_of_an_earlier_one() -> None:
    bench, chain = founded()
    earlier = reformed(chain, (B,), number=1)
    bench.take(reformed(chain, (A,), number=2))
    bench.wait(2_000)
    assert bench.role == "syncer"
    append = Append(head=earlier.head, durable_seq=Seq(0), sent_at=MonoMs(0))
    said = list(bench.hear(B, append, term=3, branch=earlier.branch))
    assert ballots(said, Refuse)[0][1].reason == "branch"
    bench.give(EntriesArrived(B, earlier.facts()))
    assert bench.role == "syncer" and bench.machine.record.lineage == 2


def test_who_is_refused_for_its_branch_asks_for_the_other() -> None:
    chain = served()
    bench = Bench(B, chain=chain)
    said = list(bench.hear(C, Refuse(reason="branch", detail="", term=Term(1)), term=1, branch="later"))
    assert [to for to, _ in ballots(said, Need)] == [C]


def test_whoever_offers_from_an_earlier_branch_is_told_of_the_later_one_and_does_not_count() -> None:
    chain = served()
    bench = Bench(B, chain=chain)
    bench.take(reformed(chain))
    bench.wait(RULES.promise_ms)
    for peer in (C, D):
        said = list(bench.hear(peer, offer_of(peer), term=1, branch=chain.branch))
        assert ballots(said, Refuse)[0][1].reason == "branch"
    bench.wait(2_000)
    assert bench.role == "peer" and "electors needed are here" in bench.machine.status(bench.now).candidacy


def test_an_elector_named_by_a_reform_hears_of_it_from_the_candidate_that_asks() -> None:
    chain = served()
    new = reformed(chain)
    for bench in (Bench(B, chain=chain), Bench(D)):
        said = list(bench.hear(C, Ask(head=new.head), term=2, branch=new.branch))
        assert [to for to, _ in ballots(said, Need)] == [C] and not ballots(said, Vote)


def test_a_syncer_hears_of_a_later_branch_from_the_directory() -> None:
    bench, _ = founded()
    effects = bench.give(
        Sighted((Sighting(C, Rank(1, Term(2), Seq(9)), Term(2)), Sighting(D, Rank(0, Term(9), Seq(9)), None)))
    )
    assert [to for to, _ in ballots(effects, Need)] == [C]


def test_nobody_asks_for_votes_in_a_branch_whose_bytes_it_lacks() -> None:
    chain = served()
    bench = Bench(B, chain=chain)
    bench.take(reformed(chain), stored=False)
    for peer in (C, D):
        bench.hear(peer, offer_of(peer), term=1)
    bench.wait(2_000)
    assert bench.role == "peer"
    assert bench.machine.status(bench.now).candidacy == "the reform is not whole here yet"


def test_an_entry_sealed_for_the_branch_that_was_left_is_dropped() -> None:
    bench, chain = founded()
    assert bench.machine.begin_append(Term(1), bench.now) is None
    late = chain.fork()
    late.commits(1)
    new = reformed(chain, (A,))
    bench.take(new)
    bench.wait(2_000)
    assert bench.role == "syncer" and bench.machine.record.term == 2
    assert "came too late" in notes(bench.give(EntrySealed(late.entries[-1])))[0]
    assert bench.machine.head == new.head


def test_who_remembers_too_little_to_follow_a_reform_leaves_its_branch_after_a_while_and_says_so() -> None:
    bench, chain = founded()
    new = reformed(chain)
    new.open(C, 2)
    chain.commits(3)
    for entry in chain.entries[2:]:
        bench.machine.begin_append(Term(1), bench.now)
        bench.give(EntrySealed(entry))
    assert bench.machine.forget(Seq(4))
    bench.give(EntriesArrived(C, new.facts()))
    assert bench.role == "syncer" and bench.machine.stranded is None
    bench.wait(PARTED_MS)
    bench.give(EntriesArrived(C, new.facts()))
    assert bench.role == "peer" and bench.machine.record.branch == new.branch
    assert bench.machine.stranded is not None
    bench.wait(60_000)
    assert bench.role == "peer"
    again = Bench(A, start=2, record=bench.machine.record, chain=chain)
    assert again.machine.stranded is None
    again.take(new)
    assert again.machine.best == new.head
    late = Bench(A, start=3, record=bench.machine.record, chain=chain)
    assert late.machine.forget(Seq(4))
    late.give(EntriesArrived(C, new.facts()))
    assert late.machine.stranded is None
    late.wait(PARTED_MS)
    late.give(EntriesArrived(C, new.facts()))
    assert late.machine.stranded is not None, "its snapshots are of the branch that it left"
    assert not any("connects" in each for each in notes(late.give(EntriesArrived(C, new.facts())))), "said once"


def test_who_lacks_what_lies_between_leaves_too_and_is_back_when_it_connects() -> None:
    bench, chain = founded()
    new = chain.fork()
    new.open(B, 2, voters=(seat(A),))
    new.commits(2)
    new = reformed(new)
    new.open(C, 2)
    for _ in range(2):
        bench.give(EntriesArrived(C, new.facts()[-2:]))
        bench.wait(PARTED_MS)
    assert (
        bench.role == "peer"
        and bench.machine.stranded == f"nothing here connects to branch {new.branch[:8]}, which goes on"
    )
    assert not ballots(list(bench.hear(B, Ask(head=chain.head), term=9, branch=chain.branch)), Vote)
    bench.take(new)
    assert bench.machine.stranded is None and bench.machine.best == new.head


# ---- what it shows ----------------------------------------------------------------------------------------------


def test_every_state_has_its_reason() -> None:
    bench, chain = founded()
    status = bench.machine.status(bench.now)
    assert (status.role, status.append, status.roster_plan) == (
        "syncer",
        "",
        "alone: two more peers, learners too, come in together, and none are here",
    )
    chain.open(A, 2, start=2)
    follower = Bench(B, chain=chain)
    follower.hear(A, Append(head=chain.head, durable_seq=Seq(0), sent_at=MonoMs(0)), term=2, start=2)
    status = follower.machine.status(follower.now)
    assert (status.follows, status.vote) == (A, "no vote: promise to term 2 for 15.3 s more")
    assert status.candidacy == f"{A[:8]} serves term 2"


def test_a_deadline_is_never_over_once_it_was_heeded() -> None:
    bench, _ = founded()
    for _ in range(50):
        assert bench.machine.deadline is not None and bench.machine.deadline > bench.now
        bench.wait(int(bench.machine.deadline - bench.now))


def test_bytes_that_come_twice_or_for_nothing_known_change_nothing() -> None:
    chain = served()
    bench = Bench(B, chain=chain)
    before = bench.machine.status(bench.now)
    bench.give(EntryStored(chain.entries[-1].digest))
    bench.give(EntryStored(Digest("nothing")))
    assert bench.machine.status(bench.now) == before


def test_head_of_an_empty_chain_is_below_every_other() -> None:
    assert Bench(B).machine.head == NO_HEAD == Bench(B).machine.best
    assert NO_HEAD.rank < Head(Rank(0, Term(1), Seq(0)), Digest("x")).rank
