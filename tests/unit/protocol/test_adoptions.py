"""What is adopted and what the chain took of one's own: ordered, booked, and taken back after a reform."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_diloco.manifest import FragmentId, Seq, Version
from geo_diloco.protocol import adoptions as adoptions_module
from geo_diloco.protocol.accounts import Account
from geo_diloco.protocol.adoptions import CARRY_ALL, Adoptions
from geo_diloco.protocol.effects import Adopt, Effect, Reset, TokensDropped, TokensMerged
from geo_diloco.protocol.events import Adopted, EntryArrived
from geo_diloco.protocol.fold import Step
from geo_diloco.protocol.ledger import id_of
from geo_diloco.protocol.messages import Commit, Contribution, Participant
from tests.support.chains import ANN, BEN, ChainBuilder, contribution, participant

P0, P1 = FragmentId(0), FragmentId(1)
PPM = 1_000_000


class Adopting:
    """ANN's adoptions and books on two fragments, and the chain that her ledger follows."""

    def __init__(self) -> None:
        self.chain = ChainBuilder.opened()
        self.ledger = self.chain.ledger()
        self.adoptions = Adoptions(ANN, self.ledger)
        self.adoptions.start()
        self.accounts = [Account(P0), Account(P1)]
        self.tokens = 0

    def handed_in(self, last_step: int, tokens: int = 100) -> Contribution:
        """Of fragment 0, trained since the last one."""
        self.tokens += tokens
        undecided = self.accounts[0].sample(last_step, self.tokens)
        undecided.contribution = contribution(
            base=self.chain.bases[0],
            base_version=self.chain.versions[0],
            last_step=last_step,
            tokens_unmerged=undecided.tokens,
        )
        return undecided.contribution

    def folded(self, *participants: Participant, fragment: int = 0) -> EntryArrived:
        """Another commit is on the ledger."""
        event = self.chain.commit(fragment, *participants)
        assert isinstance(event.entry, Commit)
        self.ledger.apply(event.entry, event.digest)
        self.adoptions.folded(event.entry)
        return event

    def reached(self, *events: EntryArrived) -> list[Effect]:
        commits = tuple(event.entry for event in events if isinstance(event.entry, Commit))
        step = Step(commits[-1].fragment, commits[-1].version, commits, events[-1].digest)
        undecided = self.accounts[step.fragment].undecided
        return self.adoptions.reached(step, None if undecided is None else undecided.contribution)

    def adopt(self, version: int, fragment: FragmentId = P0) -> list[Effect]:
        """The training thread did, ten steps after what was handed in last."""
        adoption = self.adoptions.done(fragment, Version(version))
        assert adoption is not None
        account = self.accounts[fragment]
        booked = self.adoptions.book(adoption, account, Adopted(fragment, Version(version), 10, self.tokens, PPM))
        return booked + (self.adoptions.take_back(adoption, account) if adoption.abandoned else [])

    def rewound(self, to: int) -> list[Effect]:
        self.chain = self.chain.fork(to)
        self.ledger.become(self.chain.ledger())
        return self.adoptions.rewound(Seq(to), self.accounts)


def of(claim: Contribution) -> Participant:
    mine = participant(ANN, claim.id.base, claim.base_version, claim.first_step, claim.id.last_step)
    return replace(mine, tokens_unmerged=claim.tokens_unmerged, contribution=claim.blob)


def others(adopting: Adopting) -> Participant:
    return participant(BEN, adopting.chain.bases[0], adopting.chain.versions[0], 0, 8)


# ---- orders


def test_an_order_names_our_own_delta_if_the_commit_took_it() -> None:
    it = Adopting()
    claim = it.handed_in(8)
    without = it.folded(others(it))
    assert it.reached(without) == [Adopt(P0, Version(1), None, 1.0)]
    assert it.reached(it.folded(of(claim))) == [Adopt(P0, Version(2), claim.blob, 1.0)]


def test_over_several_commits_the_cut_of_the_carry_goes_by_the_newest() -> None:
    it = Adopting()
    first, second = it.folded(others(it)), it.folded(others(it))
    assert isinstance(second.entry, Commit)
    assert it.reached(first, replace(second, entry=replace(second.entry, rbar=3.0))) == [
        Adopt(P0, Version(2), None, 3.0)
    ]


