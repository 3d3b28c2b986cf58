"""From an invite to a peer that follows the run: find the syncer, check what it serves, get the state.

The way in is the directory, which the invite's bootstraps open. If they don't answer soon, contacts are asked as well,
and whichever way leads to the run first is taken (`contacting.py`).

Nothing is believed for being in the directory: the manifest must hash to the invite's run id, whoever signs the
snapshot must be proven to serve its term (`runtime/proof.py`), and every byte of state must have the digest that it
says. What is slow or away is waited for, with the reason in the log; what differs (another wire version, layout, run)
is refused by name.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from geo_diloco.config import PeerConfig, manifest_from_bytes
from geo_diloco.errors import (
    BlobError,
    DigestMismatch,
    DirectoryError,
    LayoutError,
    ManifestError,
    RefusedError,
    RemoteProtocolError,
    TransferError,
)
from geo_diloco.manifest import Digest, RunId, RunManifest
from geo_diloco.node.addresses import directory_addresses
from geo_diloco.node.carrying import bulk_of
from geo_diloco.node.contacting import ContactBook, Introduction, first_answer, first_introduction
from geo_diloco.node.gathering import Gathering, begun_snapshot, blobs_of, goes_on_with
from geo_diloco.node.rundir import RunDir, joined_snapshot
from geo_diloco.numerics.fragments import Layout
from geo_diloco.observability import EventLog
from geo_diloco.protocol.events import SnapshotLoaded
from geo_diloco.protocol.messages import Snapshot
from geo_diloco.runtime.bulk import Bulk
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.contacts import Contacts
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.driver import Worker
from geo_diloco.runtime.following import Backoff
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.proof import PROOF_ENTRIES_MAX, Authority, check_snapshot, read_proof
from geo_diloco.runtime.records import SERVES_BLOBS, PeerRecord, by_claim
from geo_diloco.runtime.seeking import Place
from geo_diloco.runtime.session import (
    ByteCounters,
    Session,
    fetch_layout,
    fetch_manifest,
    fetch_proof,
    fetch_snapshot,
)
from geo_diloco.runtime.snapshots import load_snapshot, loaded_from, snapshots_in
from geo_diloco.runtime.store import BlobStore, ChainStore
from geo_diloco.runtime.wire import Signed, open_snapshot, url_from_address

CLAIMS_MAX = 64
HEAD_START_S = 3.0
"""Of bootstraps, before contacts are asked; and of the directory, once it is open."""
REASONS_MAX = 3


@dataclass
class Lobby:
    """A peer that has found its run and knows the manifest, and nothing of the state yet."""

    invite: Invite
    run_dir: RunDir
    identity: Identity
    log: EventLog
    directory: Directory
    bulk: Bulk
    book: ContactBook
    manifest: RunManifest = field(default_factory=RunManifest)
    url: str = ""
    """Where the syncer was found last."""

    @property
    def session(self) -> Session:
        return self.bulk.session

    @property
    def counters(self) -> ByteCounters:
        return self.bulk.counters

    async def close(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.bulk.close())
            group.create_task(self.directory.close())


async def enter(invite: Invite, run_dir: RunDir, identity: Identity, config: PeerConfig, log: EventLog) -> Lobby:
    """Find somebody of the run and fetch the manifest; waits for ever for what is away, with the reason told.

    Raises RefusedError if the run can't be understood here, DirectoryError if p2pd can't be started.
    """
    where = directory_addresses(config)
    directory = await Directory.start(
        initial_peers=[*invite.bootstraps, *config.bootstraps],
        listen=where.listen,
        announce=where.announce,
        identity=identity,
        state_dir=run_dir.directory,
        on_status=lambda status: log.note("directory", status),
    )
    book = ContactBook(invite.run, log, own=run_dir.contacts, given=config.contacts)
    lobby = Lobby(invite, run_dir, identity, log, directory, bulk_of(config, run_dir), book)
    try:
        await _find_run(lobby)
    except BaseException:
        await lobby.close()
        raise
    return lobby


async def _find_run(lobby: Lobby) -> None:
    """By the directory or by a contact, whichever is first."""
    ways = [asyncio.ensure_future(way(lobby)) for way in (_by_directory, _by_contacts)]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        _take_manifest(lobby, *done.pop().result())
    finally:
        for task in ways:
            task.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _by_contacts(lobby: Lobby) -> tuple[bytes, str]:
    """From whichever contact shows the run and who serves it. The directory is joined by what it knows, meanwhile."""
    directory, backoff = lobby.directory, Backoff()
    with suppress(TimeoutError):
        async with asyncio.timeout(HEAD_START_S):
            await directory.wait_tried()
    while True:
        if directory.num_contacts:
            await asyncio.sleep(HEAD_START_S)
        known = await lobby.book.read()
        directory.learn(known.maddrs)
        found = await first_introduction(lobby.session, lobby.invite.run, known.addresses)
        if isinstance(found, Introduction):
            is_silent = directory.silent_since is not None or not directory.num_contacts
            why = "no bootstrap answers" if is_silent else "the directory shows nobody of the run"
            lobby.log.note("join", f"{why}: joining through {found.address}, {lobby.book.origin(found.address)}")
            await lobby.book.remember(Contacts((found.address,)), found.contacts)
            directory.learn(found.contacts.maddrs)
            return found.manifest, found.url
        if not directory.num_contacts:
            lobby.log.note("contacts", _why_no_way(found), level="warning")
        await backoff.wait()


def _why_no_way(problems: dict[str, str]) -> str:
    if not problems:
        return "no peer of the run is known from an earlier time; --contact HOST:PORT names one"
    reasons = "; ".join(list(problems.values())[:REASONS_MAX])
    return f"none of {len(problems)} peers answers that are known from an earlier time or by --contact: {reasons}"


async def _by_directory(lobby: Lobby) -> tuple[bytes, str]:
    """From whichever claimed syncer serves bytes that hash to the run id: until the manifest is here nobody knows who
    the founder is, and anyone can claim to be syncer. All are asked at once, so that none of them can hold us up."""
    backoff = Backoff()
    await lobby.directory.wait_joined()
    while True:
        claims = (await claimed_syncers(lobby))[:CLAIMS_MAX]
        found = await first_answer(_manifest_from(lobby, record) for record in claims)
        if found is not None:
            return found
        await backoff.wait()


async def _manifest_from(lobby: Lobby, record: PeerRecord) -> tuple[bytes, str] | None:
    """(canonical bytes, base URL), or none with the reason told."""
    try:
        url = url_from_address(record.address, peer=record.peer)
        return await fetch_manifest(lobby.session, url, lobby.invite.run, counters=lobby.counters), url
    except (TransferError, RefusedError, RemoteProtocolError) as exc:
        lobby.log.note("join", f"no manifest from {record.address}: {exc}", level="warning")
        return None


def _take_manifest(lobby: Lobby, canonical: bytes, url: str) -> None:
    try:
        lobby.manifest = manifest_from_bytes(canonical)
    except ManifestError as exc:
        raise RefusedError(f"this software can't take part in the run: {exc}") from exc
    atomic_write(lobby.run_dir.manifest, canonical)
    lobby.url = url
    lobby.log.note("join", f"found run {lobby.invite.run[:12]} ({lobby.manifest.name}) at {url.partition('//')[2]}")


async def claimed_syncers(lobby: Lobby) -> list[PeerRecord]:
    """Whoever claims to be syncer, highest term first, then the standbys, who know the way. Claims are free: what they
    serve is checked."""
    try:
        records = await lobby.directory.find(lobby.invite.run)
    except DirectoryError as exc:
        lobby.log.note("directory", str(exc), level="warning")
        return []
    claims = by_claim(records)
    if not claims:
        lobby.log.note("join", f"no syncer of run {lobby.invite.run[:12]} in the directory yet, looking again")
    return claims


@dataclass
class Position:
    """Where a peer stands when its core begins."""

    outer: OuterState
    snapshot: SnapshotLoaded
    place: Place | None = None
    """Where it came from; the first place to look for the syncer."""


async def catch_up(lobby: Lobby, outer: OuterState, store: BlobStore, worker: Worker, *, whole_chain: bool) -> Position:
    """A snapshot's state, from whoever is proven to serve. Raises LayoutError on another layout."""
    backoff = Backoff()
    urls = [lobby.url]
    while True:
        for url in urls:
            try:
                return await _catch_up_from(lobby, url, outer, store, worker, whole_chain=whole_chain)
            except (TransferError, RemoteProtocolError, BlobError, DigestMismatch) as exc:
                lobby.log.note("join", f"fetching the state, trying again: {exc}", level="warning")
        await backoff.wait()
        urls = [lobby.url]
        for record in (await claimed_syncers(lobby))[:CLAIMS_MAX]:
            with suppress(RemoteProtocolError):
                urls.append(url_from_address(record.address, peer=record.peer))
        urls += [url_from_address(address) for address in (await lobby.book.read()).addresses]
        urls = list(dict.fromkeys(urls[1:])) or urls


