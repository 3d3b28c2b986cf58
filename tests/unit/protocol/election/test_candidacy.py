"""When a candidate asks, on what, and when an attempt is over (rules 10 to 14)."""

from __future__ import annotations

from geo_diloco.manifest import MonoMs, PeerId, Seq, Term
from geo_diloco.protocol.effects import Note
from geo_diloco.protocol.election.ballots import Append, Ask, Head, Need, Rank, Refuse, Serving, Vote
from geo_diloco.protocol.election.candidacy import (
    ASK_AGAIN_MS,
    ASK_MS,
    BACKOFF_MAX,
    DEFER_MS,
    DELAY_MS,
    OFFER_FRESH_MS,
    OFFERS_MAX,
)
from geo_diloco.protocol.election.polls import EntriesArrived, SealOpen
from geo_diloco.protocol.events import EntryLost, Sighted, Sighting
from tests.support.election_parts import RULES, A, B, Bench, C, Chain, D, E, ballots, boot, offer_of, seat

PROMISE_MS = RULES.promise_ms
BOUND_MS = 30


def served(roster: tuple[PeerId, ...] = (A, B, C), *, num_commits: int = 2) -> Chain:
    chain = Chain(tuple(map(seat, roster)))
    chain.open(A, 1)
    chain.commits(num_commits)
    return chain


def candidate(chain: Chain, *, may_serve: bool = True) -> Bench:
    """B, free to ask, once somebody offers."""
    bench = Bench(B, chain=chain, may_serve=may_serve)
    bench.wait(PROMISE_MS)
    return bench


def offer(bench: Bench, sender: PeerId, *, held: Rank | None = None, term: int = 1, free: bool = True) -> list[object]:
    return list(bench.hear(sender, offer_of(sender, held=held, free=free), term=term))


def asks(effects: list[object]) -> list[PeerId]:
    return [to for to, _ in ballots(effects, Ask)]


def asking(chain: Chain) -> Bench:
    """B, in the middle of an attempt."""
    bench = candidate(chain)
    for elector in chain.roster:
        offer(bench, elector.peer)
    bench.wait(DELAY_MS)
    assert bench.role == "candidate"
    return bench


def vote_of(bench: Bench, sender: PeerId, on: Head, *, term: int = 2, **lies: object) -> list[SealOpen]:
    facts: dict[str, object] = {"candidate": boot(B), "head": on.digest, "enrolment": seat(sender).enrolment}
    before = len(bench.effects)
    bench.hear(sender, Vote(**{**facts, **lies}), term=term)  # type: ignore[arg-type]
    return [effect for effect in bench.effects[before:] if isinstance(effect, SealOpen)]


# ---- whether to ask ---------------------------------------------------------------------------------------------


def test_it_asks_when_fresh_offers_of_a_majority_hold_no_more_than_it() -> None:
    bench = candidate(served())
    bench.wait(2 * DELAY_MS)
    assert bench.machine.status(bench.now).candidacy == "1 of the 2 electors needed are here"
    offer(bench, C)
    assert asks(bench.wait(DELAY_MS)) == [A, C]
    assert bench.machine.record.term == 2 and bench.machine.record.voted_for == boot(B)


def test_offers_grow_old() -> None:
    bench = candidate(served((A, B, C, D)))
    offer(bench, C)
    bench.wait(OFFER_FRESH_MS)
    offer(bench, D)
    assert asks(bench.wait(2 * DELAY_MS)) == []
    assert bench.machine.status(bench.now).candidacy == "2 of the 3 electors needed are here"


def test_offers_of_those_off_the_roster_or_with_another_disk_or_bound_count_nothing() -> None:
    bench = candidate(served())
    offer(bench, D)
    bench.hear(C, offer_of(C, enrolment="new disk"), term=1)
    bench.hear(A, offer_of(A, free=False), term=1)
    assert asks(bench.wait(2 * DELAY_MS)) == []


