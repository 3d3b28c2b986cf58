"""From entries in any order to versions in the right one."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import Digest, FragmentId, Seq, Version
from geo_diloco.protocol.effects import ApplyUpdate, Effect, FetchEntries, FetchFragment, FetchUpdate, Note
from geo_diloco.protocol.events import (
    Applied,
    ApplyFailed,
    EntryArrived,
    FragmentReplaced,
    UpdateFetched,
    UpdateLost,
)
from geo_diloco.protocol.follow import EARLY_MAX, REPLACE_BEHIND, Follower
from geo_diloco.protocol.ledger import Ledger
from tests.support.chains import ANN, ChainBuilder
from tests.support.cluster import FOUNDER, fake_digest

P0 = FragmentId(0)


def chain_of(num_commits: int, fragments: int = 2) -> ChainBuilder:
    chain = ChainBuilder.opened()
    for index in range(num_commits):
        chain.commit(index % fragments)
    return chain


def follower(chain: ChainBuilder, loaded: int = 2) -> Follower:
    """One that has taken the first `loaded` entries."""
    early = ChainBuilder(chain.num_elements)
    early.events = chain.events[:loaded]
    ledger = Ledger(founder=FOUNDER)
    ledger.load(early.snapshot())
    following = Follower(ledger)
    following.start()
    return following


def feed(following: Follower, *events: EntryArrived) -> list[Effect]:
    return [effect for event in events for effect in following.entry_arrived(event)[1]]


def digest_of(fragment: int, version: int) -> Digest:
    return fake_digest("theta", fragment, version)


def test_a_commit_is_fetched_at_once_and_applied_when_it_is_here() -> None:
    chain = chain_of(1)
    following = follower(chain)
    commit = chain.events[2].entry
    assert feed(following, chain.events[2]) == [FetchUpdate(P0, Version(1), commit.update)]  # type: ignore[union-attr]
    assert following.update_fetched(UpdateFetched(P0, Version(1))) == [
        ApplyUpdate(P0, Version(1), commit.update, digest_of(0, 1), fake_digest("momentum", 0, 1), 0.7, 0.5)  # type: ignore[union-attr]
    ]
    step, effects = following.applied(Applied(P0, Version(1), digest_of(0, 1)))
    assert step is not None and effects == [] and following.pending() == 0
    assert (step.version, step.commits, step.base) == (1, (commit,), chain.events[2].digest)


def test_an_entry_twice_is_taken_once() -> None:
    chain = chain_of(1)
    following = follower(chain)
    feed(following, chain.events[2])
    assert following.entry_arrived(chain.events[2]) == ([], [])


def test_a_gap_is_fetched_once_and_what_came_early_is_not_lost() -> None:
    chain = chain_of(4)
    following = follower(chain)
    assert feed(following, chain.events[4], chain.events[5]) == [FetchEntries(Seq(2))]
    taken, effects = following.entry_arrived(chain.events[2])
    assert taken == [chain.events[2].entry] and effects[-1] == FetchEntries(Seq(3))
    taken, effects = following.entry_arrived(chain.events[3])
    assert taken == [event.entry for event in chain.events[3:6]]
    assert [effect for effect in effects if isinstance(effect, FetchEntries)] == []


def test_an_entry_of_a_fork_is_refused_with_its_reason_and_the_chain_goes_on() -> None:
    chain = chain_of(1)
    following = follower(chain)
    entry = replace(chain.events[2].entry, header=replace(chain.events[2].entry.header, prev=fake_digest("fork")))
    effects = feed(following, EntryArrived(entry, fake_digest(entry), FOUNDER))
    assert isinstance(effects[0], Note) and "another chain" in effects[0].text
    assert len(following.entry_arrived(chain.events[2])[0]) == 1


def test_entries_signed_by_anyone_else_are_not_even_kept() -> None:
    chain = chain_of(3)
    following = follower(chain)
    (note,) = feed(following, replace(chain.events[4], signer=ANN))
    assert isinstance(note, Note) and "does not serve" in note.text
    assert feed(following, chain.events[2]) == [
        FetchUpdate(P0, Version(1), chain.events[2].entry.update)  # type: ignore[union-attr]
    ]


def test_what_comes_early_is_bounded() -> None:
    chain = chain_of(1)
    following = follower(chain)
    header = chain.events[2].entry.header
    for seq in range(10, 10 + 2 * EARLY_MAX):
        entry = replace(chain.events[2].entry, header=replace(header, seq=Seq(seq)))
        feed(following, EntryArrived(entry, fake_digest(entry), FOUNDER))
    assert len(following._early) == EARLY_MAX


def test_updates_are_applied_in_version_order_however_they_come() -> None:
    chain = chain_of(3, fragments=1)
    following = follower(chain)
    feed(following, *chain.events[2:])
    assert following.update_fetched(UpdateFetched(P0, Version(3))) == []
    assert following.update_fetched(UpdateFetched(P0, Version(2))) == []
    applied = following.update_fetched(UpdateFetched(P0, Version(1)))
    for version in (1, 2, 3):
        (apply,) = applied
        assert isinstance(apply, ApplyUpdate) and apply.version == version
        assert following.update_fetched(UpdateFetched(P0, Version(version))) == [], "one at a time"
        step, applied = following.applied(Applied(P0, Version(version), apply.state_digest))
        assert step is not None and step.version == version


def test_a_lost_update_is_replaced_by_a_snapshot_once() -> None:
    chain = chain_of(3, fragments=1)
    following = follower(chain)
    feed(following, *chain.events[2:4])
    lost = UpdateLost(P0, Version(1), "not kept")
    note, fetch = following.update_lost(lost)
    assert isinstance(note, Note) and fetch == FetchFragment(P0, Version(2))
    assert [effect for effect in following.update_lost(lost) if not isinstance(effect, Note)] == []
    assert feed(following, chain.events[4]) == [], "it would be in vain to fetch while the fragment is replaced"
    step, effects = following.replaced(FragmentReplaced(P0, Version(2), digest_of(0, 2)))
    assert step is not None
    assert (step.version, [commit.version for commit in step.commits]) == (2, [1, 2])
    assert step.base == chain.events[3].digest
    assert effects == [FetchUpdate(P0, Version(3), chain.events[4].entry.update)]  # type: ignore[union-attr]


def test_a_failed_application_is_replaced() -> None:
    chain = chain_of(1)
    following = follower(chain)
    feed(following, chain.events[2])
    following.update_fetched(UpdateFetched(P0, Version(1)))
    assert FetchFragment(P0, Version(1)) in following.apply_failed(ApplyFailed(P0, Version(1), "digest differs"))
    step, _ = following.replaced(FragmentReplaced(P0, Version(1), digest_of(0, 1)))
    assert step is not None and following.pending() == 0


def test_what_comes_of_updates_already_behind_changes_nothing() -> None:
    chain = chain_of(1)
    following = follower(chain)
    feed(following, chain.events[2])
    following.update_fetched(UpdateFetched(P0, Version(1)))
    following.applied(Applied(P0, Version(1), digest_of(0, 1)))
    assert following.update_fetched(UpdateFetched(P0, Version(1))) == []
    assert following.update_lost(UpdateLost(P0, Version(1), "late word")) == []
    assert following.applied(Applied(P0, Version(1), digest_of(0, 1))) == (None, [])
    assert following.replaced(FragmentReplaced(P0, Version(1), digest_of(0, 1))) == (None, [])


def test_far_behind_a_snapshot_is_cheaper_than_the_updates() -> None:
    chain = chain_of(REPLACE_BEHIND + 1, fragments=1)
    following = follower(chain)
    effects = feed(following, *chain.events[2:])
    assert sum(isinstance(effect, FetchUpdate) for effect in effects) == REPLACE_BEHIND
    assert effects[-1] == FetchFragment(P0, Version(REPLACE_BEHIND + 1))


@given(st.integers(0, 2**32))
def test_any_order_with_repeats_ends_at_the_same_versions(seed: int) -> None:
    chance = random.Random(seed)
    chain = chain_of(9)
    following = follower(chain)
    entries = chain.events[2:] * 2
    chance.shuffle(entries)
    todo: list[EntryArrived | UpdateFetched | Applied] = list(entries)
    reached: dict[int, list[int]] = {0: [], 1: []}
    while todo:
        event = todo.pop(chance.randrange(len(todo)))
        effects: list[Effect] = []
        if isinstance(event, EntryArrived):
            effects = following.entry_arrived(event)[1]
        elif isinstance(event, UpdateFetched):
            effects = following.update_fetched(event)
        else:
            step, effects = following.applied(event)
            if step is not None:
                reached[step.fragment].append(step.version)
        for effect in effects:
            if isinstance(effect, FetchUpdate):
                todo += [UpdateFetched(effect.fragment, effect.version)] * chance.choice((1, 2))
            elif isinstance(effect, ApplyUpdate):
                todo.append(Applied(effect.fragment, effect.version, effect.state_digest))
    assert reached == {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 4]}
    assert following.ledger.head_digest == chain.events[-1].digest
