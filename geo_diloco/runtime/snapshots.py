"""Snapshots of the outer state: one blob per fragment, raw float32, named and signed as of a seq.

A snapshot must be of one moment. The facts are taken from the core on the loop's thread while the outer state stands
exactly there (`Standing`), and the worker thread, which does one thing after another, is asked for the tensors in the
same breath. Fragments that did not change keep their blob. A syncer's state may be ahead of what is durable: such a
snapshot is neither written down nor handed out before it is. One is put on disk every so many commits, so that a
restart is "the newest snapshot and the entries after it"; blobs that only older snapshots name are deleted once nobody
can still be fetching them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from geo_diloco.errors import BlobError, DigestMismatch, LocalProtocolError, RemoteProtocolError
from geo_diloco.manifest import BranchId, Digest, FragmentId, RunId, Seq, Term, Version
from geo_diloco.protocol.amendments import Amended
from geo_diloco.protocol.election.ballots import Elector, Opened
from geo_diloco.protocol.events import SnapshotLoaded
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import BlobRef, FragmentHead, Snapshot
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.merger import OuterState
from geo_diloco.runtime.store import BlobStore, blob_ref
from geo_diloco.runtime.wire import Signed, open_snapshot, seal_snapshot

SAVE_EVERY_COMMITS = 64
KEPT_S = 600.0
"""A snapshot that was handed out stays fetchable for this long."""
KEPT_MIN = 2
_NAME = re.compile(r"snapshot-(\d{12})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where the outer state stands: the facts of a ledger at one moment."""

    branch: BranchId
    term: Term
    seq: Seq
    head_digest: Digest
    heads: tuple[FragmentHead, ...]
    tokens_per_fragment: tuple[int, ...]
    num_elements: tuple[int, ...]
    layout_digest: Digest
    progress: float
    roster: tuple[Elector, ...]
    roster_seq: Seq
    opened: Opened
    amended: tuple[Amended, ...]
    lineage: int
    num_commits: int


def standing_of(ledger: Ledger, digest_at: Callable[[Seq], Digest | None]) -> Standing | None:
    """None before the first term is open. No snapshot goes beyond the last commit of a run: that it is finished is for
    whoever loads one to hear from the chain."""
    if ledger.opened is None or not ledger.heads:
        return None
    standing = Standing(
        branch=ledger.branch,
        term=ledger.term,
        seq=ledger.seq,
        head_digest=ledger.head_digest,
        heads=tuple(ledger.heads),
        tokens_per_fragment=tuple(ledger.tokens),
        num_elements=ledger.num_elements,
        layout_digest=ledger.layout_digest,
        progress=ledger.progress,
        roster=ledger.roster,
        roster_seq=ledger.roster_seq,
        opened=ledger.opened,
        amended=ledger.amended,
        lineage=ledger.lineage,
        num_commits=ledger.num_commits,
    )
    if ledger.finished is None:
        return standing
    before = digest_at(Seq(ledger.seq - 1))
    return None if before is None else replace(standing, seq=Seq(ledger.seq - 1), head_digest=before)


@dataclass
class Kept:
    """A snapshot whose blobs are in the store."""

    snapshot: Snapshot
    signed: Signed
    at: float
    """Handed out last."""
    made_at: float


