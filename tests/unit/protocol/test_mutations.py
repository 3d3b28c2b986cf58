"""Are the checkers worth anything? Break the core on purpose, one rule at a time: a simulated run must go red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from geo_diloco.protocol import rounds as rounds_module
from geo_diloco.protocol import syncer as syncer_module
from geo_diloco.protocol.accounts import Account
from geo_diloco.protocol.effects import Adopt, Reset
from geo_diloco.protocol.follow import Follower
from geo_diloco.protocol.holdings import Holdings
from geo_diloco.protocol.learner import Learner
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import Membership
from geo_diloco.protocol.quorum import Decision, decide
from geo_diloco.protocol.syncer import Syncer
from tests.support.plans import loss_plan, stormy_plan
from tests.support.run import simulate

Patch = pytest.MonkeyPatch


def closes_below_quorum(patch: Patch) -> None:
    def hasty(facts: Any, sync: Any) -> Decision:
        return Decision(True, "why wait") if facts.fresh + facts.late >= 1 else decide(facts, sync)

    patch.setattr(syncer_module, "decide", hasty)


def counts_late_work_towards_the_quorum(patch: Patch) -> None:
    def lenient(facts: Any, sync: Any) -> Decision:
        quorum_at = facts.now if facts.fresh + facts.late >= sync.quorum else None
        return decide(replace(facts, fresh=facts.fresh + facts.late, late=0, quorum_at=quorum_at), sync)

    patch.setattr(syncer_module, "decide", lenient)


def merges_what_is_not_here_yet(patch: Patch) -> None:
    honest = rounds_module.close_round

    def greedy(round_: Any, held: Any, *args: Any, **kwargs: Any) -> Any:
        for item in held.values():
            item.arrived = item.ready = True
        return honest(round_, held, *args, **kwargs)

    patch.setattr(syncer_module, "close_round", greedy)


def keeps_late_work_for_ever(patch: Patch) -> None:
    patch.setattr(Holdings, "keep_late", lambda self, entry: [])


def merges_again_what_a_commit_took(patch: Patch) -> None:
    honest = Syncer._committed

    def forgetful(self: Any, entry: Any, now: Any) -> Any:
        taken = self._rounds[entry.fragment].closing.taken
        effects = honest(self, entry, now)
        for item in taken:
            self._holdings._held[entry.fragment][item.contribution.id.peer] = item
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
    honest = Learner._resume_at

    def eager(self: Any) -> Any:
        return replace(honest(self), seq=self._ledger.seq, head_digest=self._ledger.head_digest)

    patch.setattr(Learner, "_resume_at", eager)


def applies_updates_as_they_come(patch: Patch) -> None:
    honest = Follower._apply_next

    def hasty(self: Any, pipeline: Any) -> Any:
        if pipeline.commits and pipeline.fetched:
            pipeline.commits.rotate(-next(i for i, c in enumerate(pipeline.commits) if c.version in pipeline.fetched))
        return honest(self, pipeline)

    patch.setattr(Follower, "_apply_next", hasty)


def serves_a_term_twice(patch: Patch) -> None:
    patch.setattr(Ledger, "why_not", lambda self, entry, signer: None)
    honest = Syncer.handle

    def handle(self: Any, event: Any, now: Any) -> Any:
        effects = honest(self, event, now)
        drafts = self._sealing._drafts
        for _ in range(len(drafts)):
            term, draft = drafts.popleft()
            drafts.append((min(1, term), draft))
        return effects

    patch.setattr(Syncer, "handle", handle)


def keeps_an_upload_slot_for_a_dead_upload(patch: Patch) -> None:
    honest = Learner._book

    def book(self: Any, *args: Any) -> Any:
        uploading = self._uploading
        effects = honest(self, *args)
        self._uploading = uploading
        return effects

    patch.setattr(Learner, "_book", book)


def never_samples_again_after_a_refusal(patch: Patch) -> None:
    honest = Learner.decision

    def decision(self: Any, message: Any) -> Any:
        effects = honest(self, message)
        self._again_at = {fragment: 10**9 for fragment in self._again_at}
        return effects

    patch.setattr(Learner, "decision", decision)


def does_not_ask_those_who_come_back(patch: Patch) -> None:
    honest = Syncer._hello

    def hello(self: Any, *args: Any) -> Any:
        rounds, self._rounds = self._rounds, {}
        effects = honest(self, *args)
        self._rounds = rounds
        return effects

    patch.setattr(Syncer, "_hello", hello)


def waits_for_all_who_were_ever_here(patch: Patch) -> None:
    patch.setattr(Membership, "live", lambda self, now: [member for member in self.all() if member.trains])
    patch.setattr(syncer_module, "decide", lambda facts, sync: Decision(facts.missing == 0 and facts.fresh > 0, "all"))


MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
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
    (resumes_after_what_was_never_adopted, "does not fit|another|trained|not live"),
    (applies_updates_as_they_come, "does not fit"),
    (serves_a_term_twice, "term"),
    (keeps_an_upload_slot_for_a_dead_upload, "not live|never"),
    (never_samples_again_after_a_refusal, "not live|never"),
    (does_not_ask_those_who_come_back, "not live|never"),
    (waits_for_all_who_were_ever_here, "not live|never"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mutate", "complaint"), MUTATIONS, ids=[each[0].__name__ for each in MUTATIONS])
def test_a_core_that_breaks_a_rule_is_found_out(
    mutate: Callable[[Patch], None], complaint: str, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=complaint) as caught:
        simulate(loss_plan())
        for seed in range(20):
            simulate(stormy_plan(seed))
    print(mutate.__name__, str(caught.value)[:150])
