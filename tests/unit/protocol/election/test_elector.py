"""An elector's promise, votes, acks and offers (rules 4, 5, 8, 9, 13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import BranchId, Digest, MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.election.ballots import (
    NO_HEAD,
    Ack,
    Append,
    Ask,
    Ballot,
    Head,
    Need,
    Offer,
    Rank,
    Refuse,
    Serving,
    Vote,
)
from geo_diloco.protocol.election.elector import CANDIDATES_MAX, OFFER_MS, OFFER_OUTSIDE_MS, SUPPLY_MS
from geo_diloco.protocol.election.machine import LEAP_MAX
from geo_diloco.protocol.election.polls import EntriesArrived
from geo_diloco.protocol.events import EntryLost, EntryStored, Sighted, Sighting
from tests.support.election_parts import RULES, A, B, Bench, C, Chain, D, E, ballots, boot, founded, offer_of, seat

PROMISE_MS = RULES.promise_ms
TERM_MAX = (1 << 53) - 1
"""On the wire."""
NEED = Need(points=())


def served(*, num_commits: int = 2) -> Chain:
    chain = Chain()
    chain.open(A, 1)
    chain.commits(num_commits)
    return chain


def elector(chain: Chain, *, may_serve: bool = True, free: bool = True) -> Bench:
    bench = Bench(B, chain=chain, may_serve=may_serve)
    if free:
        bench.wait(PROMISE_MS)
    return bench


def append(
    bench: Bench, chain: Chain, *, term: int = 1, start: int = 1, durable: int = -1, sent_at: int = 5
) -> list[Ack]:
    message = Append(head=chain.head, durable_seq=Seq(durable), sent_at=MonoMs(sent_at))
    return [ack for _, ack in ballots(list(bench.hear(chain.signer, message, term=term, start=start)), Ack)]


def ask(bench: Bench, chain: Chain, *, term: int, sender: PeerId = C, start: int = 1) -> list[object]:
    return list(bench.hear(sender, Ask(head=chain.head), term=term, start=start))


# ---- promise and votes ------------------------------------------------------------------------------------------


def test_after_a_start_no_vote_for_as_long_as_a_promise_lasts() -> None:
    chain = served()
    bench = elector(chain, free=False)
    bench.wait(PROMISE_MS - 1)
    refusals = ballots(ask(bench, chain, term=2), Refuse)
    assert refusals[0][1].detail == "no vote: bound since the start for 0.0 s more"
    bench.wait(1)
    assert ballots(ask(bench, chain, term=2), Vote)


def test_who_alone_is_the_roster_and_voted_for_itself_does_not_wait() -> None:
    bench, chain = founded()
    again = Bench(A, start=2, record=bench.machine.record, chain=chain)
    assert "bound" not in again.machine.status(again.now).vote
    forgetful = replace(bench.machine.record, voted_for=boot(B))
    bound = Bench(A, start=2, record=forgetful, chain=chain)
    assert "bound" in bound.machine.status(bound.now).vote


def test_a_heartbeat_binds_the_elector_to_its_syncer_for_slightly_more_than_a_lease() -> None:
    chain = served()
    bench = elector(chain)
    append(bench, chain)
    bench.wait(PROMISE_MS - 1)
    assert ballots(ask(bench, chain, term=2), Refuse)[0][1].detail == "no vote: promise to term 1 for 0.0 s more"
    assert bench.machine.status(bench.now).follows == A
    bench.wait(1)
    assert ballots(ask(bench, chain, term=2), Vote)


def test_the_promise_does_not_bind_against_the_syncer_itself() -> None:
    chain = served()
    bench = elector(chain)
    append(bench, chain)
    assert ballots(ask(bench, chain, term=2, sender=A), Vote)


def test_a_vote_shows_what_it_is_for_and_is_remembered() -> None:
    chain = served()
    bench = elector(chain)
    [(to, vote)] = ballots(ask(bench, chain, term=4), Vote)
    assert (to, vote.head, vote.enrolment, vote.candidate.peer) == (C, chain.head.digest, "disk b", C)
    assert bench.machine.record.voted_for == vote.candidate and bench.machine.record.term == 4


def test_the_same_ask_twice_is_answered_twice_the_same_and_a_rivals_is_refused() -> None:
    chain = served()
    bench = elector(chain)
    assert ask(bench, chain, term=4) == ask(bench, chain, term=4)
    assert ballots(ask(bench, chain, term=4, sender=D), Refuse)[0][1].detail == f"no vote: {C[:8]} has it in term 4"


def test_a_late_ask_of_an_older_term_is_refused_by_term() -> None:
    chain = served()
    bench = elector(chain)
    ask(bench, chain, term=4)
    [(_, refuse)] = ballots(ask(bench, chain, term=3, sender=D), Refuse)
    assert (refuse.reason, refuse.term) == ("term", 4)


def test_a_restarted_elector_remembers_its_vote() -> None:
    chain = served()
    bench = elector(chain)
    ask(bench, chain, term=4)
    again = Bench(B, start=2, record=bench.machine.record, chain=chain)
    again.wait(PROMISE_MS)
    assert ballots(ask(again, chain, term=4, sender=D), Refuse)
    assert ballots(ask(again, chain, term=4, start=2), Refuse), "it was for another process start"
    assert ballots(ask(again, chain, term=4), Vote)


def test_a_refusal_raises_the_term_only_of_who_is_free() -> None:
    """Whoever asks while others follow their syncer must not end that service."""
    chain = served()
    low = Chain()
    bound = elector(chain)
    append(bound, chain)
    ask(bound, low, term=9)
    assert bound.machine.record.term == 1
    free = elector(chain)
    ask(free, low, term=9)
    assert (free.machine.record.term, free.machine.record.voted_for) == (9, None)


def test_a_candidate_that_claims_a_higher_rank_for_an_old_head_gets_no_vote() -> None:
    """Elected on it, it would have left behind what is durable."""
    chain = served(num_commits=3)
    bench = elector(chain)
    old = chain.entries[1]
    claimed = Head(Rank(0, Term(7), Seq(99)), old.digest)
    (refusal,) = ballots(list(bench.hear(C, Ask(head=claimed), term=2)), Refuse)
    assert refusal[1].detail == "no vote: entry 1 of term 1 ranks below entry 4 of term 1, held here"


def test_no_vote_on_a_head_that_is_not_known_here_until_the_candidate_has_shown_it() -> None:
    chain = served()
    bench = elector(chain)
    behind = chain.fork()
    chain.commits(2)
    effects = ask(bench, chain, term=2)
    assert [to for to, _ in ballots(effects, Need)] == [C] and not ballots(effects, Vote)
    assert bench.machine.record.voted_for is None
    bench.give(EntriesArrived(C, chain.facts()[len(behind.entries) :]))
    assert ballots(ask(bench, chain, term=2), Vote), "the records are enough"


def test_who_was_brought_into_a_branch_without_its_entries_votes_there() -> None:
    bench = elector(served())
    bench.machine._books.enter_branch(BranchId("5" * 64), 1, Term(1))
    head = Head(Rank(1, Term(1), Seq(9)), Digest("6" * 64))
    assert ballots(list(bench.hear(C, Ask(head=head), term=2)), Vote)


@pytest.mark.parametrize("sender", [C, E], ids=["an elector", "a stranger"])
@pytest.mark.parametrize("ballot", [Ask(head=NO_HEAD), Refuse(reason="term", detail="", term=Term(1)), NEED])
def test_nobody_brings_a_term_to_the_end_of_numbers_at_once(sender: PeerId, ballot: Ballot) -> None:
    """After it there would be no term to ask in."""
    bench = elector(served())
    for term in (TERM_MAX, bench.machine.record.term + LEAP_MAX + 1):
        bench.hear(sender, ballot, term=term)
    assert bench.machine.record.term == 1
    bench.hear(C, NEED, term=LEAP_MAX)
    assert bench.machine.record.term == LEAP_MAX


# ---- acks -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_acked_at_once_with_what_is_whole_on_disk() -> None:
    chain = served()
    bench = elector(chain)
    [ack] = append(bench, chain, sent_at=77)
    assert (ack.acked, ack.sent_at, ack.enrolment) == (chain.head, 77, "disk b")


def test_an_entry_is_acked_only_with_its_bytes_and_again_when_they_come() -> None:
    chain = served(num_commits=0)
    bench = elector(chain)
    append(bench, chain)
    chain.commits(2)
    bench.take(chain, sender=A, stored=False)
    [ack] = append(bench, chain)
    assert ack.acked.rank.seq == 1
    assert not ballots(bench.give(EntryStored(chain.entries[3].digest)), Ack), "the one before it is missing"
    [(to, later)] = ballots(bench.give(EntryStored(chain.entries[2].digest)), Ack)
    assert (to, later.acked) == (A, chain.head)


def test_nothing_is_acked_beyond_lost_bytes_and_what_was_held_still_counts() -> None:
    chain = served()
    bench = elector(chain)
    bench.give(EntryLost(chain.entries[2].digest))
    [ack] = append(bench, chain)
    assert ack.acked.rank.seq == 1
    assert bench.machine.record.held == chain.head.rank
    bench.wait(PROMISE_MS)
    shorter = Chain()
    shorter.entries = chain.entries[:3]
    assert ballots(ask(bench, shorter, term=5), Refuse)


def test_an_append_whose_term_nobody_has_proven_is_answered_by_a_need() -> None:
    chain = Chain()
    bench = elector(chain)
    served_by_a = chain.fork()
    served_by_a.open(A, 1)
    message = Append(head=served_by_a.head, durable_seq=Seq(-1), sent_at=MonoMs(1))
    said = bench.hear(A, message, term=1)
    assert ballots(list(said), Need) and not ballots(list(said), Ack)
    assert bench.machine.status(bench.now).follows is None


def test_an_append_by_another_process_start_than_was_elected_is_refused() -> None:
    chain = served()
    bench = elector(chain)
    assert append(bench, chain, start=2) == []
    assert bench.machine.status(bench.now).follows is None


def test_entries_it_does_not_know_are_asked_for() -> None:
    chain = served(num_commits=0)
    bench = elector(chain)
    chain.commits(1)
    message = Append(head=chain.head, durable_seq=Seq(-1), sent_at=MonoMs(1))
    assert [to for to, _ in ballots(list(bench.hear(A, message, term=1)), Need)] == [A]


def test_in_a_later_term_nothing_is_acked_to_the_syncer_of_an_older_one() -> None:
    chain = served(num_commits=0)
    bench = elector(chain)
    append(bench, chain)
    bench.hear(C, Serving(term=Term(3), syncer=C), term=3)
    assert bench.machine.record.term == 3
    chain.commits(1)
    assert not ballots(bench.take(chain, sender=A), Ack)


def test_acks_echo_the_newest_append_also_if_an_older_one_comes_later() -> None:
    chain = served()
    bench = elector(chain)
    append(bench, chain, sent_at=90)
    [ack] = append(bench, chain, sent_at=80)
    assert ack.sent_at == 90


def test_what_the_syncer_calls_durable_is_known_as_far_as_it_is_whole_here() -> None:
    chain = served(num_commits=3)
    bench = elector(chain)
    assert bench.machine.durable_heard is None
    append(bench, chain, durable=3)
    heard = bench.machine.durable_heard
    assert heard is not None and heard.digest == chain.entries[3].digest
    bench.give(EntryLost(chain.entries[3].digest))
    heard = bench.machine.durable_heard
    assert heard is not None and heard.rank.seq == 2
    bench.hear(C, Serving(term=Term(3), syncer=C), term=3)
    assert bench.machine.durable_heard is None, "of an older term nothing is known"


# ---- offers -----------------------------------------------------------------------------------------------------


def offers(bench: Bench, ms: int) -> list[tuple[PeerId, Offer]]:
    return ballots(bench.wait(ms), Offer)


def test_a_free_elector_offers_every_second_to_the_reachable_ones_of_its_roster() -> None:
    bench = elector(served())
    bench.wait(OFFER_MS)
    made = offers(bench, OFFER_MS)
    assert {to for to, _ in made} == {A, C}
    assert all(offer.free and offer.held == bench.machine.record.held for _, offer in made)


def test_who_has_no_seat_offers_less_often() -> None:
    chain = Chain((seat(A), seat(C), seat(D)))
    bench = elector(chain)
    assert len(offers(bench, 3 * OFFER_OUTSIDE_MS)) == 3 * len({to for to, _ in offers(bench, OFFER_OUTSIDE_MS)})


def test_bound_since_its_start_it_offers_but_not_its_vote() -> None:
    made = offers(elector(served(), free=False), OFFER_MS)
    assert made and not any(offer.free for _, offer in made)


def test_who_hears_its_syncer_offers_to_nobody_until_that_is_quiet() -> None:
    chain = served()
    bench = elector(chain)
    append(bench, chain)
    assert offers(bench, 2 * RULES.heartbeat_ms - 1) == []
    assert {to for to, _ in offers(bench, 2)} == {A}


def test_it_offers_first_to_whoever_publishes_that_it_serves_then_to_the_best() -> None:
    bench = elector(served())
    low, high = Rank(0, Term(1), Seq(1)), Rank(0, Term(1), Seq(9))
    bench.give(
        Sighted((Sighting(D, high, None), Sighting(E, low, Term(4)), Sighting(B, high, None), Sighting(C, low, None)))
    )
    bench.wait(OFFER_MS)
    made = [to for to, _ in offers(bench, OFFER_MS)]
    assert made[:2] == [E, D] and len(made) == CANDIDATES_MAX and B not in made


def test_a_vote_given_is_not_offered_to_others_while_that_attempt_may_last() -> None:
    chain = served()
    bench = elector(chain)
    ask(bench, chain, term=2, sender=A)
    free = {to: offer.free for to, offer in offers(bench, OFFER_MS)}
    assert free == {A: True, C: False}


def test_a_hint_who_serves_is_followed_next() -> None:
    bench = elector(served())
    bench.hear(C, Serving(term=Term(1), syncer=D), term=1)
    bench.wait(OFFER_MS)
    assert offers(bench, OFFER_MS)[0][0] == D


# ---- bytes for a candidate --------------------------------------------------------------------------------------


def test_a_candidate_gets_what_it_lacks_with_the_bytes_and_only_one_candidate_at_a_time() -> None:
    chain = served(num_commits=4)
    bench = elector(chain)
    known = (Head(Rank(0, Term(1), Seq(2)), chain.entries[2].digest),)
    [sent] = bench.give_need(A, known)
    assert (sent.to, sent.upload) == (A, True)
    assert sent.digests == tuple(entry.digest for entry in chain.entries[3:])
    assert bench.give_need(C, known) == []
    assert bench.give_need(A, known) == [sent]
    bench.wait(SUPPLY_MS)
    assert bench.give_need(C, known)[0].to == C


def test_who_needs_nothing_gets_nothing() -> None:
    chain = served()
    assert elector(chain).give_need(A, (chain.head,)) == []


@pytest.mark.parametrize("may_serve", [True, False])
def test_who_follows_a_syncer_names_it_to_those_that_offer(may_serve: bool) -> None:
    chain = served()
    bench = elector(chain, may_serve=may_serve)
    append(bench, chain)
    [(to, hint)] = ballots(list(bench.hear(C, offer_of(C), term=1)), Serving)
    assert (to, hint.syncer, hint.term) == (C, A, 1)
