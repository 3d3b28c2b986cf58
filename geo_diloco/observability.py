"""What a peer shows of itself: an event log for people and programs, and the status that `status` and the demo read.

The shell logs, the core does not: it hands out `Note`s. One JSON object a line; a topic that says the same again is
logged when it changes, so a wait of an hour is one line. No tensors, keys or admission tokens end up here.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from geo_diloco.errors import GeoDilocoError
from geo_diloco.manifest import RunRules
from geo_diloco.protocol.amendments import AMENDABLE, SECTIONS, Amended, amended_at
from geo_diloco.protocol.election.ballots import Elector
from geo_diloco.protocol.election.status import ElectionStatus, SeatStatus
from geo_diloco.protocol.status import LearnerStatus, PeerStatus, RoundStatus
from geo_diloco.protocol.uplink import codec_text

Level = Literal["debug", "info", "warning", "error"]
_RANK: Mapping[str, int] = {"debug": 0, "info": 1, "warning": 2, "error": 3}
TOPICS_MAX = 1024
ROUNDS_SHOWN = 12


class EventLog:
    """JSON lines into a file, and for people to a stream. Safe from any thread: one line is one write.

    Nobody's run ends because nobody can read its log: a full disk costs lines, a reader that went away the stream.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        level: str = "info",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fd = -1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rank = _RANK.get(level, 1)
        self._stream = stream
        self._clock = clock
        self._last: dict[str, str] = {}

    def note(self, topic: str, text: str, *, level: Level = "info", **facts: object) -> None:
        """Log it unless this topic's last line said the same."""
        if self._last.get(topic) == text:
            return
        if len(self._last) >= TOPICS_MAX:
            self._last.clear()
        self._last[topic] = text
        if _RANK[level] < self._rank:
            return
        self._write({"at": round(self._clock(), 3), "level": level, "topic": topic, "text": text, **facts})

    def forget(self, topic: str) -> None:
        """What it said last is out of date: the same again is news."""
        self._last.pop(topic, None)

    def failure(self, topic: str, failure: BaseException) -> None:
        """An exception: ours on purpose by its code, any other with its traceback."""
        if isinstance(failure, GeoDilocoError):
            self.note(topic, f"{failure.code}: {failure}", level="error")
            return
        trace = "".join(traceback.format_exception(failure))
        self.note(topic, f"{type(failure).__name__}: {failure}", level="error", traceback=trace)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, record: dict[str, object]) -> None:
        with suppress(OSError):  # a full disk or a closed terminal must not end what it is told about
            if self._fd >= 0:
                os.write(self._fd, json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n")
        # ValueError: closed; RuntimeError: a signal came while this thread was writing to the very stream
        with suppress(OSError, ValueError, RuntimeError):
            if self._stream is not None:
                print(_printable(f"{record['topic']}: {record['text']}"), file=self._stream, flush=True)


def _printable(text: str) -> str:
    """What peers say of themselves, their hosts' names and reasons, must not steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def stderr_log(path: Path | None, *, level: str) -> EventLog:
    """The log of a process that a person started: into its file, and readable on stderr."""
    return EventLog(path, level=level, stream=sys.stderr)


@dataclass
class Counters:
    """Bytes this process moved, and what they carried. `*_params`: elements of fragments sent one way as a whole."""

    started_at: float = field(default_factory=time.monotonic)
    up_bytes: int = 0
    """Encoded contributions that arrived."""
    up_params: int = 0
    down_bytes: int = 0
    """Encoded updates that were made."""
    down_params: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self.started_at


def status_json(
    status: PeerStatus,
    counters: Counters,
    *,
    run: str,
    name: str,
    peer: str,
    heldout_at: Mapping[int, float],
    disk_bytes: int,
    lease_ms: int | None,
) -> dict[str, Any]:
    """The JSON of `GET /v1/status`. `heldout_at`: seconds since the run opened at which each record was sealed.
    `disk_bytes`: what this peer's folder takes. `lease_ms`: what is left of a syncer's lease."""
    return {
        "run": run,
        "name": name,
        "peer": peer,
        "role": status.role,
        "branch": status.branch,
        "lineage": status.lineage,
        "term": status.term,
        "seq": status.seq,
        "finished": status.finished is not None,
        "finish_reason": status.finished,
        "heldout": [[seq, loss, round(heldout_at.get(seq, 0.0), 3)] for seq, loss in status.heldout],
        "tokens_total": status.tokens_total,
        "served_by": None if status.election is None else _served_by(status.election),
        "commits": status.num_commits,
        "progress": status.progress,
        "rules": _rules_json(status.rules, status.amended),
        "amended": [{"number": each.number, "seq": each.seq, "order": each.order} for each in status.amended],
        "learners": [_learner_json(learner) for learner in status.learners],
        "rounds": [_round_json(each) for each in status.rounds[-ROUNDS_SHOWN:]],
        "waiting": [{"fragment": each.fragment, "reason": each.reason} for each in status.waiting],
        "versions": list(status.versions),
        "bytes_in": counters.bytes_in,
        "bytes_out": counters.bytes_out,
        "bytes_per_param_up": _share(counters.up_bytes, counters.up_params),
        "bytes_per_param_down": _share(counters.down_bytes, counters.down_params),
        "disk_bytes": disk_bytes,
        "uptime_s": round(counters.uptime_s, 3),
        "election": None if status.election is None else _election_json(status.election, lease_ms),
    }


def _rules_json(rules: RunRules, amended: tuple[Amended, ...]) -> dict[str, Any]:
    """What can be amended, as it is in force, and the entry that set it; none where it is the manifest's."""
    since = amended_at(amended)
    found: dict[str, Any] = {}
    for section, names in SECTIONS.items():
        found |= {name: getattr(getattr(rules, section), name) for name in names}
    found |= {"codec_up": codec_text(rules.codec_up), "codec_down": codec_text(rules.codec_down)}
    found["codec_up_choices"] = ",".join(map(codec_text, rules.codec_up_choices))
    return {name: {"value": found[name], "amended_at": since.get(name)} for name in AMENDABLE}


def _election_json(election: ElectionStatus, lease_ms: int | None) -> dict[str, Any]:
    return {
        "role": election.role,
        "term": election.term,
        "head_seq": election.head.rank.seq,
        "held": list(election.held),
        "best": [*election.best.rank, election.best.digest],
        "seat": _elector_json(election.seat),
        "offers": [_elector_json(elector) | {"held": list(rank)} for elector, rank in election.offers],
        "durable_seq": election.durable_seq,
        "roster": list(election.roster),
        "electors": [_seat_json(each) for each in election.seats],
        "standbys": [_seat_json(each) for each in election.standbys],
        "follows": election.follows,
        "syncer": election.syncer,
        "lease_ms": lease_ms,
        "candidacy": election.candidacy,
        "vote": election.vote,
        "append": election.append,
        "roster_plan": election.roster_plan,
    }


def _served_by(election: ElectionStatus) -> dict[str, str] | None:
    """Who serves the run, and where, as far as the peer that is asked knows."""
    if election.role == "syncer":
        return {"peer": election.seat.peer, "address": election.seat.address}
    if election.syncer is None or election.follows != election.syncer[0]:
        return None
    return {"peer": election.syncer[0], "address": election.syncer[1]}


def _seat_json(seat: SeatStatus) -> dict[str, Any]:
    return _elector_json(seat.elector) | {"here": seat.here, "heard_ms": seat.heard_ms}


def _elector_json(elector: Elector) -> dict[str, Any]:
    return {
        "peer": elector.peer,
        "enrolment": elector.enrolment,
        "host": elector.host,
        "address": elector.address,
    }


def _learner_json(learner: LearnerStatus) -> dict[str, Any]:
    return {
        "peer": learner.peer,
        "host": learner.host,
        "connected": learner.connected,
        "step": learner.step,
        "tokens": learner.tokens,
        "tokens_per_s": _tokens_per_s(learner),
        "loss": learner.loss,
        "step_time_ms": learner.step_time_us / 1000,
        "doing": learner.doing,
        "uplink": learner.uplink,
    }


def _tokens_per_s(learner: LearnerStatus) -> float:
    """By its last inner step, as long as nothing better is known: one step is no pace."""
    if not learner.connected:
        return 0.0
    if learner.tokens_per_s is not None:
        return float(learner.tokens_per_s)
    if not (learner.step and learner.step_time_us):
        return 0.0
    return round(learner.tokens / learner.step * 1e6 / learner.step_time_us, 1)


def _round_json(each: RoundStatus) -> dict[str, Any]:
    return {
        "round": each.round,
        "fragment": each.fragment,
        "version": each.version,
        "participants": each.participants,
        "live": each.live,
        "quorum_wait_ms": each.quorum_wait_ms,
        "grace_ms": each.grace_ms,
        "reason": each.reason,
    }


def _share(amount: int, of: int) -> float:
    return round(amount / of, 6) if of else 0.0


def mean(values: Sequence[float]) -> float:
    """0 for none."""
    return sum(values) / len(values) if values else 0.0
