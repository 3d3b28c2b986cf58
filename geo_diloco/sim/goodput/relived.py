"""What a syncer's tape does not say and its core does: which rounds it opened, whom it merged, how long its shell took.

A tape holds events; what they asked for is a hash. Fed to a fresh core they ask for it again, so the rounds are those
of the run, exactly. A tape of another version may be one that no core of this version was ever given: then nothing more
is known than the events say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import quantiles
from typing import TypeVar

from geo_diloco.errors import TapeError
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.effects import CheckContribution, Effect, Merge, Seal, Send
from geo_diloco.protocol.election.ballots import Ack
from geo_diloco.protocol.events import ContributionChecked, Event, Merged, Received, Sealed
from geo_diloco.protocol.messages import Commit, Contribution, RoundOpen, Sampled
from geo_diloco.sim.goodput.fleet import SHELL
from geo_diloco.sim.plans import ShellTimes
from geo_diloco.tape import TapeBoot, replay_boot

T = TypeVar("T")
Dated = list[tuple[int, T]]
"""Each with its time, in milliseconds."""
FEW = 5
"""So little was seen that it says nothing."""


@dataclass
class Relived:
    """Times in milliseconds."""

    commits: Dated[Commit] = field(default_factory=list)
    waits: Dated[tuple[PeerId, int]] = field(default_factory=list)
    """From a word to a learner to its answer: that it sampled, for which it also waits for the end of its inner step,
    or, if it is an elector, that it heard the heartbeat, for which it may have to fetch something."""
    encoding: Dated[int] = field(default_factory=list)
    checking: Dated[int] = field(default_factory=list)
    merging: Dated[int] = field(default_factory=list)
    sealing: Dated[int] = field(default_factory=list)

    def between(self, begin: float, end: float) -> Relived:
        """Both included."""

        def inside(dated: Dated[T]) -> Dated[T]:
            return [each for each in dated if begin <= each[0] <= end]

        return Relived(
            commits=inside(self.commits),
            waits=inside(self.waits),
            encoding=inside(self.encoding),
            checking=inside(self.checking),
            merging=inside(self.merging),
            sealing=inside(self.sealing),
        )

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
            disk=_most(self.sealing, SHELL.disk),
            fold=_most(self.encoding, SHELL.fold),
            check=_most(self.checking, SHELL.check),
            merge=_most(self.merging, SHELL.merge),
        )


def _most(dated: Dated[int], usual: tuple[int, int]) -> tuple[int, int]:
    if len(dated) < FEW:
        return usual
    tenths = quantiles([each for _, each in dated], n=10, method="inclusive")
    return round(tenths[0]), round(tenths[-1])


def relive(boot: TapeBoot) -> Relived:
    """Empty if this version's core can't have been given that."""
    watching = _Watching()
    try:
        for record, effects in replay_boot(boot):
            watching.happened(record.event, record.at)
            watching.asked(effects, record.at)
    except TapeError:
        return Relived()
    return watching.seen


class _Watching:
    def __init__(self) -> None:
        self.seen = Relived()
        self._since: dict[object, int] = {}
        """When what is answered later was asked for."""

    def asked(self, effects: Iterable[Effect], at: int) -> None:
        for effect in effects:
            match effect:
                case Send(to=peer, message=RoundOpen() as opened):
                    self._since["open", peer, opened.fragment] = at
                case CheckContribution():
                    self._since["check", effect.id] = at
                case Merge():
                    self._since["merge", effect.fragment] = at
                case Seal():
                    self._since["seal", effect.entry.header.seq] = at
                    if isinstance(effect.entry, Commit):
                        self.seen.commits.append((at, effect.entry))
                case _:
                    pass

    def happened(self, event: Event, at: int) -> None:
        match event:
            case Received(sender=peer, message=Sampled() as sampled):
                asked_at = self._since.pop(("open", peer, sampled.fragment), None)
                if asked_at is not None:
                    self.seen.waits.append((at, (peer, at - asked_at)))
                    self._since["encode", peer, sampled.round] = at
            case Received(sender=peer, message=Ack(sent_at=sent_at)) if sent_at <= at:
                self.seen.waits.append((at, (peer, at - sent_at)))
            case Received(sender=peer, message=Contribution() as given):
                self._note(self.seen.encoding, ("encode", peer, given.round), at)
            case ContributionChecked():
                self._note(self.seen.checking, ("check", event.id), at)
            case Merged():
                self._note(self.seen.merging, ("merge", event.fragment), at)
            case Sealed():
                self._note(self.seen.sealing, ("seal", event.seq), at)
            case _:
                pass

    def _note(self, dated: Dated[int], what: object, at: int) -> None:
        asked_at = self._since.pop(what, None)
        if asked_at is not None:
            dated.append((at, at - asked_at))
