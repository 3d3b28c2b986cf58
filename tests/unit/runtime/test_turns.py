from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from geo_diloco.runtime.turns import Turns


class Rounds:
    """Counts the rounds of the loop while it is used."""

    def __init__(self) -> None:
        self.number = 0
        self._is_over = False
        self._next()

    def _next(self) -> None:
        self.number += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._next)

    def end(self) -> None:
        self._is_over = True


def test_a_round_of_the_loop_has_so_many_turns_and_who_comes_first_goes_first() -> None:
    async def run() -> None:
        turns, rounds = Turns(at_once=4), Rounds()
        taken: list[int] = []
        at: Counter[int] = Counter()

        async def take(number: int) -> None:
            await turns.take()
            taken.append(number)
            at[rounds.number] += 1

        await asyncio.gather(*(take(number) for number in range(103)))
        rounds.end()
        assert taken == list(range(103))
        assert max(at.values()) == 4
        assert len(at) >= 103 / 4

    asyncio.run(run())


def test_who_is_alone_does_not_wait() -> None:
    async def run() -> None:
        turns, rounds = Turns(at_once=2), Rounds()
        began = rounds.number
        await turns.take()
        await turns.take()
        assert rounds.number == began
        for _ in range(3):
            await asyncio.sleep(0)
        began = rounds.number
        await turns.take()
        assert rounds.number == began, "a round that is over leaves nothing behind"
        rounds.end()

    asyncio.run(run())


def test_one_who_is_gone_takes_nobodys_turn() -> None:
    async def run() -> None:
        turns = Turns(at_once=1)
        first, gone, waits = (asyncio.ensure_future(turns.take()) for _ in range(3))
        await asyncio.sleep(0)
        assert first.done() and not gone.done()
        gone.cancel()
        async with asyncio.timeout(5):
            await waits
        with pytest.raises(asyncio.CancelledError):
            await gone

    asyncio.run(run())
