"""The way in, for `python -m geo_diloco` and for the `geo-diloco` command alike.

It stands before every import but the standard library's, because importing takes seconds and a Ctrl-C in them is as
good as any other: what takes part in a run leaves with status 0 at every moment, the first included. Once a peer
exists it takes the signals over (`node`).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

TAKES_PART = frozenset({"bootstrap", "start", "join"})
"""Commands that run until told to leave. Of the others, who is interrupted has not done what was asked."""


def main() -> None:
    begin_to_listen(sys.argv[1] if len(sys.argv) > 1 else "")
    try:
        from geo_diloco.cli.app import main as run_command

        run_command()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def begin_to_listen(command: str) -> None:
    """What SIGINT and SIGTERM do until the command takes them over."""
    if command in TAKES_PART:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave_at_once)
        atexit.register(_stop_listening)
    else:
        signal.signal(signal.SIGTERM, _stop)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """There is nothing to leave yet, or nothing any more: no thread, no child, no lock that matters."""
    os._exit(0)


def _stop_listening() -> None:
    """The interpreter's own end would put the system's defaults back: killed by a signal, after all was done."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
