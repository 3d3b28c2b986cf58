"""The fleet of a run that took place, from its syncer's tape, and what that run really came to.

A syncer's tape has what every learner said of itself: step time, upload rate, how far it was, and when it came and
went, and when its deltas came. What a learner's line carries down is not in it; whose work is merged has followed all
updates, so it is taken to be what they need and as much again, or the same as up if that is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from geo_diloco.errors import TapeError
from geo_diloco.manifest import Digest, PeerId, RunRules
from geo_diloco.protocol.events import BlobArrived, Connected, Disconnected, FoundRun, Merged, Received
from geo_diloco.protocol.messages import BlobRef, Contribution, Hello, Progress
from geo_diloco.sim.goodput.fleet import BLOB_S, CODEC_BITS, Fleet, Machine
from geo_diloco.sim.goodput.relived import Relived, relive
from geo_diloco.tape import TapeBoot, TapeEvent, read_tape

NEVER_S = 1e9
"""A learner that was not seen to fail."""
HELD_UP_MAX = 0.99
ROOM = 2.0
LINE_SHARE_MIN = 0.1
"""Of the time that an upload takes, at least so much is its line's."""
UP_MBIT_UNKNOWN = 1e6
"""A learner that told no rate."""


@dataclass(frozen=True, kw_only=True)
class Actual:
    """From the first merge to the last."""

    hours: float
    rounds_per_hour: float
    tokens_per_hour: float
    participants: float | None
    """In a round, late work included; none if the tape does not tell this version's core."""
    goodput: float
    """Steps that learners took, of those that their step times allow while they were connected."""


@dataclass
class _Seen:
    """One learner, as the syncer saw it."""

    host: str = ""
    step_us: list[int] = field(default_factory=list)
    bytes_per_s: list[int] = field(default_factory=list)
    announced: dict[Digest, int] = field(default_factory=dict)
    """When."""
    arrived_ms: int = -1
    """The newest of its deltas."""
    uploads: list[tuple[int, int, bool]] = field(default_factory=list)
    """Bytes, milliseconds, and whether it had to wait for the one before: they go up one after another."""
    said: list[tuple[int, int, int]] = field(default_factory=list)
    """Milliseconds, steps, tokens."""
    since: int | None = None
    here_ms: int = 0
    away_ms: list[int] = field(default_factory=list)
    left: int | None = None

    @property
    def step_s(self) -> float:
        """Of an inner step: the median over the times between two words of it; what it calls its step time is a moving
        average, and jumps."""
        paces = [
            (later - at) / 1000 / (step - before)
            for (at, before, _), (later, step, _) in pairwise(self.said)
            if step > before and later > at
        ]
        return median(paces) if paces else 1e-6 * median(self.step_us)

    @property
    def taken_ms(self) -> float:
        """Of its steps, from its first word to its last."""
        return (self.said[-1][1] - self.said[0][1]) * self.step_s * 1000

    @property
    def possible_ms(self) -> float:
        """As long, without its absences."""
        return float(self.said[-1][0] - self.said[0][0] - sum(self.away_ms))

    def arrives(self, blob: BlobRef, at: int) -> None:
        announced_at = self.announced.pop(blob.digest)
        began_at = max(announced_at, self.arrived_ms)
        self.uploads.append((blob.size, at - began_at, began_at > announced_at))
        self.arrived_ms = at

    def comes(self, at: int) -> None:
        if self.left is not None:
            self.away_ms.append(at - self.left)
        self.since, self.left = at, None

    def goes(self, at: int) -> None:
        if self.since is not None:
            self.here_ms += at - self.since
        self.since, self.left = None, at


def fleet_from_tape(path: Path, *, hold_out: float = 0.0) -> tuple[Fleet, Actual]:
    """`hold_out`: so much of the time between the first merge and the last, its end, is not looked at for the fleet,
    and is what the run really came to; with 0 both are of all of it. Raises TapeError, also for what no run can have
    written: a tape may have been through anybody's hands."""
    boot = read_syncer(path)
    try:
        fleet, actual = _fleet_of(boot, path, hold_out)
        _check_machines(fleet)
        if fleet.tokens_per_step < 1 or actual.tokens_per_hour < 0:
            raise ValueError("tokens that grow fewer")
    except (ArithmeticError, ValueError, IndexError) as exc:
        raise TapeError(f"{path.name}: holds what no run writes: {' '.join(str(exc).split())[:100]}") from exc
    return fleet, actual


