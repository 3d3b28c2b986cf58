"""A claim counts up to what is plausible: nobody is refused for it, nobody's work is lost, no liar takes the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import FragmentId, PeerId, StopSpec, Version
from geo_diloco.protocol.accounts import PPM, Account
from geo_diloco.protocol.effects import Effect, Merge, Seal, TokensDropped
from geo_diloco.protocol.events import BlobArrived, ContributionChecked
from geo_diloco.protocol.messages import Commit, Contribution, RoundOpen
from geo_diloco.protocol.plausibility import (
    BATCH_FACTOR,
    CREDIT_FACTOR,
    LENGTH_FACTOR,
    WEIGHT_FACTOR,
    Pace,
    count,
    credit_max,
    lower_median,
    tokens_per_second,
)
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ANN, BEN, CYD, SYNC, ChainBuilder, contribution, participant
from tests.support.single import Syncing, hello, only, progress, said

PER_STEP = 100
USUAL = [1.0] * 8


def claim(peer: str = ANN, tokens: int = 800, steps: int = 8, unmerged: int | None = None) -> Contribution:
    base = fake_digest("base")
    return contribution(PeerId(peer), base=base, tokens=tokens, steps=steps, tokens_unmerged=unmerged or tokens)


def test_an_honest_claim_counts_in_full() -> None:
    (one,) = count([(claim(), 1.5)], [10**6], USUAL)
    assert (one.tokens, one.tokens_unmerged, one.weight, one.norm, one.scale) == (800, 800, 800 * 800 / 8, 1.5, 1.0)


def test_tokens_count_up_to_the_credit() -> None:
    (liar,) = count([(claim(tokens=2**49, unmerged=2**50), 1.0)], [5_000], USUAL)
    assert (liar.tokens, liar.tokens_unmerged) == (5_000, 5_000)


def test_nobody_weighs_more_than_so_many_median_participants() -> None:
    slow, liar = claim(ANN), claim(BEN, tokens=10**9)
    weights = [each.weight for each in count([(slow, 1.0), (liar, 1.0)], [None, None], USUAL)]
    assert weights[1] == pytest.approx(WEIGHT_FACTOR * weights[0])


def test_learners_of_usual_speeds_keep_their_own_weights() -> None:
    claims = [(claim(tokens=800 * speed, steps=8 * speed), 1.0) for speed in (1, 2, 4, 5)]
    weights = [each.weight for each in count(claims, [None] * 4, USUAL)]
    assert [weight / weights[0] for weight in weights] == pytest.approx([1, 2, 4, 5])


def test_without_token_weights_all_weigh_the_same() -> None:
    claims = [(claim(tokens=800 * speed, steps=8), 1.0) for speed in (1, 2, 20)]
    assert [each.weight for each in count(claims, [None] * 3, USUAL, token_weights=False)] == [1.0] * 3


def test_a_delta_far_longer_than_usual_is_shortened() -> None:
    (liar,) = count([(claim(), 1e30)], [None], USUAL)
    assert (liar.norm, liar.scale) == (pytest.approx(LENGTH_FACTOR), pytest.approx(LENGTH_FACTOR / 1e30))


@pytest.mark.parametrize("lengths", [[], [1.0, 1.0, 1.0], [0.0] * 8], ids=["none", "too few", "all zero"])
def test_without_a_history_no_length_is_unusual(lengths: list[float]) -> None:
    (one,) = count([(claim(), 1e3)], [None], lengths)
    assert (one.norm, one.scale) == (1e3, 1.0)


def test_half_of_the_learners_do_not_move_the_median() -> None:
    assert lower_median([1, 1, 10**9, 10**9]) == 1
    honest, liar = Pace(100, 100 * PER_STEP, 50_000), Pace(1, 2**50, 1)
    assert lower_median([tokens_per_second(each, PER_STEP) or 0 for each in (honest, liar)]) == 2_000


def test_a_lone_learner_is_believed_up_to_what_a_machine_can_do() -> None:
    assert tokens_per_second(Pace(1, 2**50, 1), PER_STEP) == BATCH_FACTOR * PER_STEP * 1_000
    assert tokens_per_second(Pace(0, 0, 0), PER_STEP) is None


def test_credit_grows_with_what_the_median_trains_and_is_used_up_by_what_was_credited() -> None:
    at_once = CREDIT_FACTOR * SYNC.interval_steps * PER_STEP
    assert credit_max(0, 0, tokens_per_step=PER_STEP, sync=SYNC) == at_once
    assert credit_max(6_000, 0, tokens_per_step=PER_STEP, sync=SYNC) == at_once + CREDIT_FACTOR * 6_000
    assert credit_max(6_000, at_once, tokens_per_step=PER_STEP, sync=SYNC) == CREDIT_FACTOR * 6_000
    assert credit_max(0, 10**9, tokens_per_step=PER_STEP, sync=SYNC) == 0
    assert credit_max(0, 0, tokens_per_step=0, sync=SYNC) is None


def test_tokens_that_were_not_credited_leave_the_books_with_their_reason() -> None:
    account = Account(FragmentId(0))
    account.sample(8, 800)
    merged, dropped = account.merge(Version(1), 9, 900, PPM, credited=300)
    assert (merged, dropped) == (300, [TokensDropped(FragmentId(0), 500, "implausible")])
    assert merged + account.unmerged + sum(each.tokens for each in dropped) == 900


# ---- in a syncer ---------------------------------------------------------------------------------------------------


class Crediting(Syncing):
    """Of a run whose manifest says how many tokens an inner step has."""

    def asked(self, effects: list[Effect] | None = None) -> RoundOpen:
        """The next question for fragment 1, from learners that do a step of PER_STEP tokens in 100 ms."""
        effects = effects or []
        for _ in range(100):
            for each in said(effects, RoundOpen):
                if each.fragment == 1:
                    return each
            effects = self.pass_time(100)
            for peer in (ANN, BEN, CYD):
                step = self.now // 100
                effects += self.hear(replace(progress(step), tokens=PER_STEP * step), peer)
        raise AssertionError("no round was opened")

    def merge(self, asked: RoundOpen, norms: dict[str, float] | None = None, **changes: object) -> Merge:
        """ANN and BEN hand in a plain step, CYD what is changed."""
        effects: list[Effect] = []
        first = self.core.ledger.merged_until.get((ANN, asked.fragment), 0)
        for peer in (ANN, BEN, CYD):
            made = contribution(peer, base=asked.base, fragment=asked.fragment, base_version=asked.version)
            made = replace(
                made,
                id=replace(made.id, last_step=first + 8),
                blob=replace(made.blob, digest=fake_digest(peer, first)),
                first_step=first,
                tokens=8 * PER_STEP,
                tokens_unmerged=8 * PER_STEP,
            )
            if peer == CYD:
                made = replace(made, **changes)  # type: ignore[arg-type]
                made = replace(made, id=replace(made.id, last_step=first + max(8, made.steps)))
            self.hear(made, peer)
            self.give(BlobArrived(made.blob))
            effects += self.give(ContributionChecked(made.id, True, "", (norms or {}).get(peer, 1.0)))
        (merge,) = only(effects, Merge)
        return merge


def crediting(stop: StopSpec | None = None, quorum: int = 1, *, token_weights: bool = True) -> Crediting:
    sync = replace(SYNC, quorum=quorum, token_weights=token_weights)
    made = Crediting.founding(sync, stop, tokens_per_step=PER_STEP)
    assert isinstance(made, Crediting)
    for peer in (ANN, BEN, CYD):
        made.join(peer)
    return made


def committed(effects: list[Effect]) -> Commit:
    (commit,) = [seal.entry for seal in only(effects, Seal) if isinstance(seal.entry, Commit)]
    return commit


def test_a_liars_tokens_do_not_end_a_run() -> None:
    it = crediting(StopSpec(tokens=10**6))
    merge = it.merge(it.asked(), tokens=2**50, tokens_unmerged=2**50, steps=1)
    commit = committed(it.merged(merge))
    assert commit.tokens_total < 10**5 and commit.progress < 0.1
    assert it.core.ledger.finished is None


def test_a_liars_weight_stays_below_that_of_so_many_others() -> None:
    it = crediting()
    merge = it.merge(it.asked(), tokens=2**50, tokens_unmerged=2**50, steps=1)
    weights = {each.peer: each.weight for each in committed(it.merged(merge)).participants}
    assert weights[CYD] == pytest.approx(WEIGHT_FACTOR / (WEIGHT_FACTOR + 2))


def test_a_run_without_token_weights_weighs_all_the_same() -> None:
    it = crediting(token_weights=False)
    merge = it.merge(it.asked(), tokens=16 * PER_STEP, tokens_unmerged=16 * PER_STEP, steps=8)
    assert [each.weight for each in committed(it.merged(merge)).participants] == [pytest.approx(1 / 3)] * 3


def test_a_liars_long_delta_is_shortened_once_lengths_are_known() -> None:
    it = crediting()
    for _ in range(2):
        it.merged(it.merge(it.asked()))
    merge = it.merge(it.asked(), norms={CYD: 1e9})
    scales = {each.peer: each.scale for each in merge.inputs}
    assert scales == {ANN: 1.0, BEN: 1.0, CYD: pytest.approx(LENGTH_FACTOR / 1e9)}
    norms = {each.peer: each.norm for each in committed(it.merged(merge)).participants}
    assert norms[CYD] == pytest.approx(LENGTH_FACTOR), "what is written down is what was merged"


def test_a_learner_that_was_cut_off_for_long_is_credited_all_it_trained() -> None:
    it = crediting()
    it.merged(it.merge(it.asked()))
    for _ in range(10):
        it.pass_time(60_000)
        for peer in (ANN, BEN, CYD):
            it.hear(replace(progress(it.now // 100), tokens=PER_STEP * (it.now // 100)), peer)
    trained = 6_000 * PER_STEP
    asked = next(each for each in said(it.hear(hello(), ANN), RoundOpen) if each.fragment == 1)
    merge = it.merge(asked, tokens=trained, tokens_unmerged=trained, steps=6_000)
    assert {each.peer: each.tokens_unmerged for each in committed(it.merged(merge)).participants}[CYD] == trained


def test_work_that_was_held_up_behind_an_older_contribution_is_credited() -> None:
    """It was sampled long ago, and what was trained since comes right after its merge: with the syncer frozen, or a
    link cut, in between."""
    it = crediting(quorum=3)
    it.merged(it.merge(it.asked()))
    asked = it.asked()
    it.now += 600_000
    effects = it.merged(it.merge(asked))
    trained = 6_000 * PER_STEP
    merge = it.merge(it.asked(effects), tokens=trained, tokens_unmerged=trained, steps=6_000)
    assert {each.peer: each.tokens_unmerged for each in committed(it.merged(merge)).participants}[CYD] == trained


def test_learners_that_stall_for_a_moment_cost_nobody_credit() -> None:
    it = crediting()
    it.merged(it.merge(it.asked()))
    asked = it.asked()
    step = it.now // 100 + 1
    for peer in (ANN, BEN):
        it.hear(replace(progress(step, 40_000_000), tokens=PER_STEP * step), peer)
    it.now += 10_000
    it.hear(replace(progress(it.now // 100), tokens=PER_STEP * (it.now // 100)), CYD)
    trained = 3_000 * PER_STEP
    merge = it.merge(asked, tokens=trained, tokens_unmerged=trained, steps=3_000)
    assert {each.peer: each.tokens_unmerged for each in committed(it.merged(merge)).participants}[CYD] == trained


@pytest.mark.parametrize(("away_ms", "in_full"), [(0, False), (1_200_000, True)])
def test_what_learners_train_while_nobody_serves_is_credited(away_ms: int, in_full: bool) -> None:
    chain = ChainBuilder.opened()
    chain.commit(1, *(participant(peer, chain.bases[1], 0, 0, 8) for peer in (ANN, BEN, CYD)))
    it = Crediting.resuming(chain, away_ms, tokens_per_step=PER_STEP)
    assert isinstance(it, Crediting)
    it.pass_time(1_000)
    for peer in (ANN, BEN, CYD):
        it.join(peer)
    trained = 12_000 * PER_STEP
    merge = it.merge(it.asked(), tokens=trained, tokens_unmerged=trained, steps=12_000)
    credited = {each.peer: each.tokens_unmerged for each in committed(it.merged(merge)).participants}[CYD]
    assert (credited == trained) == in_full
