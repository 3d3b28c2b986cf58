"""The founder in its node thread: syncer of the run, evaluator, HTTP door and directory record, wired together."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geo_diloco.config import PeerConfig
from geo_diloco.errors import BlobError, ConfigError, DirectoryError
from geo_diloco.manifest import WIRE_VERSION, BootId, Digest, PeerId, RunId
from geo_diloco.node.addresses import directory_addresses, http_address, read_ports, write_ports
from geo_diloco.node.evaluation import Evaluation
from geo_diloco.node.founding import FounderParts, state_digests
from geo_diloco.node.machine import hello_facts
from geo_diloco.observability import Counters, status_json
from geo_diloco.protocol.effects import ReadyToLeave, RunFinished
from geo_diloco.protocol.events import EntryArrived, FoundRun, Serve, StopRequested
from geo_diloco.protocol.messages import BlobRef, Commit, Envelope, Record
from geo_diloco.protocol.peer import Peer as Core
from geo_diloco.runtime.control import ControlLink
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.http import HttpServer
from geo_diloco.runtime.identity import proof_is_valid
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.links import AcceptedLinks, Sealer
from geo_diloco.runtime.records import PeerRecord
from geo_diloco.runtime.serving import Serving, ServingParts
from geo_diloco.runtime.wire import Signed
from geo_diloco.tape import Boot, TapeWriter

PUBLISH_EVERY_S = 20.0
SNAPSHOT_AGE_S_MAX = 5.0
"""One is made for whoever asks, but not more often: each puts all that changed on the disk."""
AWAY_MS_MAX = 30 * 24 * 3_600_000
LEAVE_S = 1.5


@dataclass(frozen=True, kw_only=True)
class FounderInfo:
    """What a person needs once the run is open."""

    run: RunId
    name: str
    peer: PeerId
    invite: str
    http: str
    """`host:port` of the HTTP side."""
    maddrs: tuple[str, ...]
    """Of its own DHT side."""
    run_dir: Path


class FounderNode:
    """The asynchronous part: everything here belongs to the node thread's loop. It is the HTTP server's port, too."""

    def __init__(self, parts: FounderParts, config: PeerConfig) -> None:
        self._p = parts
        self._config = config
        self.run = parts.run
        self.manifest = parts.manifest.canonical_bytes()
        self.finished = asyncio.Event()
        self._ready_to_leave = asyncio.Event()
        self._counters = Counters()
        self._heldout_at: dict[int, float] = {}
        self._boot = BootId(secrets.token_hex(8))
        self._worker = Worker("fold")
        self._server = HttpServer(self, parts.identity, parts.store)
        self._address = ""
        self._is_on_air = False
        """The port is bound before the chain is read, because the first entry names it; nobody is let in earlier."""
        self._driver: Driver | None = None
        self._serving: Serving | None = None
        self._links: AcceptedLinks | None = None
        self._evaluation: Evaluation | None = None
        self._directory: Directory | None = None
        self._publisher: asyncio.Task[None] | None = None

    @property
    def driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    # ---- start

    async def start(self) -> FounderInfo:
        p, config = self._p, self._config
        earlier = read_ports(p.run_dir)
        port = await self._listen(config.port or earlier.http)
        self._address = http_address(config, port)
        self._build_core()
        self._directory = await self._join_directory(config.dht_port or earlier.dht)
        write_ports(p.run_dir, http=port, maddrs=self._directory.visible_maddrs)
        await self._begin()
        self._is_on_air = True
        self._publisher = asyncio.create_task(self._publish(), name="publish")
        return self._info()

    async def _listen(self, port: int) -> int:
        """At the port asked for; one of an earlier process may be taken by now, then any."""
        try:
            return await self._server.start(self._config.host, port)
        except ConfigError:
            if self._config.port:
                raise
        return await self._server.start(self._config.host, 0)

    async def _join_directory(self, port: int) -> Directory:
        """The same port and identity again where possible: what invites and peers know of this DHT side stays true."""
        try:
            return await self._start_directory(port)
        except DirectoryError:
            if self._config.dht_port or not port:
                raise
        return await self._start_directory(0)

    async def _start_directory(self, port: int) -> Directory:
        p, config = self._p, self._config
        where = directory_addresses(config.model_copy(update={"dht_port": port}))
        return await Directory.start(
            initial_peers=config.bootstraps,
            listen=where.listen,
            announce=where.announce,
            identity=p.identity,
            identity_path=p.run_dir.root / "dht.key",
            state_dir=p.run_dir.directory,
            on_status=lambda status: p.log.note("directory", status),
        )

    def _build_core(self) -> None:
        p = self._p
        boot = Boot(
            peer=p.identity.peer_id,
            boot=self._boot,
            role="syncer",
            run=p.run,
            layout_digest=p.layout.digest,
            hello=hello_facts(self._address),
            rules=p.manifest.rules(),
        )
        core: Core = boot.fresh_core()
        driver = self._driver = Driver(core, log=p.log, tape=TapeWriter(p.run_dir.tape, boot))
        self._links = AcceptedLinks(driver, Sealer(p.identity, run=p.run, boot=self._boot))
        parts = ServingParts(
            driver=driver,
            worker=self._worker,
            outer=p.outer,
            chain=p.chain,
            store=p.store,
            snapshots=p.snapshots,
            identity=p.identity,
            manifest=p.manifest,
            links=self._links,
            counters=self._counters,
            log=p.log,
            keep_contributions=self._config.keep_contributions,
        )
        self._serving = Serving(parts, on_sealed=self._sealed)
        p.store.on_damaged = self._serving.blob_damaged
        self._evaluation = Evaluation(p.manifest, p.model, data_dir=self._config.data_dir, log=p.log)
        driver.interpret(self._links.interpreters())
        driver.interpret(self._serving.interpreters())
        driver.interpret(self._evaluation.interpreters(driver, self._worker, p.outer))
        driver.interpret(
            {
                RunFinished: lambda effect: self.finished.set(),
                ReadyToLeave: lambda effect: self._ready_to_leave.set(),
            }
        )

    async def _begin(self) -> None:
        """The first events: found the run, or the whole chain again and then the next term."""
        p, driver = self._p, self.driver
        entries = p.chain.entries()
        away_ms = _ms_since(p.run_dir.chain)
        if not entries:
            state, momentum = await self._worker.call(state_digests, p.outer)
            driver.feed(FoundRun(state, momentum, p.layout.num_elements, p.layout.digest))
        for signed, entry in entries:
            driver.feed(EntryArrived(entry, signed.digest, signed.signer))
        if entries:
            p.store.sweep(self._blobs_in_use())
            if p.chain.ledger.finished is None:
                driver.feed(Serve(away_ms))
        while p.chain.ledger.syncer is None or (p.chain.ledger.finished is None and not self._is_open()):
            if driver.failure is not None:
                raise driver.failure
            await asyncio.sleep(0.02)

    def _is_open(self) -> bool:
        """Our own `open` entry is on the chain."""
        return any(getattr(entry, "boot", None) == self._boot for _, entry in self._p.chain.entries()[-8:])

    def _blobs_in_use(self) -> set[str]:
        used: set[str] = set(self._p.snapshots.blobs())
        for _, entry in self._p.chain.entries():
            if isinstance(entry, Commit):
                used.add(entry.update.digest)
                if self._config.keep_contributions:
                    used.update(each.contribution.digest for each in entry.participants)
        return used

    def _info(self) -> FounderInfo:
        assert self._directory is not None
        p = self._p
        maddrs = tuple(self._directory.visible_maddrs)
        bootstraps = tuple(dict.fromkeys((*self._config.bootstraps, *maddrs)))
        invite = Invite(run=p.run, bootstraps=bootstraps, token=p.token, name=p.manifest.name).to_string()
        atomic_write(p.run_dir.invite, (invite + "\n").encode(), mode=0o600 if p.token else 0o644)
        return FounderInfo(
            run=p.run,
            name=p.manifest.name,
            peer=p.identity.peer_id,
            invite=invite,
            http=self._address,
            maddrs=maddrs,
            run_dir=p.run_dir.root,
        )

    async def _publish(self) -> None:
        """Our record, renewed; a directory that is away is waited for."""
        assert self._directory is not None
        while True:
            ledger = self.driver.core.ledger
            record = PeerRecord(
                run=self.run,
                peer=self._p.identity.peer_id,
                roles=("syncer",),
                address=self._address,
                term=ledger.term,
                boot=self._boot,
                head_seq=ledger.seq,
                wire_version=WIRE_VERSION,
            )
            try:
                await self._directory.publish(self.run, record)
                await asyncio.sleep(PUBLISH_EVERY_S)
            except DirectoryError as exc:
                self._p.log.note("directory", f"can't publish: {exc}", level="warning")
                await asyncio.sleep(PUBLISH_EVERY_S / 10)

    def _sealed(self, entry: object) -> None:
        if isinstance(entry, Record):
            self._heldout_at[entry.measured_seq] = self._counters.uptime_s

    # ---- http.ServerPort

    def signed_entries(self, from_seq: int, limit: int) -> list[Signed]:
        return self._p.chain.signed(from_seq, limit)

    async def snapshot(self, fragments: tuple[int, ...] | None) -> Signed | None:
        if not self._p.snapshots.ledger.heads:
            return None
        return await self._worker.call(self._p.snapshots.make, age_s_max=SNAPSHOT_AGE_S_MAX)

    def status(self) -> dict[str, Any]:
        p, counted = self._p, self._server.counters
        self._counters.bytes_in = counted.bulk_in + counted.control_in
        self._counters.bytes_out = counted.bulk_out + counted.control_out
        status = self.driver.core.status(self.driver.now())
        if why := p.store.why_full():
            waiting = tuple(replace(each, reason=f"{why}; {each.reason}") for each in status.waiting)
            status = replace(status, waiting=waiting)
        return status_json(
            status,
            self._counters,
            run=p.run,
            name=p.manifest.name,
            peer=p.identity.peer_id,
            heldout_at=self._heldout_at,
        )

    def accepts(self, digest: Digest) -> BlobRef | None:
        return self._serving.accepts(digest) if self._serving is not None else None

    def blob_arrived(self, ref: BlobRef) -> None:
        if self._serving is not None:
            self._serving.blob_arrived(ref)

    def verify_token(self, proof: str, nonce: str, peer: PeerId) -> bool:
        return not self._p.token or proof_is_valid(proof, self._p.token, nonce=nonce, peer=peer)

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        if self._links is None or not self._is_on_air:
            link.close("this term is not open yet")
            return
        self._links.opened(link, envelope)

    def received(self, link: ControlLink, envelope: Envelope) -> None:
        if self._links is not None:
            self._links.received(link, envelope)

    def closed(self, link: ControlLink, reason: str) -> None:
        if self._links is not None:
            self._links.closed(link, reason)

    @property
    def num_connected(self) -> int:
        return 0 if self._links is None else self._links.num_open

    # ---- end

    async def leave(self, reason: str) -> None:
        """Commit what is being merged (bounded), close links and directory, keep a last snapshot."""
        driver = self._driver
        if driver is not None and driver.failure is None:
            driver.feed(StopRequested(reason))
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._ready_to_leave.wait()
            except TimeoutError:
                self._p.log.note("leave", "a merge was not finished in time", level="warning")
        if self._publisher is not None:
            self._publisher.cancel()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._server.stop())
            if self._directory is not None:
                group.create_task(self._directory.close())
        if driver is not None:
            await driver.close()
        if self._p.snapshots.ledger.heads:
            try:
                await self._worker.call(self._p.snapshots.save)
            except (BlobError, OSError) as exc:
                self._p.log.note("leave", f"no last snapshot, the next start redoes more: {exc}", level="warning")
        self._worker.close()
        if self._evaluation is not None:
            self._evaluation.close()
        self._p.chain.close()


def _ms_since(path: Path) -> int:
    """Since a file was written to, by this machine's clock; 0 if that can't be told."""
    try:
        age_ms = int((time.time() - path.stat().st_mtime) * 1000)
    except OSError:
        return 0
    return min(max(0, age_ms), AWAY_MS_MAX)
