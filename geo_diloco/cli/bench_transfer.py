"""`geo-diloco bench transfer`: how full a blob keeps a link, what cuts cost, and whether control gets through.

Over the relay (`relay.py`), whose rate is known, both directions and several congestion controls; or from another peer,
whose newest snapshot is fetched and thrown away. Either way small questions are asked all the while over a connection
of their own, and the slowest hundredth of them is what a control message would have waited.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_diloco.cli.relay import Relay
from geo_diloco.config.quantities import bytes_per_s
from geo_diloco.errors import ConfigError, RemoteProtocolError, TransferError
from geo_diloco.manifest import Digest, PeerId, RunId, RunManifest
from geo_diloco.protocol.messages import BlobRef, Envelope
from geo_diloco.runtime.bulk import CONTROLS, Bulk, Lanes
from geo_diloco.runtime.contacts import Contacts
from geo_diloco.runtime.control import ControlLink
from geo_diloco.runtime.fetch import Source, fetch_blob
from geo_diloco.runtime.http import HttpServer
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.session import Session, fetch_snapshot, make_session, read_small
from geo_diloco.runtime.shaping import Shaper
from geo_diloco.runtime.sockets import congestion_granted
from geo_diloco.runtime.store import BlobStore, blob_ref
from geo_diloco.runtime.upload import upload_blob
from geo_diloco.runtime.wire import Order, Signed, open_snapshot, url_from_address

ASK_EVERY_S = 0.05
_LOOK_S = 0.01
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What the relay is to be like."""

    bytes_per_s: float
    round_trip_s: float
    cap: int = 0
    """What the sending side holds its bulk below, in bytes per second; 0 for no limit."""

    @classmethod
    def parse(cls, text: str, *, cap: str = "") -> Link:
        """`RATE,RTT`, such as `100mbit,100ms`. Raises ConfigError."""
        try:
            held_below = bytes_per_s(cap)
        except ValueError as exc:
            raise ConfigError(f"--cap: {exc}") from exc
        rate, comma, round_trip = text.partition(",")
        try:
            if not comma or not round_trip.strip().endswith("ms"):
                raise ValueError("two parts are wanted")
            wait_s = float(round_trip.strip().removesuffix("ms")) / 1000
            if not 0.0 <= wait_s <= 10.0:
                raise ValueError("a round trip of at most 10000ms is wanted")
            return cls(bytes_per_s=bytes_per_s(rate), round_trip_s=wait_s, cap=held_below)
        except ValueError as exc:
            raise ConfigError(f"--relay {text[:60]!r}: {exc}; write RATE,RTT, such as 100mbit,100ms") from exc


class _Port:
    """A peer that has nothing but blobs."""

    def __init__(self) -> None:
        manifest = RunManifest()
        self.run: RunId = manifest.run_id()
        self.manifest = manifest.canonical_bytes()
        self.layout = b"[]"
        self.owner: PeerId = manifest.founder
        self.announced: dict[Digest, BlobRef] = {}

    def signed_entries(self, from_seq: int, limit: int) -> list[Signed]:
        return []

    def proof(self, first: int, limit: int) -> list[Signed]:
        return []

    async def snapshot(self, fragments: tuple[int, ...] | None) -> Signed | None:
        return None

    def status(self) -> dict[str, Any]:
        return {}

    def contacts(self) -> Contacts:
        return Contacts()

    def accepts(self, digest: Digest) -> BlobRef | None:
        return self.announced.get(digest)

    def must_last(self, digest: Digest) -> bool:
        return True

    def blob_arrived(self, ref: BlobRef) -> None:
        """Nobody waits for it."""

    def why_no_mirror(self) -> str:
        return ""

    def order(self, order: Order) -> str:
        return "this peer takes no orders"

    def verify_token(self, proof: str, nonce: str, peer: PeerId) -> bool:
        return False

    def opened(self, link: ControlLink, envelope: Envelope) -> None:
        link.close("this peer only measures")

    def received(self, link: ControlLink, item: Envelope | Signed) -> None:
        """Nothing is listened to."""

    def closed(self, link: ControlLink, reason: str) -> None:
        """Nothing is kept."""


