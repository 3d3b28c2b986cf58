"""A learner over time: checkpoints, resuming, the fences of term and branch, leaving, the end."""

from __future__ import annotations

from typing import Any

import pytest

from geo_diloco.manifest import BranchId, FragmentId, Seq, Term, Version
from geo_diloco.protocol.effects import (
    Adopt,
    ApplyUpdate,
    CloseConnection,
    Effect,
    FetchEntries,
    KeepEntry,
    PersistAccounts,
    ReadyToLeave,
    RefusedForGood,
    RunFinished,
    StartTraining,
    TakeSample,
    TokensDropped,
)
from geo_diloco.protocol.election.ballots import Refuse
from geo_diloco.protocol.events import (
    Applied,
    Connected,
    Disconnected,
    EntryStored,
    Resumed,
    Saved,
    StopRequested,
    Tick,
    UploadDone,
)
from geo_diloco.protocol.messages import (
    Contribution,
    Decision,
    Goodbye,
    Hello,
    Progress,
)
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import BEN, FOUNDER
from tests.support.single import P0, Learning, adopt, begun, handed_in, known, of, only, said, take

# ---- checkpoints and returning


def save(learning: Learning) -> PersistAccounts:
    (persist,) = only(learning.give(Saved(1, learning.step, learning.tokens)), PersistAccounts)
    return persist


def resumed(persist: PersistAccounts, lost_tokens: int = 0) -> tuple[Learning, list[Effect]]:
    learning = Learning(persist.resume_at)
    learning.step, learning.tokens = persist.step, persist.tokens
    return learning, learning.give(Resumed(persist.step, persist.tokens, persist.accounts, 0, lost_tokens))


def test_a_checkpoint_resumes_before_the_first_commit_that_is_not_adopted() -> None:
    learning, chain = begun()
    take(learning, chain.commit(0))
    take(learning, chain.commit(1))
    take(learning, chain.commit(0))
    learning.train()
    for version, fragment in ((1, 0), (2, 0)):
        adopt(learning, version, fragment=fragment)
    persist = save(learning)
    assert persist.resume_at.seq == 2
    assert [head.version for head in persist.resume_at.heads] == [2, 0]
    again, _ = resumed(persist)
    again.connect()
    effects = known(again, *chain.events[3:])
    assert [(apply.fragment, apply.version) for apply in only(effects, ApplyUpdate)] == [(1, 1)]
    assert [keep.digest for keep in only(effects, KeepEntry) if keep.update] == [chain.events[3].digest]
    assert again.core.ledger.head_digest == chain.events[-1].digest


def test_a_checkpoint_from_before_a_new_term_follows_the_chain_into_it() -> None:
    learning, chain = begun()
    take(learning, chain.commit(0))
    known(learning, chain.open(term=2))
    persist = save(learning)
    assert (persist.resume_at.term, persist.resume_at.seq) == (1, 1)
    again, _ = resumed(persist)
    again.connect()
    known(again, *chain.events[2:])
    assert (again.core.ledger.term, again.core.ledger.seq) == (2, 3)


def test_what_was_trained_after_the_checkpoint_counts_as_crashed() -> None:
    learning, _ = begun()
    learning.train(5)
    _, effects = resumed(save(learning), lost_tokens=300)
    assert effects == [TokensDropped(FragmentId(p), 300, "crashed") for p in (0, 1)]


def test_a_resumed_learner_goes_on_with_its_undecided_contribution() -> None:
    learning, chain = begun()
    claim = handed_in(learning)
    again, _ = resumed(save(learning))
    assert said(again.connect(), Contribution) == [claim]
    assert only(take(again, chain.commit(0, of(claim))), Adopt)[0].participant == claim.blob


def test_step_numbers_go_on_after_what_was_ever_handed_in() -> None:
    learning, _ = begun()
    learning.train(5)
    again, _ = resumed(save(learning))
    (start,) = only(again.connect(resume_step=12, merged_until=(12, 0)), StartTraining)
    assert start.resume_step == 12
    again.step = 12
    again.hear(again.asked(1))
    again.train()
    (claim,) = said(again.sample(1), Contribution)
    assert (claim.id.last_step, claim.steps, claim.tokens) == (13, 6, 600), "skipped numbers are not steps"


