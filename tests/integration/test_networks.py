"""The networks that tests of cuts run on do what they say: they carry, delay, bound, lose, cut, heal, and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from geo_diloco.runtime.sockets import congestion_granted, congestion_in_use
from tests.support.namespaces import Namespaces, why_no_namespaces
from tests.support.relays import Relays

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

needs_namespaces = pytest.mark.usefixtures("namespaces")
PORT = 7777
ECHO = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20) as link:
    for line in sys.stdin:
        link.sendall(line.encode())
        print(link.recv(100).decode(), end="", flush=True)
"""
"""A process that dials, and says what comes back for what it is told."""

MAKER = """
import time
from geo_diloco.runtime.sockets import congestion_granted, congestion_in_use
from tests.support.namespaces import Namespaces
made = Namespaces(2)
print(made.switch_pid, flush=True)
time.sleep(60)
"""


class Echo:
    """Sends back what comes, on whatever socket it is given."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(link,), daemon=True).start()

    def _echo(self, link: socket.socket) -> None:
        with link:
            while data := link.recv(1 << 16):
                self.num_bytes += len(data)
                link.sendall(data)


def listen(address: str) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, PORT if address == "0.0.0.0" else 0))
    made.listen()
    return made


def ask(link: socket.socket, text: bytes, limit_s: float = 10.0) -> bytes:
    link.settimeout(limit_s)
    link.sendall(text)
    answer = b""
    while len(answer) < len(text):
        answer += link.recv(1 << 16)
    return answer


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips, and says why, where there can be none."""
    if reason := why_no_namespaces():
        pytest.skip(reason)


@pytest.fixture
def lab(namespaces: None) -> Iterator[Namespaces]:
    with Namespaces(3) as made:
        yield made


def dial(lab: Namespaces, host: int, to: int) -> socket.socket:
    with lab.inside(host):
        return socket.create_connection((lab.address(to), PORT), 3.0)


def echo_on(lab: Namespaces, host: int) -> Echo:
    with lab.inside(host):
        return Echo(listen("0.0.0.0"))


@needs_namespaces
def test_hosts_reach_each_other_after_the_delay_of_both(lab: Namespaces) -> None:
    lab.shape(0, delay_ms=10)
    lab.shape(1, delay_ms=30)
    with closing(echo_on(lab, 1).listening), closing(dial(lab, 0, 1)) as link:
        took_s = []
        for _ in range(5):
            began = time.monotonic()
            assert ask(link, b"hello") == b"hello"
            took_s.append(time.monotonic() - began)
    assert 0.08 <= min(took_s) < 0.16


@needs_namespaces
def test_a_line_carries_no_more_than_its_rate(lab: Namespaces) -> None:
    lab.shape(0, mbit_per_s=8)
    with closing(echo_on(lab, 1).listening), closing(dial(lab, 0, 1)) as link:
        began = time.monotonic()
        for _ in range(25):
            ask(link, bytes(20_000))
        took_s = time.monotonic() - began
    assert 0.5 < took_s < 10.0, "half a megabyte each way, at a megabyte a second"


@needs_namespaces
def test_lost_packets_are_lost(lab: Namespaces) -> None:
    lab.shape(1, loss=1.0)
    with closing(echo_on(lab, 1).listening), pytest.raises(TimeoutError):
        dial(lab, 0, 1)


@needs_namespaces
def test_a_cut_is_between_two_sides_only_and_what_was_sent_arrives_when_it_heals(lab: Namespaces) -> None:
    with (
        closing(echo_on(lab, 1).listening),
        closing(dial(lab, 0, 1)) as across,
        closing(dial(lab, 2, 1)) as beside,
    ):
        lab.cut([0], [1])
        with pytest.raises(TimeoutError):
            ask(across, b"lost?", 0.5)
        assert ask(beside, b"hello") == b"hello"
        with pytest.raises(TimeoutError):
            dial(lab, 0, 1)
        lab.heal()
        across.settimeout(10.0)
        assert across.recv(100) == b"lost?"


@needs_namespaces
def test_a_switch_that_had_to_wait_says_how_late_packets_were(lab: Namespaces) -> None:
    lab.shape(1, delay_ms=100)
    with closing(echo_on(lab, 1).listening), closing(dial(lab, 0, 1)) as link:
        lab.late_s()
        link.sendall(b"hello")
        time.sleep(0.05)  # it is with the switch now
        os.kill(lab.switch_pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(lab.switch_pid, signal.SIGCONT)
        assert link.recv(100) == b"hello"
    assert 0.3 < lab.late_s() < 5.0
    assert lab.late_s() < 0.3, "what was said is not said again"


@needs_namespaces
def test_a_host_has_the_congestion_control_that_it_is_given(lab: Namespaces) -> None:
    lab.set_congestion(1, "reno")
    with lab.inside(1), socket.socket() as made:
        assert congestion_in_use(made) == "reno"
    with socket.socket() as outside:
        assert congestion_in_use(outside) == congestion_granted(()), "this process's own is as it was"
    with lab.inside(0), socket.socket() as beside:
        assert congestion_in_use(beside) == congestion_granted(())


@needs_namespaces
def test_namespaces_leave_nothing_behind_and_their_thread_where_it_was() -> None:
    here = os.readlink("/proc/thread-self/ns/net")
    handles = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), Namespaces(2) as lab:
        with lab.inside(1):
            assert os.readlink("/proc/thread-self/ns/net") != here
            sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        assert os.readlink(f"/proc/{sleeper.pid}/ns/net") != here
        sleeper.kill()
        sleeper.wait()
        switch = lab.switch_pid
        raise KeyboardInterrupt
    assert os.readlink("/proc/thread-self/ns/net") == here
    assert not Path(f"/proc/{switch}").exists()
    assert len(os.listdir("/proc/self/fd")) == handles


@needs_namespaces
def test_the_switch_ends_with_whoever_made_it() -> None:
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, cwd=root) as maker:
        assert maker.stdout is not None
        switch = int(maker.stdout.readline())
        assert Path(f"/proc/{switch}").exists()
        maker.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{switch}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Dialer:
    """A process that dials a relay."""

    def __init__(self, relays: Relays, *, host: int, to: int) -> None:
        port = relays.flags(to)[-1].rpartition(":")[2]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", ECHO, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        relays.started(host, self.process.pid)

    def ask(self, text: str) -> str:
        self.send(text)
        return self.hear()

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(10)


def test_relays_cut_two_hosts_from_each_other_and_from_nobody_else() -> None:
    with Relays(3) as relays:
        echo = Echo(socket.create_server(("127.0.0.1", int(relays.flags(1)[3]))))
        with (
            closing(echo.listening),
            closing(Dialer(relays, host=0, to=1)) as across,
            closing(Dialer(relays, host=2, to=1)) as beside,
        ):
            assert across.ask("a") == "a" and beside.ask("b") == "b"
            relays.cut([0], [1])
            num_bytes = echo.num_bytes
            across.send("waits")
            assert beside.ask("passes") == "passes"
            time.sleep(0.3)
            assert echo.num_bytes == num_bytes + len("passes\n")
            relays.heal()
            assert across.hear() == "waits"


def test_a_relay_carries_for_nobody_that_it_does_not_know() -> None:
    with Relays(1) as relays, closing(socket.create_server(("127.0.0.1", int(relays.flags(0)[3])))):
        host, _, port = relays.flags(0)[-1].partition(":")
        with socket.create_connection((host, int(port)), 5.0) as stranger:
            assert stranger.recv(1) == b""
