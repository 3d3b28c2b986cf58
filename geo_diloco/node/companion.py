"""The standby beside a learner: a peer that trains and can be reached gives the run another peer that can be syncer.

It is a process of its own, the same as `join --no-train --announce` would be, with its own identity and folder below
the learner's: merging must not take the interpreter's lock from training, and whoever serves must not stand still
while a script does. It lives as long as the learner: `runtime/watchdog.py` holds it, so that it ends within seconds
also if the learner is killed, and leaves in good order (handing over, if it is syncer) when the learner leaves.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from geo_diloco.config import PeerConfig
from geo_diloco.config.peer import ENVIRONMENT_PREFIX
from geo_diloco.config.quantities import RATE_MIN
from geo_diloco.observability import EventLog
from geo_diloco.runtime import watchdog
from geo_diloco.runtime.invite import Invite

TERM_S = 2.5
"""How long it may take to leave before it is killed."""
LEARNERS_ALONE = {"run_dir", "device", "dtype", "threads", "save_every_s", "pace_ms"}
"""About training. All else that was said is the standby's too: what comes to the settings one day must not be lost."""
SETTINGS_OF_BOTH = {"bootstraps", "contacts", "data_dir", "log_level", "congestion", "max_up", "max_down"}
"""What is about neither training nor being reached. A limit on the line is one for both together: each has half."""
RATES = ("max_up", "max_down")


def learners_own(config: PeerConfig) -> PeerConfig:
    """The settings that are left to a learner which has a standby: it dials out only, as any other, and of one machine
    only one disk can be elector, and that is the standby's."""
    settings = config.model_dump(exclude_unset=True, include=LEARNERS_ALONE | SETTINGS_OF_BOTH)
    return PeerConfig.model_validate(settings | _halves(config) | {"elector": False})


def standbys_own(config: PeerConfig) -> dict[str, str]:
    """The standby's settings, as its environment."""
    settings = config.model_dump(exclude_unset=True, exclude=LEARNERS_ALONE) | _halves(config) | {"threads": 1}
    return {ENVIRONMENT_PREFIX + name.upper(): _text(name, value) for name, value in settings.items() if value != ""}


def _halves(config: PeerConfig) -> dict[str, int]:
    return {name: max(RATE_MIN, rate // 2) for name in RATES if (rate := getattr(config, name))}


def _text(name: str, value: object) -> str:
    """As a person would write it."""
    if name in RATES:
        return f"{value}B/s" if value else ""
    if name == "quota":
        return f"{value}B/day" if value else ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


class Companion:
    """A running standby. For the thread that made it, which must live as long; `tell_to_leave` is for signals, too."""

    def __init__(self, invite: Invite, folder: Path, config: PeerConfig, log: EventLog) -> None:
        self._log = log
        self._may_end = False
        command = [
            sys.executable,
            "-m",
            "geo_diloco",
            "join",
            invite.to_string(),
            "--no-train",
            "--run-dir",
            str(folder),
        ]
        folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        above = [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), str(os.getpid()), "", str(TERM_S)]
        with (folder / "console.log").open("ab") as console:
            self._process = subprocess.Popen(
                [*above, *command, "--run-dir", str(folder)],
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment | standbys_own(config),
                start_new_session=True,
            )
        log.note("standby", f"beside this learner a standby can take over, at {config.announce}; its files: {folder}")
        threading.Thread(target=self._wait, name="standby", daemon=True).start()

    def _wait(self) -> None:
        """Training goes on without it, but not silently."""
        status = self._process.wait()
        if not self._may_end:
            text = f"the standby beside this learner ended (exit status {status}): see console.log in its folder"
            self._log.note("standby", text, level="warning")

    def tell_to_leave(self) -> None:
        """It does so while we leave."""
        self._may_end = True
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.close()

    def close(self) -> None:
        """Until it is gone, which is soon."""
        self.tell_to_leave()
        try:
            self._process.wait(TERM_S + 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel takes the standby along
            self._process.wait()
