"""The owner's reform as a peer's core takes it: what goes on, what is abandoned, and where the work of that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_diloco.manifest import BranchId, Digest, PeerId, Seq, Term
from geo_diloco.protocol.effects import (
    Adopt,
    ApplyUpdate,
    Effect,
    FetchFragment,
    Note,
    PersistAccounts,
    Seal,
    Send,
    TokensDropped,
    TokensMerged,
)
from geo_diloco.protocol.election.ballots import NO_HEAD, Need, Refuse
from geo_diloco.protocol.events import (
    Applied,
    Connected,
    EntryArrived,
    EntryStored,
    FragmentReplaced,
    Resumed,
    Saved,
    SnapshotKept,
)
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Commit, Durable, EntryHeader, Open, Reform
from geo_diloco.protocol.peer import Peer
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.sim.fakes import LAYOUT, RUN, fake_digest
from tests.support.chains import ANN, FOUNDER, FOUNDER_SEAT, ChainBuilder, seat
from tests.support.single import P0, Learning, adopt, begun, handed_in, known, of, only, said, take
from tests.support.standing import BEN_SEAT, Standing, seated_chain

FOUNDER_AND_ANN = (FOUNDER_SEAT, seat(ANN))


def reformed(
    chain: ChainBuilder, after: int, *, lineage: int = 1, owner: PeerId = FOUNDER, **changed: Any
) -> ChainBuilder:
    """What goes on after that entry: the reform, with BEN as only elector, and `open` of its first term."""
    branch = chain.fork(after)
    header = EntryHeader(
        run=RUN,
        branch=branch.branch,
        term=Term(1),
        seq=Seq(after + 1),
        prev=Digest(branch.events[-1].digest),
    )
    entry = replace(Reform(header=header, lineage=lineage, roster=(BEN_SEAT,)), **changed)
    branch.syncer = owner
    branch.add(entry)
    branch.open(2, syncer=BEN_SEAT.peer)
    return branch


def tokens_in(effects: list[Effect]) -> tuple[int, int]:
    merged = sum(each.tokens for each in only(effects, TokensMerged) if each.fragment == P0)
    return merged, sum(each.tokens for each in only(effects, TokensDropped) if each.fragment == P0)


# ---- ledger


def test_a_reform_begins_a_branch_named_by_its_digest() -> None:
    chain = ChainBuilder.opened()
    chain.commit(0)
    ledger = reformed(chain, 2).ledger()
    assert (ledger.lineage, ledger.term, ledger.roster, ledger.roster_seq) == (1, 2, (BEN_SEAT,), 3)
    assert ledger.branch == reformed(chain, 2).events[3].digest
    assert ledger.opened is not None and ledger.opened.syncer == BEN_SEAT.peer
    assert ledger.num_commits == 1


def test_the_owner_counts_reforms_up() -> None:
    chain = ChainBuilder.opened()
    once = reformed(chain, 1)
    again = replace(reformed(chain, 1).events[2].entry, header=once.header(), lineage=1)  # type: ignore[type-var]
    assert once.ledger().why_not(again) == "reform 1 does not follow 1"
    chain.finished()
    assert chain.ledger().why_not(replace(again, header=chain.header(), lineage=2)) == "the run is finished"


def test_a_snapshot_says_in_which_lineage_it_is() -> None:
    branch = reformed(ChainBuilder.opened(), 1)
    ledger = Ledger()
    ledger.load(branch.snapshot())
    assert ledger.lineage == 1
    learning = Learning(branch.snapshot())
    learning.connect()
    assert learning.core.election.head.rank.lineage == 1


# ---- a learner


def heard(learning: Learning, branch: ChainBuilder, after: int) -> list[Effect]:
    """The entries of the branch arrive, from BEN who serves it, and are durable."""
    new = branch.events[after + 1 :]
    effects = [effect for event in new for effect in learning.give(event) + learning.give(EntryStored(event.digest))]
    learning.give(Connected(BEN_SEAT.peer, seeking=True))
    return effects + durable(learning, branch)


def durable(learning: Learning, branch: ChainBuilder) -> list[Effect]:
    """BEN says that all of it is."""
    newest = branch.events[-1]
    return learning.hear(Durable(seq=newest.entry.header.seq, digest=newest.digest), BEN_SEAT.peer)


def take_on(learning: Learning, branch: ChainBuilder) -> list[Effect]:
    """BEN's newest commit, up to the order to adopt."""
    newest = branch.events[-1]
    effects = learning.give(newest) + learning.give(EntryStored(newest.digest)) + durable(learning, branch)
    for apply in only(effects, ApplyUpdate):
        effects += learning.give(Applied(apply.fragment, apply.version, apply.state_digest))
    return effects


