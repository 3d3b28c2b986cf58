"""How long a run is without commits when its syncer goes, and whether its learners notice: real processes, one machine.

A founder, two standbys and two learners, all five electors, at the manifest's default lease. Whoever serves is killed
(SIGKILL) over and over; once another has committed, the killed one is started again from its own folder, and the next
kill waits until it has caught up and sits on the roster. Then whoever serves is told to hand over, a few times. What is
measured is read afterwards from what the processes left on disk (`bench_gaps.py`).
"""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_folder import kept_folder
from geo_diloco.cli.bench_gaps import Change, failover_figures
from geo_diloco.cli.demo_files import toml_from_manifest
from geo_diloco.cli.demo_processes import Child, Children
from geo_diloco.errors import GeoDilocoError
from geo_diloco.manifest import ElectionSpec, RunManifest, StopSpec

REACHABLE = ("founder", "standby-1", "standby-2")
LEARNERS = ("learner-1", "learner-2")
WAIT_LIMIT_S = 180.0
"""For anything that is waited for; a failover that takes longer fails the benchmark."""
SETTLE_S = (2.0, 3.3, 4.6, 5.9)
"""From the moment all are well until the next kill, in turn: kills fall on different phases of rounds and leases."""
BEHIND_MAX = 4
"""Entries that one who is well may be behind."""
_LOOK_S = 0.1
_LEAVE_S = 20.0


def measure_failover(*, num_kills: int, num_handovers: int, keep: Path | None, say: Callable[[str], None]) -> Any:
    """One object with the keys of `failover_figures`. `keep`: a new folder for the run's files, which stay there.

    Raises GeoDilocoError if a process dies by itself or anything waited for does not come.
    """
    with kept_folder(keep, prefix="geo-diloco-bench-") as folder:
        (folder / "run.toml").write_text(toml_from_manifest(bench_run()), encoding="utf-8")
        with Children(folder) as children:
            rig = Rig(folder, children)
            rig.begin()
            kills = []
            for number in range(num_kills):
                rig.settle(number)
                kill = rig.kill_syncer()
                kills.append(kill)
                say(f"kill {number + 1}/{num_kills}: {kill.who}, commits seen again after {kill.seen_s:.1f} s")
            handovers = []
            for number in range(num_handovers):
                rig.settle(number)
                handovers.append(rig.hand_over())
                say(f"hand-over {number + 1}/{num_handovers}: by {handovers[-1].who}")
            rig.settle(0)
            rig.end()
        say("adding up what the tapes say")
        return failover_figures(folder, reachable=REACHABLE, learners=LEARNERS, kills=kills, handovers=handovers)


def bench_run() -> RunManifest:
    """The demo's run without an end, with the default election; five peers of one machine may be its electors."""
    from geo_diloco.training.presets import demo_manifest

    return replace(demo_manifest(), stop=StopSpec(minutes=600.0), election=ElectionSpec(one_machine=True))


