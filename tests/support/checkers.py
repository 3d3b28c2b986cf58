"""The invariants of the protocol, checked from outside while a cluster runs. They share no code with the core.

Numbers are those of the list in geo_diloco/protocol/README.md. A checker raises AssertionError at the very event that
breaks its rule.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, FragmentId, SyncSpec
from geo_diloco.protocol.effects import Effect, PersistAccounts, TokensDropped, TokensMerged
from geo_diloco.protocol.events import Event, Resumed
from geo_diloco.protocol.messages import Commit, Finished, Found, Open
from tests.support.cluster import Cluster, Process, SignedEntry, Watch
from tests.support.work import TOLERANCE, StepKey


class ChainChecker(Watch):
    """1 and 2: one syncer a term, one chain, seq and version only grow; every peer's chain is a prefix of it."""

    def __init__(self) -> None:
        self.chain: list[SignedEntry] = []
        self._syncers: dict[int, str] = {}
        self._versions: dict[int, int] = {}

    def sealed(self, signed: SignedEntry) -> None:
        entry, header = signed.entry, signed.entry.header
        assert header.seq == len(self.chain), f"seq {header.seq} at {len(self.chain)}"
        if self.chain:
            last = self.chain[-1]
            assert header.prev == last.digest, "prev does not match"
            assert str(header.branch) == self.chain[0].digest, "another branch"
            assert header.term >= last.entry.header.term, "term went back"
            assert header.term == last.entry.header.term or isinstance(entry, Open), "term was not opened"
            assert not isinstance(last.entry, Finished), "an entry after the end"
        if isinstance(entry, Open):
            assert header.term not in self._syncers, f"two openings of term {header.term}"
            self._syncers[header.term] = entry.boot
        elif isinstance(entry, Commit):
            expected = self._versions.get(entry.fragment, 0) + 1
            assert entry.version == expected, f"fragment {entry.fragment}: version {entry.version}, not {expected}"
            self._versions[entry.fragment] = entry.version
        self.chain.append(signed)

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        ledger = process.core.ledger
        if ledger.seq >= 0:
            assert ledger.head_digest == self.chain[ledger.seq].digest, f"{process.peer[:8]} is on another chain"


class CommitChecker(Watch):
    """4 (as the chain claims it) and 5: ranges never overlap; K fresh participants, or the only-late rule's reason."""

    def __init__(self, sync: SyncSpec) -> None:
        self._sync = sync
        self._bases: dict[tuple[int, int], Digest] = {}
        self._until: dict[tuple[str, int], int] = defaultdict(int)
        self.participations: list[int] = []

    def sealed(self, signed: SignedEntry) -> None:
        entry = signed.entry
        if isinstance(entry, Found):
            self._bases = {(p, 0): signed.digest for p in range(len(entry.num_elements))}
        if not isinstance(entry, Commit):
            return
        fragment, listed = entry.fragment, entry.participants
        peers = [each.peer for each in listed]
        assert peers == sorted(set(peers)), "participants are not sorted or not distinct"
        assert abs(sum(each.weight for each in listed) - 1) < 1e-9, "weights do not sum to 1"
        for each in listed:
            assert self._bases[fragment, each.base_version] == each.base, "base and version disagree"
            assert entry.version - 1 - each.base_version <= self._sync.staleness_max, "too old"
            until = self._until[each.peer, fragment]
            assert until <= each.first_step < each.last_step, f"steps up to {until} were merged, {each}"
            self._until[each.peer, fragment] = each.last_step
        current = self._bases[fragment, entry.version - 1]
        fresh = sum(each.base == current for each in listed)
        only_late = entry.close_reason.startswith("only late work") and fresh < len(listed)
        assert len(listed) >= self._sync.quorum, f"{len(listed)} participants"
        assert fresh >= self._sync.quorum or only_late, f"{fresh} fresh of {self._sync.quorum}: {entry.close_reason}"
        assert entry.quorum_wait_ms >= 0 and entry.grace_ms >= 0, "time went back"
        self._bases[fragment, entry.version] = signed.digest
        self.participations.append(len(listed))