def test_a_learner_that_is_not_beyond_the_reform_just_goes_on() -> None:
    learning, chain = begun()
    take(learning, chain.commit(0))
    learning.train()
    adopt(learning, 1)
    branch = reformed(chain, 2)
    effects = heard(learning, branch, 2)
    assert not only(effects, FetchFragment) and tokens_in(effects) == (0, 0)
    assert learning.core.ledger.branch == branch.events[3].digest
    branch.commit(0)
    assert only(take_on(learning, branch), ApplyUpdate)[0].version == 2


def test_a_learner_beyond_the_reform_goes_back_and_carries() -> None:
    learning, chain = begun()
    claim = handed_in(learning)
    take(learning, chain.commit(0, of(claim)))
    merged, _ = tokens_in(adopt(learning, 1))
    assert merged == claim.tokens_unmerged > 0
    learning.train(3)
    carried = learning.core.tokens()[0].carried
    branch = reformed(chain, 1)
    effects = heard(learning, branch, 1)
    assert any(
        "abandoned by the owner's reform: 1 entries after 1, 1 of them commits" in n.text for n in only(effects, Note)
    )
    assert only(effects, FetchFragment) == [FetchFragment(P0, branch.ledger().heads[0].version)]
    assert tokens_in(effects) == (-merged, merged)
    assert only(effects, TokensDropped)[0].reason == "abandoned"
    assert learning.core.tokens()[0].merged == 0 and learning.core.tokens()[0].carried == carried
    head = branch.ledger().heads[0]
    adopts = only(learning.give(FragmentReplaced(P0, head.version, head.state_digest)), Adopt)
    assert [(each.version, each.participant) for each in adopts] == [(0, None)]
    adopt(learning, 0)
    assert learning.core.tokens()[0].carried == carried
    branch.commit(0)
    take_on(learning, branch)
    learning.train()
    adopt(learning, 1)
    (persist,) = only(learning.give(Saved(1, learning.step, learning.tokens)), PersistAccounts)
    assert persist.resume_at.lineage == 1 and persist.resume_at.heads[0].base == branch.events[-1].digest


@pytest.mark.parametrize("is_durable", [True, False], ids=["durable once", "never durable"])
def test_a_second_reform_may_go_on_from_what_the_first_has_abandoned(is_durable: bool) -> None:
    """Its entries are taken in once; a peer that had dropped them by then would wait for ever."""
    learning, chain = begun()
    new = [chain.commit(0), chain.commit(0), chain.record()]
    for event in new:
        take(learning, event) if is_durable else learning.give(event)
    first = reformed(chain, 1)
    first.commit(0)
    first.commit(0)
    heard(learning, first, 1)
    assert learning.core.ledger.head_digest == first.events[-1].digest
    second = reformed(chain, 4, lineage=2)
    heard(learning, second, 4)
    assert learning.core.ledger.head_digest == second.events[-1].digest
    second.commit(0)
    take_on(learning, second)
    assert learning.core.ledger.head_digest == second.events[-1].digest


def test_a_checkpoint_may_be_of_a_branch_that_nobody_has_opened() -> None:
    """The owner reforms once more, on top of a reform whose first term did not get to whoever is left."""
    learning, chain = begun()
    learning.train()
    first = reformed(chain, 1)
    heard(learning, first, 1)
    assert learning.core.ledger.seq == 3
    second = reformed(first, 2, lineage=2)
    del second.events[4:]
    learning.give(second.events[-1])
    assert learning.core.ledger.head_digest == first.events[2].digest
    (persist,) = only(learning.give(Saved(1, learning.step, learning.tokens)), PersistAccounts)
    assert (persist.resume_at.head_digest, persist.resume_at.opened) == (first.events[2].digest, None)
    again = Learning(persist.resume_at)
    again.give(Resumed(persist.step, persist.tokens, persist.accounts, 0, 0))
    second = reformed(first, 2, lineage=2)
    heard(again, second, 2)
    assert again.core.ledger.head_digest == second.events[-1].digest


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (2, 0, 3, 1), (3, 1, 2, 0)])
def test_a_reform_on_top_of_what_was_never_durable_here_is_followed(order: tuple[int, ...]) -> None:
    """The head that the owner found best has entries that our chain went past without."""
    learning, chain = begun()
    take(learning, chain.commit(0))
    other = chain.fork(2)
    known(learning, chain.open(2))
    for _ in range(6):
        take(learning, chain.commit(1))
    assert learning.core.ledger.seq == 9
    other.record()
    other.commit(0)
    branch = reformed(other, 4)
    new = branch.events[3:]
    assert [event.entry.kind for event in new] == ["record", "commit", "reform", "open"]
    for index in order:
        learning.give(new[index])
        learning.give(EntryStored(new[index].digest))
    for event in new:  # whoever is asked for what is missing sends all of it
        learning.give(event)
        learning.give(EntryStored(event.digest))
    learning.give(Connected(BEN_SEAT.peer, seeking=True))
    durable(learning, branch)
    assert learning.core.ledger.head_digest == branch.events[-1].digest
    assert learning.core.ledger.heads[0] == branch.ledger().heads[0]


