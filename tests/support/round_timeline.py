"""`python -m tests.support.round_timeline FOLDER`: where the time of a round goes at a syncer, by the tapes of a run.

FOLDER holds a folder `syncer` and one for each learner, as the averaging race (`--keep`) and `bench star` leave them.
All ran on one machine, so their times are of one clock. What the syncer asked for is not on its tape: it is asked for
again, by feeding the tape to a fresh core.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geo_diloco.protocol.effects import Announce, CheckContribution, Merge, Seal
from geo_diloco.protocol.events import Adopted, Applied, BlobArrived, ContributionChecked, Merged, Sealed
from geo_diloco.protocol.messages import Commit
from geo_diloco.tape import TapeBoot, TapeEvent, read_tape, replay_boot

SYNCER = "syncer"
STAGES = (
    "arrived",
    "checked",
    "closed",
    "merged",
    "sealed",
    "announced",
    "applied",
    "adopted",
)
"""Of a round, each for the last of those who take part in it."""


@dataclass
class Round:
    """Times in milliseconds of the machine's clock."""

    at: dict[str, int]
    check_ms: list[int]
    """From when each contribution was there whole until it was known to be good."""

    def between(self) -> Iterator[tuple[str, int]]:
        """How long each stage took, by its name."""
        for before, after in itertools.pairwise(STAGES):
            if before in self.at and after in self.at:
                yield f"{before} to {after}", self.at[after] - self.at[before]
        if {"arrived", "announced"} <= self.at.keys():
            yield "arrived to announced", self.at["announced"] - self.at["arrived"]


def rounds_of(folder: Path) -> list[Round]:
    """All commits of that run, in their order. Raises TapeError."""
    rounds: dict[tuple[int, int], Round] = {}
    for part in read_tape(folder / SYNCER / "tape.jsonl"):
        rounds |= _rounds_of_boot(part)
    for learner in sorted(each for each in folder.iterdir() if (each / "tape.jsonl").exists() and each.name != SYNCER):
        for record in (record for part in read_tape(learner / "tape.jsonl") for record in part.events):
            _adopted(rounds, record)
    return list(rounds.values())


def _rounds_of_boot(part: TapeBoot) -> dict[tuple[int, int], Round]:
    watch = _Watch()
    for record, effects in replay_boot(part):
        watch.happened(record)
        for effect in effects:
            watch.asked(effect, record.at)
    return watch.rounds


class _Watch:
    """Follows a syncer's tape."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[int, int], Round] = {}
        self._arrived: dict[str, int] = {}
        self._blobs: dict[object, str] = {}
        self._checked: dict[str, int] = {}
        self._open: dict[tuple[int, int, int], Round] = {}
        self._seals: dict[int, Round] = {}

    def happened(self, record: TapeEvent) -> None:
        event, at = record.event, record.at
        match event:
            case BlobArrived():
                self._arrived.setdefault(event.blob.digest, at)
            case ContributionChecked() if event.id in self._blobs:
                self._checked[self._blobs[event.id]] = at
            case Merged() if (event.fragment, event.round, event.attempt) in self._open:
                self._open[event.fragment, event.round, event.attempt].at["merged"] = at
            case Sealed() if event.seq in self._seals:
                self._seals[event.seq].at["sealed"] = at

    def asked(self, effect: object, at: int) -> None:
        match effect:
            case CheckContribution():
                self._blobs[effect.id] = effect.blob.digest
            case Merge():
                self._open[effect.fragment, effect.round, effect.attempt] = self._closed(effect, at)
            case Seal(entry=Commit() as commit):
                done = self._open.pop((commit.fragment, commit.round, commit.attempt))
                self.rounds[commit.fragment, commit.version] = self._seals[commit.header.seq] = done
            case Announce() if effect.seq in self._seals:
                self._seals[effect.seq].at["announced"] = at

    def _closed(self, order: Merge, at: int) -> Round:
        digests = [each.blob.digest for each in order.inputs if each.blob.digest in self._checked]
        arrived, checked = [self._arrived[each] for each in digests], [self._checked[each] for each in digests]
        times = {"closed": at}
        if digests:
            times |= {"arrived": max(arrived), "checked": max(checked)}
        return Round(times, [after - before for before, after in zip(arrived, checked, strict=True)])


def _adopted(rounds: Mapping[tuple[int, int], Round], record: TapeEvent) -> None:
    event = record.event
    if isinstance(event, Applied | Adopted) and (event.fragment, event.version) in rounds:
        stage = "applied" if isinstance(event, Applied) else "adopted"
        at = rounds[event.fragment, event.version].at
        at[stage] = max(at.get(stage, 0), record.at)


def table(rounds: Sequence[Round]) -> str:
    """Median, nine of ten and most of each stage, in milliseconds."""
    taken: dict[str, list[int]] = {"one check": [took for each in rounds for took in each.check_ms]}
    for each in rounds:
        for name, took in each.between():
            taken.setdefault(name, []).append(took)
    lines = [f"{len(rounds)} rounds; ms", f"{'':<24}{'median':>8}{'9 of 10':>9}{'most':>8}"]
    for name, times in taken.items():
        if times:
            ninth = sorted(times)[(9 * (len(times) - 1) + 9) // 10]
            lines.append(f"{name:<24}{statistics.median(times):>8.0f}{ninth:>9}{max(times):>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="round_timeline", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--skip", type=int, default=0, help="so many rounds at the beginning")
    options = parser.parse_args()
    print(table(rounds_of(options.folder)[options.skip :]))


if __name__ == "__main__":
    main()
