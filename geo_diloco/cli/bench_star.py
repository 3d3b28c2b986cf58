"""What a run does where links are thin: real processes, each learner behind a link of its own, compute simulated.

A founder and M learners (and mirrors, if wanted) on this machine; `star_links.py` gives each learner its rate and its
round trip, `bench_star_learner.py` has them do everything but compute. After a while, when all take part, a stretch of
the run is watched from outside, and read afterwards from what the processes left on disk (`bench_star_figures.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from typing import Any, Protocol

from geo_diloco.cli.bench_folder import kept_folder
from geo_diloco.cli.bench_star_figures import (
    LearnerSeen,
    Reading,
    Sample,
    Seen,
    read_moments,
    rounds_of,
    star_figures,
)
from geo_diloco.cli.bench_star_plan import NUM_TENSORS, ROW, StarPlan, num_rows_for, star_run
from geo_diloco.cli.bench_usage import cpu_s, machine_busy_s
from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.cli.demo_processes import Child, Children
from geo_diloco.cli.star_links import Passed, Star
from geo_diloco.errors import GeoDilocoError
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.events import DeltaEncoded, Received, Sealed
from geo_diloco.protocol.messages import Commit, Found, Progress
from geo_diloco.protocol.uplink import codec_text
from geo_diloco.tape import TapeBoot, read_tape

SYNCER = "syncer"
BEGIN_S = 180.0
"""For all learners to be at work."""
_LEAVE_S = 30.0
_LOOK_S = 0.2
Say = Callable[[str], None]


class Links(Protocol):
    """What joins the processes: `star_links.Star`, or namespaces in tests."""

    def open_door(self, name: str) -> tuple[str, ...]:
        """Flags for a peer that the others can dial."""

    def inside(self, name: str) -> AbstractContextManager[None]:
        """A process that is started inside is that peer's."""

    def link(self, name: str, pid: int) -> None:
        """That process was started. Its link is wide yet."""

    def thin(self, name: str, bytes_per_s: float) -> None:
        """From now on its link carries so much, each way."""

    def passed(self) -> Passed:
        """So far."""

    def late_s(self) -> float:
        """By how much they were late at most since this was asked last; 0 if that is not known."""


def measure_star(plan: StarPlan, *, keep: Path | None = None, say: Say) -> dict[str, Any]:
    """The keys of `star_figures`; where one learner is slow also those of a run without it. `keep`: a new folder for
    the runs' files, which stay there.

    Raises ConfigError, or GeoDilocoError if a process dies by itself or learners don't get to work.
    """
    star_run(plan)  # what is wrong with it is said before anything is made
    with kept_folder(keep, prefix="geo-diloco-star-") as folder:
        fast_only: dict[str, Any] = {}
        if plan.slow_one > 1.0:
            fast = replace(plan, learners=plan.learners - 1, slow_one=1.0, interval=plan.interval_steps)
            say(f"first without the slow one: {fast.learners} learners")
            with Star(round_trip_s=plan.round_trip_s) as star:
                fast_only = measure_run(fast, folder / "fast-only", star, say)
        with Star(round_trip_s=plan.round_trip_s) as star:
            figures = measure_run(plan, folder / "star", star, say)
    if fast_only:
        figures["fast_only_round_s"] = fast_only["round_s"]
        figures["round_time_ratio"] = figures["round_s"] / fast_only["round_s"]
        figures["fast_only_round_open_s"] = fast_only["round_open_s"]
        figures["fast_only_rows"] = fast_only["rows"]
    return figures


def measure_run(plan: StarPlan, folder: Path, links: Links, say: Say) -> dict[str, Any]:
    """One run, its files in a new folder."""
    folder.mkdir()
    (folder / "run.toml").write_text(toml_from_manifest(star_run(plan)), encoding="utf-8")
    with Children(folder) as children:
        rig = Rig(plan, folder, links, children)
        rig.begin()
        say(f"{plan.learners} learners are at work; {plan.warm_up_s:.0f} s until the watch begins")
        rig.wait(plan.warm_up_s)
        first = rig.read()
        rig.wait(plan.seconds)
        last = rig.read()
        say("watched; ending the run")
        rig.end()
    say("adding up what the tapes say")
    return _head(plan) | star_figures(_seen(plan, folder, first, last))


def _head(plan: StarPlan) -> dict[str, Any]:
    return {
        "learners": plan.learners,
        "parameters": num_rows_for(plan.parameters) * ROW * NUM_TENSORS,
        "fragments": plan.fragments,
        "interval_steps": plan.interval_steps,
        "pace_ms": plan.pace_ms,
        "quorum": plan.quorum,
        "link_mbit": plan.bytes_per_s * 8 / 1e6,
        "link_rtt_ms": plan.round_trip_s * 1000,
        "mirrors": plan.mirrors,
    }


