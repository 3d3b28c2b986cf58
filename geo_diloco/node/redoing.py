"""Doing again what a run's folder says was done: updates folded into the state, and merges out of their contributions.

Both must give the bits that were committed. An update is redone from the chain alone. A merge is not: a commit lists
normalised weights, and what earlier encodings lost is private to the process that merged. So merges are redone along
the tape, which has the very orders, in the very process starts. What is not held here any more is passed over and
counted; nothing is written.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from geo_diloco.errors import BlobError, DigestMismatch, FrameError, RunDirError, TapeError
from geo_diloco.manifest import Digest, FragmentId, RunManifest, Seq, Term, Version
from geo_diloco.node.rundir import RunDir, joined_snapshot
from geo_diloco.numerics.fragments import Layout, fragment_digest, gather, layout_from_module, named_trainable
from geo_diloco.protocol.effects import Effect, Merge, Seal
from geo_diloco.protocol.events import Applied, FoundRun, FragmentReplaced, Merged, MergeFailed, Sealed, SnapshotLoaded
from geo_diloco.protocol.messages import Commit, Found, Snapshot
from geo_diloco.runtime.chain import counting_chain, read_log
from geo_diloco.runtime.merger import MergeError, MergeOutcome, OuterState
from geo_diloco.runtime.replacing import apply_of
from geo_diloco.runtime.snapshots import load_snapshot, snapshots_in
from geo_diloco.runtime.store import BlobStore, blob_ref
from geo_diloco.tape import TapeBoot, TapeEvent
from geo_diloco.training.models import build_model


def name_of(commit: Commit) -> str:
    """A commit, as people are told of it."""
    return f"entry {commit.header.seq} (fragment {commit.fragment}, version {commit.version})"


@dataclass(frozen=True)
class _Beginning:
    """A state that lies on this disk whole."""

    version: Version
    load: Callable[[], None]


class Refold:
    """Any fragment at any version that counts, as far as the states and updates in a folder go."""

    def __init__(self, folder: RunDir, manifest: RunManifest) -> None:
        """Raises RunDirError for a damaged folder."""
        self._folder = folder
        self._model = build_model(manifest.model)
        self.layout: Layout = layout_from_module(self._model, num_fragments=manifest.sync.num_fragments)
        self.store = BlobStore(folder.blobs, is_read_only=True)
        self.updates_kept = manifest.sync.staleness_max if manifest.sync.late_form == "paper" else 0
        self.holds_momentum = folder.key.exists() or folder.state.is_dir()
        self.outer = OuterState(
            self.layout, with_momentum=self.holds_momentum, with_residual=False, updates_kept=self.updates_kept
        )
        entries = [entry for _, entry in counting_chain(read_log(folder.chain))]
        self.commits = [entry for entry in entries if isinstance(entry, Commit)]
        """Of the chain that counts, oldest first."""
        self._by_version = {(commit.fragment, commit.version): commit for commit in self.commits}
        found = entries[0] if entries and isinstance(entries[0], Found) else None
        self._beginnings = [self._beginnings_of(FragmentId(p), found) for p in range(self.layout.num_fragments)]
        self._standing: dict[FragmentId, Version] = {}

    def _beginnings_of(self, fragment: FragmentId, found: Found | None) -> list[_Beginning]:
        """By version: Theta_0 of a founder, the snapshot that a standby joined with, those kept since."""
        joined = joined_snapshot(self._folder)
        if joined is None and self._folder.joined.exists():
            raise RunDirError(f"{self._folder.joined}: the snapshot this peer began with is damaged")
        snapshots = [*([] if joined is None else [joined]), *snapshots_in(self._folder.state)]
        usable = [each for each in snapshots if self._is_usable(each, fragment)]
        beginnings = [
            _Beginning(each.heads[fragment].version, lambda each=each: self._load(each, fragment))  # type: ignore[misc]
            for each in usable
        ]
        if joined is None and found is not None:
            theta = gather(named_trainable(self._model), self.layout, fragment)
            if fragment_digest(theta) == found.state_digests[fragment]:
                beginnings.append(_Beginning(Version(0), lambda: self.outer.start_fragment(fragment, theta)))
        return sorted(beginnings, key=lambda each: each.version)

    def _is_usable(self, snapshot: Snapshot, fragment: FragmentId) -> bool:
        blobs = [snapshot.theta[fragment], *([snapshot.momentum[fragment]] if self.holds_momentum else [])]
        head = snapshot.heads[fragment]
        commit = self._by_version.get((fragment, head.version))
        return all(map(self.store.has, blobs)) and (commit is None or commit.state_digest == head.state_digest)

    def _load(self, snapshot: Snapshot, fragment: FragmentId) -> None:
        try:
            load_snapshot(snapshot, self.outer, self.store.get, only=fragment)
        except (BlobError, DigestMismatch) as exc:
            raise RunDirError(f"{self._folder.root}: the snapshot of seq {snapshot.seq} is damaged: {exc}") from exc

    def redo_all(self) -> int:
        """Redo every update that is held, from the first state on. How many agreed; where updates are gone a fragment
        goes on with the next state that is held. Raises TapeError at the first that does not make what its commit says.
        """
        self._standing.clear()
        for p in range(self.layout.num_fragments):
            self._begin_beyond(FragmentId(p), Version(0))
        return sum(self._redo(commit) for commit in self.commits)

    def _redo(self, commit: Commit) -> bool:
        standing = self._standing.get(commit.fragment)
        if standing is None or commit.version <= standing:
            return False
        if commit.version == standing + 1 and self.store.has(commit.update):
            self._apply(commit)
            return True
        self._begin_beyond(commit.fragment, commit.version)
        return False

    def _begin_beyond(self, fragment: FragmentId, version: Version) -> None:
        """At the first state of that version or a later one; nowhere if there is none."""
        self._standing.pop(fragment, None)
        for beginning in self._beginnings[fragment]:
            if beginning.version >= version:
                beginning.load()
                self._standing[fragment] = beginning.version
                return

    def _apply(self, commit: Commit) -> None:
        try:
            self.outer.apply(apply_of(commit), self.store.get(commit.update))
        except (BlobError, FrameError, DigestMismatch) as exc:
            where = f"{self._folder.chain.name}:{commit.header.seq + 1}"
            raise TapeError(f"{where}: {name_of(commit)}: {exc}") from exc
        self._standing[commit.fragment] = commit.version

    def bring(self, fragment: FragmentId, version: Version, state_digest: Digest) -> bool:
        """Have `outer` hold the fragment at that version. False if that can't be done from what is held here."""
        standing = self._standing.get(fragment)
        if standing is None or standing > version or not self._holds_updates(fragment, standing, version):
            for beginning in reversed(self._beginnings[fragment]):
                if beginning.version <= version and self._holds_updates(fragment, beginning.version, version):
                    beginning.load()
                    self._standing[fragment] = beginning.version
                    break
            else:
                return False
        for each in range(self._standing[fragment] + 1, version + 1):
            self._apply(self._by_version[fragment, Version(each)])
        return fragment_digest(self.outer.theta(fragment)) == state_digest

    def _holds_updates(self, fragment: FragmentId, after: Version, until: Version) -> bool:
        commits = [self._by_version.get((fragment, Version(each))) for each in range(after + 1, until + 1)]
        return all(commit is not None and self.store.has(commit.update) for commit in commits)


