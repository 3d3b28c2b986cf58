"""A peer that others can reach, in its node thread: a founder or a standby, who may be syncer today and not tomorrow.

The station that every peer has, and beside it the hands of a syncer, the evaluator, the HTTP door and snapshots. What
it is right now is the core's business; all of it stays wired whether it serves or follows.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from geo_diloco.config import PeerConfig
from geo_diloco.errors import ConfigError, DirectoryError, RefusedError, TransferError
from geo_diloco.manifest import Digest, FragmentId, PeerId, Seq
from geo_diloco.node.addresses import directory_addresses, http_address, read_ports, write_ports
from geo_diloco.node.carrying import bulk_of
from geo_diloco.node.contacting import ContactBook
from geo_diloco.node.evaluation import Evaluation
from geo_diloco.node.founding import NodeParts, state_digests
from geo_diloco.node.inviting import FounderInfo, info_of
from geo_diloco.node.joining import HEAD_START_S
from geo_diloco.node.keeping import SnapshotKeeper
from geo_diloco.node.machine import hello_facts
from geo_diloco.node.obeying import Obedience
from geo_diloco.node.proving import ProofShelf
from geo_diloco.node.rundir import disk_failure
from geo_diloco.node.station import UPDATES_BYTES_KEPT, Station, StationParts, directory_status
from geo_diloco.observability import Counters, status_json
from geo_diloco.protocol.effects import ReadyToLeave, RefusedForGood, RunFinished
from geo_diloco.protocol.events import FoundRun
from geo_diloco.protocol.messages import BlobRef, Commit, Envelope, Finished, Record
from geo_diloco.runtime.contacts import Contacts
from geo_diloco.runtime.control import ControlLink
from geo_diloco.runtime.dht import Directory
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.driver import Driver, Worker
from geo_diloco.runtime.http import HttpServer
from geo_diloco.runtime.identity import proof_is_valid
from geo_diloco.runtime.lag import LagProbe
from geo_diloco.runtime.seeking import Place
from geo_diloco.runtime.serving import Serving, ServingParts
from geo_diloco.runtime.wire import Order, Signed

AWAY_MS_MAX = 30 * 24 * 3_600_000
LEAVE_S = 1.5
LOOK_AFTER_S = 30.0
OPEN_S = 5.0
"""A founder that is its only elector opens its term sooner, or says why it can't."""
FIND_S = 3.0
"""So long a peer that comes back waits to hear who serves, to tell whoever started it."""


