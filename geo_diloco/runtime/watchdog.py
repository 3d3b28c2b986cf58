"""Starts p2pd and ends it when its owner is gone.

The DHT's network side is a foreign program, p2pd. It ends by itself when its owner's connection closes, but only if one
was open, if no fork of the owner (a data loader, say) holds it open too, and if p2pd is not stuck; else it would keep
its port and its memory for ever. So p2pd is never our own child. It is the child of this small process, whose standard
input is a pipe that the owner holds open: however the owner ends, the kernel closes the pipe, and this process ends
p2pd and removes the folder with its socket. A fork may hold the pipe as well, so the owner's process id is watched
too. In turn, if this process is killed, Linux kills p2pd. The standby beside a learner (`node/companion.py`) is held
the same way, without a folder.

It runs as a bare script, `python -I -S watchdog.py OWNER FOLDER SECONDS COMMAND...`, to start in milliseconds and stay
small: the standard library only, nothing of this package, no module that pulls in others. It gets a session of its own,
so that Ctrl-C in a terminal reaches the owner alone, which then says goodbye through a p2pd that still lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

CHECK_S = 0.5
"""How often the owner is looked for, if its pipe stays open."""


def main(arguments: list[str]) -> int:
    owner, folder, term_s, command = int(arguments[0]), arguments[1], float(arguments[2]), arguments[3:]
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = start(command)
    try:
        return watch(owner, child, woken, term_s)
    finally:
        remove_folder(folder)


def start(command: list[str]) -> int:
    """Forks and becomes `command`; returns its process id."""
    watchdog = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent(watchdog)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"can't start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def die_with_parent(parent: int) -> None:
    """Linux: the kernel kills this process when its parent dies. Elsewhere only the owner's next start sweeps."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def watch(owner: int, child: int, woken: int, term_s: float) -> int:
    """Returns p2pd's exit status once it has ended, by itself or because the owner is gone or asked for it. It may take
    so many seconds to end by itself before it is killed."""
    while True:
        ready, _, _ = select.select([0, woken], [], [], CHECK_S)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) & 0xFF
        if 0 in ready and not os.read(0, 4096):
            break
        if woken in ready and any(n != signal.SIGCHLD for n in os.read(woken, 4096)):
            break
        if os.getppid() != owner:
            break
    os.kill(child, signal.SIGTERM)
    until = time.monotonic() + term_s
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            return 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0


def remove_folder(folder: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
