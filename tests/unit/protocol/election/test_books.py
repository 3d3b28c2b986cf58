"""Nothing leaves the process before what it depends on is on disk, and needs are not told without end."""

from __future__ import annotations

from geo_diloco.manifest import MonoMs, Seq
from geo_diloco.protocol.effects import PersistVote
from geo_diloco.protocol.election.ballots import NO_HEAD, Ack, Append, Ask, Need, Vote
from geo_diloco.protocol.election.books import NEED_MS, NEEDS_MAX, Books, Deadline, ElectionRules, Jitter
from geo_diloco.protocol.election.polls import EntriesArrived, EntrySealed, FoundingAsked, SealOpen, ServiceEnded, Tell
from geo_diloco.protocol.events import EntryStored, VotePersisted
from tests.support.election_parts import A, B, Bench, Chain, ballots, boot, seat


def waiting_elector() -> Bench:
    """An elector that is free to vote, and whose disk answers only when told to."""
    chain = Chain()
    chain.open(A, 1)
    bench = Bench(B, chain=chain)
    bench.wait(20_000)
    bench.disk_answers = False
    return bench


def ask(bench: Bench, term: int) -> list[object]:
    return list(bench.hear(A, Ask(head=bench.machine.best), term=term))


def numbers(bench: Bench) -> list[int]:
    return [effect.number for effect in bench.effects if isinstance(effect, PersistVote)]


def test_a_vote_leaves_only_when_it_is_on_disk() -> None:
    bench = waiting_elector()
    assert ballots(ask(bench, 9), Vote) == []
    effects = bench.give(VotePersisted(numbers(bench)[-1]))
    assert [to for to, _ in ballots(effects, Vote)] == [A]


def test_an_older_write_does_not_free_what_depends_on_a_newer_one() -> None:
    bench = waiting_elector()
    ask(bench, 9)
    first = numbers(bench)[-1]
    bench.wait(1)
    ask(bench, 10)
    effects = bench.give(VotePersisted(first))
    assert [tell.term for tell in effects if isinstance(tell, Tell) and isinstance(tell.ballot, Vote)] == [9]


def test_what_leaves_keeps_its_order() -> None:
    bench = waiting_elector()
    ask(bench, 9)
    bench.hear(A, Need(points=()), term=9)
    held_back = bench.give(VotePersisted(numbers(bench)[-1]))
    kinds = [type(getattr(effect, "ballot", effect)).__name__ for effect in held_back]
    assert kinds.index("Vote") < kinds.index("SendEntries")


def test_an_ack_that_waited_while_the_term_went_on_is_dropped() -> None:
    chain = Chain()
    chain.open(A, 1)
    bench = Bench(B, chain=chain)
    bench.hear(A, Append(head=chain.head, durable_seq=Seq(1), sent_at=MonoMs(1)), term=1)
    chain.commits(1)
    bench.take(chain, stored=False)
    bench.disk_answers = False
    bench.give(EntryStored(chain.entries[-1].digest))
    acked = numbers(bench)[-1]
    bench.hear(A, Ask(head=chain.head), term=2)
    assert bench.machine.record.term == 2
    assert ballots(bench.give(VotePersisted(acked)), Ack) == []


def test_nothing_is_sealed_for_a_service_that_ended_before_its_vote_was_on_disk() -> None:
    bench = Bench(A)
    bench.disk_answers = False
    bench.give(FoundingAsked())
    bench.give(VotePersisted(numbers(bench)[-1]))
    chain = Chain((seat(A),))
    bench.give(EntrySealed(chain.entries[0]))
    longer = chain.fork()
    longer.open(A, 2, start=2)
    effects = bench.give(EntriesArrived(B, longer.facts()))
    assert any(isinstance(effect, ServiceEnded) for effect in effects)
    effects = bench.give(VotePersisted(numbers(bench)[-1]))
    assert not any(isinstance(effect, SealOpen) for effect in effects)


def test_the_same_need_is_told_to_the_same_peer_once_in_a_while() -> None:
    bench = Bench(B)
    books = bench.machine._books
    one, other = (NO_HEAD,), ()
    books.need(A, one, MonoMs(0))
    books.need(A, one, MonoMs(NEED_MS - 1))
    assert len(ballots(books.flush(), Need)) == 1
    books.need(A, other, MonoMs(NEED_MS - 1))
    books.need(B, one, MonoMs(NEED_MS - 1))
    assert len(ballots(books.flush(), Need)) == 2
    books.need(A, other, MonoMs(2 * NEED_MS))
    assert len(ballots(books.flush(), Need)) == 1


def test_who_was_told_a_need_is_not_remembered_without_end() -> None:
    books: Books = Bench(B).machine._books
    for number in range(NEEDS_MAX + 10):
        books.need(boot(f"{number:064d}").peer, (), MonoMs(0))
    assert len(books._needs) == NEEDS_MAX


def test_a_promise_outlasts_a_lease_at_any_clock_rate_that_is_allowed() -> None:
    for lease_ms in (1, 3, 15_000):
        rules = ElectionRules(owner=A, lease_ms=lease_ms)
        shortest_promise_s, longest_lease_s = rules.promise_ms / 1.0099, lease_ms / 0.9901
        assert shortest_promise_s >= longest_lease_s - 1e-6


def test_jitter_depends_on_its_seed_alone_and_stays_below_its_bound() -> None:
    one, same, other = Jitter(7), Jitter(7), Jitter(8)
    drawn = [one.below(1_000) for _ in range(200)]
    assert drawn == [same.below(1_000) for _ in range(200)] != [other.below(1_000) for _ in range(200)]
    assert 0 <= min(drawn) < 100 and 900 < max(drawn) < 1_000


def test_a_deadline_is_the_earliest_of_its_times() -> None:
    assert Deadline().or_by(None).at is None
    assert Deadline().or_by(5).or_by(3).or_by(None).or_by(4).at == 3
