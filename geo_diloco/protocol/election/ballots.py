"""What electors, candidates and the syncer say to each other, and what each must have on disk before it says it.

A **ballot** is a control message of the election; it travels in the same signed envelope as any other message, which
carries run, branch, term and boot of the sender. Entries never travel inside one: the shell sends the exact bytes
that were signed, before the ballot that speaks of them. `VoteRecord` is the only state that an election persists
beside the chain and its blobs. Times in ballots are the sender's own and only ever echoed to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, MonoMs, PeerId, Seq, Term, Version
from geo_diloco.protocol.amendments import Changes

ELECTORS_MAX = 7


class Rank(NamedTuple):
    """How far a chain goes, compared field by field. Inside a branch this is (term of the last entry, seq)."""

    lineage: int
    """Number of the reform that began the branch, as the owner counts them; 0 for `found`."""
    term: Term
    seq: Seq


NO_RANK = Rank(0, Term(0), Seq(-1))


@dataclass(frozen=True, slots=True)
class Head:
    """An entry that a chain ends with."""

    rank: Rank
    digest: Digest


NO_HEAD = Head(NO_RANK, Digest(""))


@dataclass(frozen=True, slots=True)
class PeerBoot:
    """One process start of a peer: what votes, promises and terms are bound to."""

    peer: PeerId
    boot: BootId


@dataclass(frozen=True, slots=True)
class Elector:
    """A seat on a roster. It belongs to the disk that holds `enrolment`, not to the peer's key alone."""

    peer: PeerId
    enrolment: str
    host: str
    """Machine, for the rule that no two electors share one."""
    address: str = ""
    """`host:port` where it would serve as syncer; empty if it can't be a candidate (it only dials out, or is not
    admitted)."""


Roster = tuple[Elector, ...]


def majority(num_electors: int) -> int:
    """How many of that many are more than half."""
    return num_electors // 2 + 1


@dataclass(frozen=True, slots=True)
class SignedVote:
    """A vote as `open` shows it to everyone; the shell has verified `evidence`, the elector's signed bytes."""

    elector: PeerId
    enrolment: str
    term: Term
    candidate: PeerBoot
    head: Digest
    evidence: str = ""
    """Empty for the syncer's own vote: its signature on the entry is the evidence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VoteRecord:
    """What an elector must never forget. Written and fsynced before any message that depends on it leaves."""

    branch: BranchId
    lineage: int
    term: Term
    voted_for: PeerBoot | None
    """Its vote in `term`."""
    held: Rank
    """Highest rank whose records and blobs it ever had complete on disk; never sinks."""
    enrolment: str
    """Nonce of this disk. A peer that lost it is another elector."""


# ---- what the election knows of an entry ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """Who serves a term, and the votes that prove it."""

    syncer: PeerId
    boot: BootId
    address: str
    votes: tuple[SignedVote, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """Work that a commit consumes: once per (peer, fragment, base) along a chain."""

    peer: PeerId
    fragment: FragmentId
    base: Digest


@dataclass(frozen=True, slots=True)
class Amends:
    """What an `amendment` says of the owner's order."""

    owner: PeerId
    number: int
    changes: Changes


EntryKind = Literal["found", "open", "commit", "roster", "reform", "amendment", "record", "finished"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryFacts:
    """An entry as far as elections go. The shell has verified signature and digest."""

    kind: EntryKind
    branch: BranchId
    """Empty in `found` and `reform`, which name the branch by their digest."""
    term: Term
    seq: Seq
    prev: Digest
    digest: Digest
    signer: PeerId
    opened: Opened | None = None
    """In `open`."""
    roster: Roster | None = None
    """In `found`, `roster` and `reform`."""
    lineage: int = 0
    """In `reform`: the owner's count of reforms, from 1."""
    fragment: FragmentId = FragmentId(0)
    version: Version = Version(0)
    """Of a commit."""
    uses: tuple[Use, ...] = ()
    """Of a commit."""
    amends: Amends | None = None
    """In `amendment`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """Where a peer's knowledge of the chain begins that took a snapshot instead of the whole of it."""

    head: Head
    branch: BranchId
    roster: Roster
    """In force at `head`."""
    roster_seq: Seq
    opened: Opened | None
    """None if `head` begins a branch: a first, or one that the owner's reform went on from before it was opened."""
    amendments: int = 0
    """Number of the newest before it."""


# ---- ballots ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """Elector to candidate: here I am, and this is how far my disk goes."""

    kind: Literal["offer"] = "offer"
    held: Rank
    can_serve: Head
    """The highest entry that it can hand on with all bytes before it; below `held` only if its disk lost something."""
    enrolment: str
    host: str
    address: str
    free: bool
    """It could vote now. Bound since its start, it offers too, to find its syncer and to hand on its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Send me your chain from the highest of these entries on (from the beginning if you know none)."""

    kind: Literal["need"] = "need"
    points: tuple[Head, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Candidate to electors: your vote for me in this envelope's term, on top of this head."""

    kind: Literal["ask"] = "ask"
    head: Head


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """Elector to candidate; in its envelope it is the evidence that `open` shows."""

    kind: Literal["vote"] = "vote"
    candidate: PeerBoot
    head: Digest
    enrolment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Append:
    """Syncer to electors and standbys: this is my chain now. Comes after the entries; alone it is a heartbeat."""

    kind: Literal["append"] = "append"
    head: Head
    durable_seq: Seq
    sent_at: MonoMs


@dataclass(frozen=True, kw_only=True, slots=True)
class Ack:
    """Elector to syncer: everything up to this entry of my chain is on my disk, records and update blobs."""

    kind: Literal["ack"] = "ack"
    acked: Head
    sent_at: MonoMs
    """Of the newest Append heard, echoed."""
    enrolment: str
    host: str
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Syncer to electors: I serve no more, my promise is yours again; offer to `to`."""

    kind: Literal["release"] = "release"
    to: PeerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Who is syncer, for one who offers to somebody else. A hint: what proves it is the `open` entry."""

    kind: Literal["serving"] = "serving"
    term: Term
    syncer: PeerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """Why something was refused. `reason` is a stable word, `detail` is for people. Not of elections alone: control
    messages are refused by it, too."""

    kind: Literal["refuse"] = "refuse"
    reason: str
    detail: str
    term: Term
    """The refuser's term: a peer behind it fetches the chain."""


Ballot = Offer | Need | Ask | Vote | Append | Ack | Release | Serving | Refuse
