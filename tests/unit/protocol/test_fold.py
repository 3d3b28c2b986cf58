"""From durable commits to versions, in order, fragment by fragment; and what a peer that served has made itself."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import Digest, FragmentId, Version
from geo_diloco.protocol.effects import ApplyUpdate, Effect, FetchFragment, Note
from geo_diloco.protocol.events import Applied, ApplyFailed, EntryArrived, FragmentReplaced
from geo_diloco.protocol.fold import REPLACE_BEHIND, Fold, Step
from geo_diloco.protocol.messages import Commit
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ChainBuilder

P0 = FragmentId(0)


def commits_of(num_commits: int, fragments: int = 1) -> list[EntryArrived]:
    chain = ChainBuilder.opened()
    return [chain.commit(index % fragments) for index in range(num_commits)]


def commit_of(event: EntryArrived) -> Commit:
    assert isinstance(event.entry, Commit)
    return event.entry


def begun() -> Fold:
    fold = Fold()
    fold.start([Version(0), Version(0)])
    return fold


def durable(fold: Fold, event: EntryArrived, *, stored: bool = False) -> list[Effect]:
    step, effects = fold.durable(commit_of(event), event.digest, stored=stored)
    assert step is None
    return effects


def state_of(version: int, fragment: int = 0) -> Digest:
    return fake_digest("theta", fragment, version)


def apply_of(event: EntryArrived) -> ApplyUpdate:
    commit = commit_of(event)
    return ApplyUpdate(
        fragment=commit.fragment,
        version=commit.version,
        update=commit.update,
        state_digest=commit.state_digest,
        momentum_digest=commit.momentum_digest,
        eta=0.7,
        mu=0.5,
    )


def applied(version: int) -> Applied:
    return Applied(P0, Version(version), state_of(version))


# ---- updates


def test_a_durable_commit_is_applied_when_its_update_is_here() -> None:
    (event,) = commits_of(1)
    fold = begun()
    assert durable(fold, event) == [] and fold.pending() == 1
    assert fold.stored(commit_of(event)) == [apply_of(event)]
    step, effects = fold.applied(applied(1))
    assert step == Step(P0, Version(1), (commit_of(event),), event.digest)
    assert effects == [] and fold.pending() == 0


def test_a_durable_commit_whose_update_is_here_already_is_applied_at_once() -> None:
    (event,) = commits_of(1)
    assert durable(begun(), event, stored=True) == [apply_of(event)]


def test_updates_are_applied_in_version_order_however_they_come_and_one_at_a_time() -> None:
    events = commits_of(3)
    fold = begun()
    for event in events:
        durable(fold, event)
    assert fold.stored(commit_of(events[2])) == fold.stored(commit_of(events[1])) == []
    effects = fold.stored(commit_of(events[0]))
    for version, event in enumerate(events, 1):
        assert effects == [apply_of(event)]
        assert fold.stored(commit_of(event)) == [], "one at a time"
        step, effects = fold.applied(applied(version))
        assert step is not None and step.version == version
    assert fold.pending() == 0


def test_fragments_do_not_wait_for_each_other() -> None:
    first, second = commits_of(2, fragments=2)
    fold = begun()
    durable(fold, first)
    assert durable(fold, second, stored=True) == [apply_of(second)]


# ---- snapshots instead


def test_a_lost_update_is_replaced_by_a_snapshot_once() -> None:
    events = commits_of(3)
    fold = begun()
    durable(fold, events[0])
    durable(fold, events[1])
    note, fetch = fold.lost(commit_of(events[0]), "not kept")
    assert isinstance(note, Note) and fetch == FetchFragment(P0, Version(2))
    assert not [each for each in fold.lost(commit_of(events[1]), "nor that") if isinstance(each, FetchFragment)]
    assert durable(fold, events[2], stored=True) == [], "it can't be applied while the fragment is replaced"
    step, effects = fold.replaced(FragmentReplaced(P0, Version(2), state_of(2)))
    assert step == Step(P0, Version(2), (commit_of(events[0]), commit_of(events[1])), events[1].digest)
    assert effects == [apply_of(events[2])]


def test_a_snapshot_further_than_asked_skips_what_it_holds() -> None:
    events = commits_of(3)
    fold = begun()
    durable(fold, events[0])
    fold.lost(commit_of(events[0]), "not kept")
    durable(fold, events[1])
    durable(fold, events[2])
    step, effects = fold.replaced(FragmentReplaced(P0, Version(3), state_of(3)))
    assert step is not None and [commit.version for commit in step.commits] == [1, 2, 3]
    assert effects == [] and fold.pending() == 0


def test_a_failed_application_is_replaced() -> None:
    (event,) = commits_of(1)
    fold = begun()
    durable(fold, event, stored=True)
    assert FetchFragment(P0, Version(1)) in fold.apply_failed(ApplyFailed(P0, Version(1), "digest differs"))
    step, _ = fold.replaced(FragmentReplaced(P0, Version(1), state_of(1)))
    assert step is not None and fold.pending() == 0


def test_far_behind_a_snapshot_is_cheaper_than_the_updates() -> None:
    events = commits_of(REPLACE_BEHIND + 1)
    fold = begun()
    for event in events[:-1]:
        assert durable(fold, event) == []
    assert durable(fold, events[-1]) == [FetchFragment(P0, Version(REPLACE_BEHIND + 1))]


def test_what_comes_of_updates_already_behind_changes_nothing() -> None:
    (event,) = commits_of(1)
    fold = begun()
    durable(fold, event, stored=True)
    fold.applied(applied(1))
    assert fold.stored(commit_of(event)) == []
    assert fold.lost(commit_of(event), "late word") == []
    assert fold.applied(applied(1)) == (None, [])
    assert fold.replaced(FragmentReplaced(P0, Version(1), state_of(1))) == (None, [])


def test_an_update_of_another_chain_is_not_taken_for_that_of_the_same_version() -> None:
    chain = ChainBuilder.opened()
    other = chain.fork(1)
    other.open(term=2)
    mine, theirs = chain.commit(0), other.commit(0)
    fold = begun()
    durable(fold, mine)
    assert fold.stored(commit_of(theirs)) == [] and fold.lost(commit_of(theirs), "gone") == []
    assert fold.stored(commit_of(mine)) == [apply_of(mine)]


# ---- ahead: what we merged ourselves before it was durable


def made(fold: Fold, *events: EntryArrived) -> None:
    for event in events:
        fold.made(P0, commit_of(event).version, event.digest)


def test_what_we_made_is_not_applied_again_when_it_becomes_durable() -> None:
    events = commits_of(2)
    fold = begun()
    made(fold, *events)
    assert not fold.is_level and fold.pending() == 0
    for event in events:
        commit = commit_of(event)
        step = Step(P0, commit.version, (commit,), event.digest)
        assert fold.durable(commit, event.digest, stored=True) == (step, [])
    assert fold.is_level and fold.pending() == 0


def test_if_other_commits_become_durable_than_ours_the_fragment_is_replaced() -> None:
    chain = ChainBuilder.opened()
    other = chain.fork(1)
    other.open(term=2)
    mine = [chain.commit(0) for _ in range(2)]
    theirs = [other.commit(0) for _ in range(2)]
    fold = begun()
    made(fold, *mine)
    note, fetch = durable(fold, theirs[0], stored=True)
    assert isinstance(note, Note) and fetch == FetchFragment(P0, Version(1))
    assert not fold.is_level and fold.pending() == 1
    assert durable(fold, theirs[1], stored=True) == []
    step, effects = fold.replaced(FragmentReplaced(P0, Version(1), state_of(1)))
    assert step is not None and step.commits == (commit_of(theirs[0]),)
    assert effects == [apply_of(theirs[1])]
    fold.applied(applied(2))
    assert fold.is_level, "what we made is forgotten"


def test_what_we_made_is_taken_back_when_a_term_opens_without_it() -> None:
    first, second = commits_of(2, fragments=2)
    fold = begun()
    made(fold, first)
    fold.durable(commit_of(second), second.digest, stored=True)
    fold.applied(Applied(FragmentId(1), Version(1), state_of(1, fragment=1)))
    assert fold.revert([Version(0), Version(1)]) == [FetchFragment(P0, Version(0))]
    assert not fold.is_level and fold.revert([Version(0), Version(1)]) == [], "once"
    assert fold.replaced(FragmentReplaced(P0, Version(0), state_of(0))) == (None, [])
    assert fold.is_level


def test_of_what_we_made_the_part_that_became_durable_stays() -> None:
    chain = ChainBuilder.opened()
    first = chain.commit(0)
    other = chain.fork(2)
    other.open(term=2)
    ours, theirs = chain.commit(0), other.commit(0)
    fold = begun()
    made(fold, first, ours)
    step, _ = fold.durable(commit_of(first), first.digest, stored=True)
    assert step is not None
    assert FetchFragment(P0, Version(2)) in durable(fold, theirs, stored=True)


def test_fragments_that_we_did_not_touch_are_folded_as_ever() -> None:
    first, second = commits_of(2, fragments=2)
    fold = begun()
    made(fold, first)
    assert durable(fold, second, stored=True) == [apply_of(second)]


# ---- any order


@given(st.integers(0, 2**32))
def test_any_order_with_repeats_ends_at_the_same_versions(seed: int) -> None:
    """Entries become durable in order; updates and the answers of the fold come whenever they come."""
    chance = random.Random(seed)
    events = commits_of(9, fragments=2)
    fold = begun()
    waiting = list(events)
    todo: list[Commit | Applied] = [commit_of(event) for event in events] * 2
    reached: dict[int, list[int]] = {0: [], 1: []}
    stored: set[Digest] = set()
    while waiting or todo:
        if waiting and (not todo or chance.random() < 0.4):
            event = waiting.pop(0)
            effects = durable(fold, event, stored=commit_of(event).update.digest in stored)
        else:
            item = todo.pop(chance.randrange(len(todo)))
            if isinstance(item, Applied):
                step, effects = fold.applied(item)
                if step is not None:
                    reached[step.fragment].append(step.version)
            else:
                stored.add(item.update.digest)
                effects = fold.stored(item)
        for effect in effects:
            assert isinstance(effect, ApplyUpdate)
            todo.append(Applied(effect.fragment, effect.version, effect.state_digest))
    assert reached == {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 4]}


def test_what_the_outer_state_came_with_is_not_folded_and_goes_back_with_a_reform() -> None:
    chain = ChainBuilder.opened()
    first, second = commit_of(chain.commit(0)), commit_of(chain.commit(0))
    other = commit_of(chain.commit(1))
    fold = Fold()
    fold.start([Version(2), Version(0)])
    assert [fold.contains(each) for each in (first, second, other)] == [True, True, False]
    fold.rewind(fold.contained, chain.fork(2).ledger().heads)
    assert [fold.contains(each) for each in (first, second, other)] == [True, False, False]
