"""The order of things in a demo: start, wait until ready, watch, end.

Every wait has a bound, and while it waits the demo looks after all its children: one that ends before its time ends
the demo, by name and with the end of its log.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from geo_diloco.cli.demo import DemoOptions, Interruption
from geo_diloco.cli.demo_files import DemoFiles, demo_run, toml_from_manifest
from geo_diloco.cli.demo_processes import Child, ChildFailed, Children
from geo_diloco.cli.demo_status import RunStatus, StatusPoller
from geo_diloco.cli.demo_view import DemoView, Moment

_FRAME_S = 0.25
_LEAVE_S = 45.0
"""Bound on each stage of ending: learners once the run is finished, then the founder, then the bootstrap."""
_INTERRUPTED_LEAVE_S = 8.0
_JOIN_S = 180.0
"""Bound on the time until some learner trains."""
_FINISH_S = 90.0
"""How long after its time the run may take to be finished: the last rounds, the last measurement."""


class Director:
    """One demo from start to end. `run` once; then `last_status` and `elapsed_s` are those of the end."""

    def __init__(
        self,
        options: DemoOptions,
        files: DemoFiles,
        children: Children,
        view: DemoView,
        interruption: Interruption,
    ) -> None:
        self.last_status: RunStatus | None = None
        self._options = options
        self._files = files
        self._children = children
        self._view = view
        self._interruption = interruption
        self._began_at = time.monotonic()
        self._poller: StatusPoller | None = None
        self._invite = ""
        self._bootstrap: Child | None = None
        self._founder: Child | None = None
        self._learners: dict[int, Child] = {}
        """The latest start of each, by number."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    def run(self) -> None:
        """Raises ChildFailed. Being interrupted is no error: the children are asked to leave, then it returns."""
        try:
            maddr = self._start_bootstrap()
            self._poller = StatusPoller(self._start_founder(maddr))
            with self._poller:
                for number in range(1, self._options.num_learners + 1):
                    self.start_learner(number)
                self._watch(self._poller)
                self._poller.poll()
            self._look("ending the founder and the bootstrap")
            self._end_finished()
        except KeyboardInterrupt:
            self._end_interrupted()

    # ---- starting ------------------------------------------------------------------------------------------------

    def start_learner(self, number: int) -> None:
        flags = ("--run-dir", str(self._files.learner(number)), "--threads", "1", "--device", "cpu")
        self._learners[number] = self._children.start(
            f"learner-{number}", "join", self._invite, *flags, ends_by_itself=True
        )

    def kill_learner(self, number: int) -> None:
        self._children.kill(self._learners[number])

    def _start_bootstrap(self) -> str:
        where = ("--host", "127.0.0.1", "--port", "0", "--state-dir", str(self._files.bootstrap))
        self._bootstrap = self._children.start("bootstrap", "bootstrap", *where, "--json")
        self._look("starting the bootstrap")
        self._write_manifest()  # takes seconds of imports, as the bootstrap does
        ready = self._wait_ready(self._bootstrap, "maddrs", "starting the bootstrap")
        return str(ready["maddrs"][0])

    def _write_manifest(self) -> None:
        from geo_diloco.training.presets import demo_manifest

        run = demo_run(demo_manifest(), minutes=self._options.minutes, num_learners=self._options.num_learners)
        self._files.manifest.write_text(toml_from_manifest(run), encoding="utf-8")

    def _start_founder(self, maddr: str) -> str:
        where = ("--run-dir", str(self._files.root), "--host", "127.0.0.1", "--port", "0", "--bootstrap", maddr)
        self._founder = self._children.start("founder", "start", str(self._files.manifest), *where, "--json")
        ready = self._wait_ready(self._founder, "invite", "founding the run")
        self._invite = str(ready["invite"])
        return str(ready["http"])

    def _wait_ready(self, child: Child, key: str, phase: str) -> dict[str, Any]:
        return self._children.wait_ready(child, key, meanwhile=lambda: self._look(phase))

    # ---- watching ------------------------------------------------------------------------------------------------

    def _look(self, phase: str) -> None:
        """Draw what is known now."""
        poller = self._poller
        if poller is not None and poller.latest is not None:
            self.last_status = poller.latest
        self._view.show(
            Moment(
                phase=phase,
                elapsed_s=self.elapsed_s,
                minutes=self._options.minutes,
                num_learners=self._options.num_learners,
                status=self.last_status,
                failure=poller.failure if poller is not None else "",
            )
        )

    def _watch(self, poller: StatusPoller) -> None:
        """Until every learner has left because the run is finished."""
        stages = _Stages(minutes=self._options.minutes)
        chaos = _Chaos(self, self._options.num_learners, self._view) if self._options.chaos else None
        while True:
            now = time.monotonic()
            stages.see(self.last_status, now)
            self._look(stages.phase)
            self._children.check()
            if chaos is not None:
                chaos.look(self.last_status, now)
            away = [learner for learner in self._learners.values() if learner.status is not None]
            if len(away) == len(self._learners) and not (chaos is not None and chaos.is_restarting):
                break
            self._check_overdue(stages, now)
            if self._interruption.asked.wait(_FRAME_S):
                raise KeyboardInterrupt
        status = poller.poll()
        if status is None or not status.finished:
            raise ChildFailed("and all other learners left, but the run is not finished", child=away[0])

    def _check_overdue(self, stages: _Stages, now: float) -> None:
        assert self._founder is not None
        overdue = stages.overdue(now)
        if not overdue:
            return
        if stages.finished_at is None:
            raise ChildFailed(overdue, child=self._founder)
        raise ChildFailed(overdue, child=next(c for c in self._learners.values() if c.status is None))

    # ---- ending --------------------------------------------------------------------------------------------------

    def _end_finished(self) -> None:
        assert self._founder is not None and self._bootstrap is not None
        for child in (self._founder, self._bootstrap):
            if self._children.end([child], signal.SIGTERM, limit_s=_LEAVE_S, hurry=self._interruption.again):
                raise ChildFailed(f"did not leave within {_LEAVE_S:.0f} s of SIGTERM", child=child)
            if child.status != 0:
                raise ChildFailed(f"answered SIGTERM with exit status {child.status}, not 0", child=child)

    def _end_interrupted(self) -> None:
        """Learners first, so that they can say goodbye to someone."""
        self._look("interrupted, leaving")
        stages = ([*self._learners.values()], [self._founder], [self._bootstrap])
        for stage in stages:
            children = [child for child in stage if child is not None]
            killed = self._children.end(
                children, signal.SIGINT, limit_s=_INTERRUPTED_LEAVE_S, hurry=self._interruption.again
            )
            for child in killed:
                self._view.say(f"{child.name} did not leave in time and was killed; its log is {child.log}")


