"""How the bytes of one blob are spread over ways and streams, and what becomes of runs that break off.

There is one queue of missing bytes; each way (to one address) takes runs of them with as many streams as help there.
What a run that breaks off has not moved goes back, for whoever is next. A way that stalls, fails or lies is out
of this transfer and rests from others while there is somebody else; while it is the only one it is tried again for as
long as that moves anything. Near the end whoever has nothing to do takes over from whoever is far slower. The transfer
fails when no way is left. What a way really does (HTTP, up or down) is `upload.py`'s and `fetch.py`'s matter.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from geo_diloco.errors import RemoteProtocolError, TransferError
from geo_diloco.runtime.routes import Routes
from geo_diloco.runtime.runs import NotYetError, Run, Seat, UnaskedError, Way
from geo_diloco.runtime.session import StallError, TransferRefused
from geo_diloco.runtime.spans import Missing, Span
from geo_diloco.runtime.streams import STREAMS_MAX, Climb, window_s

FAILURES_MAX = 5
"""Tries in a row without progress over the only way there is."""
FAILURES_AMONG_MAX = 2
"""The same, while there are others."""
ENDING_MAX = 2
"""So many times the streams that are at work may be under way, those included that wait for their last answer."""
BACKOFF_S = 0.1
POLL_S_MAX = 1.0
"""Between two questions for what isn't there yet."""
IDLE_S = 0.5
"""Who has nothing to do looks again that often."""
RESERVE_SHARE = 0.25
"""Others are of use as long as they carry that share of what the reserve did the last time."""
SLOWER = 3.0
"""Whose rest takes that many times as long as it would take us, and `TAKEN_OVER_S` more, is relieved of it."""
TAKEN_OVER_S = 0.5
SILENT_S = 3.0
"""Over whose way nothing has come for so long, and four round trips, while another has nothing to do, is out: it may be
cut off, which would show by itself only when a connection is given up."""


class _OverError(Exception):
    """The transfer ended while an answer was waited for."""


