"""Looking for the syncer, for ever: the one control connection that a peer needs whatever its role.

The core says whom to try first, if it knows; else those are asked that the chain names, then those that the directory
names. Who answers and does not serve is turned away from by the core. Whoever was tried or lost is tried again only
after the others: one that is cut off takes a dial's whole time limit, and the others tell in an instant who serves. So
the next one is dialed as soon as a dial takes long; the first connection that is made ends the dials beside it. While
this peer serves itself it looks for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import PeerId
from geo_diloco.observability import EventLog, Level
from geo_diloco.protocol.effects import SeekSyncer
from geo_diloco.runtime.donor import Donors
from geo_diloco.runtime.driver import Driver, Interpreter
from geo_diloco.runtime.following import Backoff
from geo_diloco.runtime.links import NONCE, Links
from geo_diloco.runtime.wire import url_from_address

Place = tuple[PeerId | None, str]
"""Who should be there, and the base URL."""
BACKOFF_S_MAX = 2.0
"""Kept short: a learner that is no elector hears of a new syncer by asking, and its work waits."""
SLOW_S = 2.0
"""A dial that takes longer goes on beside the next one."""
NOT_SERVING = "it does not serve (any more)"
"""As a standby says that is asked while nobody serves yet, or by one who is looking."""
LASTED_S = 5.0
"""A connection that lasted so long was worth it: the next look begins without a wait."""


@dataclass(eq=False)
class _Dial:
    """One that is under way, or the connection that came of it."""

    place: Place
    began: int
    task: asyncio.Task[str] | None = None
    is_up: bool = False
    has_served: bool = False
    """It took us: there was a syncer."""
    is_needless: bool = False
    """Another one was faster."""


class Seeker:
    """For the event loop's thread."""

    def __init__(
        self,
        driver: Driver,
        links: Links,
        donors: Donors,
        *,
        own: PeerId,
        look_up: Callable[[], Awaitable[Sequence[tuple[PeerId | None, str]]]],
        is_final: Callable[[PeerId | None], bool],
        is_finished: Callable[[], bool] = lambda: False,
        log: EventLog,
    ) -> None:
        """`look_up` asks the directory who claims to serve: the peer, if it is known, and the address. `is_final`:
        whether a refusal of that peer is the run's own. `is_finished`: nobody is missed any more."""
        self._driver = driver
        self._links = links
        self._donors = donors
        self._own = own
        self._look_up = look_up
        self._is_final = is_final
        self._is_finished = is_finished
        self._log = log
        self._hint: Place | None = None
        self._news = asyncio.Event()
        self._dials: list[_Dial] = []
        """Oldest first. If one of them is up it is the only one that is not being ended."""
        self._tried: dict[str, int] = {}
        """When (by count) each was last dialed."""
        self._number = 0
        self._is_up = False
        self._at: Place = (None, "")
        """Whom it is connected to."""
        self._is_leaving = False
        self.refused: RefusedError | None = None

    def interpreters(self) -> Mapping[type, Interpreter]:
        return {SeekSyncer: self._seek}

    @property
    def connection(self) -> int:
        """Counts connections to whoever serves; 0 while there is none."""
        return self._number if self._is_up else 0

    def leave(self) -> None:
        """Nobody is looked for any more; the connection ends by itself."""
        self._is_leaving = True
        self._news.set()

    def begin_at(self, place: Place) -> None:
        """Where to look first."""
        self._hint = place

    def _seek(self, effect: SeekSyncer) -> None:
        if effect.peer is not None and effect.peer != self._own:
            url = None
            with suppress(RemoteProtocolError):
                url = url_from_address(effect.address, peer=effect.peer) if effect.address else None
            url = url or self._donors.url_of(effect.peer)
            self._hint = None if url is None else (effect.peer, url)
        self._cancel_dials()
        self._news.set()

    # ---- the loop

    async def run(self) -> None:
        """Until cancelled, refused for good (`refused`), or told to leave."""
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while not self._is_over():
            if self._serves():
                await self._driver.wait_until(lambda: not self._serves() or self._is_leaving)
                continue
            if await self._look_once():
                backoff.reset()
            if self._hint is None and not self._is_over():
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._news.wait()

    async def _look_once(self) -> bool:
        """Dial one after the other until something else is to be done. Whether a connection lasted."""
        has_lasted = False
        try:
            async with aclosing(self._places()) as places:
                async for place in places:
                    has_lasted |= await self._settle(self._begin(place), patience_s=SLOW_S)
                    if self._has_else_to_do():
                        return has_lasted
            while self._dials and not self._has_else_to_do():
                has_lasted |= await self._settle(self._dials[-1], patience_s=None)
            return has_lasted
        finally:
            await self._end_dials()

    def _has_else_to_do(self) -> bool:
        return self._is_over() or self._serves() or self._hint is not None

    def _is_over(self) -> bool:
        return self._is_leaving or self.refused is not None

    def _serves(self) -> bool:
        return self._driver.core.election.role == "syncer"

    async def _places(self) -> AsyncGenerator[Place]:
        """The hint, if there is one; then whom the chain names; then whom the directory names."""
        if self._hint is not None:
            place, self._hint = self._hint, None
            yield place
        tried: set[str] = set()
        for known in (self._donors.roster_addresses, self._look_up):
            found = known()
            addresses = await found if isinstance(found, Awaitable) else found
            for place in sorted(self._dialable(addresses), key=lambda each: self._tried.get(each[0] or each[1], -1)):
                if place[1] not in tried:
                    tried.add(place[1])
                    yield place

    def _dialable(self, addresses: Sequence[tuple[PeerId | None, str]]) -> list[Place]:
        places: list[Place] = []
        for peer, address in addresses:
            if peer == self._own or not address:
                continue
            try:
                places.append((peer, url_from_address(address, peer=peer or "unknown")))
            except RemoteProtocolError as exc:
                self._log.note("link", str(exc), level="warning")
        return places

    def _begin(self, place: Place) -> _Dial:
        peer, url = place
        self._number += 1
        self._tried[peer or url] = self._number
        dial = _Dial(place, self._driver.now())
        dial.task = asyncio.ensure_future(self._links.seek(url, peer, up=lambda peer: self._up(dial, peer)))
        self._dials.append(dial)
        return dial

    async def _settle(self, dial: _Dial, *, patience_s: float | None) -> bool:
        """Until that dial, and whatever connection there is, has ended; without one it may go on after `patience_s`.
        Whether a connection lasted."""
        has_lasted = False
        elected = asyncio.ensure_future(self._driver.wait_until(self._serves))
        try:
            while dial in self._dials or self._is_up:
                tasks = [each.task for each in self._dials if each.task is not None]
                limit = None if self._is_up else patience_s
                done, _ = await asyncio.wait({*tasks, elected}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                for ended in [each for each in self._dials if each.task in done]:
                    has_lasted |= self._take_out(ended)
                if elected.done() or not (done or self._is_up):
                    return has_lasted
        finally:
            elected.cancel()
            await asyncio.gather(elected, return_exceptions=True)
        return has_lasted

    def _take_out(self, dial: _Dial) -> bool:
        """What came of one that has ended: whether it lasted."""
        self._dials.remove(dial)
        if dial.is_up:
            self._is_up = False
            self._donors.lost()
        reason = self._ended(dial)
        if reason and not self._is_leaving:
            whom = dial.place[1].partition("//")[2]
            text = "the syncer is lost, looking who serves" if dial.has_served else "no syncer there, looking again"
            is_usual = self._is_finished() or (reason == NOT_SERVING and not dial.has_served)
            level: Level = "debug" if is_usual else "warning"
            self._log.note(f"link {whom}", f"{text}: {reason}", level=level)
            self._log.forget("syncer")
        return dial.is_up and self._driver.now() - dial.began > LASTED_S * 1000

    def _cancel_dials(self) -> None:
        for dial in self._dials:
            if dial.task is not None:
                dial.task.cancel()

    async def _end_dials(self) -> None:
        """Nothing more comes of them: there is a hint, this peer serves, or it leaves."""
        self._cancel_dials()
        await asyncio.gather(*(dial.task for dial in self._dials if dial.task is not None), return_exceptions=True)
        if self._is_up:
            self._is_up = False
            self._donors.lost()
        self._dials.clear()

    def _up(self, dial: _Dial, peer: PeerId) -> None:
        """In the same breath the others are ended, so that none of them gets there as well."""
        for other in self._dials:
            if other is not dial and other.task is not None:
                other.is_needless = True
                other.task.cancel()
        dial.is_up = True
        dial.place = self._at = (peer, dial.place[1])
        self._is_up = True
        self._donors.found_at(dial.place[1])

    def welcomed_by(self, peer: PeerId) -> None:
        """It serves: work may be handed in there."""
        if self._is_up and self._at[0] == peer:
            self._donors.serves_at(self._at[1])
            for dial in self._dials:
                dial.has_served |= dial.is_up

    def _ended(self, dial: _Dial) -> str:
        """Why; empty if that is of no interest."""
        task = dial.task
        assert task is not None
        if task.cancelled():
            return "" if dial.is_needless else NOT_SERVING
        failure = task.exception()
        if isinstance(failure, RefusedError) and self._is_final(dial.place[0]):
            self.refused = failure
        if failure is not None and not isinstance(failure, RefusedError | TransferError | RemoteProtocolError):
            raise failure
        return task.result() if failure is None else NONCE.sub("", str(failure))
