"""What a peer does that is ordered to hand over, to amend or to reform: only what the run's owner signed, and once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geo_diloco.errors import GeoDilocoError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import BranchId, Digest, EvalSpec, PeerId, RunId, RunRules, Seq, Term
from geo_diloco.node.obeying import Obedience
from geo_diloco.observability import EventLog
from geo_diloco.protocol.amendments import AmendmentOrder, Changes
from geo_diloco.protocol.effects import Effect, Evaluate, KeepEntry, Seal
from geo_diloco.protocol.events import AmendmentAsked, EntryArrived, EntryStored, Evaluated, Event, HandoverAsked
from geo_diloco.protocol.messages import Entry, EntryHeader, Record, Reform
from geo_diloco.protocol.peer import Peer
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.following import Following, FollowingParts
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.store import ChainStore
from geo_diloco.runtime.wire import Order, Signed, seal_amendment, seal_entry
from geo_diloco.sim.fakes import LAYOUT, RUN
from tests.support.chains import FOUNDER_BOOT, SYNC, ChainBuilder, seat
from tests.support.single import BOOT, Single, vote_record
from tests.support.standing import sealed

OWNER, STRANGER = Identity.generate(), Identity.generate()
OWN_SEAT = seat(OWNER.peer_id, "owner:1")
ELSEWHERE = RunId("cd" * 20)


class Obeying(Single):
    """The owner's own peer, the only elector, with a chain of four entries on its disk; it serves after a moment."""

    def __init__(self, folder: Path) -> None:
        chain = self.chain = ChainBuilder()
        chain.syncer, chain.roster = OWNER.peer_id, (OWN_SEAT,)
        chain.found()
        chain.open(syncer=OWNER.peer_id, boot=FOUNDER_BOOT)
        chain.commit(0)
        chain.commit(1)
        self.fed: list[Event] = []
        self.notes: list[str] = []
        rules = RunRules(sync=SYNC, evaluation=EvalSpec(every_seconds=0), founder=OWNER.peer_id)
        record = replace(vote_record(chain), enrolment=OWN_SEAT.enrolment)
        self.core = Peer(
            peer=OWNER.peer_id,
            boot=BOOT,
            role="follower",
            rules=rules,
            run=RUN,
            layout_digest=LAYOUT,
            hello=HelloFacts(address=OWN_SEAT.address),
            seat=Seat(may_serve=True, may_elect=True, record=record, machine=OWN_SEAT.host),
        )
        self.load(chain.snapshot(whole_chain=True), chain.events)
        self.copy = ChainCopy(ChainStore(folder / "chain.jsonl"), run=RUN)
        self.following = Following(self._parts())
        station: Any = SimpleNamespace(core=self.core, driver=self, following=self.following)
        log: Any = SimpleNamespace(note=lambda about, text, level="info": self.notes.append(text))
        self.obedience = Obedience(station, self.copy, log, owner=OWNER.peer_id)

    def _parts(self) -> FollowingParts:
        none: Any = None
        driver: Any = self
        return FollowingParts(
            driver=driver,
            worker=none,
            outer=none,
            chain=self.copy,
            store=none,
            donor=none,
            replacing=none,
            log=EventLog(),
        )

    def feed(self, event: Event) -> None:
        self.fed.append(event)
        self.give(event)

    def answer(self, effect: Effect) -> Event | None:
        match effect:
            case Seal():
                return sealed(effect)
            case KeepEntry():
                return EntryStored(effect.digest)
            case Evaluate():
                return Evaluated(effect.seq, None)
        return None

    def serving(self) -> Obeying:
        self.pass_time(20_000)
        assert self.core.serves
        return self

    # -- orders

    def reform(self, signed: Signed | str) -> str:
        line = signed if isinstance(signed, str) else signed.to_line()
        return self.obedience.obey(Order(run=RUN, nonce="n", wish="reform", signed=line))

    def amend(self, order: AmendmentOrder, key: Identity = OWNER) -> str:
        return self.obedience.obey(Order(run=RUN, nonce="n", wish="amend", signed=seal_amendment(order, key)))

    def wish(self, number: int = 1, **changed: Any) -> AmendmentOrder:
        branch = self.core.ledger.branch
        plain = AmendmentOrder(run=RUN, branch=branch, number=number, changes=Changes(eta=0.5))
        return replace(plain, **changed)

    def refuses(self, reason: str, signed: Signed | str, kind: type[GeoDilocoError] = RefusedError) -> None:
        """That reform, and nothing has happened."""
        before = self.core.election.head, len(self.fed), len(self.notes)
        with pytest.raises(kind, match=reason):
            self.reform(signed)
        assert (self.core.election.head, len(self.fed), len(self.notes)) == before


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Obeying]:
    made = Obeying(tmp_path)
    yield made
    made.copy.close()