def test_it_catches_up_before_it_asks() -> None:
    chain = served()
    bench = candidate(chain)
    longer = chain.fork()
    longer.commits(1)
    said = offer(bench, C, held=longer.head.rank)
    assert [to for to, _ in ballots(said, Need)] == [C]
    assert asks(bench.wait(DELAY_MS)) == []
    assert "catching up" in bench.machine.status(bench.now).candidacy
    bench.take(longer, sender=C, stored=False)
    assert asks(bench.wait(DELAY_MS)) == [], "the records are not enough"
    bench.take(longer, sender=C)
    offer(bench, C, held=longer.head.rank)
    assert asks(bench.wait(DELAY_MS)) == [A, C]


def test_who_lost_bytes_it_once_held_does_not_ask() -> None:
    chain = served()
    bench = candidate(chain)
    bench.give(EntryLost(chain.entries[-1].digest))
    offer(bench, C)
    assert asks(bench.wait(DELAY_MS)) == []
    assert bench.machine.status(bench.now).candidacy == "bytes of entry 3 of term 1 are lost here"


def test_who_is_not_admitted_as_syncer_never_asks() -> None:
    bench = candidate(served(), may_serve=False)
    assert offer(bench, C) == []
    assert asks(bench.wait(4 * DELAY_MS)) == []
    assert bench.machine.status(bench.now).candidacy == "not admitted as syncer"


def test_who_is_bound_does_not_ask_and_names_its_syncer() -> None:
    chain = served()
    bench = candidate(chain)
    bench.hear(A, Append(head=chain.head, durable_seq=Seq(1), sent_at=MonoMs(1)), term=1)
    assert ballots(offer(bench, C), Serving)
    assert asks(bench.wait(PROMISE_MS - 1)) == []


def test_a_new_term_is_above_every_term_heard_of() -> None:
    bench = candidate(served())
    offer(bench, C, term=7)
    bench.wait(DELAY_MS)
    assert bench.machine.record.term == 8


def test_it_waits_longer_while_a_better_candidate_is_known_alive() -> None:
    chain = served()
    bench = candidate(chain)
    better = Rank(0, Term(1), Seq(99))
    bench.give(Sighted((Sighting(C, better, None),)))
    offer(bench, C)
    assert asks(bench.wait(DEFER_MS)) == []
    offer(bench, C)
    assert asks(bench.wait(DELAY_MS)) == [A, C]


def test_its_own_vote_obeys_the_same_rule_and_counts_only_with_a_seat() -> None:
    chain = served((A, C, D))
    bench = candidate(chain)
    offer(bench, C)
    offer(bench, D)
    bench.wait(DELAY_MS)
    assert bench.role == "candidate"
    assert vote_of(bench, C, chain.head) == []
    [seal] = vote_of(bench, D, chain.head)
    assert [vote.elector for vote in seal.votes] == [C, D]


# ---- the attempt ------------------------------------------------------------------------------------------------


def test_votes_of_a_majority_elect_and_are_the_proof() -> None:
    chain = served()
    bench = asking(chain)
    [seal] = vote_of(bench, C, chain.head)
    assert (seal.term, seal.head, [vote.elector for vote in seal.votes]) == (2, chain.head, [B, C])
    assert bench.role == "syncer"
    assert vote_of(bench, A, chain.head) == [], "a later vote changes nothing"


def test_votes_for_another_head_start_or_disk_do_not_count() -> None:
    chain = served()
    bench = asking(chain)
    assert vote_of(bench, C, chain.head, head=chain.entries[0].digest) == []
    assert vote_of(bench, C, chain.head, candidate=boot(B, 2)) == []
    assert vote_of(bench, C, chain.head, enrolment="new disk") == []
    assert vote_of(bench, D, chain.head) == []


def test_late_votes_of_an_attempt_that_is_over_do_not_count() -> None:
    chain = served()
    bench = asking(chain)
    bench.wait(ASK_MS)
    assert bench.role == "peer"
    assert vote_of(bench, C, chain.head) == []


