"""That no other process on this machine is the same peer, from a copy of its folder.

A folder's lock tells nothing of its copies, and two processes with one key are one peer to everybody else: each would
vote and sign with what it alone knows, and a founder that is its own only elector would found two futures of its run.
So whoever goes on the air says so on this machine, under its peer id, by a name that the kernel gives to one process
only and takes back when that ends. Where there are no such names (they are Linux's, one space for each network
namespace), and on other machines, a double is noticed by what it says to others (`runtime/README.md`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from pathlib import Path

from geo_diloco.errors import RunDirError
from geo_diloco.manifest import PeerId

_ASK_S = 1.0
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group."""

_taken: set[socket.socket] = set()


class Presence:
    """This process is that peer, until `end` or its own end."""

    def __init__(self, peer: PeerId, root: Path) -> None:
        """Raises RunDirError if another process of this user is that peer already; `root` is our folder."""
        self._name: socket.socket | None = None
        if sys.platform != "linux":
            return
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0geo-diloco {peer}")
            name.listen(1)
        except OSError as exc:
            name.close()
            if exc.errno == errno.EADDRINUSE:
                _refuse_double(peer, root)
            return
        _taken.add(name)
        self._name = name

    def end(self) -> None:
        """May be called again."""
        if self._name is not None:
            _taken.discard(self._name)
            self._name.close()
            self._name = None


def _refuse_double(peer: PeerId, root: Path) -> None:
    """A name that another user's process took proves nothing: anybody here can take any."""
    process, user = _holder_of(peer)
    if user not in (-1, os.getuid()):
        return
    who = f"process {process}" if process > 0 else "another process"
    raise RunDirError(
        f"run directory {root} and the folder of {who} are copies of each other, and that one is in the run with their "
        "identity; end it first, or give this peer a folder of its own"
    )


def _holder_of(peer: PeerId) -> tuple[int, int]:
    """Process and user of who has the name; -1 if they can't be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(_ASK_S)
        asking.connect(f"\0geo-diloco {peer}")
        process, user, _ = _CREDENTIALS.unpack(
            asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return process, user
    return -1, -1


def _let_go_in_fork() -> None:
    """A data loader's process, say, may outlive us and is not this peer."""
    for name in _taken:
        name.close()
    _taken.clear()


os.register_at_fork(after_in_child=_let_go_in_fork)
