"""Who reaches whom: control connections with their delays, cuts, and peers that can't be dialed.

A connection keeps its order and loses nothing while it is up; what is under way when it breaks is lost, and either side
notices in its own time. A cut breaks the connections across it, and none can be made until it heals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from geo_diloco.manifest import PeerId
from geo_diloco.protocol.effects import Send
from geo_diloco.protocol.events import Connected, Event, Received
from geo_diloco.sim.fakes import SignedEntry

if TYPE_CHECKING:
    from geo_diloco.sim.process import Process
    from geo_diloco.sim.world import Host, World


class Link:
    """A control connection between two processes."""

    def __init__(self, world: World, dialer: Process, accepter: Process) -> None:
        self._world = world
        self._ends = (dialer, accepter)
        self.up = True
        self._arrives = {dialer.peer: 0, accepter.peer: 0}
        hosts = [world.by_peer.get(process.peer) for process in self._ends]  # a liar is nobody's
        own_ms = sum(host.plan.delay_ms for host in hosts if host is not None)
        self._delay_ms = (own_ms, own_ms) if own_ms else world.plan.delay_ms

    def other(self, process: Process) -> Process:
        return self._ends[1] if process is self._ends[0] else self._ends[0]

    def send(self, sender: Process, effect: Send) -> None:
        event = Received(sender.peer, effect.branch, effect.term, sender.boot, effect.message)
        self.deliver(sender, event)
        if self._world.mishap(self._world.plan.odds.twice):
            self.deliver(sender, event)

    def deliver(self, sender: Process, event: Event) -> None:
        receiver, clock = self.other(sender), self._world.clock
        when = max(self._arrives[receiver.peer], clock.now + clock.between(self._delay_ms))
        self._arrives[receiver.peer] = when
        clock.at(when, lambda: receiver.handle(event) if self.up else None)

    def deliver_entry(self, sender: Process, signed: SignedEntry) -> None:
        """The bytes of an entry, in order with the messages."""
        receiver, clock = self.other(sender), self._world.clock
        when = max(self._arrives[receiver.peer], clock.now + clock.between(self._delay_ms))
        self._arrives[receiver.peer] = when
        clock.at(when, lambda: receiver.chain.arrived(signed) if self.up and receiver.alive else None)

    def break_off(self) -> None:
        if not self.up:
            return
        self.up = False
        for process, slowest_ms in zip(self._ends, (500, 2_500), strict=True):
            other = self.other(process).peer
            self._world.clock.after(
                self._world.clock.between((0, slowest_ms)),
                lambda process=process, other=other: process.lost(self, other),  # type: ignore[misc]
            )

    def close_when_sent(self) -> None:
        self._world.clock.at(max(self._arrives.values()), self.break_off)


class Network:
    """Cuts, and how connections come to be."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cut_until: dict[frozenset[int], int] = {}
        self._undialable_until: dict[int, int] = {}

    def reaches(self, one: Host, other: Host) -> bool:
        """Whether packets pass between them now."""
        return self._world.clock.now >= self._cut_until.get(frozenset((one.index, other.index)), 0)

    def can_dial(self, one: Host, other: Host) -> bool:
        now = self._world.clock.now
        return other.plan.serves and self.reaches(one, other) and now >= self._undialable_until.get(other.index, 0)

    def cut(self, side: set[int], until: int) -> None:
        """Between those hosts and all others."""
        hosts = self._world.hosts
        for one in [hosts[index] for index in sorted(side)]:
            for other in hosts:
                if other.index not in side:
                    pair = frozenset((one.index, other.index))
                    self._cut_until[pair] = max(until, self._cut_until.get(pair, 0))
                    self._break(one, other)

    def make_undialable(self, index: int, until: int) -> None:
        """Nobody gets through to it any more; it can still dial out."""
        self._undialable_until[index] = until
        for other in self._world.hosts:
            self._break(self._world.hosts[index], other)

    def _break(self, one: Host, other: Host) -> None:
        if one.process is not None and (link := one.process.links.get(other.peer)) is not None:
            link.break_off()

    def heal(self) -> None:
        self._cut_until.clear()
        self._undialable_until.clear()

    def dial(self, dialer: Process, peer: PeerId, done: Callable[[Link | None], None]) -> None:
        """Connect, and say whether it worked."""
        world = self._world
        host = world.by_peer[peer]

        def arrive() -> None:
            accepter = host.process
            if not dialer.alive:
                return
            refused = accepter is None or accepter.frozen or not accepter.accepts_links
            if refused or not self.can_dial(dialer.host, host):
                done(None)
                return
            assert accepter is not None
            link = dialer.links.get(peer)
            if link is None or not link.up:
                link = Link(world, dialer, accepter)
                dialer.links[peer] = accepter.links[dialer.peer] = link
                accepter.handle(Connected(dialer.peer))
            done(link)

        world.clock.after(2 * world.clock.between(world.plan.delay_ms), arrive)
