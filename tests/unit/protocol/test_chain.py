"""Entries from anyone, in any order: what counts, what is kept, and that only what is durable is folded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import BootId, Digest, MonoMs, Seq, Term, Version
from geo_diloco.protocol import tail as tail_module
from geo_diloco.protocol.chain import Chain, Outcome, SyncerChanged
from geo_diloco.protocol.effects import ApplyUpdate, FetchEntries, FetchFragment, KeepEntry, Note, PersistVote, Prune
from geo_diloco.protocol.election.ballots import PeerBoot
from geo_diloco.protocol.election.books import ElectionRules, Myself
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.events import (
    Applied,
    EntryArrived,
    EntryStored,
    FragmentReplaced,
    SnapshotKept,
    UpdateLost,
    VotePersisted,
)
from geo_diloco.protocol.fold import Step
from geo_diloco.protocol.messages import BlobRef, Commit, Entry
from geo_diloco.protocol.pruning import Pruning
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import ANN, BEN, CYD, FOUNDER, FOUNDER_SEAT, ChainBuilder, seat

NOW = MonoMs(0)


class Knowing:
    """One peer's chain, which began at the first `loaded` entries of a run."""

    def __init__(self, builder: ChainBuilder, loaded: int = 2, *, whole_chain: bool = False) -> None:
        me = Myself(
            peer=PeerBoot(ANN, BootId("1" * 16)),
            fresh_enrolment="disk",
            host="machine",
            address="",
            may_serve=False,
            may_elect=False,
        )
        self.folded: list[Entry] = []
        election = Election(me, ElectionRules(owner=FOUNDER), None, jitter=0)
        pruning = Pruning(versions_kept=1, bytes_kept=0)
        self.chain = Chain(election, self._on_folded, lambda to: [], pruning, entries_kept=0)
        self.chain.load(builder.fork(loaded - 1).snapshot(whole_chain=whole_chain))

    def _on_folded(self, entry: Entry) -> None:
        assert self.chain.ledger.seq == entry.header.seq, "the ledger stands exactly there"
        self.folded.append(entry)

    def new(self) -> list[int]:
        """What was folded since this was last asked."""
        new, self.folded = [entry.header.seq for entry in self.folded], []
        return new

    def begin(self, *disk: EntryArrived) -> Outcome:
        outcome: Outcome = []
        for event in disk:
            outcome += self.chain.arrived(event, NOW)
        return self._persisted(outcome + self.chain.loaded(NOW))

    def hear(self, *events: EntryArrived) -> Outcome:
        return self._persisted([item for event in events for item in self.chain.arrived(event, NOW)])

    def stored(self, *events: EntryArrived) -> Outcome:
        return self._persisted([item for e in events for item in self.chain.stored(EntryStored(e.digest), NOW)])

    def durable(self, event: EntryArrived) -> Outcome:
        return self.chain.durable(event.entry.header.seq, event.digest)

    def applied(self, fragment: int, version: int) -> Outcome:
        return self.chain.applied(Applied(fragment, version, fake_digest("theta", fragment, version)))  # type: ignore[arg-type]

    def _persisted(self, outcome: Outcome) -> Outcome:
        """A vote is on disk at once, and not shown."""
        for item in outcome:
            if isinstance(item, PersistVote):
                outcome = outcome + self.chain.poll(VotePersisted(item.number), NOW)
        return [item for item in outcome if not isinstance(item, PersistVote)]

    @property
    def seq(self) -> int:
        return self.chain.ledger.seq


def knowing(builder: ChainBuilder, loaded: int = 2) -> Knowing:
    known = Knowing(builder, loaded)
    known.begin()
    return known


def chain_of(num_commits: int, fragments: int = 2) -> ChainBuilder:
    builder = ChainBuilder.opened()
    for index in range(num_commits):
        builder.commit(index % fragments)
    return builder


def update_of(event: EntryArrived) -> BlobRef:
    assert isinstance(event.entry, Commit)
    return event.entry.update


# ---- what is durable


def test_an_entry_is_kept_and_its_update_fetched_before_it_is_durable() -> None:
    builder = chain_of(1)
    known = knowing(builder)
    commit = builder.events[2]
    assert known.hear(commit) == [KeepEntry(commit.digest, update_of(commit))]
    assert known.stored(commit) == [] and known.seq == 1, "nobody said that it is durable"