def test_who_keeps_only_a_snapshot_of_what_is_abandoned_acks_nothing_until_it_has_another() -> None:
    """A process that started now would begin there, and could not get to what was acked."""
    learning, chain = begun()
    take(learning, chain.commit(0))
    learning.train()
    adopt(learning, 1)
    learning.give(SnapshotKept(Seq(2)))
    branch = reformed(chain, 1)
    heard(learning, branch, 1)
    assert learning.core.election.best == NO_HEAD
    learning.give(SnapshotKept(branch.events[-1].entry.header.seq))
    assert learning.core.election.best.digest == branch.events[-1].digest


def test_who_keeps_a_snapshot_of_what_goes_on_acks_on() -> None:
    learning, chain = begun()
    learning.give(SnapshotKept(Seq(1)))
    take(learning, chain.commit(0))
    branch = reformed(chain, 1)
    heard(learning, branch, 1)
    assert learning.core.election.best.digest == branch.events[-1].digest


def test_a_reform_that_connects_to_nothing_here_is_not_followed_by_parts() -> None:
    learning, chain = begun()
    branch = reformed(chain.fork(1), 1)
    stranger = replace(branch.events[2], entry=replace(branch.events[2].entry, lineage=7), digest=Digest("d" * 64))
    stranger = replace(stranger, entry=replace(stranger.entry, header=replace(stranger.entry.header, prev="e" * 64)))
    learning.give(stranger)
    take(learning, chain.commit(0))
    assert learning.core.ledger.head_digest == chain.events[-1].digest
    heard(learning, branch, 1)
    assert learning.core.ledger.lineage == 1, "one that does connect is"


def test_an_adoption_that_was_under_way_is_taken_back() -> None:
    learning, chain = begun()
    claim = handed_in(learning)
    effects = take(learning, chain.commit(0, of(claim)))
    branch = reformed(chain, 1)
    effects = heard(learning, branch, 1)
    assert tokens_in(effects) == (0, 0), "not in the books yet"
    effects = adopt(learning, 1)
    assert tokens_in(effects) == (0, claim.tokens_unmerged)
    tokens = learning.core.tokens()[0]
    assert tokens.trained == tokens.merged + tokens.in_flight + tokens.carried + claim.tokens_unmerged


def test_work_on_a_base_that_is_abandoned_is_refused_and_carried() -> None:
    learning, chain = begun()
    take(learning, chain.commit(0))
    learning.train()
    adopt(learning, 1)
    claim = handed_in(learning)
    branch = reformed(chain, 1)
    heard(learning, branch, 1)
    standing = Standing(branch, durable_seq=1)
    assert claim.id.base not in standing.core.ledger.bases[0]


def test_a_snapshot_ahead_of_its_place_does_not_keep_what_is_abandoned() -> None:
    """A checkpoint may have adopted a commit after the entry where it resumes."""
    chain = ChainBuilder.opened()
    first = chain.commit(0)
    second = chain.commit(0)
    early = chain.fork(1).snapshot()
    heads = (chain.ledger().heads[0], early.heads[1])
    learning = Learning(replace(early, heads=heads))
    learning.connect()
    known(learning, first, second)
    branch = reformed(chain, 2)
    effects = heard(learning, branch, 2)
    assert only(effects, FetchFragment) == [FetchFragment(P0, branch.ledger().heads[0].version)]
    assert learning.core.ledger.heads[0] == branch.ledger().heads[0]


# ---- whoever may serve


def test_an_elector_named_by_a_reform_serves_the_new_branch() -> None:
    chain = seated_chain()
    standing = Standing(chain)
    branch = reformed(chain, 2)
    standing.give(branch.events[3])
    assert standing.core.election.record.lineage == 1
    effects = standing.pass_time(20_000) + standing.pass_time(1_000) + standing.pass_time(1_000)
    (opened,) = [seal.entry for seal in only(effects, Seal) if isinstance(seal.entry, Open)]
    assert opened.header.branch == branch.events[3].digest
    assert standing.core.serves and standing.core.ledger.lineage == 1


