"""Snapshots are of one moment, are made anew when they must be, and bear what a joiner needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_diloco.errors import BlobError, LocalProtocolError
from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, RunId, Seq, Term, Version
from geo_diloco.numerics.fragments import Layout, TensorSpec, fragment_digest
from geo_diloco.protocol.election.ballots import Elector, Opened
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import FragmentHead
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.snapshots import SAVE_EVERY_COMMITS, SnapshotShelf, Standing, loaded_from, standing_of
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import open_snapshot

N = 8
LAYOUT = Layout((TensorSpec("w", (2, 4), "float32", 0, 0, N, False),))
ME = Identity.generate()
RUN = RunId("1" * 40)
P0 = FragmentId(0)


class Shelved:
    """A shelf on a folder, and an outer state of one fragment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        self.store = BlobStore(root / "blobs")
        self.outer = OuterState(LAYOUT, with_momentum=True, with_residual=False)
        self.set_theta(0.0)
        (root / "state").mkdir(exist_ok=True)
        self.shelf = SnapshotShelf(
            root / "state", run=RUN, outer=self.outer, store=self.store, identity=ME, clock=lambda: self.now
        )

    def set_theta(self, value: float) -> None:
        self.outer.start_fragment(P0, torch.full((N,), value))

    def standing(self, seq: int = 1, **changed: Any) -> Standing:
        theta, momentum = self.outer.theta(P0), self.outer.momentum(P0)
        head = FragmentHead(
            version=Version(0),
            base=Digest(f"{seq:064d}"),
            state_digest=fragment_digest(theta),
            momentum_digest=fragment_digest(momentum),
        )
        made = Standing(
            branch=BranchId("2" * 64),
            term=Term(1),
            seq=Seq(seq),
            head_digest=Digest(f"{seq:064d}"),
            heads=(head,),
            tokens_per_fragment=(7,),
            num_elements=(N,),
            layout_digest=LAYOUT.digest,
            progress=0.5,
            roster=(Elector(ME.peer_id, "ab", "machine", "a:1"),),
            roster_seq=Seq(0),
            opened=Opened(ME.peer_id, BootId("3" * 16), "a:1", ()),
            amended=(),
            lineage=0,
            num_commits=0,
        )
        return replace(made, **changed)


@pytest.fixture
def it(tmp_path: Path) -> Iterator[Shelved]:
    yield Shelved(tmp_path)


def test_a_snapshot_says_where_it_stands_and_who_serves(it: Shelved) -> None:
    kept = it.shelf.make(it.standing())
    assert open_snapshot(kept.signed) == kept.snapshot
    loaded = loaded_from(kept.snapshot, whole_chain=True)
    standing = it.standing()
    for name in ("branch", "term", "seq", "head_digest", "heads", "roster", "roster_seq", "opened", "progress"):
        assert getattr(loaded, name) == getattr(standing, name)
    assert loaded.whole_chain


def test_the_same_moment_gives_the_same_snapshot_and_a_damaged_one_is_made_again(it: Shelved) -> None:
    it.set_theta(2.0)
    first = it.shelf.make(it.standing())
    assert it.shelf.make(it.standing()) is first
    blob = first.snapshot.theta[0]
    (it.root / "blobs" / blob.digest).write_bytes(bytes(blob.size))
    with pytest.raises(BlobError, match="damaged"):
        it.store.read_piece(blob, 0)
    assert it.shelf.make(it.standing()).signed.digest == first.signed.digest
    assert it.store.get(blob)


def test_a_young_one_will_do_for_who_asks_unless_the_term_is_another(it: Shelved) -> None:
    first = it.shelf.make(it.standing(1))
    it.now = 4.0
    assert it.shelf.young(it.standing(2), age_s_max=5.0) is first
    assert it.shelf.young(it.standing(2, term=Term(2)), age_s_max=5.0) is None
    it.now = 6.0
    assert it.shelf.young(it.standing(2), age_s_max=5.0) is None


