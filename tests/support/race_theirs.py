"""hivemind's side of the averaging race: its peers as processes on hosts of their own, told what to do and when.

They get their best: all know each other before the links are thin, the group is exactly as large as they are, so that
it begins as soon as it is whole, and it is formed before the clock starts; what forming takes is told beside. State
sharing is off, and the size of a part is a flag.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from geo_diloco.cli.demo_processes import child_environment
from geo_diloco.errors import GeoDilocoError
from tests.support.namespaces import Namespaces
from tests.support.race_figures import Turn
from tests.support.race_meter import Meter

BEGIN_S = 180.0
ROUND_S = 330.0
"""More than a peer gives itself."""
END_S = 20.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """What is run."""

    name: str
    compression: str
    peers: int
    parameters: int
    bytes_per_s: float
    round_trip_s: float
    congestion: str
    rounds: int
    """That are counted in a turn; one before them is not."""
    part_bytes: int


class _Peer:
    """One of them, and what it answers."""

    def __init__(self, log: Path, arguments: Sequence[str]) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.race_averager", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(os.environ) | {"HIVEMIND_LOGLEVEL": "WARNING"},
                cwd=_ROOT,
                start_new_session=True,
            )
        self._answers: Queue[bytes] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone: that shows where it should answer
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Raises GeoDilocoError if none comes."""
        try:
            line = self._answers.get(timeout=limit_s)
        except Empty:
            raise GeoDilocoError(f"a hivemind peer did not answer in {limit_s:.0f} s; its log is {self._log}") from None
        if not line:
            raise GeoDilocoError(f"a hivemind peer ended by itself; its log is {self._log}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask_to_end(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def end(self) -> None:
        """In good order, if it was asked to and does; nothing of it is left then, its p2pd included."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def run_theirs(theirs: Theirs, folder: Path) -> Turn:
    """One turn: a group of its own, logs in a new folder. Raises GeoDilocoError if it can't be had."""
    folder.mkdir()
    with Namespaces(theirs.peers) as namespaces, _started(theirs, namespaces, folder) as peers:
        for host in range(theirs.peers):
            mbit = theirs.bytes_per_s * 8 / 1e6
            namespaces.shape(host, delay_ms=250 * theirs.round_trip_s, mbit_per_s=mbit)
        _round(peers)
        by_host = {host: (peer.pid, theirs.bytes_per_s) for host, peer in enumerate(peers)}
        seconds: list[float] = []
        formed_s: list[float] = []
        meter = Meter(namespaces, by_host=by_host, roots=[peer.pid for peer in peers])
        for _ in range(theirs.rounds):
            formed, took = _round(peers)
            formed_s.append(formed)
            seconds.append(took)
        usage = meter.end()
    return Turn(side=theirs.name, seconds=tuple(seconds), usage=usage, rounds=theirs.rounds, formed_s=tuple(formed_s))


@contextmanager
def _started(theirs: Theirs, namespaces: Namespaces, folder: Path) -> Iterator[list[_Peer]]:
    """All of them, over links that are wide yet."""
    peers: list[_Peer] = []
    try:
        first = ""
        for host in range(theirs.peers):
            namespaces.set_congestion(host, theirs.congestion)
            arguments = ["--address", namespaces.address(host), "--join", first, "--peers", str(theirs.peers)]
            arguments += ["--parameters", str(theirs.parameters), "--compression", theirs.compression]
            with namespaces.inside(host):
                peers.append(_Peer(folder / f"peer-{host}.log", [*arguments, "--part-bytes", str(theirs.part_bytes)]))
            address = str(peers[-1].answer(BEGIN_S)["address"])
            first = first or address
        for peer in peers:
            peer.answer(BEGIN_S)
        yield peers
    finally:
        for peer in peers:
            peer.ask_to_end()
        for peer in peers:
            peer.end()


def _round(peers: Sequence[_Peer]) -> tuple[float, float]:
    """(seconds until the group was there, seconds from the first peer's begin to the last one's end)."""
    for order, answers in (("form", 2), ("average", 1)):
        for peer in peers:
            peer.tell(order)
        said = [[peer.answer(ROUND_S) for _ in range(answers)][-1] for peer in peers]
        if order == "form":
            formed_s = max(float(each["formed_s"]) for each in said)
    if not all(each["whole"] for each in said):
        raise GeoDilocoError("a hivemind peer ended with something else than the mean of all")
    return formed_s, max(float(each["ended_at"]) for each in said) - min(float(each["began_at"]) for each in said)
