"""Are the checkers worth anything? Break the core on purpose, one rule at a time: a simulated run must go red.

The mutants of elections alone are with the tests of the election.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from geo_diloco.protocol import amending as amending_module
from geo_diloco.protocol import ledger as ledger_module
from geo_diloco.protocol import open_rounds as open_rounds_module
from geo_diloco.protocol import rounds as rounds_module
from geo_diloco.protocol import serving as serving_module
from geo_diloco.protocol.accounts import Account
from geo_diloco.protocol.adoptions import Adoptions
from geo_diloco.protocol.amending import Amending
from geo_diloco.protocol.chain import Chain
from geo_diloco.protocol.effects import Adopt, Reset, SeekSyncer
from geo_diloco.protocol.election import validity as validity_module
from geo_diloco.protocol.fold import Fold
from geo_diloco.protocol.holdings import Holdings
from geo_diloco.protocol.learner import Learner
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import Member
from geo_diloco.protocol.open_rounds import OpenRounds
from geo_diloco.protocol.peer import Peer
from geo_diloco.protocol.pruning import Pruning
from geo_diloco.protocol.quorum import Decision, decide
from geo_diloco.protocol.resume_point import ResumePoint
from geo_diloco.protocol.serving import Serving
from geo_diloco.protocol.syncer import Syncer
from geo_diloco.sim.drawn import drawn_plan
from geo_diloco.sim.run import Violation, simulate
from geo_diloco.sim.scenarios import play, scenarios
from tests.support.plans import fickle_plan, loss_plan, stormy_plan

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def closes_below_quorum(patch: Patch) -> None:
    def hasty(facts: Any, sync: Any) -> Decision:
        return Decision(True, "why wait") if facts.fresh + facts.late >= 1 else decide(facts, sync)

    patch.setattr(open_rounds_module, "decide", hasty)


def counts_late_work_towards_the_quorum(patch: Patch) -> None:
    def lenient(facts: Any, sync: Any) -> Decision:
        quorum_at = facts.now if facts.fresh + facts.late >= sync.quorum else None
        return decide(replace(facts, fresh=facts.fresh + facts.late, late=0, quorum_at=quorum_at), sync)

    patch.setattr(open_rounds_module, "decide", lenient)


def merges_what_is_not_here_yet(patch: Patch) -> None:
    honest = rounds_module.close_round

    def greedy(round_: Any, held: Any, *args: Any, **kwargs: Any) -> Any:
        for item in held.values():
            item.arrived = item.ready = True
        return honest(round_, held, *args, **kwargs)

    patch.setattr(open_rounds_module, "close_round", greedy)


def keeps_late_work_for_ever(patch: Patch) -> None:
    patch.setattr(Holdings, "keep_late", lambda self, entry: [])


def merges_again_what_a_commit_took(patch: Patch) -> None:
    honest = Syncer._committed

    def forgetful(self: Any, entry: Any, now: Any) -> Any:
        taken = self._rounds.get(entry.fragment).closing.taken
        effects = honest(self, entry, now)
        for item in taken:
            claim = item.contribution.id
            self._holdings._held[claim.fragment][claim.peer] = item
            self._holdings._by_blob.setdefault(item.contribution.blob, []).append(item)
        return effects

    patch.setattr(Syncer, "_committed", forgetful)


def carries_what_an_earlier_process_handed_in(patch: Patch) -> None:
    honest = Learner.reached

    def careless(self: Any, step: Any) -> Any:
        return [
            Adopt(each.fragment, each.version, None, 1.0) if isinstance(each, Reset) else each
            for each in honest(self, step)
        ]

    patch.setattr(Learner, "reached", careless)


def carries_what_was_merged(patch: Patch) -> None:
    honest = Learner.reached

    def careless(self: Any, step: Any) -> Any:
        return [replace(each, participant=None) if isinstance(each, Adopt) else each for each in honest(self, step)]

    patch.setattr(Learner, "reached", careless)


def loses_refused_tokens(patch: Patch) -> None:
    def refuse(self: Any) -> Any:
        self.undecided = None
        return []

    patch.setattr(Account, "refuse", refuse)


def keeps_the_shrunk_part_secret(patch: Patch) -> None:
    honest = Account.adopt

    def adopt(self: Any, *args: Any) -> Any:
        honest(self, *args)
        return []

    patch.setattr(Account, "adopt", adopt)


def saves_books_without_the_unencoded_sample(patch: Patch) -> None:
    honest = Account.saved

    def saved(self: Any, tokens: int) -> Any:
        account = honest(self, tokens)
        return replace(account, unmerged=self.unmerged)

    patch.setattr(Account, "saved", saved)


def resumes_after_what_was_never_adopted(patch: Patch) -> None:
    honest = ResumePoint.snapshot

    def eager(self: Any, heads: Any) -> Any:
        return replace(honest(self, heads), seq=self._ledger.seq, head_digest=self._ledger.head_digest)

    patch.setattr(ResumePoint, "snapshot", eager)


def applies_updates_as_they_come(patch: Patch) -> None:
    honest = Fold._apply_next

    def hasty(self: Any, pipeline: Any) -> Any:
        if pipeline.commits and pipeline.fetched:
            pipeline.commits.rotate(-next(i for i, c in enumerate(pipeline.commits) if c.version in pipeline.fetched))
        return honest(self, pipeline)

    patch.setattr(Fold, "_apply_next", hasty)


def keeps_an_upload_slot_for_a_dead_upload(patch: Patch) -> None:
    honest = Learner.adopted

    def adopted(self: Any, event: Any) -> Any:
        under_way = self._uploads.under_way
        effects = honest(self, event)
        self._uploads.under_way = under_way
        return effects

    patch.setattr(Learner, "adopted", adopted)


def never_samples_again_after_a_refusal(patch: Patch) -> None:
    honest = Learner.decision

    def decision(self: Any, message: Any) -> Any:
        effects = honest(self, message)
        self._again_at = {fragment: 10**9 for fragment in self._again_at}
        return effects

    patch.setattr(Learner, "decision", decision)


def does_not_ask_those_who_come_back(patch: Patch) -> None:
    patch.setattr(OpenRounds, "asking", lambda self: [])


def waits_for_all_who_were_ever_here(patch: Patch) -> None:
    patch.setattr(Member, "live", lambda self, now: self.trains)
    patch.setattr(
        open_rounds_module, "decide", lambda facts, sync: Decision(facts.missing == 0 and facts.fresh > 0, "all")
    )


# ---- what only more than one syncer shows


def folds_what_is_not_durable(patch: Patch) -> None:
    honest = Chain.arrived

    def arrived(self: Any, event: Any, now: Any) -> Any:
        outcome = honest(self, event, now)
        return [*outcome, *self.durable(event.entry.header.seq, event.digest)]

    patch.setattr(Chain, "arrived", arrived)


def serves_before_its_outer_state_is_there(patch: Patch) -> None:
    patch.setattr(Fold, "is_level", True)


def keeps_what_a_lost_term_made(patch: Patch) -> None:
    patch.setattr(Fold, "revert", lambda self, versions: [])


def takes_what_it_made_for_what_became_durable(patch: Patch) -> None:
    honest = Fold.durable

    def durable(self: Any, commit: Any, digest: Any, *, stored: bool) -> Any:
        ahead = self._pipelines[commit.fragment].ahead
        if ahead and ahead[0][0] == commit.version:
            ahead[0] = (commit.version, digest)
        return honest(self, commit, digest, stored=stored)

    patch.setattr(Fold, "durable", durable)
    patch.setattr(Fold, "revert", lambda self, versions: [])


def forgets_what_earlier_terms_merged(patch: Patch) -> None:
    honest = Ledger.copy

    def copy(self: Any) -> Any:
        other = honest(self)
        other.merged_until, other.consumed = {}, {}
        return other

    patch.setattr(Ledger, "copy", copy)


def counts_a_seal_that_came_too_late(patch: Patch) -> None:
    honest = Serving.sealed

    def sealed(self: Any, event: Any, now: Any) -> Any:
        entry = self.being_sealed
        if entry is not None and (self.syncer is None or self.syncer.term != event.term):
            self._chain.ledger.apply(entry, event.digest)
        return honest(self, event, now)

    patch.setattr(Serving, "sealed", sealed)


def looks_for_no_other_syncer(patch: Patch) -> None:
    honest = Peer.handle

    def handle(self: Any, event: Any, now: Any) -> Any:
        return [each for each in honest(self, event, now) if not isinstance(each, SeekSyncer)]

    patch.setattr(Peer, "handle", handle)


def forgets_amendments_in_the_next_term(patch: Patch) -> None:
    patch.setattr(serving_module, "rules_at", lambda rules, amended: rules)


def joins_without_what_was_amended(patch: Patch) -> None:
    honest = Ledger.load

    def load(self: Any, snapshot: Any) -> None:
        honest(self, replace(snapshot, amended=()))

    patch.setattr(Ledger, "load", load)


def counts_no_amendments(patch: Patch) -> None:
    """Whatever is ordered is the next one."""
    patch.setattr(amending_module, "newest_number", lambda amended: 0)
    patch.setattr(ledger_module, "newest_number", lambda amended: 0)
    patch.setattr(validity_module, "_why_not_amendment", lambda entry, before, owner: None)


def goes_on_by_the_rules_before_the_amendment(patch: Patch) -> None:
    patch.setattr(Amending, "sealed", lambda self, entry: self.rules)


def prunes_what_no_snapshot_contains(patch: Patch) -> None:
    patch.setattr(Pruning, "_may_go", lambda self, updates: bool(updates))


def prunes_what_those_a_little_behind_want(patch: Patch) -> None:
    patch.setattr(Pruning, "_may_go", lambda self, updates: bool(updates) and (self.floor or -1) >= updates[0].seq)


def keeps_what_a_reform_left_behind(patch: Patch) -> None:
    patch.setattr(Chain, "_rewind", lambda self, to: [])


def rewinds_the_ledger_but_not_the_state(patch: Patch) -> None:
    patch.setattr(Fold, "rewind", lambda self, held, heads: [])


def forgets_that_its_work_was_abandoned(patch: Patch) -> None:
    patch.setattr(Adoptions, "_abandon", lambda self, account, merged: [])


FOUNDER_ALONE: list[tuple[Mutation, str]] = [
    (closes_below_quorum, "fresh of|participants"),
    (counts_late_work_towards_the_quorum, "fresh of"),
    (merges_what_is_not_here_yet, "bytes that are not here"),
    (keeps_late_work_for_ever, "too old"),
    (merges_again_what_a_commit_took, "not here|merged"),
    (carries_what_an_earlier_process_handed_in, "merged"),
    (carries_what_was_merged, "merged|is not in"),
    (loses_refused_tokens, "trained"),
    (keeps_the_shrunk_part_secret, "trained"),
    (saves_books_without_the_unencoded_sample, "trained"),
    (resumes_after_what_was_never_adopted, "does not fit|another|trained|not live|can't be folded"),
    (applies_updates_as_they_come, "does not fit"),
    (keeps_an_upload_slot_for_a_dead_upload, "not live|never"),
    (never_samples_again_after_a_refusal, "not live|never"),
    (does_not_ask_those_who_come_back, "not live|never"),
    (waits_for_all_who_were_ever_here, "not live|never"),
]
SWARM: list[tuple[Mutation, str]] = [
    (folds_what_is_not_durable, "durable|folded another"),
    (serves_before_its_outer_state_is_there, "nobody can commit|not of one moment|does not fit"),
    (keeps_what_a_lost_term_made, "nobody can commit|not of one moment|does not fit|not live|another Theta"),
    (
        takes_what_it_made_for_what_became_durable,
        "nobody can commit|not of one moment|does not fit|another Theta|not live",
    ),
    (forgets_what_earlier_terms_merged, "were merged|would be merged twice|merged .* times|is not in"),
    (counts_a_seal_that_came_too_late, "folded another|ALARM|durable|without a majority"),
    (looks_for_no_other_syncer, "not live|never"),
    (prunes_what_no_snapshot_contains, "lets go of|versions old"),
    (prunes_what_those_a_little_behind_want, "versions old"),
]


AMENDED: list[tuple[Mutation, str]] = [
    (forgets_amendments_in_the_next_term, "fresh of|participants|in force were"),
    (joins_without_what_was_amended, "goes by|can't be folded"),
    (counts_no_amendments, "amendment 1 after 1|amendments, expected 2"),
    (goes_on_by_the_rules_before_the_amendment, "in force were|fresh of|participants"),
]


REFORMED: list[tuple[Mutation, str]] = [
    (keeps_what_a_reform_left_behind, "never ended|not live|folded another|is at|ALARM|never heard"),
    (rewinds_the_ledger_but_not_the_state, "does not fit|another Theta|not durable|not of one moment|went from"),
    (forgets_that_its_work_was_abandoned, "merged|trained"),
]


def names(mutations: list[tuple[Mutation, str]]) -> list[str]:
    return [each[0].__name__ for each in mutations]


def takes_all_the_momentum_there_is(patch: Patch) -> None:
    patch.setattr(open_rounds_module, "guarded", lambda outer, head: outer)


def test_a_core_with_too_much_momentum_is_found_out(monkeypatch: Patch) -> None:
    takes_all_the_momentum_there_is(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        for seed in range(24):
            simulate(drawn_plan(seed))
    assert re.search("mu up to|is allowed", what_broke(caught.value)), what_broke(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("mutate", "complaint"), FOUNDER_ALONE, ids=names(FOUNDER_ALONE))
def test_a_core_that_breaks_a_rule_is_found_out(mutate: Mutation, complaint: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        simulate(loss_plan())
        for seed in range(20):
            simulate(stormy_plan(seed))
    assert re.search(complaint, what_broke(caught.value)), what_broke(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("mutate", "complaint"), SWARM, ids=names(SWARM))
def test_a_core_that_fails_when_another_serves_is_found_out(
    mutate: Mutation, complaint: str, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        for seed in range(24):
            simulate(fickle_plan(seed))
            simulate(drawn_plan(seed))
    assert re.search(complaint, what_broke(caught.value)), what_broke(caught.value)


@pytest.mark.parametrize(("mutate", "complaint"), AMENDED, ids=names(AMENDED))
def test_a_core_that_does_not_go_by_the_owners_word_is_found_out(
    mutate: Mutation, complaint: str, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        play(scenarios()["amended"], seed=0)
    assert re.search(complaint, what_broke(caught.value)), what_broke(caught.value)


@pytest.mark.parametrize(("mutate", "complaint"), REFORMED, ids=names(REFORMED))
def test_a_core_that_does_not_leave_the_old_branch_is_found_out(
    mutate: Mutation, complaint: str, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        play(scenarios()["reformed-on-an-old-head"], seed=0)
    assert re.search(complaint, what_broke(caught.value)), what_broke(caught.value)


def what_broke(error: AssertionError) -> str:
    """Without the film, which mentions everything."""
    return error.what if isinstance(error, Violation) else str(error)