async def _catch_up_from(
    lobby: Lobby,
    url: str,
    outer: OuterState,
    store: BlobStore,
    worker: Worker,
    *,
    whole_chain: bool,
    followed: bool = False,
) -> Position:
    """From there, or from the one who is proven there to serve."""
    session, counters = lobby.session, lobby.counters
    lines = await fetch_proof(session, url, entries_max=PROOF_ENTRIES_MAX, counters=counters)
    authority = read_proof(lines, run=lobby.invite.run, founder=lobby.manifest.founder)
    found = authority.found
    await check_same_layout(lobby, url, found.layout_digest, found.num_elements, outer.layout)
    serving = url_from_address(authority.opened[authority.term].address) if authority.opened else url
    if serving != url and not followed:
        return await _catch_up_from(lobby, serving, outer, store, worker, whole_chain=whole_chain, followed=True)
    signed = await fetch_snapshot(session, url, counters=counters)
    if signed is None:
        raise TransferError("the syncer has no snapshot yet")
    check_snapshot(signed, snapshot := open_snapshot(signed), authority)
    _check_sizes(snapshot, outer.layout)
    serves = snapshot.opened.syncer
    others = await _donors(lobby, snapshot)
    gathering = Gathering(lobby.bulk, store, syncer=url, others=others, log=lobby.log)
    signed, snapshot = await _gather(lobby, gathering, (signed, snapshot), authority, outer, store)
    await worker.call(load_snapshot, snapshot, outer, store.get)
    atomic_write(lobby.run_dir.joined, signed.to_line().encode())
    lobby.run_dir.joining.unlink(missing_ok=True)
    return Position(outer, loaded_from(snapshot, whole_chain=whole_chain), (serves, url))


