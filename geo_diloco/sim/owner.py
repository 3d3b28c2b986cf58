"""The run's owner, as its commands do: an amendment is signed once and given to whoever serves until it is durable, a
reform to those who hold its parent until somebody goes by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_diloco.manifest import Seq, Term
from geo_diloco.protocol.amendments import AmendmentOrder, Changes, newest_number
from geo_diloco.protocol.election.ballots import ELECTORS_MAX, Elector
from geo_diloco.protocol.events import AmendmentAsked
from geo_diloco.protocol.messages import EntryHeader, Reform
from geo_diloco.sim.fakes import RUN, SignedEntry, fake_digest

if TYPE_CHECKING:
    from geo_diloco.sim.process import Process
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


class Reformer:
    """One reform: the electors that are here now, on the best head among those who could serve."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reform: SignedEntry | None = None

    def go(self) -> None:
        """Sign it if there is anybody to go on, and give it until it is durable somewhere."""
        world = self._world
        if self._reform is None:
            self._reform = self._sign()
        if self._reform is not None and not self._give(self._reform):
            return
        world.clock.after(world.clock.between(GIVE_MS), self.go)

    def _give(self, reform: SignedEntry) -> bool:
        """False if it is durable somewhere."""
        assert isinstance(reform.entry, Reform)
        lineage = reform.entry.lineage
        if any(each.core.ledger.lineage >= lineage for each in self._world.processes()):
            return False
        for process in self._world.processes():
            held = process.core.election.digest_at(Seq(reform.entry.header.seq - 1))
            if held == reform.entry.header.prev and not process.frozen:
                process.chain.arrived(reform)
        return True

    def _sign(self) -> SignedEntry | None:
        world = self._world
        electors = [
            each for each in world.processes() if each.host.plan.elects and not each.frozen and each.accepts_links
        ]
        able = [each for each in electors if each.host.plan.serves]
        if not able:
            return None
        parent = max(able, key=lambda each: each.core.election.best.rank)
        head, election = parent.core.election.best, parent.core.election
        if election.digest_at(head.rank.seq) != head.digest:
            return None
        lineage = 1 + max(each.core.election.record.lineage for each in world.processes())
        roster = [*able, *(each for each in electors if each not in able)][:ELECTORS_MAX]
        entry = Reform(
            header=EntryHeader(
                run=RUN, branch=election.branch, term=Term(1), seq=Seq(head.rank.seq + 1), prev=head.digest
            ),
            lineage=lineage,
            roster=tuple(_seat(each) for each in roster),
        )
        signed = SignedEntry(entry, fake_digest("reform", entry), world.rules.founder)
        world.reformed(signed)
        return signed


def reform_if_stuck(world: World) -> None:
    """Electors that could not follow a reform have begun again, with other disks: the owner has to go on without."""
    roster = max((each.core.election for each in world.processes()), key=lambda each: each.head.rank).roster
    left = [elector for elector in roster if world.by_peer[elector.peer].disk.enrolment == elector.enrolment]
    if 2 * len(left) <= len(roster):
        Reformer(world).go()


def _seat(process: Process) -> Elector:
    enrolment = process.core.election.record.enrolment
    return Elector(process.peer, enrolment, f"host {process.host.index}", process.host.address)
