"""What outlives a learner's process: its newest checkpoint with its books, its contributions, and what its tape counts.

A contribution's bytes must outlive the core's `ForgetBlob`: a process that resumes from a checkpoint in which it is
undecided needs them, to subtract what the merge has taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.protocol.effects import PersistAccounts
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.training.checkpoint import LearnerCheckpoint
from geo_diloco.training.reports import Report


@dataclass(frozen=True)
class Saving:
    """One checkpoint with the books that belong to it."""

    accounts: PersistAccounts
    state: LearnerCheckpoint


@dataclass
class MemberDisk:
    """One learner's."""

    keeps_checkpoints: bool
    """They cost time, and only a crash needs them."""
    saving: Saving | None = None
    contributions: dict[BlobRef, bytes] = field(default_factory=dict)
    steps_heard: int = 0
    tokens_heard: int = 0
    """Of inner steps that the core was told of, by this learner's tape."""
    _forgotten: list[BlobRef] = field(default_factory=list)

    def forget(self, blob: BlobRef) -> None:
        """The core needs it no longer; the next checkpoint tells whether a successor may."""
        if self.keeps_checkpoints:
            self._forgotten.append(blob)
        else:
            self.contributions.pop(blob, None)

    def save(self, saving: Saving) -> None:
        self.saving = saving
        accounts = saving.accounts.accounts
        needed = {each.undecided.contribution.blob for each in accounts if each.undecided is not None}
        for blob in self._forgotten:
            if blob not in needed:
                self.contributions.pop(blob, None)
        self._forgotten = [blob for blob in self._forgotten if blob in needed]

    def lost_since(self, saving: Saving) -> tuple[int, int]:
        """(steps, tokens) that died with the process before."""
        accounts = saving.accounts
        return max(0, self.steps_heard - accounts.step), max(0, self.tokens_heard - accounts.tokens)


def checkpoint_from(report: Report) -> LearnerCheckpoint:
    """As it would be read back; the books are kept beside it as they are."""
    assert report.tensors is not None and report.extra is not None
    extra = report.extra
    return LearnerCheckpoint(
        save=extra["save"],
        step=extra["step"],
        tokens=extra["tokens"],
        cursor=extra["cursor"],
        tensors=report.tensors,
        extra=extra,
        accounts_json="",
    )
