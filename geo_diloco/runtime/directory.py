"""How a peer gets into the directory, stays in it and leaves it: the rules, without the library.

Joining is written out here instead of left to hivemind, because a volunteer's machine needs more of it: every
bootstrap is tried, for ever, with the reason per address; a peer that nobody can call becomes a client of the DHT
instead of failing; a wrong clock is measured and corrected instead of refused; and the same steps bring back a peer
whose contacts were all lost. `dht.py` supplies the `Overlay` these rules work on, and the way to start one.

The directory finds peers and never decides anything: a partition's both sides accept records (`records.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from geo_diloco.errors import DirectoryError, LocalProtocolError, RemoteProtocolError
from geo_diloco.manifest import PeerId, RunId
from geo_diloco.runtime import records
from geo_diloco.runtime.records import PeerRecord

GREET_S = 20.0
"""Longest time for one bootstrap to be dialled and to answer."""
ASK_S = 30.0
"""Longest time for one question to the whole DHT."""
RETRY_S = (1.0, 15.0)
"""Pause between attempts: doubles from the first to the second."""
REMIND_S = 60.0
"""How often bootstraps are greeted again: one that was away knows nobody, and so does whoever enters by it."""
WITHDRAW_S = 0.6
"""What leaving may cost; the record of a peer that could not say so expires."""
CLOCK_S = 1.0
"""A difference to the others' clocks below this is not corrected."""
CLOCK_S_MAX = 10 * 365 * 86400.0
"""Beyond this a clock isn't wrong but a lie; a bootstrap that tells it is not used."""

OnStatus = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """A bootstrap's answer."""

    sees_us: bool
    """It could call us back."""
    clock_s: float
    """Its clock minus ours."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One record as the DHT returned it, its signature checked and taken off."""

    subkey: str
    body: bytes
    expiration: float


class Overlay(Protocol):
    """A DHT as seen from one peer. Every coroutine raises DirectoryError when it fails."""

    @property
    def is_alive(self) -> bool: ...
    @property
    def num_contacts(self) -> int: ...
    @property
    def visible_maddrs(self) -> list[str]:
        """Loopback last."""
        ...

    def last_words(self) -> str:
        """What its process said last, once it has ended."""

    def time(self) -> float:
        """The DHT's clock: expirations are compared with it on every machine."""

    def shift_time(self, seconds: float) -> None:
        """Moves that clock, on this machine only."""

    async def open(self, *, as_client: bool) -> None:
        """Starts it, ending first what runs."""

    async def become_client(self) -> None:
        """From now on it asks and is not asked."""

    async def greet(self, maddr: str) -> Greeting:
        """Dials a DHT peer and makes it a contact. May also raise TimeoutError or OSError."""

    async def settle(self) -> None:
        """Learns its neighbours from its contacts."""

    async def store(self, key: str, body: bytes, expiration: float, *, subkey: str) -> bool: ...
    async def get(self, key: str) -> list[Found]: ...
    async def wait_ended(self) -> None: ...
    async def close(self) -> None:
        """Ends it and gives back what it holds. May be called again."""


