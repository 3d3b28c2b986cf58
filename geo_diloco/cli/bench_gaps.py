"""What a failover benchmark found, read from what its processes left on disk: chains, tapes, last words, step records.

All clocks are one, because all processes ran on one machine. A commit counts from the moment at which a learner hears
that it is durable (a majority of the electors has it on disk): before that it may still be lost, and nobody adopts it.
When it was sealed is told beside it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_steps import StepCall, read_steps
from geo_diloco.errors import GeoDilocoError
from geo_diloco.protocol.events import Applied, Received, Sealed
from geo_diloco.protocol.messages import Commit, Durable, Entry, Found
from geo_diloco.tape import read_tape, summarize_tokens


@dataclass(frozen=True, kw_only=True)
class Change:
    """Whoever served was killed, or told to hand over."""

    who: str
    term: int
    at_ms: int
    seen_s: float = 0.0
    """After how long its status page showed that another commits."""


@dataclass(frozen=True, kw_only=True)
class CommitTimes:
    """Of one commit of the chain that counts."""

    term: int
    seq: int
    sealed_ms: int
    durable_ms: int


@dataclass(frozen=True, kw_only=True)
class Gap:
    """From a change of syncer to the first commit of the next one."""

    sealed_s: float
    durable_s: float
    from_ms: int
    until_ms: int


def failover_figures(
    folder: Path,
    *,
    reachable: Sequence[str],
    learners: Sequence[str],
    kills: Sequence[Change],
    handovers: Sequence[Change],
) -> dict[str, Any]:
    """The keys of `bench failover --json`. Raises RunDirError or TapeError if what was left can't be read."""
    from geo_diloco.runtime.chain import read_entries

    chains = [read_entries(folder / name / "chain.jsonl") for name in reachable]
    entries = max(chains, key=len)
    commits = [entry for entry in entries if isinstance(entry, Commit)]
    found = entries[0]
    assert isinstance(found, Found)
    seen = read_seen(folder, reachable=reachable, learners=learners)
    times = commit_times(commits, sealed=seen.sealed, durable=seen.durable)
    after_kills = [gap_after(kill, times, since_ms=kill.at_ms) for kill in kills]
    after_handovers = [gap_after(each, times, since_ms=None) for each in handovers]
    steps = [call for name in learners for call in read_steps(folder / f"{name}.steps")]
    tokens = summarize_tokens([folder / name / "tape.jsonl" for name in learners], entries, found.num_elements)
    return {
        **_gap_figures("kill_to_commit", after_kills),
        **_gap_figures("handover_gap", after_handovers),
        "ordinary_gap_s_p95": _ordinary_gap_s(times),
        **step_figures("failover_step", [call for call in steps if _is_during(call, after_kills)]),
        **step_figures("step", steps),
        "commits": len(commits),
        "terms": len({commit.header.term for commit in commits}),
        "durable_commits_seen": len(seen.applied),
        "durable_commits_lost": len(seen.applied - {facts_of(commit) for commit in commits}),
        "one_chain": all(is_one_chain(chain, entries) for chain in chains),
        "digests_equal": digests_equal(commits, found, [last_word(folder / name) for name in (*reachable, *learners)]),
        "tokens_trained": tokens.trained,
        "tokens_merged": tokens.merged,
        "tokens_balance": tokens.balances,
        "rows": [asdict(each) | asdict(gap) for each, gap in zip(kills, after_kills, strict=True)],
        "handover_rows": [asdict(each) | asdict(gap) for each, gap in zip(handovers, after_handovers, strict=True)],
    }


# ---- what the tapes say

CommitFacts = tuple[int, int, str]
"""(fragment, version, state digest)."""


@dataclass
class Seen:
    """All tapes together."""

    sealed: dict[tuple[int, int], int]
    """(term, seq) -> when its syncer had sealed it, ms."""
    durable: list[tuple[int, int]]
    """(ms, seq): a learner heard that the chain is durable up to there."""
    applied: set[CommitFacts]
    """Commits that somebody folded into its Theta, so took for durable."""


def read_seen(folder: Path, *, reachable: Sequence[str], learners: Sequence[str]) -> Seen:
    """Of the peers whose folders have these names. Raises TapeError."""
    seen = Seen({}, [], set())
    for name in (*reachable, *learners):
        for boot in read_tape(folder / name / "tape.jsonl"):
            for record in boot.events:
                event = record.event
                if isinstance(event, Sealed):
                    seen.sealed[event.term, event.seq] = record.at
                elif isinstance(event, Applied):
                    seen.applied.add((event.fragment, event.version, event.state_digest))
                elif isinstance(event, Received) and isinstance(event.message, Durable) and name in learners:
                    seen.durable.append((record.at, event.message.seq))
    seen.durable.sort()
    return seen


