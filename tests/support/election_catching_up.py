"""How a peer of an election's world gets what others have: entries from anybody's log, or a snapshot in their place.

What the data plane of a real peer does, in short. The machine's own Needs work beside it; without this, an elector
whose past is on nobody's reachable disk any more would never be one again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_diloco.protocol.election.ballots import NO_HEAD, EntryFacts
from geo_diloco.protocol.election.polls import EntriesArrived
from tests.support.election_process import Host, Process

if TYPE_CHECKING:
    from tests.support.election_world import World


class CatchingUp:
    """Gossip and snapshots."""

    def __init__(self, world: World) -> None:
        self.world = world

    def gossip(self) -> None:
        """A peer reads the chain at another, as everybody who follows it does; reforms are shown to everybody."""
        chance = self.world.clockwork.random
        reader, source = (self.world.hosts[chance.randrange(len(self.world.hosts))] for _ in range(2))
        if reader.process is not None and source.process is not None and self.world.reaches(reader, source):
            if self._apart(reader, source):
                self._begin_anew(reader, source)
            elif missing := self._missing(reader, source):
                reader.process.handle(EntriesArrived(source.peer, missing))

    def _missing(self, reader: Host, source: Host) -> tuple[EntryFacts, ...]:
        """Reforms, what follows the reader's entries, and what is newest: a disk remembers what a memory may not. When
        faults are over the owner's newest reform is shown, whoever lost it."""
        assert source.process is not None
        path = self.world.book.path(source.process.machine.best.digest)
        missing = {each.digest: each for each in path if each.kind == "reform" and each.digest not in reader.disk.known}
        if self.world.mishaps.num_reforms and not self.world.faults_on:
            newest_reform = self.world.book.reforms[self.world.mishaps.num_reforms]
            if newest_reform.digest not in reader.disk.known:
                missing[newest_reform.digest] = newest_reform
        known = set(reader.disk.known)
        for entry in source.disk.log:
            if entry.digest not in known and entry.prev in known:
                known.add(entry.digest)
                missing[entry.digest] = entry
        newest = [entry for entry in source.disk.log[-60:] if entry.digest not in known]
        return (*list(missing.values())[:200], *newest)

    def _apart(self, reader: Host, source: Host) -> bool:
        """Whether the reader needs a snapshot: its own does not lie on the source's better chain, or what follows its
        entries there was before the source's own snapshot."""
        book, theirs = self.world.book, NO_HEAD if source.process is None else source.process.machine.best
        if reader.process is None or theirs.rank <= reader.process.machine.best.rank or book.begins(theirs.digest):
            return False
        root = reader.disk.root
        if root is not None and not book.is_ancestor(root.head.digest, theirs.digest):
            return True
        known = {*reader.disk.known, *([] if root is None else [root.head.digest])}
        at = book.entries[theirs.digest]
        while at.prev and at.digest not in known and at.prev not in known:
            at = book.entries[at.prev]
        return at.digest not in known and at.digest not in source.disk.known

    def _begin_anew(self, reader: Host, source: Host) -> None:
        """It takes a snapshot of the better chain; its record stays, so what it held and voted for is not forgotten."""
        head = NO_HEAD if source.process is None else source.process.machine.best
        if head.rank.seq < 0 or self.world.book.begins(head.digest):
            return
        self.world.crash(reader)
        reader.disk.begin_anew()
        reader.disk.plant(self.world.book.root(head), {entry.digest for entry in self.world.book.path(head.digest)})
        self.world.start(reader)

    def take_snapshot(self, host: Host) -> None:
        """A peer that comes without a chain begins at an entry of somebody else's, with the state there."""
        donors = [each for each in self.world.hosts if each is not host and each.process is not None]
        heads = [each.process.machine.best for each in donors if each.process is not None]
        heads = [head for head in heads if head.rank.seq > 1 and not self.world.book.begins(head.digest)]
        if heads:
            head = heads[self.world.clockwork.random.randrange(len(heads))]
            host.disk.plant(self.world.book.root(head), {entry.digest for entry in self.world.book.path(head.digest)})

    def rescue(self, process: Process) -> None:
        """What a shell does that can't follow: take a snapshot as soon as somebody has one, or read the log again if
        that remembers more. Until then the process goes on: it may vote in the branch that it has entered."""
        host, lineage = process.host, process.machine.record.lineage
        if self.world.clockwork.now < process.rescue_at:
            return
        process.rescue_at = self.world.clockwork.now + 1_000
        donors = [
            each for each in self.world.hosts if self.world.reaches(host, each) and self._snapshot_of(each, lineage)
        ]
        if donors:
            source = donors[self.world.clockwork.random.randrange(len(donors))]
            self.world.clockwork.after(100, lambda: self._begin_anew(host, source) if process.alive else None)
        elif host.disk.root is None and self.world.book.reforms[lineage].prev in host.disk.known:
            self.world.clockwork.after(100, lambda: self._start_again(process))

    def _start_again(self, process: Process) -> None:
        if process.alive:
            self.world.crash(process.host)
            self.world.start(process.host)

    def find_snapshot(self, process: Process) -> None:
        """Nobody whom it can dial has the blobs that it lacks, but somebody may have the state after them."""
        best = process.machine.best.rank
        for source in self.world.hosts:
            other = source.process
            if other is not None and other.machine.best.rank > best and self.world.reaches(process.host, source):
                self._begin_anew(process.host, source)
                return

    def _snapshot_of(self, host: Host, lineage: int) -> bool:
        """Whether that peer could give a snapshot of that branch or a later one."""
        head = NO_HEAD if host.process is None else host.process.machine.best
        return head.rank.lineage >= lineage and head.rank.seq > 0 and not self.world.book.begins(head.digest)
