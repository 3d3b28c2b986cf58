"""SIGINT and SIGTERM in a process that takes part in a run: leave in good order, and soon.

The first one is told to the owner, who leaves when it can; where the main thread may be busy for seconds with nothing
begun yet (importing, building a model, reading data), it also raises SystemExit there. A second one interrupts the
leaving, but not at once: a Ctrl-C often comes twice, from the terminal and from a parent process that hands it on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

AGAIN_S = 1.0
"""A signal that comes sooner after the first is the same one again."""


class StopSignals:
    """Taken over in the main thread (elsewhere this does nothing) and given back."""

    def __init__(self, on_told: Callable[[str], None] = lambda name: None) -> None:
        self.raises = False
        """Whether the first signal also ends what the main thread is doing."""
        self.told = threading.Event()
        self._on_told = on_told
        self._told_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def take_over(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)

    def give_back(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)
        self._before.clear()

    def __enter__(self) -> StopSignals:
        self.take_over()
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def check(self) -> None:
        """Raises SystemExit if the signal has come."""
        if self.told.is_set():
            raise SystemExit(0)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """While inside, the first signal ends what the main thread is doing."""
        before, self.raises = self.raises, True
        try:
            self.check()
            yield
        finally:
            self.raises = before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.told.is_set():
            if time.monotonic() - self._told_at >= AGAIN_S:
                raise KeyboardInterrupt
            return
        self._told_at = time.monotonic()
        self.told.set()
        self._on_told(signal.Signals(number).name)
        if self.raises:
            raise SystemExit(0)