def test_a_syncer_of_the_old_branch_yields_when_it_hears_of_a_later_one() -> None:
    chain = seated_chain()
    standing = Standing(chain)
    standing.elected()
    assert standing.core.serves
    branch = reformed(chain, 2, roster=(seat(ANN),))
    standing.give(branch.events[3])
    assert not standing.core.serves
    assert standing.core.election.branch == branch.events[3].digest


def test_a_disk_with_what_is_abandoned_starts_on_what_goes_on() -> None:
    """Its newest snapshot is of commits that a reform has left behind since."""
    chain = seated_chain()
    chain.commit(0)
    chain.commit(1)
    branch = reformed(chain, 2)
    snapshot = chain.snapshot(whole_chain=True)
    standing = Standing(branch, durable_seq=2)
    fresh = Standing.__new__(Standing)
    fresh.core, fresh.now = standing_core(branch), 0
    effects = fresh.load(snapshot, [*chain.events, *branch.events[3:]])
    assert fresh.core.election.branch == branch.events[3].digest
    fetched = {each.fragment: each.version for each in only(effects, FetchFragment)}
    assert fetched == {0: 0, 1: 0}
    assert fresh.core.ledger.heads == standing.core.ledger.heads


def standing_core(branch: ChainBuilder) -> Any:
    """BEN's core, whose disk is in that branch."""
    core = Standing(branch, durable_seq=2).core
    record = replace(core.election.record, lineage=1, branch=BranchId(branch.events[3].digest))
    return Peer(
        peer=BEN_SEAT.peer,
        boot=core.boot,
        role="follower",
        rules=core._rules,
        run=RUN,
        layout_digest=LAYOUT,
        hello=HelloFacts(address=BEN_SEAT.address),
        seat=Seat(may_serve=True, may_elect=True, record=record, machine=BEN_SEAT.host),
    )


# ---- from liars, twice, out of order


@pytest.mark.parametrize(
    "change",
    [{"owner": ANN}, {"lineage": 0}, {"roster": ()}, {"roster": (BEN_SEAT, BEN_SEAT)}],
)
def test_a_reform_that_no_owner_signed_is_on_nobodys_chain(change: dict[str, Any]) -> None:
    chain = seated_chain()
    standing = Standing(chain)
    header = EntryHeader(
        run=RUN, branch=standing.core.election.branch, term=Term(1), seq=Seq(3), prev=Digest(chain.events[2].digest)
    )
    owner = change.pop("owner", FOUNDER)
    entry = replace(Reform(header=header, lineage=1, roster=(BEN_SEAT,)), **change)
    standing.give(EntryArrived(entry, fake_digest(entry), owner))
    assert standing.core.election.record.lineage == 0 and standing.head.rank.seq == 2


def test_two_reforms_of_one_number_are_an_alarm() -> None:
    chain = seated_chain()
    chain.commit(0)
    standing = Standing(chain)
    standing.give(reformed(chain, 3).events[4])
    effects = standing.give(reformed(chain, 2).events[3])
    assert any(note.text.endswith("ALARM: two reforms of number 1") for note in only(effects, Note))


def test_a_peer_of_another_branch_is_told_so_and_asks_for_ours() -> None:
    learning, chain = begun()
    branch = reformed(chain, 1)
    refuse = Refuse(reason="branch", detail="another", term=Term(2))
    effects = learning.hear(refuse, branch=BranchId(branch.events[2].digest), term=Term(2))
    assert said(effects, Need, FOUNDER)
    assert not [each for each in only(effects, Send) if isinstance(each.message, Commit)]


CHAIN = ChainBuilder.opened()
CHAIN.commit(0)
CHAIN.commit(1)
FIRST = reformed(CHAIN, 2)
FIRST.commit(1)
SECOND = reformed(FIRST, 3, lineage=2)
SECOND.commit(0)
ALL = {event.digest: event for branch in (CHAIN, FIRST, SECOND) for event in branch.events[2:]}


@given(st.permutations(list(ALL.values())), st.integers(2, len(CHAIN.events)))
def test_in_whatever_order_entries_come_the_latest_reform_goes_on(order: list[EntryArrived], known_first: int) -> None:
    """Some of the old chain is known and durable. What comes too early is dropped, and asked for again."""
    learning = Learning(CHAIN.fork(1).snapshot())
    learning.connect()
    known(learning, *CHAIN.events[2:known_first])
    for _ in range(len(ALL)):
        for event in order:
            learning.give(event)
    for event in SECOND.events:
        learning.give(EntryStored(event.digest))
    assert learning.core.election.branch == SECOND.branch
    learning.give(Connected(BEN_SEAT.peer, seeking=True))
    durable(learning, SECOND)
    assert learning.core.ledger.heads == SECOND.ledger().heads
    assert (learning.core.ledger.lineage, learning.core.ledger.head_digest) == (2, SECOND.events[-1].digest)