class SnapshotShelf:
    """Makes, keeps and finds the snapshots of one peer. `make`, `write` and `restore` belong to the worker thread."""

    def __init__(
        self,
        folder: Path,
        *,
        run: RunId,
        outer: OuterState,
        store: BlobStore,
        identity: Identity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._run = run
        self._outer = outer
        self._store = store
        self._identity = identity
        self._clock = clock
        self._made: dict[FragmentId, tuple[Digest, BlobRef, BlobRef]] = {}
        """By the entry that made the version: after a fork a version number may stand for other bits."""
        self._kept: list[Kept] = []
        self._commits_written = -1
        """Commits that the newest one on disk contains; -1 if there is none."""
        self.named: set[Digest] = set()
        """Blobs of kept snapshots, and of one in the making."""

    def is_due(self, num_commits: int) -> bool:
        """Also if a reform has taken the chain back behind the newest one."""
        since = num_commits - self._commits_written
        return self._commits_written < 0 or not 0 <= since < SAVE_EVERY_COMMITS

    def hurry(self) -> None:
        """Something that a restart may need is gone from here: with a snapshot of now it doesn't. For any thread."""
        self._commits_written = -1

    def young(self, standing: Standing, *, age_s_max: float) -> Kept | None:
        """The newest one, if it is of this term and branch, whole, and made lately or of this very moment."""
        newest = self._kept[-1] if self._kept else None
        if newest is None or not self._is_whole(newest.snapshot):
            return None
        snapshot = newest.snapshot
        same_chain = (snapshot.branch, snapshot.term) == (standing.branch, standing.term)
        is_young = self._clock() - newest.made_at < age_s_max
        if not same_chain or not (is_young or snapshot.head_digest == standing.head_digest):
            return None
        newest.at = self._clock()
        return newest

    def make(self, standing: Standing) -> Kept:
        """A signed snapshot of now, which the outer state stands at; the same again while nothing has changed."""
        young = self.young(standing, age_s_max=0.0)
        if young is not None:
            return young
        blobs = [self._blobs_of(FragmentId(p), head) for p, head in enumerate(standing.heads)]
        snapshot = Snapshot(
            run=self._run,
            branch=standing.branch,
            term=standing.term,
            seq=standing.seq,
            head_digest=standing.head_digest,
            heads=standing.heads,
            theta=tuple(theta for theta, _ in blobs),
            momentum=tuple(momentum for _, momentum in blobs),
            tokens_per_fragment=standing.tokens_per_fragment,
            num_elements=standing.num_elements,
            layout_digest=standing.layout_digest,
            progress=standing.progress,
            roster=standing.roster,
            roster_seq=standing.roster_seq,
            opened=standing.opened,
            amended=standing.amended,
            lineage=standing.lineage,
        )
        now = self._clock()
        kept = Kept(snapshot, seal_snapshot(snapshot, self._identity), now, now)
        self._kept.append(kept)
        self._prune()
        return kept

    def _is_whole(self, snapshot: Snapshot) -> bool:
        """A blob that was found damaged on disk is dropped; then its snapshot is made again."""
        return all(self._store.has(blob) for blob in (*snapshot.theta, *snapshot.momentum))

    def drop(self, kept: Kept) -> None:
        """It turned out to be of a chain that does not count."""
        self._kept = [each for each in self._kept if each is not kept]

    def write(self, kept: Kept) -> None:
        """Have one that is durable on disk, as the newest. One with a later seq is of what a reform has left behind."""
        seq = kept.snapshot.seq
        for path in self._files():
            if path.name > f"snapshot-{seq:012d}.json":
                path.unlink(missing_ok=True)
        atomic_write(self._folder / f"snapshot-{seq:012d}.json", kept.signed.to_line().encode())
        self._commits_written = sum(head.version for head in kept.snapshot.heads)
        for path in self._files()[:-KEPT_MIN]:
            path.unlink(missing_ok=True)

    def _blobs_of(self, fragment: FragmentId, head: FragmentHead) -> tuple[BlobRef, BlobRef]:
        version = self._outer.version(fragment)
        if version != head.version:
            raise LocalProtocolError(f"a snapshot of fragment {fragment} at {head.version}, the state is at {version}")
        made = self._made.get(fragment)
        if made is None or made[0] != head.base or not (self._store.has(made[1]) and self._store.has(made[2])):
            theta, momentum = self._outer.fragment_bytes(fragment)
            self.named |= {blob_ref(theta).digest, blob_ref(momentum).digest}
            made = (head.base, self._store.put(theta), self._store.put(momentum))
            self._made[fragment] = made
        return made[1], made[2]

    def _files(self) -> list[Path]:
        """Oldest first."""
        return sorted(path for path in self._folder.glob("snapshot-*.json") if _NAME.fullmatch(path.name))

    def _prune(self) -> None:
        on_disk = {int(match[1]) for path in self._files()[-KEPT_MIN:] if (match := _NAME.fullmatch(path.name))}
        old_at = self._clock() - KEPT_S
        stay = [each for each in self._kept[:-KEPT_MIN] if each.at >= old_at or each.snapshot.seq in on_disk]
        gone = [each for each in self._kept[:-KEPT_MIN] if each not in stay]
        self._kept = stay + self._kept[-KEPT_MIN:]
        named = {blob for each in self._kept for blob in (*each.snapshot.theta, *each.snapshot.momentum)}
        for each in gone:
            for blob in {*each.snapshot.theta, *each.snapshot.momentum} - named:
                self._store.delete(blob)
        self.named = self.blobs()

    def blobs(self) -> set[Digest]:
        """Digests of all blobs that kept snapshots name."""
        return {blob.digest for each in self._kept for blob in (*each.snapshot.theta, *each.snapshot.momentum)}

    # ---- finding

    def restore(self) -> Snapshot | None:
        """Load the newest snapshot on disk that can be used into the outer state. None if there is none. An older one
        that is whole stays, for the day on which this one turns out to be damaged."""
        newest: Kept | None = None
        for path in reversed(self._files()):
            try:
                signed = Signed.from_line(path.read_bytes())
                snapshot = open_snapshot(signed)
                if signed.signer != self._identity.peer_id or snapshot.run != self._run:
                    continue
                if newest is None:
                    load_snapshot(snapshot, self._outer, self._store.get)
            except (OSError, RemoteProtocolError, BlobError, DigestMismatch):
                continue
            kept = Kept(snapshot, signed, self._clock(), -math.inf)
            if newest is None:
                newest = kept
            if snapshot.branch == newest.snapshot.branch and self._is_whole(snapshot):
                self._kept.insert(0, kept)
        if newest is None:
            return None
        self._commits_written = sum(head.version for head in newest.snapshot.heads)
        for p, head in enumerate(newest.snapshot.heads):
            self._made[FragmentId(p)] = (head.base, newest.snapshot.theta[p], newest.snapshot.momentum[p])
        self.named = self.blobs()
        return newest.snapshot

    def newest_for(self, fragment: FragmentId, at_most: Version) -> Snapshot | None:
        """The newest kept one on disk that holds the fragment at that version or an earlier one."""
        on_disk = {path.name for path in self._files()}
        fitting = [
            each.snapshot
            for each in self._kept
            if f"snapshot-{each.snapshot.seq:012d}.json" in on_disk and each.snapshot.heads[fragment].version <= at_most
        ]
        return fitting[-1] if fitting else None


def snapshots_in(folder: Path) -> list[Snapshot]:
    """Those written down in a peer's folder that can be read, oldest first; whether their blobs are held is another
    matter."""
    found: list[Snapshot] = []
    for path in sorted(path for path in folder.glob("snapshot-*.json") if _NAME.fullmatch(path.name)):
        with suppress(OSError, RemoteProtocolError):
            found.append(open_snapshot(Signed.from_line(path.read_bytes())))
    return found


def loaded_from(snapshot: Snapshot, *, whole_chain: bool) -> SnapshotLoaded:
    """What the core hears of a snapshot that the outer state was loaded from."""
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
        roster=snapshot.roster,
        roster_seq=snapshot.roster_seq,
        opened=snapshot.opened,
        whole_chain=whole_chain,
        amended=snapshot.amended,
        lineage=snapshot.lineage,
    )


def load_snapshot(
    snapshot: Snapshot, outer: OuterState, read: Callable[[BlobRef], bytes], *, only: FragmentId | None = None
) -> None:
    """Take a snapshot's fragments (or one) into the outer state. Raises BlobError or DigestMismatch."""
    for p, head in enumerate(snapshot.heads):
        if only is not None and p != only:
            continue
        outer.load_fragment(
            FragmentId(p),
            head.version,
            theta=read(snapshot.theta[p]),
            momentum=read(snapshot.momentum[p]) if outer.with_momentum else None,
            state_digest=head.state_digest,
            momentum_digest=head.momentum_digest,
        )
