"""The process that speaks libp2p for this peer, from its start to its end.

hivemind can start p2pd itself, but then it may outlive us if we are killed (`watchdog.py`), ends at Ctrl-C before we
have said goodbye, leaves sockets behind, and does not come up at all if the first bootstraps do not answer. So we start
it, below `watchdog.py`, and hand hivemind its control socket. Its folder for sockets is a short path in the temporary
folder (a socket's path has room for about a hundred bytes); the state folder remembers which, so that the next start
can sweep what a power cut or a killed watchdog left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from geo_diloco.errors import DirectoryError, RunDirError
from geo_diloco.runtime.records import tcp_of_maddr

STARTUP_S = 60.0
"""Longest time p2pd may take to come up; a busy machine needs many times the usual 0.3 s."""
TERM_S = 1.0
"""How long p2pd may take to end by itself before its watchdog kills it."""
CLOSE_S = 1.5
"""After this a watchdog that does not end is swept away."""
PORT_S = 0.5
"""How long a port may still be held by what has just ended."""
FOLDER_PREFIX = "gd-p2p-"
MESSAGE_BYTES_MAX = 4 * 2**20
"""hivemind's own default for one message to p2pd."""


@dataclass(frozen=True, kw_only=True)
class DaemonOptions:
    """How p2pd is started."""

    binary: Path
    listen: tuple[str, ...]
    """Multiaddrs; port 0 lets the system choose."""
    announce: tuple[str, ...] = ()
    """Multiaddrs under which others reach us, if not those."""
    identity_path: Path | None = None
    """libp2p private key file; without one, a new identity each time."""
    client_mode: bool = False

    def arguments(self, socket: str) -> list[str]:
        """p2pd's command line; what is not named here is as hivemind sets it."""
        on_loopback = all(maddr.startswith(("/ip4/127.", "/ip6/::1/")) for maddr in self.listen)
        arguments = [
            str(self.binary),
            f"-listen={socket}",
            f"-hostAddrs={','.join(self.listen)}",
            "-dhtClient=1" if self.client_mode else "-dhtServer=1",
            f"-natPortMap={0 if on_loopback else 1}",
            "-autonat=1",
            "-connManager=1",
            "-relay=1",
            "-tls=1",
            "-idleTimeout=30s",
            f"-persistentConnMaxMsgSize={MESSAGE_BYTES_MAX}",
        ]
        if self.announce:
            arguments.append(f"-announceAddrs={','.join(self.announce)}")
        if self.identity_path is not None:
            arguments.append(f"-id={self.identity_path}")
        return arguments


def unusable(path: Path, error: OSError) -> RunDirError:
    return RunDirError(f"folder {path}: {error.strerror or error}; give one that you can write to")


class StateFolder:
    """The folder in which a directory keeps what outlives it, held by one process at a time.

    The lock is a record lock: unlike `flock` it is not held on by a fork of a process that was killed.
    """

    def __init__(self, path: Path) -> None:
        """Raises DirectoryError if another process has it, RunDirError if it can't be written."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / "lock").open("a")
        except OSError as error:
            raise unusable(path, error) from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DirectoryError(f"{path} is in use by another process; end it or choose another folder") from error

    @property
    def note(self) -> Path:
        """Names the folder of sockets in use, and whose it is."""
        return self.path / "p2pd-folder"

    def write_note(self, sockets: Path) -> None:
        self.note.write_text(f"{sockets}\n{self._mark}\n")

    @property
    def _mark(self) -> str:
        """Of this folder and of no copy of it, whose original may be at work."""
        facts = os.fstat(self._lock.fileno())
        return f"{facts.st_dev}:{facts.st_ino}"

    def sweep(self) -> None:
        """Ends what was left behind, by an earlier process or a killed watchdog. Blocks for a second at most."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            noted, _, rest = self.note.read_text().partition("\n")
            folder = Path(noted)
            if rest == f"{self._mark}\n" and folder.name.startswith(FOLDER_PREFIX):
                _end_processes(f"{folder}/")
                for left in folder.iterdir():
                    left.unlink()
                folder.rmdir()
        with contextlib.suppress(OSError):  # a disk that can't be written to says so where it matters
            self.note.unlink()

    def release(self) -> None:
        self._lock.close()


