"""The chain at one peer: which entries count, which are durable, and what is folded.

Three things that must agree are kept together here: the election (it says which chain counts, and on an elector or
syncer what is durable), the ledger and the fold of the outer state. **Only what is durable reaches ledger and fold.**
So whatever a peer has adopted is on the chain of every later syncer, and nothing is ever taken back. Entries beyond
the durable head are kept (`tail.py`), and their updates fetched, so that nothing is left to wait for when they become
durable.

Methods return effects and `News` in the order in which they are to be carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from geo_diloco.manifest import BranchId, Digest, MonoMs, PeerId, Seq, Term, Version
from geo_diloco.protocol.amendments import newest_number
from geo_diloco.protocol.effects import Effect, FetchEntries, KeepEntry, Note, PersistVote, Prune, Send, SendEntries
from geo_diloco.protocol.election.ballots import Head, Rank, Root
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.election.polls import (
    ChainMoved,
    DurableReached,
    EntriesArrived,
    EntrySealed,
    FoundingAsked,
    PollEffect,
    PollEvent,
    SealFound,
    SealOpen,
    SealRoster,
    ServiceBegan,
    ServiceEnded,
    Started,
    TakeEntries,
    Tell,
)
from geo_diloco.protocol.events import (
    Applied,
    ApplyFailed,
    EntryArrived,
    EntryStored,
    FoundRun,
    FragmentReplaced,
    SnapshotKept,
    SnapshotLoaded,
    UpdateLost,
)
from geo_diloco.protocol.fold import Fold, Step
from geo_diloco.protocol.history import ENTRIES_KEPT, History
from geo_diloco.protocol.ledger import NO_SEQ, Ledger, facts_of
from geo_diloco.protocol.messages import Commit, Entry, Found, Open
from geo_diloco.protocol.pruning import Pruning
from geo_diloco.protocol.tail import Tail


@dataclass(frozen=True, slots=True)
class SyncerChanged:
    """An `open` of a higher term counts: who serves now."""

    term: Term
    peer: PeerId
    address: str


News: TypeAlias = (
    Step | SyncerChanged | SealFound | SealOpen | SealRoster | ServiceBegan | ServiceEnded | DurableReached
)
Outcome: TypeAlias = list["Effect | News"]


class Chain:
    """Entries, election, ledger and fold of one peer."""

    def __init__(
        self,
        election: Election,
        on_folded: Callable[[Entry], None],
        on_rewound: Callable[[Seq], list[Effect]],
        pruning: Pruning,
        *,
        entries_kept: int = ENTRIES_KEPT,
        remembers: PeerId | None = None,
        gain_max: float = 0.0,
    ) -> None:
        """`on_folded` is told every entry when the ledger stands exactly there, `on_rewound` when the owner's reform
        has left behind what came after an entry, and the ledger is back there. `remembers`: the peer for whose work
        alone the ledger needs a memory, where nobody will ever serve."""
        self.election = election
        self._pruning = pruning
        self._on_folded = on_folded
        self._on_rewound = on_rewound
        self.ledger = Ledger(gain_max=gain_max, only=remembers)
        """Of what is durable."""
        self.fold = Fold()
        self._tail = Tail(self.ledger)
        """Known, not on the ledger."""
        self._durable: Head | None = None
        """Known to be durable; the ledger gets there when all entries are here."""
        self._loading: list[EntryArrived] | None = []
        """What this disk has, until all of it is given."""
        self._root: Root | None = None
        self._entries_kept = entries_kept
        self._history = History(self.ledger.copy(), entries_kept=entries_kept)
        self._asked_at: Digest | None = None
        """Our head when a gap was last asked to be filled."""

    # -- start ----------------------------------------------------------------------------------------------------

    def found(self, event: FoundRun, now: MonoMs) -> Outcome:
        """This peer founds the run: it holds Theta_0."""
        self.fold.start([Version(0)] * len(event.num_elements))
        self._pruning.start(len(event.num_elements))
        self._loading = None
        return [*self._elect(Started((), ()), now), *self._elect(FoundingAsked(), now)]

    def load(self, snapshot: SnapshotLoaded) -> None:
        """The outer state stands there."""
        rank = Rank(snapshot.lineage, snapshot.term, snapshot.seq)
        self._durable = Head(rank, snapshot.head_digest)
        self.fold.start([head.version for head in snapshot.heads])
        self._pruning.start(len(snapshot.heads))
        if not snapshot.whole_chain:
            self.ledger.load(snapshot)
            self._history = History(self.ledger.copy(), entries_kept=self._entries_kept)
            self._root = Root(
                head=self._durable,
                branch=snapshot.branch,
                roster=snapshot.roster,
                roster_seq=snapshot.roster_seq,
                opened=snapshot.opened,
                amendments=newest_number(snapshot.amended),
            )
        self.election.based_on(snapshot.head_digest)
        self._pruning.snapshot_kept(snapshot.seq)

    def loaded(self, now: MonoMs) -> Outcome:
        """All that this disk has was given."""
        given, self._loading = self._loading or [], None
        facts = tuple(facts_of(each.entry, each.digest, each.signer) for each in given)
        self._tail.load(given)
        stored = tuple(each.digest for each in given if each.stored)
        outcome = self._elect(Started(facts, stored, self._root), now)
        for each in given:
            if not self.election.knows(each.digest):  # it continues nothing: it is taken when it comes again
                self._tail.drop(each.digest)
        outcome += [*self._leave_abandoned(), *self._advance()]
        missing = [each.digest for each in given if not each.stored and each.digest in self._tail]
        return [*outcome, *(self._keep(digest) for digest in missing)]

    # -- entries --------------------------------------------------------------------------------------------------

    def arrived(self, event: EntryArrived, now: MonoMs) -> Outcome:
        """An entry from anyone. What continues nothing that is known is dropped, and the gap fetched."""
        if self._loading is not None:
            self._loading.append(event)
            return []
        tail, entry = self._tail, event.entry
        if event.digest in tail or self.election.knows(event.digest):
            return []
        if not tail.wants(entry, durable=self._durable_seq, floor=self._history.floor):
            return []
        reforms = tail.goes_before(entry)
        if not reforms and not isinstance(entry, Found) and not self.election.knows(Digest(entry.header.prev)):
            return self._fill_gap()
        tail.add(event.digest, entry)
        facts = facts_of(entry, event.digest, event.signer)
        outcome = self._elect(EntriesArrived(event.signer, (facts,)), now)
        if not self.election.knows(event.digest):
            tail.drop(event.digest)
            if reforms:
                tail.part(event)
        outcome += self._advance()
        joined = tail.joined(event.digest)
        return outcome if joined is None else outcome + self.arrived(joined, now)

    def _fill_gap(self) -> Outcome:
        head = self.election.head.digest
        if self._asked_at == head:
            return []
        self._asked_at = head
        return [self.ask_again()]

    def ask_again(self) -> FetchEntries:
        """Whatever came after what is durable here."""
        return FetchEntries(Seq(self.ledger.seq + 1))

    def forget_asking(self) -> None:
        """Another connection: what was asked for may never come."""
        self._asked_at = None

    def sealed(self, entry: Entry, digest: Digest, signer: PeerId, now: MonoMs) -> Outcome:
        """An entry of ours is on disk."""
        self._tail.add(digest, entry)
        self._tail.stored(digest)
        outcome = self._elect(EntrySealed(facts_of(entry, digest, signer)), now)
        if not self.election.knows(digest):
            self._tail.drop(digest)
        return outcome

    def stored(self, event: EntryStored, now: MonoMs) -> Outcome:
        commit = self._tail.stored(event.digest)
        folded: Outcome = [] if commit is None else [*self.fold.stored(commit)]
        return [*folded, *self._elect(event, now)]

    def update_lost(self, event: UpdateLost) -> Outcome:
        """Nobody has it any more. What is not durable yet its syncer has: that is asked for again. What is durable and
        not folded yet, because entries are still to come, may be pruned everywhere: it is asked for again when folded.
        """
        commit = self._tail.lost(event.digest)
        if commit is None:
            return []
        if event.digest in self._tail:
            return [self._keep(event.digest)] if commit.header.seq > self._durable_seq else []
        return [*self.fold.lost(commit, event.reason)]

    def kept(self, event: SnapshotKept) -> Outcome:
        """A snapshot of the ledger as of then is on disk: what lies before it may go."""
        if event.seq > self.ledger.seq:
            return []  # of what the owner's reform has left behind meanwhile
        digest = self.election.digest_at(event.seq)
        if digest is not None:
            self.election.based_on(digest)
        self._pruning.snapshot_kept(event.seq)
        floor = self._pruning.floor
        if floor is not None:
            self._history.settle(floor)
        updates = self._pruning.due()
        entries = self.election.forget(self._history.floor)
        self._tail.settle(self.election.knows)
        return [Prune(updates, entries)] if updates or entries else []

    def tail(self, head: Head) -> list[tuple[Entry, Digest]]:
        """Entries after the ledger's, up to `head`, which is on the chain."""
        return self._between(self.ledger.seq, head.rank.seq)

    def _between(self, after: Seq, until: Seq) -> list[tuple[Entry, Digest]]:
        digests = [self.election.digest_at(Seq(seq)) for seq in range(after + 1, until + 1)]
        return [(self._tail[digest], digest) for digest in digests if digest is not None]

    @property
    def _durable_seq(self) -> Seq:
        return NO_SEQ if self._durable is None else self._durable.rank.seq

    # -- durable --------------------------------------------------------------------------------------------------

    def durable(self, seq: Seq, digest: Digest) -> Outcome:
        """Everything up to that entry is durable, as its syncer says (or as we know ourselves)."""
        if seq <= self.ledger.seq:
            return []
        if self._durable is None or seq > self._durable.rank.seq:
            self._durable = Head(Rank(0, Term(0), seq), digest)
        return self._advance()

    def _advance(self) -> Outcome:
        """Fold what is durable, as far as it is known here."""
        durable = self._durable
        if durable is None or durable.rank.seq <= self.ledger.seq:
            return []
        if self.election.digest_at(durable.rank.seq) != durable.digest:
            return self._fill_gap()
        outcome: Outcome = []
        while self.ledger.seq < durable.rank.seq:
            digest = self.election.digest_at(Seq(self.ledger.seq + 1))
            if digest is None or digest not in self._tail:
                return [*outcome, *self._fill_gap()]
            entry = self._tail[digest]
            why_not = self.ledger.why_not(entry)
            if why_not is not None:
                return [*outcome, Note("chain", f"ALARM: a durable entry can't be folded: {why_not}", "error")]
            self.ledger.apply(entry, digest)
            self._history.folded(entry, digest)
            self._on_folded(entry)
            if isinstance(entry, Commit):
                self._pruning.folded(entry)
            outcome += self._fold(entry, digest)
            self._tail.drop(digest)
        self._tail.settle(self.election.knows)
        return outcome

    def _fold(self, entry: Entry, digest: Digest) -> Outcome:
        if isinstance(entry, Open):
            return [*self.fold.revert([head.version for head in self.ledger.heads])]
        if not isinstance(entry, Commit) or self.fold.contains(entry):
            return []
        stored = self._tail.is_stored(digest)
        outcome = self._reached(*self.fold.durable(entry, digest, stored=stored))
        if not stored and not self._tail.awaits(digest):
            # Nobody had its update when it was not durable yet: now somebody may.
            outcome.append(self._keep(digest))
        return outcome

    # -- back -----------------------------------------------------------------------------------------------------

    def _moved(self, moved: ChainMoved) -> Outcome:
        """Only the owner's reform leaves behind what was durable."""
        if moved.head.rank.lineage <= self.ledger.lineage:
            return []
        outcome = self._rewind(moved.fork) if moved.fork < self.ledger.seq else []
        if self._durable is not None and self.election.digest_at(self._durable.rank.seq) != self._durable.digest:
            self._durable = self.election.head_at(self.ledger.seq)
        return outcome

    def _rewind(self, to: Seq) -> Outcome:
        """The ledger as it was at that entry, and the outer state with it."""
        held = [head.version for head in self.ledger.heads]
        again, left = self._history.back(to)
        if self._pruning.rewound(to):
            self.election.unfounded()
        self.ledger.become(again)
        commits = sum(isinstance(entry, Commit) for entry, _ in left)
        for entry, digest in left:  # the next reform may go on from one of them
            self._tail.take_back(digest, entry)
        text = f"abandoned by the owner's reform: {len(left)} entries after {to}, {commits} of them commits"
        return [Note("chain", text, "warning"), *self._on_rewound(to), *self.fold.rewind(held, again.heads)]

    def _leave_abandoned(self) -> Outcome:
        """The snapshot on this disk may be of what a reform has left behind since."""
        durable = self._durable
        if durable is None or self.election.digest_at(durable.rank.seq) in (durable.digest, None):
            return []
        ours = (each for digest, each in self._tail.reforms() if self.election.digest_at(each.header.seq) == digest)
        at = min((seq for each in ours if (seq := each.header.seq - 1) < durable.rank.seq), default=None)
        if at is None:
            return []
        self._durable = self.election.head_at(Seq(at))
        outcome = self._advance()
        return [*outcome, *self.fold.rewind(self.fold.contained, self.ledger.heads)]

    # -- outer state ----------------------------------------------------------------------------------------------

    def applied(self, event: Applied) -> Outcome:
        return self._reached(*self.fold.applied(event))

    def replaced(self, event: FragmentReplaced) -> Outcome:
        return self._reached(*self.fold.replaced(event))

    def apply_failed(self, event: ApplyFailed) -> Outcome:
        return [*self.fold.apply_failed(event)]

    def _reached(self, step: Step | None, effects: list[Effect]) -> Outcome:
        return [*effects] if step is None else [step, *effects]

    def made(self, commit: Commit, digest: Digest) -> Outcome:
        """As syncer: our outer state holds that version now."""
        self.fold.made(commit.fragment, commit.version, digest)
        if self.ledger.branch == commit.header.branch and self.ledger.term <= commit.header.term:
            return []
        # Sealed so late that the next term is open already.
        return [*self.fold.revert([head.version for head in self.ledger.heads])]

    # -- election -------------------------------------------------------------------------------------------------

    def poll(self, event: PollEvent, now: MonoMs) -> Outcome:
        """Something for the election: a ballot, a tick, a record on disk, news from the directory."""
        return [] if self._loading is not None else self._elect(event, now)

    def _elect(self, event: PollEvent, now: MonoMs) -> Outcome:
        outcome: Outcome = []
        for effect in self.election.handle(event, now):
            outcome += self._from_election(effect)
        return outcome

    def _from_election(self, effect: PollEffect) -> Outcome:
        match effect:
            case Tell():
                return [Send(effect.to, effect.branch, effect.term, effect.ballot, dial=True)]
            case TakeEntries():
                return [item for facts in effect.entries for item in self._take(facts.digest)]
            case DurableReached():
                return [effect, *self.durable(effect.seq, effect.digest)]
            case ChainMoved():
                return self._moved(effect)
            case Note() | PersistVote() | SendEntries():
                return [effect]
            case SealFound() | SealOpen() | SealRoster() | ServiceBegan() | ServiceEnded():
                return [effect]

    def _take(self, digest: Digest) -> Outcome:
        """The election found it valid."""
        entry = self._tail[digest]
        outcome: Outcome = [self._keep(digest)]
        if isinstance(entry, Open) and self.election.head.digest == digest:
            outcome.append(SyncerChanged(entry.header.term, entry.syncer, entry.address))
        return outcome

    def _keep(self, digest: Digest) -> KeepEntry:
        """Have record and update on disk, unless the outer state came with it."""
        entry = self._tail[digest]
        return self._tail.keep(digest, update=isinstance(entry, Commit) and not self.fold.contains(entry))

    # -- where we stand -------------------------------------------------------------------------------------------

    @property
    def branch(self) -> BranchId:
        return self.election.branch if self._loading is None else self.ledger.branch

    @property
    def term(self) -> Term:
        """Of the newest entry that counts."""
        return self.election.head.rank.term if self._loading is None else self.ledger.term

    @property
    def began(self) -> bool:
        return self.ledger.seq != NO_SEQ or self.election.head.rank.seq >= 0
