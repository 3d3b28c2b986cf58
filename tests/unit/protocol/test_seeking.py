"""A peer that does not serve: whom it takes for the syncer, and when it looks for another."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import Digest, MonoMs, Seq, Term
from geo_diloco.protocol.effects import (
    CloseConnection,
    Effect,
    KeepEntry,
    Note,
    PersistVote,
    ReadyToLeave,
    RunFinished,
    SeekSyncer,
    TakeSample,
)
from geo_diloco.protocol.election.ballots import Ack, Append, Ask, Head, Need, Offer, Rank, Refuse
from geo_diloco.protocol.events import Connected, Disconnected, EntryArrived, SnapshotKept, StopRequested
from geo_diloco.protocol.messages import Durable, Hello
from geo_diloco.protocol.session import HELLO_MS
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import BEN, CYD, FOUNDER, FOUNDER_BOOT, FOUNDER_SEAT, ChainBuilder, seat
from tests.support.single import Learning, begun, hello, known, only, said
from tests.support.standing import Standing, seated_chain

NOT_SERVING = Refuse(reason="not_serving", detail="this peer is not syncer", term=Term(1))


def roster_of_three() -> ChainBuilder:
    chain = ChainBuilder.opened()
    chain.change_roster(FOUNDER_SEAT, seat(BEN), seat(CYD))
    return chain


def seeks(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, CloseConnection | SeekSyncer)]


def test_one_who_does_not_serve_refuses_a_hello() -> None:
    learning, _ = begun()
    (refuse,) = said(learning.hear(hello(), BEN), Refuse)
    assert refuse.reason == "not_serving"


def test_refused_by_one_who_does_not_serve_it_closes_and_looks_for_another() -> None:
    learning, _ = begun()
    effects = learning.hear(NOT_SERVING)
    assert seeks(effects) == [CloseConnection(FOUNDER, NOT_SERVING.detail), SeekSyncer(None, "")]
    assert learning.train(20) == [], "there is nobody to tell of it"


def test_an_elector_is_refused_and_keeps_the_connection_over_which_it_is_asked_for_its_vote() -> None:
    standing = Standing(seated_chain())
    standing.give(Connected(CYD, seeking=True))
    assert seeks(standing.hear(NOT_SERVING, CYD)) == [SeekSyncer(None, "")]
    assert seeks(standing.hear(NOT_SERVING, CYD)) == [], "it has turned to somebody else already"


def test_that_somebody_else_does_not_serve_changes_nothing() -> None:
    learning, _ = begun()
    assert seeks(learning.hear(NOT_SERVING, BEN)) == []


def test_a_hello_that_is_not_answered_counts_as_refused() -> None:
    learning = Learning(ChainBuilder.opened().snapshot())
    learning.give(Connected(FOUNDER, seeking=True))
    assert learning.core.deadline == HELLO_MS
    assert seeks(learning.pass_time(HELLO_MS - 1)) == []
    assert seeks(learning.pass_time(1)) == [CloseConnection(FOUNDER, "no answer to Hello"), SeekSyncer(None, "")]


def test_once_welcomed_it_waits_as_long_as_it_takes() -> None:
    learning, _ = begun()
    assert seeks(learning.pass_time(100 * HELLO_MS)) == []


def test_a_connection_for_ballots_is_not_taken_for_one_to_the_syncer() -> None:
    learning = Learning(ChainBuilder.opened().snapshot())
    assert said(learning.give(Connected(FOUNDER)), Hello) == []
    learning.give(Connected(FOUNDER, seeking=True))
    assert said(learning.give(Connected(BEN)), Hello) == []


# ---- a new term


def test_a_new_term_of_another_moves_it_there() -> None:
    chain = roster_of_three()
    learning, _ = begun(chain)
    effects = learning.give(chain.open(term=2, syncer=CYD))
    assert seeks(effects) == [CloseConnection(FOUNDER, "term 2 is another's"), SeekSyncer(CYD, "")]
    assert learning.train(20) == [], "it trains on, and tells nobody"
    assert [each.head_seq for each in said(learning.give(Connected(CYD, seeking=True)), Hello)] == [2]


def test_a_new_term_of_the_one_it_is_connected_to_is_greeted_again() -> None:
    learning, chain = begun()
    learning.give(Disconnected(FOUNDER, "restarted"))
    learning.give(Connected(FOUNDER, seeking=True))
    effects = learning.give(chain.open(term=2))
    assert seeks(effects) == [] and len(said(effects, Hello)) == 1


def test_a_new_term_is_news_also_while_it_looks_for_a_syncer() -> None:
    chain = roster_of_three()
    learning = Learning(chain.snapshot())
    assert seeks(learning.give(chain.open(term=2, syncer=CYD))) == [SeekSyncer(CYD, "")]


def test_an_open_without_the_votes_of_a_majority_moves_nobody() -> None:
    chain = roster_of_three()
    learning, _ = begun(chain)
    event = chain.open(term=2, syncer=CYD)
    stolen = replace(event.entry, votes=event.entry.votes[:1])  # type: ignore[union-attr,type-var]
    effects = learning.give(EntryArrived(stolen, Digest(fake_digest("stolen")), CYD))
    assert seeks(effects) == [] and "shows 1 of 2 votes" in only(effects, Note)[0].text


def test_an_older_term_moves_nobody_back() -> None:
    chain = roster_of_three()
    other = chain.fork(2)
    learning, _ = begun(chain)
    learning.give(chain.open(term=3, syncer=CYD))
    assert seeks(learning.give(other.open(term=2, syncer=BEN))) == []


def test_only_the_syncer_of_the_term_says_what_is_durable() -> None:
    chain = roster_of_three()
    learning, _ = begun(chain)
    opened = chain.open(term=2, syncer=CYD)
    learning.give(opened)
    durable = Durable(seq=opened.entry.header.seq, digest=opened.digest)
    learning.hear(durable, FOUNDER)
    learning.give(Connected(BEN, seeking=True))
    learning.hear(durable, BEN)
    assert learning.core.ledger.term == 1
    learning.give(Connected(CYD, seeking=True))
    learning.hear(durable, CYD)
    assert learning.core.ledger.term == 2


def test_what_is_not_durable_is_not_trained_on() -> None:
    """So nothing that a learner has adopted is ever taken back."""
    learning, chain = begun()
    commit = chain.commit(0)
    assert [type(effect) for effect in learning.give(commit)] == [KeepEntry]
    asked = replace(learning.asked(), version=1, base=commit.digest)
    assert only(learning.hear(asked) + learning.train(), TakeSample) == []
    known(learning, commit)
    assert learning.core.ledger.heads[0].version == 1


# ---- electors


def test_a_peer_without_a_seat_or_the_will_for_one_offers_nothing() -> None:
    learning, _ = begun()
    assert said(learning.pass_time(60_000), Offer) == []


def test_an_elector_says_nothing_before_its_vote_is_on_disk() -> None:
    standing = Standing(seated_chain())
    standing.slow = frozenset({PersistVote})
    standing.pass_time(60_000)
    standing.offer()
    effects = standing.pass_time(2_000)
    (persist,) = only(effects, PersistVote)
    assert persist.record.term == 2 and said(effects, Ask) == []


def test_entries_that_an_append_speaks_of_and_that_are_not_here_are_asked_for() -> None:
    chain = seated_chain()
    standing = Standing(chain)
    commit = chain.commit(0)
    head = Head(Rank(0, Term(1), commit.entry.header.seq), commit.digest)
    effects = standing.tell(Append(head=head, durable_seq=Seq(2), sent_at=MonoMs(0)), FOUNDER, boot=FOUNDER_BOOT)
    assert said(effects, Need, FOUNDER) != []
    assert [ack.acked.rank.seq for ack in said(effects, Ack, FOUNDER)] == [2], "only what is on its disk"


def test_a_snapshot_on_disk_stands_for_all_that_came_before_it() -> None:
    learning, chain = begun()
    learning.slow = frozenset({KeepEntry})
    before = learning.core.election.best.rank.seq
    commit = chain.commit(1)
    learning.give(commit)
    learning.durable(commit)
    assert learning.core.ledger.seq == commit.entry.header.seq and learning.core.election.best.rank.seq == before
    learning.give(SnapshotKept(commit.entry.header.seq))
    assert learning.core.election.best.rank.seq == commit.entry.header.seq


# ---- the end


def test_it_leaves_while_it_looks_for_a_syncer() -> None:
    learning = Learning(ChainBuilder.opened().snapshot())
    assert only(learning.give(StopRequested("SIGTERM")), ReadyToLeave) == [ReadyToLeave()]
    assert not learning.core.seeks


def test_a_finished_run_is_told_when_its_end_is_durable() -> None:
    learning, chain = begun()
    finished = chain.finished()
    assert only(learning.give(finished), RunFinished) == []
    assert only(learning.durable(finished), RunFinished) == [RunFinished("enough")]


def test_what_is_usual_after_joining_and_after_an_election_is_no_news_for_people() -> None:
    for reason in ("term", "branch"):
        learning, _ = begun()
        effects = learning.hear(Refuse(reason=reason, detail="another one", term=Term(2)))
        assert [note.level for note in only(effects, Note)] == ["debug"], reason
    assert [note.level for note in only(begun()[0].hear(Refuse(reason="hello", detail="", term=Term(1))), Note)] == [
        "warning"
    ]
