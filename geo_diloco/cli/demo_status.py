"""What the demo knows of its run: the founder's `GET /v1/status`, read in a thread of its own.

The founder is another process, so its answer is treated like any bytes from outside: bounded, parsed once into frozen
types, and everything that ends up on a screen freed of control characters.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from geo_diloco.errors import RemoteProtocolError

STATUS_BYTES_MAX = 4 << 20
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LearnerStatus:
    peer: str
    host: str
    connected: bool
    step: int
    tokens: int
    tokens_per_s: float
    loss: float | None
    step_time_ms: float
    doing: str


@dataclass(frozen=True, kw_only=True)
class RoundStatus:
    round: int
    fragment: int
    version: int
    participants: int
    live: int
    quorum_wait_ms: int
    grace_ms: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    run: str
    name: str
    role: str
    term: int
    seq: int
    finished: bool
    heldout: tuple[tuple[int, float, float], ...]
    """(seq, nats per token, seconds since the run opened), oldest first."""
    tokens_total: int
    commits: int
    progress: float
    learners: tuple[LearnerStatus, ...]
    rounds: tuple[RoundStatus, ...]
    """Oldest first."""
    waiting: tuple[tuple[int, str], ...]
    bytes_in: int
    bytes_out: int
    bytes_per_param_up: float
    bytes_per_param_down: float
    uptime_s: float


def read_status(data: bytes) -> RunStatus:
    """Raises RemoteProtocolError if it isn't a status. A missing figure reads as 0, a missing list as empty."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise TypeError("not an object")
        return RunStatus(
            run=_text(found, "run"),
            name=_text(found, "name"),
            role=_text(found, "role"),
            term=_int(found, "term"),
            seq=_int(found, "seq"),
            finished=found.get("finished") is True,
            heldout=tuple((int(seq), float(loss), float(at)) for seq, loss, at in found.get("heldout") or ()),
            tokens_total=_int(found, "tokens_total"),
            commits=_int(found, "commits"),
            progress=_float(found, "progress"),
            learners=tuple(_learner(item) for item in _rows(found, "learners")),
            rounds=tuple(_round(item) for item in _rows(found, "rounds")),
            waiting=tuple((_int(item, "fragment"), _text(item, "reason")) for item in _rows(found, "waiting")),
            bytes_in=_int(found, "bytes_in"),
            bytes_out=_int(found, "bytes_out"),
            bytes_per_param_up=_float(found, "bytes_per_param_up"),
            bytes_per_param_down=_float(found, "bytes_per_param_down"),
            uptime_s=_float(found, "uptime_s"),
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise RemoteProtocolError(f"its status can't be read ({exc})", peer="founder") from exc


class StatusPoller:
    """Keeps `latest` fresh from a thread; never raises, says in `failure` why the last try got nothing."""

    def __init__(self, address: str, *, interval_s: float = 0.5) -> None:
        self.latest: RunStatus | None = None
        self.failure = ""
        self._url = f"http://{address}/v1/status"
        self._interval_s = interval_s
        self._done = threading.Event()
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._thread = threading.Thread(target=self._follow, name="demo-status", daemon=True)

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(_ANSWER_S + 1)

    def poll(self) -> RunStatus | None:
        """Ask once, now. None if there was no answer; `latest` then keeps the one before."""
        try:
            with self._opener.open(self._url, timeout=_ANSWER_S) as answer:
                data = answer.read(STATUS_BYTES_MAX + 1)
            if len(data) > STATUS_BYTES_MAX:
                raise RemoteProtocolError(f"its status has more than {STATUS_BYTES_MAX} bytes", peer="founder")
            self.latest = read_status(data)
        except (OSError, ValueError, RemoteProtocolError) as exc:
            self.failure = str(exc)
            return None
        self.failure = ""
        return self.latest

    def _follow(self) -> None:
        while not self._done.wait(self._interval_s):
            self.poll()


def _rows(found: Mapping[str, Any], key: str) -> Iterable[Mapping[str, Any]]:
    rows = found.get(key) or ()
    if not isinstance(rows, list | tuple):
        raise TypeError(f"{key} is not a list")
    return rows


def _int(found: Mapping[str, Any], key: str) -> int:
    return int(found.get(key) or 0)


def _float(found: Mapping[str, Any], key: str) -> float:
    return float(found.get(key) or 0.0)


def _text(found: Mapping[str, Any], key: str) -> str:
    text = str(found.get(key) or "")
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])


def _learner(item: Mapping[str, Any]) -> LearnerStatus:
    loss = item.get("loss")
    return LearnerStatus(
        peer=_text(item, "peer"),
        host=_text(item, "host"),
        connected=item.get("connected") is True,
        step=_int(item, "step"),
        tokens=_int(item, "tokens"),
        tokens_per_s=_float(item, "tokens_per_s"),
        loss=None if loss is None else float(loss),
        step_time_ms=_float(item, "step_time_ms"),
        doing=_text(item, "doing"),
    )


def _round(item: Mapping[str, Any]) -> RoundStatus:
    return RoundStatus(
        round=_int(item, "round"),
        fragment=_int(item, "fragment"),
        version=_int(item, "version"),
        participants=_int(item, "participants"),
        live=_int(item, "live"),
        quorum_wait_ms=_int(item, "quorum_wait_ms"),
        grace_ms=_int(item, "grace_ms"),
        reason=_text(item, "reason"),
    )