class MergeRedo:
    """Follows a tape and does every merge again that became a commit: same order, same state, same bits."""

    def __init__(self, refold: Refold, manifest: RunManifest) -> None:
        self._refold = refold
        self._manifest = manifest
        self.num_redone = 0
        self.num_missing = 0
        """Commits that could not be redone: a contribution is not held here, or one of a merge before it is not."""
        self.sealed: list[tuple[Commit, Digest]] = []
        """Commits of this peer that are on its disk, as the tape has them."""
        self._part: TapeBoot | None = None
        self._begin()

    def _begin(self) -> None:
        """Another process: it had nothing but what its disk gave it."""
        refold = self._refold
        self._outer = OuterState(
            refold.layout, with_momentum=True, with_residual=True, updates_kept=refold.updates_kept
        )
        self._from_chain: dict[FragmentId, tuple[Version, Digest]] = {}
        """Fragments that stand where the chain says, and not where a merge of this process left them."""
        self._own: set[FragmentId] = set()
        """Fragments that `_outer` holds as this process made them."""
        self._orders: dict[tuple[FragmentId, int, int], deque[Merge]] = defaultdict(deque)
        self._seals: dict[tuple[Term, Seq], Commit] = {}
        self._made: dict[tuple[FragmentId, Version], MergeOutcome | MergeError] = {}

    def watch(self, part: TapeBoot, record: TapeEvent, effects: Sequence[Effect]) -> str | None:
        """The next record of the tape, and what was asked for. What differs from what was committed, if something does.

        Raises TapeError if an update on the way there can't be redone.
        """
        if part is not self._part:
            self._part = part
            self._begin()
        difference = self._happened(record)
        for effect in effects:
            if isinstance(effect, Merge):
                self._orders[effect.fragment, effect.round, effect.attempt].append(effect)
            elif isinstance(effect, Seal) and isinstance(effect.entry, Commit):
                self._seals[effect.entry.header.term, effect.entry.header.seq] = effect.entry
        return difference

    def _happened(self, record: TapeEvent) -> str | None:
        event = record.event
        match event:
            case FoundRun():
                for p, digest in enumerate(event.state_digests):
                    self._stands(FragmentId(p), Version(0), digest)
            case SnapshotLoaded():
                for p, head in enumerate(event.heads):
                    self._stands(FragmentId(p), head.version, head.state_digest)
            case FragmentReplaced():
                self._stands(event.fragment, event.version, event.state_digest)
            case Applied():
                if event.fragment not in self._own or self._outer.version(event.fragment) != event.version:
                    self._stands(event.fragment, event.version, event.state_digest)
            case Merged() | MergeFailed():
                orders = self._orders[event.fragment, event.round, event.attempt]
                order = orders.popleft() if orders else None
                if isinstance(event, Merged) and order is not None:
                    self._merge(order)
            case Sealed():
                commit = self._seals.pop((event.term, event.seq), None)
                if commit is not None:
                    self.sealed.append((commit, event.digest))
                    return self._committed(commit)
        return None

    def _stands(self, fragment: FragmentId, version: Version, digest: Digest) -> None:
        self._own.discard(fragment)
        self._from_chain[fragment] = version, digest

    def _merge(self, order: Merge) -> None:
        made_at = order.fragment, order.version
        self._made.pop(made_at, None)
        if not self._is_ready(order) or not all(self._refold.store.has(each.blob) for each in order.inputs):
            return
        try:
            self._made[made_at] = self._outer.merge(order, self._refold.store.get, self._manifest)
        except MergeError as exc:
            self._made[made_at] = exc

    def _is_ready(self, order: Merge) -> bool:
        """Whether the state that was merged into is here."""
        fragment = order.fragment
        standing = self._from_chain.get(fragment)
        if standing is not None:
            if not self._refold.bring(fragment, *standing):
                return False
            self._outer.begin_at(fragment, self._refold.outer)
            self._from_chain.pop(fragment)
            self._own.add(fragment)
        return fragment in self._own and self._outer.version(fragment) == order.version - 1

    def _committed(self, commit: Commit) -> str | None:
        made = self._made.pop((commit.fragment, commit.version), None)
        if made is None:
            self.num_missing += 1
            self._own.discard(commit.fragment)  # what its encoding lost is not known, so nor is what follows
            self._from_chain.pop(commit.fragment, None)
            return None
        if isinstance(made, MergeError):
            return f"{name_of(commit)} can't be merged again: {made.reason}"
        again = {
            "update": (blob_ref(made.frame).digest, commit.update.digest),
            "state": (made.state_digest, commit.state_digest),
            "momentum": (made.momentum_digest, commit.momentum_digest),
        }
        for what, (redone, committed) in again.items():
            if redone != committed:
                return f"{name_of(commit)} merged again has {what} {redone[:12]}, the commit says {committed[:12]}"
        self._outer.commit(commit.fragment, commit.version)
        self.num_redone += 1
        return None


def difference_to_chain(folder: RunDir, sealed: Sequence[tuple[Commit, Digest]]) -> str | None:
    """The first commit that this peer sealed and that its chain does not have, or has otherwise. Read after the tape:
    an entry is on disk before the tape says so. Raises RunDirError."""
    log = dict(read_log(folder.chain))
    for commit, digest in sealed:
        entry = log.get(digest)
        if entry is None:
            return f"{folder.chain.name}: {name_of(commit)} was sealed as {digest[:12]}, which is not there"
        if entry != commit:
            return f"{folder.chain.name}: {name_of(commit)} is not what the tape says was sealed"
    return None
