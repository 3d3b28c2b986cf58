"""Following the chain: from an entry to a new version of a fragment, for every peer that isn't syncer.

Entries may come in any order and more than once; the ledger takes them in order, a gap is fetched. Each commit's
update is fetched at once and applied strictly in version order, fragment by fragment. A peer that is far behind, or
whose updates are no longer held by anyone, replaces the whole fragment by a snapshot instead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, FragmentId, Seq, Version
from geo_diloco.protocol.effects import (
    ApplyUpdate,
    Effect,
    FetchEntries,
    FetchFragment,
    FetchUpdate,
    Note,
)
from geo_diloco.protocol.events import (
    Applied,
    ApplyFailed,
    EntryArrived,
    FragmentReplaced,
    UpdateFetched,
    UpdateLost,
)
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Commit, Entry

REPLACE_BEHIND = 32
"""Versions behind from which a snapshot of the fragment costs less than its updates."""
EARLY_MAX = 1024
"""Entries kept that came before their turn."""


@dataclass(slots=True)
class _Pipeline:
    """One fragment's commits that are not applied yet, oldest first."""

    commits: deque[Commit] = field(default_factory=deque)
    bases: dict[Version, Digest] = field(default_factory=dict)
    """Digest of the entry that made each version in `commits`."""
    fetched: set[Version] = field(default_factory=set)
    applying: bool = False
    replacing: bool = False


@dataclass(slots=True)
class Step:
    """A fragment reached `version`, by these commits (several, if a snapshot skipped some)."""

    fragment: FragmentId
    version: Version
    commits: tuple[Commit, ...]
    base: Digest
    """Of the entry that made `version`."""


