"""How a joiner comes by a state, with real servers: from all who have it at once, and nothing that it has already."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from geo_diloco.errors import TransferError
from geo_diloco.manifest import Digest, PeerId, Seq, Term, Version
from geo_diloco.node.contacting import ContactBook
from geo_diloco.node.gathering import BEHIND_MAX, goes_on_with
from geo_diloco.node.joining import Lobby, Position, _catch_up_from, blobs_at_hand, joined_blobs
from geo_diloco.node.rundir import RunDir
from geo_diloco.numerics.fragments import bytes_from_vector, fragment_digest, layout_from_module
from geo_diloco.observability import EventLog
from geo_diloco.protocol.election.ballots import Elector
from geo_diloco.protocol.messages import BlobRef, Found, FragmentHead, Open, Snapshot
from geo_diloco.runtime.bulk import Bulk, Lanes
from geo_diloco.runtime.driver import Worker
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.invite import Invite
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.pieces import PIECE_BYTES
from geo_diloco.runtime.proof import Authority, read_proof
from geo_diloco.runtime.session import make_session
from geo_diloco.runtime.shaping import Shaper
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import seal_snapshot
from geo_diloco.training.presets import demo_manifest
from tests.unit.node.test_contacting import ShutDirectory
from tests.unit.runtime.samples import RUN, RememberingPort, Served, served
from tests.unit.runtime.test_chain import BOOTS, FOUNDER, SECOND, THIRD, Chain

ELEMENTS = 12 * PIECE_BYTES // 4
"""Of each of the two fragments: some pieces."""
LAYOUT = layout_from_module(nn.ParameterList([torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)]), num_fragments=2)
UPLINK = 8_000_000
TWICE = 0.3
"""Of a blob: what may be sent twice, by one that was relieved of the rest because others were faster."""
PEERS = FOUNDER, SECOND, THIRD


def state(number: int) -> Tensor:
    """Of one fragment at some version."""
    return torch.arange(number, number + ELEMENTS, dtype=torch.float32)


STATES = {number: state(number) for number in range(4)}
MOMENTUM = torch.zeros(ELEMENTS)


@dataclass
class Run:
    """A founder who serves, two standbys, and a folder for whoever joins."""

    folder: Path
    servers: list[Served]
    authority: Authority
    roster: tuple[Elector, ...]
    lobby: Lobby
    store: BlobStore
    worker: Worker = field(default_factory=lambda: Worker("join"))

    def snapshot(self, seq: int, *states: int) -> Snapshot:
        def blob(vector: Tensor) -> BlobRef:
            return BlobStore(self.folder / "all").put(bytes_from_vector(vector))

        heads = tuple(
            FragmentHead(
                version=Version(number),
                base=Digest(f"{number:064x}"),
                state_digest=fragment_digest(STATES[number]),
                momentum_digest=fragment_digest(MOMENTUM),
            )
            for number in states
        )
        return Snapshot(
            run=RUN,
            branch=self.authority.branch,
            term=Term(1),
            seq=Seq(seq),
            head_digest=Digest("11" * 32),
            heads=heads,
            theta=tuple(blob(STATES[number]) for number in states),
            momentum=(blob(MOMENTUM),) * 2,
            tokens_per_fragment=(0, 0),
            num_elements=LAYOUT.num_elements,
            layout_digest=LAYOUT.digest,
            progress=0.0,
            roster=self.roster,
            roster_seq=Seq(0),
            opened=self.authority.opened[Term(1)],
        )

    def offer(self, who: int, snapshot: Snapshot, *, lacking: Sequence[BlobRef] = ()) -> None:
        """That peer hands it out, as its own."""
        it = self.servers[who]
        for blob in (*snapshot.theta, *snapshot.momentum):
            if blob not in lacking:
                it.store.put(BlobStore(self.folder / "all").get(blob))
        it.port.newest_snapshot = seal_snapshot(snapshot, PEERS[who])

    async def join(self, *, with_momentum: bool = False) -> Position:
        outer = OuterState(LAYOUT, with_momentum=with_momentum, with_residual=False)
        lobby, url = self.lobby, self.servers[0].url
        return await _catch_up_from(lobby, url, outer, self.store, self.worker, whole_chain=False)

    def sent(self) -> list[float]:
        """By each peer since it was asked last, in blobs of theta."""
        sent = [it.server.counters.bulk_out / (4 * ELEMENTS) for it in self.servers]
        for it in self.servers:
            it.server.counters.bulk_out = 0
        return sent

    def restart(self) -> None:
        """Of the joiner's process: what it does not keep is gone."""
        run_dir = self.lobby.run_dir
        self.store = BlobStore(run_dir.blobs)
        self.store.sweep(joined_blobs(run_dir) | blobs_at_hand(run_dir))


