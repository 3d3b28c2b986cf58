"""Momentum has a limit where steps point the same way: the same on every peer, and no chain with more of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import Digest, OuterSpec, Version
from geo_diloco.protocol.amendments import Changes, rules_after
from geo_diloco.protocol.effects import Merge, Seal
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Commit, FragmentHead
from geo_diloco.protocol.momentum import RISE, guarded, mu_max
from tests.support.chains import ANN, SYNC, ChainBuilder, contribution
from tests.support.single import Syncing, merged, only

MUCH = OuterSpec(eta=0.7, mu=0.9, gain_max=2.0)
NOTHING = Digest("")


def head(mu: float | None = 0.9, rho: float | None = None) -> FragmentHead:
    return FragmentHead(version=Version(1), base=NOTHING, state_digest=NOTHING, momentum_digest=NOTHING, mu=mu, rho=rho)


@pytest.mark.parametrize(
    ("gain_max", "mu", "rho", "expected"),
    [
        (0.0, 0.9, 1.0, 1.0),
        (2.0, None, None, 1.0),
        (2.0, 0.9, None, 0.95),
        (2.0, 0.9, -0.5, 0.95),
        (2.0, 0.9, 0.0, 0.95),
        (2.0, 0.9, 1.0, 0.5),
        (2.0, 0.9, 0.8, 0.625),
        (2.0, 0.2, 0.8, 0.25),
        (4.0, 0.9, 1.0, 0.75),
        (1.0, 0.9, 0.01, 0.0),
        (2.0, 0.9, 1e-320, 0.95),
    ],
)
def test_what_a_commit_leaves_to_the_next(
    gain_max: float, mu: float | None, rho: float | None, expected: float
) -> None:
    assert mu_max(gain_max, head(mu, rho)) == pytest.approx(expected)


def test_steps_that_point_the_same_way_never_add_up_to_more_than_the_limit() -> None:
    for rho in (0.5, 0.7, 0.99, 1.0):
        mu = guarded(MUCH, head(rho=rho)).mu
        assert 1 / (1 - mu * rho) <= 2.0 * (1 + 1e-12)


def test_the_owners_mu_is_the_ceiling() -> None:
    assert guarded(replace(MUCH, mu=0.3), head(mu=0.9, rho=1.0)) == replace(MUCH, mu=0.3)
    assert guarded(replace(MUCH, mu=0.3), head(mu=0.1, rho=0.1)).mu == pytest.approx(0.1 + RISE)


# ---- on a syncer, and on whoever follows


def commit_of(it: Syncing, version: int, rho: float | None) -> Commit:
    """The next one of fragment 1, whose update has that cosine with the one before."""
    asked = it.asked()
    claim = contribution(base=asked.base, fragment=1, base_version=version - 1)
    last = it.core.ledger.merged_until.get((ANN, asked.fragment), 0)
    claim = replace(claim, id=replace(claim.id, last_step=last + 8), first_step=last)
    effects = it.hand_in(claim)
    effects += [] if only(effects, Merge) else it.pass_time(10_000)
    (merge,) = only(effects, Merge)
    (seal,) = only(it.give(replace(merged(merge), rho=rho)), Seal)
    assert isinstance(seal.entry, Commit) and (merge.eta, merge.mu) == (seal.entry.eta, seal.entry.mu)
    return seal.entry


def test_a_syncer_lowers_momentum_at_once_and_raises_it_bit_by_bit() -> None:
    it = Syncing.founding(replace(SYNC, quorum=1), outer=MUCH)
    it.join()
    rhos = (None, 1.0, 0.2, 0.2)
    assert [commit_of(it, 1 + n, rho).mu for n, rho in enumerate(rhos)] == pytest.approx([0.9, 0.9, 0.5, 0.55])


def test_without_a_limit_rho_changes_nothing() -> None:
    it = Syncing.founding(replace(SYNC, quorum=1), outer=replace(MUCH, gain_max=0.0))
    it.join()
    assert [commit_of(it, 1 + n, 1.0).mu for n in range(3)] == [0.9] * 3


def with_commit(chain: ChainBuilder, mu: float, rho: float | None) -> Commit:
    return replace(chain.commit_entry(0), mu=mu, rho=rho)


@pytest.mark.parametrize("joins", [False, True], ids=["from the first entry", "from a snapshot"])
def test_a_commit_with_more_momentum_is_on_nobodys_chain(joins: bool) -> None:
    chain = ChainBuilder.opened()
    chain.add(with_commit(chain, 0.9, 0.8))
    ledger = Ledger(gain_max=2.0)
    if joins:
        ledger.load(chain.snapshot())
    else:
        for event in chain.events:
            assert ledger.why_not(event.entry) is None
            ledger.apply(event.entry, event.digest)
    at_limit = mu_max(2.0, ledger.heads[0])
    assert at_limit == pytest.approx(0.625)
    assert ledger.why_not(with_commit(chain, at_limit, 0.9)) is None
    assert "mu 0.9 after rho 0.8: 0.625 is allowed" in (ledger.why_not(with_commit(chain, 0.9, 0.1)) or "")
    assert chain.ledger().why_not(with_commit(chain, 0.9, 0.1)) is None, "a run without a limit"
    assert ledger.copy().gain_max == 2.0


def test_an_amended_mu_does_not_change_the_limit() -> None:
    it = Syncing.founding(SYNC, outer=MUCH)
    rules = rules_after(it.core.rules, Changes(mu=0.3))
    assert rules.outer == replace(MUCH, mu=0.3)
