"""What the core hears: facts. What it asks for is in `effects.py`.

`Peer.handle(event, now) -> effects` is the only way in and out. Events go onto the tape, so they hold integers,
floats, strings and messages only: no tensors, sockets or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, PeerId, Seq, Term, Version
from geo_diloco.protocol.amendments import Amended, AmendmentOrder
from geo_diloco.protocol.election.ballots import Elector, Opened, Rank
from geo_diloco.protocol.messages import (
    BlobRef,
    Contribution,
    ContributionId,
    Entry,
    FragmentHead,
    Message,
)

# ---- events: everyone --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline asked for has come. Too early or twice is harmless."""


@dataclass(frozen=True, slots=True)
class EntryArrived:
    """An entry whose digest and signatures (the votes in `open` too) the shell has verified. In any order; repeats are
    ignored. `stored`: its record, and its update if it has one, lie on this disk already."""

    entry: Entry
    digest: Digest
    signer: PeerId
    stored: bool = False


@dataclass(frozen=True, slots=True)
class EntryStored:
    """Record and update blob of an entry are verified and on disk (fsynced, where this peer may be elector)."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class EntryLost:
    """Its bytes turned out to be missing or broken."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class SnapshotLoaded:
    """Where this peer's outer state stands, from a snapshot (its own disk or a donor's), which was durable. First
    event of a peer that did not found the run.

    With `whole_chain` the ledger does not begin here: every entry from `found` on is given again after this, because
    a peer that may serve must know all that was ever merged.
    """

    branch: BranchId
    term: Term
    seq: Seq
    head_digest: Digest
    heads: tuple[FragmentHead, ...]
    num_elements: tuple[int, ...]
    layout_digest: Digest
    tokens_per_fragment: tuple[int, ...]
    progress: float
    roster: tuple[Elector, ...]
    roster_seq: Seq
    opened: Opened | None
    """Who serves `term`; none before the first entry."""
    whole_chain: bool = False
    amended: tuple[Amended, ...] = ()
    """What is in force at `seq` beside the manifest."""
    lineage: int = 0
    """Number of the reform that began the branch; 0 for `found`."""


@dataclass(frozen=True, slots=True)
class ChainLoaded:
    """All that this disk has of the chain was given; from here on others are heard. `away_ms`: how old the newest
    entry is, as well as this machine knows: learners have trained on meanwhile."""

    away_ms: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotKept:
    """A snapshot of the durable state as of `seq` is on this disk (or a learner's checkpoint, from which it would go on
    there): updates up to it are not needed here any more."""

    seq: Seq


@dataclass(frozen=True, slots=True)
class Connected:
    """A control connection is up, its peer's identity proven (on the accepting side: after its first valid
    envelope). `seeking`: it was dialed because this peer looks for the syncer."""

    peer: PeerId
    seeking: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message whose envelope (signature, run, nonce, number, `to`) the shell has verified."""

    sender: PeerId
    branch: BranchId
    term: Term
    boot: BootId
    message: Message
    evidence: str = ""
    """The envelope as signed, if the message is a vote."""


@dataclass(frozen=True, slots=True)
class VotePersisted:
    """`PersistVote` number so-and-so, and all before it, are on disk."""

    number: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """A peer that the directory says can serve as syncer. A hint."""

    peer: PeerId
    rank: Rank
    serves: Term | None
    """The term it claims to be syncer of."""


@dataclass(frozen=True, slots=True)
class Sighted:
    """News from the directory; replaces what was known."""

    sightings: tuple[Sighting, ...]


@dataclass(frozen=True, slots=True)
class HandoverAsked:
    """Its owner wants this syncer to hand over, or there are too few learners on this side of a cut."""

    to: PeerId | None
    """None: to whoever is best placed."""
    resign: bool = False
    """If nobody gets everything in time, give up the term all the same: what is not durable is lost to the chain, but
    not to the learners, who carry it."""


@dataclass(frozen=True, slots=True)
class AmendmentAsked:
    """The run's owner wants this syncer to append an amendment. The shell has verified who signed it."""

    order: AmendmentOrder
    owner: PeerId
    signed: str
    """The order, as signed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The owner of this process wants it to leave (SIGINT, SIGTERM, end of the script)."""

    reason: str


@dataclass(frozen=True, slots=True)
class UpdateLost:
    """No donor has the update of that entry any more: only a snapshot helps."""

    digest: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The fold took the update; the digests were those of the commit."""

    fragment: FragmentId
    version: Version
    state_digest: Digest


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    fragment: FragmentId
    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class FragmentReplaced:
    """A snapshot of one fragment, verified, took the place of the updates up to `version`."""

    fragment: FragmentId
    version: Version
    state_digest: Digest


# ---- events: syncer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundRun:
    """Found the run: append `found` and `open`. First event of a founder's first start."""

    state_digests: tuple[Digest, ...]
    momentum_digests: tuple[Digest, ...]
    num_elements: tuple[int, ...]
    layout_digest: Digest


