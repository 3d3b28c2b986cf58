from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from geo_diloco.cli import bench_usage
from geo_diloco.cli.bench_usage import cpu_s, dialer_of, machine_busy_s, resident_bytes

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")


def test_what_the_processors_did_is_everything_but_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_times", lambda: Times(1, 1, 1, 999, 999, 1, 1, 1, 1, 1))
    assert machine_busy_s() == 6.0


def test_a_process_has_used_something_and_one_that_is_gone_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_s(gone.pid) == 0.0
    assert cpu_s(os.getpid()) > 0.0 and resident_bytes(os.getpid()) > 1e6


@pytest.mark.parametrize("table", [Path("/proc/net/tcp"), Path("/proc/there-is-no-such-table")])
def test_who_dials_is_whose_socket_is_connected_to_the_front(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_usage, "_TABLE", table)
    with socket.create_server(("127.0.0.1", 0)) as front, socket.create_server(("127.0.0.1", 0)) as other:
        at = front.getsockname()[1]
        with socket.create_connection(("127.0.0.1", at)) as dialing:
            port = dialing.getsockname()[1]
            gone = subprocess.Popen([sys.executable, "-c", ""])
            gone.wait()
            assert dialer_of(port, at, {"gone": gone.pid, "me": os.getpid()}) == "me"
            assert dialer_of(port, other.getsockname()[1], {"me": os.getpid()}) is None
            assert dialer_of(port, at, {}) is None
