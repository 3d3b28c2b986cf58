"""Whose term it is, and the entries that begin a run and a term: they say who, so they are made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from geo_diloco.manifest import BootId, PeerId, RunId, Term
from geo_diloco.protocol.election.ballots import Roster, SignedVote
from geo_diloco.protocol.events import FoundRun
from geo_diloco.protocol.messages import Entry, EntryHeader, Found, Open
from geo_diloco.protocol.sealing import Make


@dataclass(frozen=True, kw_only=True, slots=True)
class Office:
    """A syncer's, for one term."""

    peer: PeerId
    boot: BootId
    run: RunId
    term: Term
    address: str
    gate: Callable[[bool], str | None]
    """Why no entry may be appended now (given True: no roster change); none if one may, and then it will be."""

    def found(self, event: FoundRun, roster: Roster) -> Make:
        """The first entry of the run."""

        def make(header: EntryHeader) -> Entry:
            return Found(
                header=header,
                boot=self.boot,
                state_digests=event.state_digests,
                momentum_digests=event.momentum_digests,
                layout_digest=event.layout_digest,
                num_elements=event.num_elements,
                roster=roster,
            )

        return make

    def open(self, votes: tuple[SignedVote, ...]) -> Make:
        """The first entry of the term."""

        def make(header: EntryHeader) -> Entry:
            return Open(header=header, syncer=self.peer, boot=self.boot, address=self.address, votes=votes)

        return make