def test_an_attempt_asks_again_those_that_have_not_voted_and_ends_by_itself() -> None:
    chain = served((A, B, C, D, E))
    bench = asking(chain)
    began_at = bench.now
    assert vote_of(bench, C, chain.head) == []
    assert asks(bench.wait(ASK_AGAIN_MS)) == [A, D, E]
    bench.wait(ASK_MS)
    assert bench.role == "peer" and bench.machine.record.term == 2
    notes = [effect.text for effect in bench.effects if isinstance(effect, Note)]
    assert notes[-1] == "term 2 not won: 2 of 3 votes in 3 s" and bench.now > began_at + ASK_MS


def test_the_chain_does_not_change_while_it_asks() -> None:
    chain = served()
    bench = asking(chain)
    longer = chain.fork()
    longer.commits(1)
    bench.take(longer, sender=C)
    assert bench.role == "peer"
    assert vote_of(bench, C, chain.head) == []


def test_records_without_their_bytes_do_not_change_what_it_asks_on() -> None:
    chain = served()
    bench = asking(chain)
    longer = chain.fork()
    longer.commits(1)
    bench.take(longer, sender=C, stored=False)
    [seal] = vote_of(bench, C, chain.head)
    assert seal.head == chain.head


def test_a_higher_term_ends_the_attempt() -> None:
    bench = asking(served())
    bench.hear(C, Refuse(reason="term", detail="", term=Term(9)), term=9)
    assert (bench.role, bench.machine.record.term, bench.machine.record.voted_for) == ("peer", 9, None)


def test_a_term_opened_by_another_ends_the_attempt() -> None:
    chain = served()
    bench = asking(chain)
    rival = chain.fork()
    rival.open(C, 2, voters=(seat(A), seat(C)))
    bench.give(EntriesArrived(C, rival.facts()))
    assert bench.role == "peer" and bench.machine.record.term == 2


def test_a_vote_for_somebody_else_ends_the_attempt() -> None:
    chain = served()
    bench = asking(chain)
    assert ballots(list(bench.hear(C, Ask(head=chain.head), term=3)), Vote)
    assert bench.role == "peer"


def test_each_failed_attempt_waits_longer_up_to_a_bound() -> None:
    chain = served()
    bench = candidate(chain)
    for doubled in (2, 4, BACKOFF_MAX, BACKOFF_MAX):
        waited = 0
        while bench.role != "candidate":
            offer(bench, C, term=bench.machine.record.term)
            bench.wait(BOUND_MS)
            waited += BOUND_MS
        assert waited <= DELAY_MS * doubled // 1 + BOUND_MS
        bench.wait(ASK_MS)
        assert bench.machine._candidacy._backoff == doubled


def test_an_elected_candidate_forgets_how_often_it_failed() -> None:
    chain = served()
    bench = asking(chain)
    bench.wait(ASK_MS)
    offer(bench, C, term=2)
    while bench.role != "candidate":
        offer(bench, C, term=2)
        bench.wait(100)
    vote_of(bench, C, chain.head, term=int(bench.machine.record.term))
    assert bench.role == "syncer" and bench.machine._candidacy._backoff == 1


def test_an_elector_that_offers_while_it_asks_is_asked() -> None:
    chain = served((A, B, C, D, E))
    bench = candidate(chain)
    for sender in (C, D):
        offer(bench, sender)
    bench.wait(DELAY_MS)
    assert asks(offer(bench, A, term=2)) == [A]


def test_offers_of_strangers_are_remembered_up_to_a_bound_and_push_out_no_elector() -> None:
    bench = candidate(served())
    offer(bench, C)
    for number in range(2 * OFFERS_MAX):
        stranger = PeerId(f"{number:064d}")
        bench.hear(stranger, offer_of(stranger), term=1)
    assert len(bench.machine._candidacy._offers) == OFFERS_MAX
    assert asks(bench.wait(DELAY_MS)) == [A, C]


def test_a_stranger_that_pretends_to_serve_does_not_keep_it_from_asking() -> None:
    chain = served()
    bench = candidate(chain)
    offer(bench, C)
    for _ in range(10):
        bench.hear(D, Append(head=chain.head, durable_seq=Seq(1), sent_at=MonoMs(1)), term=1)
        bench.wait(DELAY_MS // 10)
    assert bench.role == "candidate"
