"""Every reason for which a contribution's claim is refused, and what it takes not to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import FragmentId, Version
from geo_diloco.protocol.admission import COUNT_MAX, Admission, admit, blob_size_max
from geo_diloco.protocol.messages import BlobRef, Contribution, ContributionId
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ANN, BEN, SYNC, ChainBuilder, contribution, participant


def chain_of(num_commits: int = 1) -> ChainBuilder:
    """ANN's steps (0, 8] are merged in version 1 of fragment 0."""
    chain = ChainBuilder.opened()
    chain.commit(0, participant(ANN, chain.events[0].digest, 0, 0, 8))
    for _ in range(num_commits - 1):
        chain.commit(0)
    return chain


def fresh(chain: ChainBuilder) -> Contribution:
    return contribution(base=chain.bases[0], base_version=chain.versions[0], first_step=8, last_step=16)


def judge(chain: ChainBuilder, claim: Contribution, held: Contribution | None = None) -> Admission:
    return admit(claim, ANN, ledger=chain.ledger(), held=held, sync=SYNC)


def test_work_on_the_current_version_is_fresh() -> None:
    chain = chain_of()
    assert judge(chain, fresh(chain)).verdict == "fresh"


def test_work_on_an_older_version_is_late_until_it_is_too_old() -> None:
    chain = chain_of()
    claim = fresh(chain)
    for behind in range(SYNC.staleness_max):
        assert judge(chain_of(1 + behind), claim).verdict == ("late" if behind else "fresh")
    judged = judge(chain_of(2 + SYNC.staleness_max), claim)
    assert judged == Admission("refused", "too_old: base is 3 versions behind, 2 allowed")


def test_twice_is_known_and_not_new() -> None:
    chain = chain_of()
    claim = fresh(chain)
    assert judge(chain, claim, held=claim) == Admission("known", "held already")


def test_what_a_commit_took_is_known() -> None:
    chain = chain_of()
    again = contribution(base=chain.events[0].digest, last_step=8)
    assert judge(chain, again) == Admission("known", "merged already")


def test_a_base_is_consumed_once_per_learner_and_fragment() -> None:
    chain = chain_of()
    second = contribution(base=chain.events[0].digest, first_step=8, last_step=9)
    assert judge(chain, second).reason.startswith("consumed")
    of_ben = replace(second, id=replace(second.id, peer=BEN))
    assert admit(of_ben, BEN, ledger=chain.ledger(), held=None, sync=SYNC).verdict == "late"
    elsewhere = contribution(base=chain.events[0].digest, fragment=1)
    assert judge(chain, elsewhere).verdict == "fresh"


def test_another_contribution_while_one_is_undecided_is_refused() -> None:
    chain = chain_of()
    claim = fresh(chain)
    other = replace(claim, id=replace(claim.id, last_step=17))
    assert judge(chain, other, held=claim).reason.startswith("undecided")
    same_id = replace(claim, blob=BlobRef(fake_digest("other bytes"), 50))
    assert judge(chain, same_id, held=claim).reason.startswith("undecided")


def test_steps_that_are_merged_already_overlap() -> None:
    chain = chain_of()
    assert judge(chain, replace(fresh(chain), first_step=7)).reason.startswith("overlap")


def test_a_base_that_the_chain_does_not_know_is_refused() -> None:
    chain = chain_of()
    claim = fresh(chain)
    forked = replace(claim, id=replace(claim.id, base=fake_digest("another branch")))
    assert judge(chain, forked).reason.startswith("unknown_base")


def test_a_base_under_another_version_number_is_a_lie() -> None:
    chain = chain_of()
    assert "base is version 1, not 0" in judge(chain, replace(fresh(chain), base_version=Version(0))).reason


def with_id(claim: Contribution, **changes: object) -> Contribution:
    return replace(claim, id=replace(claim.id, **changes))  # type: ignore[arg-type]


LIES: dict[str, Callable[[Contribution], Contribution]] = {
    "another peer": lambda c: with_id(c, peer=BEN),
    "no such fragment": lambda c: with_id(c, fragment=FragmentId(2)),
    "a negative fragment": lambda c: with_id(c, fragment=FragmentId(-1)),
    "an empty range": lambda c: replace(c, first_step=16),
    "a negative first step": lambda c: replace(c, first_step=-1),
    "no steps": lambda c: replace(c, steps=0),
    "more steps than it ever made": lambda c: replace(c, steps=17),
    "no tokens": lambda c: replace(c, tokens=0),
    "more fresh tokens than tokens": lambda c: replace(c, tokens=101),
    "tokens beyond counting": lambda c: replace(c, tokens=10**400, tokens_unmerged=10**400),
    "steps beyond counting": lambda c: with_id(c, last_step=COUNT_MAX + 1),
    "a cursor beyond counting": lambda c: replace(c, cursor=-(10**30)),
    "an empty blob": lambda c: replace(c, blob=BlobRef(c.blob.digest, 0)),
    "a blob larger than any frame": lambda c: replace(c, blob=BlobRef(c.blob.digest, blob_size_max(100) + 1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_malformed_whatever_is_held(lie: str) -> None:
    chain = chain_of()
    claim = LIES[lie](fresh(chain))
    assert judge(chain, claim).reason.startswith("malformed"), judge(chain, claim)
    assert judge(chain, claim, held=claim).verdict == "refused"


def test_no_honest_frame_is_too_large() -> None:
    for num_elements in (1, 64, 256, 10**6):
        assert blob_size_max(num_elements) > 4 * num_elements + 1_000


@given(st.data())
def test_nothing_admitted_has_a_weight_that_is_not_finite(data: st.DataObject) -> None:
    chain = chain_of()
    count = st.sampled_from((0, 1, 8, 16, COUNT_MAX, COUNT_MAX + 1, 10**400))
    claim = replace(
        fresh(chain),
        id=ContributionId(ANN, FragmentId(0), chain.bases[0], data.draw(count)),
        steps=data.draw(count),
        tokens=data.draw(count),
        tokens_unmerged=data.draw(count),
    )
    if judge(chain, claim).verdict in ("fresh", "late"):
        assert 0 < claim.tokens * claim.tokens / claim.steps < float("inf")
