"""What may be appended to the chain, and what a peer knows after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import BranchId, FragmentId, Term, Version
from geo_diloco.protocol.ledger import BASES_KEPT, Ledger, id_of
from geo_diloco.protocol.messages import Commit, Entry
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ANN, BEN, FOUNDER_SEAT, ChainBuilder, participant, seat
from tests.support.single import Learning, Syncing

P0 = FragmentId(0)


def refusal(chain: ChainBuilder, entry: Entry) -> str:
    return chain.ledger().why_not(entry) or "taken"


def test_a_chain_folds_into_heads_tokens_and_ranges() -> None:
    chain = ChainBuilder.opened()
    found = chain.events[0].digest
    chain.commit(0, participant(ANN, found, 0, 0, 8, tokens=400))
    chain.commit(1, participant(ANN, found, 0, 0, 9, tokens=100), participant(BEN, found, 0, 0, 4, tokens=300))
    ledger = chain.ledger()
    assert [head.version for head in ledger.heads] == [1, 1]
    assert ledger.heads[1].base == chain.events[3].digest
    assert ledger.tokens == [400, 400]
    assert ledger.merged_until == {(ANN, 0): 8, (ANN, 1): 9, (BEN, 1): 4}
    assert ledger.tokens_total() == 400
    assert ledger.tokens_total(FragmentId(1), more=4) == (100 * 400 + 300 * 404) // 400
    assert (ledger.num_commits, ledger.seq, ledger.term) == (2, 3, 1)


def test_entries_are_taken_in_order_only() -> None:
    chain = ChainBuilder.opened()
    ledger = ChainBuilder.opened().ledger()
    chain.commit(0)
    later = chain.commit(0)
    assert "does not follow" in (ledger.why_not(later.entry) or "")
    assert "does not follow" in (ledger.why_not(chain.events[0].entry) or "")


def test_a_fork_is_told_by_prev() -> None:
    chain = ChainBuilder.opened()
    entry = chain.commit_entry(0)
    forked = replace(entry, header=replace(entry.header, prev=fake_digest("elsewhere")))
    assert "another chain" in refusal(chain, forked)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"branch": BranchId("elsewhere")}, "branch"),
        ({"term": Term(2)}, "was not opened"),
        ({"term": Term(0)}, "was not opened"),
    ],
)
def test_a_commit_of_another_branch_or_term_is_refused(change: dict[str, object], reason: str) -> None:
    chain = ChainBuilder.opened()
    entry = chain.commit_entry(0)
    assert reason in refusal(chain, replace(entry, header=replace(entry.header, **change)))  # type: ignore[arg-type]


def test_a_term_opens_only_above_the_last() -> None:
    chain = ChainBuilder.opened()
    ledger = chain.ledger()
    assert "not above" in (ledger.why_not(ChainBuilder.opened().open(1).entry) or "")
    assert ledger.why_not(chain.open(2).entry) is None


def test_found_is_first_and_only_first() -> None:
    chain = ChainBuilder.opened()
    second = ChainBuilder()
    found = second.found().entry
    header = replace(found.header, seq=chain.header().seq, prev=chain.header().prev, branch=chain.header().branch)
    assert "found is the first" in refusal(chain, replace(found, header=header))
    assert "found is the first" in (Ledger().why_not(ChainBuilder().open().entry) or "")


@pytest.mark.parametrize(("fragment", "reason"), [(2, "fragment 2 of 2"), (-1, "fragment -1 of 2")])
def test_a_commit_of_no_fragment_is_refused(fragment: int, reason: str) -> None:
    chain = ChainBuilder.opened()
    assert reason in refusal(chain, replace(chain.commit_entry(0), fragment=FragmentId(fragment)))


@pytest.mark.parametrize("version", [0, 2])
def test_a_version_must_be_the_next(version: int) -> None:
    chain = ChainBuilder.opened()
    assert "does not follow" in refusal(chain, replace(chain.commit_entry(0), version=Version(version)))


def test_inner_steps_are_not_merged_twice() -> None:
    chain = ChainBuilder.opened()
    found = chain.events[0].digest
    chain.commit(0, participant(ANN, found, 0, 0, 8))
    overlapping = chain.commit_entry(0, participant(ANN, found, 0, 7, 12))
    assert "merged twice" in refusal(chain, overlapping)
    assert refusal(chain, chain.commit_entry(0, participant(ANN, found, 0, 8, 12))) == "taken"
    assert refusal(chain, chain.commit_entry(1, participant(ANN, found, 0, 7, 12))) == "taken"


def test_nothing_follows_the_end_but_another_term() -> None:
    chain = ChainBuilder.opened()
    chain.finished()
    assert refusal(chain, chain.commit_entry(0)) == "the run is finished"
    chain.open(term=2)
    ledger = chain.ledger()
    assert (ledger.term, ledger.finished) == (2, "enough")
    assert refusal(chain, chain.commit_entry(0)) == "the run is finished"


def test_old_bases_and_what_was_consumed_from_them_are_forgotten() -> None:
    chain = ChainBuilder.opened()
    found = chain.events[0].digest
    chain.commit(0, participant(ANN, found, 0, 0, 8))
    for _ in range(BASES_KEPT):
        chain.commit(0)
    ledger = chain.ledger()
    assert found not in ledger.bases[0] and len(ledger.bases[0]) == BASES_KEPT
    assert not ledger.consumed
    assert ledger.merged_until[ANN, FragmentId(0)] == 8


def resume(chain: ChainBuilder, seq: int, ahead: dict[int, int]) -> Ledger:
    """A ledger loaded at `seq` whose fragments in `ahead` already stand at a later version."""
    early = ChainBuilder(chain.num_elements)
    early.events = chain.events[: seq + 1]
    snapshot = early.snapshot()
    full = chain.ledger()
    heads = list(snapshot.heads)
    for p, version in ahead.items():
        commit = next(
            event
            for event in chain.events
            if isinstance(event.entry, Commit) and (event.entry.fragment, event.entry.version) == (p, version)
        )
        heads[p] = replace(full.heads[p], version=Version(version), base=commit.digest)
    ledger = Ledger()
    ledger.load(replace(snapshot, heads=tuple(heads)))
    return ledger


def test_commits_that_a_fuzzy_snapshot_contains_change_books_but_not_heads() -> None:
    chain = ChainBuilder.opened()
    found = chain.events[0].digest
    chain.commit(0)
    chain.commit(1)
    chain.commit(0, participant(ANN, found, 0, 0, 8, tokens=70))
    chain.commit(0)
    ledger = resume(chain, seq=2, ahead={0: 2})
    head = ledger.heads[0]
    for event in chain.events[3:5]:
        assert ledger.why_not(event.entry) is None
        ledger.apply(event.entry, event.digest)
        assert ledger.heads[0] == head
    assert ledger.tokens[0] == 70 and ledger.merged_until[ANN, FragmentId(0)] == 8
    ledger.apply(chain.events[5].entry, chain.events[5].digest)
    whole = chain.ledger()
    assert (ledger.heads, ledger.tokens, ledger.num_commits) == (whole.heads, whole.tokens, whole.num_commits)
    assert ledger.head_digest == whole.head_digest


def test_a_fuzzy_snapshot_still_wants_the_next_version() -> None:
    chain = ChainBuilder.opened()
    chain.commit(0)
    chain.commit(0)
    ledger = resume(chain, seq=2, ahead={})
    entry = chain.events[3].entry
    assert isinstance(entry, Commit)
    skipping = replace(entry, version=Version(3))
    assert "does not follow" in (ledger.why_not(skipping) or "")


def test_the_branch_is_named_by_the_digest_of_found() -> None:
    chain = ChainBuilder.opened()
    assert str(chain.ledger().branch) == chain.events[0].digest
    assert str(chain.events[1].entry.header.branch) == chain.events[0].digest


def test_a_ledger_names_who_serves_and_who_is_elector() -> None:
    chain = ChainBuilder.opened()
    roster = (FOUNDER_SEAT, seat(ANN), seat(BEN))
    chain.change_roster(*roster)
    chain.open(term=4, syncer=ANN)
    ledger = chain.ledger()
    assert ledger.opened is not None
    assert (ledger.opened.syncer, ledger.term) == (ANN, 4)
    assert (ledger.roster, ledger.roster_seq) == (roster, 2)


def test_what_a_copy_takes_the_first_does_not_have() -> None:
    chain = ChainBuilder.opened()
    ledger = chain.ledger()
    ahead = ledger.copy()
    commit = chain.commit(0, participant(ANN, chain.bases[0], 0, 0, 8))
    ahead.apply(commit.entry, commit.digest)
    assert ahead.seq == 2 and ahead.merged_until
    assert (ledger.seq, ledger.heads[0].version, ledger.merged_until, ledger.tokens) == (1, 0, {}, [0, 0])
    assert list(ledger.bases[0].values()) == [0] and not ledger.lengths


def test_what_a_copy_consumes_of_a_known_base_the_first_does_not_consume() -> None:
    chain = ChainBuilder.opened()
    found = chain.events[0].digest
    ann, ben = participant(ANN, found, 0, 0, 8), participant(BEN, found, 0, 0, 8)
    chain.commit(0, ann)
    ledger = chain.ledger()
    ahead = ledger.copy()
    commit = chain.commit(0, ben)
    ahead.apply(commit.entry, commit.digest)
    assert ahead.is_consumed(id_of(ben, P0)) and ahead.is_consumed(id_of(ann, P0))
    assert ledger.is_consumed(id_of(ann, P0)) and ledger.is_consumed(id_of(ben, P0)) is None


def test_other_work_on_a_consumed_base_is_told_apart() -> None:
    chain = ChainBuilder.opened()
    merged = participant(ANN, chain.events[0].digest, 0, 0, 8)
    chain.commit(0, merged)
    ledger = chain.ledger()
    assert ledger.is_consumed(id_of(merged, P0)) is True
    assert ledger.is_consumed(replace(id_of(merged, P0), last_step=16)) is False
    assert ledger.is_consumed(replace(id_of(merged, P0), fragment=FragmentId(1))) is None


def test_who_will_never_serve_remembers_its_own_merged_work_alone() -> None:
    chain = ChainBuilder.opened()
    found = chain.events[0].digest
    ann, ben = participant(ANN, found, 0, 0, 8, tokens=400), participant(BEN, found, 0, 0, 4, tokens=300)
    chain.commit(0, ann, ben)
    ledger = Ledger(only=BEN)
    for event in chain.events:
        assert ledger.why_not(event.entry) is None
        ledger.apply(event.entry, event.digest)
    assert ledger.is_consumed(id_of(ben, P0)) and ledger.is_consumed(id_of(ann, P0)) is None
    assert ledger.merged_until == {(BEN, 0): 4}
    assert (ledger.tokens, ledger.copy().only) == ([700, 0], BEN), "what all count together it counts, too"


def test_a_peer_that_may_serve_remembers_everybody_and_a_learner_itself() -> None:
    assert Syncing.founding().core.ledger.only is None
    assert Learning(ChainBuilder.opened().snapshot(), peer=BEN).core.ledger.only == BEN