class Rig:
    """The processes of one benchmark, and what their status pages say."""

    def __init__(self, folder: Path, children: Children) -> None:
        self._folder = folder
        self._children = children
        self._running: dict[str, Child] = {}
        self._invite = ""

    def begin(self) -> None:
        self._start("founder")
        self._invite = str(self._children.wait_ready(self._running["founder"], "invite")["invite"])
        for name in (*REACHABLE[1:], *LEARNERS):
            self._start(name)

    def _start(self, name: str) -> None:
        run_dir = str(self._folder / name)
        here = ("--host", "127.0.0.1", "--port", "0", "--run-dir", run_dir)
        if name in LEARNERS:
            record = str(self._folder / f"{name}.steps")
            command: tuple[str, ...] = (
                "bench",
                "failover-learner",
                self._invite,
                "--run-dir",
                run_dir,
                "--record",
                record,
            )
        elif name != "founder":
            command = ("join", self._invite, "--no-train", "--announce", "127.0.0.1", *here)
        elif self._invite:
            command = ("start", run_dir)
        else:
            command = ("start", str(self._folder / "run.toml"), *here, "--json")
        self._running[name] = self._children.start(name, *command)

    # ---- what happens to them

    def settle(self, number: int) -> None:
        """Until all is well, and a while."""
        self._wait(lambda: not self.not_well(), self.not_well)
        time.sleep(SETTLE_S[number % len(SETTLE_S)])

    def kill_syncer(self) -> Change:
        """SIGKILL to whoever serves, and start it again once the others have committed."""
        name, status = self._serving()
        change = Change(who=name, term=status["term"], at_ms=_now_ms())
        self._children.kill(self._running[name])
        seen_s = self._wait_committing(beside=name, beyond=status["commits"])
        self._start(name)
        return replace(change, seen_s=seen_s)

    def hand_over(self) -> Change:
        """Have whoever serves hand over to whom it thinks best."""
        from geo_diloco.node import hand_over

        name, status = self._serving()
        change = Change(who=name, term=status["term"], at_ms=_now_ms())
        hand_over(self._folder / name)
        return replace(change, seen_s=self._wait_committing(beside=name, beyond=status["commits"]))

    def end(self) -> None:
        """Learners leave first, then those who follow, the syncer last: all hold the same chain by then."""
        killed = self._children.end([self._running[name] for name in LEARNERS], signal.SIGTERM, limit_s=_LEAVE_S)
        self._wait(self._hold_the_same, lambda: "that all hold the same")
        serving, _ = self._serving()
        for name in sorted(REACHABLE, key=lambda each: each == serving):
            killed += self._children.end([self._running[name]], signal.SIGTERM, limit_s=_LEAVE_S)
        if killed:
            raise GeoDilocoError(f"{killed[0].name} did not leave within {_LEAVE_S:.0f} s; its log is {killed[0].log}")

    # ---- what they say

    def status(self, name: str) -> dict[str, Any]:
        """`GET /v1/status` of a reachable peer; empty if it does not answer."""
        try:
            port = json.loads((self._folder / name / "ports.json").read_bytes())["http"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status", timeout=5.0) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError, KeyError):
            return {}

    def not_well(self) -> str:
        """What is amiss yet: all follow the one who serves, have caught up, and have a seat; empty if nothing is."""
        said = {name: self.status(name) for name in REACHABLE}
        serving = [name for name in REACHABLE if said[name].get("role") == "syncer"]
        if len(serving) != 1:
            return f"{len(serving)} say that they serve"
        status = said[serving[0]]
        roster = status["election"]["roster"]
        if len(roster) != len(REACHABLE) + len(LEARNERS):
            return f"{len(roster)} electors: {status['election']['roster_plan']}"
        for name in REACHABLE:
            if name == serving[0]:
                continue
            if (said[name].get("election") or {}).get("follows") != status["peer"]:
                return f"{name} does not follow {serving[0]}"
            if said[name]["seq"] < status["seq"] - BEHIND_MAX:
                return f"{name} is {status['seq'] - said[name]['seq']} entries behind"
        connected = sum(learner["connected"] for learner in status["learners"])
        return "" if connected == len(LEARNERS) else f"{connected} learners are connected"

    def _hold_the_same(self) -> bool:
        return len({str(self.status(name).get("versions")) for name in REACHABLE}) == 1

    def _serving(self) -> tuple[str, dict[str, Any]]:
        """Whoever serves the highest term, and its status."""
        claims = [(name, status) for name in REACHABLE if (status := self.status(name)).get("role") == "syncer"]
        if not claims:
            raise GeoDilocoError("nobody serves")
        return max(claims, key=lambda claim: claim[1]["term"])

    def _wait_committing(self, *, beside: str, beyond: int) -> float:
        """Until another one serves and has durable commits beyond so many; after how many seconds that was seen."""
        began = time.monotonic()

        def is_committing() -> bool:
            others = [self.status(name) for name in REACHABLE if name != beside]
            return any(each.get("role") == "syncer" and each["commits"] > beyond for each in others)

        self._wait(is_committing, lambda: f"another than {beside} to commit")
        return time.monotonic() - began

    def _wait(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not done():
            self._children.check()
            if time.monotonic() > deadline:
                raise GeoDilocoError(f"waited {WAIT_LIMIT_S:.0f} s in vain; what is amiss: {what()}")
            time.sleep(_LOOK_S)


def _now_ms() -> int:
    from geo_diloco.runtime.driver import now_ms

    return int(now_ms())
