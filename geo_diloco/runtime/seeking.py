"""Looking for the syncer, for ever: the one control connection that a peer needs whatever its role.

The core says whom to try first, if it knows; else those are asked that the chain names, then those that the directory
names. Who answers and does not serve is turned away from by the core. Whoever was tried or lost is tried again only
after the others: one that is cut off takes a dial's whole time limit, and the others tell in an instant who serves.
While this peer serves itself it looks for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

from geo_diloco.errors import RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import PeerId
from geo_diloco.observability import EventLog
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
LASTED_S = 5.0
"""A connection that lasted so long was worth it: the next look begins without a wait."""


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
        log: EventLog,
    ) -> None:
        """`look_up` asks the directory who claims to serve: the peer, if it is known, and the address. `is_final`:
        whether a refusal of that peer is the run's own."""
        self._driver = driver
        self._links = links
        self._donors = donors
        self._own = own
        self._look_up = look_up
        self._is_final = is_final
        self._log = log
        self._hint: Place | None = None
        self._news = asyncio.Event()
        self._holding: asyncio.Task[str] | None = None
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
        if self._holding is not None:
            self._holding.cancel()
        self._news.set()

    # ---- the loop

    async def run(self) -> None:
        """Until cancelled, refused for good (`refused`), or told to leave."""
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while not self._is_over():
            if self._serves():
                await self._driver.wait_until(lambda: not self._serves() or self._is_leaving)
                continue
            async with aclosing(self._places()) as places:
                async for place in places:
                    if await self._try(place):
                        backoff.reset()
                    if self._is_over() or self._serves() or self._hint is not None:
                        break
            if self._hint is None and not self._is_over():
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await self._news.wait()

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

    async def _try(self, place: Place) -> bool:
        """Whether the connection lasted."""
        peer, url = place
        began = self._driver.now()
        self._number += 1
        self._tried[peer or url] = self._number
        self._is_up = False
        holding = self._holding = asyncio.ensure_future(
            self._links.seek(url, peer, up=lambda peer: self._up(peer, url))
        )
        elected = asyncio.ensure_future(self._driver.wait_until(self._serves))
        try:
            await asyncio.wait({holding, elected}, return_when=asyncio.FIRST_COMPLETED)
            reason = self._ended(holding, peer)
        finally:
            for task in (holding, elected):
                task.cancel()
            await asyncio.gather(holding, elected, return_exceptions=True)
            self._holding, self._is_up = None, False
            self._donors.lost()
        if reason and not self._is_leaving:
            whom = url.partition("//")[2]
            self._log.note(f"link {whom}", f"no syncer there, looking again: {reason}", level="warning")
        return self._driver.now() - began > LASTED_S * 1000

    def _up(self, peer: PeerId, url: str) -> None:
        self._is_up, self._at = True, (peer, url)
        self._donors.found_at(url)

    def welcomed_by(self, peer: PeerId) -> None:
        """It serves: work may be handed in there."""
        if self._is_up and self._at[0] == peer:
            self._donors.serves_at(self._at[1])

    def _ended(self, holding: asyncio.Task[str], peer: PeerId | None) -> str:
        """Why; empty if this peer serves itself now."""
        if not holding.done():
            return ""
        if holding.cancelled():
            return "it does not serve (any more)"
        failure = holding.exception()
        if isinstance(failure, RefusedError) and self._is_final(peer):
            self.refused = failure
        if failure is not None and not isinstance(failure, RefusedError | TransferError | RemoteProtocolError):
            raise failure
        return holding.result() if failure is None else NONCE.sub("", str(failure))
