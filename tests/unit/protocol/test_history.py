"""The way back that a reform takes: the ledger as it was, as far back as entries are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import Seq, Version
from geo_diloco.protocol.history import History
from geo_diloco.protocol.ledger import NO_SEQ, Ledger
from geo_diloco.protocol.messages import Commit
from tests.support.chains import ANN, ChainBuilder


def chain(number: int) -> ChainBuilder:
    """`found`, `open` and so many commits of fragments 0, 1, 0, 1 and so on."""
    builder = ChainBuilder.opened()
    for index in range(number):
        builder.commit(index % 2)
    return builder


def history(builder: ChainBuilder, entries_kept: int = 0) -> History:
    made = History(Ledger(), entries_kept=entries_kept)
    for event in builder.events:
        made.folded(event.entry, event.digest)
    return made


@given(number=st.integers(0, 12), floors=st.lists(st.integers(-1, 13), max_size=4), back=st.integers(0, 13))
def test_going_back_is_as_if_the_rest_had_never_been(number: int, floors: list[int], back: int) -> None:
    builder = chain(number)
    last = len(builder.events) - 1
    past = history(builder)
    for floor in floors:
        past.settle(Seq(floor))
    assert past.floor == max([NO_SEQ, *(min(floor, last) for floor in floors)])
    to = min(last, max(past.floor, back))
    ledger, left = past.back(Seq(to))
    assert ledger == builder.fork(to).ledger()
    assert left == [(event.entry, event.digest) for event in builder.events[to + 1 :]]
    assert past.back(Seq(to)) == (ledger, []), "what was left behind is forgotten"


def test_what_goes_on_from_there_can_be_left_behind_as_well() -> None:
    builder = chain(4)
    past = history(builder)
    past.settle(Seq(2))
    past.back(Seq(3))
    other = builder.fork(3)
    event = other.commit(1)
    past.folded(event.entry, event.digest)
    assert past.back(Seq(4))[0] == other.ledger()
    assert past.back(Seq(3))[0] == builder.fork(3).ledger()


def test_a_ledger_that_is_given_out_is_not_the_one_that_is_kept() -> None:
    builder = chain(3)
    past = history(builder)
    ledger, _ = past.back(Seq(4))
    event = builder.commit(1)
    ledger.apply(event.entry, event.digest)
    assert past.back(Seq(4))[0] == builder.fork(4).ledger()


def test_entries_stay_as_long_as_they_are_few() -> None:
    builder = chain(6)
    weights = [1 + len(event.entry.participants) if isinstance(event.entry, Commit) else 1 for event in builder.events]
    past = history(builder, entries_kept=sum(weights[4:]))
    past.settle(Seq(2))
    assert past.floor == 2, "more would go, but snapshots do not contain it"
    past.settle(Seq(7))
    assert past.floor == 3
    with pytest.raises(AssertionError, match="entry 2 lies behind 3"):
        past.back(Seq(2))


def test_what_was_left_behind_takes_no_room() -> None:
    builder = ChainBuilder.opened()
    for _ in range(8):
        builder.record()
    past = history(builder, entries_kept=6)
    past.back(Seq(5))
    past.settle(Seq(5))
    assert past.floor == NO_SEQ, "six entries are left, and six may stay"


def test_a_fragment_in_which_a_snapshot_was_ahead_goes_back_too() -> None:
    """A learner's checkpoint has fragments at versions that are made by entries after its seq."""
    builder = chain(6)
    before = builder.fork(3).snapshot()
    ahead = replace(before, heads=builder.fork(7).snapshot().heads)
    ledger = Ledger()
    ledger.load(ahead)
    past = History(ledger, entries_kept=0)
    for event in builder.events[4:]:
        past.folded(event.entry, event.digest)
    past.settle(Seq(4))
    back, _ = past.back(Seq(5))
    truth = builder.fork(5).ledger()
    assert back.heads == truth.heads and back.contained == [Version(2), Version(2)]


def test_only_ones_own_work_is_remembered_where_that_is_enough() -> None:
    past = History(Ledger(only=ANN), entries_kept=0)
    for event in chain(2).events:
        past.folded(event.entry, event.digest)
    assert past.back(Seq(2))[0].only == ANN
