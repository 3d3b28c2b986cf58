"""From a durable commit to a new version of a fragment, on every peer.

What is durable is folded strictly in version order, fragment by fragment, as soon as its update is here. A peer that is
far behind, or whose updates are no longer held by anyone, replaces the whole fragment by a snapshot instead. A peer
that served has gone *ahead*: its outer state holds what it merged before that was durable. If the very same commits
become durable, nothing is left to fold; if others do, or a later term opens without them, the fragment is replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, FragmentId, Version
from geo_diloco.protocol.effects import ApplyUpdate, Effect, FetchFragment, Note
from geo_diloco.protocol.events import Applied, ApplyFailed, FragmentReplaced
from geo_diloco.protocol.messages import Commit, FragmentHead

REPLACE_BEHIND = 32
"""Versions behind from which a snapshot of the fragment costs less than its updates."""


@dataclass(slots=True)
class _Pipeline:
    """One fragment's durable commits that are not folded yet, oldest first."""

    commits: deque[Commit] = field(default_factory=deque)
    bases: dict[Version, Digest] = field(default_factory=dict)
    """Digest of the entry that made each version in `commits`."""
    fetched: set[Version] = field(default_factory=set)
    applying: bool = False
    replacing: bool = False
    rewound: Digest | None = None
    """While a version is awaited that lies behind the one held: its base."""
    overtaken: int = 0
    """Replacements asked for before that; their answers count for nothing."""
    ahead: deque[tuple[Version, Digest]] = field(default_factory=deque)
    """Versions that the outer state holds already because this peer made them, and their entries."""


@dataclass(slots=True)
class Step:
    """A fragment reached `version`, by these commits (several, if a snapshot skipped some; none, if it went back
    because the owner's reform left others behind)."""

    fragment: FragmentId
    version: Version
    commits: tuple[Commit, ...]
    base: Digest
    """Of the entry that made `version`."""


class Fold:
    """The outer state of one peer, as far as the core is concerned: what to apply next."""

    def __init__(self) -> None:
        self._pipelines: list[_Pipeline] = []
        self.contained: tuple[Version, ...] = ()
        """Per fragment: the version that the outer state came with."""

    def start(self, versions: Sequence[Version]) -> None:
        """The outer state is there, at these versions: one pipeline per fragment."""
        self._pipelines = [_Pipeline() for _ in versions]
        self.contained = tuple(versions)

    def contains(self, commit: Commit) -> bool:
        """Whether the outer state came with it."""
        return commit.version <= self.contained[commit.fragment]

    def pending(self) -> int:
        """Durable commits that are not folded yet."""
        return sum(len(pipeline.commits) for pipeline in self._pipelines)

    @property
    def is_level(self) -> bool:
        """The outer state is that of the ledger: nothing is to be folded, replaced, or still to become durable."""
        return not any(each.commits or each.replacing or each.ahead for each in self._pipelines)

    # -- what we merged ourselves ---------------------------------------------------------------------------------

    def made(self, fragment: FragmentId, version: Version, digest: Digest) -> None:
        """As syncer: the outer state holds this version, by that entry."""
        self._pipelines[fragment].ahead.append((version, digest))

    def revert(self, versions: Sequence[Version]) -> list[Effect]:
        """A term was opened on top of the ledger, which stands at these versions: what we made beyond it will never be
        durable."""
        effects: list[Effect] = []
        for p, pipeline in enumerate(self._pipelines):
            if not pipeline.ahead:
                continue
            pipeline.ahead.clear()
            if not pipeline.replacing:
                pipeline.replacing = True
                effects.append(FetchFragment(FragmentId(p), versions[p]))
        return effects

    def rewind(self, held: Sequence[Version], heads: Sequence[FragmentHead]) -> list[Effect]:
        """The owner's reform left the newest commits behind: the ledger stood at versions `held`, and is at `heads`.
        What the outer state has of them is replaced."""
        effects: list[Effect] = []
        self.contained = tuple(min(one, head.version) for one, head in zip(self.contained, heads, strict=True))
        for p, (pipeline, head) in enumerate(zip(self._pipelines, heads, strict=True)):
            reached = pipeline.commits[0].version - 1 if pipeline.commits else held[p]
            ahead = bool(pipeline.ahead) or reached + pipeline.applying > head.version
            pipeline.ahead.clear()
            while pipeline.commits and pipeline.commits[-1].version > head.version:
                del pipeline.bases[pipeline.commits.pop().version]
            pipeline.fetched = {version for version in pipeline.fetched if version <= head.version}
            if ahead or pipeline.replacing:
                pipeline.overtaken += pipeline.replacing
                pipeline.replacing, pipeline.rewound = True, head.base
                pipeline.commits.clear()
                pipeline.bases.clear()
                effects.append(FetchFragment(FragmentId(p), head.version))
        return effects

    # -- commits --------------------------------------------------------------------------------------------------

    def durable(self, commit: Commit, digest: Digest, *, stored: bool) -> tuple[Step | None, list[Effect]]:
        """A commit is on the ledger now. `stored`: its update is here."""
        pipeline = self._pipelines[commit.fragment]
        if pipeline.ahead and not pipeline.commits:
            if pipeline.ahead[0] == (commit.version, digest):
                pipeline.ahead.popleft()
                return Step(commit.fragment, commit.version, (commit,), digest), []
            return None, self._replace_own(pipeline, commit, digest)
        pipeline.commits.append(commit)
        pipeline.bases[commit.version] = digest
        if stored:
            pipeline.fetched.add(commit.version)
        if pipeline.replacing:
            return None, []
        if len(pipeline.commits) > REPLACE_BEHIND and not stored:
            return None, self._replace(pipeline)
        return None, self._apply_next(pipeline)

    def _replace_own(self, pipeline: _Pipeline, commit: Commit, digest: Digest) -> list[Effect]:
        note = Note("chain", f"fragment {commit.fragment}: another version {commit.version} is durable than ours")
        pipeline.ahead.clear()
        pipeline.commits.append(commit)
        pipeline.bases[commit.version] = digest
        return [note, *self._replace(pipeline)]

    def stored(self, commit: Commit) -> list[Effect]:
        """The update of a commit is here."""
        pipeline = self._pipelines[commit.fragment]
        if any(each.version == commit.version and each.update == commit.update for each in pipeline.commits):
            pipeline.fetched.add(commit.version)
        return self._apply_next(pipeline)

    def lost(self, commit: Commit, reason: str) -> list[Effect]:
        """Nobody has that update any more."""
        pipeline = self._pipelines[commit.fragment]
        if not any(each.version == commit.version and each.update == commit.update for each in pipeline.commits):
            return []
        if pipeline.replacing:
            return []
        text = f"update {commit.version} of fragment {commit.fragment} is not held any more: {reason}"
        return [Note("chain", text), *self._replace(pipeline)]

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
        if pipeline.overtaken:
            pipeline.overtaken -= 1
            return None, []
        pipeline.replacing = False
        rewound, pipeline.rewound = pipeline.rewound, None
        skipped: list[Commit] = []
        base = Digest("")
        while pipeline.commits and pipeline.commits[0].version <= event.version:
            skipped.append(pipeline.commits.popleft())
            base = pipeline.bases.pop(skipped[-1].version)
        pipeline.fetched = {version for version in pipeline.fetched if version > event.version}
        if not skipped and rewound is None:
            return None, self._apply_next(pipeline)
        step = Step(event.fragment, event.version, tuple(skipped), base if skipped else rewound or Digest(""))
        return step, self._apply_next(pipeline)

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
