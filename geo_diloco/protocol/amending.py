"""The syncer's part in an amendment: may this order be appended now, and what becomes of it.

One at a time: an order counts from the one before it, and only an entry that is sealed has its number for good.
"""

from __future__ import annotations

from geo_diloco.manifest import RunId, RunRules
from geo_diloco.protocol.amendments import newest_number, rules_after, why_not_changes
from geo_diloco.protocol.events import AmendmentAsked
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Amendment, Entry, EntryHeader
from geo_diloco.protocol.sealing import Make
from geo_diloco.protocol.winding import StopRule


class Amending:
    """Of one term. `rules` are in force at the newest entry of its ledger."""

    def __init__(self, run: RunId, rules: RunRules, ledger: Ledger, stop: StopRule) -> None:
        self.rules = rules
        self._run = run
        self._ledger = ledger
        self._stop = stop
        self._asked: AmendmentAsked | None = None

    def why_not(self, asked: AmendmentAsked) -> str | None:
        """Why this order can't be appended; none if it can."""
        order, ledger = asked.order, self._ledger
        if asked.owner != self.rules.founder:
            return "signed by another key than the run's owner's"
        if order.run != self._run or order.branch != ledger.branch:
            return f"it is for run {order.run[:12]}, branch {order.branch[:12]}; this is branch {ledger.branch[:12]}"
        if ledger.finished is not None:
            return f"the run is finished ({ledger.finished}) and can't be amended any more"
        newest = newest_number(ledger.amended)
        if order.number != newest + 1:
            return f"it is number {order.number}, and the next amendment of this run is number {newest + 1}"
        if self._asked is not None:
            return f"amendment {order.number} is being appended already"
        return why_not_changes(order.changes)

    def draft(self, asked: AmendmentAsked) -> Make:
        """Of an order that `why_not` has nothing against."""
        self._asked, changes = asked, asked.order.changes

        def make(header: EntryHeader) -> Entry:
            stop = rules_after(self.rules, changes).stop
            return Amendment(
                header=header,
                owner=asked.owner,
                number=asked.order.number,
                changes=changes,
                stretch=self._stop.stretched_to(stop, self._ledger),
                order=asked.signed,
            )

        return make

    def sealed(self, entry: Amendment) -> RunRules:
        """It is on our ledger: the rules from here on."""
        self._asked = None
        self.rules = rules_after(self.rules, entry.changes)
        self._stop.amend(self.rules.stop, entry.stretch)
        return self.rules
