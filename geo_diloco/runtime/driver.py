"""The pump between the core and the world: one event in, its effects out, in order, on one event loop.

The core decides and never waits; whatever takes time (a transfer, a merge, an fsync) is done by an *interpreter*,
which answers by feeding another event. The driver owns only what both have in common: the tape (written before the
core sees the event), the one deadline, the jobs in flight, and the worker: the thread that the state's tensors belong
to, and a few beside it. An
interpreter may feed at once, from inside an effect: events are queued and handled one after another, so the core is
never entered twice.

What ends a driver: `close`, or a bug (an exception out of the core or of a job), which `wait_closed` raises again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from geo_diloco.errors import LocalProtocolError
from geo_diloco.manifest import MonoMs
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import (
    Effect,
    Note,
)
from geo_diloco.protocol.events import (
    Event,
    Tick,
)
from geo_diloco.protocol.peer import Peer
from geo_diloco.tape import TapeWriter

P = ParamSpec("P")
T = TypeVar("T")

Interpreter = Callable[[Any], None]
"""Takes one effect of its type and returns at once."""

ASIDE_MAX = 4
"""More threads than that have no more to do, and each has its scratch buffers."""
JOBS_MAX = 65_536
"""More than this at once means that something is fed faster than it can ever be done."""


def now_ms() -> MonoMs:
    """A monotonic clock that counts the time a machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return MonoMs(time.clock_gettime_ns(clock) // 1_000_000)


class Worker:
    """One thread for everything that changes the state's tensors, first in, first out: what is asked for in order
    happens in order. Beside it a few (`ASIDE_MAX`, and no more than there are processors) for what changes none and
    may happen in any order, so that it waits for no merge and no merge for it."""

    def __init__(self, name: str) -> None:
        self.num_aside = min(ASIDE_MAX, num_processors())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._aside = ThreadPoolExecutor(self.num_aside, thread_name_prefix=f"{name}-aside")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def begin(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """As `call`, but in line from now on, whatever becomes of the caller: who calls later finds it done."""
        queued = self._pool.submit(lambda: function(*args, **kwargs))
        return asyncio.shield(asyncio.wrap_future(queued))

    async def call_aside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In no order with anything else. Of the state it may read what is never written to."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Lets the calls in progress end; those that wait are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False, cancel_futures=True)


def num_processors() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Driver:
    """Owns a core. Every method is for the event loop's thread; `feed_from_thread` is for all others."""

    def __init__(
        self,
        core: Peer,
        *,
        log: EventLog,
        tape: TapeWriter | None = None,
        now: Callable[[], MonoMs] = now_ms,
    ) -> None:
        self.core = core
        self.now = now
        self._log = log
        self._tape = tape
        self._interpreters: dict[type, Interpreter] = {Note: self._note}
        self._events: deque[Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._jobs: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self._failure: BaseException | None = None
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def interpret(self, interpreters: Mapping[type, Interpreter]) -> None:
        """Say who carries out which effects. Two for one effect is a mistake."""
        for kind, interpreter in interpreters.items():
            if kind in self._interpreters:
                raise LocalProtocolError(f"two interpreters for {kind.__name__}")
            self._interpreters[kind] = interpreter

    # ---- events

    def feed(self, event: Event) -> None:
        """Give the core an event and carry out what it asks for. Nothing happens any more once closed."""
        if self._closed.is_set():
            return
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events and not self._closed.is_set():
                self._handle(self._events.popleft())
        except Exception as exc:
            self.fail(exc)
        finally:
            self._handling = False
        self._set_timer()

    def feed_from_thread(self, event: Event) -> None:
        """As `feed`, from another thread; in the order of the calls of one thread. Harmless after the loop's end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.feed, event)

    def _handle(self, event: Event) -> None:
        now = self.now()
        if self._tape is not None:
            self._tape.event(event, now)
        effects = self.core.handle(event, now)
        if effects and self._tape is not None:
            self._tape.effects(effects)
        for effect in effects:
            self._do(effect)
        self._wake()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Until it holds; looked at after every event. `holds` only looks."""
        if holds():
            return
        waiting = holds, self._loop.create_future()
        self._waiting.append(waiting)
        try:
            await waiting[1]
        finally:
            self._waiting.remove(waiting)

    def _wake(self) -> None:
        for holds, future in self._waiting:
            if not future.done() and holds():
                future.set_result(None)

    def _do(self, effect: Effect) -> None:
        interpreter = self._interpreters.get(type(effect))
        if interpreter is None:
            # An effect for the tape only (TokensMerged, TokensDropped), or one of another role.
            return
        interpreter(effect)

    def _note(self, note: Note) -> None:
        """After the end peers leave as they like: an election that comes to nothing for it is no news."""
        is_over = note.topic == "election" and self.core.ledger.finished is not None
        self._log.note(note.topic, note.text, level="debug" if is_over else note.level)

    # ---- time

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.deadline
        if deadline is None or self._closed.is_set():
            return
        wait_s = max(0, deadline - self.now()) / 1000
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    # ---- jobs

    def start(self, job: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run a coroutine as part of this driver: cancelled when it closes, and a failure of it is the driver's."""
        if self._closed.is_set() or len(self._jobs) >= JOBS_MAX:
            job.close()
            if not self._closed.is_set():
                self.fail(LocalProtocolError(f"{JOBS_MAX} jobs in flight, the next is {name}"))
            return
        task = self._loop.create_task(job, name=name)
        self._jobs.add(task)
        task.add_done_callback(self._job_done)

    def _job_done(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.fail(failure)

    def fail(self, failure: BaseException) -> None:
        """A bug of ours, found while something is carried out: this driver is over."""
        if self._failure is None:
            self._failure = failure
            self._log.failure("driver", failure)
        self._shut()

    # ---- the end

    def _shut(self) -> None:
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in list(self._jobs):
            task.cancel()

    async def wait_closed(self) -> None:
        """Until `close` was called or a bug ended it; raises what ended it."""
        await self._closed.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Cancel what is in flight and let go of the tape. May be called again."""
        self._shut()
        if self._jobs:
            await asyncio.wait(list(self._jobs))
        if self._tape is not None:
            self._tape.close()

    @property
    def failure(self) -> BaseException | None:
        return self._failure