def test_work_that_is_not_in_the_books_resets_the_fragment() -> None:
    it = Adopting()
    claim = it.handed_in(8)
    earlier = replace(of(claim), last_step=5)
    assert it.reached(it.folded(earlier)) == [Reset(P0, Version(1))]
    assert it.reached(it.folded(of(claim), earlier)) == [Reset(P0, Version(2))], "one of both is not"


def test_on_the_way_back_everything_is_carried() -> None:
    it = Adopting()
    assert it.adoptions.reached(Step(P0, Version(0), (), it.chain.bases[0]), it.handed_in(8)) == [
        Adopt(P0, Version(0), None, CARRY_ALL)
    ]


def test_orders_are_done_one_after_the_other() -> None:
    it = Adopting()
    assert not it.adoptions.is_ordered(P0)
    first, second = it.folded(), it.folded()
    it.reached(first)
    it.reached(second)
    assert it.adoptions.done(P0, Version(2)) is None and it.adoptions.done(P1, Version(1)) is None
    assert [it.adoptions.is_ordered(P0), it.adoptions.is_ordered(P1)] == [True, False]
    it.adopt(1)
    assert it.adoptions.heads[0].base == first.digest
    it.adopt(2)
    assert it.adoptions.heads[0] == it.chain.ledger().heads[0]
    assert not it.adoptions.is_ordered(P0)
    assert it.adoptions.done(P0, Version(2)) is None, "once"


def test_a_commit_has_taken_our_work_from_when_it_is_folded_until_it_is_adopted() -> None:
    it = Adopting()
    claim = it.handed_in(8)
    event = it.folded(others(it))
    assert not it.adoptions.has_taken(claim.id)
    ours, theirs = of(claim), others(it)
    taking = it.folded(ours, theirs)
    assert it.adoptions.has_taken(claim.id)
    assert not it.adoptions.has_taken(replace(claim.id, last_step=9))
    assert not it.adoptions.has_taken(id_of(theirs, P0)), "not ours"
    it.reached(event)
    it.reached(taking)
    it.adopt(1)
    assert it.adoptions.has_taken(claim.id), "by the commit after that"
    it.adopt(2)
    assert not it.adoptions.has_taken(claim.id)


# ---- books


def test_what_the_syncer_credited_is_merged_and_the_rest_implausible() -> None:
    it = Adopting()
    claim = it.handed_in(8)
    it.reached(it.folded(replace(of(claim), tokens_unmerged=70)))
    assert it.adopt(1) == [TokensMerged(P0, Version(1), 70), TokensDropped(P0, 30, "implausible")]
    assert it.accounts[0].merged == 70 and it.accounts[0].undecided is None


def test_forgotten_work_counts_with_every_commit_that_took_some() -> None:
    it = Adopting()
    it.handed_in(9)
    commits = [it.folded(participant(ANN, it.chain.bases[0], v, v, v + 11, tokens=40), others(it)) for v in range(2)]
    assert it.reached(*commits) == [Reset(P0, Version(2))]
    assert it.adopt(2) == [
        TokensMerged(P0, Version(2), 80),
        TokensDropped(P0, -80, "crashed"),
        TokensDropped(P0, 100, "restarted"),
    ]
    assert it.accounts[0].first_step == 12, "behind all that was ever merged"


# ---- after a reform


def merged_then_dropped(tokens: int, version: int) -> list[Effect]:
    return [TokensMerged(P0, Version(version), -tokens), TokensDropped(P0, tokens, "abandoned")]


def test_what_was_booked_of_abandoned_commits_is_taken_back_and_the_rest_stays() -> None:
    it = Adopting()
    for version, last_step in ((1, 8), (2, 16), (3, 24)):
        it.reached(it.folded(of(it.handed_in(last_step, tokens=100 * version)), others(it)))
        it.adopt(version)
    assert it.accounts[0].merged == 600
    assert it.rewound(2) == merged_then_dropped(500, version=1)
    assert it.accounts[0].merged == 100 and it.accounts[0].adopted_version == 1
    assert it.adoptions.heads == it.chain.ledger().heads
    assert it.rewound(1) == merged_then_dropped(100, version=0), "and what is taken back is so once"
    assert it.rewound(1) == []


