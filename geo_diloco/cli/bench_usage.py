"""What processes use of this machine, for benchmarks that have several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import psutil

Name = TypeVar("Name")


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
    """Whose process, of those, has the socket at `port` of this machine that is connected to `front`; None if nobody's
    has, or it is gone."""
    for name, pid in pids.items():
        try:
            sockets = psutil.Process(pid).net_connections("tcp4")
        except psutil.Error:
            continue
        if any(each.laddr.port == port and each.raddr and each.raddr.port == front for each in sockets):
            return name
    return None
