"""Entries in the making: drafted in order, sealed one at a time, because each names the digest of the one before.

What may be sealed is asked at the last moment: the election may have lost its lease while a merge was under way. Then
the draft waits, with the reason, until the lease is back or the term is over. A roster does not wait: it is drawn up
anew when it may be sealed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from geo_diloco.manifest import RunId, Seq, Term
from geo_diloco.protocol.effects import Effect, Seal
from geo_diloco.protocol.events import Sealed
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Entry, EntryHeader, Finished

Make = Callable[[EntryHeader], Entry]
"""Makes the entry once its place in the chain is known."""
Gate = Callable[[], str | None]
"""Why it may not be sealed now; none if it may, and then it will be."""


@dataclass(frozen=True, slots=True)
class _Draft:
    make: Make
    gate: Gate
    now_or_never: bool


def always() -> None:
    """The gate of what a term begins with."""
    return None


class Sealing:
    """The drafts of one term and the one entry that the shell is signing now. `ledger` is the syncer's own."""

    def __init__(self, run: RunId, term: Term, ledger: Ledger) -> None:
        self._run = run
        self._term = term
        self._ledger = ledger
        self._drafts: deque[_Draft] = deque()
        self._entry: Entry | None = None
        self.held_up = ""
        """Why the next draft waits; empty if none does."""

    def idle(self) -> bool:
        return self._entry is None and not self._drafts

    def draft(self, make: Make, gate: Gate, *, now_or_never: bool = False) -> None:
        """`now_or_never`: dropped, if its gate is shut when its turn comes."""
        self._drafts.append(_Draft(make, gate, now_or_never))

    def next(self) -> list[Effect]:
        """Ask for the next seal, if none is under way and the gate is open."""
        if self._entry is not None:
            return []
        make = self._next_make()
        if make is None:
            return []
        ledger = self._ledger
        header = EntryHeader(
            run=self._run, branch=ledger.branch, term=self._term, seq=Seq(ledger.seq + 1), prev=ledger.head_digest
        )
        self._entry = make(header)
        return [Seal(self._entry)]

    def _next_make(self) -> Make | None:
        self.held_up = ""
        while self._drafts:
            draft = self._drafts[0]
            why_not = draft.gate()
            if why_not is None:
                return self._drafts.popleft().make
            if not draft.now_or_never:
                self.held_up = why_not
                return None
            self._drafts.popleft()
        return None

    def sealed(self, event: Sealed) -> Entry | None:
        """The shell's answer: the entry is on our chain now. None if it is not the one asked for."""
        entry = self._entry
        if entry is None or (entry.header.seq, entry.header.term) != (event.seq, event.term):
            return None
        self._entry = None
        why_not = self._ledger.why_not(entry)
        assert why_not is None, why_not
        self._ledger.apply(entry, event.digest)
        if isinstance(entry, Finished):
            self._drafts.clear()  # nothing follows the end
        return entry
