"""A peer that is elected: what its service waits for, and what ends it."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import Digest, FragmentId, MonoMs, StopSpec, SyncSpec, Version
from geo_diloco.protocol.effects import (
    Announce,
    ApplyUpdate,
    Effect,
    FetchFragment,
    ForgetBlob,
    Merge,
    Note,
    PersistVote,
    Seal,
    SeekSyncer,
    Send,
)
from geo_diloco.protocol.election.ballots import Ack, Append, Refuse
from geo_diloco.protocol.events import Applied, Disconnected, EntryArrived, FoundRun, FragmentReplaced, VotePersisted
from geo_diloco.protocol.messages import Commit, Contribution, Decision, Durable, Open, RosterChange, RoundOpen, Welcome
from geo_diloco.sim.fakes import LAYOUT, fake_digest
from tests.support.chains import ANN, BEN, CYD, FOUNDER, SYNC, ChainBuilder, contribution, seat
from tests.support.single import Syncing, hello, merged, only, said
from tests.support.standing import LEASE_MS, PROMISE_MS, Standing, sealed, seated_chain

QUORUM_2 = replace(SYNC, quorum=2)
"""With one learner: what it hands in is held, and not merged."""


def notes(effects: list[Effect]) -> str:
    return "\n".join(note.text for note in only(effects, Note))


def serving(sync: SyncSpec = SYNC) -> Standing:
    standing = Standing(seated_chain(), sync)
    standing.elected()
    assert standing.core.serves
    return standing


def serving_on() -> tuple[ChainBuilder, Standing]:
    """And the chain up to its `open`, which is durable."""
    chain = seated_chain()
    standing = Standing(chain)
    (seal,) = only(standing.elected(), Seal)
    chain.take(EntryArrived(seal.entry, sealed(seal).digest, BEN))
    return chain, standing


def answer(standing: Standing) -> Contribution:
    """ANN's work, for the first round of fragment 1."""
    standing.join(ANN)
    asked = standing.asked()
    return contribution(ANN, base=asked.base, fragment=asked.fragment, base_version=asked.version)


def commits(effects: list[Effect]) -> list[Seal]:
    return [seal for seal in only(effects, Seal) if isinstance(seal.entry, Commit)]


# ---- founding


def test_a_founder_seals_nothing_before_its_vote_for_itself_is_on_disk() -> None:
    core = Syncing().core
    theta = tuple(fake_digest("theta", p) for p in range(2))
    founding = core.handle(FoundRun(theta, theta, (100, 300), LAYOUT), MonoMs(0))
    (persist,) = founding
    assert isinstance(persist, PersistVote)
    assert persist.record.voted_for is not None and persist.record.voted_for.peer == FOUNDER
    assert len(only(core.handle(VotePersisted(persist.number), MonoMs(0)), Seal)) == 1


def test_a_founder_alone_has_everything_durable_at_once() -> None:
    syncing = Syncing.founding()
    assert (syncing.core.serves, syncing.core.ledger.seq) == (True, 1)


# ---- elected


def test_an_elected_peer_opens_its_term_with_the_votes_as_proof() -> None:
    standing = Standing(seated_chain())
    standing.ask()
    (seal,) = only(standing.vote(), Seal)
    entry = seal.entry
    assert isinstance(entry, Open)
    assert (entry.header.seq, entry.header.term, entry.syncer, entry.address) == (3, 2, BEN, "ben:1")
    assert {(vote.elector, vote.evidence) for vote in entry.votes} == {(BEN, ""), (CYD, "signed")}


def test_it_serves_nobody_before_its_open_is_durable() -> None:
    standing = Standing(seated_chain())
    standing.ask()
    standing.vote()
    assert not standing.core.serves and standing.core.ledger.seq == 2
    assert only(standing.hear(hello(), ANN), Send) == []
    effects = standing.ack()
    assert standing.core.serves and standing.core.ledger.seq == 3
    assert len(said(effects, Welcome, ANN)) == 1, "the Hello of before waited for it"
    assert said(standing.hear(hello(), CYD), Welcome) != []


def test_an_early_hello_of_one_who_is_gone_is_not_answered() -> None:
    standing = Standing(seated_chain())
    standing.ask()
    standing.vote()
    standing.hear(hello(), ANN)
    standing.give(Disconnected(ANN, "connection lost"))
    assert said(standing.ack(), Welcome) == []


def test_who_said_hello_to_a_term_that_never_opens_is_sent_away() -> None:
    standing = Standing(seated_chain())
    standing.ask()
    standing.vote()
    standing.hear(hello(), ANN)
    effects = standing.pass_time(3 * LEASE_MS)
    assert not standing.core.serves and standing.core.election.role != "syncer"
    assert [refuse.reason for refuse in said(effects, Refuse, ANN)] == ["not_serving"]


