"""What a new update costs the syncer's uplink, with real servers: it goes to the mirrors, and they carry the rest."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from geo_diloco.manifest import PeerId
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.bulk import Bulk, Lanes
from geo_diloco.runtime.donor import Donors
from geo_diloco.runtime.pieces import PIECE_BYTES
from geo_diloco.runtime.session import make_session
from geo_diloco.runtime.shaping import Shaper
from geo_diloco.runtime.store import BlobStore
from tests.unit.runtime.samples import RememberingPort, Served, bytes_of, served

UPLINK = 12_000_000
"""Bytes per second of each server: with these a blob of some pieces is not there at once."""
SHARE = 0.2
"""Of what the learners get, that the syncer may have to send beside what the mirrors get."""
MIRRORS = 2


@dataclass
class Costs:
    """Blobs' worth of bytes that left each server."""

    syncer: float
    mirrors: list[float]


def name(number: int) -> PeerId:
    return PeerId(f"{number:064x}")


async def spread(tmp_path: Path, num_learners: int, size: int, *, updates: int, no_mirror: str = "") -> Costs:
    """Several updates, one after the other, each fetched by all at the moment it is there."""
    async with AsyncExitStack() as stack:

        async def serve(label: str, port: RememberingPort) -> Served:
            lanes = Lanes(up=Shaper(UPLINK))
            return await stack.enter_async_context(served(BlobStore(tmp_path / label), port, lanes=lanes))

        async def join(store: BlobStore, number: int, *, is_mirror: bool) -> Donors:
            session = await stack.enter_async_context(make_session())
            donors = Donors(Bulk(session), store, own=name(number), is_mirror=is_mirror)
            donors.found_at(syncer.url)
            donors.roster_addresses = lambda: [(name(n), url.removeprefix("http://")) for n, url in enumerate(urls)]
            return donors

        syncer = await serve("syncer", RememberingPort())
        mirrors = [await serve(f"mirror{n}", RememberingPort(no_mirror=no_mirror)) for n in range(MIRRORS)]
        urls = [syncer.url, *(mirror.url for mirror in mirrors)]
        peers = [await join(mirror.store, 1 + n, is_mirror=True) for n, mirror in enumerate(mirrors)]
        peers += [
            await join(BlobStore(tmp_path / f"learner{n}"), 100 + n, is_mirror=False) for n in range(num_learners)
        ]
        for number in range(updates):
            ref: BlobRef = syncer.store.put(bytes_of(size, number))
            for mirror in mirrors:
                mirror.port.announce(ref)
            async with asyncio.timeout(60):
                await asyncio.gather(*(peer.blob(ref) for peer in peers))
        total = size * updates
        sent = [each.server.counters.bulk_out / total for each in (syncer, *mirrors)]
        return Costs(sent[0], sent[1:])


@pytest.mark.parametrize("size", [300_000, 4 * PIECE_BYTES + 1000])
@pytest.mark.parametrize("num_learners", [3, 9])
def test_the_syncers_uplink_does_not_grow_with_the_learners(tmp_path: Path, size: int, num_learners: int) -> None:
    costs = asyncio.run(spread(tmp_path, num_learners, size, updates=3))
    assert costs.syncer <= MIRRORS + SHARE * num_learners + 0.1
    assert costs.syncer + sum(costs.mirrors) <= MIRRORS + num_learners + 0.1, "and nothing is sent twice"
    if num_learners > 3:
        assert all(each > 0.5 for each in costs.mirrors), "both of them carry some"


def test_without_mirrors_everybody_gets_it_from_the_syncer_and_soon_waits_no_more(tmp_path: Path) -> None:
    async def run() -> float:
        began_at = asyncio.get_running_loop().time()
        costs = await spread(tmp_path, 2, 300_000, updates=12, no_mirror="used up")
        assert costs.syncer == pytest.approx(MIRRORS + 2, rel=0.01) and sum(costs.mirrors) == 0
        return asyncio.get_running_loop().time() - began_at

    assert asyncio.run(run()) < 12 * 1.0, "less than the head start that mirrors get, for each update"
