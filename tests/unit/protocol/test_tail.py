"""What is kept of entries that do not count yet, and what of them is on this disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import Digest, Seq
from geo_diloco.protocol import tail as tail_module
from geo_diloco.protocol.effects import KeepEntry
from geo_diloco.protocol.events import EntryArrived
from geo_diloco.protocol.messages import Commit, Reform
from geo_diloco.protocol.tail import Tail, contained
from tests.support.chains import FOUNDER_SEAT, ChainBuilder

LATEST = Seq(3)
"""Of the ledger, unless said otherwise."""


def chain() -> ChainBuilder:
    """`found`, `open` and commits 2 to 7."""
    builder = ChainBuilder.opened()
    for index in range(6):
        builder.commit(index % 2)
    return builder


def tail_of(builder: ChainBuilder, *events: EntryArrived) -> Tail:
    """Behind a ledger that stands at LATEST."""
    tail = Tail(builder.fork(LATEST).ledger())
    for event in events:
        tail.add(event.digest, event.entry)
    return tail


def reform(builder: ChainBuilder, after: int, lineage: int = 1) -> EntryArrived:
    branch = builder.fork(after)
    branch.term = 1
    return branch.add(Reform(header=branch.header(), lineage=lineage, roster=(FOUNDER_SEAT,)))


def wanted(tail: Tail, builder: ChainBuilder, *, durable: int = LATEST, floor: int = 0) -> list[int]:
    return [
        event.entry.header.seq
        for event in builder.events
        if tail.wants(event.entry, durable=Seq(durable), floor=Seq(floor))
    ]


# ---- entries


def test_what_is_in_it_is_found_by_digest_until_it_is_dropped() -> None:
    builder = chain()
    first, second = builder.events[4:6]
    tail = tail_of(builder, first)
    assert first.digest in tail and second.digest not in tail
    assert tail[first.digest] == first.entry and len(tail) == 1
    tail.stored(first.digest)
    tail.drop(first.digest)
    tail.drop(second.digest)
    assert first.digest not in tail and not tail.is_stored(first.digest) and len(tail) == 0


def test_entries_are_wanted_that_follow_the_ledger_and_are_not_far_beyond_what_is_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail_module, "TAIL_MAX", 2)
    builder = chain()
    assert wanted(tail_of(builder), builder) == [4, 5]
    assert wanted(tail_of(builder), builder, durable=5) == [4, 5, 6, 7]


def forgotten(digest: Digest) -> bool:
    """By the election."""
    return False


def test_what_a_later_reform_may_lead_to_stays() -> None:
    builder = chain()
    known, unknown = builder.events[1:3]
    tail = tail_of(builder, known, unknown)
    for event in (known, unknown):
        tail.keep(event.digest, update=True)
        tail.stored(event.digest)
    tail.settle(lambda digest: digest == known.digest)
    assert [event.digest in tail for event in (known, unknown)] == [True, False]
    assert tail.is_stored(known.digest) and not tail.is_stored(unknown.digest)


def test_what_a_reform_left_behind_is_in_it_again() -> None:
    builder = chain()
    event = builder.events[4]
    tail = tail_of(builder, event)
    tail.keep(event.digest, update=True)
    tail.drop(event.digest)
    tail.take_back(event.digest, event.entry)
    assert tail[event.digest] == event.entry and not tail.awaits(event.digest)


def test_what_is_decided_goes_when_the_ledger_has_got_there() -> None:
    builder = chain()
    passed_over, there, beyond = builder.events[2:5]
    tail = tail_of(builder, passed_over, there, beyond)
    for event in (passed_over, there, beyond):
        tail.keep(event.digest, update=True)
    tail.stored(there.digest)
    tail.settle(forgotten)
    assert [event.digest in tail for event in (passed_over, there, beyond)] == [False, False, True]
    assert [tail.awaits(event.digest) for event in (passed_over, there, beyond)] == [False, False, True]
    assert not tail.is_stored(there.digest)


# ---- on this disk


def test_an_update_is_awaited_from_when_it_is_asked_for_until_it_is_here_or_lost() -> None:
    builder = chain()
    first, second = builder.events[4:6]
    assert isinstance(first.entry, Commit) and isinstance(second.entry, Commit)
    tail = tail_of(builder, first, second)
    assert tail.keep(first.digest, update=True) == KeepEntry(first.digest, first.entry.update)
    assert tail.keep(second.digest, update=True) == KeepEntry(second.digest, second.entry.update)
    assert tail.awaits(first.digest) and not tail.is_stored(first.digest)
    assert tail.stored(first.digest) == first.entry and tail.stored(first.digest) is None
    assert tail.is_stored(first.digest) and not tail.awaits(first.digest)
    assert tail.lost(second.digest) == second.entry and tail.lost(second.digest) is None
    assert not tail.is_stored(second.digest) and not tail.awaits(second.digest)


def test_an_entry_without_an_update_is_kept_and_nothing_awaited() -> None:
    builder = chain()
    commit, record = builder.events[4], builder.record()
    tail = tail_of(builder, commit, record)
    assert tail.keep(commit.digest, update=False) == KeepEntry(commit.digest, None)
    assert tail.keep(record.digest, update=True) == KeepEntry(record.digest, None)
    assert [tail.stored(each.digest) for each in (commit, record)] == [None, None]
    assert tail.is_stored(record.digest)
    assert not tail.is_stored(commit.digest), "its update may be needed after all"
    tail.keep(commit.digest, update=True)
    tail.stored(commit.digest)
    assert tail.is_stored(commit.digest)


def test_the_update_of_a_commit_that_the_ledger_took_is_still_told_of() -> None:
    builder = chain()
    event = builder.events[4]
    tail = tail_of(builder, event)
    tail.keep(event.digest, update=True)
    tail.drop(event.digest)
    assert tail.awaits(event.digest)
    assert tail.stored(event.digest) == event.entry
    assert not tail.is_stored(event.digest), "it is not in here"


def test_what_the_disk_has_is_in_it_as_it_is_there() -> None:
    builder = chain()
    whole, record = replace(builder.events[4], stored=True), builder.events[5]
    tail = tail_of(builder)
    tail.load([whole, record])
    assert len(tail) == 2 and tail[record.digest] == record.entry
    assert [tail.is_stored(each.digest) for each in (whole, record)] == [True, False]


# ---- the owner's reform


def test_a_later_reform_is_wanted_wherever_it_stands() -> None:
    builder = chain()
    tail = tail_of(builder)
    behind, beyond, same = reform(builder, 1), reform(builder, 7), reform(builder, 7, lineage=0)
    for event, goes_before in ((behind, True), (beyond, True), (same, False), (builder.events[7], False)):
        assert tail.goes_before(event.entry) is goes_before
    assert tail.wants(behind.entry, durable=LATEST, floor=LATEST)
    assert not tail.wants(same.entry, durable=Seq(-5000), floor=LATEST)


def test_while_a_reform_waits_what_leads_there_is_wanted_and_kept() -> None:
    """As far back as this peer can go."""
    builder = chain()
    waiting = reform(builder.fork(6), 6)
    tail = tail_of(builder, builder.events[2])
    tail.part(waiting)
    assert wanted(tail, builder, durable=-5000, floor=1) == [2, 3, 4, 5, 6]
    tail.settle(forgotten)
    assert builder.events[2].digest in tail


def test_a_reform_is_given_again_once_when_the_entry_is_here_on_which_it_stands() -> None:
    builder = chain()
    waiting = reform(builder, 6)
    tail = tail_of(builder)
    assert tail.joined(builder.events[6].digest) is None, "none waits"
    tail.part(waiting)
    assert tail.joined(builder.events[5].digest) is None
    assert tail.joined(builder.events[6].digest) == waiting
    assert tail.joined(builder.events[6].digest) is None
    assert wanted(tail, builder, durable=-5000, floor=1) == []


def test_a_reform_that_is_no_later_than_ours_any_more_keeps_nothing() -> None:
    builder = chain()
    followed = reform(builder, LATEST)
    ledger = builder.fork(LATEST).ledger()
    tail = Tail(ledger)
    tail.add(builder.events[2].digest, builder.events[2].entry)
    tail.part(reform(builder, 6))
    ledger.apply(followed.entry, followed.digest)
    tail.settle(forgotten)
    assert builder.events[2].digest not in tail
    assert tail.joined(builder.events[6].digest) is None


def test_reforms_among_the_entries_are_found() -> None:
    builder = chain()
    there = reform(builder, 5)
    tail = tail_of(builder, builder.events[4], there)
    assert list(tail.reforms()) == [(Digest(there.digest), there.entry)]


def test_a_snapshot_contains_the_commits_it_came_by_and_none_of_the_same_versions_elsewhere() -> None:
    common = ChainBuilder.opened()
    for fragment in (0, 1):
        common.commit(fragment)
    ours, theirs = common.fork(3), common.fork(3)
    theirs.record()
    for chain_ in (ours, theirs):
        for fragment in (0, 1, 0):
            chain_.commit(fragment)
    log = [(Digest(event.digest), event.entry) for event in (*ours.events, *theirs.events[4:])]
    snapshot = ours.fork(5).snapshot()
    assert contained(log, snapshot) == {event.digest for event in ours.events[2:6]}
    ahead = replace(snapshot, heads=(ours.snapshot().heads[0], snapshot.heads[1]))
    assert contained(log, ahead) == {event.digest for event in ours.events[2:7]}, "and what a fragment is ahead by"
    assert contained(log[4:], ahead) == {event.digest for event in ours.events[4:7]}, "as far as the log goes"