def measure_relayed(link: Link, *, size: int, cuts: int, congestion: list[str], say: Say) -> dict[str, Any]:
    """Rows for both directions under each congestion control. Raises ConfigError."""
    _check_known(congestion)
    rows: list[dict[str, Any]] = []
    for name in congestion:
        for direction in ("up", "down"):
            row = asyncio.run(_row(link, size=size, cuts=cuts, congestion=name, direction=direction))
            say(_line(row))
            rows.append(row)
    return {
        "link_mbit_per_s": link.bytes_per_s * 8 / 1e6,
        "link_rtt_ms": link.round_trip_s * 1000,
        "cap_mbit_per_s": link.cap * 8 / 1e6,
        "rows": rows,
    }


def _check_known(congestion: list[str]) -> None:
    for name in congestion:
        if name not in CONTROLS:
            raise ConfigError(f"--congestion {name!r}; allowed are {', '.join(CONTROLS)}")


async def _row(link: Link, *, size: int, cuts: int, congestion: str, direction: str) -> dict[str, Any]:
    async with _ends(link, congestion, size, direction) as ends:
        idle_ms = await ends.asked_meanwhile(asyncio.sleep(1.0))
        began_at = time.monotonic()
        busy_ms = await ends.asked_meanwhile(ends.transfer())
        took_s = time.monotonic() - began_at
        streams = ends.bulk.routes.to(ends.url).streams
    async with _ends(link, congestion, size, direction) as ends:
        await ends.transfer_with_cuts(cuts)
        received = ends.received()
    return {
        "direction": direction,
        "congestion": congestion,
        "congestion_in_use": congestion_granted(CONTROLS[congestion]),
        "bytes": size,
        "seconds": round(took_s, 3),
        "mbit_per_s": round(size * 8 / took_s / 1e6, 3),
        "rate_share": round(size / took_s / link.bytes_per_s, 4),
        "streams": streams,
        "cuts": cuts,
        "resent_share": round(max(0, received - size) / size, 5),
        "control_rtt_idle_p50_ms": _quantile(idle_ms, 0.5),
        "control_rtt_p50_ms": _quantile(busy_ms, 0.5),
        "control_rtt_p99_ms": _quantile(busy_ms, 0.99),
    }


@dataclass
class _Ends:
    """A blob at one end of the relay, and a store without it at the other."""

    url: str
    relay: Relay
    server: HttpServer
    bulk: Bulk
    asking: Session
    store: BlobStore
    ref: BlobRef
    direction: str

    async def transfer(self) -> None:
        if self.direction == "up":
            await upload_blob(self.bulk, self.url, self.ref, self.store, there="none")
        else:
            await fetch_blob(self.bulk, [Source(self.url, has_all=True)], self.ref, self.store)

    async def transfer_with_cuts(self, cuts: int) -> None:
        """The link is cut at even distances."""
        transferring = asyncio.create_task(self.transfer())
        for number in range(1, cuts + 1):
            at = number * self.ref.size // (cuts + 1)
            while self.relay.passed < at and not transferring.done():
                await asyncio.wait({transferring}, timeout=_LOOK_S)
            self.relay.cut()
        await transferring

    def received(self) -> int:
        """Bytes of pieces that came to the end that takes; of the index it takes a few more where it is sent one."""
        counters = self.server.counters if self.direction == "up" else self.bulk.counters
        return counters.bulk_in

    async def asked_meanwhile(self, errand: Awaitable[None]) -> list[float]:
        """Round trips of small questions, in ms, until the errand is done."""
        return await _asked_meanwhile(self.asking, self.url, errand)


async def _asked_meanwhile(session: Session, url: str, errand: Awaitable[None]) -> list[float]:
    done = asyncio.ensure_future(errand)
    took_ms: list[float] = []
    await read_small(session, f"{url}/v1/run")  # the connection is made before it is measured
    while not done.done():
        began_at = time.monotonic()
        await read_small(session, f"{url}/v1/run")
        took_ms.append((time.monotonic() - began_at) * 1000)
        await asyncio.wait({done}, timeout=ASK_EVERY_S)
    await done
    return took_ms


