"""What travels: blob references, chain entries, control messages. Frozen, standard library only.

An **entry** is a record of the chain; the exact bytes that the syncer signed are its only form (`runtime/wire.py`
makes and reads them), and its digest is BLAKE3 of those bytes without the signature. A **message** goes over the
control connection inside a signed `Envelope`. Bulk bytes never travel in either: they are blobs, named here by
`BlobRef`. Token and step counts are integers; eta and mu are floats, copied and never computed with here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, PeerId, RunId, Seq, Term, Version
from geo_diloco.protocol.amendments import Amended, Changes, Stretch
from geo_diloco.protocol.election.ballots import Ballot, Elector, Opened, SignedVote


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob's name: `digest` is BLAKE3 over its size (8 bytes, little-endian) and its pieces' digests."""

    digest: Digest
    size: int
    """Bytes."""


# ---- the chain -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryHeader:
    """What every entry carries."""

    run: RunId
    branch: BranchId
    """Empty in `found`, which names the branch by its digest."""
    term: Term
    seq: Seq
    prev: Digest | Literal[""]
    """Digest of the entry before; empty in `found`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The first entry: Theta_0 (momentum is zero)."""

    kind: Literal["found"] = "found"
    header: EntryHeader
    boot: BootId
    state_digests: tuple[Digest, ...]
    """One per fragment, of its little-endian float32 bytes."""
    momentum_digests: tuple[Digest, ...]
    layout_digest: Digest
    num_elements: tuple[int, ...]
    """Elements per fragment, N_p."""
    roster: tuple[Elector, ...]
    """The founder alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """First entry of a term: who serves it, and who voted for that."""

    kind: Literal["open"] = "open"
    header: EntryHeader
    syncer: PeerId
    boot: BootId
    address: str
    """`host:port` of the syncer's HTTP side."""
    votes: tuple[SignedVote, ...]
    """Of a majority of the roster in force: the proof that learners and electors check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RosterChange:
    """Who is elector from here on."""

    kind: Literal["roster"] = "roster"
    header: EntryHeader
    roster: tuple[Elector, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Participant:
    """One merged contribution, as the ledger records it."""

    peer: PeerId
    base: Digest
    """Digest of the entry whose version of the fragment the delta was measured from."""
    base_version: Version
    first_step: int
    last_step: int
    """The delta stands for inner steps (first_step, last_step]."""
    steps: int
    tokens: int
    """Fresh counts, for the weight."""
    tokens_unmerged: int
    """All that the delta stands for, for the ledger; both up to what is plausible (`plausibility.py`)."""
    contribution: BlobRef
    weight: float
    """In [0, 1]. The weights of a commit sum to the merge's portion: 1 if everybody who trains is in it."""
    norm: float
    """L2 norm of the whole decoded delta, as merged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A live learner whose work is not in this commit, and why."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One outer step of one fragment."""

    kind: Literal["commit"] = "commit"
    header: EntryHeader
    fragment: FragmentId
    version: Version
    """The version this commit makes: one more than its predecessor's."""
    round: int
    attempt: int
    update: BlobRef
    state_digest: Digest
    momentum_digest: Digest
    eta: float
    mu: float
    participants: tuple[Participant, ...]
    """Sorted by peer id."""
    left_out: tuple[LeftOut, ...]
    quorum_wait_ms: int
    """From opening to the quorum."""
    grace_ms: int
    """From the quorum to closing."""
    close_reason: str
    rbar: float
    """Plain mean of the participants' norms; caps the carry (numerics.md, 5)."""
    rho: float | None
    """Cosine between this update and the fragment's last one; none for its first."""
    tokens_total: int
    """Run-wide tokens merged so far: floor(sum_p N_p * tokens_p / sum_p N_p)."""
    progress: float
    """Share of the run done, in [0, 1]: the largest share of any stop limit; 0 without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A measurement of Theta as of `measured_seq`."""

    kind: Literal["record"] = "record"
    header: EntryHeader
    measured_seq: Seq
    heldout_loss: float
    """Mean nats per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The last entry of a run that reached its stop rule."""

    kind: Literal["finished"] = "finished"
    header: EntryHeader
    reason: str
    tokens_total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Amendment:
    """The run's owner changes its rules: in force from here on."""

    kind: Literal["amendment"] = "amendment"
    header: EntryHeader
    owner: PeerId
    number: int
    changes: Changes
    stretch: Stretch
    """By the syncer, like the progress in a commit."""
    order: str
    """What the owner signed (`amendments.AmendmentOrder`), as signed; the shell has verified that it says the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reform:
    """The run's owner, who signs it, goes on without most of the electors: first entry of a new branch, which its
    digest names. What the old one has after `prev` is abandoned."""

    kind: Literal["reform"] = "reform"
    header: EntryHeader
    """Its branch is the one that is left; its term is 1."""
    lineage: int
    """Counts the owner's reforms, from 1."""
    roster: tuple[Elector, ...]


Entry = Found | Open | RosterChange | Commit | Record | Amendment | Reform | Finished


