"""`bench star`'s links between network namespaces: there packets are delayed and lost one by one, and TCP sees it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from geo_diloco.cli.bench_star_plan import Site
from geo_diloco.cli.bench_star_rig import SYNCER
from geo_diloco.cli.star_links import Passed
from tests.support.namespaces import Namespaces


@dataclass(frozen=True, kw_only=True)
class Line:
    """Of one host, each way, from the moment that links are thin. A packet takes the delay of both ends."""

    delay_ms: float = 0.0
    loss: float = 0.0
    mbit_per_s: float = 0.0
    """Of a host that nobody else gives a rate, as the syncer's; 0: no limit."""


class NamespaceLinks:
    """A `bench_star_rig.Links`. `hosts`: where each process is; several may share a host, and with it its line."""

    def __init__(self, namespaces: Namespaces, hosts: Mapping[str, int], lines: Mapping[int, Line]) -> None:
        self._namespaces = namespaces
        self._hosts = dict(hosts)
        self._lines = dict(lines)
        self._pids: dict[str, int] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Of all that were started, by name."""
        return dict(self._pids)

    def open_door(self, name: str) -> tuple[str, ...]:
        return self._namespaces.flags(self._hosts[name])

    def inside(self, name: str) -> AbstractContextManager[None]:
        return self._namespaces.inside(self._hosts[name])

    def link(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        host = self._hosts[name]
        self._namespaces.shape(host, delay_ms=self._lines[host].delay_ms)

    def thin(self, name: str, site: Site) -> None:
        self._shape(self._hosts[name], site.up_bytes_per_s * 8 / 1e6)
        if self._hosts[SYNCER] != self._hosts[name]:
            self._shape(self._hosts[SYNCER], self._lines[self._hosts[SYNCER]].mbit_per_s)

    def _shape(self, host: int, mbit_per_s: float) -> None:
        line = self._lines[host]
        self._namespaces.shape(host, delay_ms=line.delay_ms, mbit_per_s=mbit_per_s, loss=line.loss)

    def passed(self) -> Passed:
        """By the counters of each host's own device; who was dialed they don't tell, but there is only the syncer."""
        return {(name, SYNCER): device_bytes(pid) for name, pid in self._pids.items() if name != SYNCER}

    def late_s(self) -> float:
        return self._namespaces.late_s()


def device_bytes(pid: int) -> tuple[int, int]:
    """(sent, received) by the host of that process, since it was made."""
    lines = Path(f"/proc/{pid}/net/dev").read_text("ascii").splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith("wan0"))
    return int(fields[9]), int(fields[1])