def commit_times(
    commits: Iterable[Commit], *, sealed: dict[tuple[int, int], int], durable: Sequence[tuple[int, int]]
) -> list[CommitTimes]:
    """Of those whose sealing is on a tape and of which a learner has heard; in the chain's order.

    `durable`: (ms, seq), earliest first.
    """
    firsts: list[tuple[int, int]] = []
    for at, seq in durable:
        if not firsts or seq > firsts[-1][1]:
            firsts.append((at, seq))
    times: list[CommitTimes] = []
    waiting = iter(firsts)
    heard = next(waiting, None)
    for commit in commits:
        header = commit.header
        while heard is not None and heard[1] < header.seq:
            heard = next(waiting, None)
        if heard is None:
            break
        if (header.term, header.seq) in sealed:
            sealed_ms = sealed[header.term, header.seq]
            times.append(CommitTimes(term=header.term, seq=header.seq, sealed_ms=sealed_ms, durable_ms=heard[0]))
    return times


def gap_after(change: Change, times: Sequence[CommitTimes], *, since_ms: int | None) -> Gap:
    """Until the first commit of a later term than that of `change`: from `since_ms` on, or, if that is none, from the
    last commit before it. Raises GeoDilocoError if there is none."""
    first = next((at for at in times if at.term > change.term), None)
    last = next((at for at in reversed(times) if at.term <= change.term), None)
    if first is None or (since_ms is None and last is None):
        raise GeoDilocoError(f"no commit in a term after {change.term}, whose syncer {change.who} went")
    sealed_from = durable_from = since_ms or 0
    if since_ms is None and last is not None:
        sealed_from, durable_from = last.sealed_ms, last.durable_ms
    return Gap(
        sealed_s=(first.sealed_ms - sealed_from) / 1000,
        durable_s=(first.durable_ms - durable_from) / 1000,
        from_ms=durable_from,
        until_ms=first.durable_ms,
    )


def is_one_chain(shorter: Sequence[Entry], longer: Sequence[Entry]) -> bool:
    return list(shorter) == list(longer[: len(shorter)])


def facts_of(commit: Commit) -> CommitFacts:
    return commit.fragment, commit.version, commit.state_digest


def digests_equal(commits: Sequence[Commit], found: Found, words: Sequence[dict[str, Any]]) -> bool:
    """Whether each peer's last word names the chain's digest of the version that it holds, for every fragment."""
    known = {facts_of(commit) for commit in commits}
    known |= {(p, 0, digest) for p, digest in enumerate(found.state_digests)}
    return all(
        len(word.get("versions", ())) == len(found.state_digests)
        and {(p, *each) for p, each in enumerate(zip(word["versions"], word["state_digests"], strict=True))} <= known
        for word in words
    )


def last_word(run_dir: Path) -> dict[str, Any]:
    """A peer's summary.json; empty if it left none."""
    try:
        word = json.loads((run_dir / "summary.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return word if isinstance(word, dict) else {}


# ---- figures

_SHARES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share is not above (nearest rank); 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def step_figures(name: str, calls: Sequence[StepCall]) -> dict[str, Any]:
    """Durations of `Learner.step` in ms, what of them its thread computed, and how many calls entered what can wait,
    with the names of that."""
    took_ms, cpu_ms = [call.took_us / 1000 for call in calls], [call.cpu_us / 1000 for call in calls]
    return {
        f"{name}_calls": len(calls),
        **{f"{name}_ms_{key}": percentile(took_ms, share) for key, share in _SHARES.items()},
        f"{name}_ms_max": max(took_ms, default=0.0),
        f"{name}_cpu_ms_p999": percentile(cpu_ms, _SHARES["p999"]),
        f"{name}_cpu_ms_max": max(cpu_ms, default=0.0),
        f"{name}_calls_that_waited": sum(bool(call.waits) for call in calls),
        f"{name}_waited_for": sorted({name for call in calls for name in call.waits}),
    }


def _gap_figures(name: str, gaps: Sequence[Gap]) -> dict[str, Any]:
    figures: dict[str, Any] = {f"{name}_count": len(gaps)}
    for kind, values in (("", [gap.durable_s for gap in gaps]), ("_sealed", [gap.sealed_s for gap in gaps])):
        figures[f"{name}{kind}_s_median"] = statistics.median(values) if values else 0.0
        figures[f"{name}{kind}_s_p95"] = percentile(values, 0.95)
        figures[f"{name}{kind}_s_max"] = max(values, default=0.0)
    return figures


def _ordinary_gap_s(times: Sequence[CommitTimes]) -> float:
    """95th percentile of the time between two commits of one term."""
    return percentile([(b.durable_ms - a.durable_ms) / 1000 for a, b in pairwise(times) if a.term == b.term], 0.95)


def _is_during(call: StepCall, gaps: Sequence[Gap]) -> bool:
    return any(gap.from_ms <= call.began_ms <= gap.until_ms for gap in gaps)