class DirectoryRules:
    """One peer's place in the directory. Only `join` tries for ever; all else is bounded in time."""

    def __init__(
        self,
        overlay: Overlay,
        *,
        bootstraps: Sequence[str],
        peer: PeerId | None,
        as_client: bool,
        on_status: OnStatus,
    ) -> None:
        self._overlay = overlay
        self._bootstraps = tuple(bootstraps)
        self._peer = peer
        self._is_client = as_client
        self._on_status = on_status
        self._told = ""
        self._closed = False
        self._repairing = asyncio.Lock()
        self._published: dict[RunId, tuple[PeerRecord, float]] = {}
        self._greeted_at = 0.0

    @property
    def visible_maddrs(self) -> list[str]:
        """Where others may dial this peer's DHT side, ending in its libp2p identity; empty for a client."""
        return [] if self._is_client else self._overlay.visible_maddrs

    @property
    def num_contacts(self) -> int:
        """DHT peers known; at 0 nobody else sees what is published."""
        return self._overlay.num_contacts

    @property
    def is_client(self) -> bool:
        """It asks and is not asked, by choice or because nobody can call it."""
        return self._is_client

    async def join(self) -> None:
        """Opens the overlay and tries the bootstraps until one answers; without any, this is the DHT's first peer.

        Raises DirectoryError only for what is wrong on this machine.
        """
        await self._overlay.open(as_client=self._is_client)
        pause = RETRY_S[0]
        while self._bootstraps and not await self._greet_all():
            await asyncio.sleep(pause * random.uniform(0.7, 1.0))
            pause = min(2 * pause, RETRY_S[1])

    async def publish(self, run: RunId, record: PeerRecord) -> bool:
        """Says who we are; to be renewed every 20 s. False if nobody else took it.

        Raises DirectoryError if the DHT's process ended and can't be started again.
        """
        if record.peer != self._peer or record.run != run:
            raise LocalProtocolError("a directory record must be of this peer and of the run it is published under")
        await self._repair()
        await self._remind()
        taken = await self._store(run, record)
        return taken and (bool(self.num_contacts) or not self._bootstraps)

    async def find(self, run: RunId) -> list[PeerRecord]:
        """The peers of a run, newest record first, without those that left. Raises DirectoryError as `publish` does."""
        await self._repair()
        try:
            async with asyncio.timeout(ASK_S):
                found = await self._overlay.get(records.directory_key(run))
        except TimeoutError as error:
            raise DirectoryError(f"the directory did not answer within {ASK_S:.0f} s") from error
        return believed(found, run=run, now=self._overlay.time())

    async def keep_alive(self) -> None:
        """For a peer that neither publishes nor asks: starts the DHT's process again whenever it ends."""
        pause = RETRY_S[0]
        while True:
            await self._overlay.wait_ended()
            try:
                await self._repair()
                pause = RETRY_S[0]
            except DirectoryError as error:
                self._tell(str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S[1])

    async def close(self) -> None:
        """Withdraws what was published and ends the DHT's process, in under 2 s. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._overlay.is_alive:
                with contextlib.suppress(TimeoutError, DirectoryError):
                    async with asyncio.timeout(WITHDRAW_S):
                        for run, (record, _) in sorted(self._published.items()):
                            await self._store(run, records.tombstone_of(record))
        finally:
            await self._overlay.close()

    async def _repair(self) -> None:
        """What can be put right is: a process that ended, contacts that were all lost."""
        async with self._repairing:
            if self._closed:
                raise DirectoryError("the directory is closed")
            if not self._overlay.is_alive:
                said = self._overlay.last_words()
                self._tell(f"p2pd ended and is started again{': ' + said if said else ''}")
                await self._overlay.open(as_client=self._is_client)
            if self._bootstraps and not self.num_contacts:
                await self._greet_all()

    async def _remind(self) -> None:
        """Two parts of a DHT that forgot each other find together again by whoever knows both."""
        now = asyncio.get_running_loop().time()
        if self._bootstraps and now - self._greeted_at >= REMIND_S:
            self._greeted_at = now
            await asyncio.gather(*(self._greet(maddr) for maddr in dict.fromkeys(self._bootstraps)))

    async def _greet_all(self, *, again: bool = False) -> bool:
        """Dials every bootstrap at once; true if at least one of them is now a contact."""
        if not self._overlay.is_alive:
            await self._overlay.open(as_client=self._is_client)
        self._greeted_at = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            tasks = {maddr: group.create_task(self._greet(maddr)) for maddr in dict.fromkeys(self._bootstraps)}
        results = {maddr: task.result() for maddr, task in tasks.items()}
        answers = [result for result in results.values() if isinstance(result, Greeting)]
        problems = {maddr: result for maddr, result in results.items() if isinstance(result, str)}
        reasons = "; ".join(f"{maddr}: {problem}" for maddr, problem in problems.items())
        if not answers and not again and any("backoff" in problem for problem in problems.values()):
            # It can be reached, but libp2p remembers that it once could not and would not dial it for minutes.
            await self._overlay.open(as_client=self._is_client)
            return await self._greet_all(again=True)
        if not answers:
            self._tell(f"no bootstrap answers, trying again: {reasons}")
            return False
        self._correct_clock(statistics.median(answer.clock_s for answer in answers))
        if not self._is_client and not any(answer.sees_us for answer in answers):
            self._tell("no bootstrap can call this peer back; it is a client of the directory")
            self._is_client = True
            await self._overlay.become_client()
            return await self._greet_all(again=True)
        try:
            await self._overlay.settle()
        except DirectoryError as error:
            self._tell(f"joining again: {error}")
            return False
        self._tell(f"joined through {len(answers)} of {len(results)} bootstraps{'; ' if reasons else ''}{reasons}")
        return True

    async def _greet(self, maddr: str) -> Greeting | str:
        """The answer, or the problem in words."""
        try:
            async with asyncio.timeout(GREET_S):
                greeting = await self._overlay.greet(maddr)
            return greeting if abs(greeting.clock_s) < CLOCK_S_MAX else "its clock makes no sense"
        except TimeoutError:
            return "no answer"
        except socket.gaierror as error:
            return (error.strerror or str(error)).lower()
        except OSError as error:
            return (os.strerror(error.errno) if error.errno else str(error)).lower()
        except DirectoryError as error:
            return str(error)

    def _correct_clock(self, difference_s: float) -> None:
        if abs(difference_s) < CLOCK_S:
            return
        self._overlay.shift_time(difference_s)
        side = "behind" if difference_s > 0 else "ahead of"
        self._tell(
            f"this machine's clock is {abs(difference_s):.0f} s {side} the directory's; its records allow for it"
        )

    async def _store(self, run: RunId, record: PeerRecord) -> bool:
        """The later expiration wins, so ours only ever grows, whatever the clock does."""
        expiration = self._overlay.time() + records.EXPIRES_S
        if run in self._published:
            expiration = max(expiration, self._published[run][1] + 0.001)
        self._published[run] = (record, expiration)
        key, body = records.directory_key(run), records.body_of(record)
        try:
            async with asyncio.timeout(ASK_S):
                return await self._overlay.store(key, body, expiration, subkey=str(record.peer))
        except TimeoutError as error:
            raise DirectoryError(f"the directory did not answer within {ASK_S:.0f} s") from error

    def _tell(self, status: str) -> None:
        """A repeated reason is told when it changes."""
        if status != self._told:
            self._told = status
            self._on_status(status)


def believed(found: Sequence[Found], *, run: RunId, now: float) -> list[PeerRecord]:
    """Reads what the DHT returned, newest first; what is malformed, over, too good to be true or a tombstone is out."""
    dated = []
    for item in found:
        if not now < item.expiration < now + records.FUTURE_S:
            continue
        with contextlib.suppress(RemoteProtocolError):
            record = records.read_record(item.body, run=run, peer=PeerId(item.subkey))
            if record.roles:
                dated.append((item.expiration, record))
    return [record for _, record in sorted(dated, key=lambda pair: (-pair[0], pair[1].peer))]