def test_what_is_durable_is_folded_at_once_if_it_is_here() -> None:
    builder = chain_of(1)
    known = knowing(builder)
    commit = builder.events[2]
    known.hear(commit)
    known.stored(commit)
    (apply,) = known.durable(commit)
    assert known.folded == [commit.entry]
    assert isinstance(apply, ApplyUpdate) and apply.update == update_of(commit)
    (step,) = known.applied(0, 1)
    assert isinstance(step, Step) and (step.version, step.base) == (1, commit.digest)
    assert known.chain.fold.is_level


def test_everything_before_a_durable_entry_is_durable_and_nothing_after() -> None:
    builder = chain_of(4)
    known = knowing(builder)
    known.hear(*builder.events[2:])
    known.durable(builder.events[4])
    assert known.new() == [2, 3, 4]
    assert known.seq == 4
    assert known.durable(builder.events[3]) == [], "old news"


def test_what_is_known_to_be_durable_is_folded_when_it_comes() -> None:
    builder = chain_of(3)
    known = knowing(builder)
    known.hear(builder.events[2])
    assert known.durable(builder.events[4]) == [FetchEntries(Seq(2))]
    known.hear(builder.events[3])
    assert known.new() == []
    known.hear(builder.events[4])
    assert known.new() == [2, 3, 4]


def test_an_update_that_comes_after_its_commit_is_durable_is_applied_then() -> None:
    builder = chain_of(1)
    known = knowing(builder)
    commit = builder.events[2]
    known.hear(commit)
    known.durable(commit)
    assert known.new() == [2] and not known.chain.fold.is_level
    assert [type(item) for item in known.stored(commit)] == [ApplyUpdate]


# ---- gaps and repeats


def test_an_entry_twice_is_taken_once() -> None:
    builder = chain_of(1)
    known = knowing(builder)
    known.hear(builder.events[2])
    assert known.hear(builder.events[2]) == []
    known.durable(builder.events[2])
    assert known.hear(builder.events[2]) == []


def test_a_gap_is_asked_to_be_filled_once_until_something_came() -> None:
    builder = chain_of(5)
    known = knowing(builder)
    assert known.hear(builder.events[4], builder.events[5]) == [FetchEntries(Seq(2))]
    known.hear(builder.events[2])
    assert known.hear(builder.events[6]) == [FetchEntries(Seq(2))], "all that is not durable here"


def test_a_gap_is_asked_about_again_on_another_connection() -> None:
    builder = chain_of(2)
    known = knowing(builder)
    known.hear(builder.events[3])
    known.chain.forget_asking()
    assert known.hear(builder.events[3]) == [FetchEntries(Seq(2))]


def test_entries_far_beyond_what_is_durable_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "TAIL_MAX", 2)
    builder = chain_of(3)
    known = knowing(builder)
    assert len(known.hear(*builder.events[2:4])) == 2
    assert known.hear(builder.events[4]) == []


def test_entries_signed_by_anyone_but_the_syncer_are_not_kept() -> None:
    builder = chain_of(1)
    known = knowing(builder)
    (note,) = known.hear(replace(builder.events[2], signer=BEN))
    assert isinstance(note, Note) and "not signed by the syncer" in note.text
    assert known.hear(builder.events[2]) == [KeepEntry(builder.events[2].digest, update_of(builder.events[2]))]


# ---- forks


def forked(ours: int = 1, theirs: int = 1) -> tuple[ChainBuilder, ChainBuilder]:
    """Term 1 ends with entries that are not durable, and term 2 goes on before them."""
    builder = ChainBuilder.opened()
    builder.change_roster(FOUNDER_SEAT, seat(BEN), seat(CYD))
    other = builder.fork(2)
    for _ in range(ours):
        builder.commit(0)
    other.open(term=2, syncer=BEN)
    for _ in range(theirs):
        other.commit(0)
    return builder, other


def test_of_two_chains_that_of_the_later_term_counts_and_the_other_is_never_folded() -> None:
    ours, theirs = forked()
    known = knowing(ours)
    known.hear(*ours.events[2:])
    known.stored(*ours.events[2:])
    outcome = known.hear(*theirs.events[3:])
    assert [item for item in outcome if isinstance(item, SyncerChanged)] == [SyncerChanged(Term(2), BEN, "")]
    known.durable(theirs.events[4])
    assert known.new() == [2, 3, 4]
    assert known.chain.ledger.head_digest == theirs.events[4].digest
    assert len(known.chain._tail) == 1 and ours.events[3].digest in known.chain._tail, "a later reform may lead there"
    for seq in (3, 4):
        known.stored(theirs.events[seq])
    for _ in range(2):
        known.chain.kept(SnapshotKept(Seq(4)))
    assert not known.chain._tail, "what is decided for good is forgotten"


