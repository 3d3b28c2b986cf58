"""A peer on the air: its core, and the hands, links and errands that every role needs, wired together.

What differs by role is added by its owner: a learner's hands (`learning.py`), a syncer's hands and the HTTP side
(`standby.py`). Everything here belongs to the node thread's loop. Whatever ends one of the errands ends the peer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any

from geo_diloco.errors import DirectoryError, RefusedError, RemoteProtocolError, RunDirError, TransferError
from geo_diloco.manifest import WIRE_VERSION, BootId, PeerId, RunId, RunManifest, Term
from geo_diloco.node.contacting import ContactBook, Remembering
from geo_diloco.node.machine import machine_name
from geo_diloco.node.rundir import RunDir
from geo_diloco.node.telling import Telling
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import TokensMerged
from geo_diloco.protocol.election.ballots import Rank
from geo_diloco.protocol.events import (
    ChainLoaded,
    EntryArrived,
    EntryLost,
    Event,
    Resumed,
    Sighted,
    Sighting,
    SnapshotLoaded,
    StopRequested,
)
from geo_diloco.protocol.history import ENTRIES_KEPT
from geo_diloco.protocol.messages import BlobRef, Commit, Hello, Message, Welcome
from geo_diloco.protocol.peer import Role
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.protocol.tail import contained
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.contacts import Contacts
from geo_diloco.runtime.control import ControlLink, connect_control
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.donor import Donors
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.electing import Electing, read_vote_record
from geo_diloco.runtime.following import Following, FollowingParts
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.links import Links, Sealer
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.records import MIRROR, SERVES_BLOBS, PeerRecord, by_claim
from geo_diloco.runtime.replacing import FragmentReplacing, ReplacingParts
from geo_diloco.runtime.seeking import Place, Seeker
from geo_diloco.runtime.session import fetch_status
from geo_diloco.runtime.snapshots import SnapshotShelf
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import url_from_address
from geo_diloco.tape import Boot, TapeWriter

PUBLISH_EVERY_S = 20.0
LOOK_EVERY_S = 5.0
LOOK_S = 5.0
"""How long whoever looks for the syncer waits for the directory; it may have lost the one who is gone, too."""
SIGHTINGS_MAX = 16
UPDATES_BYTES_KEPT = 256 << 20
"""A small run keeps every update; a large one hardly more than it needs."""
STRANDED_S = 60.0
"""How long a peer that can't follow the owner's reform waits for what it lacks."""


@dataclass(frozen=True, kw_only=True)
class StationParts:
    """What a peer goes on the air with."""

    run_dir: RunDir
    run: RunId
    manifest: RunManifest
    identity: Identity
    token: str
    log: EventLog
    directory: Directory
    bulk: Bulk
    book: ContactBook
    worker: Worker
    outer: OuterState
    store: BlobStore
    chain: ChainCopy
    shelf: SnapshotShelf | None
    """None where no snapshots are kept."""
    role: Role
    hello: HelloFacts
    may_serve: bool
    may_elect: bool
    is_mirror: bool = False
    """Others may fetch blobs here."""
    updates_bytes_kept: int | None = UPDATES_BYTES_KEPT
    """What updates may take on the disk beyond those that are needed; none: all of them stay."""


class Station:
    """One peer's process on the air."""

    def __init__(self, parts: StationParts, *, on_failure: Callable[[BaseException], None]) -> None:
        p = self._p = parts
        self._on_failure = on_failure
        self.boot = BootId(secrets.token_hex(8))
        self._records: list[PeerRecord] = []
        self._sighted: tuple[Sighting, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._publish_now = asyncio.Event()
        self._has_looked = asyncio.Event()
        self.has_followed = False
        """Somebody who serves has taken this peer."""
        boot = Boot(
            peer=p.identity.peer_id,
            boot=self.boot,
            role=p.role,
            run=p.run,
            layout_digest=p.outer.layout.digest,
            hello=p.hello,
            seat=_seat(p),
            rules=p.manifest.rules(),
        )
        self.driver = Driver(boot.fresh_core(), log=p.log, tape=TapeWriter(p.run_dir.tape, boot))
        self.core = self.driver.core
        self.donors = Donors(p.bulk, p.store, own=p.identity.peer_id, is_mirror=p.may_serve)
        self.donors.roster_addresses = self._roster_addresses
        self.donors.directory_addresses = self._directory_addresses
        self.donors.no_mirrors = self._no_mirrors
        self.following = self._build_following()
        self.links = Links(
            self.driver,
            Sealer(p.identity, run=p.run, boot=self.boot, token=p.token),
            connect=self._connect,
            url_of=self.donors.url_of,
            take_entry=self.following.take_entry,
            heard=self._heard,
            log=p.log,
        )
        self.electing = Electing(
            self.driver,
            p.run_dir.vote,
            links=self.links,
            chain=p.chain,
            store=p.store,
            donors=self.donors,
            log=p.log,
        )
        self.seeker = Seeker(
            self.driver,
            self.links,
            self.donors,
            own=p.identity.peer_id,
            look_up=self._look_up,
            is_final=self._speaks_for_the_run,
            is_finished=lambda: self.core.ledger.finished is not None,
            log=p.log,
        )
        for hands in (self.following, self.links, self.electing, self.seeker):
            self.driver.interpret(hands.interpreters())
        self.telling = Telling(
            self.driver,
            p.log,
            folder=p.run_dir.root,
            may_serve=p.may_serve,
            is_connected=lambda: self.seeker.connection != 0,
        )
        self.driver.interpret({TokensMerged: self.telling.merged})
        p.store.on_damaged = self._blob_damaged

    def _build_following(self) -> Following:
        p = self._p
        replacing = ReplacingParts(
            driver=self.driver,
            worker=p.worker,
            run=p.run,
            outer=p.outer,
            store=p.store,
            chain=p.chain,
            shelf=p.shelf,
            donor=self.donors,
            log=p.log,
        )
        return Following(
            FollowingParts(
                driver=self.driver,
                worker=p.worker,
                outer=p.outer,
                chain=p.chain,
                store=p.store,
                donor=self.donors,
                replacing=FragmentReplacing(replacing),
                log=p.log,
                is_elector=p.may_elect,
            )
        )

    # ---- start

    def load(self, snapshot: SnapshotLoaded, *, away_ms: int, resumed: Resumed | None = None) -> None:
        """The first events of a peer that has a state: that, what lies on its disk of the chain, and its own books."""
        events: list[Event] = [snapshot, *entries_on_disk(self._p.chain, self._p.store, snapshot)]
        events.append(ChainLoaded(away_ms))
        if resumed is not None:
            events.append(resumed)
        for event in events:
            self.driver.feed(event)

    def go_on_air(self, *, first: Place | None = None) -> None:
        """Look for the syncer, be found, and go on until `close`. What it tells of that is for its owner to begin."""
        if first is not None:
            self.seeker.begin_at(first)
        self.run(self._seek(), name="seek")
        self.run(self._publish(), name="publish")
        self.run(self.driver.wait_closed(), name="driver")
        self.run(self._look_around(), name="look around")
        self.run(self._remembering().run(), name="contacts")
        self.run(self._end_if_stranded(), name="stranded")

    def run(self, errand: Coroutine[Any, Any, None], *, name: str) -> None:
        """As long as this peer is on the air; if it fails the peer does."""
        task = asyncio.create_task(errand, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._errand_ended)

    def _errand_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._on_failure(failure)

    # ---- who is where

    def _roster_addresses(self) -> Sequence[tuple[PeerId, str]]:
        election = self.core.election
        opened = election.opened or self.core.ledger.opened
        serving = [] if opened is None else [(opened.syncer, opened.address)]
        roster = election.roster or self.core.ledger.roster
        return [*serving, *((elector.peer, elector.address) for elector in roster)]

    def _directory_addresses(self) -> Sequence[tuple[PeerId, str]]:
        return [(record.peer, record.address) for record in self._records if record.address]

    def _no_mirrors(self) -> set[PeerId]:
        """Who says that it gives no blobs to others, unless it serves."""
        return {record.peer for record in self._records if record.roles and not SERVES_BLOBS & set(record.roles)}

    async def _look_up(self) -> Sequence[tuple[PeerId | None, str]]:
        """Who claims to serve, highest term first; then who could. Contacts, where the directory shows nobody."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._refresh()
        except TimeoutError:
            self._p.log.note("directory", f"no answer within {LOOK_S:.0f} s", level="debug")
        return candidates(self._records, self._p.book.known)

    def named(self) -> tuple[str, ...]:
        """Where whoever serves, and whoever could, is said to be: by the chain, and by the directory."""
        claims = [(record.peer, record.address) for record in by_claim(self._records)]
        return tuple(address for _, address in (*self._roster_addresses(), *claims) if address)

    def own_contacts(self) -> Contacts:
        """Where this peer itself can be reached."""
        return Contacts((self._p.hello.address,), tuple(self._p.directory.visible_maddrs))

    def _remembering(self) -> Remembering:
        directory = self._p.directory
        return Remembering(
            self._p.book, self._p.bulk.session, own=self.own_contacts, named=self.named, learn=directory.learn
        )

    async def _refresh(self) -> None:
        try:
            self._records = await self._p.directory.find(self._p.run)
        except DirectoryError as exc:
            self._p.log.note("directory", str(exc), level="warning")

    async def _look_around(self) -> None:
        """Tell the core who could serve, if it may vote; everybody needs to know who is a mirror."""
        while True:
            await self._refresh()
            await self._end_if_doubled()
            self._has_looked.set()
            if not self._p.may_elect:
                await asyncio.sleep(PUBLISH_EVERY_S)
                continue
            sightings = tuple(
                Sighting(record.peer, Rank(record.lineage, record.term, record.head_seq), _served(record))
                for record in by_claim(self._records)
                if record.peer != self._p.identity.peer_id
            )[:SIGHTINGS_MAX]
            if sightings != self._sighted:
                self._sighted = sightings
                self.driver.feed(Sighted(sightings))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _end_if_doubled(self) -> None:
        """A copy of this folder, or its original, is at work on another machine. Its record is one of ours by the
        signature, as is that of the process before us, which does not answer any more."""
        p = self._p
        for record in self._records:
            is_ours = record.peer == p.identity.peer_id and record.boot == self.boot
            if record.peer != p.identity.peer_id or is_ours or record.address in ("", p.hello.address):
                continue
            with suppress(TimeoutError, TransferError, RefusedError, RemoteProtocolError):
                async with asyncio.timeout(LOOK_S):
                    said = await fetch_status(p.bulk.session, url_from_address(record.address))
                if said.get("peer") == p.identity.peer_id:
                    whose = f"its folder or {p.run_dir.root} is a copy; end one of them for good"
                    raise RunDirError(f"another process has this peer's identity, at {record.address}: {whose}")

    def _speaks_for_the_run(self, peer: PeerId | None) -> bool:
        """Whether a refusal by that peer is final. Others may claim to serve and refuse whom they like."""
        known = {each for each, _ in self._roster_addresses()} | {self._p.manifest.founder}
        return peer in known

    def _heard(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, Hello):
            self.donors.says(peer, message.address)
        elif isinstance(message, Welcome):
            opened = self.core.election.opened
            if opened is not None and opened.syncer == peer:
                self.seeker.welcomed_by(peer)
                self._tell_syncer(peer, opened.address)

    def _tell_syncer(self, peer: PeerId, address: str) -> None:
        """It has taken us: whoever reads of a connection that was lost reads this after it."""
        again = " again" if self.has_followed else ""
        where = f" ({address})" if address else ""
        self._p.log.note("syncer", f"following {peer[:8]}{where} in term {self.core.election.record.term}{again}")
        self.has_followed = True

    # ---- errands

    async def _end_if_stranded(self) -> None:
        """What this disk has does not reach back to where the owner's reform goes on, and what lies between does not
        come."""
        while self.core.election.stranded is None:
            await self.driver.wait_until(lambda: self.core.election.stranded is not None)
            await asyncio.sleep(STRANDED_S)
        folder = self._p.run_dir.root
        raise RunDirError(
            f"{self.core.election.stranded}: this peer began after that; move {folder} away, but for the keys in it, "
            "and join again"
        )

    async def _seek(self) -> None:
        await self.seeker.run()
        if self.seeker.refused is not None:
            raise self.seeker.refused

    async def _publish(self) -> None:
        """Our record, renewed, and again as soon as our role changes; a directory that is away is waited for."""
        p = self._p
        with suppress(TimeoutError):  # before ours replaces what a double says of itself
            async with asyncio.timeout(LOOK_S):
                await self._has_looked.wait()
        while True:
            self._publish_now.clear()
            role = self._role_told()
            rank = self.core.election.best.rank
            record = PeerRecord(
                run=p.run,
                peer=p.identity.peer_id,
                roles=(role, MIRROR) if p.is_mirror else (role,),
                address=p.hello.address if p.may_serve else "",
                lineage=rank.lineage,
                term=Term(max(0, rank.term)),
                boot=self.boot,
                head_seq=rank.seq,
                wire_version=WIRE_VERSION,
            )
            pause_s = PUBLISH_EVERY_S
            try:
                await p.directory.publish(p.run, record)
            except DirectoryError as exc:
                p.log.note("directory", f"can't publish: {exc}", level="warning")
                pause_s = PUBLISH_EVERY_S / 10
            try:
                async with asyncio.timeout(pause_s):
                    await self.driver.wait_until(lambda told=role: self._role_told() != told)  # type: ignore[misc]
            except TimeoutError:
                continue

    def _role_told(self) -> str:
        if self.core.serves:
            return "syncer"
        if self._p.may_serve:
            return "standby"
        return self._p.role

    def _connect(self, url: str, expected: PeerId | None) -> AbstractAsyncContextManager[ControlLink]:
        p = self._p
        return connect_control(p.bulk.session, url, p.identity, p.run, expected_peer=expected, counters=p.bulk.counters)

    def _blob_damaged(self, blob: BlobRef) -> None:
        """Bytes of an entry turned out to be gone, or of a snapshot. From any thread."""
        entry, shelf = self._p.chain.updates.get(blob.digest), self._p.shelf
        if shelf is not None and (entry is not None or blob.digest in shelf.named):
            shelf.hurry()
        if entry is not None:
            self.driver.feed_from_thread(EntryLost(entry))

    # ---- end

    def request_stop(self, reason: str) -> None:
        self.driver.feed(StopRequested(reason))

    def leave(self) -> None:
        """All is said: nobody is looked for any more."""
        self.seeker.leave()

    async def wait_links_closed(self, limit_s: float) -> None:
        """Until what was said last is on its way, bounded."""
        try:
            async with asyncio.timeout(limit_s):
                await self.driver.wait_until(lambda: self.links.is_settled)
        except TimeoutError:
            return

    async def close(self, limit_s: float) -> None:
        """End all errands and the driver."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        await self.driver.close()


def candidates(records: Sequence[PeerRecord], contacts: Contacts) -> Sequence[tuple[PeerId | None, str]]:
    """Whom the directory names; where it names nobody, contacts, of whom only the address is known."""
    found = [(record.peer, record.address) for record in by_claim(records)]
    return found or [(None, address) for address in contacts.addresses]


def directory_status(directory: Directory) -> dict[str, Any]:
    """Whether others can enter by the bootstraps that this peer knows, for `status`."""
    return {"bootstraps": {"count": directory.num_bootstraps, "silent_since": directory.silent_since}}


def _seat(p: StationParts) -> Seat:
    record = read_vote_record(p.run_dir.vote) if p.may_elect or p.may_serve else None
    return Seat(
        may_serve=p.may_serve,
        may_elect=p.may_elect,
        record=record,
        fresh_enrolment=secrets.token_hex(8),
        machine=machine_name(p.run),
        jitter=secrets.randbits(32),
        updates_bytes_kept=p.updates_bytes_kept,
        entries_kept=ENTRIES_KEPT,
    )


def _served(record: PeerRecord) -> Term | None:
    return record.term if "syncer" in record.roles else None


def entries_on_disk(chain: ChainCopy, store: BlobStore, snapshot: SnapshotLoaded) -> Iterable[EntryArrived]:
    """The log as the core is given it: all of it, or what continues the snapshot's entry, in the order it came."""
    known: set[str] = {"" if snapshot.whole_chain else snapshot.head_digest}
    log = chain.entries()
    needless = contained(((signed.digest, entry) for signed, entry in log), snapshot)
    for signed, entry in log:
        if entry.header.prev in known:
            known.add(signed.digest)
            stored = not isinstance(entry, Commit) or signed.digest in needless or store.has(entry.update)
            yield EntryArrived(entry, signed.digest, signed.signer, stored)