class _Stages:
    """How far the run has come, by its status, and what is overdue."""

    def __init__(self, *, minutes: float) -> None:
        self._minutes = minutes
        self._began_at = time.monotonic()
        self._trained_at: float | None = None
        self.finished_at: float | None = None

    def see(self, status: RunStatus | None, now: float) -> None:
        if status is None:
            return
        if self._trained_at is None and any(learner.step for learner in status.learners):
            self._trained_at = now
        if self.finished_at is None and status.finished:
            self.finished_at = now

    @property
    def phase(self) -> str:
        if self.finished_at is not None:
            return "finished, learners are leaving"
        return "training" if self._trained_at is not None else "learners are joining"

    def overdue(self, now: float) -> str:
        """What should have happened by now; empty if nothing."""
        if self.finished_at is not None:
            late = now > self.finished_at + _LEAVE_S
            return f"did not leave within {_LEAVE_S:.0f} s of the run's end" if late else ""
        if now > self._began_at + _JOIN_S + self._minutes * 60 + _FINISH_S:
            return "did not finish the run when its time was over"
        if self._trained_at is None and now > self._began_at + _JOIN_S:
            return f"has seen no learner train within {_JOIN_S:.0f} s"
        return ""


class _Chaos:
    """Kills the last learner midway and starts it again from its own run directory."""

    RESTART_AFTER_S = 2.0

    def __init__(self, director: Director, number: int, view: DemoView) -> None:
        self._director = director
        self._number = number
        self._view = view
        self._killed_at: float | None = None
        self._restarted = False

    @property
    def is_restarting(self) -> bool:
        return self._killed_at is not None and not self._restarted

    def look(self, status: RunStatus | None, now: float) -> None:
        if self._restarted or status is None:
            return
        if self._killed_at is None:
            if status.progress >= 0.5 and not status.finished:
                self._killed_at = now
                self._director.kill_learner(self._number)
                self._view.say(f"chaos: killed learner-{self._number} with SIGKILL")
        elif now >= self._killed_at + self.RESTART_AFTER_S:
            self._restarted = True
            self._director.start_learner(self._number)
            self._view.say(f"chaos: started learner-{self._number} again, from its own disk")
