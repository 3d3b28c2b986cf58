"""The arithmetic of the averaging race: from what both sides noted down to times that can stand side by side.

A *round* is, on either side, all parameters averaged once over all peers and held by all. Theirs is one all-reduce;
ours is a sweep, the same version of every fragment, since fragments are merged one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Merge:
    """One commit of ours."""

    fragment: int
    version: int
    fresh: frozenset[str]
    """Digests of the contributions that were sampled from the version before."""


@dataclass(frozen=True, kw_only=True)
class Hand:
    """One learner's own notes, in milliseconds of the machine's clock."""

    sampled_ms: Mapping[str, int]
    """By the digest of the contribution that came of it."""
    adopted_ms: Mapping[tuple[int, int], int]
    """By (fragment, version)."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One version of all fragments."""

    version: int
    began_ms: int
    """When the first learner sampled the first of its fragments."""
    ended_ms: int
    """When the last learner had adopted the last of them."""
    fragment_s: float
    """The same for a single fragment, the median of them."""

    @property
    def took_s(self) -> float:
        return (self.ended_ms - self.began_ms) / 1000


def sweeps_of(merges: Iterable[Merge], hands: Sequence[Hand], *, num_fragments: int) -> list[Sweep]:
    """Those that all learners were in, with fresh work, in every fragment, and that all have adopted."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for merge in merges:
        span = _span(merge, hands)
        if span is not None:
            spans.setdefault(merge.version, []).append(span)
    return [
        Sweep(
            version=version,
            began_ms=min(begin for begin, _ in each),
            ended_ms=max(end for _, end in each),
            fragment_s=statistics.median((end - begin) / 1000 for begin, end in each),
        )
        for version, each in sorted(spans.items())
        if len(each) == num_fragments
    ]


def _span(merge: Merge, hands: Sequence[Hand]) -> tuple[int, int] | None:
    """From the first sample to the last adoption; None if somebody was not in it."""
    sampled: list[int] = []
    adopted: list[int] = []
    for hand in hands:
        own = [hand.sampled_ms[digest] for digest in merge.fresh if digest in hand.sampled_ms]
        took = hand.adopted_ms.get((merge.fragment, merge.version))
        if not own or took is None:
            return None
        sampled += own
        adopted.append(took)
    return (min(sampled), max(adopted)) if hands else None


def within(sweeps: Iterable[Sweep], from_ms: int, until_ms: int) -> list[Sweep]:
    """Those that lie in between with all they are."""
    return [each for each in sweeps if from_ms <= each.began_ms and each.ended_ms <= until_ms]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used meanwhile."""

    seconds: float
    bytes_out: tuple[int, ...]
    """By host."""
    bytes_in: tuple[int, ...]
    bytes_per_s: tuple[float, ...]
    """That each host's link carries, each way."""
    cpu_s: float
    """Processor time of a side's processes."""
    wires_cpu_s: float
    """Of what makes the links."""
    wires_late_s: float
    """By how much a packet came late at most, because that had to wait for a processor."""
    machine_share: float
    """Of all processors' time, whoever used it."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One side's rounds of one turn."""

    side: str
    seconds: tuple[float, ...]
    """Of each round."""
    usage: Usage
    rounds: float
    """So many, and parts of rounds, lie within what was used."""
    formed_s: tuple[float, ...] = ()
    """What it took to find each other, beside that."""
    fragment_s: tuple[float, ...] = ()
    """Ours: of a single fragment, the median of each round."""


def row_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """One line of the table: all turns of one side together. Bytes and processor time are those of one round."""
    seconds = [each for turn in turns for each in turn.seconds]
    formed = [each for turn in turns for each in turn.formed_s]
    fragments = [each for turn in turns for each in turn.fragment_s]
    rounds = sum(turn.rounds for turn in turns)
    used = [turn.usage for turn in turns]
    return {
        "side": turns[0].side,
        "rounds": len(seconds),
        "seconds_median": _median(seconds),
        "seconds_min": min(seconds, default=0.0),
        "seconds_max": max(seconds, default=0.0),
        "seconds_all": [round(each, 2) for each in seconds],
        "formed_s_median": _median(formed),
        "fragment_s_median": _median(fragments),
        "mb_busiest_link": sum(max(*each.bytes_out, *each.bytes_in) for each in used) / rounds / 1e6,
        "link_alone_s": sum(_link_s(each) for each in used) / rounds,
        "cpu_s": sum(each.cpu_s for each in used) / rounds,
        "wires_cpu_s": sum(each.wires_cpu_s for each in used) / rounds,
        "wires_late_ms_max": max(each.wires_late_s for each in used) * 1000,
        "machine_share": _median([each.machine_share for each in used]),
    }


def _link_s(used: Usage) -> float:
    """For which the links had to be full at least, by the one that had most to do for its rate."""
    loads = zip(used.bytes_out, used.bytes_in, used.bytes_per_s, strict=True)
    return max(max(out, into) / rate for out, into, rate in loads)


def ratio_of(rows: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> float:
    """Of the medians: below 1 we are faster."""
    found = {row["side"]: float(row["seconds_median"]) for row in rows}
    return found[ours] / found[theirs]


def _median(values: Sequence[float]) -> float:
    """0 for none."""
    return statistics.median(values) if values else 0.0
