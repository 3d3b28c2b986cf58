"""Hosts as network namespaces on this machine, joined by `switch.py`: rate, delay, loss, and cuts nobody is told of.

The namespaces have no name, so they need no clearing up and two checkouts can't meet in one: each lives as long as this
process holds it or a process runs in it, and the switch ends with this process, however that ends. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_DEVICE = "wan0"
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_ROOT = Path(__file__).resolve().parents[2]


def why_no_namespaces() -> str:
    """Why this machine has none for us, for a skipped test to say; empty if it has."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "network namespaces need /dev/net/tun here, which is not there"
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (iproute2)"
    try:
        Namespaces(1).close()
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"network namespaces can't be made here: {exc}"
    return ""


class Namespaces:
    """A `networks.Network`. For one thread: a namespace is a property of a thread."""

    def __init__(self, num_hosts: int) -> None:
        self._own = _open_own()
        self._hosts: list[int] = []
        devices: list[int] = []
        try:
            for host in range(num_hosts):
                namespace, device = self._make(host)
                self._hosts.append(namespace)
                devices.append(device)
            self._switch = subprocess.Popen(
                [sys.executable, "-m", "tests.support.switch", *map(str, devices)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=devices,
                cwd=_ROOT,
                start_new_session=True,  # a Ctrl-C is for the tests, which then close it
            )
        except BaseException:
            for namespace in (*self._hosts, self._own):
                os.close(namespace)
            raise
        finally:
            for device in devices:
                os.close(device)

    def _make(self, host: int) -> tuple[int, int]:
        """(namespace, its device), both open."""
        _check(_LIBC.unshare(_CLONE_NEWNET), "unshare")
        try:
            namespace, device = _open_own(), os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            for command in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{self.address(host)}/24", "dev", _DEVICE),
                ("link", "set", _DEVICE, "up"),
            ):
                subprocess.run(["ip", *command], check=True, capture_output=True)
        finally:
            _enter(self._own)
        return namespace, device

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the switch and let go of the namespaces. May be called again."""
        if not self._hosts:
            return
        for pipe in (self._switch.stdin, self._switch.stdout):
            assert pipe is not None
            pipe.close()
        self._switch.wait(10)
        for namespace in (*self._hosts, self._own):
            os.close(namespace)
        self._hosts.clear()

    @property
    def switch_pid(self) -> int:
        return self._switch.pid

    # ---- networks.Network

    @contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """What this thread starts, dials or binds inside is that host's."""
        _enter(self._hosts[host])
        try:
            yield
        finally:
            _enter(self._own)

    def started(self, host: int, pid: int) -> None:
        """It knows by itself."""

    def flags(self, host: int) -> tuple[str, ...]:
        """With which a peer on that host can be reached by the others."""
        return "--host", "0.0.0.0", "--announce", self.address(host)

    def cut(self, one: Collection[int], other: Collection[int]) -> None:
        """From now on nothing passes between hosts of the two sides, either way, and nobody is told."""
        self._order(do="cut", pairs=[pair for a in one for b in other for pair in ((a, b), (b, a))])

    def heal(self) -> None:
        """Everything passes again."""
        self._order(do="heal")

    # ---- what only namespaces can do

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def shape(self, host: int, *, delay_ms: float = 0.0, mbit_per_s: float = 0.0, loss: float = 0.0) -> None:
        """A host's line, each way. A packet takes the delay of both ends; a rate of 0: no limit; loss: of one."""
        self._order(do="line", host=host, delay_s=delay_ms / 1000, bytes_per_s=mbit_per_s * 1e6 / 8, loss=loss)

    def set_congestion(self, host: int, name: str) -> None:
        """The congestion control of whatever is dialed or listens there from now on and asks for none itself."""
        with self.inside(host):
            _CONGESTION.write_text(name, encoding="ascii")

    def late_s(self) -> float:
        """By how much a packet came late at most since this was asked last: the switch had to wait for a processor."""
        return float(self._ask(do="late"))

    def _order(self, **order: object) -> None:
        """It is carried out when this returns."""
        answer = self._ask(**order)
        assert answer == b"done\n", f"the switch is gone, or does not know {order}: {answer!r}"

    def _ask(self, **order: object) -> bytes:
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(order).encode() + b"\n")
        self._switch.stdin.flush()
        return self._switch.stdout.readline()


_LIBC = ctypes.CDLL(None, use_errno=True)


def _open_own() -> int:
    """This thread's namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _enter(namespace: int) -> None:
    _check(_LIBC.setns(namespace, _CLONE_NEWNET), "setns")


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
