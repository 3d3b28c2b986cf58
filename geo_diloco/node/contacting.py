"""Contacts at work: remembered while a run goes well, asked when it can't be found by its bootstraps.

They are kept twice, in the peer's own folder and once for all peers of this machine, so that a peer that begins here
profits from what another has seen. All of them are asked at once. The first counts that shows the run's manifest and a
proof of who serves it; so one that is gone or lies takes nobody's time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from geo_diloco.config import is_loopback, manifest_from_bytes
from geo_diloco.errors import ManifestError, RefusedError, RemoteProtocolError, TransferError
from geo_diloco.manifest import RunId
from geo_diloco.node.rundir import RunDir, default_root
from geo_diloco.observability import EventLog
from geo_diloco.runtime.contacts import Contacts, read_contacts, write_contacts
from geo_diloco.runtime.proof import PROOF_ENTRIES_MAX, read_proof
from geo_diloco.runtime.session import Session, fetch_contacts, fetch_manifest, fetch_proof
from geo_diloco.runtime.wire import url_from_address

ANSWER_S = 20.0
"""Longest time for one contact to show what it knows; the others don't wait for it."""
FIRST_S = 1.0
CHECK_S = 5.0
"""How often a peer on the air looks whether others are named now than before."""
LOOK_EVERY_S = 600.0
"""How often it asks them though they are the same."""
LOOK_S = 5.0
ASKED_MAX = 8
OWN_MADDRS_MAX = 4
"""Of one peer, before those that it has heard of."""


T = TypeVar("T")


class ContactBook:
    """The contacts that one peer knows. For the event loop's thread; files are read and written in another."""

    def __init__(self, run: RunId, log: EventLog, *, own: Path | None = None, given: Sequence[str] = ()) -> None:
        """`own`: a file in the peer's folder, if it has one. `given`: what its owner named by hand."""
        self._log = log
        machine = RunDir(default_root(run)).contacts
        self._paths = [machine] if own is None else list(dict.fromkeys((machine, own)))
        self._given = Contacts(tuple(given))
        self._kept = Contacts()

    @property
    def known(self) -> Contacts:
        """By hand, then as it was kept."""
        return self._given.before(self._kept)

    def origin(self, address: str) -> str:
        return "given by --contact" if address in self._given.addresses else "known from an earlier time"

    async def read(self) -> Contacts:
        """All that is known now; others on this machine may have written since."""
        kept = Contacts()
        for each in await asyncio.to_thread(lambda: [self._read(path) for path in self._paths]):
            kept = kept.before(each)
        self._kept = kept.before(self._kept)
        return self.known

    async def remember(self, newest: Contacts, hearsay: Contacts | None = None) -> None:
        """`newest` goes before what is kept, `hearsay` behind it, as far as there is room."""
        self._kept = newest.before(self._kept).before(hearsay or Contacts())
        await asyncio.to_thread(self._write, newest, hearsay or Contacts())

    def _write(self, newest: Contacts, hearsay: Contacts) -> None:
        for path in self._paths:
            kept = self._read(path)
            changed = newest.before(kept).before(hearsay)
            if changed == kept:
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_contacts(path, changed)
            except OSError as exc:
                self._log.note("contacts", f"{path} can't be written: {exc.strerror or exc}", level="warning")

    def _read(self, path: Path) -> Contacts:
        try:
            return read_contacts(path)
        except (OSError, RemoteProtocolError) as exc:
            self._log.note("contacts", f"{path} can't be read and is not used: {exc}", level="warning")
            return Contacts()


# ---- asking the way into a run -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a contact has shown."""

    address: str
    manifest: bytes
    """Canonical bytes, which hash to the run's id."""
    contacts: Contacts = field(default_factory=Contacts)
    """Where it says that others are."""

    @property
    def url(self) -> str:
        return url_from_address(self.address)


