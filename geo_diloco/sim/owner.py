"""The run's owner: signs an order once and gives it to whoever serves until it is durable, as the command does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_diloco.protocol.amendments import AmendmentOrder, Changes, newest_number
from geo_diloco.protocol.events import AmendmentAsked
from geo_diloco.sim.fakes import RUN, fake_digest

if TYPE_CHECKING:
    from geo_diloco.sim.world import World

GIVE_MS = (200, 1_500)


class Amender:
    """One amendment that the owner wants."""

    def __init__(self, world: World, changes: Changes) -> None:
        self._world = world
        self._changes = changes
        self._asked: AmendmentAsked | None = None

    def go(self) -> None:
        """Give the order, and look again a little later. Another of its number that is in force takes its place."""
        world, syncer = self._world, self._world.syncer()
        if syncer is not None and not syncer.frozen:
            ledger = syncer.core.ledger
            asked = self._asked or self._signed(newest_number(ledger.amended) + 1)
            self._asked = asked
            if newest_number(ledger.amended) >= asked.order.number or ledger.finished is not None:
                return
            syncer.handle(asked)
        world.clock.after(world.clock.between(GIVE_MS), self.go)

    def _signed(self, number: int) -> AmendmentAsked:
        syncer = self._world.syncer()
        assert syncer is not None
        order = AmendmentOrder(run=RUN, branch=syncer.core.ledger.branch, number=number, changes=self._changes)
        return AmendmentAsked(order, self._world.rules.founder, str(fake_digest("order", order, self._world.clock.now)))