@asynccontextmanager
async def _ends(link: Link, congestion: str, size: int, direction: str) -> AsyncIterator[_Ends]:
    lanes = Lanes(up=Shaper(link.cap), congestion=congestion)
    with tempfile.TemporaryDirectory(prefix="geo_diloco-bench-") as folder:
        mine, theirs = BlobStore(Path(folder) / "mine"), BlobStore(Path(folder) / "theirs")
        data = os.urandom(size)
        port = _Port()
        ref = blob_ref(data)
        port.announced[ref.digest] = ref
        (mine if direction == "up" else theirs).put(data)
        server = HttpServer(port, Identity.generate(), theirs, lanes=Lanes(up=Shaper(link.cap), congestion=congestion))
        number = await server.start("127.0.0.1", 0)
        relay = Relay(number, bytes_per_s=link.bytes_per_s, round_trip_s=link.round_trip_s)
        try:
            async with (
                relay.running() as url,
                make_session(congestion=lanes.controls) as session,
                make_session(congestion=lanes.controls) as asking,
            ):
                yield _Ends(url, relay, server, Bulk(session, lanes=lanes), asking, mine, ref, direction)
        finally:
            await server.stop()


def measure_peer(address: str, *, congestion: str, say: Say) -> dict[str, Any]:
    """What comes from another peer's newest snapshot, and how long control takes meanwhile. Raises ConfigError."""
    _check_known([congestion])
    try:
        row = asyncio.run(_peer_row(url_from_address(address), congestion))
    except (TransferError, RemoteProtocolError) as exc:
        raise ConfigError(f"--to {address}: {exc}") from exc
    say(_line(row))
    return {"rows": [row]}


async def _peer_row(url: str, congestion: str) -> dict[str, Any]:
    lanes = Lanes(congestion=congestion)
    with tempfile.TemporaryDirectory(prefix="geo_diloco-bench-") as folder:
        store = BlobStore(Path(folder))
        async with make_session(congestion=lanes.controls) as session, make_session() as asking:
            signed = await fetch_snapshot(asking, url)
            if signed is None:
                raise TransferError("it has no snapshot to fetch")
            snapshot = open_snapshot(signed)
            bulk = Bulk(session, lanes=lanes)

            async def fetch() -> None:
                for blob in (*snapshot.theta, *snapshot.momentum):
                    await fetch_blob(bulk, [Source(url)], blob, store)

            began_at = time.monotonic()
            busy_ms = await _asked_meanwhile(asking, url, fetch())
            took_s = time.monotonic() - began_at
            size = sum(blob.size for blob in {*snapshot.theta, *snapshot.momentum})
            return {
                "direction": "down",
                "congestion": congestion,
                "congestion_in_use": congestion_granted(lanes.controls),
                "bytes": size,
                "seconds": round(took_s, 3),
                "mbit_per_s": round(size * 8 / took_s / 1e6, 3),
                "streams": bulk.routes.to(url).streams,
                "control_rtt_p50_ms": _quantile(busy_ms, 0.5),
                "control_rtt_p99_ms": _quantile(busy_ms, 0.99),
            }


def _quantile(values: list[float], share: float) -> float:
    """0 for none."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else 0.0


def _line(row: dict[str, Any]) -> str:
    used = row["congestion_in_use"] or "unknown"
    asked = row["congestion"] if row["congestion"] == used else f"{row['congestion']} (the kernel uses {used})"
    parts = [f"{row['direction']:>4} {asked:>6}: {row['mbit_per_s']:.2f} Mbit/s"]
    if "rate_share" in row:
        parts.append(f"{row['rate_share']:.1%} of the link, {row['resent_share']:.2%} twice after {row['cuts']} cuts")
    parts.append(f"{row['streams']} streams, control p99 {row['control_rtt_p99_ms']:.0f} ms")
    return ", ".join(parts)
