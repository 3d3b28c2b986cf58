"""What the run's owner may order of a peer that others can reach: to hand over, to amend, to reform.

The HTTP door has checked who orders; here it is decided whether this peer can do it, and the owner reads the answer.
"""

from __future__ import annotations

from geo_diloco.errors import RefusedError, TransferError
from geo_diloco.manifest import PeerId
from geo_diloco.node.station import Station
from geo_diloco.observability import EventLog
from geo_diloco.protocol.events import AmendmentAsked, HandoverAsked
from geo_diloco.protocol.messages import Reform
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.wire import Order, Signed, open_amendment


class Obedience:
    def __init__(self, station: Station, chain: ChainCopy, log: EventLog, *, owner: PeerId) -> None:
        self._station = station
        self._chain = chain
        self._log = log
        self._owner = owner

    def obey(self, order: Order) -> str:
        """What becomes of it. Raises RefusedError, TransferError."""
        if order.wish == "reform":
            return self._reform(Signed.from_line(order.signed))
        if not self._station.core.serves:
            raise TransferError("this peer is not the syncer now")
        if order.wish == "amend":
            return self._amend(order.signed)
        self._log.note("handover", "its owner wants this peer to hand over")
        self._station.driver.feed(HandoverAsked(order.to))
        return "handing over"

    def _reform(self, signed: Signed) -> str:
        entry = self._chain.verify(signed)
        if not isinstance(entry, Reform) or signed.signer != self._owner:
            raise RefusedError("not a reform that the run's owner signed")
        self._log.note("reform", f"the run's owner goes on with other electors: reform {entry.lineage}")
        self._station.following.take_entry(signed)
        if not self._station.core.election.knows(signed.digest):
            raise RefusedError(f"reform {entry.lineage} can't be taken in here: see this peer's log")
        return f"reform {entry.lineage} is taken in"

    def _amend(self, signed: str) -> str:
        asked = AmendmentAsked(*open_amendment(signed), signed)
        core, number = self._station.core, asked.order.number
        if any(each.order == signed for each in core.ledger.amended):
            return f"amendment {number} is in force"
        if why_not := core.why_not_amend(asked):
            raise RefusedError(f"amendment {number} is refused: {why_not}")
        self._log.note("amend", f"the run's owner wants amendment {number}")
        self._station.driver.feed(asked)
        return f"amendment {number} is being appended"