async def _gather(
    lobby: Lobby,
    gathering: Gathering,
    newest: tuple[Signed, Snapshot],
    authority: Authority,
    outer: OuterState,
    store: BlobStore,
) -> tuple[Signed, Snapshot]:
    """A snapshot whose blobs are here: the one begun, if that is less to fetch and can be had, or the newest."""
    with_momentum, file = outer.with_momentum, lobby.run_dir.joining
    begun = _begun(file, authority, outer.layout)
    if begun is not None and await asyncio.to_thread(
        goes_on_with, begun[1], newest[1], store, with_momentum=with_momentum
    ):
        try:
            await gathering.fetch(blobs_of(begun[1], with_momentum=with_momentum))
            return begun
        except TransferError as exc:
            lobby.log.note("join", f"the snapshot that was begun can't be had any more, taking a newer one: {exc}")
    atomic_write(file, newest[0].to_line().encode())
    await gathering.fetch(blobs_of(newest[1], with_momentum=with_momentum))
    return newest


def _begun(file: Path, authority: Authority, layout: Layout) -> tuple[Signed, Snapshot] | None:
    signed = begun_snapshot(file)
    if signed is None:
        return None
    try:
        snapshot = open_snapshot(signed)
        check_snapshot(signed, snapshot, authority)
        _check_sizes(snapshot, layout)
    except RemoteProtocolError:
        return None
    return signed, snapshot


