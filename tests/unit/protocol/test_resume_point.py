"""Where a checkpoint resumes, against a naive look at the whole chain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_diloco.manifest import Digest, Seq, Version
from geo_diloco.protocol.events import SnapshotLoaded
from geo_diloco.protocol.ledger import Ledger, head_of
from geo_diloco.protocol.messages import Commit, FragmentHead, Reform
from geo_diloco.protocol.resume_point import ResumePoint
from tests.support.chains import BEN, FOUNDER_SEAT, ChainBuilder, seat

NUM_FRAGMENTS = 2


@dataclass(frozen=True)
class Past:
    """A chain and how much of it the ledger and the replica have."""

    chain: ChainBuilder
    adopted: tuple[int, ...]
    """Per fragment: the version."""

    def heads(self) -> list[FragmentHead]:
        heads = list(self.chain.fork(1).ledger().heads)
        for event in self.chain.events:
            if isinstance(event.entry, Commit) and event.entry.version <= self.adopted[event.entry.fragment]:
                heads[event.entry.fragment] = head_of(event.entry, event.digest)
        return heads

    def naive(self) -> SnapshotLoaded:
        """After the last entry before the first commit that is not adopted."""
        until = len(self.chain.events) - 1
        for seq, event in enumerate(self.chain.events):
            if isinstance(event.entry, Commit) and event.entry.version > self.adopted[event.entry.fragment]:
                until = seq - 1
                break
        return replace(self.chain.fork(until).snapshot(), heads=tuple(self.heads()))


def grown(chain: ChainBuilder, kinds: list[int]) -> ChainBuilder:
    """Entries of all kinds follow."""
    for kind in kinds:
        match kind:
            case 0 | 1:
                chain.commit(kind)
            case 2:
                chain.open(chain.term + 1)
            case 3:
                chain.record()
            case 4:
                chain.change_roster(FOUNDER_SEAT, seat(BEN))
            case 5:
                chain.amendment(1 + sum(event.entry.kind == "amendment" for event in chain.events), mu=0.25)
    return chain


def reformed(chain: ChainBuilder, after: int) -> ChainBuilder:
    """What goes on after that entry: the reform, and `open` of its first term."""
    branch = chain.fork(after)
    branch.term = 1
    branch.add(Reform(header=branch.header(), lineage=1, roster=(FOUNDER_SEAT,)))
    branch.open(2)
    return branch


KINDS = st.lists(st.integers(0, 5), max_size=12)


class Following:
    """A resume point whose ledger takes a chain, entry by entry."""

    def __init__(self, chain: ChainBuilder) -> None:
        self.ledger = Ledger()
        self.point = ResumePoint(self.ledger)
        self.ledger.become(chain.fork(1).ledger())
        self.point.start()
        self.take(chain)

    def take(self, chain: ChainBuilder) -> None:
        for event in chain.events[self.ledger.seq + 1 :]:
            assert self.ledger.why_not(event.entry) is None
            self.ledger.apply(event.entry, event.digest)
            self.point.folded(event.entry)

    def rewound(self, chain: ChainBuilder, to: int) -> None:
        self.ledger.become(chain.fork(to).ledger())
        self.point.rewound(Seq(to))


def versions(chain: ChainBuilder, of: list[int]) -> tuple[int, ...]:
    return tuple(min(one, most) for one, most in zip(of, chain.versions, strict=True))


ADOPTED = st.lists(st.integers(0, 6), min_size=NUM_FRAGMENTS, max_size=NUM_FRAGMENTS)


@settings(max_examples=200)
@given(kinds=KINDS, first=ADOPTED, then=ADOPTED, told=st.booleans())
def test_it_is_the_last_entry_before_the_first_commit_that_is_not_adopted(
    kinds: list[int], first: list[int], then: list[int], told: bool
) -> None:
    chain = grown(ChainBuilder.opened(), kinds)
    following = Following(chain)
    before = Past(chain, versions(chain, first))
    if told:
        following.point.adopted(before.heads())
    now = Past(chain, versions(chain, [max(pair) for pair in zip(first, then, strict=True)]))
    assert following.point.snapshot(now.heads()) == now.naive()


@settings(max_examples=200)
@given(kinds=KINDS, adopted=ADOPTED, back=st.integers(1, 13), after=KINDS, later=ADOPTED)
def test_after_a_reform_it_is_as_if_what_is_abandoned_had_never_been(
    kinds: list[int], adopted: list[int], back: int, after: list[int], later: list[int]
) -> None:
    """What was adopted beyond is on its way back, and counts as adopted where the ledger is now."""
    chain = grown(ChainBuilder.opened(), kinds)
    following = Following(chain)
    following.point.adopted(Past(chain, versions(chain, adopted)).heads())
    to = min(back, len(chain.events) - 1)
    stood = versions(chain.fork(to), adopted)
    following.rewound(chain, to)
    assert following.point.snapshot(Past(chain.fork(to), stood).heads()) == Past(chain.fork(to), stood).naive()
    other = grown(reformed(chain, to), after)
    following.take(other)
    now = Past(other, tuple(max(pair) for pair in zip(stood, versions(other, later), strict=True)))
    assert following.point.snapshot(now.heads()) == now.naive()


def test_no_checkpoint_resumes_beyond_the_end() -> None:
    """Whoever resumes must hear from the chain that the run is finished."""
    chain = ChainBuilder.opened()
    chain.commit(0)
    last = chain.fork(2).snapshot()
    chain.finished()
    chain.open(2)
    following = Following(chain)
    assert following.point.snapshot(Past(chain, (1, 0)).heads()) == last


def test_a_snapshot_ahead_of_its_place_is_where_it_begins() -> None:
    """A checkpoint may have adopted commits after the entry where it resumes: what is loaded is what is saved."""
    chain = ChainBuilder.opened()
    event = chain.commit(0)
    early = chain.fork(1)
    ledger = early.ledger()
    point = ResumePoint(ledger)
    point.start()
    assert isinstance(event.entry, Commit)
    ahead = (head_of(event.entry, event.digest), ledger.heads[1])
    assert point.snapshot(ahead) == replace(early.snapshot(), heads=ahead)
    assert (ahead[0].version, ahead[0].base) == (Version(1), Digest(event.digest))
