"""The proof that is kept: what proves who serves, as far as it is durable, and no more; anew after a reform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from geo_diloco.node.proving import ProofShelf
from geo_diloco.protocol.messages import Commit, Found, Open, Reform
from tests.support.chains import ChainBuilder


def test_it_holds_what_proves_something_as_soon_as_that_is_durable_and_begins_anew_after_a_reform() -> None:
    events = ChainBuilder.opened().events
    entries: dict[Any, Any] = {event.digest: event.entry for event in events}
    ledger = SimpleNamespace(seq=0, lineage=0)
    order = [event.digest for event in events]
    core: Any = SimpleNamespace(
        ledger=ledger, election=SimpleNamespace(digest_at=lambda seq: order[seq] if 0 <= seq < len(order) else None)
    )
    chain: Any = SimpleNamespace(entry=entries.get, signed=entries.get)
    shelf = ProofShelf(core, chain)
    assert [type(entry) for entry in shelf.entries(0, 10)] == [Found], "the term is not durable yet"
    ledger.seq = 1
    assert [type(entry) for entry in shelf.entries(0, 10)] == [Found, Open]
    entries["c"] = Commit.__new__(Commit)
    order.append("c")  # type: ignore[arg-type]
    ledger.seq = 2
    assert [type(entry) for entry in shelf.entries(0, 10)] == [Found, Open], "a commit proves nothing"
    assert [type(entry) for entry in shelf.entries(1, 1)] == [Open]
    ledger.seq = 0
    assert len(shelf.entries(0, 10)) == 2, "a chain that is gone back on by nobody"
    header = events[1].entry.header
    entries["r"] = Reform(header=header, lineage=1, roster=())
    order[1:] = ["r"]  # type: ignore[list-item]
    assert [type(entry) for entry in shelf.entries(0, 10)] == [Found], "what a reform left behind is no proof"
    ledger.seq = 1
    assert [type(entry) for entry in shelf.entries(0, 10)] == [Found, Reform]


def test_a_reform_that_nobody_has_opened_yet_is_proven() -> None:
    """The ledger is beyond it and does not know of it: the owner reforms once more, on top of it."""
    events = ChainBuilder.opened().events
    entries: dict[Any, Any] = {event.digest: event.entry for event in events}
    entries["r"] = Reform(header=events[1].entry.header, lineage=1, roster=())
    order: list[Any] = [event.digest for event in events]
    election = SimpleNamespace(digest_at=lambda seq: order[seq] if 0 <= seq < len(order) else None)
    core: Any = SimpleNamespace(ledger=SimpleNamespace(seq=1, lineage=0), election=election)
    chain: Any = SimpleNamespace(entry=entries.get, signed=entries.get)
    shelf = ProofShelf(core, chain)
    assert [type(entry) for entry in shelf.entries(0, 10)] == [Found, Open]
    order[1] = "r"
    assert [type(entry) for entry in shelf.entries(0, 10)] == [Found, Reform]


def test_what_can_not_be_read_ends_the_proof_there_until_it_can() -> None:
    """A proof with a gap proves nothing."""
    events = ChainBuilder.opened().events
    entries: dict[Any, Any] = {event.digest: event.entry for event in events}
    order: list[Any] = [event.digest for event in events]
    election = SimpleNamespace(digest_at=lambda seq: order[seq] if 0 <= seq < len(order) else None)
    core: Any = SimpleNamespace(ledger=SimpleNamespace(seq=1, lineage=0), election=election)
    for unread in ("entry", "signed"):
        read = dict(entries)
        del read[order[0]]
        reads: dict[str, Any] = {"entry": entries.get, "signed": entries.get} | {unread: read.get}
        shelf = ProofShelf(core, SimpleNamespace(**reads))  # type: ignore[arg-type]
        assert shelf.entries(0, 10) == []
        read[order[0]] = entries[order[0]]
        assert [type(entry) for entry in shelf.entries(0, 10)] == [Found, Open]