async def _donors(lobby: Lobby, snapshot: Snapshot) -> list[str]:
    """Where its blobs may be beside the syncer: at whom the directory names, or the roster."""
    records: list[PeerRecord] = []
    with suppress(DirectoryError, TimeoutError):
        async with asyncio.timeout(HEAD_START_S):
            records = await lobby.directory.find(lobby.invite.run)
    gives_none = {record.peer for record in records if record.roles and not SERVES_BLOBS & set(record.roles)}
    named = [(record.peer, record.address) for record in by_claim(records)]
    named += [(elector.peer, elector.address) for elector in snapshot.roster]
    urls: list[str] = []
    for peer, address in named:
        with suppress(RemoteProtocolError):
            if address and peer not in gives_none | {lobby.identity.peer_id}:
                urls.append(url_from_address(address, peer=peer))
    return urls


async def check_same_layout(
    lobby: Lobby, url: str, digest: Digest, num_elements: tuple[int, ...], layout: Layout
) -> None:
    """Raises LayoutError if this peer's model is not cut like the run's; with the first difference, which the peer at
    `url` is asked for."""
    if digest == layout.digest:
        return
    here = f"{sum(layout.num_elements)} parameters in {layout.num_fragments} fragments (layout {layout.digest[:12]})"
    there = f"{sum(num_elements)} in {len(num_elements)} ({digest[:12]})"
    try:
        theirs = Layout.from_json(await fetch_layout(lobby.session, url, digest, counters=lobby.counters))
        difference = f" {layout.first_difference(theirs)};"
    except (TransferError, RemoteProtocolError, LayoutError) as exc:
        lobby.log.note("join", f"what differs can't be told: {exc}", level="warning")
        difference = ""
    raise LayoutError(
        f"this model is not the run's (here: this model; there: the run):{difference} {here} here, {there} there; "
        "same library versions?"
    )


def _check_sizes(snapshot: Snapshot, layout: Layout) -> None:
    sizes = [4 * elements for elements in layout.num_elements]
    if [blob.size for blob in snapshot.theta] != sizes or [blob.size for blob in snapshot.momentum] != sizes:
        raise RemoteProtocolError("a snapshot of another size than the layout")


def joined_blobs(run_dir: RunDir) -> set[Digest]:
    """Digests of the snapshot that this peer joined with."""
    snapshot = joined_snapshot(run_dir)
    return set() if snapshot is None else _digests(snapshot)


def blobs_at_hand(run_dir: RunDir) -> set[Digest]:
    """What this peer need not fetch again: of snapshots of its own, and of a join that broke off."""
    signed = begun_snapshot(run_dir.joining)
    found = {digest for snapshot in snapshots_in(run_dir.state) for digest in _digests(snapshot)}
    with suppress(RemoteProtocolError):
        found |= set() if signed is None else _digests(open_snapshot(signed))
    return found


def _digests(snapshot: Snapshot) -> set[Digest]:
    return {blob.digest for blob in (*snapshot.theta, *snapshot.momentum)}


def chain_of(run_dir: RunDir, run: RunId) -> ChainCopy:
    """This peer's copy, read back and verified. It needs no backup: the run has it."""
    repair = f"move {run_dir.root} away, but for the keys in it, and join again"
    chain = ChainCopy(ChainStore(run_dir.chain, repair=repair), run=run)
    chain.load()
    return chain
