"""The pump keeps its promises: tape first, effects in order, the core never entered twice, nothing lost in silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from geo_diloco import tape
from geo_diloco.errors import LocalProtocolError
from geo_diloco.manifest import BootId, Digest, MonoMs, PeerId, RunId, RunRules
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import CloseConnection, Effect, FetchEntries, Note
from geo_diloco.protocol.events import Connected, Disconnected, Event, StopRequested, Tick
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.runtime.driver import Driver, Worker

A, B = PeerId("a" * 64), PeerId("b" * 64)


class ScriptedCore:
    """Answers events by a script and remembers what it heard."""

    def __init__(self, answer: Callable[[Event], list[Effect]]) -> None:
        self.heard: list[tuple[Event, MonoMs]] = []
        self.deadline: MonoMs | None = None
        self._answer = answer
        self._is_inside = False

    def handle(self, event: Event, now: MonoMs) -> list[Effect]:
        assert not self._is_inside
        self._is_inside = True
        self.heard.append((event, now))
        effects = self._answer(event)
        self._is_inside = False
        return effects


def make(core: ScriptedCore, **more: Any) -> Driver:
    return Driver(core, log=EventLog(), **more)  # type: ignore[arg-type]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_effects_are_carried_out_in_order_and_an_event_fed_from_an_effect_comes_after_them() -> None:
    async def scenario() -> None:
        def answer(event: Event) -> list[Effect]:
            return [CloseConnection(A, "1"), CloseConnection(B, "2")] if isinstance(event, Connected) else []

        core, done = ScriptedCore(answer), []
        driver = make(core)

        def close(effect: CloseConnection) -> None:
            done.append((effect.peer, len(core.heard)))
            driver.feed(Disconnected(effect.peer, effect.reason))

        driver.interpret({CloseConnection: close})
        driver.feed(Connected(A))
        assert done == [(A, 1), (B, 1)]
        assert [event for event, _ in core.heard] == [Connected(A), Disconnected(A, "1"), Disconnected(B, "2")]

    run(scenario())


def test_an_event_is_on_the_tape_before_the_core_hears_it(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"

    def recorded() -> list[str]:
        return [json.loads(line).get("type", "") for line in path.read_text().splitlines()]

    async def scenario() -> None:
        def answer(event: Event) -> list[Effect]:
            assert recorded()[-1] == type(event).__name__
            return [Note("topic", "text")]

        boot = tape.Boot(
            peer=A,
            boot=BootId("0" * 16),
            role="learner",
            run=RunId("1" * 40),
            layout_digest=Digest("d" * 64),
            hello=HelloFacts(),
            seat=Seat(),
            rules=RunRules(founder=B),
        )
        driver = make(ScriptedCore(answer), tape=tape.TapeWriter(path, boot))
        driver.feed(Connected(A))
        driver.feed(StopRequested("end"))
        assert driver.failure is None

    run(scenario())
    (part,) = tape.read_tape(path)
    assert [each.event for each in part.events] == [Connected(A), StopRequested("end")]
    assert all(each.effects == tape.effects_hash([Note("topic", "text")]) for each in part.events)


def test_a_deadline_that_has_come_is_answered_by_one_tick() -> None:
    async def scenario() -> None:
        core = ScriptedCore(lambda event: [])
        ticked = asyncio.Event()

        def answer(event: Event) -> list[Effect]:
            if isinstance(event, Tick):
                core.deadline = None
                ticked.set()
            else:
                core.deadline = MonoMs(1000)
            return []

        core._answer = answer
        driver = make(core, now=lambda: MonoMs(5000))
        driver.feed(Connected(A))
        await asyncio.wait_for(ticked.wait(), 5)
        await asyncio.sleep(0)
        assert [event for event, _ in core.heard] == [Connected(A), Tick()]

    run(scenario())


def test_a_bug_in_the_core_ends_the_driver_and_is_raised_to_whoever_waits() -> None:
    async def scenario() -> None:
        def answer(event: Event) -> list[Effect]:
            raise AssertionError("books contradict themselves")

        core = ScriptedCore(answer)
        driver = make(core)
        driver.feed(Connected(A))
        driver.feed(Connected(B))
        assert len(core.heard) == 1
        with pytest.raises(AssertionError, match="books"):
            await driver.wait_closed()

    run(scenario())


def test_a_bug_in_a_job_ends_the_driver_and_cancels_the_others() -> None:
    async def scenario() -> None:
        driver = make(ScriptedCore(lambda event: []))
        cancelled = asyncio.Event()

        async def endless() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async def broken() -> None:
            raise ValueError("job")

        driver.start(endless(), name="endless")
        driver.start(broken(), name="broken")
        with pytest.raises(ValueError, match="job"):
            await driver.wait_closed()
        await driver.close()
        assert cancelled.is_set()

    run(scenario())


def test_after_closing_nothing_reaches_the_core_and_no_job_begins() -> None:
    async def scenario() -> None:
        core = ScriptedCore(lambda event: [])
        driver = make(core)
        await driver.close()
        began = []

        async def job() -> None:
            began.append(True)

        driver.feed(Connected(A))
        driver.start(job(), name="late")
        await asyncio.sleep(0)
        await driver.wait_closed()
        assert core.heard == [] and began == []

    run(scenario())


def test_two_interpreters_for_one_effect_are_a_mistake() -> None:
    async def scenario() -> None:
        driver = make(ScriptedCore(lambda event: []))
        driver.interpret({FetchEntries: lambda effect: None})
        with pytest.raises(LocalProtocolError, match="FetchEntries"):
            driver.interpret({FetchEntries: lambda effect: None})

    run(scenario())


def test_events_from_another_thread_come_in_its_order() -> None:
    async def scenario() -> None:
        core = ScriptedCore(lambda event: [])
        driver = make(core)

        def feed() -> None:
            for number in range(50):
                driver.feed_from_thread(StopRequested(str(number)))

        await asyncio.to_thread(feed)
        await asyncio.sleep(0)
        assert [event for event, _ in core.heard] == [StopRequested(str(number)) for number in range(50)]

    run(scenario())


def test_the_worker_does_what_it_is_asked_for_in_order() -> None:
    async def scenario() -> None:
        worker, done = Worker("test"), []
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(worker.call(done.append, number))
        worker.close()
        assert done == list(range(20))

    run(scenario())
