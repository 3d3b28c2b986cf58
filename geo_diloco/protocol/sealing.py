"""Entries in the making: drafted in order, sealed one at a time, because each names the digest of the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from geo_diloco.manifest import PeerId, RunId, Seq, Term
from geo_diloco.protocol.effects import Effect, Seal
from geo_diloco.protocol.events import Sealed
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Entry, EntryHeader

Draft = Callable[[EntryHeader], Entry]
"""Makes the entry once its place in the chain is known."""


class Sealing:
    """The queue of drafts and the one entry that the shell is signing now."""

    def __init__(self, run: RunId, ledger: Ledger) -> None:
        self._run = run
        self._ledger = ledger
        self._drafts: deque[tuple[Term, Draft]] = deque()
        self._entry: Entry | None = None

    def idle(self) -> bool:
        return self._entry is None and not self._drafts

    def draft(self, term: Term, draft: Draft) -> None:
        self._drafts.append((term, draft))

    def next(self) -> list[Effect]:
        """Ask for the next seal, if none is under way."""
        if self._entry is not None or not self._drafts:
            return []
        term, draft = self._drafts.popleft()
        ledger = self._ledger
        header = EntryHeader(
            run=self._run, branch=ledger.branch, term=term, seq=Seq(ledger.seq + 1), prev=ledger.head_digest
        )
        self._entry = draft(header)
        return [Seal(self._entry)]

    def sealed(self, event: Sealed, signer: PeerId) -> Entry | None:
        """The shell's answer: the entry is on our chain now. None if it is not the one asked for."""
        entry = self._entry
        if entry is None or entry.header.seq != event.seq:
            return None
        self._entry = None
        why_not = self._ledger.why_not(entry, signer)
        assert why_not is None, why_not
        self._ledger.apply(entry, event.digest)
        return entry
