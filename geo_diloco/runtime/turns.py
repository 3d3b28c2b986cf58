"""Taking turns on the event loop: what a thousand connections want at once is spread over many rounds of it.

One round of the loop runs everything that is ready, however much that is, and looks at nothing else meanwhile. A
message takes a fraction of a millisecond to seal, send or verify; a thousand of them in one round are a third of a
second in which nobody is heard. So each takes a turn first, and there are so many turns in a round. Who comes first
goes first.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8


class Turns:
    """Shared by connections of one loop, and for its thread."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """`at_once`: turns in a round."""
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_round_due = False

    async def take(self) -> None:
        """At once, as long as there are turns left in this round."""
        self._see_to_next_round()
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _see_to_next_round(self) -> None:
        if not self._is_round_due:
            self._is_round_due = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_round_due = False
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited is gone
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._see_to_next_round()