def with_run(folder: Path, go: Callable[[Run], Awaitable[None]], *, uplink: int = 0) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(
                    served(BlobStore(folder / f"peer-{n}"), RememberingPort(), lanes=Lanes(up=Shaper(uplink)))
                )
                for n in range(len(PEERS))
            ]
            addresses = [it.url.removeprefix("http://") for it in servers]
            chain, roster = chain_at(addresses)
            for it in servers:
                it.port.entries = chain.entries
            authority = read_proof(chain.entries, run=RUN, founder=FOUNDER.peer_id)
            session = await stack.enter_async_context(make_session())
            lobby = lobby_at(folder / "joiner", Bulk(session))
            run = Run(folder, servers, authority, roster, lobby, BlobStore(lobby.run_dir.blobs))
            stack.callback(run.worker.close)
            async with asyncio.timeout(60):
                await go(run)

    asyncio.run(scenario())


def chain_at(addresses: Sequence[str]) -> tuple[Chain, tuple[Elector, ...]]:
    """`found` and `open`, the founder serving; all are electors from the beginning."""
    roster = tuple(
        Elector(peer.peer_id, "ab", f"machine {peer.peer_id[:4]}", at)
        for peer, at in zip(PEERS, addresses, strict=True)
    )
    chain = Chain()
    digests = tuple(fragment_digest(STATES[0]) for _ in range(2))
    found = Found(
        header=chain.header(1),
        boot=BOOTS[FOUNDER.peer_id],
        state_digests=digests,
        momentum_digests=digests,
        layout_digest=LAYOUT.digest,
        num_elements=LAYOUT.num_elements,
        roster=roster,
    )
    chain.add(found, FOUNDER)
    head = chain.entries[-1].digest
    votes = tuple(chain.vote(1, FOUNDER, head, voter) for voter in (FOUNDER, SECOND))
    opened = Open(
        header=chain.header(1),
        syncer=FOUNDER.peer_id,
        boot=BOOTS[FOUNDER.peer_id],
        address=addresses[0],
        votes=votes,
    )
    return chain.add(opened, FOUNDER), roster


def lobby_at(folder: Path, bulk: Bulk) -> Lobby:
    folder.mkdir(exist_ok=True)
    run_dir = RunDir(folder)
    log = EventLog(run_dir.log)
    invite = Invite(run=RUN, bootstraps=("/ip4/127.0.0.1/tcp/1/p2p/Qm1",))
    manifest = replace(demo_manifest(), founder=FOUNDER.peer_id)
    book = ContactBook(RUN, log, own=run_dir.contacts, given=())
    directory = ShutDirectory()
    return Lobby(invite, run_dir, Identity.generate(), log, directory, bulk, book, manifest)  # type: ignore[arg-type]