def test_its_first_round_is_open_as_soon_as_a_learner_is_here() -> None:
    """Learners have trained on while nobody served."""
    chain = seated_chain()
    chain.commit(1)
    standing = Standing(chain)
    standing.elected()
    assert [asked.fragment for asked in said(standing.join(ANN), RoundOpen)] == [0]


def test_an_ack_of_another_head_makes_nothing_durable() -> None:
    standing = Standing(seated_chain())
    standing.ask()
    standing.vote()
    standing.ack(head=replace(standing.head, digest=Digest(fake_digest("fork"))))
    assert not standing.core.serves


def test_service_begins_only_when_the_outer_state_holds_all_that_came_before() -> None:
    """A merge on top of anything else would be of another Theta than everybody's."""
    chain = seated_chain()
    chain.commit(0)
    chain.commit(1)
    standing = Standing(chain)
    standing.slow = frozenset({ApplyUpdate})
    applies = only(standing.elected(), ApplyUpdate)
    assert [(apply.fragment, apply.version) for apply in applies] == [(0, 1), (1, 1)]
    assert standing.core.ledger.seq == 5 and not standing.core.serves
    assert only(standing.hear(hello(), ANN), Send) == []
    for apply in applies:
        assert not standing.core.serves
        standing.give(Applied(apply.fragment, apply.version, apply.state_digest))
    assert standing.core.serves


def test_what_was_merged_by_another_syncer_is_known_to_the_next() -> None:
    chain = seated_chain()
    chain.commit(1)
    standing = Standing(chain)
    standing.elected()
    standing.join(ANN)
    assert standing.asked().version == 1


def test_its_commits_are_told_to_be_durable_when_a_majority_has_them() -> None:
    standing = serving()
    effects = standing.hand_in(answer(standing))
    (seal,) = commits(effects)
    seq = seal.entry.header.seq
    assert Announce(seq) in effects and said(effects, Append, CYD) != []
    assert said(effects, Durable) == [] and standing.core.ledger.seq < seq
    effects = standing.ack()
    assert [durable.seq for durable in said(effects, Durable, ANN)] == [seq]
    assert standing.core.ledger.heads[1].version == 1


def test_while_its_electors_are_behind_it_commits_no_more_than_a_few() -> None:
    standing = serving(replace(SYNC, num_fragments=1))
    standing.join(ANN)
    standing.asked()
    asked = {each.fragment: each for each in said(standing.hear(hello(), ANN), RoundOpen)}
    effects: list[Effect] = []
    for fragment in (0, 1):
        effects += standing.hand_in(contribution(ANN, base=asked[FragmentId(fragment)].base, fragment=fragment))
    assert len(only(effects, Merge)) == 2 and len(commits(effects)) == 1
    waiting = [each.reason for each in standing.core.status(MonoMs(standing.now)).waiting]
    assert "electors behind: 1 entries are not durable" in waiting
    assert len(commits(standing.ack())) == 1


def stand_by(syncing: Syncing, ms: int) -> list[Effect]:
    """BEN and CYD ack all that the founder has, after a while."""
    effects = syncing.pass_time(ms)
    election = syncing.core.election
    for peer in (BEN, CYD):
        its = seat(peer)
        ack = Ack(acked=election.head, sent_at=MonoMs(syncing.now), enrolment=its.enrolment, host=its.host, address="")
        effects += syncing.hear(ack, peer, term=election.record.term)
    return effects + syncing.pass_time(1_000)


def test_a_roster_grows_by_those_who_keep_the_chain() -> None:
    syncing = Syncing.founding()
    effects = stand_by(syncing, 1) + stand_by(syncing, 7_000)
    (entry,) = [seal.entry for seal in only(effects, Seal)]
    assert isinstance(entry, RosterChange) and {each.peer for each in entry.roster} == {FOUNDER, BEN, CYD}


def test_no_roster_is_changed_after_the_end() -> None:
    syncing = Syncing.founding(stop=StopSpec(commits=1))
    syncing.join(ANN)
    asked = syncing.asked()
    syncing.merged(only(syncing.hand_in(contribution(ANN, base=asked.base, fragment=1)), Merge)[0])
    assert syncing.core.ledger.finished is not None
    assert only(stand_by(syncing, 1) + stand_by(syncing, 7_000) + stand_by(syncing, 7_000), Seal) == []


