"""What processes use of this machine, for benchmarks that have several."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

Name = TypeVar("Name")
_TABLE = Path("/proc/net/tcp")


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, without its children; 0 if it is gone."""
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system)


def resident_bytes(pid: int) -> int:
    """Memory of a process now. Raises psutil.NoSuchProcess if it is gone."""
    return int(psutil.Process(pid).memory_info().rss)


def machine_busy_s() -> float:
    """Of all processors together, since the machine started: everything but idling and waiting for a disk."""
    used = psutil.cpu_times()
    # of guests Linux counts what is in `user` and `nice` already
    idle = {"idle", "iowait", "guest", "guest_nice"}
    return float(sum(getattr(used, name) for name in used._fields if name not in idle))


def dialer_of(port: int, front: int, pids: Mapping[Name, int]) -> Name | None:
    """Whose process, of those, has the socket at `port` that is connected to `front`, both of 127.0.0.1;
    None if nobody's has, or it is gone."""
    if not _TABLE.exists():
        return next((name for name, pid in pids.items() if _has_socket(pid, port, front)), None)
    inode = _inode_of(port, front)
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    return next((name for name, pid in pids.items() if wanted in _open_files(pid)), None)


def _has_socket(pid: int, port: int, front: int) -> bool:
    """On any system; on Linux it would read and parse the whole table for each process, 40 ms a time."""
    try:
        sockets = psutil.Process(pid).net_connections("tcp4")
    except psutil.Error:
        return False
    return any(each.laddr.port == port and each.raddr and each.raddr.port == front for each in sockets)


def _inode_of(port: int, front: int) -> str | None:
    """From the kernel's table of connections, which has addresses in the machine's own byte order."""
    home = int.from_bytes(socket.inet_aton("127.0.0.1"), sys.byteorder)
    ends = f" {home:08X}:{port:04X} {home:08X}:{front:04X} "
    line = next((line for line in _TABLE.read_text("ascii").splitlines() if ends in line), None)
    inode = "0" if line is None else line.split()[9]
    return None if inode == "0" else inode  # 0: closed by its process already


def _open_files(pid: int) -> set[str]:
    """Those of a process; none if it is gone."""
    found = set()
    with suppress(OSError):
        for number in os.listdir(folder := f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(f"{folder}/{number}"))
    return found
