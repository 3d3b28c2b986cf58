"""What joins the hosts of `namespaces.py`: a router in user space, because not every kernel can delay or lose a packet.

It reads IP packets from one TUN device per host and writes them to the one they are for, later or never. A packet from
i to j waits in i's queue until its rate lets it out, takes the delay of both, is lost by the odds of both, and waits in
j's queue. Packets of one pair keep their order. Between hosts that are cut nothing passes, in flight or not.

A process of its own: it must not wait for the tests' interpreter. Orders come as lines of JSON on standard input, each
is answered by a line; when the input ends, so does it. It needs no rights: the devices are given to it open.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PACKET_BYTES_MAX = 65_536
BURST = 64
"""Packets read from one device before the others have their turn."""
QUEUE_S = 0.2
"""What does not get out within that is dropped, as by a router with a queue of so much."""
SUBNET = bytes((10, 77, 0))


@dataclass
class Line:
    """What a host is connected by, each way."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: no limit."""
    loss: float = 0.0
    free_at: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """When the last packet is out: up, down."""

    def served_at(self, now: float, size: int, direction: int) -> float | None:
        """When a packet that comes now is through; None if the queue is full."""
        if not self.bytes_per_s:
            return now
        begins = max(now, self.free_at[direction])
        if begins - now > QUEUE_S:
            return None
        self.free_at[direction] = begins + size / self.bytes_per_s
        return self.free_at[direction]


class Switch:
    """`devices[i]` is host i's, non-blocking; host i has the address 10.77.0.(i+1)."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = list(devices)
        self._lines = [Line() for _ in devices]
        self._cut: set[tuple[int, int]] = set()
        self._ahead: list[tuple[float, int, int, int, bytes, bool]] = []
        """(when, count, from, to, packet, whether it has passed the receiver's queue), a heap."""
        self._count = 0
        self._late_s = 0.0
        self._last: dict[tuple[int, int], float] = {}

    def obey(self, order: dict[str, Any]) -> str:
        """The answer."""
        if order["do"] == "late":
            late_s, self._late_s = self._late_s, 0.0
            return repr(late_s)
        if order["do"] == "cut":
            self._cut |= {(a, b) for a, b in order["pairs"]}
        elif order["do"] == "heal":
            self._cut.clear()
        elif order["do"] == "line":
            self._lines[order["host"]] = Line(order["delay_s"], order["bytes_per_s"], order["loss"])
        else:
            raise ValueError(f"no such order: {order}")
        return "done"

    def take_in(self, host: int) -> None:
        """What has come from a host."""
        for _ in range(BURST):
            try:
                packet = os.read(self._devices[host], PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            self._send(host, packet, time.monotonic())

    def _send(self, sender: int, packet: bytes, now: float) -> None:
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != SUBNET:
            return
        to = packet[19] - 1
        if not 0 <= to < len(self._devices):
            return
        out, into = self._lines[sender], self._lines[to]
        at = out.served_at(now, len(packet), 0)
        if at is None or (out.loss and random.random() < out.loss) or (into.loss and random.random() < into.loss):
            return
        at = max(at + out.delay_s + into.delay_s, self._last.get((sender, to), 0.0))
        self._last[sender, to] = at
        self._later(at, sender, to, packet, queued=False)

    def _later(self, at: float, sender: int, to: int, packet: bytes, *, queued: bool) -> None:
        self._count += 1
        heapq.heappush(self._ahead, (at, self._count, sender, to, packet, queued))

    def give_out(self) -> float | None:
        """What is due; returns the seconds until more is."""
        while self._ahead:
            now = time.monotonic()
            at, _, sender, to, packet, queued = self._ahead[0]
            if at > now:
                return at - now
            heapq.heappop(self._ahead)
            self._late_s = max(self._late_s, now - at)
            if (sender, to) in self._cut:
                continue
            arrives = at if queued else self._lines[to].served_at(at, len(packet), 1)
            if arrives is None:
                continue
            if arrives > now:
                self._later(arrives, sender, to, packet, queued=True)
            else:
                self._write(to, packet)
        return None

    def _write(self, to: int, packet: bytes) -> None:
        try:
            os.write(self._devices[to], packet)
        except OSError:
            return  # its queue is full, or its namespace is going: lost, as packets are


def run(devices: Sequence[int]) -> None:
    """Until standard input ends."""
    switch = Switch(devices)
    poll = select.epoll()
    for device in devices:
        poll.register(device, select.EPOLLIN)
    poll.register(sys.stdin.fileno(), select.EPOLLIN)
    hosts = {device: host for host, device in enumerate(devices)}
    orders = b""
    while True:
        wait_s = switch.give_out()
        for ready, _ in poll.poll(-1 if wait_s is None else wait_s):
            if ready in hosts:
                switch.take_in(hosts[ready])
                continue
            read = os.read(ready, PACKET_BYTES_MAX)
            if not read:
                return
            *lines, orders = (orders + read).split(b"\n")
            for line in lines:
                print(switch.obey(json.loads(line)), flush=True)


if __name__ == "__main__":
    run([int(device) for device in sys.argv[1:]])
