"""A learner that measures its own `Learner.step`: how long each call took, and what in it could have waited.

A call *waits* if its thread enters the operating system for a file or a blocking socket, sleeps, or waits to be woken
by another thread. That is counted, not guessed from durations: inside `step` a profile function sees every C function
that is called, at a cost which is part of the durations here. Critical sections of a few instructions (`with lock`)
are not counted, and neither is the wake-up byte to the node thread, which goes to a socket that never blocks.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

WAITING_HOMES = frozenset({"io", "_io", "posix", "nt", "select", "socket", "_socket", "ssl", "_ssl", "fcntl", "mmap"})
"""Modules of whose functions, and of whose objects' methods, any may wait for network or disk."""
WAITING_NAMES = frozenset({"time.sleep", "_thread.acquire", "_queue.get"})
WAITLESS_NAMES = frozenset({"io.text_encoding", "posix.fspath"})
_IS_OWNED = threading.Condition._is_owned.__code__  # type: ignore[attr-defined]
"""Tries a lock and does not wait for it."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """One call of `Learner.step`."""

    began_ms: int
    """By the clock that tapes go by."""
    took_us: int
    cpu_us: int
    """Of that, what its thread computed; the rest it was not let run, or waited."""
    waits: tuple[str, ...]
    """What it entered that can wait, by name."""


def train_measured(*, invite: str, run_dir: Path, record: Path) -> None:
    """Train in the run until told to leave; a line in `record` for each call of `step`."""
    import torch

    import geo_diloco
    from geo_diloco.runtime.driver import now_ms
    from geo_diloco.training.loop import inner_step, make_optimizer, training_loss

    torch.set_num_threads(1)
    watch = WaitWatch()
    with geo_diloco.join(invite, run_dir=run_dir, threads=1, device="cpu") as peer, record.open("a") as lines:
        inner = peer.manifest.inner
        model = peer.build_model()
        optimizer = make_optimizer(model, inner)
        learner = peer.learner(model, optimizer)
        for batch in peer.data():
            loss = training_loss(model, batch)
            inner_step(model, optimizer, loss, gradient_clip=inner.gradient_clip)
            began_ms, began, cpu_began = int(now_ms()), time.perf_counter(), time.thread_time()
            with watch:
                is_over = learner.step(tokens=batch.numel(), loss=loss)
            took_us, cpu_us = round((time.perf_counter() - began) * 1e6), round((time.thread_time() - cpu_began) * 1e6)
            lines.write(json.dumps([began_ms, took_us, cpu_us, watch.entered]) + "\n")
            if is_over:
                break


def read_steps(record: Path) -> list[StepCall]:
    """What `train_measured` wrote. A last line without an end is left out."""
    whole = record.read_text("utf-8").splitlines(keepends=True)
    return [
        StepCall(began_ms, took_us, cpu_us, tuple(waits))
        for began_ms, took_us, cpu_us, waits in (json.loads(line) for line in whole if line.endswith("\n"))
    ]


class WaitWatch:
    """While inside, notes what the thread enters that can wait. For one thread; may be used again."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def __enter__(self) -> None:
        self.entered = []
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and frame.f_code is not _IS_OWNED and (name := waiting_name(called)):
            self.entered.append(name)


def waiting_name(called: Any) -> str:
    """The name of a C function that can wait, as `module.function`; empty for one that can't."""
    owner = getattr(called, "__self__", None)
    home = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
    name = f"{home}.{called.__name__}"
    if (home not in WAITING_HOMES or name in WAITLESS_NAMES) and name not in WAITING_NAMES:
        return ""
    if isinstance(owner, socket.socket) and owner.gettimeout() == 0.0:
        return ""
    return name
