"""What a syncer's tape does not say and its core does: which rounds it opened, whom it merged, how long its shell took.

A tape holds events; what they asked for is a hash. Fed to a fresh core they ask for it again, so the rounds are those
of the run, exactly. A tape of another version may be one that no core of this version was ever given: then nothing more
is known than the events say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Literal, TypeVar, get_args

from geo_diloco.errors import TapeError
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.effects import CheckContribution, Effect, Merge, Seal, Send
from geo_diloco.protocol.election.ballots import Ack
from geo_diloco.protocol.events import BlobArrived, ContributionChecked, Event, Merged, Received, Sealed
from geo_diloco.protocol.messages import Commit, Contribution, Durable, RoundOpen, Sampled
from geo_diloco.sim.goodput.fleet import SHELL
from geo_diloco.sim.plans import ShellTimes
from geo_diloco.tape import TapeBoot, replay_boot

T = TypeVar("T")
Dated = list[tuple[int, T]]
"""Each with its time, in milliseconds."""
FEW = 5
"""So little was seen that it says nothing."""

Phase = Literal["sampling", "encoding", "uploading", "checking", "closing", "merging", "sealing", "spreading"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""What a round is made of, as its syncer sees it. Of each learner: from the opening until it says that it sampled, from
there until it announces what it encoded, until all of that is here, and until it is checked. Of all: from the opening
to the closing, until it is merged, until the commit is on the disk, and until a majority of the electors has it."""


@dataclass
class Relived:
    """Times in milliseconds."""

    commits: Dated[Commit] = field(default_factory=list)
    waits: Dated[tuple[PeerId, int]] = field(default_factory=list)
    """From a word to a learner to its answer: that it sampled, for which it also waits for the end of its inner step,
    or, if it is an elector, that it heard the heartbeat, for which it may have to fetch something."""
    phases: dict[Phase, Dated[int]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def between(self, begin: float, end: float) -> Relived:
        """Both included."""

        def inside(dated: Dated[T]) -> Dated[T]:
            return [each for each in dated if begin <= each[0] <= end]

        return Relived(
            commits=inside(self.commits),
            waits=inside(self.waits),
            phases={phase: inside(dated) for phase, dated in self.phases.items()},
        )

    def medians(self) -> dict[Phase, float]:
        """Of those phases that were seen often enough to say anything."""
        return {phase: median(each for _, each in dated) for phase, dated in self.phases.items() if len(dated) >= FEW}

    @property
    def participants(self) -> float | None:
        """In a round, on average; none if no round was seen."""
        numbers = [len(commit.participants) for _, commit in self.commits]
        return sum(numbers) / len(numbers) if numbers else None

    def rtt_s(self, peer: PeerId) -> float | None:
        """Whoever had nothing to wait for answered after a round trip."""
        waits = [wait for _, (each, wait) in self.waits if each == peer]
        return min(waits) / 1000 if len(waits) >= FEW else None

    def shell(self) -> ShellTimes:
        """As most of the time: without the tenth that was quickest, and slowest."""
        return ShellTimes(
            disk=_most(self.phases["sealing"], SHELL.disk),
            fold=_most(self.phases["encoding"], SHELL.fold),
            check=_most(self.phases["checking"], SHELL.check),
            merge=_most(self.phases["merging"], SHELL.merge),
        )


def _most(dated: Dated[int], usual: tuple[int, int]) -> tuple[int, int]:
    if len(dated) < FEW:
        return usual
    tenths = quantiles([each for _, each in dated], n=10, method="inclusive")
    return round(tenths[0]), round(tenths[-1])


def relive(boot: TapeBoot) -> Relived:
    """Empty if this version's core can't have been given that."""
    watching = Watching()
    try:
        for record, effects in replay_boot(boot):
            watching.look(record.event, effects, record.at)
    except TapeError:
        return Relived()
    return watching.seen


class Watching:
    """A syncer's core, event by event: of a tape, or in a simulation."""

    def __init__(self) -> None:
        self.seen = Relived()
        self._since: dict[object, int] = {}
        """When what is answered later was asked for."""

    def look(self, event: Event, effects: Iterable[Effect], at: int) -> None:
        self._happened(event, at)
        self._asked(effects, at)

    def _asked(self, effects: Iterable[Effect], at: int) -> None:
        for effect in effects:
            match effect:
                case Send(to=peer, message=RoundOpen() as opened):
                    self._since["open", peer, opened.fragment] = at
                    self._since.setdefault(("closing", opened.fragment), at)
                case Send(message=Durable(seq=seq)):
                    self._end("spreading", seq, at)
                case CheckContribution():
                    self._since["checking", effect.id] = at
                case Merge():
                    self._end("closing", effect.fragment, at)
                    self._since["merging", effect.fragment] = at
                case Seal():
                    self._since["sealing", effect.entry.header.seq] = at
                    if isinstance(effect.entry, Commit):
                        self.seen.commits.append((at, effect.entry))
                case _:
                    pass

    def _happened(self, event: Event, at: int) -> None:
        match event:
            case Received(sender=peer, message=Sampled() as sampled):
                asked_at = self._since.pop(("open", peer, sampled.fragment), None)
                if asked_at is not None:
                    self.seen.waits.append((at, (peer, at - asked_at)))
                    self.seen.phases["sampling"].append((at, at - asked_at))
                    self._since["encoding", (peer, sampled.round)] = at
            case Received(sender=peer, message=Ack(sent_at=sent_at)) if sent_at <= at:
                self.seen.waits.append((at, (peer, at - sent_at)))
            case Received(sender=peer, message=Contribution() as given):
                self._end("encoding", (peer, given.round), at)
                self._since.setdefault(("uploading", given.blob), at)
            case BlobArrived(blob=blob):
                self._end("uploading", blob, at)
            case ContributionChecked():
                self._end("checking", event.id, at)
            case Merged():
                self._end("merging", event.fragment, at)
            case Sealed():
                self._end("sealing", event.seq, at)
                self._since["spreading", event.seq] = at
            case _:
                pass

    def _end(self, phase: Phase, what: object, at: int) -> None:
        asked_at = self._since.pop((phase, what), None)
        if asked_at is not None:
            self.seen.phases[phase].append((at, at - asked_at))
