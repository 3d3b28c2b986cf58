"""What the election hears and what it asks for: its share of `events.py` and `effects.py`.

The same contract as there. Effects that leave the process (`Tell`, `SendEntries`, the seals) come out only after
everything they depend on is on disk: the election holds them back until `VotePersisted` answers its `PersistVote`.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import BootId, BranchId, Digest, PeerId, Seq, Term
from geo_diloco.protocol.effects import Note, PersistVote, SendEntries
from geo_diloco.protocol.election.ballots import Ballot, EntryFacts, Head, Root, Roster, SignedVote
from geo_diloco.protocol.events import EntryLost, EntryStored, HandoverAsked, Sighted, Tick, VotePersisted

# ---- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a process: its log of entries in the order they were written, and which are whole on disk."""

    entries: tuple[EntryFacts, ...]
    stored: tuple[Digest, ...]
    root: Root | None = None
    """The entry before the first in the log, if that is not `found`; its state is whole on disk."""


@dataclass(frozen=True, slots=True)
class FoundingAsked:
    """Found the run. Only on the founder's first start."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A ballot whose envelope the shell has verified."""

    sender: PeerId
    branch: BranchId
    term: Term
    boot: BootId
    ballot: Ballot
    evidence: str = ""
    """The signed bytes, for a vote."""


@dataclass(frozen=True, slots=True)
class EntriesArrived:
    """Entries, lower seq first, from anyone (or read from a file, for a reform). Repeats are harmless."""

    sender: PeerId
    entries: tuple[EntryFacts, ...]


@dataclass(frozen=True, slots=True)
class EntrySealed:
    """An entry of ours is signed and fsynced (its blob was before)."""

    entry: EntryFacts


PollEvent = (
    Tick
    | Started
    | FoundingAsked
    | Heard
    | EntriesArrived
    | EntryStored
    | EntryLost
    | EntrySealed
    | VotePersisted
    | Sighted
    | HandoverAsked
)

# ---- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send; dial if the peer can be dialled and there is no connection. Lost ones are said again."""

    to: PeerId
    branch: BranchId
    term: Term
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class TakeEntries:
    """Write these new entries to the log (a fork removes nothing) and fetch their blobs; each answered by
    EntryStored."""

    entries: tuple[EntryFacts, ...]


@dataclass(frozen=True, slots=True)
class ChainMoved:
    """The chain that counts now leaves the old one after `fork`: what follows there is off the chain."""

    fork: Seq
    head: Head


@dataclass(frozen=True, slots=True)
class SealFound:
    """Seal `found` with this roster."""

    term: Term
    roster: Roster


@dataclass(frozen=True, slots=True)
class SealOpen:
    """Seal `open` on top of exactly this head; anything else sealed or queued meanwhile is dropped."""

    term: Term
    head: Head
    votes: tuple[SignedVote, ...]


@dataclass(frozen=True, slots=True)
class SealRoster:
    """Seal a `roster` entry as the next one, if `begin_append` still allows it then."""

    term: Term
    roster: Roster


@dataclass(frozen=True, slots=True)
class ServiceBegan:
    """`open` is durable: rounds may be opened."""

    term: Term


@dataclass(frozen=True, slots=True)
class ServiceEnded:
    """Append nothing more in this term; open rounds are over."""

    term: Term
    reason: str


@dataclass(frozen=True, slots=True)
class DurableReached:
    """Everything on the chain up to here survives any syncer to come."""

    seq: Seq
    digest: Digest


PollEffect = (
    Note
    | PersistVote
    | Tell
    | SendEntries
    | TakeEntries
    | ChainMoved
    | SealFound
    | SealOpen
    | SealRoster
    | ServiceBegan
    | ServiceEnded
    | DurableReached
)
