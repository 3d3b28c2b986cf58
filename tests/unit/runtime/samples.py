"""A run to make messages of, a port that remembers what it heard, and a server and session to try them on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from geo_diloco.manifest import (
    WIRE_VERSION,
    BootId,
    BranchId,
    Digest,
    FragmentId,
    PeerId,
    RunId,
    RunManifest,
    Seq,
    Term,
    Version,
)
from geo_diloco.protocol.election.ballots import Elector, Opened
from geo_diloco.protocol.messages import (
    BlobRef,
    Commit,
    EntryHeader,
    Envelope,
    FragmentHead,
    Hello,
    LeftOut,
    Message,
    Open,
    Participant,
    Record,
    Snapshot,
)
from geo_diloco.runtime.bulk import Bulk, Lanes
from geo_diloco.runtime.contacts import Contacts
from geo_diloco.runtime.control import ControlLink
from geo_diloco.runtime.http import HttpServer
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import Session, make_session
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import Order, Signed, seal_entry

MANIFEST = RunManifest(nonce="00" * 16).canonical_bytes()
RUN = RunManifest(nonce="00" * 16).run_id()
D1, D2 = Digest("11" * 32), Digest("22" * 32)
BRANCH = BranchId("33" * 32)
BOOT = BootId("0123456789abcdef")
PEER = PeerId("44" * 32)


def header(seq: int = 3, prev: Digest = D1, run: RunId = RUN) -> EntryHeader:
    return EntryHeader(run=run, branch=BRANCH, term=Term(1), seq=Seq(seq), prev=prev)


def commit(peer: PeerId, **changed: Any) -> Commit:
    participant = Participant(
        peer=peer,
        base=D1,
        base_version=Version(1),
        first_step=0,
        last_step=24,
        steps=24,
        tokens=1000,
        tokens_unmerged=1000,
        contribution=BlobRef(D2, 5),
        weight=1.0,
        norm=0.5,
    )
    facts: dict[str, Any] = {
        "header": header(),
        "fragment": FragmentId(0),
        "version": Version(2),
        "round": 7,
        "attempt": 0,
        "update": BlobRef(D2, 9),
        "state_digest": D1,
        "momentum_digest": D2,
        "eta": 0.7,
        "mu": 0.5,
        "participants": (participant,),
        "left_out": (LeftOut(peer=peer, reason="stale"),),
        "quorum_wait_ms": 10,
        "grace_ms": 20,
        "close_reason": "all expected delivered",
        "rbar": 0.25,
        "rho": None,
        "tokens_total": 1000,
        "progress": 0.125,
    }
    return Commit(**(facts | changed))


def record(seq: int, prev: Digest) -> Record:
    return Record(header=header(seq, prev), measured_seq=Seq(0), heldout_loss=2.5)


def opening(syncer: PeerId) -> Open:
    return Open(header=header(), syncer=syncer, boot=BOOT, address="127.0.0.1:31340", votes=())


def snapshot() -> Snapshot:
    return Snapshot(
        run=RUN,
        branch=BRANCH,
        term=Term(1),
        seq=Seq(3),
        head_digest=D1,
        heads=(FragmentHead(version=Version(1), base=D1, state_digest=D1, momentum_digest=D2),),
        theta=(BlobRef(D1, 4),),
        momentum=(BlobRef(D2, 4),),
        tokens_per_fragment=(0,),
        num_elements=(1,),
        layout_digest=D1,
        progress=0.0,
        roster=(Elector(PEER, "ab", "machine", "127.0.0.1:31340"),),
        roster_seq=Seq(0),
        opened=Opened(PEER, BOOT, "127.0.0.1:31340", ()),
    )


def hello(proof: str = "") -> Hello:
    return Hello(
        wire_version=WIRE_VERSION,
        layout_digest=D1,
        trains=True,
        host="a laptop",
        software="geo_diloco 0",
        address="",
        step=0,
        tokens=0,
        head_seq=Seq(0),
        undecided=(),
        proof=proof,
    )


def envelope(sender: PeerId, to: PeerId, message: Message, *, nonce: str = "n", number: int = 1) -> Envelope:
    return Envelope(
        run=RUN,
        branch=BRANCH,
        term=Term(1),
        boot=BOOT,
        sender=sender,
        to=to,
        nonce=nonce,
        number=number,
        message=message,
    )


def chain_of(identity: Identity, length: int) -> list[Signed]:
    """Entries that follow each other, from seq 0."""
    made: list[Signed] = []
    for seq in range(length):
        made.append(seal_entry(record(seq, made[-1].digest if made else D1), identity))
    return made


def bytes_of(size: int, seed: int = 0) -> bytes:
    """Not all alike, so that a piece out of place is seen."""
    period = bytes((i * 31 + seed + i // 251) % 256 for i in range(100_003))
    return (period * (size // len(period) + 1))[:size]


@dataclass
class RememberingPort:
    """What a server under test asks, answered from attributes."""

    run: RunId = RUN
    manifest: bytes = MANIFEST
    layout: bytes = b"{}"
    role: str = "syncer"
    entries: list[Signed] = field(default_factory=list)
    newest_snapshot: Signed | None = None
    announced: dict[str, BlobRef] = field(default_factory=dict)
    arrived: list[BlobRef] = field(default_factory=list)
    brief: set[str] = field(default_factory=set)
    """Digests of blobs that need not outlive a crash."""
    links: list[ControlLink] = field(default_factory=list)
    heard: list[Envelope] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    runs_owner: PeerId = PEER
    entries_heard: list[Signed] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    admits: Callable[[str, str, PeerId], bool] = lambda proof, nonce, peer: True
    no_mirror: str = ""
    known: Contacts = field(default_factory=Contacts)
    more_status: dict[str, Any] = field(default_factory=dict)
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def signed_entries(self, from_seq: int, limit: int) -> list[Signed]:
        return self.entries[from_seq : from_seq + limit]

    def proof(self, first: int, limit: int) -> list[Signed]:
        return self.entries[first : first + limit]

    async def snapshot(self, fragments: tuple[int, ...] | None) -> Signed | None:
        return self.newest_snapshot

    def status(self) -> dict[str, Any]:
        return {"name": "run", "role": self.role} | self.more_status

    def contacts(self) -> Contacts:
        return self.known

    @property
    def owner(self) -> PeerId:
        return self.runs_owner

    def why_no_mirror(self) -> str:
        return self.no_mirror

    def order(self, order: Order) -> str:
        self.orders.append(order)
        return "done"

    def accepts(self, digest: Digest) -> BlobRef | None:
        return self.announced.get(digest)

    def must_last(self, digest: Digest) -> bool:
        return digest not in self.brief

    def announce(self, ref: BlobRef) -> None:
        self.announced[ref.digest] = ref

    def blob_arrived(self, ref: BlobRef) -> None:
        self.arrived.append(ref)

    def verify_token(self, proof: str, nonce: str, peer: PeerId) -> bool:
        return self.admits(proof, nonce, peer)

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        self.links.append(link)
        self.received(link, envelope)

    def received(self, link: ControlLink, item: Envelope | Signed) -> None:
        if isinstance(item, Signed):
            self.entries_heard.append(item)
        else:
            self.heard.append(item)
        self.happened.set()

    def closed(self, link: ControlLink, reason: str) -> None:
        self.ended.append(reason)
        self.happened.set()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                self.happened.clear()
                await self.happened.wait()


@dataclass
class Served:
    """A server on loopback and a session to ask it with."""

    port: RememberingPort
    server: HttpServer
    identity: Identity
    store: BlobStore
    url: str
    bulk: Bulk

    @property
    def session(self) -> Session:
        return self.bulk.session


@asynccontextmanager
async def served(
    store: BlobStore, port: RememberingPort | None = None, *, lanes: Lanes | None = None
) -> AsyncIterator[Served]:
    port = port or RememberingPort()
    identity = Identity.generate()
    server = HttpServer(port, identity, store, lanes=lanes)
    number = await server.start("127.0.0.1", 0)
    try:
        async with make_session() as session:
            yield Served(port, server, identity, store, f"http://127.0.0.1:{number}", Bulk(session))
    finally:
        await server.stop()
