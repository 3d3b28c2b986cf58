"""From an invite to a peer that follows the run: find the syncer, check what it serves, get the state.

Nothing is believed for being in the directory: the manifest must hash to the invite's run id, its founder's signature
must be on the chain and the snapshot, and every byte of state must have the digest that the chain says. What is slow
or away is waited for, with the reason in the log; what differs (another wire version, layout, run) is refused by name.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from geo_diloco.config import PeerConfig, manifest_from_bytes
from geo_diloco.errors import (
    BlobError,
    DigestMismatch,
    DirectoryError,
    LayoutError,
    ManifestError,
    RefusedError,
    RemoteProtocolError,
    RunDirError,
    TransferError,
)
from geo_diloco.manifest import Digest, PeerId, RunId, RunManifest
from geo_diloco.node.addresses import directory_addresses
from geo_diloco.node.rundir import RunDir
from geo_diloco.numerics.fragments import Layout
from geo_diloco.observability import EventLog
from geo_diloco.protocol.events import EntryArrived, SnapshotLoaded
from geo_diloco.protocol.messages import Found, Snapshot
from geo_diloco.runtime.chain import ChainCopy
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.donor import SyncerDonor
from geo_diloco.runtime.driver import Worker
from geo_diloco.runtime.following import ENTRIES_PER_FETCH, Backoff
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.records import PeerRecord
from geo_diloco.runtime.session import ByteCounters, Session, fetch_manifest, make_session
from geo_diloco.runtime.snapshots import load_snapshot
from geo_diloco.runtime.store import BlobStore, ChainStore
from geo_diloco.runtime.wire import Signed, open_snapshot, url_from_address

CLAIMS_MAX = 64


@dataclass
class Lobby:
    """A peer that has found its run and knows the manifest, and nothing of the state yet."""

    invite: Invite
    run_dir: RunDir
    identity: Identity
    log: EventLog
    directory: Directory
    session: Session
    counters: ByteCounters = field(default_factory=ByteCounters)
    manifest: RunManifest = field(default_factory=RunManifest)
    url: str = ""
    """Where the syncer was found last."""

    async def close(self) -> None:
        await self.session.close()
        await self.directory.close()


async def enter(invite: Invite, run_dir: RunDir, identity: Identity, config: PeerConfig, log: EventLog) -> Lobby:
    """Join the directory, find the syncer, fetch the manifest; waits for ever for what is away, with the reason told.

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
    lobby = Lobby(invite, run_dir, identity, log, directory, make_session())
    try:
        await _fetch_manifest(lobby)
    except BaseException:
        await lobby.close()
        raise
    return lobby


async def _fetch_manifest(lobby: Lobby) -> None:
    """From whichever claimed syncer serves bytes that hash to the run id: until the manifest is here nobody knows who
    the founder is, and anyone can claim to be syncer. All are asked at once, so that none of them can hold us up."""
    backoff = Backoff()
    while True:
        claims = (await claimed_syncers(lobby))[:CLAIMS_MAX]
        asked = [asyncio.ensure_future(_manifest_from(lobby, record)) for record in claims]
        try:
            for answer in asyncio.as_completed(asked):
                if (found := await answer) is not None:
                    return _take_manifest(lobby, *found)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
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
    """Whoever claims to be syncer, highest term first; only the founder once the manifest is known."""
    try:
        records = await lobby.directory.find(lobby.invite.run)
    except DirectoryError as exc:
        lobby.log.note("directory", str(exc), level="warning")
        return []
    founder = lobby.manifest.founder
    claims = [
        record
        for record in records
        if "syncer" in record.roles and record.address and (not founder or record.peer == founder)
    ]
    if not claims:
        lobby.log.note("join", f"no syncer of run {lobby.invite.run[:12]} in the directory yet, looking again")
    return sorted(claims, key=lambda record: (record.term, record.head_seq, record.peer), reverse=True)


@dataclass
class Position:
    """Where a peer stands when its core begins."""

    outer: OuterState
    snapshot: SnapshotLoaded
    entries: list[EntryArrived]
    """Those after the snapshot."""


