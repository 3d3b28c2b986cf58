"""How a peer gets into the directory, stays in it and leaves it: the rules, without the library.

Joining is written out here instead of left to hivemind, because a volunteer's machine needs more of it: every
bootstrap is tried, for ever, with the reason per address; where none answers, whoever else is known to be in the DHT
lets a peer in; a peer that nobody can call becomes a client of the DHT instead of failing; a wrong clock is measured
and corrected instead of refused; and the same steps bring back a peer that has lost all others. `dht.py` supplies the
`Overlay` these rules work on, and the way to start one.

The directory finds peers and never decides anything: a partition's both sides accept records (`records.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from geo_diloco.errors import DirectoryError, LocalProtocolError, RemoteProtocolError
from geo_diloco.manifest import PeerId, RunId
from geo_diloco.runtime import records
from geo_diloco.runtime.records import PeerRecord

GREET_S = 20.0
"""Longest time for one bootstrap to be dialled and to answer."""
OTHERS_S = 3.0
"""As soon as one has answered, how much longer the others are waited for."""
ASK_S = 30.0
"""Longest time for one question to the whole DHT."""
RETRY_S = (1.0, 15.0)
"""Pause between attempts: doubles from the first to the second."""
OTHERS_MAX = 16
"""DHT peers beside the bootstraps that may let us in."""
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
        self._bootstraps = tuple(dict.fromkeys(bootstraps))
        self._others: tuple[str, ...] = ()
        self._news = asyncio.Event()
        self._joining: asyncio.Task[None] | None = None
        self._has_tried = asyncio.Event()
        self._peer = peer
        self._is_client = as_client
        self._on_status = on_status
        self._told = ""
        self._closed = False
        self._repairing = asyncio.Lock()
        self._published: dict[RunId, tuple[PeerRecord, float]] = {}
        self._greeted_at = 0.0
        self.silent_since: float | None = None
        """By the directory's clock, while no bootstrap answers: since when that is known."""
        self._is_silence_told = False

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

    @property
    def num_bootstraps(self) -> int:
        return len(self._bootstraps)

    def learn(self, maddrs: Sequence[str]) -> None:
        """DHT peers that may let us in where no bootstrap answers, most promising first."""
        own = {maddr.rpartition("/")[2] for maddr in self._overlay.visible_maddrs}
        new = [each for each in maddrs if each not in self._bootstraps and each.rpartition("/")[2] not in own]
        others = tuple(dict.fromkeys((*new, *self._others)))[:OTHERS_MAX]
        if set(others) != set(self._others):
            self._news.set()
        self._others = others

    async def join(self) -> None:
        """`begin`, and wait."""
        await self.begin()
        await self.wait_joined()

    async def begin(self) -> None:
        """Opens the overlay, and from then on tries until a bootstrap, or another peer, answers; without any, this is
        the DHT's first peer.

        Raises DirectoryError only for what is wrong on this machine.
        """
        await self._overlay.open(as_client=self._is_client)
        self._joining = asyncio.create_task(self._keep_joining(), name="join the directory")

    async def wait_tried(self) -> None:
        """Until there was a first attempt, whatever came of it."""
        await self._has_tried.wait()

    async def wait_joined(self) -> None:
        """Until a bootstrap, or another peer, has let us in."""
        assert self._joining is not None
        await asyncio.shield(self._joining)

    async def _keep_joining(self) -> None:
        pause = RETRY_S[0]
        try:
            while (self._bootstraps or self._others) and not await self._try_to_join():
                self._has_tried.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.7, 1.0)):
                        await self._news.wait()
                pause = min(2 * pause, RETRY_S[1])
        finally:
            self._has_tried.set()

    async def _try_to_join(self) -> bool:
        async with self._repairing:
            self._news.clear()
            try:
                return await self._greet_all()
            except (DirectoryError, TimeoutError) as error:  # p2pd ended, say, and can't be started again now
                self._tell(str(error) or "the directory does not answer")
                return False

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
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
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
            if (self._bootstraps or self._others) and not self.num_contacts:
                await self._greet_all()

    async def _remind(self) -> None:
        """Two parts of a DHT that forgot each other find together again by whoever knows both: the bootstraps, and as
        long as none of them answers the others."""
        now = asyncio.get_running_loop().time()
        if (self._bootstraps or self._others) and now - self._greeted_at >= REMIND_S:
            self._greeted_at = now
            was_silent = self.silent_since is not None
            results = await self._greet_each((*self._bootstraps, *(self._others if was_silent else ())))
            answers = [answer for maddr in self._bootstraps if isinstance(answer := results[maddr], Greeting)]
            self._hear_of_bootstraps(results)
            if was_silent and answers:  # until now others' clocks were all there was to go by
                self._correct_clock(statistics.median(answer.clock_s for answer in answers))
                self._tell("a bootstrap answers again")
            self._tell_silence()

    async def _greet_all(self, *, again: bool = False) -> bool:
        """Dials every bootstrap, and whoever else is known, at once; true if at least one of them answers."""
        if not self._overlay.is_alive:
            await self._overlay.open(as_client=self._is_client)
        self._greeted_at = asyncio.get_running_loop().time()
        results = await self._greet_each((*self._bootstraps, *self._others))
        answers = {maddr: result for maddr, result in results.items() if isinstance(result, Greeting)}
        problems = {maddr: result for maddr, result in results.items() if isinstance(result, str)}
        reasons = "; ".join(f"{maddr}: {problem}" for maddr, problem in problems.items() if maddr in self._bootstraps)
        if not answers and not again and any("backoff" in problem for problem in problems.values()):
            # It can be reached, but libp2p remembers that it once could not and would not dial it for minutes.
            await self._overlay.open(as_client=self._is_client)
            return await self._greet_all(again=True)
        self._hear_of_bootstraps(results)
        if not answers:
            if self._joining is not None and self._joining.done():  # before, it is itself such a new peer
                self._tell_silence()
            whom = "no bootstrap answers" if self._bootstraps else "nobody known in the directory answers"
            also = f", nor does any of {len(self._others)} other peers" if self._bootstraps and self._others else ""
            self._tell(f"{whom}{also}, trying again: {reasons}".removesuffix(": "))
            return False
        of_bootstraps = [answer for maddr, answer in answers.items() if maddr in self._bootstraps]
        self._correct_clock(statistics.median(answer.clock_s for answer in of_bootstraps or answers.values()))
        if not self._is_client and not any(answer.sees_us for answer in answers.values()):
            self._tell("no bootstrap can call this peer back; it is a client of the directory")
            self._is_client = True
            await self._overlay.become_client()
            return await self._greet_all(again=True)
        try:
            await self._overlay.settle()
        except DirectoryError as error:
            self._tell(f"joining again: {error}")
            return False
        if of_bootstraps:
            of = f"{len(of_bootstraps)} of {len(self._bootstraps)} bootstraps"
            self._tell(f"joined through {of}{'; ' if reasons else ''}{reasons}")
        else:
            self._tell(f"joined through {len(answers)} other peers{'; ' if reasons else ''}{reasons}")
            self._tell_silence()
        return True

    async def _greet_each(self, maddrs: Sequence[str]) -> dict[str, Greeting | str | None]:
        """All at once. None for who was not waited for any more, because others have answered."""
        tasks = {maddr: asyncio.ensure_future(self._greet(maddr)) for maddr in maddrs}
        waiting = set(tasks.values())
        limit: float | None = None
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if any(isinstance(task.result(), Greeting) for task in done):
                    limit = OTHERS_S
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {maddr: None if task.cancelled() else task.result() for maddr, task in tasks.items()}

    def _hear_of_bootstraps(self, results: Mapping[str, Greeting | str | None]) -> None:
        answers = [results[maddr] for maddr in self._bootstraps]
        if any(isinstance(answer, Greeting) for answer in answers):
            self.silent_since, self._is_silence_told = None, False
        elif answers and None not in answers and self.silent_since is None:
            self.silent_since = self._overlay.time()

    def _tell_silence(self) -> None:
        """Once, until one answers."""
        if self.silent_since is not None and not self._is_silence_told:
            self._is_silence_told = True
            self._tell(silence_text(self.silent_since))

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


def silence_text(since: float) -> str:
    """For the log and `status`."""
    at = time.strftime("%H:%M", time.localtime(since))
    return f"no bootstrap answers since {at}; the run goes on, new peers need a contact (--contact HOST:PORT)"


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