def _fleet_of(boot: TapeBoot, path: Path, hold_out: float) -> tuple[Fleet, Actual]:
    _check_rules(boot.boot.rules)
    if any(later.at < record.at for record, later in pairwise(boot.events)):
        raise ValueError("a time before the one above it")
    merges = [record.at for record in boot.events if isinstance(record.event, Merged)]
    cut = merges[-1] - hold_out * (merges[-1] - merges[0])
    first = [record for record in boot.events if record.at <= cut or not hold_out]
    last = [record for record in boot.events if record.at >= cut or not hold_out]
    learners, actually = _learners(first), _learners(last)
    if not learners or not actually:
        raise TapeError(
            f"{path.name}: no learner told its step time; wanted the tape of a run that went on for a minute"
        )
    rules, lived = boot.boot.rules, relive(boot)
    before = lived.between(0, cut)
    params, codec = _params(boot), rules.codec_down.name
    seen_s = max(1.0, (cut - merges[0]) / 1000)
    updates_mbit = (
        1e-6 * sum(at <= cut for at in merges) / seen_s * params * CODEC_BITS[codec] / rules.sync.num_fragments
    )
    fleet = Fleet(
        machines=tuple(
            _machine(name, seen, before.rtt_s(name), updates_mbit=updates_mbit)
            for name, seen in sorted(learners.items())
        ),
        params=params,
        tokens_per_step=rules.tokens_per_step or _tokens_per_step(learners),
        interval_steps=rules.sync.interval_steps,
        fragments=rules.sync.num_fragments,
        quorum=rules.sync.quorum,
        codec=rules.codec_up.name,
        shell=before.shell(),
    )
    return fleet, _actual(last, actually, lived.between(last[0].at, last[-1].at))


def _check_rules(rules: RunRules) -> None:
    """Raises ValueError."""
    sync = rules.sync
    for name, value, most in (
        ("interval_steps", sync.interval_steps, 1_000_000),
        ("num_fragments", sync.num_fragments, 100_000),
        ("quorum", sync.quorum, 100_000),
        ("rounds_in_flight_max", sync.rounds_in_flight_max, 100_000),
    ):
        if not 1 <= value <= most:
            raise ValueError(f"{name} = {value}")


def _check_machines(fleet: Fleet) -> None:
    """Raises ValueError."""
    for machine in fleet.machines:
        for name, value in (
            ("step time", machine.step_s),
            ("rate up", machine.up_mbit),
            ("rate down", machine.down_mbit),
        ):
            if not 1e-6 <= value <= 1e9:
                raise ValueError(f"{machine.name} with a {name} of {value:.3g}")


def read_syncer(path: Path) -> TapeBoot:
    """The process start of which most merges are on that tape. Raises TapeError."""
    boots = list(read_tape(path))
    if len(peers := sorted({boot.boot.peer for boot in boots})) > 1:
        raise TapeError(f"{path.name}: of {len(peers)} peers ({peers[0][:8]}, {peers[1][:8]}); wanted is that of one")
    numbers = [sum(isinstance(record.event, Merged) for record in boot.events) for boot in boots]
    if not any(numbers):
        raise TapeError(f"{path.name}: no merge is on this tape; wanted that of a peer that was syncer for a while")
    return boots[numbers.index(max(numbers))]


def _learners(records: Sequence[TapeEvent]) -> dict[PeerId, _Seen]:
    """By peer, those that told a step time."""
    seen: dict[PeerId, _Seen] = {}
    whose: dict[Digest, PeerId] = {}
    for record in records:
        match record.event:
            case Connected(peer=peer):
                seen.setdefault(peer, _Seen()).comes(record.at)
            case Disconnected(peer=peer):
                seen.setdefault(peer, _Seen()).goes(record.at)
            case Received(sender=peer, message=Hello(host=host)):
                seen.setdefault(peer, _Seen()).host = host
            case Received(sender=peer, message=Contribution(blob=blob)):
                seen.setdefault(peer, _Seen()).announced[blob.digest] = record.at
                whose[blob.digest] = peer
            case BlobArrived(blob=blob) if blob.digest in whose:
                seen[whose.pop(blob.digest)].arrives(blob, record.at)
            case Received(sender=peer, message=Progress() as progress):
                one = seen.setdefault(peer, _Seen())
                one.said.append((record.at, progress.step, progress.tokens))
                one.step_us += [progress.step_time_us] if progress.step_time_us else []
                one.bytes_per_s += [progress.upload_bytes_per_s] if progress.upload_bytes_per_s else []
            case _:
                pass
    for each in seen.values():
        if each.since is not None:
            each.here_ms += records[-1].at - each.since
    return {peer: each for peer, each in seen.items() if each.step_us}