async def catch_up(
    lobby: Lobby,
    layout: Layout,
    chain: ChainCopy,
    donor: SyncerDonor,
    store: BlobStore,
    worker: Worker,
    *,
    follower: bool,
) -> Position:
    """The chain, and a snapshot's state. `follower`: hold momentum too. Raises LayoutError on another layout."""
    outer = OuterState(layout, with_momentum=follower, with_residual=False)
    backoff = Backoff()
    while True:
        try:
            signed, snapshot = await donor.signed_snapshot()
            await fetch_chain(chain, donor, at_least=snapshot.seq)
            check_layout(chain, layout)
            _check_snapshot(snapshot, chain, layout)
            wanted = [*snapshot.theta, *(snapshot.momentum if follower else ())]
            for blob in wanted:
                await donor.blob(blob)
            await worker.call(load_snapshot, snapshot, outer, store.get)
            break
        except (TransferError, RemoteProtocolError, BlobError, DigestMismatch) as exc:
            lobby.log.note("join", f"fetching the state, trying again: {exc}", level="warning")
            await backoff.wait()
    atomic_write(lobby.run_dir.joined, signed.to_line().encode())
    return Position(outer, _loaded(snapshot), entries_after(chain, snapshot.seq))


async def fetch_chain(chain: ChainCopy, donor: SyncerDonor, *, at_least: int = -1) -> None:
    """Bring the copy up to the syncer's. Raises RunDirError if the copy on disk is of another chain."""
    while True:
        batch = await donor.entries(chain.num_entries, ENTRIES_PER_FETCH)
        for signed in batch:
            entry = chain.verify(signed)
            if not chain.take(signed, entry) and entry.header.seq == chain.num_entries:
                raise RunDirError("the chain in this run directory is not the run's: remove chain.jsonl and join again")
        if not batch and chain.num_entries > at_least:
            return
        if not batch:
            raise TransferError("the syncer's chain is shorter than its snapshot")


def check_layout(chain: ChainCopy, layout: Layout) -> None:
    """Raises LayoutError if this peer's model is not cut like the run's."""
    entries = chain.entries()
    found = entries[0][1] if entries else None
    if not isinstance(found, Found):
        raise RemoteProtocolError("a chain that does not begin with `found`")
    if found.layout_digest != layout.digest:
        raise LayoutError(
            f"this model is not the run's: {sum(layout.num_elements)} parameters in {layout.num_fragments} fragments "
            f"here (layout {layout.digest[:12]}), the run has {sum(found.num_elements)} in {len(found.num_elements)} "
            f"({found.layout_digest[:12]}); same library versions?"
        )


def _check_snapshot(snapshot: Snapshot, chain: ChainCopy, layout: Layout) -> None:
    signed, _ = chain.entries(snapshot.seq)[0]
    if signed.digest != snapshot.head_digest:
        raise RemoteProtocolError("a snapshot that is not on the chain", peer=signed.signer)
    sizes = [4 * elements for elements in layout.num_elements]
    if [blob.size for blob in snapshot.theta] != sizes or [blob.size for blob in snapshot.momentum] != sizes:
        raise RemoteProtocolError("a snapshot of another size than the layout", peer=signed.signer)


def _loaded(snapshot: Snapshot) -> SnapshotLoaded:
    return SnapshotLoaded(
        branch=snapshot.branch,
        term=snapshot.term,
        seq=snapshot.seq,
        head_digest=snapshot.head_digest,
        heads=snapshot.heads,
        num_elements=snapshot.num_elements,
        layout_digest=snapshot.layout_digest,
        tokens_per_fragment=snapshot.tokens_per_fragment,
        progress=snapshot.progress,
    )


def joined_blobs(run_dir: RunDir) -> set[Digest]:
    """Digests of the snapshot that this peer joined with."""
    try:
        snapshot = open_snapshot(Signed.from_line(run_dir.joined.read_bytes()))
    except (OSError, RemoteProtocolError):
        return set()
    return {blob.digest for blob in (*snapshot.theta, *snapshot.momentum)}


def entries_after(chain: ChainCopy, seq: int) -> list[EntryArrived]:
    return [EntryArrived(entry, signed.digest, signed.signer) for signed, entry in chain.entries(seq + 1)]


def chain_of(run_dir: RunDir, run: RunId, founder: PeerId) -> ChainCopy:
    """This peer's copy, read back and verified."""
    chain = ChainCopy(ChainStore(run_dir.chain), run=run, signer=founder)
    chain.load()
    return chain
