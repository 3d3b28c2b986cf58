"""Whoever is in a merge is not everybody: its step is as large as the part of all work that is in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import FragmentId, PeerId, SyncSpec
from geo_diloco.protocol.effects import Effect, Merge, Seal
from geo_diloco.protocol.events import BlobArrived, ContributionChecked
from geo_diloco.protocol.messages import Commit, RoundOpen
from geo_diloco.protocol.patience import INTERVALS
from geo_diloco.protocol.plausibility import BATCH_FACTOR, WEIGHT_FACTOR, Pace, count
from geo_diloco.protocol.portion import Interval, portion
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ANN, BEN, CYD, SYNC, contribution
from tests.support.single import Syncing, only, progress, said

PER_STEP = 100
INTERVAL = Interval(steps=8, median_us=100_000, tokens_per_step=PER_STEP)


def test_where_nobody_is_missing_a_merge_is_whole_to_the_bit() -> None:
    assert portion([0.1, 0.2, 0.3], []) == 1.0
    assert portion([0.0], []) == 1.0, "of work that weighs nothing, too"


@pytest.mark.parametrize(
    ("present", "absent", "expected"),
    [
        ([1.0], [1.0, 1.0, 1.0], 1 / 4),
        ([1.0, 1.0], [None, None], 1 / 2),
        ([1.0], [1.0, 0.5], 1 / 2.5),
        ([0.5, 1.0], [1.0], 1.5 / 2.5),
        ([2.0, 4.0], [None], 6 / 8),
    ],
    ids=["one of four", "nothing told", "the fastest alone", "without the fastest", "unknown: as the lower median"],
)
def test_the_portion_is_the_weight_of_those_in_it(
    present: list[float], absent: list[float | None], expected: float
) -> None:
    assert portion(present, absent) == pytest.approx(expected)


def test_a_learner_that_exaggerates_counts_up_to_a_limit() -> None:
    honest, most = [1.0, 1.0, 1.0], WEIGHT_FACTOR + 3
    assert portion(honest, [1e12]) == pytest.approx(3 / most), "whether it is missed"
    assert portion([1e12], list(honest)) == pytest.approx(WEIGHT_FACTOR / most), "or alone in a merge"


def test_works_of_turns_add_up_to_that_of_a_merge_with_all() -> None:
    """Every learner in every n-th merge, with the work of n intervals: per interval the movement of lockstep."""
    speeds = [1.0, 0.8, 0.5, 0.2]
    together = sum(speed * speed for speed in speeds) / sum(speeds)
    moved = 0.0
    for turn, speed in enumerate(speeds):
        others = [each for number, each in enumerate(speeds) if number != turn]
        delta = len(speeds) * speed
        moved += portion([speed], list(others)) * delta
    assert moved / len(speeds) == pytest.approx(together)


@pytest.mark.parametrize("steps", [1, 3, 8, 40])
def test_in_equal_times_a_weight_does_not_depend_on_when_the_last_version_was_adopted(steps: int) -> None:
    claim = contribution(ANN, base=fake_digest("base"), tokens=steps * PER_STEP, steps=steps)
    (one,) = count([(claim, 1.0)], [None], [], spans=[INTERVAL.span(100_000)])
    assert one.weight == pytest.approx(8 * PER_STEP**2)
    assert one.weight == pytest.approx(INTERVAL.weight(Pace(500, 500 * PER_STEP, 100_000)) or 0.0)


def test_who_is_twice_as_fast_weighs_twice_and_with_larger_batches_as_the_square() -> None:
    fast, large = Pace(200, 200 * PER_STEP, 50_000), Pace(50, 100 * PER_STEP, 200_000)
    assert INTERVAL.weight(fast) == pytest.approx(16 * PER_STEP**2)
    assert INTERVAL.weight(large) == pytest.approx(4 * (2 * PER_STEP) ** 2)


def test_what_is_not_told_is_taken_for_usual_and_what_no_machine_does_is_not_believed() -> None:
    assert INTERVAL.span(0) == 8 and replace(INTERVAL, median_us=None).span(50_000) == 8
    assert INTERVAL.weight(Pace(0, 0, 100_000)) is None
    assert INTERVAL.weight(Pace(0, 100, 100_000)) is None, "tokens without a step"
    assert INTERVAL.weight(Pace(5, 0, 100_000)) is None, "steps without a token"
    assert INTERVAL.span(1) == 8 * 100
    batch = BATCH_FACTOR * PER_STEP
    assert INTERVAL.weight(Pace(1, 2**50, 100_000)) == pytest.approx(8 * batch**2)
    assert replace(INTERVAL, tokens_per_step=0).weight(Pace(1, 2**20, 100_000)) == 8 * 2.0**40


# ---- in a syncer ---------------------------------------------------------------------------------------------------


class Thin(Syncing):
    """Three learners, of which some deliver."""

    us: dict[str, int]

    def train(self, ms: int) -> list[Effect]:
        """Everybody trains on and says so."""
        effects: list[Effect] = []
        for _ in range(ms // 100):
            effects += self.pass_time(100)
            for peer, step_us in self.us.items():
                step = self.now * 1000 // step_us
                effects += self.hear(replace(progress(step, step_us), tokens=PER_STEP * step), PeerId(peer))
        return effects

    def merge(self, *peers: PeerId) -> Merge:
        """The next merge of fragment 1, with these in it."""
        effects: list[Effect] = []
        for _ in range(100):
            effects += self.train(100)
            asked = next((each for each in said(effects, RoundOpen) if each.fragment == 1), None)
            if asked is not None:
                break
        assert asked is not None
        effects = []
        for peer in peers:
            first = self.core.ledger.merged_until.get((peer, FragmentId(1)), 0)
            made = contribution(peer, base=asked.base, fragment=asked.fragment, base_version=asked.version)
            made = replace(
                made,
                id=replace(made.id, last_step=first + 8),
                blob=replace(made.blob, digest=fake_digest(peer, first)),
                first_step=first,
                tokens=8 * PER_STEP,
                tokens_unmerged=8 * PER_STEP,
            )
            self.hear(made, peer)
            self.give(BlobArrived(made.blob))
            effects += self.give(ContributionChecked(made.id, True, "", 1.0))
        for _ in range(100):
            merges = [each for each in only(effects, Merge) if each.fragment == 1]
            if merges:
                return merges[0]
            effects = self.train(100)
        raise AssertionError("no round was closed")


def thin(us: dict[str, int] | None = None, **sync: object) -> Thin:
    rules: SyncSpec = replace(SYNC, **{"quorum": 1, "grace": False} | sync)  # type: ignore[arg-type]
    made = Thin.founding(rules, tokens_per_step=PER_STEP)
    assert isinstance(made, Thin)
    made.us = us or dict.fromkeys((ANN, BEN, CYD), 100_000)
    for peer in (ANN, BEN, CYD):
        made.join(peer)
    return made


def weights(it: Thin, merge: Merge) -> list[float]:
    (commit,) = [seal.entry for seal in only(it.merged(merge), Seal) if isinstance(seal.entry, Commit)]
    return [each.weight for each in commit.participants]


def test_a_merge_of_one_of_three_is_a_third_of_a_step_and_its_commit_says_so() -> None:
    it = thin()
    merge = it.merge(ANN)
    assert merge.portion == pytest.approx(1 / 3)
    assert weights(it, merge) == [pytest.approx(1 / 3)]


def test_missing_learners_count_by_their_pace() -> None:
    it = thin({ANN: 100_000, BEN: 50_000, CYD: 200_000})
    assert it.merge(ANN).portion == pytest.approx(1 / (1 + 2 + 1 / 2), rel=0.02)


def test_with_everybody_in_it_a_merge_is_whole() -> None:
    it = thin(grace=True)
    merge = it.merge(ANN, BEN, CYD)
    assert merge.portion == 1.0
    assert sum(weights(it, merge)) == pytest.approx(1.0)


def test_a_run_may_count_those_in_a_merge_as_everybody() -> None:
    it = thin(weigh_absent=False)
    merge = it.merge(ANN)
    assert (merge.portion, merge.inputs[0].weight) == (1.0, 8 * PER_STEP * PER_STEP)


def test_without_token_weights_learners_are_counted() -> None:
    it = thin({ANN: 100_000, BEN: 50_000, CYD: 200_000}, token_weights=False)
    assert it.merge(ANN).portion == pytest.approx(1 / 3)


def test_whoever_has_been_awaited_for_long_and_delivers_nothing_is_not_missed() -> None:
    it = thin(quorum=2)
    portions = []
    for _ in range(INTERVALS + 3):
        merge = it.merge(ANN, BEN)
        portions.append(merge.portion)
        it.merged(merge)
    assert portions[0] == pytest.approx(2 / 3) and portions[-1] == 1.0
