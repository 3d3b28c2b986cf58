"""The demo's child processes: started like a person would start them, watched, ended, reaped.

Each child is `python -m geo_diloco COMMAND` in a session of its own, so a Ctrl-C in the terminal reaches the demo
alone, which then ends its children in order. All they print goes into one log file each; what a child is ready with is
read from there, as a line of JSON. Nothing here waits without a bound, and no child outlives `Children.close`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_diloco.errors import GeoDilocoError

READY_S = 120.0
"""A busy machine needs tens of seconds to import torch five times over."""
_TAIL_BYTES = 8192
_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


class ChildFailed(GeoDilocoError):
    """A child process died, or never got ready. The message names it, and where its log is."""

    def __init__(self, message: str, *, child: Child) -> None:
        super().__init__(f"{child.name} {message}; its log is {child.log}")
        self.child = child


@dataclass
class Child:
    """One start of one process."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    log_offset: int
    """Where this start's output begins in the log."""
    ends_by_itself: bool
    """True for one whose exit status 0 is no surprise."""
    expected_to_end: bool = False
    """True once we asked it to end, or killed it on purpose."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    def output(self) -> bytes:
        with self.log.open("rb") as file:
            file.seek(self.log_offset)
            return file.read()

    def last_lines(self, num_lines: int = 15) -> list[str]:
        """The end of its log, control characters taken out."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self.log_offset, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines()]
        return [line for line in lines if line][-num_lines:]


class Children:
    """All processes of one demo. Used as a context manager: on leaving, whatever still runs is killed and reaped."""

    def __init__(
        self, logs: Path, *, program: Sequence[str] | None = None, interrupted: threading.Event | None = None
    ) -> None:
        self._logs = logs
        self._program = tuple(program or (sys.executable, "-P", "-m", "geo_diloco"))
        self._interrupted = interrupted or threading.Event()
        self._running: dict[str, Child] = {}
        self._environment = child_environment(os.environ)
        self._before_exec = _ends_with_parent()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, *arguments: str, ends_by_itself: bool = False) -> Child:
        """Start it; starting a name again (after its end) goes on in the same log."""
        old = self._running.get(name)
        assert old is None or old.status is not None, f"{name} is already running"
        log = self._logs / f"{name}.log"
        with log.open("ab") as file:
            offset = file.tell()
            process = subprocess.Popen(
                [*self._program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=self._before_exec,
            )
        child = Child(name=name, log=log, process=process, log_offset=offset, ends_by_itself=ends_by_itself)
        self._running[name] = child
        return child

    def wait_ready(
        self, child: Child, key: str, *, limit_s: float = READY_S, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The first JSON object with `key` that the child prints.

        Raises ChildFailed if it dies first, if another one dies meanwhile or if the limit passes; KeyboardInterrupt if
        the demo is told to stop.
        """
        deadline = time.monotonic() + limit_s
        while True:
            status = child.status  # before reading: what a dead child printed is all there
            ready = json_line(child.output(), key)
            if ready is not None:
                return ready
            if status is not None:
                raise ChildFailed(f"ended before it was ready ({describe_status(status)})", child=child)
            if time.monotonic() > deadline:
                raise ChildFailed(f"was not ready within {limit_s:.0f} s", child=child)
            self.check()
            meanwhile()
            if self._interrupted.wait(_LOOK_S):
                raise KeyboardInterrupt

    def check(self) -> None:
        """Raises ChildFailed if one ended though nobody asked it to."""
        for child in self._running.values():
            status = child.status
            if status is None or child.expected_to_end or (status == 0 and child.ends_by_itself):
                continue
            raise ChildFailed(f"ended unexpectedly ({describe_status(status)})", child=child)

    def kill(self, child: Child) -> None:
        """SIGKILL to this process alone, as a crash would be."""
        child.expected_to_end = True
        child.process.kill()
        child.process.wait()

    def end(
        self, children: Iterable[Child], number: signal.Signals, *, limit_s: float, hurry: threading.Event | None = None
    ) -> list[Child]:
        """Send the signal to those that still run and wait for them together, until the limit or until `hurry` is set;
        returns those that had to be killed."""
        pending = [child for child in children if child.status is None]
        for child in pending:
            child.expected_to_end = True
            child.process.send_signal(number)
        deadline = time.monotonic() + limit_s
        while pending and time.monotonic() < deadline and not (hurry is not None and hurry.is_set()):
            time.sleep(_LOOK_S / 2)
            pending = [child for child in pending if child.status is None]
        for child in pending:
            _kill_session(child)
        return pending

    def close(self) -> None:
        """Kill and reap all that is left. Harmless when repeated."""
        for child in self._running.values():
            if child.status is None:
                child.expected_to_end = True
                _kill_session(child)


def json_line(output: bytes, key: str) -> dict[str, Any] | None:
    """The first complete line that is a JSON object with that key."""
    for line in output.split(b"\n")[:-1]:
        if not line.lstrip().startswith(b"{"):
            continue
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and key in found:
                return found
    return None


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Ours, with one thread for each math library (the processes share the cores), unbuffered output, and without
    settings that would change what the demo starts; the log level may be chosen."""
    kept = {
        key: value
        for key, value in environment.items()
        if not key.startswith("GEO_DILOCO_") or key == "GEO_DILOCO_LOG_LEVEL"
    }
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _kill_session(child: Child) -> None:
    """SIGKILL to the child and whatever it started in its session, then reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.process.wait()


def _ends_with_parent() -> Callable[[], None] | None:
    """On Linux: have the kernel send a child SIGTERM when the demo dies without a word (SIGKILL). Elsewhere nothing;
    there the children end with the run."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