class ReachableNode:
    """Everything here belongs to the node thread's loop. It is the HTTP server's port, too."""

    def __init__(
        self,
        parts: NodeParts,
        config: PeerConfig,
        *,
        directory: Directory | None = None,
        first: Place | None = None,
    ) -> None:
        """`directory`: of a standby, which has joined it already to find the run. `first`: where to look first for the
        syncer."""
        self._p = parts
        self._config = config
        self.run = parts.run
        self.manifest = parts.manifest.canonical_bytes()
        self.layout = parts.layout.to_json().encode()
        self.finished = asyncio.Event()
        self.failure: BaseException | None = None
        self._ready_to_leave = asyncio.Event()
        self._counters = Counters()
        self._heldout_at: dict[int, float] = {}
        self._disk_bytes = 0
        self._worker = Worker("fold")
        self._lag = LagProbe()
        self._bulk = bulk_of(config, parts.run_dir)
        self._book = ContactBook(parts.run, parts.log, own=parts.run_dir.contacts, given=config.contacts)
        self._server = HttpServer(self, parts.identity, parts.store, lanes=self._bulk.lanes)
        self._address = ""
        self._is_on_air = False
        """The port is bound before the chain is read, because the core's first words name it."""
        self._proof: ProofShelf | None = None
        self._obedience: Obedience | None = None
        self._station: Station | None = None
        self._keeper: SnapshotKeeper | None = None
        self._serving: Serving | None = None
        self._evaluation: Evaluation | None = None
        self._directory = directory
        self._first = first

    @property
    def driver(self) -> Driver:
        return self.station.driver

    @property
    def station(self) -> Station:
        assert self._station is not None
        return self._station

    # ---- start

    async def start(self) -> FounderInfo:
        p, config = self._p, self._config
        earlier = read_ports(p.run_dir)
        port = await self._listen(config.port or earlier.http)
        self._address = http_address(config, port)
        if self._directory is None:
            self._directory = await self._join_directory(config.dht_port or earlier.dht)
        write_ports(p.run_dir, http=port, host=config.host, maddrs=self._directory.visible_maddrs)
        self._build(self._directory)
        await self._begin()
        self._is_on_air = True
        self.station.go_on_air(first=self._first)
        keeper = self._keeper = SnapshotKeeper(self.driver, self._worker, p.snapshots, log=p.log)
        self.station.run(keeper.run(), name="snapshots")
        self.station.run(self._look_after(), name="look after")
        self.station.run(self._lag.run(), name="lag")
        await self._wait_open()
        self.station.run(self.station.telling.run(), name="telling")
        info = info_of(p, config, maddrs=self._directory.visible_maddrs, http=self._address)
        return replace(info, **self._who_serves())

    def _who_serves(self) -> dict[str, Any]:
        """For whoever started this peer."""
        station = self.station
        opened, finished = station.core.election.opened, self._why_finished()
        if station.core.serves:
            return {"served_by": self._p.identity.peer_id, "finished": finished}
        if opened is None or not station.has_followed:
            return {"finished": finished}
        return {"served_by": opened.syncer, "served_at": opened.address, "finished": finished}

    async def _look_after(self) -> None:
        """What would take long when somebody asks."""
        while True:
            if self._proof is not None:
                self._proof.collect()
            self._disk_bytes = await asyncio.to_thread(self._p.run_dir.num_bytes)
            await asyncio.sleep(LOOK_AFTER_S)

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
        """A run that was founded goes on without a directory, which is joined as soon as it can be."""
        p, config = self._p, self._config
        where = directory_addresses(config.model_copy(update={"dht_port": port}))
        directory = await Directory.start(
            initial_peers=config.bootstraps,
            listen=where.listen,
            announce=where.announce,
            identity=p.identity,
            identity_path=p.run_dir.root / "dht.key",
            state_dir=p.run_dir.directory,
            on_status=lambda status: p.log.note("directory", status),
        )
        try:
            directory.learn((await self._book.read()).maddrs)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if p.snapshot is None else HEAD_START_S):
                    await directory.wait_joined()
        except BaseException:
            await directory.close()
            raise
        return directory

    def _build(self, directory: Directory) -> None:
        p = self._p
        station = self._station = Station(
            StationParts(
                run_dir=p.run_dir,
                run=p.run,
                manifest=p.manifest,
                identity=p.identity,
                token=p.token,
                log=p.log,
                directory=directory,
                bulk=self._bulk,
                book=self._book,
                worker=self._worker,
                outer=p.outer,
                store=p.store,
                chain=p.chain,
                shelf=p.snapshots,
                role="follower",
                hello=hello_facts(self._address),
                may_serve=True,
                may_elect=True,
                updates_bytes_kept=None if self._config.keep_contributions else UPDATES_BYTES_KEPT,
                is_mirror=self._config.mirror,
            ),
            on_failure=self._fail,
        )
        self._proof = ProofShelf(station.core, p.chain)
        self._obedience = Obedience(station, p.chain, p.log, owner=self.owner)
        serving = ServingParts(
            driver=station.driver,
            worker=self._worker,
            outer=p.outer,
            chain=p.chain,
            store=p.store,
            snapshots=p.snapshots,
            identity=p.identity,
            manifest=p.manifest,
            links=station.links,
            counters=self._counters,
            log=p.log,
            keep_contributions=self._config.keep_contributions,
        )
        self._serving = Serving(serving, on_sealed=self._sealed)
        self._evaluation = Evaluation(p.manifest, p.model, data_dir=self._config.data_dir, log=p.log)
        station.driver.interpret(self._serving.interpreters())
        station.driver.interpret(self._evaluation.interpreters(station.driver, self._worker, p.outer))
        station.driver.interpret(
            {
                RunFinished: lambda effect: self.finished.set(),
                ReadyToLeave: lambda effect: self._say_no_more(),
                RefusedForGood: lambda effect: self._fail(RefusedError(effect.reason)),
            }
        )

    async def _begin(self) -> None:
        """The first events: found the run, or the state and the whole chain again."""
        p = self._p
        if p.snapshot is None:
            state, momentum = await self._worker.call(state_digests, p.outer)
            self.driver.feed(FoundRun(state, momentum, p.layout.num_elements, p.layout.digest))
            return
        p.store.sweep(self._blobs_in_use())
        self.station.load(p.snapshot, away_ms=_ms_since(p.run_dir.chain))

    async def _wait_open(self) -> None:
        """Until the run can be joined, where that depends on nobody else."""
        station = self.station
        peers = [elector.peer for elector in station.core.election.roster]

        def is_open() -> bool:
            return station.core.serves or self._why_finished() is not None or self.failure is not None

        if self._p.snapshot is not None and peers != [self._p.identity.peer_id]:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIND_S):
                    await self.driver.wait_until(lambda: is_open() or station.has_followed)
            return

        while not is_open():
            try:
                async with asyncio.timeout(OPEN_S):
                    await self.driver.wait_until(is_open)
            except TimeoutError:
                why = self.station.core.election.status(self.driver.now()).candidacy
                self._p.log.note("start", f"the run is not open yet: {why}", level="warning")
        if self.failure is not None:
            raise self.failure

    def _blobs_in_use(self) -> set[str]:
        p = self._p
        used: set[str] = {*p.snapshots.blobs(), *p.chain.updates, *p.kept_blobs}
        if self._config.keep_contributions:
            for _, entry in p.chain.entries():
                if isinstance(entry, Commit):
                    used.update(each.contribution.digest for each in entry.participants)
        return used

    def _sealed(self, entry: object) -> None:
        if isinstance(entry, Record):
            self._heldout_at[entry.measured_seq] = self._counters.uptime_s

    def _fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = disk_failure(self._p.run_dir.root, failure) if isinstance(failure, OSError) else failure

    # ---- http.ServerPort

    def signed_entries(self, from_seq: int, limit: int) -> list[Signed]:
        """Of the chain that counts, as far as it is on this disk; the newest ones may not be durable yet."""
        found: list[Signed] = []
        if not self._is_on_air:
            return found
        election = self.station.core.election
        for seq in range(from_seq, from_seq + limit):
            digest = election.digest_at(Seq(seq))
            signed = None if digest is None else self._p.chain.signed(digest)
            if signed is None:
                break
            found.append(signed)
        return found

    def proof(self, first: int, limit: int) -> list[Signed]:
        return self._proof.entries(first, limit) if self._proof is not None and self._is_on_air else []

    async def snapshot(self, fragments: tuple[int, ...] | None) -> Signed | None:
        return await self._keeper.newest() if self._keeper is not None and self._is_on_air else None

    def status(self) -> dict[str, Any]:
        p, served, asked = self._p, self._server.counters, self._bulk.counters
        self._counters.bytes_in = served.bulk_in + served.control_in + asked.bulk_in + asked.control_in
        self._counters.bytes_out = served.bulk_out + served.control_out + asked.bulk_out + asked.control_out
        station = self._station
        if station is None:
            return {"run": p.run, "name": p.manifest.name, "peer": p.identity.peer_id}
        now = station.driver.now()
        status = station.core.status(now)
        if why := p.store.why_full():
            waiting = tuple(replace(each, reason=f"{why}; {each.reason}") for each in status.waiting)
            status = replace(status, waiting=waiting)
        return (
            status_json(
                status,
                self._counters,
                run=p.run,
                name=p.manifest.name,
                peer=p.identity.peer_id,
                heldout_at=self._heldout_at,
                disk_bytes=self._disk_bytes,
                lease_ms=_left(station.core.election.lease_until(now), now),
            )
            | self._bulk_status()
            | {"loop": self._lag.status()}
        )

    def _bulk_status(self) -> dict[str, Any]:
        said = {} if self._directory is None else directory_status(self._directory)
        return said | self._bulk.lanes.status() | {"mirror": self.why_no_mirror() or None}

    def contacts(self) -> Contacts:
        if self._station is not None:
            return self._station.own_contacts().before(Contacts(self._station.named())).before(self._book.known)
        return Contacts((self._address,) if self._address else ()).before(self._book.known)

    def accepts(self, digest: Digest) -> BlobRef | None:
        announced = None if self._serving is None else self._serving.accepts(digest)
        return announced or (None if self._station is None else self._station.following.accepts(digest))

    def must_last(self, digest: Digest) -> bool:
        return self._station is None or self._station.following.accepts(digest) is not None

    def blob_arrived(self, ref: BlobRef) -> None:
        if self._serving is not None and self._station is not None:
            self._serving.blob_arrived(ref)
            self._station.following.blob_arrived(ref)

    @property
    def owner(self) -> PeerId:
        return self._p.manifest.founder

    def why_no_mirror(self) -> str:
        if self._station is not None and self._station.core.serves:
            return ""  # whoever is syncer is where updates come from
        return self._bulk.lanes.quota.why_used_up() if self._config.mirror else "its owner doesn't want it to"

    def order(self, order: Order) -> str:
        if self._obedience is None or not self._is_on_air:
            raise TransferError("this peer has not begun yet")
        return self._obedience.obey(order)

    def verify_token(self, proof: str, nonce: str, peer: PeerId) -> bool:
        return not self._p.token or proof_is_valid(proof, self._p.token, nonce=nonce, peer=peer)

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        if self._station is None or not self._is_on_air:
            link.close("this peer has not begun yet")
            return
        self._station.links.opened(link, envelope)

    def received(self, link: ControlLink, item: Envelope | Signed) -> None:
        if self._station is not None:
            self._station.links.received(link, item)

    def closed(self, link: ControlLink, reason: str) -> None:
        if self._station is not None:
            self._station.links.closed(link, reason)

    @property
    def num_connected(self) -> int:
        return 0 if self._station is None else self._station.links.num_peers

    # ---- end

    def _say_no_more(self) -> None:
        self.station.leave()
        self._ready_to_leave.set()

    async def leave(self, reason: str) -> None:
        """Commit what is being merged and hand over (bounded); then, at once, close links and directory and keep a last
        snapshot."""
        station = self._station
        is_sound = station is not None and station.driver.failure is None
        if station is not None and is_sound:
            has_served = station.core.serves
            station.request_stop(reason)
            try:
                async with asyncio.timeout(LEAVE_S):
                    await self._ready_to_leave.wait()
            except TimeoutError:
                self._p.log.note("leave", "a merge was not finished in time", level="warning")
            self._p.log.note("leave", self._parting_text(has_served=has_served))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._go_off_air())
            if self._directory is not None:
                group.create_task(self._directory.close())
            if self._keeper is not None and is_sound:
                group.create_task(self._keeper.save_last())
        if station is not None:
            await self._write_summary()
        self._worker.close()
        await asyncio.to_thread(self._p.chain.close)

    def _parting_text(self, *, has_served: bool) -> str:
        """How the run goes on without this peer, and how this peer comes back."""
        core, folder = self.station.core, self._p.run_dir
        back = f"`geo-diloco start {shlex.quote(str(folder.root))}`" if folder.key.exists() else "it joins again"
        if self._why_finished() is not None:
            return "the run is finished: this peer is not needed any more"
        if core.serves:
            return f"nobody could take over: the run waits until this peer is back: {back}"
        if has_served:
            return f"handed over: the run goes on without this peer; it comes back as a standby: {back}"
        return f"left; this peer comes back as it was: {back}"

    def _why_finished(self) -> str | None:
        """By what is durable, or else by this disk alone: when all have left nobody is there to say that it is."""
        core = self.station.core
        last = self._p.chain.entry(core.election.best.digest)
        return last.reason if isinstance(last, Finished) else core.ledger.finished

    async def _go_off_air(self) -> None:
        await self._server.stop()
        if self._station is not None:
            await self._station.close(LEAVE_S)
        if self._evaluation is not None:  # not before the driver, which would take what it left off for a measurement
            self._evaluation.close()
        await self._bulk.close()

    async def _write_summary(self) -> None:
        """This peer's last word: where it stands, and the digests of the Theta it holds."""
        digests, _ = await self._worker.call(state_digests, self._p.outer)
        versions = [self._p.outer.version(FragmentId(p)) for p in range(self._p.layout.num_fragments)]
        summary = self.status() | {"versions": versions, "state_digests": list(digests)}
        try:
            atomic_write(self._p.run_dir.summary, json.dumps(summary).encode())
        except OSError as exc:
            self._p.log.note("leave", f"no summary: {exc}", level="warning")


def _left(until: int | None, now: int) -> int | None:
    return None if until is None else until - now


def _ms_since(path: Path) -> int:
    """Since a file was written to, by this machine's clock; 0 if that can't be told."""
    try:
        age_ms = int((time.time() - path.stat().st_mtime) * 1000)
    except OSError:
        return 0
    return min(max(0, age_ms), AWAY_MS_MAX)