def test_a_version_made_by_another_entry_has_other_bits(it: Shelved) -> None:
    """After a fork the same version number stands for something else."""
    first = it.shelf.make(it.standing(1))
    it.set_theta(1.0)
    second = it.shelf.make(it.standing(2))
    assert first.snapshot.theta != second.snapshot.theta


def test_facts_and_tensors_of_two_moments_are_a_bug(it: Shelved) -> None:
    standing = it.standing()
    ahead = replace(standing, heads=(replace(standing.heads[0], version=Version(1)),))
    with pytest.raises(LocalProtocolError, match="the state is at 0"):
        it.shelf.make(ahead)


def test_what_is_written_is_restored_and_what_is_not_durable_never_was(it: Shelved) -> None:
    assert it.shelf.is_due(0)
    written = it.shelf.make(it.standing(1))
    it.shelf.write(written)
    assert not it.shelf.is_due(SAVE_EVERY_COMMITS - 1) and it.shelf.is_due(SAVE_EVERY_COMMITS)
    it.set_theta(1.0)
    it.shelf.drop(it.shelf.make(it.standing(2)))
    again = Shelved(it.root)
    assert again.shelf.restore() == written.snapshot
    assert again.shelf.newest_for(P0, Version(0)) == written.snapshot
    it.shelf.hurry()
    assert it.shelf.is_due(0)


def test_the_older_of_two_outlives_a_restart_for_when_the_newest_turns_out_damaged(it: Shelved) -> None:
    written = []
    for seq in (1, 2):
        it.set_theta(float(seq))
        written.append(it.shelf.make(it.standing(seq)))
        it.shelf.write(written[-1])
    again = Shelved(it.root)
    assert again.shelf.restore() == written[1].snapshot
    again.store.sweep(again.shelf.blobs())  # as every start does
    for blob in written[1].snapshot.theta:
        (it.root / "blobs" / blob.digest).write_bytes(bytes(blob.size))
    after = Shelved(it.root)
    assert after.shelf.restore() == written[0].snapshot
    assert after.outer.theta(P0).tolist() == [1.0] * N


def test_what_a_reform_has_left_behind_is_not_restored(it: Shelved) -> None:
    """Its seq is the higher one."""
    for seq in (7, 8):
        it.set_theta(float(seq))
        it.shelf.write(it.shelf.make(it.standing(seq)))
    it.set_theta(1.0)
    goes_on = it.shelf.make(it.standing(5, lineage=1, term=Term(2)))
    it.shelf.write(goes_on)
    assert Shelved(it.root).shelf.restore() == goes_on.snapshot
    it.set_theta(2.0)
    later = it.shelf.make(it.standing(6, lineage=1, term=Term(2)))
    it.shelf.write(later)
    assert Shelved(it.root).shelf.restore() == later.snapshot


def test_one_is_due_when_the_chain_has_gone_back(it: Shelved) -> None:
    it.outer.load_fragment(
        P0,
        Version(100),
        theta=bytes(4 * N),
        momentum=bytes(4 * N),
        state_digest=fragment_digest(torch.zeros(N)),
        momentum_digest=fragment_digest(torch.zeros(N)),
    )
    heads = (replace(it.standing().heads[0], version=Version(100)),)
    it.shelf.write(it.shelf.make(it.standing(1, heads=heads)))
    assert not it.shelf.is_due(100) and it.shelf.is_due(99)


def test_a_ledger_that_is_finished_is_one_entry_too_far() -> None:
    ledger = Ledger()
    assert standing_of(ledger, lambda seq: None) is None
    ledger.opened = Opened(ME.peer_id, BootId("3" * 16), "", ())
    ledger.heads = [
        FragmentHead(
            version=Version(0), base=Digest("a" * 64), state_digest=Digest("b" * 64), momentum_digest=Digest("c" * 64)
        )
    ]
    ledger.seq, ledger.finished = Seq(9), "done"
    standing = standing_of(ledger, lambda seq: Digest(f"{seq:064d}"))
    assert standing is not None and (standing.seq, standing.head_digest) == (8, f"{8:064d}")