class Follower:
    """Chain and fold of one peer, as far as the core is concerned: what to fetch and apply next."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._pipelines: list[_Pipeline] = []
        self._early: dict[Seq, EntryArrived] = {}
        self._gap_from: Seq | None = None

    def start(self) -> None:
        """The ledger is loaded: one pipeline per fragment."""
        self._pipelines = [_Pipeline() for _ in self.ledger.heads]

    def pending(self) -> int:
        """Commits known and not applied yet."""
        return sum(len(pipeline.commits) for pipeline in self._pipelines)

    # -- entries --------------------------------------------------------------------------------------------------

    def entry_arrived(self, event: EntryArrived) -> tuple[list[Entry], list[Effect]]:
        """Take an entry; returns those that are new on the chain by it, and what to fetch."""
        seq = event.entry.header.seq
        if seq <= self.ledger.seq:
            return [], []
        if seq > self.ledger.seq + 1:
            return [], self._keep_early(event)
        taken: list[Entry] = []
        effects: list[Effect] = []
        following: EntryArrived | None = event
        while following is not None:
            why_not = self.ledger.why_not(following.entry, following.signer)
            if why_not is not None:
                effects.append(Note("chain", f"entry refused: {why_not}", "error"))
                break
            self.ledger.apply(following.entry, following.digest)
            taken.append(following.entry)
            if isinstance(following.entry, Commit):
                effects += self._commit(following.entry, following.digest)
            following = self._early.pop(Seq(self.ledger.seq + 1), None)
        self._early = {at: early for at, early in self._early.items() if at > self.ledger.seq}
        self._gap_from = None
        return taken, effects + self._fill_gap()

    def _keep_early(self, event: EntryArrived) -> list[Effect]:
        if event.signer != self.ledger.founder:
            return [Note("chain", f"entry refused: signed by {event.signer[:8]}, who does not serve this run", "error")]
        if len(self._early) < EARLY_MAX:
            self._early[event.entry.header.seq] = event
        return self._fill_gap()

    def _fill_gap(self) -> list[Effect]:
        wanted = Seq(self.ledger.seq + 1)
        if not self._early or self._gap_from == wanted:
            return []
        self._gap_from = wanted
        return [FetchEntries(wanted)]

    def ask_again(self) -> FetchEntries:
        """After a reconnection: whatever came after our head."""
        self._gap_from = Seq(self.ledger.seq + 1)
        return FetchEntries(self._gap_from)

    # -- updates --------------------------------------------------------------------------------------------------

    def _commit(self, commit: Commit, digest: Digest) -> list[Effect]:
        if commit.version <= self.ledger.contained[commit.fragment]:
            return []
        pipeline = self._pipelines[commit.fragment]
        pipeline.commits.append(commit)
        pipeline.bases[commit.version] = digest
        if pipeline.replacing:
            return []
        if len(pipeline.commits) > REPLACE_BEHIND:
            return self._replace(pipeline)
        return [FetchUpdate(commit.fragment, commit.version, commit.update)]

    def update_fetched(self, event: UpdateFetched) -> list[Effect]:
        pipeline = self._pipelines[event.fragment]
        if any(commit.version == event.version for commit in pipeline.commits):
            pipeline.fetched.add(event.version)
        return self._apply_next(pipeline)

    def update_lost(self, event: UpdateLost) -> list[Effect]:
        pipeline = self._pipelines[event.fragment]
        if not any(commit.version == event.version for commit in pipeline.commits):
            return []
        text = f"update {event.version} of fragment {event.fragment} is not held any more: {event.reason}"
        note = Note("chain", text)
        return [note, *self._replace(pipeline)]

    def apply_failed(self, event: ApplyFailed) -> list[Effect]:
        pipeline = self._pipelines[event.fragment]
        pipeline.applying = False
        text = f"update {event.version} of fragment {event.fragment} could not be applied: {event.reason}"
        return [Note("chain", text, "error"), *self._replace(pipeline)]

    def applied(self, event: Applied) -> tuple[Step | None, list[Effect]]:
        pipeline = self._pipelines[event.fragment]
        pipeline.applying = False
        if not pipeline.commits or pipeline.commits[0].version != event.version:
            return None, self._apply_next(pipeline)
        commit = pipeline.commits.popleft()
        pipeline.fetched.discard(event.version)
        step = Step(event.fragment, event.version, (commit,), pipeline.bases.pop(event.version))
        return step, self._apply_next(pipeline)

    def replaced(self, event: FragmentReplaced) -> tuple[Step | None, list[Effect]]:
        """A snapshot of the fragment is in place; commits up to its version are behind us."""
        pipeline = self._pipelines[event.fragment]
        pipeline.replacing = False
        skipped: list[Commit] = []
        base = Digest("")
        while pipeline.commits and pipeline.commits[0].version <= event.version:
            skipped.append(pipeline.commits.popleft())
            base = pipeline.bases.pop(skipped[-1].version)
        pipeline.fetched = {version for version in pipeline.fetched if version > event.version}
        effects: list[Effect] = [
            FetchUpdate(commit.fragment, commit.version, commit.update)
            for commit in pipeline.commits
            if commit.version not in pipeline.fetched
        ]
        step = Step(event.fragment, event.version, tuple(skipped), base) if skipped else None
        return step, effects + self._apply_next(pipeline)

    def _apply_next(self, pipeline: _Pipeline) -> list[Effect]:
        if pipeline.applying or pipeline.replacing or not pipeline.commits:
            return []
        commit = pipeline.commits[0]
        if commit.version not in pipeline.fetched:
            return []
        pipeline.applying = True
        apply = ApplyUpdate(
            fragment=commit.fragment,
            version=commit.version,
            update=commit.update,
            state_digest=commit.state_digest,
            momentum_digest=commit.momentum_digest,
            eta=commit.eta,
            mu=commit.mu,
        )
        return [apply]

    def _replace(self, pipeline: _Pipeline) -> list[Effect]:
        if pipeline.replacing:
            return []
        pipeline.replacing = True
        newest = pipeline.commits[-1]
        return [FetchFragment(newest.fragment, newest.version)]
