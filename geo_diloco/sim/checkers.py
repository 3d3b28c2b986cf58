"""The invariants of the protocol, checked from outside while a simulated run goes on. They share no code with the core.

Here is what the durable chain says: commits, rules, work, states, what is pruned, where every token is. That there is
one chain is watched by `chaincheckers.py`. Numbers are those of the lists in `protocol/README.md` (1 to 8) and of the
election (I1 to I10). A checker raises AssertionError at the very event that breaks its rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from geo_diloco.manifest import Digest, FragmentId
from geo_diloco.protocol.effects import Effect, PersistAccounts, Prune, TokensDropped, TokensMerged
from geo_diloco.protocol.events import Event, Resumed
from geo_diloco.protocol.messages import Amendment, Commit, Found
from geo_diloco.sim.chaincheckers import lineage_at
from geo_diloco.sim.fakes import SignedEntry
from geo_diloco.sim.process import Process
from geo_diloco.sim.work import TOLERANCE, StepKey
from geo_diloco.sim.world import Host, Watch, World


class CommitChecker(Watch):
    """4 (as the chain claims it) and 5: ranges never overlap; K fresh participants, or the only-late rule's reason. A
    commit goes by rules that were in force at some time since the fragment's last one. Progress never goes back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sync = world.plan.sync
        self.participations: list[int] = []
        self.times: list[int] = []
        """When each commit became durable."""
        self._begin()

    def _begin(self) -> None:
        world = self._world
        first = {"quorum": world.plan.sync.quorum, "eta": world.rules.outer.eta, "mu": world.rules.outer.mu}
        self._rules: list[list[dict[str, float]]] = [[first] for _ in world.plan.num_elements]
        """Per fragment: those in force since its last commit, oldest first."""
        self._progress = 0.0
        self._bases: dict[tuple[int, int], Digest] = {}
        self._until: dict[tuple[str, int], int] = defaultdict(int)
        self._mu_max: dict[int, float] = {}
        """Per fragment, what its last commit leaves to the next."""

    def abandoned(self, chain: list[SignedEntry]) -> None:
        times = self.times
        self._begin()
        self.participations, self.times = [], []
        for signed in chain:
            self._take(signed)
        self.times = times[: len(self.times)]

    def durable(self, process: Process, signed: SignedEntry) -> None:
        self._take(signed)

    def _take(self, signed: SignedEntry) -> None:
        entry = signed.entry
        if isinstance(entry, Found):
            self._bases = {(p, 0): signed.digest for p in range(len(entry.num_elements))}
        if isinstance(entry, Amendment):
            for rules in self._rules:
                rules.append(
                    rules[-1] | {name: entry.changes.given().get(name, old) for name, old in rules[-1].items()}
                )
        if isinstance(entry, Commit):
            self._check(entry)
            del self._rules[entry.fragment][:-1]
            self._bases[entry.fragment, entry.version] = signed.digest
            self.participations.append(len(entry.participants))
            self.times.append(self._world.clock.now)

    def _check(self, entry: Commit) -> None:
        fragment, listed = entry.fragment, entry.participants
        peers = [each.peer for each in listed]
        assert peers == sorted(set(peers)), "participants are not sorted or not distinct"
        portion = sum(each.weight for each in listed)
        assert 0 < portion < 1 + 1e-9, f"weights sum to {portion}"
        assert entry.left_out or abs(portion - 1) < 1e-9, f"weights sum to {portion}, and nobody was left out"
        for each in listed:
            assert self._bases[fragment, each.base_version] == each.base, "base and version disagree"
            assert entry.version - 1 - each.base_version <= self._sync.staleness_max, "too old"
            until = self._until[each.peer, fragment]
            assert until <= each.first_step < each.last_step, f"steps up to {until} were merged, {each}"
            self._until[each.peer, fragment] = each.last_step
        current = self._bases[fragment, entry.version - 1]
        fresh = sum(each.base == current for each in listed)
        only_late = entry.close_reason.startswith("only late work") and fresh < len(listed)
        allowed = self._mu_max.get(fragment, 1.0)
        rules = [each for each in self._rules[fragment] if each["eta"] == entry.eta]
        rules = [each for each in rules if min(each["mu"], allowed) == entry.mu]
        assert rules, f"eta {entry.eta}, mu {entry.mu}, and in force were {self._rules[fragment]}, mu up to {allowed}"
        if gain_max := self._world.rules.outer.gain_max:
            rho = entry.rho or 0.0
            together = (1 - 1 / gain_max) / rho if rho > 0 else 1.0
            self._mu_max[fragment] = min(entry.mu + 0.05, together)
        quorum = min(each["quorum"] for each in rules)
        assert len(listed) >= quorum, f"{len(listed)} participants"
        assert fresh >= quorum or only_late, f"{fresh} fresh of {quorum}: {entry.close_reason}"
        assert entry.progress >= self._progress - 1e-9, f"progress {entry.progress} after {self._progress}"
        self._progress = entry.progress
        assert entry.quorum_wait_ms >= 0 and entry.grace_ms >= 0, "time went back"