def test_an_order_that_is_abandoned_is_booked_and_taken_back() -> None:
    it = Adopting()
    claim = it.handed_in(8)
    it.reached(it.folded(of(claim)))
    before = list(it.adoptions.heads)
    assert it.rewound(1) == [] and not it.adoptions.has_taken(claim.id)
    assert it.adopt(1) == [TokensMerged(P0, Version(1), 100), *merged_then_dropped(100, version=0)]
    assert it.accounts[0].merged == 0 and it.accounts[0].adopted_version == 0
    assert it.adoptions.heads == before
    assert it.rewound(1) == [], "once"


def test_an_order_that_goes_on_is_booked_and_stays() -> None:
    it = Adopting()
    claim = it.handed_in(8)
    it.reached(it.folded(of(claim)))
    it.reached(it.folded(others(it)))
    assert it.rewound(2) == [] and it.adoptions.has_taken(claim.id)
    assert it.accounts[0].adopted_version == 0, "still to come"
    assert it.adopt(1) == [TokensMerged(P0, Version(1), 100)]
    assert it.adopt(2) == [] and it.accounts[0].adopted_version == 1


def test_what_is_abandoned_stays_so_whatever_has_that_version_later() -> None:
    it = Adopting()
    it.reached(it.folded(of(it.handed_in(8))))
    it.rewound(1)
    it.folded(others(it))
    it.rewound(2)
    assert it.adopt(1) == [TokensMerged(P0, Version(1), 100), *merged_then_dropped(100, version=0)]


def test_the_way_back_is_adopted_as_any_other_version() -> None:
    it = Adopting()
    it.reached(it.folded(others(it)))
    it.adopt(1)
    it.rewound(1)
    it.adoptions.reached(Step(P0, Version(0), (), it.chain.bases[0]), None)
    assert it.adopt(0) == [] and it.adoptions.heads == it.chain.ledger().heads


def test_of_an_order_over_several_commits_only_what_is_abandoned_is_taken_back() -> None:
    it = Adopting()
    claim = it.handed_in(8)
    it.reached(it.folded(of(claim)), it.folded(others(it)))
    it.rewound(2)
    it.adoptions.reached(Step(P0, Version(1), (), it.chain.bases[0]), None)
    assert it.adopt(2) == [TokensMerged(P0, Version(2), 100)], "the commit that took it goes on"
    assert it.adopt(1) == [] and it.adoptions.heads == it.chain.ledger().heads
    assert it.accounts[0].merged == 100 and it.accounts[0].adopted_version == 1
    assert it.rewound(1) == merged_then_dropped(100, version=0), "by another reform it is abandoned, once"
    assert it.rewound(1) == []


def test_what_was_taken_back_as_it_was_adopted_is_not_taken_back_again() -> None:
    it = Adopting()
    it.reached(it.folded(of(it.handed_in(8))))
    it.rewound(1)
    it.folded(others(it), fragment=1)
    it.folded(others(it), fragment=1)
    it.adopt(1)
    assert it.rewound(1) == [] and it.accounts[0].merged == 0


def test_a_fragment_that_is_not_beyond_stays_where_it_is() -> None:
    it = Adopting()
    it.reached(it.folded(fragment=1))
    it.adopt(1, P1)
    it.reached(it.folded(of(it.handed_in(8))))
    it.adopt(1)
    there = it.adoptions.heads[1]
    assert it.rewound(2) == merged_then_dropped(100, version=0)
    assert it.adoptions.heads[1] == there and it.accounts[1].adopted_version == 1


def test_no_more_is_taken_back_than_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoptions_module, "MERGED_REMEMBERED", 2)
    it = Adopting()
    for version in (1, 2, 3):
        it.reached(it.folded(of(it.handed_in(8 * version))))
        it.adopt(version)
    assert it.rewound(1) == merged_then_dropped(200, version=0)
    for version in (1, 2, 3):
        it.reached(it.folded(of(it.handed_in(24 + 8 * version))))
        it.adopt(version)
    assert it.rewound(1) == merged_then_dropped(200, version=0), "not after a reform either"