class WorkChecker(Watch):
    """4 on the work itself: no inner step enters a fragment of Theta twice, and ranges tell the truth."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.merged: list[dict[StepKey, float]] = [defaultdict(float) for _ in cluster.plan.num_elements]

    def sealed(self, signed: SignedEntry) -> None:
        entry = signed.entry
        if not isinstance(entry, Commit):
            return
        into = self.merged[entry.fragment]
        for each in entry.participants:
            assert each.contribution.digest not in self._cluster.bad_blobs, "an invalid contribution was merged"
            for key, share in self._cluster.contents[each.contribution.digest].items():
                assert key.peer == each.peer, "another learner's work"
                assert each.first_step < key.step <= each.last_step, f"{key.step} is not in {each}"
                into[key] += share
                assert into[key] <= 1 + TOLERANCE, f"step {key.step} of {key.peer[:8]} merged {into[key]} times"


class StateChecker(Watch):
    """6: one digest per fragment and version, everywhere."""

    def __init__(self) -> None:
        self.digests: dict[tuple[int, int], Digest] = {}

    def state(self, process: Process, fragment: int, version: int, digest: Digest) -> None:
        known = self.digests.setdefault((fragment, version), digest)
        assert known == digest, f"two states of fragment {fragment} version {version}"


@dataclass
class Book:
    """What one learner said about its tokens, over all its process starts."""

    booked: list[TokensMerged | TokensDropped] = field(default_factory=list)
    sums: dict[tuple[type, int], int] = field(default_factory=lambda: defaultdict(int))
    durable: int = 0
    """How many of `booked` a checkpoint covers: a process that resumes from it says the others again."""
    marks: dict[int, int] = field(default_factory=dict)
    trained_before: int = 0
    started_with: int = 0
    process: Process | None = None
    has_checkpoint: bool = False
    was_lost_unsaved: bool = False
    awaits_resumed: bool = False

    def add(self, said: TokensMerged | TokensDropped) -> None:
        self.booked.append(said)
        self.sums[type(said), said.fragment] += said.tokens

    def forget_undurable(self) -> None:
        for said in self.booked[self.durable :]:
            self.sums[type(said), said.fragment] -= said.tokens
        del self.booked[self.durable :]
        self.marks.clear()


class TokenChecker(Watch):
    """7: trained = merged + in flight + carried + dropped, per learner and fragment, after every single event."""

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self.books: dict[str, Book] = defaultdict(Book)

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if process.role != "learner":
            return
        book = self.books[process.peer]
        if book.process is not process:
            book.process, book.started_with, book.awaits_resumed = process, 0, book.has_checkpoint
        for effect in effects:
            if isinstance(effect, TokensMerged | TokensDropped):
                book.add(effect)
            elif isinstance(effect, PersistAccounts):
                book.marks[effect.save] = len(book.booked)
        if isinstance(event, Resumed):
            book.started_with, book.durable, book.awaits_resumed = event.tokens, len(book.booked), False
        if not book.awaits_resumed:
            self._check(process, book)

    def saved(self, process: Process, save: int) -> None:
        book = self.books[process.peer]
        book.durable, book.has_checkpoint = book.marks[save], True

    def ended(self, process: Process) -> None:
        """What no checkpoint covers is forgotten: the next process says it again, and by its Resumed how much more was
        lost. Without any checkpoint all of it is lost."""
        if process.role != "learner":
            return
        book = self.books[process.peer]
        tokens = process.core.status(process.mono()).tokens
        trained = tokens[0].trained - book.started_with if tokens and book.process is process else 0
        book.trained_before += trained
        book.forget_undurable()
        if not book.has_checkpoint:
            for p in range(self._num_fragments):
                book.add(TokensDropped(FragmentId(p), trained, "crashed"))
            book.durable, book.was_lost_unsaved = len(book.booked), True

    def _check(self, process: Process, book: Book) -> None:
        for p, now in enumerate(process.core.status(process.mono()).tokens):
            trained = book.trained_before + now.trained - book.started_with
            merged, dropped = book.sums[TokensMerged, p], book.sums[TokensDropped, p]
            assert now.in_flight >= 0 and now.carried >= 0, f"{process.peer[:8]} fragment {p}: {now}"
            assert trained == merged + now.in_flight + now.carried + dropped, (
                f"{process.peer[:8]} fragment {p}: trained {trained}, merged {merged}, dropped {dropped}, {now}"
            )
