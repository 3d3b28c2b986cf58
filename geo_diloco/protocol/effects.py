"""What the core asks for: requests to the shell or the simulator, which interpret the same ones.

An effect that fails is answered by an event that says so, never by an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_diloco.manifest import BranchId, CodecSpec, Digest, FragmentId, PeerId, Seq, Term, Version
from geo_diloco.protocol.election.ballots import VoteRecord
from geo_diloco.protocol.events import FragmentAccount, SnapshotLoaded
from geo_diloco.protocol.messages import BlobRef, ContributionId, Entry, Message

# ---- effects: everyone -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send on the peer's control connection, in an envelope of this branch and term. If there is none it is dropped,
    or with `dial` a connection is made first, where the peer can be dialed. Every message is either said again or
    harmless to lose."""

    to: PeerId
    branch: BranchId
    term: Term
    message: Message
    dial: bool = False


@dataclass(frozen=True, slots=True)
class SendEntries:
    """Send these entries as signed, in this order; with `upload`, their updates too, as far as the peer lacks them."""

    to: PeerId
    digests: tuple[Digest, ...]
    upload: bool


@dataclass(frozen=True, slots=True)
class PersistVote:
    """Write and fsync the record, in the order asked; answered by VotePersisted."""

    number: int
    record: VoteRecord


@dataclass(frozen=True, slots=True)
class SeekSyncer:
    """Whoever this peer has been talking to does not serve (any more): find the syncer and connect to it. `peer` and
    `address`, if known, are worth trying first."""

    peer: PeerId | None
    address: str


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """After what was sent, close that peer's control connection."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class FetchEntries:
    """Fetch the entries from `from_seq` on from whoever is syncer; each comes as EntryArrived."""

    from_seq: Seq


@dataclass(frozen=True, slots=True)
class KeepEntry:
    """Keep an entry that arrived, and fetch its update if it has one; answered by EntryStored or UpdateLost."""

    digest: Digest
    update: BlobRef | None


@dataclass(frozen=True, slots=True)
class ApplyUpdate:
    """Fold the fetched update into Theta (and momentum, where held); answered by Applied or ApplyFailed."""

    fragment: FragmentId
    version: Version
    update: BlobRef
    state_digest: Digest
    momentum_digest: Digest
    eta: float
    mu: float


@dataclass(frozen=True, slots=True)
class FetchFragment:
    """Bring that fragment to where the ledger has it, at `version` or later (which may be less than is held), by other
    means than the next update: from a snapshot of one's own and the updates after it, or from anyone's snapshot;
    answered by FragmentReplaced."""

    fragment: FragmentId
    version: Version


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete these updates, if they are on this disk, and take these entries out of memory: what is asked of them from
    now on is read from the disk, where they stay."""

    updates: tuple[BlobRef, ...]
    entries: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """For people: a log line. The shell prints a repeated (topic, text) once."""

    topic: str
    text: str
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The chain is finished and this peer holds its end: training may stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReadyToLeave:
    """All that had to be said on leaving is said."""


@dataclass(frozen=True, slots=True)
class RefusedForGood:
    """The run does not admit this peer; the reason names the difference."""

    reason: str


# ---- effects: syncer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seal:
    """Sign this entry and put it on disk (fsync), then make what it commits visible; answered by Sealed. One at a
    time."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Announce:
    """Send the sealed entry `seq`, bytes as signed, to every connected peer."""

    seq: Seq


@dataclass(frozen=True, slots=True)
class AcceptBlob:
    """Accept this blob's pieces from that peer; BlobArrived when whole."""

    peer: PeerId
    blob: BlobRef


@dataclass(frozen=True, slots=True)
class ForgetBlob:
    """No longer accepted or needed."""

    blob: BlobRef


@dataclass(frozen=True, slots=True)
class CheckContribution:
    """Decode a held contribution against its fragment's layout; answered by ContributionChecked."""

    id: ContributionId
    blob: BlobRef


@dataclass(frozen=True, slots=True)
class MergeInput:
    """One contribution to merge, with its weight before normalisation."""

    peer: PeerId
    blob: BlobRef
    base_version: Version
    weight: float
    """Up to its limit (`plausibility.py`); not normalised."""
    scale: float = 1.0
    """The delta is multiplied by it before it is merged."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge, take the outer step, encode the update, digest the new state; answered by Merged or MergeFailed."""

    fragment: FragmentId
    round: int
    attempt: int
    version: Version
    """The version to be made."""
    inputs: tuple[MergeInput, ...]
    eta: float
    mu: float
    codec: CodecSpec
    """Of the update."""
    portion: float = 1.0
    """The merged gradient is multiplied by it: the weight of those in it beside that of all who train."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure held-out loss of Theta as it stands now; answered by Evaluated with this seq."""

    seq: Seq


# ---- effects: learner --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Admitted: the training loop may begin (or go on) after this step and with this data."""

    resume_step: int
    share: int
    num_shares: int
    cursor: int
    pass_number: int


@dataclass(frozen=True, slots=True)
class TakeSample:
    """Sample at the next inner-step boundary (in lockstep: at the boundary the schedule names)."""

    fragment: FragmentId
    round: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Push a blob to the collector; answered by UploadDone or UploadFailed. One at a time, but for those that
    were answered by UploadSent."""

    blob: BlobRef
    collect_at: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take the applied version into the model at the next boundary (in lockstep: tau steps after sampling).

    If `participant` is set the delta encoded in that blob is subtracted from the carry.
    """

    fragment: FragmentId
    version: Version
    participant: BlobRef | None
    rbar: float


@dataclass(frozen=True, slots=True)
class Reset:
    """Take Theta's current version of the fragment and drop what the replica carries (`restarted`)."""

    fragment: FragmentId
    version: Version


@dataclass(frozen=True, slots=True)
class PersistAccounts:
    """These books belong to checkpoint `save`: write them beside it and make it the newest."""

    save: int
    step: int
    tokens: int
    resume_at: SnapshotLoaded
    """Given back as it is, before Resumed, by the process that resumes; its heads are the adopted versions."""
    accounts: tuple[FragmentAccount, ...]


@dataclass(frozen=True, slots=True)
class TokensMerged:
    """For the tape: tokens of this learner that a commit took."""

    fragment: FragmentId
    version: Version
    tokens: int


@dataclass(frozen=True, slots=True)
class TokensDropped:
    """For the tape: tokens of this learner that will never be merged, and why. A negative number corrects an earlier
    `crashed` that turned out to be merged."""

    fragment: FragmentId
    tokens: int
    reason: str


Effect = (
    Send
    | SendEntries
    | PersistVote
    | SeekSyncer
    | CloseConnection
    | FetchEntries
    | KeepEntry
    | ApplyUpdate
    | FetchFragment
    | Prune
    | Note
    | RunFinished
    | ReadyToLeave
    | RefusedForGood
    | Seal
    | Announce
    | AcceptBlob
    | ForgetBlob
    | CheckContribution
    | Merge
    | Evaluate
    | StartTraining
    | TakeSample
    | Upload
    | Adopt
    | Reset
    | PersistAccounts
    | TokensMerged
    | TokensDropped
)