async def first_introduction(session: Session, run: RunId, addresses: Sequence[str]) -> Introduction | dict[str, str]:
    """The first good answer, or for each address why there is none."""
    problems: dict[str, str] = {}

    async def ask(address: str) -> Introduction | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await introduction_from(session, run, address)
        except TimeoutError:
            problems[address] = f"no answer in {ANSWER_S:.0f} s"
        except (TransferError, RefusedError, RemoteProtocolError) as exc:
            problems[address] = str(exc)
        return None

    found = await first_answer(ask(address) for address in addresses)
    return problems if found is None else found


async def first_answer(asks: Iterable[Coroutine[Any, Any, T | None]]) -> T | None:
    """Of questions put at once the first answer that there is; the others are given up, and ended when this is."""
    asked = [asyncio.ensure_future(ask) for ask in asks]
    try:
        for answer in asyncio.as_completed(asked):
            if (found := await answer) is not None:
                return found
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return None


async def introduction_from(session: Session, run: RunId, address: str) -> Introduction:
    """Raises TransferError, RefusedError or RemoteProtocolError if that peer doesn't show the run and who serves it."""
    url = url_from_address(address)
    canonical = await fetch_manifest(session, url, run)
    with suppress(ManifestError):  # the manifest is the run's, so whoever reads it next has to say what is wrong here
        founder = manifest_from_bytes(canonical).founder
        read_proof(await fetch_proof(session, url, entries_max=PROOF_ENTRIES_MAX), run=run, founder=founder)
    contacts = Contacts()
    with suppress(TransferError, RemoteProtocolError):  # it knows the way, if nobody else
        contacts = await _contacts_at(session, url)
    return Introduction(address=address, manifest=canonical, contacts=contacts)


async def _contacts_at(session: Session, url: str) -> Contacts:
    """What is somebody's own loopback is nobody else's. Raises TransferError or RemoteProtocolError."""
    found = await fetch_contacts(session, url)
    if is_loopback(url.partition("//")[2]):
        return found
    return Contacts(
        tuple(each for each in found.addresses if not is_loopback(each)),
        tuple(each for each in found.maddrs if not is_loopback(each)),
    )


# ---- remembering -------------------------------------------------------------------------------------------------


class Remembering:
    """The errand of a peer on the air: who of those that are named answers, and how the DHT is entered there."""

    def __init__(
        self,
        book: ContactBook,
        session: Session,
        *,
        own: Callable[[], Contacts],
        named: Callable[[], Sequence[str]],
        learn: Callable[[Sequence[str]], None],
    ) -> None:
        """`named`: addresses of whoever serves and could serve. `learn` is told multiaddrs of the DHT's peers."""
        self._book = book
        self._session = session
        self._own = own
        self._named = named
        self._learn = learn

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(FIRST_S)
        self._learn((await self._book.read()).maddrs)
        looked_at, seen = -LOOK_EVERY_S, frozenset[str]()
        while True:
            named = frozenset(self._named())
            if named != seen or loop.time() - looked_at > LOOK_EVERY_S:
                looked_at, seen = loop.time() - random.uniform(0, LOOK_EVERY_S / 10), named
                await self.look()
            await asyncio.sleep(CHECK_S)

    async def look(self) -> None:
        """Ask them, once."""
        own = self._own()
        named = [each for each in Contacts(tuple(self._named())).addresses if each not in own.addresses]
        answers = await asyncio.gather(*(self._ask(address) for address in named[:ASKED_MAX]))
        live = [(address, found) for address, found in zip(named, answers, strict=False) if found is not None]
        newest = Contacts(
            (*own.addresses, *(address for address, _ in live)),
            (*own.maddrs[:OWN_MADDRS_MAX], *(maddr for _, found in live for maddr in found.maddrs[:OWN_MADDRS_MAX])),
        )
        hearsay = Contacts()
        for _, found in live:
            hearsay = hearsay.before(found)
        await self._book.remember(newest, hearsay)
        self._learn(self._book.known.maddrs)

    async def _ask(self, address: str) -> Contacts | None:
        """None if nobody answers there."""
        try:
            async with asyncio.timeout(LOOK_S):
                return await _contacts_at(self._session, url_from_address(address))
        except (TimeoutError, TransferError, RemoteProtocolError):
            return None
