"""The learner's side: what it samples, uploads and adopts, and what it does when things come twice, late or never."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import FragmentId, Version
from geo_diloco.protocol.effects import (
    Adopt,
    ForgetBlob,
    Reset,
    TakeSample,
    TokensDropped,
    TokensMerged,
    Upload,
)
from geo_diloco.protocol.events import (
    DeltaEncoded,
    Disconnected,
    FragmentReplaced,
    SampleTaken,
    UpdateLost,
    UploadDone,
    UploadFailed,
    UploadSent,
)
from geo_diloco.protocol.ledger import BASES_KEPT
from geo_diloco.protocol.messages import (
    BlobRef,
    Contribution,
    Decision,
    Hello,
    Progress,
    Sampled,
)
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ANN, FOUNDER, SYNC, ChainBuilder, participant
from tests.support.single import P0, Learning, adopt, begun, handed_in, of, only, said, take

# ---- rounds


def test_it_samples_at_the_next_boundary_after_it_was_asked_and_has_adopted_the_version() -> None:
    learning, _ = begun()
    assert only(learning.hear(learning.asked()), TakeSample) == [TakeSample(P0, 1)]
    assert only(learning.train(), TakeSample) == [], "asked once, sampled once"


def test_whoever_has_a_version_to_adopt_at_every_boundary_samples_before_it_adopts() -> None:
    """An inner step takes longer than a round: the question is older than the adoption, the next version is there
    before the next boundary."""
    learning, chain = begun()
    learning.train()
    take(learning, chain.commit(0))
    assert only(learning.hear(learning.asked()) + learning.train(), TakeSample) == []
    assert only(adopt(learning, 1), TakeSample) == [TakeSample(P0, 1)]


def test_a_sample_without_a_step_on_the_version_hands_in_nothing() -> None:
    learning, _ = begun()
    learning.hear(learning.asked())
    effects = learning.sample()
    assert said(effects, Sampled) == said(effects, Contribution) == []


def test_the_contribution_says_what_it_stands_for() -> None:
    learning, chain = begun()
    learning.train(3)
    learning.hear(learning.asked())
    effects = learning.sample()
    assert said(effects, Sampled) == [Sampled(round=1, fragment=P0, attempt=1)]
    (claim,) = said(effects, Contribution)
    assert (claim.first_step, claim.id.last_step, claim.steps, claim.tokens, claim.tokens_unmerged) == (
        0,
        3,
        3,
        300,
        300,
    )
    assert (claim.id.base, claim.base_version) == (chain.events[0].digest, 0)
    assert only(effects, Upload) == [Upload(claim.blob, "")]


def test_a_question_twice_or_again_is_answered_by_one_sample() -> None:
    learning, _ = begun()
    asked = learning.asked()
    assert len(only(learning.hear(asked) + learning.hear(asked) + learning.train(), TakeSample)) == 1
    learning.hear(asked)
    learning.sample()
    effects = learning.hear(replace(asked, attempt=2)) + learning.train(20)
    assert only(effects, TakeSample) == [], "one undecided contribution per fragment"


def test_a_question_about_an_older_or_a_future_version_is_not_answered_with_this_one() -> None:
    learning, chain = begun()
    asked = learning.asked()
    take(learning, chain.commit(0))
    learning.train()
    adopt(learning, 1)
    assert only(learning.hear(asked) + learning.train(), TakeSample) == []
    future = replace(learning.asked(round_=3), version=Version(2))
    assert only(learning.hear(future) + learning.train(), TakeSample) == []


def test_it_does_not_sample_what_it_is_about_to_adopt() -> None:
    learning, chain = begun()
    learning.train()
    take(learning, chain.commit(0))
    assert only(learning.hear(learning.asked()) + learning.train(), TakeSample) == []
    assert only(adopt(learning, 1), TakeSample) == [TakeSample(P0, 1)]


def test_a_question_about_no_fragment_of_this_run_is_ignored() -> None:
    learning, _ = begun()
    for fragment in (-1, 2, 10**9):
        assert only(learning.hear(replace(learning.asked(), fragment=FragmentId(fragment))), TakeSample) == []


def test_a_sample_or_encoding_that_was_not_asked_for_is_dropped() -> None:
    learning, _ = begun()
    learning.train()
    assert learning.give(SampleTaken(P0, 1, 1, 100, 100)) == []
    blob = BlobRef(fake_digest("stray"), 50)
    assert learning.give(DeltaEncoded(P0, 1, blob, 1.0)) == [ForgetBlob(blob)]


# ---- uploads


FAST, SLOW = 10**6, 100
"""Bytes per second, for deltas of 50 bytes that are asked for every 266 ms."""


def linked(chain: ChainBuilder, *, bytes_per_s: int) -> Learning:
    """Three fragments; the first was handed in, at that rate, and merged."""
    learning = Learning(chain.snapshot(), replace(SYNC, num_fragments=3))
    learning.connect()
    learning.hear(learning.asked(0, 1))
    learning.train()
    (claim,) = said(learning.sample(0, 1), Contribution)
    learning.give(UploadDone(claim.blob, bytes_per_s))
    take(learning, chain.commit(0, of(claim)))
    adopt(learning, 1)
    return learning


def test_one_upload_at_a_time_and_the_newest_round_first() -> None:
    learning = linked(ChainBuilder.opened((10, 10, 10)), bytes_per_s=FAST)
    for fragment, round_ in ((0, 2), (1, 3), (2, 4)):
        learning.hear(learning.asked(fragment, round_))
    learning.train()
    first = only(learning.sample(0, 2), Upload)
    assert only(learning.sample(1, 3), Upload) == only(learning.sample(2, 4), Upload) == []
    (second,) = only(learning.give(UploadDone(first[0].blob, FAST)), Upload)
    assert second.blob == BlobRef(fake_digest("delta", 2, 2), 50)


def test_the_next_upload_begins_when_the_last_is_sent_and_is_not_begun_twice() -> None:
    learning = linked(ChainBuilder.opened((10, 10, 10)), bytes_per_s=FAST)
    for fragment, round_ in ((0, 2), (1, 3), (2, 4)):
        learning.hear(learning.asked(fragment, round_))
    learning.train()
    (first,) = only(learning.sample(0, 2), Upload)
    learning.sample(1, 3)
    (second,) = only(learning.give(UploadSent(first.blob)), Upload)
    assert second.blob != first.blob
    assert learning.give(UploadSent(first.blob)) == []
    assert learning.core._learner is not None and learning.core._learner.handing_in()
    assert only(learning.give(UploadDone(first.blob, FAST)), Upload) == []
    assert only(learning.train(20), Upload) == [], "it is confirmed: nothing is handed in again"


def test_what_failed_after_it_was_sent_is_handed_in_again() -> None:
    learning = linked(ChainBuilder.opened((10, 10, 10)), bytes_per_s=FAST)
    learning.hear(learning.asked(0, 2))
    learning.train()
    (upload,) = only(learning.sample(0, 2), Upload)
    learning.give(UploadSent(upload.blob))
    assert only(learning.train(20), Upload) == []
    learning.give(UploadFailed(upload.blob, "not announced"))
    assert only(learning.train(20), Upload) == [upload]


def test_until_a_rate_is_measured_there_is_one_sample_on_its_way() -> None:
    learning = Learning(ChainBuilder.opened((10, 10, 10)).snapshot(), replace(SYNC, num_fragments=3))
    learning.connect()
    asked = [effect for p in range(3) for effect in learning.hear(learning.asked(p, p + 1))]
    assert only(asked + learning.train(), TakeSample) == [TakeSample(P0, 1)]
    (upload,) = only(learning.sample(0, 1), Upload)
    assert only(learning.train(3), TakeSample) == []
    learning.give(UploadDone(upload.blob, FAST))
    assert len(only(learning.train(), TakeSample)) == 2, "the link keeps up with all that is asked for"


def test_on_a_slow_link_the_oldest_round_is_sampled_when_the_upload_before_is_nearly_through() -> None:
    learning = linked(ChainBuilder.opened((10, 10, 10)), bytes_per_s=SLOW)  # an upload takes 500 ms, a step 100
    learning.train()
    asked = learning.hear(learning.asked(1, 2)) + learning.hear(learning.asked(2, 3))
    assert only(asked + learning.train(), TakeSample) == [TakeSample(FragmentId(1), 2)]
    learning.sample(1, 2)
    taken = [only(learning.train(), TakeSample) for _ in range(5)]
    assert taken == [[], [], [TakeSample(FragmentId(2), 3)], [], []]


def test_on_a_slow_link_a_fragment_is_sampled_again_when_the_others_had_their_turn() -> None:
    """500 ms of 266: two rounds of 8 steps; not within three quarters of that."""
    learning = linked(ChainBuilder.opened((10, 10, 10)), bytes_per_s=SLOW)
    learning.hear(learning.asked(0, 2))
    taken = [bool(only(learning.train(), TakeSample)) for _ in range(14)]
    assert taken.index(True) + 1 == 12, "steps after the last sample"


def test_progress_says_how_many_rounds_a_slow_link_takes_part_in() -> None:
    learning = linked(ChainBuilder.opened((10, 10, 10)), bytes_per_s=SLOW)
    learning.now += 1000
    (progress,) = said(learning.train(), Progress)
    assert (progress.turn, progress.uplink) == (2, "takes part in 1 of 2 rounds: 0.5 s per upload")
    fast = linked(ChainBuilder.opened((10, 10, 10)), bytes_per_s=FAST)
    fast.now += 1000
    (progress,) = said(fast.train(), Progress)
    assert (progress.turn, progress.uplink) == (1, "")


def test_progress_is_said_as_seldom_as_it_is_asked_for_but_no_silence_is_made_of_it() -> None:
    """Steps of 100 ms: silent after 5 s, so every 1.7 s at the most seldom."""
    learning, _ = begun()

    def said_within(ms: int) -> int:
        return len(said(learning.train(ms // 100), Progress))

    assert said_within(6_000) == 6
    learning.hear(replace(learning.asked(), progress_ms=1_500))
    assert said_within(6_000) == 4
    learning.hear(replace(learning.asked(), progress_ms=60_000))
    assert said_within(10_200) == 6


def test_steps_that_become_long_are_told_in_time_before_their_length_is_relied_on() -> None:
    """The syncer counts a silence in steps of the length that it knows."""
    learning, _ = begun()
    learning.hear(replace(learning.asked(), progress_ms=60_000))
    learning.train(1)
    told = learning.now
    while learning.now < told + 20_000:
        learning.now += 1_900
        if said(learning.train(step_time_us=2_000_000), Progress):
            assert learning.now - told <= 2_000, "within the third of 5 s, and a step"
            break
    else:
        raise AssertionError("no Progress")
    assert not said(learning.train(), Progress)
    learning.now += 5_400
    assert said(learning.train(), Progress), "a third of 8 steps of 2 s"


def test_an_upload_is_not_overtaken_for_ever() -> None:
    """On a link that is always behind, newest first alone would starve the fragment whose round lacks a quorum."""
    chain = ChainBuilder.opened((10, 10, 10))
    learning = linked(chain, bytes_per_s=FAST)

    def sampled(fragment: int, round_: int) -> Contribution:
        learning.hear(learning.asked(fragment, round_))
        learning.train()
        return said(learning.sample(fragment, round_), Contribution)[0]

    running, waiting = sampled(0, 2), sampled(1, 2)
    uploads = []
    for round_ in range(3, 7):
        newer = sampled(2 if round_ % 2 else 0, round_)
        uploads += only(learning.give(UploadDone(running.blob, FAST)), Upload)
        take(learning, chain.commit(running.id.fragment, of(running)))
        adopt(learning, chain.versions[running.id.fragment], fragment=running.id.fragment)
        running = newer
    assert [upload.blob == waiting.blob for upload in uploads] == [False, False, False, True]


def test_a_failed_upload_is_announced_and_tried_again_a_moment_later() -> None:
    learning, _ = begun()
    learning.hear(learning.asked())
    learning.train()
    (claim,) = said(learning.sample(), Contribution)
    assert only(learning.give(UploadFailed(claim.blob, "not announced")), Upload) == []
    effects = learning.train(12)
    assert said(effects, Contribution) == [claim] and only(effects, Upload) == [Upload(claim.blob, "")]


def test_an_upload_that_ends_by_its_commit_frees_the_way_for_the_next() -> None:
    """The shell of a learner may end the upload of a forgotten blob without a word."""
    learning, chain = begun()
    learning.hear(learning.asked())
    learning.train()
    (claim,) = said(learning.sample(), Contribution)
    take(learning, chain.commit(0, of(claim)))
    assert ForgetBlob(claim.blob) in adopt(learning, 1)
    learning.hear(learning.asked(1, 2))
    learning.train()
    assert only(learning.sample(1, 2), Upload) != []


def test_everything_undecided_is_announced_and_uploaded_again_after_a_reconnection() -> None:
    learning, _ = begun()
    claim = handed_in(learning)
    learning.give(Disconnected(FOUNDER, "cut"))
    effects = learning.connect()
    assert [hello.undecided for hello in said(effects, Hello)] == [(claim.id,)]
    assert said(effects, Contribution) == [claim] and only(effects, Upload) == [Upload(claim.blob, "")]


def test_an_upload_under_way_when_the_syncer_is_another_process_is_done_again() -> None:
    learning, _ = begun()
    learning.hear(learning.asked())
    learning.train()
    (claim,) = said(learning.sample(), Contribution)
    learning.give(Disconnected(FOUNDER, "restarted"))
    learning.connect()
    assert only(learning.give(UploadDone(claim.blob, 1)), Upload) == [Upload(claim.blob, "")]


# ---- decisions


def refusal(claim: Contribution, reason: str = "invalid: NaN scale") -> Decision:
    return Decision(id=claim.id, verdict="refused", reason=reason)


def test_refused_work_is_carried_and_sampled_again_when_an_interval_has_passed() -> None:
    learning, _ = begun()
    claim = handed_in(learning)
    assert ForgetBlob(claim.blob) in learning.hear(refusal(claim))
    assert only(learning.train(SYNC.interval_steps - 1), TakeSample) == []
    assert only(learning.train(), TakeSample) == [TakeSample(P0, 1)]
    (again,) = said(learning.sample(), Contribution)
    assert again.first_step == 0 and again.tokens_unmerged == learning.tokens


def test_a_decision_twice_or_about_something_else_changes_nothing() -> None:
    learning, _ = begun()
    claim = handed_in(learning)
    other = replace(claim, id=replace(claim.id, last_step=99))
    for message in (
        refusal(other),
        replace(refusal(claim), id=replace(claim.id, fragment=FragmentId(77))),
        Decision(id=claim.id, verdict="held", reason=""),
        Decision(id=claim.id, verdict="kept_late", reason=""),
    ):
        assert learning.hear(message) == []
    learning.hear(refusal(claim))
    assert learning.hear(refusal(claim)) == []


def test_a_commit_on_our_chain_outranks_a_refusal() -> None:
    learning, chain = begun()
    claim = handed_in(learning)
    take(learning, chain.commit(0, of(claim)))
    assert learning.hear(refusal(claim, "unknown_base: too old to be remembered")) == []
    assert TokensMerged(P0, Version(1), 100) in adopt(learning, 1)


def test_it_does_so_however_much_has_been_committed_since() -> None:
    """A learner that was away for long learns late that its work was merged, and the ledger has forgotten the base."""
    learning, chain = begun()
    claim = handed_in(learning)
    take(learning, chain.commit(0, of(claim)))
    for _ in range(BASES_KEPT + 2):
        take(learning, chain.commit(0))
    assert learning.hear(refusal(claim, "unknown_base: too old to be remembered")) == []
    assert TokensMerged(P0, Version(1), 100) in adopt(learning, 1)


# ---- adoption


def test_a_participant_subtracts_its_own_delta() -> None:
    learning, chain = begun()
    claim = handed_in(learning)
    assert only(take(learning, chain.commit(0, of(claim))), Adopt) == [Adopt(P0, Version(1), claim.blob, 1.0)]
    learning.train(2)
    assert adopt(learning, 1) == [TokensMerged(P0, Version(1), 100), ForgetBlob(claim.blob)]


def test_a_learner_that_was_left_out_carries_everything() -> None:
    learning, chain = begun()
    learning.train(2)
    assert only(take(learning, chain.commit(0)), Adopt) == [Adopt(P0, Version(1), None, 1.0)]
    assert adopt(learning, 1) == []
    assert adopt(learning, 1) != [], "an adoption twice is our bug and is said so"


def test_the_cut_of_a_large_carry_is_booked() -> None:
    learning, chain = begun()
    learning.train(2)
    take(learning, chain.commit(0))
    assert adopt(learning, 1, scale_ppm=250_000) == [TokensDropped(P0, 150, "shrunk")]


def test_a_commit_with_work_that_this_process_does_not_remember_resets_the_fragment() -> None:
    learning, chain = begun()
    learning.train(9)
    forgotten = participant(ANN, chain.events[0].digest, 0, 0, 8, tokens=700)
    assert only(take(learning, chain.commit(0, forgotten)), Reset) == [Reset(P0, Version(1))]
    assert adopt(learning, 1, scale_ppm=0) == [
        TokensMerged(P0, Version(1), 700),
        TokensDropped(P0, -700, "crashed"),
        TokensDropped(P0, 900, "restarted"),
    ]
    learning.hear(learning.asked(round_=2))
    learning.train()
    (claim,) = said(learning.sample(round_=2), Contribution)
    assert (claim.first_step, claim.tokens_unmerged) == (9, 100)


def test_a_snapshot_over_several_commits_books_every_one_that_took_forgotten_work() -> None:
    learning, chain = begun()
    found = chain.events[0].digest
    commits = [
        chain.commit(0, participant(ANN, found, 0, 0, 8, tokens=700)),
        chain.commit(0, participant(ANN, chain.bases[0], 1, 8, 12, tokens=300)),
    ]
    for commit in commits:
        learning.give(commit)
    learning.durable(commits[1])
    learning.give(UpdateLost(commits[0].digest, "not kept"))
    effects = learning.give(FragmentReplaced(P0, Version(2), fake_digest("theta", 0, 2)))
    assert only(effects, Reset) == [Reset(P0, Version(2))]
    assert TokensMerged(P0, Version(2), 1_000) in adopt(learning, 2, scale_ppm=0)


def test_a_delta_still_being_encoded_when_its_fragment_is_reset_is_thrown_away() -> None:
    learning, chain = begun()
    learning.hear(learning.asked())
    learning.train()
    learning.give(SampleTaken(P0, 1, 1, 100, 100))
    take(learning, chain.commit(0, participant(ANN, chain.events[0].digest, 0, 0, 1)))
    adopt(learning, 1, scale_ppm=0)
    learning.hear(learning.asked(round_=1))
    assert only(learning.train(), TakeSample) == [], "its encoding would be taken for the new sample's"
    blob = BlobRef(fake_digest("old delta"), 50)
    assert learning.give(DeltaEncoded(P0, 1, blob, 1.0)) == [ForgetBlob(blob), TakeSample(P0, 1)]


def test_a_learner_that_pauses_over_many_versions_adopts_them_all_afterwards() -> None:
    learning, chain = begun()
    for _ in range(70):
        take(learning, chain.commit(0))
    learning.train()
    for version in range(1, 71):
        adopt(learning, version)
    learning.hear(learning.asked())
    learning.train()
    (claim,) = said(learning.sample(), Contribution)
    assert claim.id.base == chain.bases[0] and claim.base_version == 70
