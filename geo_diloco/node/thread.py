"""The node's own thread: an asyncio loop beside a training loop that stays its owner's.

The caller's thread starts it, asks it things and ends it; every wait on this side is in short stretches, so that a
Ctrl-C is heard at once.

Both threads share one interpreter lock, and a thread that has it keeps it for a whole switch interval while another
waits. Python's 5 ms is a fifth of the inner step of a small model, lost each time this thread wakes in the midst of
one; so the interval is shorter, for the whole process, while a node thread runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from geo_diloco.errors import SlowError, UserError

T = TypeVar("T")

LOOK_S = 0.1

SWITCH_S = 0.0005
"""Switch interval of the interpreter beside a training loop; `geo-diloco bench overhead` shows what it is worth."""


class NodeThread:
    """A running event loop in a daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._switch_before = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_S, self._switch_before))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Raises UserError if it has ended: the caller is a script that holds on to what it closed."""
        if self.loop.is_closed():
            coroutine.close()
            raise UserError("this peer has left the run; join or found it again for another one")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
        doing: str = "answer",
    ) -> T:
        """Run it on the loop and wait for it here; `check` may raise, which cancels it. SlowError if time is up, which
        says what the peer is `doing` so long."""
        future = self.submit(coroutine)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return future.result(LOOK_S)
                except concurrent.futures.TimeoutError:
                    if future.done():  # in this very instant, or the coroutine itself raised it
                        return future.result()
                check()
                if deadline is not None and time.monotonic() > deadline:
                    raise SlowError(
                        f"this peer did not {doing} within {timeout_s:g} s: this machine, or the disk with its folder, "
                        "is very busy"
                    )
        except BaseException:
            future.cancel()
            raise

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the loop. May be called again."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
            sys.setswitchinterval(self._switch_before)