class RulesChecker(Watch):
    """Everybody who holds the same chain has the same rules in force, also who began with a snapshot; the owner's
    amendments are 1, 2, 3 along it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seqs: list[int] = []
        self._in_force: list[dict[str, object]] = [{}]
        """Values that differ from the plan's, after each amendment."""
        self._seen: dict[str, int] = {}
        """By process start: how many amendments it was seen with."""

    @property
    def num_amendments(self) -> int:
        return len(self._seqs)

    def abandoned(self, chain: list[SignedEntry]) -> None:
        self._seqs, self._in_force = [], [{}]
        self._seen.clear()
        for signed in chain:
            self._take(signed)

    def durable(self, process: Process, signed: SignedEntry) -> None:
        self._take(signed)

    def _take(self, signed: SignedEntry) -> None:
        entry = signed.entry
        if not isinstance(entry, Amendment):
            return
        assert entry.number == len(self._seqs) + 1, f"amendment {entry.number} after {len(self._seqs)}"
        assert entry.owner == self._world.hosts[0].peer, "amended by another"
        self._seqs.append(entry.header.seq)
        self._in_force.append(self._in_force[-1] | entry.changes.given())

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        ledger = process.core.ledger
        if lineage_at(self._world, ledger.head_digest) < self._world.lineage:
            return
        number = bisect_right(self._seqs, ledger.seq)
        if self._seen.get(process.boot, 0) == number:
            return
        self._seen[process.boot] = number
        rules = process.core.status(process.mono()).rules
        sections = (rules.stop, rules.outer, rules.sync, rules)
        for name, value in self._in_force[number].items():
            held = next(getattr(section, name) for section in sections if hasattr(section, name))
            assert held == value, f"host {process.host.index} goes by {name} {held}, in force is {value}"


