"""The syncer's side: what each message does twice, late, out of order, from a liar, never."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import WIRE_VERSION, BootId, BranchId, Digest, PeerId, StopSpec, Term
from geo_diloco.protocol.effects import (
    AcceptBlob,
    Announce,
    CheckContribution,
    CloseConnection,
    Evaluate,
    ForgetBlob,
    Merge,
    ReadyToLeave,
    RunFinished,
    Seal,
)
from geo_diloco.protocol.election.ballots import Refuse
from geo_diloco.protocol.events import (
    BlobArrived,
    ContributionChecked,
    Disconnected,
    Evaluated,
    MergeFailed,
    StopRequested,
)
from geo_diloco.protocol.membership import AWAY_MS
from geo_diloco.protocol.messages import (
    BlobRef,
    Commit,
    Contribution,
    Decision,
    Finished,
    Found,
    Goodbye,
    Open,
    RoundOpen,
    Sampled,
    Welcome,
)
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ANN, BEN, CYD, SYNC, ChainBuilder, contribution
from tests.support.single import Syncing, hello, only, progress, said, vote_record

QUORUM_2 = replace(SYNC, quorum=2)


def opened(syncing: Syncing, fragment: int = 1) -> RoundOpen:
    """The first question for a fragment; fragment 1 of two is due after half an interval."""
    for _ in range(100):
        asked = [each for each in said(syncing.pass_time(100), RoundOpen) if each.fragment == fragment]
        syncing.hear(progress(syncing.now // 100))
        if asked:
            return asked[0]
    raise AssertionError("no round was opened")


def answer(asked: RoundOpen, peer: str = ANN, **changes: object) -> Contribution:
    plain = contribution(peer, base=asked.base, fragment=asked.fragment, base_version=asked.version)  # type: ignore[arg-type]
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_founder_seals_found_and_open_and_announces_both() -> None:
    syncing = Syncing.founding()
    assert [type(seal.entry) for seal in only(syncing.effects, Seal)] == [Found, Open]
    assert [announce.seq for announce in only(syncing.effects, Announce)] == [0, 1]
    assert syncing.core.ledger.term == 1


def test_a_round_opens_when_the_median_learner_has_done_its_steps() -> None:
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing, fragment=1)
    assert syncing.now == pytest.approx(400, abs=100)
    assert (asked.version, asked.attempt) == (0, 1)


def test_nothing_opens_without_live_learners() -> None:
    syncing = Syncing.founding()
    syncing.hear(hello(trains=False))
    assert said(syncing.pass_time(10**6), RoundOpen) == []


def test_a_contribution_goes_from_announcement_to_commit() -> None:
    syncing = Syncing.founding()
    syncing.join()
    claim = answer(opened(syncing))
    assert only(syncing.hear(claim), AcceptBlob) == [AcceptBlob(ANN, claim.blob)]
    assert only(syncing.give(BlobArrived(claim.blob)), CheckContribution) == [CheckContribution(claim.id, claim.blob)]
    effects = syncing.give(ContributionChecked(claim.id, True, "", 1.0))
    assert [decision.verdict for decision in said(effects, Decision)] == ["held"]
    (merge,) = only(effects, Merge)
    assert [each.peer for each in merge.inputs] == [ANN] and merge.inputs[0].weight == 100 * 100 / 8
    effects = syncing.merged(merge)
    (seal,) = only(effects, Seal)
    assert isinstance(seal.entry, Commit) and seal.entry.close_reason == "all 1 who could deliver have"
    assert only(effects, ForgetBlob) == [ForgetBlob(claim.blob)]


def test_every_event_of_a_contribution_may_come_twice() -> None:
    syncing = Syncing.founding(QUORUM_2)
    syncing.join()
    claim = answer(opened(syncing))
    assert syncing.hear(claim) == syncing.hear(claim) == [AcceptBlob(ANN, claim.blob)]
    syncing.give(BlobArrived(claim.blob))
    assert syncing.give(BlobArrived(claim.blob)) == []
    assert syncing.hear(claim) == []
    syncing.give(ContributionChecked(claim.id, True, "", 1.0))
    assert syncing.give(ContributionChecked(claim.id, False, "late word", 0.0)) == []
    assert [decision.reason for decision in said(syncing.hear(claim), Decision)] == ["held already"]


def test_a_check_or_blob_that_nobody_announced_changes_nothing() -> None:
    syncing = Syncing.founding()
    syncing.join()
    claim = answer(opened(syncing))
    assert syncing.give(BlobArrived(claim.blob)) == []
    assert syncing.give(ContributionChecked(claim.id, True, "", 1.0)) == []
    syncing.hear(claim)
    assert syncing.give(ContributionChecked(claim.id, True, "", 1.0)) == [], "its bytes are not here"


def test_an_invalid_contribution_is_refused_by_name_and_may_be_replaced() -> None:
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing)
    claim = answer(asked)
    syncing.hear(claim)
    syncing.give(BlobArrived(claim.blob))
    effects = syncing.give(ContributionChecked(claim.id, False, "NaN scale", 0.0))
    assert said(effects, Decision) == [Decision(id=claim.id, verdict="refused", reason="invalid: NaN scale")]
    assert only(effects, ForgetBlob) == [ForgetBlob(claim.blob)]
    later = answer(asked, id=replace(claim.id, last_step=16))
    assert only(syncing.hand_in(later), Merge) != []


def test_an_announcement_that_crossed_its_refusal_does_not_block_the_next() -> None:
    """The learner knows the first to be refused and will never upload it."""
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing)
    claim = answer(asked)
    syncing.hear(claim)
    later = answer(asked, id=replace(claim.id, last_step=16), blob=BlobRef(fake_digest("later"), 50))
    assert syncing.hear(later) == [ForgetBlob(claim.blob), AcceptBlob(ANN, later.blob)]
    assert only(syncing.hand_in(later), Merge) != []


def test_a_malformed_announcement_does_not_displace_an_honest_one() -> None:
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing)
    claim = answer(asked)
    syncing.hear(claim)
    effects = syncing.hear(answer(asked, tokens=0, id=replace(claim.id, last_step=16)))
    assert said(effects, Decision)[0].verdict == "refused" and only(effects, ForgetBlob) == []
    assert syncing.hear(claim) == [AcceptBlob(ANN, claim.blob)]


def test_what_is_being_merged_is_not_displaced() -> None:
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing)
    claim = answer(asked)
    (merge,) = only(syncing.hand_in(claim), Merge)
    later = answer(asked, id=replace(claim.id, last_step=16), blob=BlobRef(fake_digest("later"), 50))
    assert said(syncing.hear(later), Decision)[0].reason.startswith("undecided")
    syncing.hear(hello(), ANN, BootId("2" * 16))
    (seal,) = only(syncing.merged(merge), Seal)
    assert isinstance(seal.entry, Commit) and seal.entry.participants[0].last_step == 8


def test_work_that_a_new_process_does_not_remember_is_let_go() -> None:
    syncing = Syncing.founding(QUORUM_2)
    syncing.join()
    claim = answer(opened(syncing))
    syncing.hand_in(claim)
    assert only(syncing.hear(hello(undecided=(claim.id,)), ANN, BootId("2" * 16)), ForgetBlob) == []
    assert only(syncing.hear(hello(), ANN, BootId("3" * 16)), ForgetBlob) == [ForgetBlob(claim.blob)]


def test_the_more_learners_there_are_the_less_often_it_wants_to_hear_of_each() -> None:
    syncing = Syncing.founding()
    syncing.join()
    assert opened(syncing).progress_ms == 1_000
    crowd = Syncing.founding()
    for number in range(300):
        crowd.join(PeerId(f"{number:064x}"))
    assert opened(crowd).progress_ms == 1_500


def test_hello_twice_is_welcomed_twice_and_open_rounds_are_asked_again() -> None:
    syncing = Syncing.founding(QUORUM_2)
    syncing.join()
    asked = opened(syncing)
    first, second = syncing.hear(hello()), syncing.hear(hello())
    assert said(first, Welcome) == said(second, Welcome) != []
    assert said(second, RoundOpen) == [asked]


def test_welcome_tells_which_steps_may_not_be_used_again() -> None:
    syncing = Syncing.founding()
    syncing.join()
    claim = answer(opened(syncing))
    syncing.hand_in(claim)
    (welcome,) = said(syncing.hear(hello(), ANN, BootId("2" * 16)), Welcome)
    assert welcome.merged_until == (0, 8) and welcome.resume_step == 8, "about to be merged counts as merged"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"wire_version": WIRE_VERSION + 1}, "wire"), ({"layout_digest": Digest("00" * 32)}, "layout")],
)
def test_a_peer_of_another_wire_version_or_layout_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    syncing = Syncing.founding()
    effects = syncing.hear(hello(**changes))
    assert [refuse.reason for refuse in said(effects, Refuse)] == [reason]
    assert only(effects, CloseConnection) != []
    assert said(syncing.hear(progress(1)), Refuse)[0].reason == "hello"


def test_messages_of_another_branch_or_an_older_term_are_refused_with_our_term() -> None:
    syncing = Syncing.founding()
    (refuse,) = said(syncing.hear(hello(), branch=BranchId("elsewhere")), Refuse)
    assert refuse.reason == "branch"
    (refuse,) = said(syncing.hear(hello(), term=Term(0)), Refuse)
    assert (refuse.reason, refuse.term) == ("term", 1)
    (refuse,) = said(syncing.hear(hello(), term=Term(9)), Refuse)
    assert refuse.reason == "not_serving", "whoever knows a higher term has to look elsewhere"
    assert syncing.core.serves, "and raises nobody's term"


def test_whoever_did_not_say_hello_is_told_to() -> None:
    syncing = Syncing.founding()
    assert said(syncing.hear(progress(1)), Refuse)[0].reason == "hello"
    syncing.join()
    assert said(syncing.hear(progress(2), ANN, BootId("2" * 16)), Refuse)[0].reason == "hello", "an earlier process"
    syncing.give(Disconnected(ANN, "cut"))
    assert said(syncing.hear(progress(3)), Refuse)[0].reason == "hello"


def test_a_peer_that_does_not_train_has_nothing_to_hand_in() -> None:
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing)
    syncing.hear(hello(trains=False), BEN)
    assert said(syncing.hear(answer(asked, BEN), BEN), Refuse)[0].reason == "unexpected"


def test_messages_that_only_a_syncer_sends_are_refused() -> None:
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing)
    assert said(syncing.hear(asked), Refuse)[0].reason == "unexpected"


def test_sampled_of_another_round_or_fragment_changes_nothing() -> None:
    syncing = Syncing.founding()
    syncing.join()
    asked = opened(syncing)
    for message in (
        Sampled(round=asked.round + 1, fragment=asked.fragment, attempt=1),
        Sampled(round=asked.round, fragment=99, attempt=1),  # type: ignore[arg-type]
    ):
        assert syncing.hear(message) == []


def test_goodbye_lets_go_of_what_will_never_come_and_keeps_what_is_here() -> None:
    syncing = Syncing.founding(QUORUM_2)
    syncing.join(ANN)
    syncing.join(BEN)
    asked = opened(syncing)
    here, coming = answer(asked, ANN), answer(asked, BEN)
    syncing.hand_in(here)
    syncing.hear(coming, BEN)
    assert only(syncing.hear(Goodbye(reason="leaving"), BEN), ForgetBlob) == [ForgetBlob(coming.blob)]
    assert only(syncing.hear(Goodbye(reason="leaving"), ANN), ForgetBlob) == []
    syncing.join(CYD)
    (merge,) = only(syncing.hand_in(answer(asked, CYD)), Merge)
    assert {each.peer for each in merge.inputs} == {ANN, CYD}


def test_a_contribution_that_misses_its_round_is_told_so_once_and_rides_along() -> None:
    syncing = Syncing.founding(replace(SYNC, grace=False))
    syncing.join(ANN)
    syncing.join(BEN)
    asked = opened(syncing)
    late = answer(asked, BEN)
    syncing.hear(late, BEN)
    (merge,) = only(syncing.hand_in(answer(asked, ANN)), Merge)
    effects = syncing.merged(merge)
    assert [(each.id, each.verdict) for each in said(effects, Decision, BEN)] == [(late.id, "kept_late")]
    syncing.give(BlobArrived(late.blob))
    syncing.give(ContributionChecked(late.id, True, "", 1.0))
    again = opened(syncing)
    claim = answer(again, ANN, first_step=8, id=replace(answer(again, ANN).id, last_step=16))
    (merge,) = only(syncing.hand_in(claim), Merge)
    assert [each.base_version for each in merge.inputs] == [1 if each.peer == ANN else 0 for each in merge.inputs]
    assert len(merge.inputs) == 2


def test_a_failed_merge_is_tried_again_with_a_new_attempt_and_without_its_culprit() -> None:
    syncing = Syncing.founding(QUORUM_2)
    syncing.join(ANN)
    syncing.join(BEN)
    asked = opened(syncing)
    syncing.hand_in(answer(asked, ANN))
    (merge,) = only(syncing.hand_in(answer(asked, BEN)), Merge)
    effects = syncing.give(MergeFailed(merge.fragment, merge.round, merge.attempt, "NaN", BEN))
    assert said(effects, Decision, BEN)[0].verdict == "refused"
    assert {again.attempt for again in said(effects, RoundOpen)} == {2}
    assert syncing.merged(merge) == [], "the answer to an attempt that was given up"
    second = answer(asked, BEN, id=replace(answer(asked, BEN).id, last_step=17))
    (merge,) = only(syncing.hand_in(second), Merge)
    assert merge.attempt == 2


def test_a_merge_that_fails_without_anyones_fault_waits_a_moment() -> None:
    syncing = Syncing.founding()
    syncing.join()
    (merge,) = only(syncing.hand_in(answer(opened(syncing))), Merge)
    assert only(syncing.give(MergeFailed(merge.fragment, merge.round, 1, "disk full", None)), Merge) == []
    assert only(syncing.pass_time(900), Merge) == []
    assert [each.attempt for each in only(syncing.pass_time(200), Merge)] == [2]


def test_a_run_of_so_many_commits_makes_exactly_so_many_and_finishes() -> None:
    syncing = Syncing.founding(stop=StopSpec(commits=1))
    syncing.join()
    asked = opened(syncing)
    (merge,) = only(syncing.hand_in(answer(asked)), Merge)
    effects = syncing.merged(merge)
    assert [type(seal.entry) for seal in only(effects, Seal)] == [Commit, Finished]
    assert [finished.reason for finished in only(effects, RunFinished)] == ["1 commits made"]
    assert only(syncing.hand_in(answer(asked, first_step=8)), Merge) == []


def test_a_syncer_that_resumes_opens_the_next_term_and_loses_no_version() -> None:
    chain = ChainBuilder.opened()
    chain.commit(1)
    syncing = Syncing.resuming(chain)
    assert only(syncing.effects, Seal) == []
    (seal,) = only(syncing.pass_time(1_000), Seal)
    assert isinstance(seal.entry, Open) and seal.entry.header.term == 2
    syncing.join()
    assert opened(syncing, fragment=1).version == 1


def test_a_finished_run_that_is_started_again_only_opens_a_term_in_which_it_tells_so() -> None:
    """The last entry becomes durable by an entry of a later term, if its syncer died before it could say so."""
    chain = ChainBuilder.opened()
    before_the_end = chain.snapshot(whole_chain=True)
    chain.finished()
    syncing = Syncing(record=vote_record(chain))
    assert syncing.load(before_the_end, chain.events) == []
    effects = syncing.pass_time(1_000)
    assert [type(seal.entry) for seal in only(effects, Seal)] == [Open]
    assert only(effects, RunFinished) == [RunFinished("enough")]
    (welcome,) = said(syncing.join(), Welcome)
    assert welcome.head_seq == 3
    assert only(syncing.pass_time(60_000), Seal) == []


def test_no_snapshot_goes_beyond_the_end() -> None:
    """Whoever began with it would train on for ever."""
    syncing = Syncing.founding(stop=StopSpec(commits=1))
    syncing.join()
    syncing.merged(only(syncing.hand_in(answer(opened(syncing))), Merge)[0])
    ledger, state = syncing.core.ledger, syncing.core.state_ledger()
    assert state is not None and (ledger.finished, state.finished) == ("1 commits made", None)
    assert (state.seq, state.heads, state.tokens) == (ledger.seq - 1, ledger.heads, ledger.tokens)


def test_no_learner_is_asked_for_anything_after_the_end() -> None:
    chain = ChainBuilder.opened()
    chain.finished()
    syncing = Syncing.resuming(chain)
    effects = syncing.pass_time(1_000) + syncing.join() + syncing.pass_time(10_000)
    assert said(effects, Welcome) != [] and said(effects, RoundOpen) == []


def test_a_measurement_that_comes_after_the_end_is_not_recorded() -> None:
    syncing = Syncing.founding(stop=StopSpec(commits=1))
    syncing.join()
    syncing.merged(only(syncing.hand_in(answer(opened(syncing))), Merge)[0])
    assert syncing.core.ledger.finished is not None
    assert only(syncing.give(Evaluated(syncing.core.ledger.seq, 2.0)), Seal) == []


def test_a_syncer_that_leaves_commits_what_it_is_merging_and_opens_nothing_more() -> None:
    syncing = Syncing.founding()
    syncing.join()
    (merge,) = only(syncing.hand_in(answer(opened(syncing))), Merge)
    assert only(syncing.give(StopRequested("SIGTERM")), ReadyToLeave) == []
    effects = syncing.merged(merge)
    assert only(effects, ReadyToLeave) == [ReadyToLeave()] and only(effects, Seal) != []
    assert said(syncing.pass_time(500), RoundOpen) == []


def test_nobody_is_woken_for_a_fragment_that_is_due_when_the_run_is_over() -> None:
    syncing = Syncing.founding(stop=StopSpec(commits=1))
    syncing.slow = frozenset({Evaluate})
    syncing.join()
    (merge,) = only(syncing.hand_in(answer(opened(syncing))), Merge)
    syncing.merged(merge)
    syncing.pass_time(5_000)
    syncing.hear(progress(60))
    syncer = syncing.core._syncer
    assert syncer is not None and syncer.deadline is not None
    assert syncer.deadline > syncing.now + 1_000, "it waits for the last measurement"


def test_nobody_is_woken_for_a_fragment_that_is_due_while_nobody_trains() -> None:
    syncing = Syncing.founding()
    syncing.join()
    syncing.now += 410
    syncing.give(Disconnected(ANN, "cut"))
    syncer = syncing.core._syncer
    assert syncer is not None
    assert syncer.deadline == syncing.now + AWAY_MS, "the clock has passed the fragment's turn, and stands still"
