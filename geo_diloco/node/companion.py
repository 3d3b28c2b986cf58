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
from geo_diloco.observability import EventLog
from geo_diloco.runtime import watchdog
from geo_diloco.runtime.invite import Invite

TERM_S = 2.5
"""How long it may take to leave before it is killed."""
SETTINGS_OF_BOTH = ("bootstraps", "data_dir", "log_level")
SETTINGS_OF_STANDBY = ("host", "port", "announce", "dht_host", "dht_port", "keep_contributions", "elector")
"""What a peer says about being reached is about its standby; the learner dials out only, as any other."""


def learners_own(config: PeerConfig) -> PeerConfig:
    """The settings that are left to a learner which has a standby: of one machine only one disk can be elector, and
    that is the standby's."""
    settings = config.model_dump(exclude_unset=True, exclude=set(SETTINGS_OF_STANDBY))
    return PeerConfig.model_validate(settings | {"elector": False})


def standby_command(invite: Invite, folder: Path, config: PeerConfig) -> list[str]:
    """As a person would start it."""
    command = [sys.executable, "-m", "geo_diloco", "join", invite.to_string(), "--no-train", "--run-dir", str(folder)]
    for name in (*SETTINGS_OF_STANDBY, *SETTINGS_OF_BOTH):
        if name not in config.model_fields_set:
            continue
        value = getattr(config, name)
        flag = f"--{name.replace('_', '-')}"
        if name == "bootstraps":
            command += [part for address in value for part in ("--bootstrap", address)]
        elif name == "elector":
            command.append("--elector" if value else "--no-elector")
        elif isinstance(value, bool):
            command += [flag] if value else []
        elif value is not None:
            command += [flag, str(value)]
    return [*command, "--threads", "1"]


class Companion:
    """A running standby. For the thread that made it, which must live as long; `tell_to_leave` is for signals, too."""

    def __init__(self, invite: Invite, folder: Path, config: PeerConfig, log: EventLog) -> None:
        self._log = log
        self._may_end = False
        command = standby_command(invite, folder, config)
        folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GEO_DILOCO_")}
        above = [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), str(os.getpid()), "", str(TERM_S)]
        with (folder / "console.log").open("ab") as console:
            self._process = subprocess.Popen(
                [*above, *command],
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
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
