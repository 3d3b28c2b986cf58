"""The processes of a run whose compute is simulated: a syncer, learners that keep their pace, each behind a link of its
own, and mirrors.

It stands apart because two benchmarks have it: `bench star` asks what thin links do to a run, `bench fleet` whether
`simulate goodput --fleet` is right. Learners do everything but compute (`bench_star_learner.py`); the links are made by
whatever has `Links`.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from signal import SIGTERM
from typing import Protocol

from geo_diloco.cli.bench_star_figures import Reading, read_moments
from geo_diloco.cli.bench_star_plan import RigPlan, Site
from geo_diloco.cli.bench_usage import cpu_s, machine_busy_s
from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.cli.demo_processes import Child, Children
from geo_diloco.cli.star_links import Passed
from geo_diloco.errors import GeoDilocoError

SYNCER = "syncer"
BEGIN_S = 180.0
"""For all learners to be at work."""
_LEAVE_S = 30.0
_LOOK_S = 0.2


class Links(Protocol):
    """What joins the processes: `star_links.Star`, or namespaces in tests."""

    def open_door(self, name: str) -> tuple[str, ...]:
        """Flags for a peer that the others can dial."""

    def inside(self, name: str) -> AbstractContextManager[None]:
        """A process that is started inside is that peer's."""

    def link(self, name: str, pid: int) -> None:
        """That process was started. Its link is wide yet."""

    def thin(self, name: str, site: Site) -> None:
        """From now on its link is that of the site."""

    def passed(self) -> Passed:
        """So far."""

    def late_s(self) -> float:
        """By how much they were late at most since this was asked last; 0 if that is not known."""


class Rig:
    """The processes of one run."""

    def __init__(self, plan: RigPlan, folder: Path, links: Links, children: Children) -> None:
        self._plan = plan
        self._folder = folder
        self._links = links
        self._children = children
        self._running: dict[str, Child] = {}
        self._invite = ""

    def begin(self) -> None:
        """Until all learners train. Joining is not what is measured, so a link is thin from its learner's first step
        on: early enough for the first upload, whose rate would else be remembered for minutes."""
        source = self._folder / "run.toml"
        source.write_text(toml_from_manifest(self._plan.run), encoding="utf-8")
        carrying = ("--congestion", self._plan.congestion)
        syncer = self._start(SYNCER, "start", str(source), *self._at(SYNCER), *carrying, "--json")
        self._invite = str(self._children.wait_ready(syncer, "invite")["invite"])
        for number in range(1, self._plan.mirrors + 1):
            name = f"mirror-{number}"
            self._start(name, "join", self._invite, "--no-train", *self._at(name), *carrying)
        for name, site in self._learners().items():
            self._start_learner(name, site)
        deadline = time.monotonic() + BEGIN_S
        joining = dict(self._learners())
        while joining:
            for name in [name for name in joining if read_moments(self._record(name))]:
                self._links.thin(name, joining.pop(name))
            if joining and time.monotonic() > deadline:
                late = next(iter(joining))
                raise GeoDilocoError(f"{late} did not get to work in {BEGIN_S:.0f} s; see the logs with --keep")
            self.wait(_LOOK_S)

    def _at(self, name: str) -> tuple[str, ...]:
        return *self._links.open_door(name), "--run-dir", str(self._folder / name)

    def _start(self, name: str, *command: str) -> Child:
        with self._links.inside(name):
            child = self._running[name] = self._children.start(name, *command)
        self._links.link(name, child.pid)
        return child

    def _start_learner(self, name: str, site: Site) -> None:
        where = ("--run-dir", str(self._folder / name), "--record", str(self._record(name)))
        how = ("--pace", str(site.pace_ms), "--spread", str(site.spread), "--congestion", self._plan.congestion)
        self._start(name, "bench", "star-learner", self._invite, *where, *how)

    def _learners(self) -> dict[str, Site]:
        return {f"learner-{number}": site for number, site in enumerate(self._plan.sites, start=1)}

    def _record(self, name: str) -> Path:
        return self._folder / f"{name}.moments"

    def wait(self, seconds: float) -> None:
        """Raises GeoDilocoError if a process ends meanwhile."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._children.check()
            time.sleep(min(_LOOK_S, left_s))

    def read(self) -> Reading:
        used = {name: cpu_s(child.pid) for name, child in self._running.items()}
        return Reading(
            at_ms=_now_ms(),
            passed=self._links.passed(),
            cpu_s=used | {"relays": cpu_s(os.getpid())},
            late_s=self._links.late_s(),
            machine_busy_s=machine_busy_s(),
        )

    def end(self) -> None:
        """Learners leave first, the syncer last."""
        groups = [list(self._learners()), [name for name in self._running if name.startswith("mirror-")], [SYNCER]]
        for names in groups:
            self._children.end([self._running[name] for name in names], SIGTERM, limit_s=_LEAVE_S)


def _now_ms() -> int:
    from geo_diloco.runtime.driver import now_ms

    return int(now_ms())
