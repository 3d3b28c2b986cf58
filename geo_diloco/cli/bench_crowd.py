"""How a syncer bears a crowd: a founder's process as `start` makes it, and learners with connections of their own.

The founder is one process, the learners are a few (`bench_crowd_learners.py`), all on this machine: what the learners
take of its processors is said beside the figures, because the founder has to do without it. Learners dial from several
loopback addresses, for a syncer lets one address have half of all connections at most.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_usage import cpu_s, resident_bytes
from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.cli.demo_processes import Child, Children
from geo_diloco.errors import ConfigError, GeoDilocoError

LEARNERS_PER_PROCESS = 500
FILES_PER_LEARNER = 4
FILES_BESIDE = 256
JOIN_S = 300.0
LOOK_S = 1.0
IDLE_S = 5.0
"""How long the founder is looked at before anybody joins."""
SETTLE_ROUNDS = 2
"""After everybody has joined: what is measured is a run that goes on, not one that begins."""


def measure_crowd(*, num_learners: int, seconds: float, step_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """One row of `bench syncer`: keys end in their units. Raises ConfigError if there can't be so many."""
    _check_room(num_learners)
    with (
        tempfile.TemporaryDirectory(prefix="geo-diloco-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="geo-diloco-bench-", dir=_memory()) as learners,
        Children(Path(folder)) as children,
    ):
        crowd = _Crowd(children, Path(folder), Path(learners), num_learners, step_s)
        crowd.found()
        say(f"the founder serves at {crowd.url}; {num_learners} learners join it")
        crowd.join(say)
        time.sleep(SETTLE_ROUNDS * crowd.round_s)
        say(f"all are welcome; measuring for {seconds:g} s")
        begin = crowd.look()
        time.sleep(seconds)
        end = crowd.look()
        children.check()
        crowd.end()
        return crowd.row(begin, end)


def _check_room(num_learners: int) -> None:
    """Both a syncer and the system have their limits. A syncer lets connections have half of its files, and a learner
    has one for its link and one for its bulk."""
    from geo_diloco.runtime.door import allow_files
    from geo_diloco.runtime.http import LINKS_MAX

    if num_learners > LINKS_MAX:
        raise ConfigError(f"--learners {num_learners}: a syncer has {LINKS_MAX} control connections at most")
    wanted = FILES_PER_LEARNER * num_learners + FILES_BESIDE
    if (files := allow_files(wanted)) < wanted:
        raise ConfigError(
            f"--learners {num_learners}: {num_learners} learners take {wanted} open files in one process, {files} are "
            "allowed; raise the hard limit (ulimit -Hn) or ask for fewer"
        )


@dataclass(frozen=True)
class _Look:
    """At all processes, at one moment."""

    at: float
    status: dict[str, Any]
    syncer_cpu_s: float
    rss: int
    drivers: list[dict[str, Any]]

    def total(self, name: str) -> float:
        return float(sum(each[name] for each in self.drivers))


class _Crowd:
    def __init__(self, children: Children, folder: Path, learners: Path, num_learners: int, step_s: float) -> None:
        self._children = children
        self._folder = folder
        self._learners = learners
        self._num_learners = num_learners
        self._step_s = step_s
        self._drivers: list[Child] = []
        self.url = ""

    def found(self) -> None:
        run = _manifest(self._num_learners)
        self.round_s = self._step_s * run.sync.interval_steps / run.sync.num_fragments
        (self._folder / "run.toml").write_text(toml_from_manifest(run), encoding="utf-8")
        where = ("--run-dir", str(self._folder / "founder"), "--host", "127.0.0.1", "--port", "0", "--json")
        self._founder = self._children.start("founder", "start", str(self._folder / "run.toml"), *where)
        info = self._children.wait_ready(self._founder, "invite", limit_s=JOIN_S)
        self.url, self._run = f"http://{info['http']}", str(info["run"])
        time.sleep(IDLE_S)
        self._rss_alone = resident_bytes(self._founder.pid)

    def join(self, say: Callable[[str], None]) -> None:
        for number, begin in enumerate(range(0, self._num_learners, LEARNERS_PER_PROCESS)):
            most = min(LEARNERS_PER_PROCESS, self._num_learners - begin)
            where = ("--from", f"127.0.0.{2 + number}", "--folder", str(self._learners / str(number)))
            how = ("--learners", str(most), "--step-s", str(self._step_s))
            name = f"learners-{number}"
            child = self._children.start(name, "bench", "crowd-learners", self.url, self._run, *where, *how)
            self._drivers.append(child)
        deadline = time.monotonic() + JOIN_S
        while (welcome := int(sum(each["welcome"] for each in self._states()))) < self._num_learners:
            self._children.check()
            if time.monotonic() > deadline:
                raise GeoDilocoError(
                    f"only {welcome} of {self._num_learners} learners were let in within {JOIN_S:.0f} s"
                )
            time.sleep(LOOK_S)

    def _states(self) -> list[dict[str, Any]]:
        return [state for child in self._drivers if (state := _newest(child)) is not None]

    def look(self) -> _Look:
        status = _status(self.url)
        pid = self._founder.pid
        return _Look(time.monotonic(), status, cpu_s(pid), resident_bytes(pid), self._states())

    def end(self) -> None:
        self._children.end([*self._drivers], signal.SIGKILL, limit_s=5.0)
        self._children.end([self._founder], signal.SIGTERM, limit_s=60.0)

    def row(self, begin: _Look, end: _Look) -> dict[str, Any]:
        from geo_diloco.protocol.messages import Commit
        from geo_diloco.runtime.chain import read_entries
        from geo_diloco.runtime.lag import at_most, counts_between

        elapsed_s = end.at - begin.at
        learner_s = elapsed_s * self._num_learners
        late, busy = (
            counts_between(begin.status["loop"][name], end.status["loop"][name]) for name in ("late_ms", "busy_ms")
        )
        entries = read_entries(self._folder / "founder" / "chain.jsonl")
        between = range(begin.status["seq"] + 1, end.status["seq"] + 1)
        commits = [each for each in entries if isinstance(each, Commit) and each.header.seq in between]
        taking_part = [len(each.participants) for each in commits]
        return {
            "learners": self._num_learners,
            "welcome": int(end.total("welcome")),
            "links_ended": int(end.total("ended") - begin.total("ended")),
            "step_s": self._step_s,
            "lag_ms_p50": at_most(late, 0.5),
            "lag_ms_p99": at_most(late, 0.99),
            "lag_ms_max": at_most(late, 1.0),
            "own_lag_ms_p50": at_most(busy, 0.5),
            "own_lag_ms_p99": at_most(busy, 0.99),
            "own_lag_ms_max": at_most(busy, 1.0),
            "kb_per_learner": (end.rss - self._rss_alone) / 1e3 / self._num_learners,
            "syncer_cpu": (end.syncer_cpu_s - begin.syncer_cpu_s) / elapsed_s,
            "driver_cpu": (end.total("cpu_s") - begin.total("cpu_s")) / elapsed_s,
            "load": os.getloadavg()[0],
            "rounds_per_min": len(commits) / elapsed_s * 60,
            "participants": sum(taking_part) / max(1, len(taking_part)),
            "uploads_per_s": (end.total("uploads") - begin.total("uploads")) / elapsed_s,
            "bytes_to_learner_s": (end.total("control_in") - begin.total("control_in")) / learner_s,
            "bytes_from_learner_s": (end.total("control_out") - begin.total("control_out")) / learner_s,
            "driver_late_s": max(each["late_s"] for each in end.drivers),
        }


def _memory() -> str | None:
    """Where learners keep their blobs: each has a disk of its own, which must not be the syncer's."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _manifest(num_learners: int) -> Any:
    """The demo's rules with a model that is hardly there."""
    from geo_diloco.manifest import StopSpec
    from geo_diloco.training.presets import demo_manifest

    demo = demo_manifest()
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return replace(
        demo,
        name="crowd",
        model=replace(demo.model, config={**(demo.model.config or {}), **small, "num_key_value_heads": 2}),
        data=replace(demo.data, num_shares=max(demo.data.num_shares, num_learners)),
        stop=StopSpec(minutes=600.0),
        evaluation=replace(demo.evaluation, every_seconds=0.0),
    )


def _status(url: str) -> dict[str, Any]:
    import asyncio

    from geo_diloco.runtime.session import fetch_status, make_session

    async def ask() -> dict[str, Any]:
        async with make_session() as session:
            return await fetch_status(session, url)

    return asyncio.run(ask())


def _newest(child: Child) -> dict[str, Any] | None:
    """What a process of learners said last of itself."""
    for line in reversed(child.output().split(b"\n")[:-1]):
        if line.startswith(b'{"crowd"'):
            return dict(json.loads(line)["crowd"])
    return None
