"""What befalls an election's world: mishaps of a plan, the worst moments, and majorities that are gone for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from geo_diloco.manifest import BranchId, PeerId, Seq, Term
from geo_diloco.protocol.election.ballots import Ask, Ballot, Elector, EntryFacts, Vote
from geo_diloco.protocol.election.polls import EntriesArrived
from geo_diloco.protocol.events import EntryLost, HandoverAsked
from tests.support.election_plans import Mishap
from tests.support.election_process import Host, Process, digest_of

if TYPE_CHECKING:
    from tests.support.election_world import World


class Mishaps:
    """Carries them out."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.amnesic = False
        """The next candidate that asks meets the amnesia plot."""
        self.num_reforms = 0

    def befall(self, mishap: Mishap) -> None:
        if not self.world.faults_on:
            return
        host = self.world.hosts[mishap.host % len(self.world.hosts)]
        if mishap.syncer:
            host = self.world.syncer() or host
        self.world.film.append(f"{self.world.clockwork.now} {mishap.kind} {host.index} for {mishap.for_ms}")
        match mishap.kind:
            case "crash" | "lose":
                self.world.crash(host, lose_disk=mishap.kind == "lose" and self._bearable(host))
                self.world.clockwork.after(mishap.for_ms, lambda: self.world.restart(host))
            case "pause":
                self._pause(host, mishap.for_ms)
            case "cut":
                self._cut(mishap)
            case "slow disk":
                host.slow_disk_until = self.world.clockwork.now + mishap.for_ms
            case "lose blob":
                self._lose_blob(host)
            case "wall":
                host.wall_error -= mishap.for_ms * 10
            case "bounce":
                self._bounce(host, mishap.for_ms)
            case "amnesia":
                self.amnesic = True
                self._pause(host, mishap.for_ms)
            case "handover":
                if host.process is not None:
                    to = self.world.hosts[mishap.side[0] % len(self.world.hosts)].peer if mishap.one_way else None
                    host.process.handle(HandoverAsked(to))
            case "reform":
                self._lose_majority(mishap)

    def _bounce(self, spared: Host, for_ms: int) -> None:
        """Everybody else restarts at once."""
        for host in self.world.hosts:
            if host is not spared and host.process is not None:
                self.world.crash(host)
                self.world.clockwork.after(for_ms, lambda host=host: self.world.restart(host))  # type: ignore[misc]

    def amnesia(self, process: Process, to: PeerId) -> None:
        """A candidate is heard by one elector only, which nobody hears; then it loses its disk and comes back."""
        self.amnesic = False
        heard, host = self.world.by_peer[to], process.host
        for other in self.world.hosts:
            if other is not heard:
                self.world.cut[heard.index, other.index] = self.world.clockwork.now + 60_000
                if other is not host:
                    self.world.cut[host.index, other.index] = self.world.clockwork.now + 1_500
        self.world.film.append(f"{self.world.clockwork.now} amnesia: only {heard.index} hears {host.index}")
        self.world.clockwork.after(900, lambda: self.world.crash(host, lose_disk=True))
        self.world.clockwork.after(1_200, lambda: self.world.restart(host))

    def _bearable(self, host: Host) -> bool:
        """Whether the run may outlive that disk: every roster anywhere keeps a majority of its disks."""
        seat = (host.peer, host.disk.enrolment)
        left = {(each.peer, each.disk.enrolment) for each in self.world.hosts} - {seat}
        rosters = {self.world.book.roster(digest) for each in self.world.hosts for digest in each.disk.tips()}
        return all(2 * sum((e.peer, e.enrolment) in left for e in roster) > len(roster) for roster in rosters)

    def _pause(self, host: Host, for_ms: int) -> None:
        process = host.process
        if process is not None and not process.paused:
            process.pause()
            self.world.clockwork.after(for_ms, lambda: process.resume() if process.alive and process.paused else None)

    def _cut(self, mishap: Mishap) -> None:
        """Cut between the hosts in `side` and all others, one way or both."""
        until = self.world.clockwork.now + mishap.for_ms
        inside = {index % len(self.world.hosts) for index in mishap.side}
        if mishap.syncer:
            syncer = (self.world.syncer() or self.world.hosts[0]).index
            inside = inside ^ {syncer} if len(inside) > 1 else {syncer}
        outside = [host.index for host in self.world.hosts if host.index not in inside]
        for a in sorted(inside):
            for b in outside:
                for pair in ((a, b), (b, a)):
                    if mishap.one_way and pair[0] == (a if mishap.outwards else b):
                        continue
                    self.world.cut[pair] = max(until, self.world.cut.get(pair, 0))
                if self.world.clockwork.random.random() < 0.7:
                    self.world.break_connections(a, b)

    def _lose_blob(self, host: Host) -> None:
        """A blob went bad on disk; the shell has noticed."""
        commits = [digest for digest in host.disk.stored if host.disk.known[digest].kind == "commit"]
        if commits and host.process is not None:
            digest = commits[-1 - self.world.clockwork.random.randrange(min(len(commits), 12))]
            del host.disk.stored[digest]
            host.process.handle(EntryLost(digest))
            host.process._fetch_soon()

    def provoke(self, process: Process, ballot: Ballot) -> None:
        """The worst moments: right after a vote or an ask has left."""
        if not self.world.faults_on or not isinstance(ballot, Vote | Ask):
            return
        if self.world.clockwork.random.random() < self.world.plan.provoke / 2:
            self._provoked(process)
        elif self.world.clockwork.random.random() < self.world.plan.provoke:
            self.world.clockwork.after(self.world.clockwork.between((5, 300)), self.world.catching_up.gossip)

    def provoke_sealed(self, process: Process, entry: EntryFacts) -> bool:
        """Or after an `open` or `roster` was sealed, before anybody hears of it."""
        odds = self.world.plan.provoke if entry.kind in ("open", "roster") else self.world.plan.provoke / 20
        if self.world.faults_on and self.world.clockwork.random.random() < odds:
            self._provoked(process)
            return not process.alive
        return False

    def _provoked(self, process: Process) -> None:
        chance, now = self.world.clockwork.random, self.world.clockwork.now
        host, for_ms = process.host, chance.choice((300, 2_000, 9_000, 25_000))
        kind = chance.choice(("crash", "crash", "lose", "cut", "cut", "cut", "pause"))
        self.world.film.append(f"{now} provoked {kind} {host.index} for {for_ms}")
        if kind in ("crash", "lose"):
            self.world.crash(host, lose_disk=kind == "lose" and self._bearable(host))
            self.world.clockwork.after(for_ms, lambda: self.world.restart(host))
        elif kind == "pause":
            self._pause(host, for_ms)
        else:
            side = [host.index, *(h.index for h in self.world.hosts if chance.random() < 0.35)]
            self._cut(Mishap(kind="cut", at_ms=now, for_ms=for_ms, side=tuple(side)))

    def _lose_majority(self, mishap: Mishap) -> None:
        """Most electors are gone, with their machines or behind a cut; soon the owner reforms the rest."""
        chains = [host.process.machine.head for host in self.world.hosts if host.process is not None]
        roster = self.world.book.roster(max(chains, key=lambda head: head.rank).digest) if chains else ()
        if not roster:
            return
        indices = [self.world.by_peer[elector.peer].index for elector in roster]
        syncer = self.world.syncer()
        indices.sort(key=lambda index: syncer is None or index != syncer.index)
        lost = sorted(indices[: len(indices) // 2 + 1])
        rest = [host.index for host in self.world.hosts if host.index not in lost]
        if not any(self.world.hosts[index].dialable for index in rest):
            return
        if mishap.gone:
            for index in lost:
                host = self.world.hosts[index]
                self.world.crash(host)
                host.gone_until = self.world.clockwork.now + mishap.for_ms
                self.world.clockwork.after(mishap.for_ms, lambda host=host: self.world.restart(host))  # type: ignore[misc]
        else:
            self._cut(Mishap(kind="cut", at_ms=mishap.at_ms, for_ms=mishap.for_ms, side=tuple(lost)))
        self.world.clockwork.after(self.world.clockwork.between((1_000, 6_000)), lambda: self._reform(rest))

    def _reform(self, rest: list[int]) -> None:
        up = [index for index in rest if (p := self.world.hosts[index].process) is not None and not p.paused]
        doors = [index for index in up if self.world.hosts[index].dialable and self.world.hosts[index].disk.log]
        if doors:
            told = doors[self.world.clockwork.random.randrange(len(doors))]
            others = [index for index in up if index != told]
            self.reform((told, *others[: 2 * self.world.clockwork.random.randrange(2)]), told)

    def reform(self, electors: tuple[int, ...], told: int) -> EntryFacts:
        """The owner signs a reform on top of what that host has, and gives it to it."""
        host = self.world.hosts[told]
        assert host.process is not None
        self.num_reforms += 1
        number = self.num_reforms
        parent = self.world.book.entries[host.process.machine.best.digest]
        seats = [Elector(h.peer, h.disk.enrolment, f"host {h.index}", f"host{h.index}:1") for h in self.world.hosts]
        entry = EntryFacts(
            kind="reform",
            branch=BranchId(""),
            term=Term(1),
            seq=Seq(parent.seq + 1),
            prev=parent.digest,
            digest=digest_of("reform", number, parent.digest, electors),
            signer=self.world.founder,
            roster=tuple(seats[index] for index in electors),
            lineage=number,
        )
        self.world.book.add(entry, self.world.clockwork.now)
        self.world.film.append(
            f"{self.world.clockwork.now} reform {number} on {parent.term} {parent.seq}, electors {electors}"
        )
        for watcher in self.world.watchers:
            watcher.reformed(entry)
        host.process.handle(EntriesArrived(host.peer, (entry,)))
        return entry
