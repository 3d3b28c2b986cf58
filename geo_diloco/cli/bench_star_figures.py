"""What `bench star` makes of the chain, the tapes and its own readings of one stretch of a run. Arithmetic only.

All clocks are one, because all processes ran on one machine. A merge is where the syncer sealed its commit.
"""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from geo_diloco.cli.star_links import Passed
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.messages import Commit

MACHINE_FULL = 0.9
"""Share of the processors' time from which on the machine is what limits a run."""
OTHERS_TOLD = 0.1
LINKS_FULL = 0.8
"""Share of what the links could carry, one way."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a learner is, all since its start."""

    at_ms: int
    """By the clock that tapes go by."""
    steps: int
    inside_s: float
    """Spent inside `Learner.step`, but for what stands for compute."""
    cpu_s: float
    """Of its thread's processor inside: less where it had to wait for one."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One commit."""

    at_ms: int
    fragment: int
    open_ms: int
    """From opening to closing."""
    fresh: frozenset[PeerId]
    late: frozenset[PeerId]
    left_out: Mapping[PeerId, str]
    reason: str
    """Why it closed."""
    contributions: tuple[tuple[str, int], ...]
    """(digest, size)."""
    update_size: int

    @property
    def participants(self) -> frozenset[PeerId]:
        return self.fresh | self.late


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Of everything that is measured from outside, at one moment."""

    at_ms: int
    passed: Passed
    cpu_s: Mapping[str, float]
    """By process; `relays` is what makes the links."""
    late_s: float
    """By how much links were late at most since the reading before: their relay had to wait for a processor."""
    machine_busy_s: float
    """Of all its processors together, whoever used them."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a learner handed in."""

    at_ms: int
    """When it was encoded."""
    fragment: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class LearnerSeen:
    """One learner."""

    name: str
    peer: PeerId
    bytes_per_s: float
    """Of its link, up; down, too, unless that is told."""
    moments: Sequence[Moment]
    samples: Sequence[Sample]
    turn: int = 1
    codec: str = ""
    down_bytes_per_s: float = 0.0
    uplink: str = ""
    """Its own words."""

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes per second, up and down."""
        return self.bytes_per_s, self.down_bytes_per_s or self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that is known of a run."""

    learners: Sequence[LearnerSeen]
    rounds: Sequence[Round]
    """In the chain's order, from the first on."""
    num_elements: Sequence[int]
    first: Reading
    last: Reading
    """What lies between these two is what figures are of."""
    num_processors: int
    mirrors: Collection[str] = field(default=())

    @property
    def seconds(self) -> float:
        return (self.last.at_ms - self.first.at_ms) / 1000


def read_moments(record: Path) -> list[Moment]:
    """What `train_paced` wrote so far. A last line without an end is left out."""
    if not record.exists():
        return []
    whole = record.read_text("utf-8").splitlines(keepends=True)
    return [Moment(*json.loads(line)) for line in whole if line.endswith("\n")]


def rounds_of(commits: Iterable[Commit], sealed_ms: Mapping[tuple[int, int], int]) -> list[Round]:
    """Of those whose sealing is on the syncer's tape, by (term, seq)."""
    return [
        Round(
            at_ms=sealed_ms[commit.header.term, commit.header.seq],
            fragment=commit.fragment,
            open_ms=commit.quorum_wait_ms + commit.grace_ms,
            fresh=frozenset(p.peer for p in commit.participants if p.base_version == commit.version - 1),
            late=frozenset(p.peer for p in commit.participants if p.base_version != commit.version - 1),
            left_out={each.peer: each.reason for each in commit.left_out},
            reason=commit.close_reason,
            contributions=tuple((p.contribution.digest, p.contribution.size) for p in commit.participants),
            update_size=commit.update.size,
        )
        for commit in commits
        if (commit.header.term, commit.header.seq) in sealed_ms
    ]


def star_figures(seen: Seen) -> dict[str, Any]:
    """The keys of `bench star --json`, but for those that compare two runs."""
    inside = [each for each in seen.rounds if seen.first.at_ms < each.at_ms <= seen.last.at_ms]
    merged = {digest for each in seen.rounds for digest, _ in each.contributions}
    rows = [_row(learner, seen, inside, merged) for learner in seen.learners]
    thin = min(learner.bytes_per_s for learner in seen.learners)
    return {
        "seconds": seen.seconds,
        "rounds": len(inside),
        "fresh_mean": _mean([len(each.fresh) for each in inside]),
        "fresh_mean_share": _mean([len(each.fresh) for each in inside]) / len(seen.learners),
        "participants_mean": _mean([len(each.participants) for each in inside]),
        "share_of_rounds_min": min(row["share_of_rounds"] for row in rows),
        "admitted_share_min": min(row["admitted_share"] for row in rows),
        "utilisation_min": min(row["utilisation"] for row in rows),
        "utilisation_alone_min": min(row["utilisation_alone"] for row in rows),
        **_pace_of_merges(seen, max(learner.bytes_per_s for learner in seen.learners)),
        "round_open_s": _mean([each.open_ms for each in inside]) / 1000,
        **_bytes(seen, inside),
        **_limits(seen),
        "thinnest_link_mbit": thin * 8 / 1e6,
        "close_reasons": dict(Counter(_without_numbers(each.reason) for each in inside).most_common()),
        "rows": rows,
    }