def test_a_process_without_a_checkpoint_starts_its_ranges_after_what_was_merged() -> None:
    """Else its every contribution would overlap what the process before it handed in."""
    learning, _ = begun(resume_step=50, merged_until=(50, 40))
    learning.step = 50
    learning.hear(learning.asked(0))
    learning.train()
    (claim,) = said(learning.sample(0), Contribution)
    assert (claim.first_step, claim.id.last_step, claim.steps) == (50, 51, 1)


def test_training_starts_once_and_again_only_with_another_share() -> None:
    learning, _ = begun()
    assert only(learning.connect(), StartTraining) == []


# ---- fences and the end


def test_messages_are_believed_only_from_the_founder_we_are_connected_to() -> None:
    learning, _ = begun()
    claim = handed_in(learning)
    refused = Decision(id=claim.id, verdict="refused", reason="a lie")
    assert learning.hear(refused, sender=BEN) == []
    learning.give(Connected(BEN, seeking=True))
    assert learning.hear(refused, sender=BEN) == [], "the chain does not say that it serves"


@pytest.mark.parametrize("fence", [{"branch": BranchId("elsewhere")}, {"term": Term(0)}])
def test_messages_of_another_branch_or_an_older_term_change_nothing(fence: dict[str, Any]) -> None:
    learning, _ = begun()
    effects = learning.hear(learning.asked(), **fence) + learning.train()
    assert said(effects, Refuse) != [] and only(effects, TakeSample) == []


def test_a_higher_term_makes_it_fetch_the_chain_and_say_hello_again() -> None:
    learning, chain = begun()
    learning.give(Disconnected(FOUNDER, "restarted"))
    learning.give(Connected(FOUNDER, seeking=True))
    assert learning.hear(learning.asked(), term=Term(2)) == [FetchEntries(Seq(2))]
    refused = learning.hear(Refuse(reason="term", detail="term 1 is over", term=Term(2)), term=Term(2))
    assert only(refused, FetchEntries) != []
    effects = learning.give(chain.open(term=2))
    assert [hello.head_seq for hello in said(effects, Hello)] == [1], "what is durable here"


def test_told_to_say_hello_it_says_hello() -> None:
    learning, _ = begun()
    assert said(learning.hear(Refuse(reason="hello", detail="say Hello first", term=Term(1))), Hello) != []


@pytest.mark.parametrize("reason", ["layout", "wire", "token", "run"])
def test_a_difference_that_time_cannot_heal_ends_it_by_name(reason: str) -> None:
    learning, _ = begun()
    effects = learning.hear(Refuse(reason=reason, detail="yours, ours", term=Term(1)))
    assert effects == [RefusedForGood(f"{reason}: yours, ours")]


def test_progress_is_told_about_once_a_second_and_never_without_a_connection() -> None:
    learning, _ = begun()
    assert len(said(learning.train(30), Progress)) == 3
    learning.give(Disconnected(FOUNDER, "cut"))
    assert learning.train(30) == []


def test_it_leaves_when_what_it_sampled_is_handed_in() -> None:
    learning, _ = begun()
    learning.hear(learning.asked())
    learning.train()
    (claim,) = said(learning.sample(), Contribution)
    assert learning.give(StopRequested("SIGTERM")) == []
    effects = learning.give(UploadDone(claim.blob, 1))
    assert said(effects, Goodbye) != [] and effects[-2:] == [CloseConnection(FOUNDER, "leaving"), ReadyToLeave()]
    assert learning.give(StopRequested("SIGTERM")) == []


def test_it_leaves_without_handing_in_when_time_is_up() -> None:
    learning, _ = begun()
    learning.hear(learning.asked())
    learning.train()
    learning.sample()
    learning.give(StopRequested("SIGTERM"))
    assert learning.core.deadline is not None
    learning.now = learning.core.deadline
    assert ReadyToLeave() in learning.give(Tick())


def test_it_leaves_at_once_without_a_connection() -> None:
    learning, _ = begun()
    learning.give(Disconnected(FOUNDER, "cut"))
    assert learning.give(StopRequested("SIGTERM")) == [ReadyToLeave()]


def test_the_end_is_told_once_and_after_the_last_version() -> None:
    learning, chain = begun()
    commit = chain.commit(0)
    learning.give(commit)
    assert only(known(learning, chain.finished()), RunFinished) == []
    learning.give(EntryStored(commit.digest))
    assert only(learning.give(Applied(P0, Version(1), fake_digest("theta", 0, 1))), RunFinished) == [
        RunFinished("enough")
    ]
    assert only(learning.train(), RunFinished) == []