def test_a_roster_whose_turn_comes_when_it_may_not_be_changed_is_drawn_up_again_and_sealed_once() -> None:
    """It stands behind a commit that fills the tail. Kept, and asked for again, it would be sealed twice; the second
    time it would change nothing."""
    standing = serving(replace(SYNC, num_fragments=1))
    silent_ms = 59_000
    for _ in range(silent_ms // 1_000):
        standing.pass_time(1_000)
        standing.ack()
        standing.ack(ANN, address="")
    claim = answer(standing)
    standing.slow = frozenset({Seal})
    (late,) = commits(standing.hand_in(claim))
    for _ in range(3):
        assert only(standing.pass_time(1_000), Seal) == []
    assert only(standing.give(sealed(late)), Seal) == []
    standing.slow = frozenset()
    standing.now += 1_000
    effects = standing.ack() + standing.ack(ANN, address="")
    for _ in range(4):
        effects += standing.pass_time(1_000) + standing.ack() + standing.ack(ANN, address="")
    rosters = [{each.peer for each in seal.entry.roster} for seal in only(effects, Seal) if is_roster(seal)]  # type: ignore[union-attr]
    assert rosters == [{FOUNDER, BEN, CYD, ANN}, {BEN, CYD, ANN}]


def is_roster(seal: Seal) -> bool:
    return isinstance(seal.entry, RosterChange)


# ---- what ends it


def test_without_a_lease_nothing_is_committed_and_it_is_said_why() -> None:
    standing = serving()
    standing.slow = frozenset({Merge})
    (merge,) = only(standing.hand_in(answer(standing)), Merge)
    standing.now += LEASE_MS
    assert commits(standing.give(merged(merge))) == []
    waiting = [each.reason for each in standing.core.status(MonoMs(standing.now)).waiting]
    assert any(reason.startswith("no lease") for reason in waiting)
    assert len(commits(standing.ack())) == 1, "the lease is back"


def test_a_syncer_that_nobody_answers_lets_go_of_everything_and_looks_for_another() -> None:
    standing = serving(QUORUM_2)
    claim = answer(standing)
    standing.hand_in(claim)
    effects = standing.pass_time(2 * LEASE_MS)
    assert not standing.core.serves and standing.core.seeks
    assert [refuse.reason for refuse in said(effects, Refuse, ANN)] == ["not_serving"]
    assert ForgetBlob(claim.blob) in effects and SeekSyncer(None, "") in effects
    assert said(standing.hear(claim, ANN), Decision) == []


def test_a_higher_term_of_another_ends_the_service() -> None:
    chain, standing = serving_on()
    standing.join(ANN)
    effects = standing.give(chain.open(term=5, syncer=CYD))
    assert not standing.core.serves
    assert [refuse.reason for refuse in said(effects, Refuse, ANN)] == ["not_serving"]
    assert SeekSyncer(CYD, "") in effects


def test_a_seal_that_comes_after_its_term_is_told_to_nobody() -> None:
    standing = serving()
    standing.slow = frozenset({Seal})
    (seal,) = commits(standing.hand_in(answer(standing)))
    standing.pass_time(2 * LEASE_MS)
    before = standing.head
    assert standing.core.state_ledger() is None, "the outer state may hold what is not sealed yet"
    effects = standing.give(sealed(seal))
    assert "came too late" in notes(effects)
    assert only(effects, Announce) == [] and standing.head == before
    assert standing.core.state_ledger() is None, "it holds a version that is not on the chain"


def test_the_next_term_is_opened_only_after_the_last_seal_of_the_one_before() -> None:
    """The shell seals one at a time: another answer would be taken for this one's."""
    standing = serving()
    standing.slow = frozenset({Seal})
    (late,) = commits(standing.hand_in(answer(standing)))
    standing.pass_time(2 * LEASE_MS)
    standing.offer()
    standing.pass_time(2_000)
    assert only(standing.vote(), Seal) == []
    (seal,) = only(standing.give(sealed(late)), Seal)
    assert isinstance(seal.entry, Open) and seal.entry.header.term == 3


def test_what_it_merged_and_nobody_kept_is_replaced_before_it_serves_again() -> None:
    """It went ahead in its first term; the chain went on without that. Another merge on top would be of a Theta that
    nobody else has."""
    chain, standing = serving_on()
    standing.hand_in(answer(standing))
    standing.pass_time(2 * LEASE_MS)
    standing.give(chain.open(term=3, syncer=CYD))
    standing.pass_time(PROMISE_MS)
    standing.offer()
    standing.pass_time(2_000)
    effects = standing.vote() + standing.ack()
    assert only(effects, FetchFragment) == [FetchFragment(FragmentId(1), Version(0))]
    assert not standing.core.serves and standing.core.state_ledger() is None
    standing.give(FragmentReplaced(FragmentId(1), Version(0), fake_digest("theta", 1, 0)))
    assert standing.core.serves and standing.core.state_ledger() is not None


def test_what_it_merged_and_others_kept_needs_nothing_before_it_serves_again() -> None:
    standing = serving()
    standing.hand_in(answer(standing))
    standing.pass_time(2 * LEASE_MS)
    standing.offer()
    standing.pass_time(2_000)
    effects = standing.vote() + standing.ack()
    assert only(effects, FetchFragment) == [] and only(effects, ApplyUpdate) == []
    assert standing.core.serves and standing.core.ledger.heads[1].version == 1