def _row(learner: LearnerSeen, seen: Seen, rounds: Sequence[Round], merged: Collection[str]) -> dict[str, Any]:
    took_part = sum(learner.peer in each.participants for each in rounds)
    fresh = sum(learner.peer in each.fresh for each in rounds)
    decided, admitted, undecided = admissions(learner.samples, merged, seen.first.at_ms, seen.last.at_ms)
    steps, inside_s, cpu_s = progress_between(learner.moments, seen.first.at_ms, seen.last.at_ms)
    up, down = (_moved(seen, learner.name, way) for way in (0, 1))
    return {
        "learner": learner.name,
        "link_mbit": learner.bytes_per_s * 8 / 1e6,
        "share_of_rounds": took_part / max(1, len(rounds)),
        "fresh_share": fresh / max(1, len(rounds)),
        "handed_in": decided + undecided,
        "admitted_share": admitted / decided if decided else 0.0,
        "utilisation": 1.0 - inside_s / seen.seconds,
        "utilisation_alone": 1.0 - cpu_s / seen.seconds,
        "codec": learner.codec,
        "turn": learner.turn,
        "step_ms": 1000 * seen.seconds / steps if steps else 0.0,
        "up_share": up / (learner.rates[0] * seen.seconds),
        "down_share": down / (learner.rates[1] * seen.seconds),
        "cores": (seen.last.cpu_s[learner.name] - seen.first.cpu_s[learner.name]) / seen.seconds,
        "left_out": dict(Counter(each.left_out.get(learner.peer, "") for each in rounds) - Counter({"": len(rounds)})),
        "uplink": learner.uplink,
    }


def admissions(samples: Sequence[Sample], merged: Collection[str], from_ms: int, until_ms: int) -> tuple[int, int, int]:
    """Of what was handed in meanwhile: how many are decided, how many of these were merged (be that later), and how
    many are not decided. Of a fragment only the newest can be undecided: the next is sampled after the decision."""
    newest = {each.fragment: each.digest for each in samples}
    decided = admitted = undecided = 0
    for each in samples:
        if not from_ms < each.at_ms <= until_ms:
            continue
        if each.digest in merged:
            decided, admitted = decided + 1, admitted + 1
        elif newest[each.fragment] == each.digest:
            undecided += 1
        else:
            decided += 1
    return decided, admitted, undecided


def progress_between(moments: Sequence[Moment], from_ms: int, until_ms: int) -> tuple[float, float, float]:
    """Inner steps done, seconds spent inside `Learner.step`, and those of its thread's processor."""
    before, after = _at(moments, from_ms), _at(moments, until_ms)
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _at(moments: Sequence[Moment], at_ms: int) -> tuple[float, float, float]:
    """(steps, seconds inside, processor seconds inside), between two records as if all grew evenly."""
    after = bisect_left(moments, at_ms, key=lambda each: each.at_ms)
    one, other = max(0, after - 1), min(after, len(moments) - 1)
    if not moments:
        return 0.0, 0.0, 0.0
    if after in (0, len(moments)):
        one = other
    begin, end = moments[one], moments[other]
    share = (at_ms - begin.at_ms) / (end.at_ms - begin.at_ms) if one != other else 0.0
    return (
        begin.steps + share * (end.steps - begin.steps),
        begin.inside_s + share * (end.inside_s - begin.inside_s),
        begin.cpu_s + share * (end.cpu_s - begin.cpu_s),
    )