def test_a_shorter_chain_of_a_later_term_counts() -> None:
    ours, theirs = forked(ours=5, theirs=0)
    known = knowing(ours)
    known.hear(*ours.events[2:])
    known.hear(theirs.events[3])
    assert known.chain.term == 2
    known.durable(theirs.events[3])
    assert known.new() == [2, 3]


def test_who_hears_late_of_an_older_term_does_not_go_back() -> None:
    ours, theirs = forked()
    known = knowing(theirs)
    known.hear(*theirs.events[2:])
    assert not [item for item in known.hear(*ours.events[3:]) if isinstance(item, SyncerChanged)]
    assert known.chain.term == 2


def test_what_a_later_term_passed_over_is_not_called_durable() -> None:
    """The old syncer may say so, cut off and believed by nobody: there is nothing to fold but the other chain."""
    ours, theirs = forked()
    known = knowing(ours)
    known.hear(*ours.events[2:], *theirs.events[3:])
    known.durable(ours.events[3])
    assert known.new() == []
    assert known.seq == 1


def test_the_update_of_an_entry_that_fell_off_the_chain_is_not_waited_for() -> None:
    ours, theirs = forked()
    known = knowing(ours)
    known.hear(*ours.events[2:], *theirs.events[3:])
    known.stored(*theirs.events[2:])
    known.durable(theirs.events[4])
    assert known.chain.update_lost(UpdateLost(ours.events[3].digest, "gone")) == []
    assert known.stored(ours.events[3]) == []
    assert known.applied(0, 1) != [] and known.chain.fold.is_level


# ---- lost updates


def test_an_update_lost_before_its_commit_was_durable_is_asked_for_again() -> None:
    """No snapshot can replace it: its commit may never count. But its syncer has it, as long as it serves."""
    builder = chain_of(1)
    known = knowing(builder)
    commit = builder.events[2]
    keep = KeepEntry(commit.digest, update_of(commit))
    known.hear(commit)
    assert known.chain.update_lost(UpdateLost(commit.digest, "not kept")) == [keep]
    assert known.durable(commit) == [] and known.new() == [2]
    assert [type(item) for item in known.stored(commit)] == [ApplyUpdate]


def test_an_update_lost_of_a_durable_commit_is_replaced_by_a_snapshot() -> None:
    builder = chain_of(1)
    known = knowing(builder)
    commit = builder.events[2]
    known.hear(commit)
    known.durable(commit)
    outcome = known.chain.update_lost(UpdateLost(commit.digest, "not kept"))
    assert FetchFragment(0, Version(1)) in outcome  # type: ignore[arg-type]
    known.chain.replaced(FragmentReplaced(0, Version(1), fake_digest("theta", 0, 1)))  # type: ignore[arg-type]
    assert known.chain.fold.is_level


# ---- from disk


def test_nothing_is_decided_before_all_that_the_disk_has_was_given() -> None:
    builder = chain_of(2)
    known = Knowing(builder)
    for event in builder.events[2:]:
        assert known.chain.arrived(event, NOW) == []
    assert not known.chain.election.knows(builder.events[2].digest)
    known.begin()
    assert known.chain.election.head.digest == builder.events[3].digest


def test_of_entries_on_disk_only_what_is_missing_is_fetched() -> None:
    builder = chain_of(2)
    known = Knowing(builder)
    outcome = known.begin(replace(builder.events[2], stored=True), builder.events[3])
    assert outcome == [KeepEntry(builder.events[3].digest, update_of(builder.events[3]))]
    assert known.seq == 1, "that they are durable must be heard of again"
    known.durable(builder.events[3])
    assert known.new() == [2, 3]


def test_with_the_whole_chain_the_ledger_is_folded_from_the_beginning_and_the_outer_state_is_not() -> None:
    builder = chain_of(3)
    known = Knowing(builder, loaded=4, whole_chain=True)
    outcome = known.begin(*(replace(event, stored=True) for event in builder.events))
    assert known.new() == [0, 1, 2, 3], "up to where the snapshot was durable"
    assert not [item for item in outcome if isinstance(item, ApplyUpdate)]
    assert known.chain.fold.is_level
    assert [type(item) for item in known.durable(builder.events[4])] == [ApplyUpdate]


def test_what_continues_nothing_on_this_disk_is_taken_when_it_comes_again() -> None:
    """A disk that joined twice has a log with a gap."""
    builder = chain_of(4)
    known = Knowing(builder)
    known.begin(builder.events[2], *builder.events[4:])
    assert len(known.chain._tail) == 1
    known.hear(*builder.events[3:])
    known.durable(builder.events[5])
    assert known.new() == [2, 3, 4, 5]


