from __future__ import annotations

import asyncio
import time

import pytest

from geo_diloco.runtime.lag import EVERY_S, LagProbe, at_most, counts_between


def between(before: dict[str, dict[str, int]], probe: LagProbe, name: str) -> dict[float, int]:
    return counts_between(before[name], probe.status()[name])


def test_a_stand_still_counts_for_all_who_would_have_asked_in_it() -> None:
    probe = LagProbe()
    for _ in range(95):
        probe.note(0.001, 0.001)
    probe.note(5 * EVERY_S, 0.0)
    late = counts_between({}, probe.status()["late_ms"])
    assert sum(late.values()) == 95 + 5, "one that stood still for five of its naps is asked five times"
    assert at_most(late, 0.5) == pytest.approx(1.0, rel=0.13)
    assert at_most(late, 0.96) == pytest.approx(20.0, rel=0.13)
    assert at_most(late, 1.0) == pytest.approx(100.0, rel=0.13)
    busy = counts_between({}, probe.status()["busy_ms"])
    assert at_most(busy, 1.0) == pytest.approx(1.0, rel=0.13), "it had no processor, and is not to blame for it"


def test_what_counts_is_what_came_between_two_looks() -> None:
    probe = LagProbe()
    probe.note(3.0, 3.0)
    before = probe.status()
    probe.note(0.010, 0.004)
    assert list(between(before, probe, "late_ms").values()) == [1]
    assert at_most(between(before, probe, "late_ms"), 1.0) == pytest.approx(10.0, rel=0.13)
    assert at_most(between(before, probe, "busy_ms"), 1.0) == pytest.approx(4.0, rel=0.13)
    assert at_most({}, 0.99) == 0.0


def test_a_step_that_takes_long_is_seen_in_the_loop_itself() -> None:
    async def run() -> LagProbe:
        probe = LagProbe()
        task = asyncio.create_task(probe.run())
        await asyncio.sleep(0)
        until = time.process_time() + 0.08
        while time.process_time() < until:
            pass
        async with asyncio.timeout(10):
            while not probe.status()["late_ms"]:  # noqa: ASYNC110 - it is the loop itself that is looked at
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return probe

    busy = counts_between({}, asyncio.run(run()).status()["busy_ms"])
    assert at_most(busy, 1.0) >= 50.0
