"""Entries are sealed in order, one at a time, and only while the election lets them."""

from __future__ import annotations

import pytest

from geo_diloco.manifest import Seq, Term
from geo_diloco.protocol.effects import Seal
from geo_diloco.protocol.events import Sealed
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import EntryHeader, Finished, Record
from geo_diloco.protocol.sealing import Sealing, always
from geo_diloco.sim.fakes import RUN, fake_digest
from tests.support.chains import ChainBuilder

NO_LEASE = "no lease"


def record(header: EntryHeader) -> Record:
    return Record(header=header, measured_seq=Seq(0), heldout_loss=2.0)


def sealed(seq: int, term: int = 1) -> Sealed:
    return Sealed(Term(term), Seq(seq), fake_digest(seq))


class Gate:
    """Shut until it is opened; counts who asks."""

    def __init__(self, why_not: str | None = None) -> None:
        self.why_not = why_not
        self.num_asked = 0

    def __call__(self) -> str | None:
        self.num_asked += 1
        return self.why_not


def begun() -> tuple[Sealing, Ledger]:
    ledger = ChainBuilder.opened().ledger()
    return Sealing(RUN, Term(1), ledger), ledger


def test_entries_are_sealed_one_at_a_time_each_naming_the_one_before() -> None:
    sealing, ledger = begun()
    sealing.draft(record, always)
    sealing.draft(record, always)
    (first,) = sealing.next()
    assert isinstance(first, Seal) and first.entry.header.prev == ledger.head_digest
    assert sealing.next() == [] and not sealing.idle()
    assert sealing.sealed(sealed(2)) == first.entry
    (second,) = sealing.next()
    assert isinstance(second, Seal)
    assert (second.entry.header.seq, second.entry.header.prev) == (3, fake_digest(2))
    sealing.sealed(sealed(3))
    assert sealing.idle() and ledger.seq == 3


@pytest.mark.parametrize("answer", [sealed(1), sealed(2, term=2)], ids=["another entry", "another term"])
def test_a_seal_that_was_not_asked_for_changes_nothing(answer: Sealed) -> None:
    sealing, ledger = begun()
    assert sealing.sealed(sealed(2)) is None
    sealing.draft(record, always)
    sealing.next()
    assert sealing.sealed(answer) is None
    assert ledger.seq == 1 and not sealing.idle()


def test_an_entry_that_the_chain_forbids_is_a_bug_of_ours() -> None:
    sealing = Sealing(RUN, Term(7), ChainBuilder.opened().ledger())
    sealing.draft(record, always)
    sealing.next()
    with pytest.raises(AssertionError, match="was not opened"):
        sealing.sealed(sealed(2, term=7))


# ---- gates


def test_a_draft_waits_at_its_gate_with_the_reason_and_is_not_lost() -> None:
    sealing, _ = begun()
    gate = Gate(NO_LEASE)
    sealing.draft(record, gate)
    assert sealing.next() == []
    assert (sealing.held_up, sealing.idle()) == (NO_LEASE, False)
    gate.why_not = None
    assert len(sealing.next()) == 1
    assert sealing.held_up == ""


def test_what_was_drafted_later_does_not_overtake_what_waits() -> None:
    sealing, _ = begun()
    later = Gate()
    sealing.draft(record, Gate(NO_LEASE))
    sealing.draft(record, later)
    assert sealing.next() == [] and later.num_asked == 0


def test_a_gate_is_asked_at_the_last_moment_and_not_while_another_entry_is_sealed() -> None:
    """An open gate means that the entry will be sealed: the election counts on it."""
    sealing, _ = begun()
    gate = Gate()
    sealing.draft(record, always)
    sealing.draft(record, gate)
    sealing.next()
    sealing.next()
    assert gate.num_asked == 0
    sealing.sealed(sealed(2))
    assert gate.num_asked == 0
    sealing.next()
    assert gate.num_asked == 1


def test_a_place_in_the_chain_is_given_when_the_gate_opens() -> None:
    sealing, _ = begun()
    gate = Gate(NO_LEASE)
    headers: list[EntryHeader] = []

    def make(header: EntryHeader) -> Record:
        headers.append(header)
        return record(header)

    sealing.draft(make, gate)
    sealing.next()
    assert headers == []
    gate.why_not = None
    sealing.next()
    assert [(header.seq, header.term) for header in headers] == [(2, 1)]


def test_what_is_now_or_never_is_dropped_at_a_shut_gate_and_blocks_nothing() -> None:
    """A roster waits for nothing: when it may be sealed, the electors may be others."""
    sealing, _ = begun()
    sealing.draft(record, Gate(NO_LEASE), now_or_never=True)
    sealing.draft(record, always)
    assert len(sealing.next()) == 1
    sealing.sealed(sealed(2))
    assert sealing.idle()


def test_nothing_follows_the_end() -> None:
    sealing, ledger = begun()
    sealing.draft(lambda header: Finished(header=header, reason="enough", tokens_total=0), always)
    sealing.draft(record, Gate())
    sealing.next()
    sealing.sealed(sealed(2))
    assert ledger.finished == "enough" and sealing.idle() and sealing.next() == []