class Rig:
    """The processes of one run."""

    def __init__(self, plan: StarPlan, folder: Path, links: Links, children: Children) -> None:
        self._plan = plan
        self._folder = folder
        self._links = links
        self._children = children
        self._running: dict[str, Child] = {}
        self._invite = ""

    def begin(self) -> None:
        """Until all learners train. Joining is not what is measured, so links are thin from then on only."""
        source = str(self._folder / "run.toml")
        carrying = ("--congestion", self._plan.congestion)
        syncer = self._start(SYNCER, "start", source, *self._at(SYNCER), *carrying, "--json")
        self._invite = str(self._children.wait_ready(syncer, "invite")["invite"])
        for number in range(1, self._plan.mirrors + 1):
            name = f"mirror-{number}"
            self._start(name, "join", self._invite, "--no-train", *self._at(name), *carrying)
        for number in range(1, self._plan.learners + 1):
            self._start_learner(number)
        deadline = time.monotonic() + BEGIN_S
        while missing := [name for name in self._learners() if not read_moments(self._record(name))]:
            if time.monotonic() > deadline:
                raise GeoDilocoError(f"{missing[0]} did not get to work in {BEGIN_S:.0f} s; see the logs with --keep")
            self.wait(_LOOK_S)
        for number, name in enumerate(self._learners(), start=1):
            self._links.thin(name, self._plan.link_bytes_per_s(number))

    def _at(self, name: str) -> tuple[str, ...]:
        return *self._links.open_door(name), "--run-dir", str(self._folder / name)

    def _start(self, name: str, *command: str) -> Child:
        with self._links.inside(name):
            child = self._running[name] = self._children.start(name, *command)
        self._links.link(name, child.pid)
        return child

    def _start_learner(self, number: int) -> None:
        name, plan = f"learner-{number}", self._plan
        where = ("--run-dir", str(self._folder / name), "--record", str(self._record(name)))
        how = ("--pace", str(plan.pace_ms), "--congestion", plan.congestion)
        self._start(name, "bench", "star-learner", self._invite, *where, *how)

    def _learners(self) -> list[str]:
        return [f"learner-{number}" for number in range(1, self._plan.learners + 1)]

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
        groups = [self._learners(), [name for name in self._running if name.startswith("mirror-")], [SYNCER]]
        for names in groups:
            self._children.end([self._running[name] for name in names], SIGTERM, limit_s=_LEAVE_S)


# ---- what they left on disk


def _seen(plan: StarPlan, folder: Path, first: Reading, last: Reading) -> Seen:
    """Raises RunDirError or TapeError if it can't be read."""
    from geo_diloco.runtime.chain import read_entries

    entries = read_entries(folder / SYNCER / "chain.jsonl")
    found = entries[0]
    assert isinstance(found, Found)
    sealed: dict[tuple[int, int], int] = {}
    told: dict[PeerId, Progress] = {}
    for record in (record for boot in read_tape(folder / SYNCER / "tape.jsonl") for record in boot.events):
        event = record.event
        if isinstance(event, Sealed):
            sealed[event.term, event.seq] = record.at
        elif isinstance(event, Received) and isinstance(event.message, Progress) and record.at <= last.at_ms:
            told[event.sender] = event.message
    return Seen(
        learners=[learner_seen(plan, folder, number, told) for number in range(1, plan.learners + 1)],
        rounds=rounds_of([entry for entry in entries if isinstance(entry, Commit)], sealed),
        num_elements=found.num_elements,
        pace_ms=plan.pace_ms,
        first=first,
        last=last,
        num_processors=os.cpu_count() or 1,
        mirrors=[f"mirror-{number}" for number in range(1, plan.mirrors + 1)],
    )


def learner_seen(plan: StarPlan, folder: Path, number: int, told: Mapping[PeerId, Progress]) -> LearnerSeen:
    """From its tape and its own record. `told`: the last Progress that the syncer heard of each."""
    name = f"learner-{number}"
    boots: list[TapeBoot] = list(read_tape(folder / name / "tape.jsonl"))
    progress = told.get(boots[0].boot.peer)
    uplink = "" if progress is None else progress.uplink
    usual = codec_text(star_run(plan).codec_up)
    return LearnerSeen(
        name=name,
        peer=boots[0].boot.peer,
        bytes_per_s=plan.link_bytes_per_s(number),
        moments=read_moments(folder / f"{name}.moments"),
        samples=[
            Sample(at_ms=record.at, fragment=record.event.fragment, digest=record.event.blob.digest)
            for boot in boots
            for record in boot.events
            if isinstance(record.event, DeltaEncoded)
        ],
        turn=1 if progress is None else progress.turn,
        codec=uplink.partition(": ")[0] if plan.choices else usual,
        uplink=uplink,
    )


def _now_ms() -> int:
    from geo_diloco.runtime.driver import now_ms

    return int(now_ms())