def reform_entry(it: Obeying, after: int = 2, lineage: int = 1, **header: Any) -> Reform:
    facts: dict[str, Any] = {
        "run": RUN,
        "branch": it.chain.branch,
        "term": Term(1),
        "seq": Seq(after + 1),
        "prev": Digest(it.chain.events[after].digest),
    }
    return Reform(header=EntryHeader(**(facts | header)), lineage=lineage, roster=(OWN_SEAT,))


# ---- reform ------------------------------------------------------------------------------------------------------


def test_the_owners_reform_is_taken_in(it: Obeying) -> None:
    signed = seal_entry(reform_entry(it), OWNER)
    assert it.reform(signed) == "reform 1 is taken in"
    assert (it.core.election.record.lineage, it.core.election.branch) == (1, signed.digest)
    assert it.notes == ["the run's owner goes on with other electors: reform 1"]
    (arrived,) = [event for event in it.fed if isinstance(event, EntryArrived)]
    assert (arrived.digest, arrived.signer) == (signed.digest, OWNER.peer_id)


def test_twice_it_happens_once(it: Obeying) -> None:
    signed = seal_entry(reform_entry(it), OWNER)
    assert it.reform(signed) == it.reform(signed) == "reform 1 is taken in"
    assert len(it.fed) == 1, "the owner's command gives it again until somebody serves"


def test_an_earlier_one_is_not_gone_back_to(it: Obeying) -> None:
    """As replayed by somebody who heard it, or because the owner's command was started twice."""
    first, second = (seal_entry(reform_entry(it, lineage=number), OWNER) for number in (1, 2))
    assert it.reform(second) == "reform 2 is taken in"
    it.reform(first)
    assert (it.core.election.record.lineage, it.core.election.branch) == (2, second.digest)


def test_a_strangers_is_not_even_looked_at(it: Obeying) -> None:
    it.refuses("not a reform that the run's owner signed", seal_entry(reform_entry(it), STRANGER))


def test_no_other_entry_comes_in_by_this_door(it: Obeying) -> None:
    """What the owner signs is believed beyond what elections allow, so this is for reforms alone."""
    header = reform_entry(it, after=3).header
    record = Record(header=header, measured_seq=Seq(2), heldout_loss=1.0)
    it.refuses("not a reform that the run's owner signed", seal_entry(record, OWNER))


def test_one_of_another_run_is_refused_whoever_owns_that(it: Obeying) -> None:
    elsewhere = reform_entry(it, run=ELSEWHERE)
    for owner in (OWNER, STRANGER):
        it.refuses(f"an entry of run {ELSEWHERE[:12]}", seal_entry(elsewhere, owner), RemoteProtocolError)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no text"])
def test_one_that_is_damaged_is_refused(it: Obeying, damage: str) -> None:
    signed = seal_entry(reform_entry(it), OWNER)
    line = signed.to_line()
    broken = {
        "cut": line[:-40],
        "changed": replace(signed, body=signed.body.replace('"lineage":1', '"lineage":9')).to_line(),
        "empty": "",
        "no text": "\x00\ud7ff" * 9,
    }[damage]
    assert broken != line
    it.refuses("signed line|signature", broken, RemoteProtocolError)


