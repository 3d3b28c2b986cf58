"""Nothing is let go of that a snapshot on this disk does not contain, or that somebody a little behind may want."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import Digest, Seq
from geo_diloco.protocol.messages import BlobRef, Commit
from geo_diloco.protocol.pruning import Pruning
from tests.support.chains import ChainBuilder

SIZE = 10
"""Of every update."""


def commits(number: int, fragments: int = 2) -> list[Commit]:
    builder = ChainBuilder.opened()
    made = [builder.commit(index % fragments).entry for index in range(number)]
    return [entry for entry in made if isinstance(entry, Commit)]


def folded(made: list[Commit], *, versions_kept: int = 1, bytes_kept: int | None = 0) -> Pruning:
    pruning = Pruning(versions_kept=versions_kept, bytes_kept=bytes_kept)
    pruning.start(2)
    for commit in made:
        pruning.folded(commit)
    return pruning


def updates(made: list[Commit]) -> tuple[BlobRef, ...]:
    return tuple(commit.update for commit in made)


def test_an_update_goes_when_two_snapshots_contain_it() -> None:
    made = commits(8)
    pruning = folded(made)
    assert pruning.due() == ()
    pruning.snapshot_kept(made[3].header.seq)
    assert pruning.due() == (), "that snapshot may turn out to be damaged"
    pruning.snapshot_kept(made[7].header.seq)
    assert pruning.due() == updates(made[:4])
    assert pruning.due() == (), "told once"
    pruning.snapshot_kept(made[7].header.seq)
    assert pruning.due() == updates(made[4:6]), "the newest of each fragment stay"


def test_the_newest_versions_of_every_fragment_stay() -> None:
    made = commits(12, fragments=1)
    pruning = folded(made, versions_kept=5)
    pruning.snapshot_kept(made[-1].header.seq)
    pruning.snapshot_kept(made[-1].header.seq)
    assert pruning.due() == updates(made[:7])


def test_more_stay_as_long_as_they_take_little() -> None:
    made = commits(12)
    pruning = folded(made, bytes_kept=9 * SIZE)
    pruning.snapshot_kept(made[-1].header.seq)
    pruning.snapshot_kept(made[-1].header.seq)
    assert pruning.due() == updates(made[:3]), "the oldest first"
    everything = folded(made, bytes_kept=None)
    everything.snapshot_kept(made[-1].header.seq)
    everything.snapshot_kept(made[-1].header.seq)
    assert everything.due() == ()


def test_bytes_that_a_later_commit_has_too_stay() -> None:
    """Two updates that change nothing are the same bytes."""
    first, *others = commits(6, fragments=1)
    made = [first, *others[:4], replace(others[4], update=first.update)]
    pruning = folded(made)
    pruning.snapshot_kept(Seq(99))
    pruning.snapshot_kept(Seq(99))
    assert pruning.due() == updates(made[1:5])


def test_what_a_reform_left_behind_counts_no_more() -> None:
    made = commits(8)
    pruning = folded(made)
    pruning.snapshot_kept(made[1].header.seq)
    pruning.snapshot_kept(made[6].header.seq)
    assert pruning.rewound(made[3].header.seq)
    assert not pruning.rewound(made[3].header.seq), "the one that is left is not beyond"
    assert pruning.floor is None, "of two snapshots one is of what was left behind"
    for commit in (again := [replace(each, update=BlobRef(Digest("f" * 64), SIZE)) for each in made[4:6]]):
        pruning.folded(commit)
    pruning.snapshot_kept(again[1].header.seq)
    assert pruning.floor == made[1].header.seq
    pruning.snapshot_kept(again[1].header.seq)
    assert pruning.due() == updates(made[:4]), "and nothing of what was left behind"


def test_two_snapshots_of_what_was_left_behind_are_none() -> None:
    made = commits(8)
    pruning = folded(made)
    pruning.snapshot_kept(made[5].header.seq)
    pruning.snapshot_kept(made[6].header.seq)
    pruning.rewound(made[3].header.seq)
    pruning.snapshot_kept(made[3].header.seq)
    assert pruning.floor is None
