"""The watchdog by itself, with stand-ins for p2pd: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

SCRIPT = str(Path(__file__).parents[2] / "geo_diloco" / "runtime" / "watchdog.py")
SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
]


def command(folder: Path, owner: object, program: list[str]) -> list[str]:
    return [sys.executable, "-I", "-S", SCRIPT, str(owner), str(folder), "1.0", *program]


@contextmanager
def watchdog_over(folder: Path, program: list[str]) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A watchdog of ours and the program under it, both up."""
    folder.mkdir()
    (folder / "p2pd.sock").touch()
    with subprocess.Popen(
        command(folder, os.getpid(), program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watchdog:
        try:
            assert watchdog.stdout is not None and watchdog.stdout.readline() == "up\n"
            (below,) = psutil.Process(watchdog.pid).children()
            yield watchdog, below
        finally:
            watchdog.kill()


def seconds_until(condition: Callable[[], bool], *, within_s: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s"
        time.sleep(0.01)
    return time.monotonic() - began


def test_a_closed_pipe_ends_the_program_and_removes_its_folder(tmp_path: Path) -> None:
    with watchdog_over(tmp_path / "folder", SLEEPER) as (watchdog, below):
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        assert watchdog.wait(timeout=3) == 0
        assert not below.is_running()
    assert not (tmp_path / "folder").exists()


def test_a_program_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    with watchdog_over(tmp_path / "folder", STUBBORN) as (watchdog, below):
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        assert watchdog.wait(timeout=5) == 0
        assert not below.is_running()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_watchdog_asked_to_end_takes_the_program_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with watchdog_over(tmp_path / "folder", SLEEPER) as (watchdog, below):
        watchdog.send_signal(number)
        assert watchdog.wait(timeout=3) == 0
        assert not below.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does this")
def test_a_killed_watchdog_takes_the_program_with_it(tmp_path: Path) -> None:
    with watchdog_over(tmp_path / "folder", SLEEPER) as (watchdog, below):
        watchdog.kill()
        seconds_until(lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE, within_s=3)


def test_the_watchdog_ends_with_the_program_and_its_status(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with subprocess.Popen(
        command(folder, os.getpid(), ["/bin/sh", "-c", "echo last words; exit 7"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as watchdog:
        assert watchdog.stdout is not None
        assert watchdog.stdout.read() == "last words\n"
        assert watchdog.wait(timeout=3) == 7
    assert not folder.exists()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path / "folder", os.getpid(), ["/nowhere/p2pd"]),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watchdog:
        assert watchdog.stderr is not None
        assert "can't start /nowhere/p2pd" in watchdog.stderr.read()
        assert watchdog.wait(timeout=3) == 127


def test_a_fork_that_holds_the_pipe_open_does_not_keep_the_program_alive(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    owner = f"""
import os, subprocess, time
command = {command(folder, "OWNER", SLEEPER)!r}
command[command.index("OWNER")] = str(os.getpid())
watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
fork = os.fork()
if fork == 0:
    time.sleep(60)
print(fork, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        try:
            process.kill()
            seconds_until(lambda: not folder.exists(), within_s=3)
            assert psutil.pid_exists(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_the_watchdog_is_small(tmp_path: Path) -> None:
    with watchdog_over(tmp_path / "folder", SLEEPER) as (watchdog, _):
        assert psutil.Process(watchdog.pid).memory_info().rss < 20e6