def test_one_on_top_of_what_is_not_known_here_is_not_said_to_be_taken_in(it: Obeying) -> None:
    """It is the owner's, so it is asked for; but he reads that it has not come about here."""
    unknown = reform_entry(it, after=2, branch=BranchId("e" * 64), prev=Digest("d" * 64))
    with pytest.raises(RefusedError, match="reform 1 can't be taken in here: see this peer's log"):
        it.reform(seal_entry(unknown, OWNER))
    assert it.core.election.branch == it.chain.branch


@pytest.mark.parametrize("change", [{"roster": ()}, {"roster": (OWN_SEAT, OWN_SEAT)}, {"lineage": 0}])
def test_one_that_makes_no_sense_is_not_said_to_be_taken_in(it: Obeying, change: dict[str, Any]) -> None:
    entry: Entry = replace(reform_entry(it), **change)
    with pytest.raises(RefusedError, match="can't be taken in here"):
        it.reform(seal_entry(entry, OWNER))
    assert it.core.election.record.lineage == 0


# ---- amend and hand over -----------------------------------------------------------------------------------------


def test_who_does_not_serve_sends_the_owner_elsewhere(it: Obeying) -> None:
    """It may serve soon, or somebody else does: that is no refusal."""
    for order in (
        Order(run=RUN, nonce="n", wish="hand_over"),
        Order(run=RUN, nonce="n", wish="amend", signed=seal_amendment(it.wish(), OWNER)),
    ):
        with pytest.raises(TransferError, match="this peer is not the syncer now"):
            it.obedience.obey(order)
    assert it.fed == [] == it.notes


def test_a_syncer_is_told_to_hand_over_to_whom_its_owner_names(it: Obeying) -> None:
    it.serving()
    to = PeerId("7" * 64)
    assert it.obedience.obey(Order(run=RUN, nonce="n", wish="hand_over", to=to)) == "handing over"
    assert it.fed == [HandoverAsked(to)]
    assert it.notes == ["its owner wants this peer to hand over"]


def test_an_amendment_is_appended_once(it: Obeying) -> None:
    it.serving()
    assert it.amend(it.wish()) == "amendment 1 is being appended"
    assert [type(event) for event in it.fed] == [AmendmentAsked]
    assert it.core.rules.outer.eta == 0.5
    assert it.amend(it.wish()) == "amendment 1 is in force"
    assert len(it.fed) == 1 and it.notes == ["the run's owner wants amendment 1"]


@pytest.mark.parametrize(
    ("key", "changed", "reason"),
    [
        (STRANGER, {}, "signed by another key than the run's owner's"),
        (OWNER, {"run": ELSEWHERE}, f"it is for run {ELSEWHERE[:12]}"),
        (OWNER, {"branch": BranchId("e" * 64)}, "branch eeeeeeeeeeee; this is branch"),
        (OWNER, {"number": 2}, "it is number 2, and the next amendment of this run is number 1"),
        (OWNER, {"changes": Changes()}, "changes nothing"),
        (OWNER, {"changes": Changes(eta=0.0)}, "eta is above 0"),
    ],
)
def test_an_amendment_that_can_not_be_is_refused_by_name(
    it: Obeying, key: Identity, changed: dict[str, Any], reason: str
) -> None:
    it.serving()
    with pytest.raises(RefusedError, match=f"amendment [12] is refused: .*{reason}"):
        it.amend(it.wish(**changed), key)
    assert it.fed == [] == it.notes


def test_an_amendment_that_a_reform_left_behind_is_worth_nothing(it: Obeying) -> None:
    it.serving()
    before = it.wish()
    it.reform(seal_entry(reform_entry(it, after=3), OWNER))
    it.pass_time(20_000)
    assert it.core.serves and it.core.ledger.lineage == 1
    with pytest.raises(RefusedError, match="this is branch"):
        it.amend(before)
    assert it.amend(it.wish()) == "amendment 1 is being appended"