@dataclass(frozen=True, slots=True)
class Sealed:
    """The entry asked for is signed and on disk, and what it commits is visible."""

    term: Term
    seq: Seq
    digest: Digest


@dataclass(frozen=True, slots=True)
class BlobArrived:
    """Every piece of an announced blob is here and verified (also when it already was)."""

    blob: BlobRef


@dataclass(frozen=True, slots=True)
class ContributionChecked:
    """A contribution's frame is decodable for its fragment (or why not)."""

    id: ContributionId
    ok: bool
    reason: str
    norm: float


@dataclass(frozen=True, slots=True)
class Merged:
    """The merge and outer step asked for are done and on disk, not yet committed."""

    fragment: FragmentId
    round: int
    attempt: int
    update: BlobRef
    state_digest: Digest
    momentum_digest: Digest
    rbar: float
    rho: float | None


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """The merge could not be done; nothing changed. `culprit` is the contribution to leave out, if one is."""

    fragment: FragmentId
    round: int
    attempt: int
    reason: str
    culprit: PeerId | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out loss (mean nats per token) of Theta as of `seq`; none if it could not be measured."""

    seq: Seq
    loss: float | None


# ---- events: learner ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UndecidedAccount:
    """A contribution without a decision, as saved: what the learner needs to go on with it."""

    contribution: Contribution
    scale_ppm: int
    """Product of the s since sampling, in parts per million."""


@dataclass(frozen=True, slots=True)
class FragmentAccount:
    """A learner's books on one fragment, in inner steps and tokens of its own."""

    adopted_version: Version
    first_step: int
    """Last step of its last merged contribution: where the next one's range begins."""
    adopted_step: int
    adopted_tokens: int
    """Own counts at the last adoption; fresh counts are measured from here."""
    unmerged: int
    """Tokens the replica carries beyond Theta, not in flight, up to `mark`."""
    mark: int
    """Own token count up to which `unmerged` is complete."""
    undecided: UndecidedAccount | None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A learner's own checkpoint was loaded. Comes after SnapshotLoaded and before anything else of the learner.

    `lost_steps`, `lost_tokens`: trained after the checkpoint by the process that died, by its own tape.
    """

    step: int
    tokens: int
    accounts: tuple[FragmentAccount, ...]
    lost_steps: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """An inner step is complete. Counts are cumulative over the learner's life; `cursor` over the current allotment."""

    step: int
    tokens: int
    step_time_us: int
    loss: float | None
    cursor: int


@dataclass(frozen=True, slots=True)
class SampleTaken:
    """The training thread copied fragment minus anchor at the end of inner step `step`."""

    fragment: FragmentId
    round: int
    step: int
    tokens: int
    cursor: int


@dataclass(frozen=True, slots=True)
class DeltaEncoded:
    """The sampled delta is encoded and in the blob store."""

    fragment: FragmentId
    round: int
    blob: BlobRef
    norm: float


@dataclass(frozen=True, slots=True)
class UploadSent:
    """All of its bytes are on their way, and the syncer's word on them is waited for: the link is free for the next.
    May come more than once for one upload, if what was sent has to be sent again, or never."""

    blob: BlobRef


@dataclass(frozen=True, slots=True)
class UploadDone:
    """The syncer has confirmed every piece."""

    blob: BlobRef
    bytes_per_s: int
    """What the link does for uploads that follow each other."""


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """It was refused for good (not: the connection broke; the shell resumes by itself)."""

    blob: BlobRef
    reason: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """The training thread took the new version into its model at the end of inner step `step`."""

    fragment: FragmentId
    version: Version
    step: int
    tokens: int
    scale_ppm: int
    """s of numerics.md 5, in parts per million."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The training thread copied model and optimizer for checkpoint `save`, at the end of inner step `step`."""

    save: int
    step: int
    tokens: int


Event = (
    Tick
    | EntryArrived
    | EntryStored
    | EntryLost
    | SnapshotLoaded
    | ChainLoaded
    | SnapshotKept
    | Connected
    | Disconnected
    | Received
    | VotePersisted
    | Sighted
    | HandoverAsked
    | AmendmentAsked
    | StopRequested
    | UpdateLost
    | Applied
    | ApplyFailed
    | FragmentReplaced
    | FoundRun
    | Sealed
    | BlobArrived
    | ContributionChecked
    | Merged
    | MergeFailed
    | Evaluated
    | Resumed
    | StepDone
    | SampleTaken
    | DeltaEncoded
    | UploadSent
    | UploadDone
    | UploadFailed
    | Adopted
    | Saved
)