class WorkChecker(Watch):
    """4 on the work itself: no inner step enters a fragment of Theta twice, and ranges tell the truth."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.merged: list[dict[StepKey, float]] = [defaultdict(float) for _ in world.plan.num_elements]

    def abandoned(self, chain: list[SignedEntry]) -> None:
        self.merged = [defaultdict(float) for _ in self._world.plan.num_elements]
        for signed in chain:
            self._take(signed)

    def durable(self, process: Process, signed: SignedEntry) -> None:
        self._take(signed)

    def _take(self, signed: SignedEntry) -> None:
        entry = signed.entry
        if not isinstance(entry, Commit):
            return
        into = self.merged[entry.fragment]
        for each in entry.participants:
            assert each.contribution.digest not in self._world.bad_blobs, "an invalid contribution was merged"
            for key, share in self._world.contents[each.contribution.digest].items():
                assert key.peer == each.peer, "another learner's work"
                assert each.first_step < key.step <= each.last_step, f"{key.step} is not in {each}"
                into[key] += share
                assert into[key] <= 1 + TOLERANCE, f"step {key.step} of {key.peer[:8]} merged {into[key]} times"


class StateChecker(Watch):
    """6: one digest per fragment and durable version, everywhere."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._digests: dict[tuple[int, int], Digest] = {}

    def abandoned(self, chain: list[SignedEntry]) -> None:
        self._digests.clear()
        for signed in chain:
            self._take(signed)

    def durable(self, process: Process, signed: SignedEntry) -> None:
        self._take(signed)

    def _take(self, signed: SignedEntry) -> None:
        entry = signed.entry
        if isinstance(entry, Found):
            self._digests = {(p, 0): digest for p, digest in enumerate(entry.state_digests)}
        if isinstance(entry, Commit):
            self._digests[entry.fragment, entry.version] = entry.state_digest

    def state(self, process: Process, fragment: int, version: int, digest: Digest) -> None:
        if process.core.ledger.lineage < self._world.lineage:
            return  # of what the owner's reform has left behind
        known = self._digests.get((fragment, version))
        assert known == digest, f"host {process.host.index}: fragment {fragment}, version {version} is not durable"


class PruneChecker(Watch):
    """What a disk lets go of, a snapshot on it contains (I5, I6: what is held is held), and those a little behind can
    still have."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._entries: dict[Digest, list[Commit]] = defaultdict(list)
        self.num_pruned = 0

    def durable(self, process: Process, signed: SignedEntry) -> None:
        if isinstance(signed.entry, Commit):
            self._entries[signed.entry.update.digest].append(signed.entry)

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Prune):
                self.num_pruned += len(effect.updates)
                self._check(process, effect)

    def _check(self, process: Process, effect: Prune) -> None:
        disk = process.host.disk
        held = disk.checkpoint.accounts.resume_at if process.learn and disk.checkpoint else disk.snapshot
        assert held is not None, "updates go, and there is no snapshot"
        for update in effect.updates:
            commits = self._entries[update.digest]
            assert commits, f"host {process.host.index} lets go of what is not durable"
            for commit in commits:
                assert commit.version <= held.heads[commit.fragment].version, (
                    f"host {process.host.index} lets go of version {commit.version} of fragment {commit.fragment}"
                )
                known = process.core.ledger.heads[commit.fragment].version
                behind = known - commit.version
                assert behind > self._world.plan.sync.staleness_max, f"an update that is only {behind} versions old"


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
    began_again: bool = False

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

    def __init__(self, world: World) -> None:
        self._num_fragments = len(world.plan.num_elements)
        self.books: dict[str, Book] = defaultdict(Book)

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if process.learn is None:
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
        if process.learn is None:
            return
        book = self.books[process.peer]
        tokens = process.core.tokens()
        trained = tokens[0].trained - book.started_with if tokens and book.process is process else 0
        book.trained_before += trained
        book.forget_undurable()
        if not book.has_checkpoint:
            for p in range(self._num_fragments):
                book.add(TokensDropped(FragmentId(p), trained, "crashed"))
            book.durable, book.was_lost_unsaved = len(book.booked), True

    def began_again(self, host: Host) -> None:
        """Its books are in the folder that was moved away; what the chain took before counts on."""
        self.books[host.peer] = Book(began_again=True)

    def _check(self, process: Process, book: Book) -> None:
        for p, now in enumerate(process.core.tokens()):
            trained = book.trained_before + now.trained - book.started_with
            merged, dropped = book.sums[TokensMerged, p], book.sums[TokensDropped, p]
            assert now.in_flight >= 0 and now.carried >= 0, f"{process.peer[:8]} fragment {p}: {now}"
            assert trained == merged + now.in_flight + now.carried + dropped, (
                f"{process.peer[:8]} fragment {p}: trained {trained}, merged {merged}, dropped {dropped}, {now}"
            )