def merge_gaps(
    rounds: Sequence[Round], num_fragments: int, from_ms: int, until_ms: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(from, until) between two merges of one fragment, the second within the time; and those that were still open when
    it ended, which last longer than they look."""
    closed: list[tuple[int, int]] = []
    still_open: list[tuple[int, int]] = []
    for fragment in range(num_fragments):
        times = [each.at_ms for each in rounds if each.fragment == fragment and each.at_ms <= until_ms]
        closed += [(a, b) for a, b in pairwise(times) if b > from_ms]
        still_open.append((times[-1] if times else from_ms, until_ms))
    return closed, still_open


def _pace_of_merges(seen: Seen, bytes_per_s: float) -> dict[str, Any]:
    """How often fragments are merged, in inner steps of the fastest learner and as often as the link's rate would let
    a learner hand in all of them once (a sweep)."""
    num_fragments = len(seen.num_elements)
    closed, still_open = merge_gaps(seen.rounds, num_fragments, seen.first.at_ms, seen.last.at_ms)
    steps = [_steps_max(seen.learners, gap) for gap in closed]
    sweep_s = sweep_bytes(seen.rounds, num_fragments) / bytes_per_s
    round_s = _mean([(b - a) / 1000 for a, b in closed])
    longest_s = max(((b - a) / 1000 for a, b in (*closed, *still_open)), default=0.0)
    return {
        "steps_between_merges_median": statistics.median(steps) if steps else 0.0,
        "steps_between_merges_max": max([*steps, *(_steps_max(seen.learners, gap) for gap in still_open)]),
        "round_s": round_s,
        "sweep_s": sweep_s,
        "sweep_ratio": round_s / sweep_s if sweep_s else 0.0,
        "sweep_ratio_max": longest_s / sweep_s if sweep_s else 0.0,
    }


def _steps_max(learners: Sequence[LearnerSeen], gap: tuple[int, int]) -> float:
    return max(progress_between(learner.moments, *gap)[0] for learner in learners)


def sweep_bytes(rounds: Sequence[Round], num_fragments: int) -> float:
    """Of one contribution for each fragment, as large as they were on average."""
    sizes: dict[int, list[int]] = {fragment: [] for fragment in range(num_fragments)}
    for each in rounds:
        sizes[each.fragment] += [size for _, size in each.contributions]
    return sum(_mean(each) for each in sizes.values())


def _bytes(seen: Seen, rounds: Sequence[Round]) -> dict[str, Any]:
    """What the syncer takes in and gives out, and what mirrors give out for it. Copies: times all updates."""
    learners = len(seen.learners)
    updates = sum(each.update_size for each in rounds)
    elements = sum(seen.num_elements[each.fragment] for each in rounds)
    given = sum(seen.num_elements[each.fragment] * len(each.contributions) for each in rounds)
    out = _through(seen, ["syncer"], 1)
    return {
        "syncer_in_bytes_per_learner": _through(seen, ["syncer"], 0) / learners,
        "syncer_out_bytes_per_learner": out / learners,
        "syncer_out_copies": out / updates if updates else 0.0,
        "mirrors_out_copies": _through(seen, seen.mirrors, 1) / updates if updates else 0.0,
        "bytes_per_param_up": sum(size for each in rounds for _, size in each.contributions) / max(1, given),
        "bytes_per_param_down": updates / max(1, elements),
    }


def _through(seen: Seen, dialed: Collection[str], way: int) -> int:
    return sum(
        both[way] - seen.first.passed.get(names, (0, 0))[way]
        for names, both in seen.last.passed.items()
        if names[1] in dialed
    )


def _moved(seen: Seen, dialer: str, way: int) -> int:
    return sum(
        both[way] - seen.first.passed.get(names, (0, 0))[way]
        for names, both in seen.last.passed.items()
        if names[0] == dialer
    )


def _limits(seen: Seen) -> dict[str, Any]:
    """What the run had to do with: processors and links."""
    cores = {name: (cpu_s - seen.first.cpu_s.get(name, 0.0)) / seen.seconds for name, cpu_s in seen.last.cpu_s.items()}
    busy = (seen.last.machine_busy_s - seen.first.machine_busy_s) / seen.seconds
    learners = {learner.name for learner in seen.learners}
    use = [
        [_moved(seen, learner.name, way) / (learner.rates[way] * seen.seconds) for learner in seen.learners]
        for way in (0, 1)
    ]
    machine_share, link_share = busy / seen.num_processors, max(_mean(each) for each in use)
    others = max(0.0, busy - sum(cores.values()))
    return {
        "cores_syncer": cores["syncer"],
        "cores_learners": sum(value for name, value in cores.items() if name in learners),
        "cores_mirrors": sum(value for name, value in cores.items() if name in seen.mirrors),
        "cores_relays": cores["relays"],
        "cores_others": others,
        "relays_late_ms_max": 1000 * seen.last.late_s,
        "machine_share": machine_share,
        "link_share": link_share,
        "limited_by": limited_by(machine_share, link_share, others_share=others / seen.num_processors),
    }


def limited_by(machine_share: float, link_share: float, *, others_share: float) -> str:
    """What would have to be more for the run to do more. `others_share`: of the processors, used by other programs."""
    if machine_share >= MACHINE_FULL:
        others = f", of which other programs use {others_share:.0%}" if others_share >= OTHERS_TOLD else ""
        return f"the processors of this machine{others}"
    return "the links" if link_share >= LINKS_FULL else "the interval: neither links nor processors are full"


def _without_numbers(text: str) -> str:
    """So that reasons that differ by a number are one."""
    return " ".join("#" if any(c.isdigit() for c in word) else word for word in text.split())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