def test_what_a_snapshot_holds_is_kept_without_its_update() -> None:
    """A peer that joins by a donor's snapshot fetches the entries before it, for its books alone."""
    builder = chain_of(2)
    known = Knowing(builder, loaded=4, whole_chain=True)
    known.begin()
    outcome = known.hear(*builder.events)
    assert [item for item in outcome if isinstance(item, KeepEntry)] == [
        KeepEntry(event.digest, None) for event in builder.events
    ]
    assert known.new() == [0, 1, 2, 3]


def test_forks_on_disk_are_known_again() -> None:
    ours, theirs = forked()
    known = Knowing(ours)
    known.begin(*(replace(event, stored=True) for event in (*ours.events[2:], *theirs.events[3:])))
    assert known.chain.term == 2
    known.durable(theirs.events[4])
    assert known.new() == [2, 3, 4]


# ---- any order


@given(st.integers(0, 2**32))
def test_any_order_of_entries_updates_and_news_ends_at_the_same_ledger(seed: int) -> None:
    """Two chains, one of which counts; whatever is asked for is answered, sooner or later."""
    chance = random.Random(seed)
    ours, theirs = forked(ours=3, theirs=6)
    known = knowing(ours)
    everything: list[EntryArrived] = [*ours.events[2:], *theirs.events[3:]]
    by_digest: dict[Digest, EntryArrived] = {event.digest: event for event in everything}
    todo: list[object] = [*everything, *theirs.events[4:]]
    chance.shuffle(todo)
    reached: list[int] = []
    rounds = 0
    while known.seq < theirs.events[-1].entry.header.seq or not known.chain.fold.is_level:
        rounds += 1
        assert rounds < 1_000, "it never gets there"
        if not todo:
            todo = [*theirs.events[2:], ("durable", theirs.events[-1])]
        item = todo.pop(chance.randrange(len(todo)))
        match item:
            case EntryArrived():
                outcome = known.hear(item)
            case KeepEntry():
                outcome = known.stored(by_digest[item.digest])
            case ApplyUpdate():
                outcome = known.applied(item.fragment, item.version)
            case ("durable", EntryArrived() as event):
                outcome = known.durable(event)
            case _:
                raise AssertionError(item)
        reached += [step.version for step in outcome if isinstance(step, Step)]
        todo += [each for each in outcome if isinstance(each, KeepEntry | ApplyUpdate)]
    assert known.chain.ledger.head_digest == theirs.events[-1].digest
    assert reached == list(range(1, 7))


# ---- what may go


def test_what_two_snapshots_contain_may_go_and_the_chain_is_known_all_the_same() -> None:
    builder = chain_of(6, fragments=1)
    known = knowing(builder)
    events = builder.events
    known.hear(*events[2:])
    known.stored(*events[2:])
    known.durable(events[-1])
    known.chain.kept(SnapshotKept(Seq(4)))
    (prune,) = known.chain.kept(SnapshotKept(Seq(7)))
    assert prune == Prune(tuple(map(update_of, events[2:5])), tuple(event.digest for event in events[1:4]))
    assert not known.chain.election.knows(events[2].digest)
    assert known.chain.election.digest_at(Seq(2)) == events[2].digest
    assert known.hear(*events) == [], "what comes again is no news"
    following = builder.commit(0)
    assert known.hear(following) == [KeepEntry(following.digest, update_of(following))]


def test_a_lost_update_of_what_is_durable_is_asked_for_again_only_when_it_is_folded() -> None:
    """Whoever comes back from far behind would else ask over and over for what is pruned everywhere."""
    builder = chain_of(3, fragments=1)
    known = knowing(builder)
    first, second, last = builder.events[2:]
    known.hear(first, second)
    known.durable(last)
    lost = UpdateLost(first.digest, "gone")
    assert known.chain.update_lost(lost) == []
    assert KeepEntry(first.digest, update_of(first)) in known.hear(last)
    assert [type(each) for each in known.chain.update_lost(lost)] == [Note, FetchFragment]


def test_that_an_update_is_lost_is_said_once_for_a_fragment_that_is_replaced() -> None:
    builder = chain_of(4, fragments=1)
    known = knowing(builder)
    known.hear(*builder.events[2:])
    known.durable(builder.events[-1])
    first, *others = builder.events[2:]
    assert [type(each) for each in known.chain.update_lost(UpdateLost(first.digest, "gone"))] == [Note, FetchFragment]
    assert [known.chain.update_lost(UpdateLost(each.digest, "gone")) for each in others] == [[], [], []]
