"""Runs what is missing of a study, a few processes at a time, for so many minutes; each that is done is a line of JSON.

A process serves one errand after another, for starting one costs seconds. One that fails, or whose process is ended
from outside, is told and costs no other its result.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, TextIO

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Errand:
    """One result that is wanted: what `call(*args)` returns in a process of its own."""

    words: str
    tokens: int
    tokens_per_second: float
    """Of a core, until something has been measured."""
    call: Callable[..., Row]
    args: tuple[Any, ...]


@contextmanager
def alone(path: Path) -> Iterator[TextIO]:
    """The results to append to, ours alone for as long as we run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a", encoding="utf-8")
    except OSError as exc:
        sys.exit(f"--results {path.parent}: {exc.strerror}; give a folder that can be written to")
    with opened as lines:
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{path}: another process is at work on it; wait for it, or run another part")
        yield lines


def run_errands(
    errands: Sequence[Errand], lines: TextIO, *, num_jobs: int, minutes: float, told: Callable[[Row], str]
) -> int:
    """Whatever fits into so many minutes, by the speed of those before; the first is begun in any case. `told` is what
    to say of a result. Returns how many failed."""
    # Otherwise malloc gives pages back and takes them again in every inner step, which costs 4 % of the time.
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
    ends_at = time.monotonic() + 60 * minutes
    waiting, slowdown, num_failed = deque(errands), 1.0, 0
    idle = [_Worker() for _ in range(num_jobs)]
    running: dict[_Worker, tuple[Errand, float]] = {}
    num_begun = 0
    while True:
        while waiting and idle:
            seconds = slowdown * waiting[0].tokens / waiting[0].tokens_per_second
            if num_begun and time.monotonic() + seconds > ends_at:
                waiting.clear()
                break
            worker, errand, num_begun = idle.pop(), waiting.popleft(), num_begun + 1
            worker.begin(errand)
            running[worker] = (errand, time.monotonic())
        if not running:
            break
        by_pipe = {worker.pipe: worker for worker in running}
        for worker in [by_pipe[pipe] for pipe in connection.wait(list(by_pipe))]:
            errand, began_at = running.pop(worker)
            row, failure = worker.take()
            idle.append(worker if failure is None else worker.renewed())
            seconds = time.monotonic() - began_at
            if row is None:
                num_failed += 1
                print(f"{errand.words}: FAILED, the others go on: {failure}", flush=True)
                continue
            slowdown = seconds * errand.tokens_per_second / errand.tokens
            _append(lines, row)
            print(f"{errand.words}: {told(row)}, {errand.tokens / seconds:,.0f} tokens/s", flush=True)
    for worker in idle:
        worker.end()
    return num_failed


def _append(lines: TextIO, row: Row) -> None:
    try:
        lines.write(json.dumps(row) + "\n")
        lines.flush()
    except OSError as exc:
        hint = "free some space" if exc.errno == errno.ENOSPC else "look after that folder"
        sys.exit(f"{lines.name}: {exc.strerror}; {hint}, delete a last line that is not whole, and start it again")


class _Worker:
    """A process and our end of a pipe to it. It ends when this process does, however that ends."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, errand: Errand) -> None:
        with suppress(OSError):  # it has died; whoever waits for its answer is told so
            self.pipe.send((errand.call, errand.args))

    def take(self) -> tuple[Row | None, str | None]:
        """(its result, none; or none, why)."""
        try:
            answer: tuple[Row | None, str | None] = self.pipe.recv()
            return answer
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
            return None, f"its process was ended ({how})"

    def renewed(self) -> _Worker:
        """Another process in its place: who knows what state a failure leaves."""
        self.end()
        return _Worker()

    def end(self) -> None:
        self.pipe.close()
        self._process.join()


def _serve(pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # our parent hears it, too, and ends us
    while True:
        try:
            call, args = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Row | None, str | None] = (call(*args), None)
        except Exception as exc:  # whatever it is, the others' results are worth having
            answer = (None, f"{type(exc).__name__}: {' '.join(str(exc).split())[:400]}")
        try:
            pipe.send(answer)
        except OSError:
            return  # nobody waits for it any more