def _end_processes(marker: str) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        found = _processes_with(marker)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, sign)
        until = time.monotonic() + 0.5
        while found and time.monotonic() < until:
            time.sleep(0.02)
            found = _processes_with(marker)


def _processes_with(marker: str) -> list[int]:
    """Processes that have `marker` (a path with random letters of our own) in one of their arguments."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=False)
        lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
        return [int(line[0]) for line in lines if len(line) == 2 and marker in line[1]]
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                arguments = Path("/proc", name, "cmdline").read_bytes()
                if marker.encode() in arguments:
                    found.append(int(name))
    return found


class Daemon:
    """A running p2pd."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, state: StateFolder) -> None:
        self._process = process
        self._folder = folder
        self._state = state
        self._lines: deque[str] = deque(maxlen=8)
        self._reader: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @classmethod
    async def start(cls, options: DaemonOptions, state: StateFolder) -> Daemon:
        """Returns once p2pd answers; raises DirectoryError if a port is taken or, with its last words, if it ends."""
        await asyncio.to_thread(_check_ports, options.listen)
        try:
            folder = Path(_socket_folder())
            state.write_note(folder)
        except OSError as error:
            raise unusable(state.path, error) from error
        script = Path(__file__).with_name("watchdog.py")
        command = [sys.executable, "-I", "-S", str(script), str(os.getpid()), str(folder), str(TERM_S)]
        process = await asyncio.create_subprocess_exec(
            *command,
            *options.arguments(f"/unix{folder}/p2pd.sock"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"GOLOG_LOG_LEVEL": "error", **os.environ, "GOLOG_LOG_FMT": "json"},
            start_new_session=True,
        )
        self = cls(process, folder, state)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(ready))
        try:
            async with asyncio.timeout(STARTUP_S):
                await asyncio.wait((ready, self._reader), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise DirectoryError(f"p2pd did not start: {self._last_words(options.listen)}")
        except TimeoutError as error:
            await self.close()
            raise DirectoryError(f"p2pd did not start within {STARTUP_S:.0f} s; is this machine overloaded?") from error
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def socket(self) -> str:
        """Multiaddr of its control socket."""
        return f"/unix{self._folder}/p2pd.sock"

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def last_words(self) -> str:
        """What it printed last; empty if it ended silently."""
        return self._lines[-1] if self._lines else ""

    async def close(self) -> None:
        """Ends p2pd and waits until it is gone. May be called again."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        await asyncio.to_thread(self._state.sweep)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))

    async def _read(self, ready: asyncio.Future[None]) -> None:
        """Keeps its output flowing, else p2pd would block, and the last lines of it."""
        assert self._process.stdout is not None
        try:
            while line := await _line_of(self._process.stdout):
                self._lines.append(line.decode(errors="replace").strip()[:500])
                if line.startswith(b"Peer ID:") and not ready.done():
                    ready.set_result(None)
        finally:
            self._ended.set()

    def _last_words(self, listen: Sequence[str]) -> str:
        said = self.last_words() or "it ended without a word"
        return f"{said} (listening on {', '.join(listen)})"


def _check_ports(listen: Sequence[str]) -> None:
    """p2pd itself would share a taken port with whoever has it, if that is another p2pd, and get half of its calls."""
    for maddr in listen:
        host, port = tcp_of_maddr(maddr) or ("", 0)
        until = time.monotonic() + PORT_S
        while port:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                        reason = os.strerror(error.errno).lower() if error.errno else str(error)
                        raise DirectoryError(f"can't listen on {maddr}: {reason}; choose another") from error
            time.sleep(0.05)


async def _line_of(stream: asyncio.StreamReader) -> bytes:
    """One line, or what there is of an overlong one; empty at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


def _socket_folder() -> str:
    """A new folder only we can enter, with a path short enough for a socket."""
    room = 80 - len(FOLDER_PREFIX)
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent if len(parent) < room else "/tmp")