# ---- control messages ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContributionId:
    """Identity of a learner's work on a fragment: consumed at most once along a chain."""

    peer: PeerId
    fragment: FragmentId
    base: Digest
    last_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Allotment:
    """A share of the training data, lent to a learner."""

    share: int
    num_shares: int
    cursor: int
    """Tokens of this share already merged by earlier holders; start here."""
    pass_number: int
    """0 for the first learner on this share; others shuffle it with another seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Learner or follower to syncer, first message on every control connection. Idempotent."""

    kind: Literal["hello"] = "hello"
    wire_version: int
    layout_digest: Digest
    trains: bool
    host: str
    """Free text for `status`: machine name and device."""
    software: str
    address: str
    """`host:port` where this peer serves HTTP, empty if it only dials out."""
    step: int
    tokens: int
    head_seq: Seq
    undecided: tuple[ContributionId, ...]
    """Contributions it knows it made and has no decision on."""
    holds: Allotment | None = None
    """The share it trains on already; none after a process start."""
    proof: str
    """Proof of the admission token, empty if none; checked by the shell before the core sees the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """Syncer's answer to Hello."""

    kind: Literal["welcome"] = "welcome"
    head_seq: Seq
    head_digest: Digest
    merged_until: tuple[int, ...]
    """Per fragment: last inner step of this learner that is merged or about to be; 0 if none."""
    resume_step: int
    """No inner step up to here may be used again."""
    allotment: Allotment | None
    """None for a peer that does not train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Learner to syncer, about once a second, or as seldom as the last RoundOpen asks. Late or repeated ones are
    harmless: counts are cumulative."""

    kind: Literal["progress"] = "progress"
    step: int
    tokens: int
    step_time_us: int
    """Moving average of one inner step; 0 if not known yet."""
    upload_bytes_per_s: int
    """Moving average; 0 if not known yet."""
    loss: float | None
    cursor: int
    """Tokens consumed of the current allotment."""
    turn: int = 1
    """It takes part in every so many-th round of a fragment, because its link keeps up with no more."""
    uplink: str = ""
    """Free text for `status`: which codec it took and why, how many of the rounds it takes part in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOpen:
    """Syncer asks for a fragment's deltas. A later attempt of a round replaces the earlier."""

    kind: Literal["round_open"] = "round_open"
    round: int
    fragment: FragmentId
    attempt: int
    version: Version
    """The fragment's current version: a fresh contribution is based on it."""
    base: Digest
    collect_at: str
    """`host:port` that collects; empty means the syncer."""
    progress_ms: int = 1000
    """So often the syncer wants to hear Progress; a learner says it more often where it would count as silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Learner says that it sampled for a round: it is expected now."""

    kind: Literal["sampled"] = "sampled"
    round: int
    fragment: FragmentId
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """Announces an encoded delta; its blob may then be uploaded. Sent again after a reconnection."""

    kind: Literal["contribution"] = "contribution"
    id: ContributionId
    round: int
    attempt: int
    base_version: Version
    first_step: int
    steps: int
    tokens: int
    tokens_unmerged: int
    cursor: int
    blob: BlobRef


Verdict = Literal["held", "kept_late", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Syncer's word on a contribution. `merged` is told by the commit itself, not here."""

    kind: Literal["decision"] = "decision"
    id: ContributionId
    verdict: Verdict
    """`held`: here and valid. `kept_late`: waits for the next round. `refused`: the learner carries it."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye:
    """The peer leaves on purpose; nobody waits for it."""

    kind: Literal["goodbye"] = "goodbye"
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    """Syncer to everyone: a majority of the electors has the chain up to this entry on disk. Nothing later is folded
    into anybody's Theta, so no syncer to come can take back what a learner has adopted."""

    kind: Literal["durable"] = "durable"
    seq: Seq
    digest: Digest


Message = Hello | Welcome | Progress | RoundOpen | Sampled | Contribution | Decision | Durable | Goodbye | Ballot


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A message with who says it. The signature (by the shell) covers the exact bytes sent, this header included."""

    run: RunId
    branch: BranchId
    term: Term
    boot: BootId
    sender: PeerId
    to: PeerId
    nonce: str
    """The connection's nonce, chosen by the accepting side: an envelope is worth nothing on another connection."""
    number: int
    """Counts up on a connection; anything not above the last one is dropped."""
    message: Message


# ---- snapshots -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentHead:
    """Where a fragment stands on the chain."""

    version: Version
    base: Digest
    """Digest of the entry that made this version (`found` for version 0)."""
    state_digest: Digest
    momentum_digest: Digest
    mu: float | None = None
    """As that entry has them; none for version 0."""
    rho: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The outer state as of `seq`, one blob per fragment: raw little-endian float32, checked by the digests in `heads`.

    Signed by the syncer of `term`, like an entry.
    """

    kind: Literal["snapshot"] = "snapshot"
    run: RunId
    branch: BranchId
    term: Term
    seq: Seq
    head_digest: Digest
    heads: tuple[FragmentHead, ...]
    theta: tuple[BlobRef, ...]
    momentum: tuple[BlobRef, ...]
    tokens_per_fragment: tuple[int, ...]
    num_elements: tuple[int, ...]
    layout_digest: Digest
    progress: float
    roster: tuple[Elector, ...]
    """In force at `seq`."""
    roster_seq: Seq
    opened: Opened
    """Who serves `term`."""
    amended: tuple[Amended, ...] = ()
    """What is in force at `seq` beside the manifest."""
    lineage: int = 0
    """Number of the reform that began the branch; 0 for `found`."""
