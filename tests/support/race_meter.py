"""What a side of the averaging race uses meanwhile: of its links, of the processors, and of what makes the links."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil

from geo_diloco.cli.bench_usage import cpu_s, machine_busy_s
from tests.support.namespace_links import device_bytes
from tests.support.namespaces import Namespaces
from tests.support.race_figures import Usage


@dataclass(frozen=True)
class _Reading:
    at_s: float
    moved: tuple[tuple[int, int], ...]
    cpu_s: float
    wires_cpu_s: float
    busy_s: float


class Meter:
    """Runs from when it is made. `by_host`: of each host a process that is there, and what its link carries; `roots`:
    the side's processes, whose children count as theirs."""

    def __init__(
        self, namespaces: Namespaces, *, by_host: Mapping[int, tuple[int, float]], roots: Collection[int]
    ) -> None:
        self._namespaces = namespaces
        self._by_host = [by_host[host][0] for host in sorted(by_host)]
        self._bytes_per_s = tuple(by_host[host][1] for host in sorted(by_host))
        self._roots = roots
        namespaces.late_s()  # what was before is nobody's
        self._first = self._read()

    def end(self) -> Usage:
        """Of the time since."""
        first, last = self._first, self._read()
        seconds = last.at_s - first.at_s
        moved = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(first.moved, last.moved, strict=True)]
        return Usage(
            seconds=seconds,
            bytes_out=tuple(sent for sent, _ in moved),
            bytes_in=tuple(received for _, received in moved),
            bytes_per_s=self._bytes_per_s,
            cpu_s=last.cpu_s - first.cpu_s,
            wires_cpu_s=last.wires_cpu_s - first.wires_cpu_s,
            wires_late_s=self._namespaces.late_s(),
            machine_share=(last.busy_s - first.busy_s) / seconds / (os.cpu_count() or 1),
        )

    def _read(self) -> _Reading:
        return _Reading(
            at_s=time.monotonic(),
            moved=tuple(device_bytes(pid) for pid in self._by_host),
            cpu_s=sum(cpu_s(pid) for root in self._roots for pid in (root, *_children(root))),
            wires_cpu_s=cpu_s(self._namespaces.switch_pid),
            busy_s=machine_busy_s(),
        )


def _children(pid: int) -> list[int]:
    try:
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