def _machine(peer: str, seen: _Seen, rtt_s: float | None, *, updates_mbit: float) -> Machine:
    rtt_s = Machine.rtt_s if rtt_s is None else rtt_s
    up_mbit = _up_mbit(seen, rtt_s)
    failed = len(seen.away_ms)
    return Machine(
        name="".join(c if c.isprintable() else "?" for c in f"{seen.host} {peer[:8]}".strip()),
        step_s=seen.step_s,
        held_up=min(HELD_UP_MAX, max(0.0, 1.0 - seen.taken_ms / max(1.0, seen.possible_ms))),
        up_mbit=up_mbit,
        down_mbit=max(up_mbit, ROOM * updates_mbit),
        rtt_s=rtt_s,
        fails_every_s=seen.here_ms / 1000 / failed if failed and seen.here_ms else NEVER_S,
        back_after_s=sum(seen.away_ms) / 1000 / failed if failed else 0.0,
    )


def _up_mbit(seen: _Seen, rtt_s: float) -> float:
    """Of its line alone. What a learner calls its rate has the round trip and both ends' disks in it, which count for
    more the smaller a delta is; it is taken where nothing was handed in."""
    if not seen.uploads:
        return 8e-6 * median(seen.bytes_per_s) if seen.bytes_per_s else UP_MBIT_UNKNOWN
    rates = []
    for size, took_ms, waited in seen.uploads:
        took_s = max(1, took_ms) / 1000
        line_s = took_s - BLOB_S - (rtt_s if waited else 0.0)
        rates.append(8e-6 * size / max(line_s, took_s * LINE_SHARE_MIN))
    return median(rates)


def _params(boot: TapeBoot) -> float:
    """As founded; where another founded, as large as the deltas are in that codec. Raises ValueError."""
    for record in boot.events:
        if isinstance(record.event, FoundRun):
            if not record.event.num_elements or min(record.event.num_elements) < 1:
                raise ValueError("a fragment without parameters")
            return float(sum(record.event.num_elements))
    sizes: dict[int, int] = {}
    for record in boot.events:
        if isinstance(record.event, Received) and isinstance(record.event.message, Contribution):
            delta = record.event.message
            sizes[delta.id.fragment] = max(sizes.get(delta.id.fragment, 0), delta.blob.size)
    return max(1.0, 8 * sum(sizes.values()) / CODEC_BITS[boot.boot.rules.codec_up.name])


def _tokens_per_step(learners: dict[PeerId, _Seen]) -> int:
    steps = sum(each.said[-1][1] - each.said[0][1] for each in learners.values())
    tokens = sum(each.said[-1][2] - each.said[0][2] for each in learners.values())
    return max(1, round(tokens / steps)) if steps else 1


def _actual(records: Sequence[TapeEvent], learners: dict[PeerId, _Seen], lived: Relived) -> Actual:
    merges = [record.at for record in records if isinstance(record.event, Merged)]
    hours = (merges[-1] - merges[0]) / 3.6e6
    taken = possible = tokens = 0.0
    for each in learners.values():
        (began, _, had), (ended, _, has) = each.said[0], each.said[-1]
        taken += each.taken_ms
        possible += each.possible_ms
        tokens += (has - had) / (ended - began) * 3.6e6 if ended > began else 0.0
    return Actual(
        hours=hours,
        rounds_per_hour=(len(merges) - 1) / hours if hours else 0.0,
        tokens_per_hour=tokens,
        participants=lived.participants,
        goodput=min(1.0, taken / possible) if possible > 0 else 0.0,
    )