class Flow:
    """One transfer's. For the event loop's thread."""

    def __init__(
        self,
        missing: Missing,
        *,
        routes: Routes,
        streams_max: int = STREAMS_MAX,
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """`streams_max`: of each way, where that is limited from here. `on_sent` is told when nothing is left to be
        written."""
        self._on_sent = on_sent
        self._missing = missing
        self._routes = routes
        self._streams_max = streams_max
        self._seats: list[Seat] = []
        self._is_known = False
        """Somebody has said what there is to do."""
        self._pulse = asyncio.Event()
        self.resumed = 0

    @property
    def is_done(self) -> bool:
        return self._is_known and self._missing.is_over

    def moved(self, way: Way, size: int, span: Span) -> None:
        """So many bytes of a span went over the wire. Towards its end the next one is begun, or the stream would stand
        idle for a round trip: what we send goes out as soon as all of this one has, what we ask for needs a while."""
        seat = next(each for each in self._seats if each.way is way)
        seat.moved += size
        seat.waits_since = None
        run = self._heard(seat, span)
        if run is None:
            return
        run.moved += size
        in_flight = run.rate() * seat.route.round_trip_s * way.is_towards_us
        if not run.is_ending and run.size - run.moved <= min(in_flight, run.size / 2):
            run.is_ending = True
            if seat.nudge is not None and not seat.nudge.done():
                seat.nudge.set_result(None)
        if run.moved >= run.size and not self._missing.num_bytes and self._is_all_written():
            self._on_sent()

    def _is_all_written(self) -> bool:
        return all(run.moved >= run.size for seat in self._seats for run in seat.runs.values())

    def held_back(self, way: Way, span: Span) -> None:
        """What came waits for its turn on this machine: that is no silence."""
        self._heard(next(each for each in self._seats if each.way is way), span)

    def _heard(self, seat: Seat, span: Span) -> Run | None:
        run = next((each for each in seat.runs.values() if each.span is span), None)
        if run is not None:
            run.heard_at = time.monotonic()
        return run

    async def run(self, ways: Sequence[tuple[Way, float]]) -> dict[str, TransferError]:
        """Move all that is missing. A way with a delay is used when the others were of little use for so long.

        Returns the failures by address, none if everything is where it should be.
        """
        for way, delay_s in ways:
            route = self._routes.to(way.url)
            self._seats.append(Seat(way, route, delay_s, Climb(min(route.streams, route.streams_max()))))
        tasks = [asyncio.create_task(self._use(seat), name=f"way {seat.way.url}") for seat in self._seats]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.is_done:
            return {}
        return {seat.way.url: seat.failure for seat in self._seats if seat.failure is not None}

    # ---- one way

    async def _use(self, seat: Seat) -> None:
        await self._wait_turn(seat)
        seat.began_at = time.monotonic()
        seat.route.transfers += 1
        try:
            while not self.is_done:
                if seat.must_open and not await self._open(seat):
                    continue
                if not self._start_runs(seat):
                    await self._idle(seat)
                    continue
                await self._watch(seat)
        except TransferError as exc:
            self._leave(seat, exc)
        except RemoteProtocolError as exc:
            self._leave(seat, TransferRefused(str(exc)))
        except _OverError:
            pass
        finally:
            seat.route.transfers -= 1
            await self._call_off(seat)
        if seat.waits_since is not None and not seat.moved:
            seat.route.waited_in_vain += 1
        if not seat.is_out:
            elapsed_s = time.monotonic() - seat.began_at
            self._routes.worked(seat.way.url, seat.moved, elapsed_s, streams=seat.climb.settled or seat.climb.streams)

    async def _wait_turn(self, seat: Seat) -> None:
        """Whoever has a delay is a reserve: not needed while the others are of use."""
        begin, moved = time.monotonic(), 0
        while not self.is_done and any(each is not seat and not each.is_out for each in self._seats):
            if (left_s := begin + seat.delay_s - time.monotonic()) > 0.0:
                await self._wait(left_s)
                continue
            so_far = sum(each.moved for each in self._seats)
            if so_far <= moved or (so_far - moved) / seat.delay_s < RESERVE_SHARE * seat.route.bytes_per_s:
                return
            begin, moved = time.monotonic(), so_far

    def _leave(self, seat: Seat, failure: TransferError) -> None:
        seat.is_out, seat.failure = True, failure
        if not isinstance(failure, NotYetError):
            self._routes.failed(seat.way.url)
        self._tell()

    async def _open(self, seat: Seat) -> bool:
        """Ask the other side how things stand. False if that has to be tried again."""
        now = time.monotonic()
        if now < seat.retry_at:
            await self._watch(seat, until=seat.retry_at)
            return False
        try:
            seat.having = await self._before_the_end(seat.way.open())
        except _OverError:
            if time.monotonic() - now > SILENT_S:
                self._routes.failed(seat.way.url)
            raise
        except NotYetError as exc:
            self._wait_for_it(seat, exc)
            return False
        except (TransferRefused, RemoteProtocolError):
            raise
        except TransferError as exc:
            self._strike(seat, exc)
            return False
        seat.must_open = False
        self._is_known = True
        if self.is_done:
            self._tell()
        return True

    async def _before_the_end(self, asking: Coroutine[Any, Any, Collection[int] | None]) -> Collection[int] | None:
        """Nobody waits for an answer that is of no use any more: _OverError."""
        task = asyncio.ensure_future(asking)
        try:
            while not task.done() and not self.is_done:
                pulse = asyncio.ensure_future(self._pulse.wait())
                await asyncio.wait({task, pulse}, return_when=asyncio.FIRST_COMPLETED)
                pulse.cancel()
            if not task.done():
                raise _OverError
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _wait_for_it(self, seat: Seat, exc: NotYetError) -> None:
        """Raises it when that has lasted too long."""
        now = time.monotonic()
        if seat.waits_since is None:
            seat.waits_since, seat.polls = now, 0
        if now - seat.waits_since >= seat.way.patience_s:
            raise exc
        seat.must_open = True
        seat.retry_at = now + min(POLL_S_MAX, BACKOFF_S * 2**seat.polls) * random.uniform(0.5, 1.5)
        seat.polls += 1

    def _strike(self, seat: Seat, exc: TransferError) -> None:
        """A try broke off. Several at the same time are one: a link that is cut breaks them all. Raises `exc` when
        that was one too many."""
        now = time.monotonic()
        seat.must_open = True
        if seat.way.confirmed > seat.progress:
            seat.progress, seat.failures, seat.retry_at = seat.way.confirmed, 0, 0.0
        if now < seat.retry_at:
            return
        self.resumed += 1
        seat.failures += 1
        is_alone = not self._has_others(seat)
        if seat.failures >= (FAILURES_MAX if is_alone else FAILURES_AMONG_MAX):
            raise exc
        if isinstance(exc, StallError) and not is_alone:
            raise exc
        seat.retry_at = now + BACKOFF_S * 2**seat.failures * random.uniform(0.5, 1.5)

    def _has_others(self, seat: Seat) -> bool:
        return any(each is not seat and not each.is_out and each.waits_since is None for each in self._seats)

    # ---- its streams

    def _start_runs(self, seat: Seat) -> bool:
        """As many as are of use; whether there are any."""
        most = min(self._streams_max, seat.route.streams_max())
        streams = min(seat.climb.streams, most)
        now = time.monotonic()
        rate = max(seat.route.bytes_per_s, seat.moved / max(now - seat.began_at, 1.0)) / streams
        in_flight = int(rate * seat.route.round_trip_s)
        while (at_work := sum(not run.is_ending for run in seat.runs.values())) < streams and not seat.must_open:
            if len(seat.runs) >= ENDING_MAX * streams:
                break
            span = self._missing.take(streams, seat.having, bytes_per_s=rate, at_least=in_flight)
            if span is None:
                break
            task = asyncio.create_task(seat.way.move(span), name=f"bytes {span.begin} to {span.end}")
            seat.runs[task] = Run(span, span.num_bytes, now, now)
        if at_work < streams:
            seat.is_window_full = False
            self._take_over(seat, rate)
        return bool(seat.runs)

    async def _watch(self, seat: Seat, *, until: float | None = None) -> None:
        """Until one of its streams ends, a window does, or `until`."""
        now = time.monotonic()
        end = seat.window_at + window_s(seat.route.round_trip_s)
        if now >= end:
            self._judge(seat, now)
            end = now + window_s(seat.route.round_trip_s)
        limit_s = max(0.0, (end if until is None else until) - now)
        if not self._missing.num_bytes:
            limit_s = min(limit_s, TAKEN_OVER_S / 2)
        if not seat.runs:
            return await self._wait(limit_s)
        nudge = seat.nudge = asyncio.get_running_loop().create_future()
        await asyncio.wait({*seat.runs, nudge}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in seat.runs if task.done()]:
            await self._ended(seat, task)

    def _judge(self, seat: Seat, now: float) -> None:
        """How many streams the next window has."""
        if seat.is_window_full:
            under_way = sum(run.size - run.moved for each in self._seats for run in each.runs.values())
            left = self._missing.num_bytes + under_way
            seat.climb = seat.climb.judged(seat.moved - seat.window_moved, now - seat.window_at, left=left)
        seat.window_at, seat.window_moved, seat.is_window_full = now, seat.moved, True

    async def _ended(self, seat: Seat, task: asyncio.Task[None]) -> None:
        run = seat.runs.pop(task)
        failure = None if task.cancelled() else task.exception()
        if failure is None and not task.cancelled():
            self._missing.finished(run.span)
            if self.is_done:
                self._tell()
            return
        await self._give_back(seat, run)
        if run.is_silent:
            raise StallError(f"{seat.way.url} gave nothing for {SILENT_S:g} s")
        if failure is None:
            seat.must_open = True  # taken over; what has come of it is asked before anything is sent again
            return
        if isinstance(failure, UnaskedError):
            seat.must_open = True
        elif isinstance(failure, NotYetError):
            self._wait_for_it(seat, failure)
        elif isinstance(failure, TransferError) and not isinstance(failure, TransferRefused):
            self._strike(seat, failure)
        else:
            raise failure

    async def _give_back(self, seat: Seat, run: Run) -> None:
        report = await seat.way.left()
        self._missing.give_back(run.span)
        if report is not None:
            self._missing.know(report)
        self._tell()

    async def _call_off(self, seat: Seat) -> None:
        """What is still under way this way goes back to the others."""
        for task in seat.runs:
            task.cancel()
        if seat.runs:
            await asyncio.wait(seat.runs)
        for task, run in seat.runs.items():
            if task.cancelled() or task.exception() is not None:
                await self._give_back(seat, run)
            else:
                self._missing.finished(run.span)
        seat.runs.clear()
        self._tell()

    # ---- with nothing to do

    async def _idle(self, seat: Seat) -> None:
        """Others move the rest, or this way hasn't got what is missing: it may have it soon."""
        await self._wait(IDLE_S)
        if self._missing.num_bytes and not self._missing.has_any_of(seat.having):
            seat.must_open = True

    def _take_over(self, seat: Seat, own_rate: float) -> None:
        """Cut off a run that all would wait for, because it is silent or so slow: it goes on elsewhere from where it
        was. What was in flight there is lost, but that is little, just because it is slow."""
        now = time.monotonic()
        if self._missing.has_any_of(seat.having):
            return
        slowest: tuple[float, asyncio.Task[None], Run] | None = None
        for other in self._seats:
            for task, run in other.runs.items():
                if run.is_taken_over or not (seat.having is None or set(run.span.pieces()) <= set(seat.having)):
                    continue
                if other is not seat and now - run.heard_at > SILENT_S + 4 * other.route.round_trip_s:
                    run.is_taken_over = run.is_silent = True
                    task.cancel()
                    return
                left = run.size - run.moved
                left_s = run.left_s(now)
                margin_s = max(TAKEN_OVER_S, 4 * seat.route.round_trip_s)
                is_too_slow = own_rate >= 1.0 and left_s > SLOWER * left / own_rate + margin_s
                if is_too_slow and now - run.began_at > 2 * margin_s and (slowest is None or left_s > slowest[0]):
                    slowest = (left_s, task, run)
        if slowest is not None:
            slowest[2].is_taken_over = True
            slowest[1].cancel()

    def _tell(self) -> None:
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def _wait(self, limit_s: float) -> None:
        """Until something changed for others, or so long."""
        pulse = self._pulse
        try:
            async with asyncio.timeout(limit_s):
                await pulse.wait()
        except TimeoutError:
            return
