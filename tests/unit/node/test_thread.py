"""Waiting for a node thread from the thread that owns it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator

import pytest

from geo_diloco.errors import SlowError
from geo_diloco.node.thread import NodeThread


class LateFuture(concurrent.futures.Future[str]):
    """Done in the instant after a wait for it has run out of time."""

    def result(self, timeout: float | None = None) -> str:
        if not self.done():
            self.set_result("done")
            raise TimeoutError
        return super().result(timeout)


@pytest.fixture
def thread() -> Iterator[NodeThread]:
    made = NodeThread("test")
    yield made
    made.stop()


async def answer() -> str:
    await asyncio.sleep(0)
    return "done"


def test_what_is_done_just_after_a_look_is_no_timeout(thread: NodeThread, monkeypatch: pytest.MonkeyPatch) -> None:
    coroutine = answer()
    coroutine.close()
    monkeypatch.setattr(thread, "submit", lambda _: LateFuture())
    assert thread.wait(coroutine) == "done"


def test_a_timeout_of_the_coroutine_is_raised(thread: NodeThread) -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        thread.wait(fail())


def test_time_that_is_up_is_a_timeout(thread: NodeThread) -> None:
    with pytest.raises(TimeoutError):
        thread.wait(asyncio.sleep(60), timeout_s=0.05)


def test_who_waits_too_long_reads_what_for(thread: NodeThread) -> None:
    with pytest.raises(
        SlowError, match=r"^this peer did not leave in good order within 0\.05 s: this machine, or"
    ) as told:
        thread.wait(asyncio.sleep(60), timeout_s=0.05, doing="leave in good order")
    assert told.value.code == "GD-206"
