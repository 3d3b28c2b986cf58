"""What happens in a simulated run, as data: the rules, who takes part, links, and faults; drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from geo_diloco.manifest import ElectionSpec, EvalSpec, OuterSpec, StopSpec, SyncSpec
from geo_diloco.protocol.amendments import Changes
from geo_diloco.protocol.history import ENTRIES_KEPT

FOR_GOOD_MS = 10**9

FaultKind = Literal[
    "crash",
    "lose disk",
    "freeze",
    "cut",
    "leave",
    "slow disk",
    "hand over",
    "cut apart",
    "unreachable",
    "amend",
    "reform",
]
SYNCER = -1
"""As `host` of a fault: whoever is syncer then."""


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One machine and the peer on it."""

    step_ms: int = 0
    """How long an inner step takes; 0: it does not train."""
    upload_ms: int = 0
    """How long an upload takes, give or take a twentieth; 0: as any blob in that plan."""
    uplink_ms: int = 0
    """How long its line takes for an upload that has it alone, besides; 0: no line holds anything up."""
    ahead_ms: int = 0
    """Of that: so much of an upload the kernel takes beyond what the line has carried."""
    is_mute: bool = False
    """It trains, follows and says how far it is, and what it samples it never hands in."""
    download_ms: int = 0
    """How long its line takes for an update, one after another; 0: as any blob in that plan, side by side."""
    delay_ms: int = 0
    """One way, of its messages; 0: as any message in that plan."""
    serves: bool = False
    """Can be dialed, and may be syncer."""
    elects: bool = False
    rate_ppm: int = 0
    """How fast its clock runs beyond real time."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that befalls one host, or the links around some, for a while."""

    kind: FaultKind
    at_ms: int
    for_ms: int
    host: int = SYNCER
    side: tuple[int, ...] = ()
    """`cut apart`: hosts on one side; SYNCER may be one of them. All others are on the other."""
    changes: Changes | None = None
    """`amend`: what the run's owner wants."""


@dataclass(frozen=True, kw_only=True)
class Odds:
    """Chances of small mishaps, in [0, 1], while faults are on."""

    update_lost: float = 0.0
    apply_failed: float = 0.0
    upload_failed: float = 0.0
    bad_frame: float = 0.0
    merge_failed: float = 0.0
    twice: float = 0.0
    """A message is given to the core twice."""
    shrink: float = 0.0
    """An adoption scales the carry by less than one; stays on when faults are over."""


@dataclass(frozen=True, kw_only=True)
class ShellTimes:
    """What a shell takes for its part, in milliseconds, drawn anew each time."""

    disk: tuple[int, int] = (1, 8)
    """Until a record is on it."""
    fold: tuple[int, int] = (1, 15)
    """Encoding or applying a fragment, one after another."""
    check: tuple[int, int] = (1, 20)
    """Of a contribution that has arrived."""
    merge: tuple[int, int] = (2, 60)
    """One after another."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about one simulated run. The same plan gives the same run."""

    seed: int = 0
    hosts: tuple[HostPlan, ...] = ()
    """The first founds the run."""
    sync: SyncSpec = field(default_factory=SyncSpec)
    outer: OuterSpec = field(default_factory=OuterSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    evaluation: EvalSpec = field(default_factory=lambda: EvalSpec(every_seconds=5.0))
    election: ElectionSpec = field(default_factory=lambda: ElectionSpec(electors=1))
    num_elements: tuple[int, ...] = (100, 300)
    tokens_per_step: int = 24
    """What the manifest says; 1 makes the plausibility limits bite."""
    save_every_ms: int = 4_000
    snapshot_every_ms: int = 5_000
    updates_bytes_kept: int | None = None
    """On every disk, beyond what is needed; an update takes 1,000. None: all of them stay."""
    entries_kept: int = ENTRIES_KEPT
    """In every memory, beyond what is needed."""
    delay_ms: tuple[int, int] = (1, 40)
    """One way, of a control message."""
    transfer_ms: tuple[int, int] = (5, 300)
    """Of a blob."""
    times: ShellTimes = field(default_factory=ShellTimes)
    step_spread: tuple[int, int] = (0, 10)
    """Percent that an inner step takes longer than its host's."""
    tells_each_step: bool = False
    """Learners tell how long their last step took, as real ones do; else what their host's steps take."""
    faults: tuple[Fault, ...] = ()
    odds: Odds = field(default_factory=Odds)
    faults_until_ms: int = 0
    """Small mishaps end then, as do the faults above."""
    forgets_uploads: bool = False
    """Whether an upload whose blob is forgotten ends without a word."""
    is_watched: bool = True
    """Whether checkers may look: work is followed step by step, effects are hashed. It takes a third of the time."""
    has_liar: bool = False
    """Somebody lies to whoever serves, until faults end."""

    @property
    def learners(self) -> tuple[int, ...]:
        """Which hosts train."""
        return tuple(index for index, host in enumerate(self.hosts) if host.step_ms)


FOUNDER = HostPlan(serves=True, elects=True)


def learners(*step_ms: int, elect: bool = False) -> tuple[HostPlan, ...]:
    return tuple(HostPlan(step_ms=each, elects=elect) for each in step_ms)
