"""Where a learner's checkpoint resumes: the newest entry up to which every commit is adopted.

It stands apart because it is the chain at another moment than the ledger has it. What is folded is adopted only when
the training thread gets there, each fragment in its own time, and a process that resumes must hear again of every
commit that its replica lacks. So this lags behind the ledger, and knows where the chain stood with each entry since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from geo_diloco.manifest import FragmentId, Seq, Version
from geo_diloco.protocol.events import SnapshotLoaded
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Commit, Entry, FragmentHead


@dataclass(frozen=True, slots=True)
class _Position:
    """The chain after one entry."""

    snapshot: SnapshotLoaded
    commit: tuple[FragmentId, Version] | None
    """What has to be adopted before a checkpoint may resume there."""


class ResumePoint:
    """The newest such entry, and those after it. `heads` are those of what is adopted, per fragment."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._floor = self._here(None)
        self._ahead: deque[_Position] = deque()
        """Entries not known to be adopted yet, oldest first."""

    def start(self) -> None:
        """The ledger is loaded, and all it holds is adopted."""
        self._floor = self._here(None)

    def folded(self, entry: Entry) -> None:
        """The ledger took that entry. No checkpoint resumes beyond the last commit of a run: that it is finished is
        for whoever resumes to hear from the chain."""
        if self._ledger.finished is not None:
            return
        self._ahead.append(self._here((entry.fragment, entry.version) if isinstance(entry, Commit) else None))

    def adopted(self, heads: Sequence[FragmentHead]) -> None:
        """Up to the newest entry with no unadopted commit before it."""
        while self._ahead:
            commit = self._ahead[0].commit
            if commit is not None and heads[commit[0]].version < commit[1]:
                break
            self._floor = self._ahead.popleft()

    def rewound(self, to: Seq) -> None:
        """The owner's reform left behind what came after `to`, and the ledger is back there."""
        self._ahead = deque(each for each in self._ahead if each.snapshot.seq <= to)
        if self._floor.snapshot.seq > to:
            self._floor = self._here(None)

    def snapshot(self, heads: Sequence[FragmentHead]) -> SnapshotLoaded:
        """For a checkpoint taken now. Commits after it that are adopted already are in its heads: the ledger passes
        over them."""
        self.adopted(heads)
        return replace(self._floor.snapshot, heads=tuple(heads))

    def _here(self, commit: tuple[FragmentId, Version] | None) -> _Position:
        return _Position(self._ledger.snapshot(), commit)
