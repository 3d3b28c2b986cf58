"""What a syncer costs by itself, and how that grows with the learners: its production core in simulated runs.

The learners and the world around them are simulated in the same process; only what is spent inside the syncer's
`Peer.handle` counts. What is seen over the wire is what the core asks to be sent, as the real shell would sign and pack
it; the bytes of deltas and updates are not in it, and no time for signing, sockets or merging: those are in
`bench_crowd.py`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

from geo_diloco.manifest import BranchId, MonoMs, PeerId, StopSpec, SyncSpec, Term
from geo_diloco.protocol.effects import Announce, Effect, Seal, Send
from geo_diloco.protocol.events import Event, Received
from geo_diloco.protocol.messages import Entry, Envelope, Hello, Message
from geo_diloco.protocol.peer import Peer
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.wire import pack_line, seal_entry, seal_envelope
from geo_diloco.sim.fakes import RUN
from geo_diloco.sim.plans import FOUNDER, Plan, learners
from geo_diloco.sim.process import Process
from geo_diloco.sim.world import Watch, World

STEP_MS = 1_000
WARM_UP_MS = 8_000
"""Everybody has joined, and the first rounds are committed."""


def measure_syncer(*, num_learners: Sequence[int], seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Keys: `ratio` (CPU per learner and second with the most learners over that with the fewest) and `rows`, one for
    each number of learners; a row's `ratio` is to the first row."""
    rows: list[dict[str, Any]] = []
    for number in num_learners:
        row = _measure(number, seconds)
        row["ratio"] = row["cpu_ms_per_learner_s"] / (rows[0] if rows else row)["cpu_ms_per_learner_s"]
        rows.append(row)
        say(
            f"{number:>6} learners: {row['cpu_ms_per_learner_s']:.3f} ms of the syncer's core per learner and second "
            f"({row['ratio']:.2f} times the first), {row['us_per_event']:.0f} us per event; hears "
            f"{row['heard_per_learner_s']:.2f} and says {row['said_per_learner_s']:.2f} messages per learner and "
            f"second; MB/s: {row['control_bytes_per_s'] / 1e6:.2f} of control messages, "
            f"{row['entry_bytes_per_s'] / 1e6:.2f} of entries; core {row['core_mb']:.1f} MB"
        )
    return {"seconds": seconds, "ratio": rows[-1]["ratio"], "rows": rows}


def _measure(num_learners: int, seconds: float) -> dict[str, Any]:
    """The rules are a manifest's own, so a round is opened with every inner step of a second."""
    sync = SyncSpec()
    plan = Plan(
        hosts=(FOUNDER, *learners(*[STEP_MS] * num_learners)),
        sync=sync,
        stop=StopSpec(),
        num_elements=(100,) * sync.num_fragments,
        save_every_ms=0,
    )
    world = World(plan, MeteredPeer)
    world.begin()
    world.clock.run(WARM_UP_MS)
    syncer = world.hosts[0].process
    assert syncer is not None and isinstance(syncer.core, MeteredPeer)
    core, traffic = syncer.core, Traffic(syncer)
    joining_ns, before_ns = core.joining_ns, core.spent_ns
    world.watches = (traffic,)
    gc.collect()
    gc.disable()  # a collection looks at the whole world, not only at what the core made
    try:
        world.clock.run(WARM_UP_MS + int(seconds * 1000))
    finally:
        gc.enable()
    spent_ms, learner_s = (core.spent_ns - before_ns) / 1e6, num_learners * seconds
    return {
        "learners": num_learners,
        "cpu_ms_per_learner_s": spent_ms / learner_s,
        "us_per_event": 1000 * spent_ms / max(1, traffic.events),
        "joining_ms_per_learner": joining_ns / 1e6 / num_learners,
        "events_per_learner_s": traffic.events / learner_s,
        "heard_per_learner_s": traffic.heard.total() / learner_s,
        "said_per_learner_s": traffic.said.total() / learner_s,
        "heard": dict(traffic.heard),
        "said": dict(traffic.said),
        "control_bytes_per_s": (traffic.bytes["heard"] + traffic.bytes["said"]) / seconds,
        "entry_bytes_per_s": traffic.bytes["entries"] / seconds,
        "entry_bytes_max": traffic.bytes["entry"],
        "commits": len(traffic.commits),
        "participants": sum(traffic.commits) / max(1, len(traffic.commits)),
        "core_mb": size_of(core) / 1e6,
    }


class MeteredPeer(Peer):
    """Knows what it has spent."""

    spent_ns = 0
    joining_ns = 0
    """Of that, on learners that say Hello."""

    def handle(self, event: Event, now: MonoMs) -> list[Effect]:
        began = time.process_time_ns()
        effects = super().handle(event, now)
        spent_ns = time.process_time_ns() - began
        self.spent_ns += spent_ns
        if isinstance(event, Received) and isinstance(event.message, Hello):
            self.joining_ns += spent_ns
        return effects


class Traffic(Watch):
    """What one process hears and says, while it is counted."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._sizes = Sizes()
        self.events = 0
        self.heard: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.commits: list[int] = []
        """Participants of each."""

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if process is not self._process:
            return
        self.events += 1
        if isinstance(event, Received):
            self.heard[event.message.kind] += 1
            self.bytes["heard"] += self._sizes.message(event.message)
        for effect in effects:
            if isinstance(effect, Send):
                self.said[effect.message.kind] += 1
                self.bytes["said"] += self._sizes.message(effect.message)
            elif isinstance(effect, Seal):
                self._sizes.sealed = effect.entry
            elif isinstance(effect, Announce):
                self.said["entry"] += len(process.links)
                self.bytes["entries"] += len(process.links) * self._sizes.entry
                self.bytes["entry"] = max(self.bytes["entry"], self._sizes.entry)
                participants = getattr(self._sizes.sealed, "participants", None)
                if participants is not None:
                    self.commits.append(len(participants))


class Sizes:
    """Bytes of messages and entries as they are sent: signed, a line of JSON each, a long one packed."""

    def __init__(self) -> None:
        self.sealed: Entry | None = None
        """The newest entry."""
        self._known: dict[tuple[str, int], int] = {}

    @cached_property
    def _identity(self) -> Identity:
        return Identity.generate()

    def message(self, message: Message) -> int:
        """Messages of a kind differ by the digits of their numbers at most, but for their lists."""
        lists = (getattr(message, name, ()) for name in ("undecided", "merged_until"))
        key = message.kind, sum(len(each) for each in lists)
        if key not in self._known:
            self._known[key] = len(seal_envelope(self._envelope(message), self._identity))
        return self._known[key]

    def _envelope(self, message: Message) -> Envelope:
        return Envelope(
            run=RUN,
            branch=BranchId("ab" * 32),
            term=Term(1),
            boot="cd" * 8,  # type: ignore[arg-type]
            sender=self._identity.peer_id,
            to=PeerId("ef" * 32),
            nonce="01" * 16,
            number=1_000,
            message=message,
        )

    @property
    def entry(self) -> int:
        """Of the newest."""
        assert self.sealed is not None
        return len(pack_line(seal_entry(self.sealed, self._identity).to_line()))


def size_of(thing: object) -> int:
    """Bytes of everything that is reached from it, once each; code and what it names are not counted."""
    seen: set[int] = set()
    size, ahead = 0, [thing]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        size += sys.getsizeof(each)
        ahead += gc.get_referents(each)
    return size