def test_a_snapshot_comes_from_all_who_have_it_at_once_and_nothing_twice(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        for who in range(3):
            run.offer(who, run.snapshot(10, 1, 2))
        position = await run.join(with_momentum=True)
        assert [position.outer.version(p) for p in range(2)] == [1, 2]  # type: ignore[arg-type]
        sent = run.sent()
        assert 3.0 <= sum(sent) < 3.0 + TWICE, "two of theta, one of momentum, which both fragments share"
        assert all(each > 0.3 for each in sent), "one each, more or less"
        assert "fetching the run's state: 0.0 of " in run.lobby.run_dir.log.read_text(), "it may take long"

    with_run(tmp_path, go, uplink=UPLINK)


def test_who_stands_elsewhere_gives_what_is_the_same_there(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        run.offer(0, run.snapshot(10, 1, 2))
        run.offer(1, run.snapshot(11, 1, 3))
        run.servers[2].port.no_mirror = "its owner doesn't want it to"
        run.offer(2, run.snapshot(10, 1, 2))
        position = await run.join()
        assert position.snapshot.seq == 10 and position.place == (FOUNDER.peer_id, run.servers[0].url)
        sent = run.sent()
        assert sent[0] > 1.0 and 0.2 < sent[1] < 1.0 + TWICE and sent[2] == 0.0
        assert 2.0 <= sum(sent) < 2.0 + TWICE

    with_run(tmp_path, go, uplink=UPLINK)


def test_who_is_not_there_holds_nobody_up(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        run.offer(0, run.snapshot(10, 1, 2))
        run.offer(1, run.snapshot(10, 1, 2), lacking=run.snapshot(10, 1, 2).theta)
        await run.servers[2].server.stop()
        assert (await run.join()).snapshot.seq == 10

    with_run(tmp_path, go)


def test_one_who_comes_back_fetches_only_what_changed(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        run.offer(0, run.snapshot(10, 1, 2))
        await run.join()
        run.sent()
        run.restart()
        run.offer(0, run.snapshot(20, 1, 3))
        position = await run.join()
        assert position.snapshot.seq == 20 and sum(run.sent()) == pytest.approx(1.0, rel=0.01)
        run.restart()
        await run.join()
        assert sum(run.sent()) == 0.0, "nothing has changed"

    with_run(tmp_path, go)


def test_a_join_that_broke_off_goes_on_with_what_it_began(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        begun = run.snapshot(10, 1, 2)
        run.offer(0, begun, lacking=begun.theta[1:])
        with pytest.raises(TransferError):
            await run.join()
        assert run.sent()[0] == pytest.approx(1.0, rel=0.01)
        run.restart()
        run.offer(0, run.snapshot(20, 0, 3))
        run.offer(1, begun)
        position = await run.join()
        assert position.snapshot.seq == 10 and sum(run.sent()) == pytest.approx(1.0, rel=0.01)
        assert position.place == (FOUNDER.peer_id, run.servers[0].url), "who serves is looked for where it is now"
        assert not run.lobby.run_dir.joining.exists()

    with_run(tmp_path, go)


def test_what_was_begun_and_nobody_has_any_more_is_given_up(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        begun = run.snapshot(10, 1, 2)
        run.offer(0, begun, lacking=begun.theta[1:])
        with pytest.raises(TransferError):
            await run.join()
        run.sent()
        run.restart()
        run.offer(0, run.snapshot(20, 0, 3))
        position = await run.join()
        assert position.snapshot.seq == 20 and sum(run.sent()) == pytest.approx(2.0, rel=0.01)

    with_run(tmp_path, go)


def test_what_was_begun_long_ago_or_in_another_branch_is_not_gone_on_with(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        begun, newest = run.snapshot(10, 1, 2), run.snapshot(11, 0, 3)
        run.store.put(bytes_from_vector(STATES[1]))
        for seq, wanted in ((11, True), (10 + BEHIND_MAX, True), (11 + BEHIND_MAX, False), (10, False), (9, False)):
            assert goes_on_with(begun, replace(newest, seq=Seq(seq)), run.store, with_momentum=False) is wanted
        assert not goes_on_with(replace(begun, lineage=1), newest, run.store, with_momentum=False)
        run.store.put(bytes_from_vector(STATES[0]))
        assert not goes_on_with(begun, newest, run.store, with_momentum=False), "the newest is as little to fetch"

    with_run(tmp_path, go)


def test_nobody_is_asked_who_is_the_joiner_itself(tmp_path: Path) -> None:
    async def go(run: Run) -> None:
        run.lobby.identity = SECOND
        for who in range(3):
            run.offer(who, run.snapshot(10, 1, 2))
        await run.join()
        assert run.sent()[1] == 0.0
        assert PeerId(SECOND.peer_id) in {elector.peer for elector in run.roster}

    with_run(tmp_path, go)
