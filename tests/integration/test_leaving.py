"""People end things at any moment, and read along only for as long as they like: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.manifest import ModelSpec, RunId, RunManifest, SyncSpec
from geo_diloco.runtime.invite import Invite

LIMIT_S = 60.0
LEAVE_S = 3.0
GONE = Invite(
    run=RunId("0f" * 20), bootstraps=("/ip4/127.0.0.1/tcp/9/p2p/QmSoLnSGccFuZQJzRadHn95W2CrSFmZuTdDWP8HXaHca9z",)
)


class Started:
    """Commands of one test; everything they start has the test's folder on its command line or in its environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []
        model = ModelSpec(factory="tests.support.tiny_language:tiny_language", factory_arguments={"width": 32})
        (root / "run.toml").write_text(toml_from_manifest(RunManifest(model=model, sync=SyncSpec(num_fragments=2))))
        (root / "t").mkdir()

    def command(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.root / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "geo_diloco", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "TMPDIR": str(self.root / "t"), "XDG_STATE_HOME": str(self.root)},
            )
        self.processes.append(process)
        return process

    def start(self) -> subprocess.Popen[bytes]:
        return self.command("start", str(self.root / "run.toml"), "--port", "0", "--run-dir", str(self.root / "run"))

    def said(self) -> str:
        return (self.root / "stderr").read_text()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until, f"no {what} in {LIMIT_S:.0f} s: {self.said()}"
            time.sleep(0.02)

    def daemons(self) -> list[int]:
        """Processes that have the test's temporary folder on their command line: p2pd and its watchdog."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if str(self.root / "t").encode() in Path("/proc", name, "cmdline").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
        return found

    def leaves(self, process: subprocess.Popen[bytes], *numbers: int) -> None:
        began = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        assert process.wait(LIMIT_S) == 0, self.said()
        assert time.monotonic() - began < LEAVE_S
        assert self.said().count("Traceback") == 0
        self.wait(lambda: not self.daemons(), "end of p2pd")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_founder_leaves_at_any_moment_and_goes_on_unheard(started: Started) -> None:
    founder = started.start()
    time.sleep(0.5)  # among its imports
    started.leaves(founder, signal.SIGTERM)
    founder = started.start()
    started.wait((started.root / "run" / "key.pem").exists, "folder")
    started.leaves(founder, signal.SIGINT)
    again = started.start()  # the folder is as good as new
    assert again.stdout is not None
    again.stdout.close()  # nobody reads what it says: it goes on
    started.wait((started.root / "run" / "invite.txt").exists, "invite")
    time.sleep(0.5)
    assert again.poll() is None, started.said()
    started.leaves(again, signal.SIGINT, signal.SIGINT)
    back = f"the run waits until this peer is back: `geo-diloco start {started.root / 'run'}`"
    assert f"leave: nobody could take over: {back}" in started.said()


def test_who_waits_for_a_run_that_is_gone_says_so_and_can_leave(started: Started) -> None:
    peer = started.command("join", GONE.to_string(), "--run-dir", str(started.root / "peer"))
    started.wait(lambda: "no bootstrap answers, trying again" in started.said(), "reason")
    started.leaves(peer, signal.SIGINT)
