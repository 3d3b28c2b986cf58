"""One host of an election world: a disk, a place in the network, and the process that runs the real machine on it.

The shell here keeps the promises that the machine relies on: a record or entry is on disk before the event that says
so, writes are in order, one seal is under way at a time and stale drafts are dropped, blobs come after their records.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from geo_diloco.manifest import BootId, BranchId, Digest, FragmentId, MonoMs, PeerId, Seq, Term, Version
from geo_diloco.protocol.effects import Note, PersistVote, SendEntries
from geo_diloco.protocol.election.ballots import (
    Ask,
    EntryFacts,
    EntryKind,
    Head,
    Opened,
    PeerBoot,
    Root,
    Roster,
    Use,
    VoteRecord,
)
from geo_diloco.protocol.election.books import Myself
from geo_diloco.protocol.election.machine import Election
from geo_diloco.protocol.election.polls import (
    ChainMoved,
    DurableReached,
    EntriesArrived,
    EntrySealed,
    Heard,
    PollEffect,
    PollEvent,
    SealFound,
    SealOpen,
    SealRoster,
    ServiceBegan,
    ServiceEnded,
    TakeEntries,
    Tell,
)
from geo_diloco.protocol.events import EntryStored, Tick, VotePersisted

if TYPE_CHECKING:
    from tests.support.election_world import World

BACKLOG_MAX = 200
FRAGMENTS = 3
FETCHED_AT_ONCE = 4
STARVED_MAX = 16


def digest_of(*parts: object) -> Digest:
    return Digest(hashlib.sha256(repr(parts).encode()).hexdigest())


class Disk:
    """What survives a crash. `whole` is what it ever had without a gap, for the checkers."""

    def __init__(self, enrolment: str) -> None:
        self.enrolment = enrolment
        self.record: VoteRecord | None = None
        self.log: list[EntryFacts] = []
        self.known: dict[Digest, EntryFacts] = {}
        self.stored: dict[Digest, None] = {}
        self.whole: set[Digest] = set()
        self.children: dict[Digest, list[Digest]] = {}
        self.root: Root | None = None

    def plant(self, root: Root, path: set[Digest]) -> None:
        """Begin at a snapshot."""
        self.root = root
        self.whole |= path

    def begin_anew(self) -> None:
        """Chain and blobs go, the record stays."""
        self.log.clear()
        self.known.clear()
        self.stored.clear()
        self.children.clear()

    def tips(self) -> list[Digest]:
        """Entries that nothing here follows."""
        first = [] if self.root is None else [self.root.head.digest]
        return [each for each in (*first, *self.known) if not self.children.get(each)]

    def write(self, entry: EntryFacts) -> None:
        if entry.digest not in self.known:
            self.known[entry.digest] = entry
            self.log.append(entry)
            self.children.setdefault(entry.prev, []).append(entry.digest)

    def store(self, digest: Digest) -> None:
        self.stored[digest] = None
        waiting = [digest]
        while waiting:
            each = waiting.pop()
            entry = self.known[each]
            if each in self.stored and (entry.kind == "found" or entry.prev in self.whole):
                self.whole.add(each)
                waiting += [child for child in self.children.get(each, []) if child not in self.whole]


@dataclass
class Host:
    """A machine in the world: its disk, its place in the network, and the process on it, if one runs."""

    index: int
    peer: PeerId
    dialable: bool
    rate_ppm: int
    offset: int
    disk: Disk
    process: Process | None = None
    starts: int = 0
    wall_error: int = 0
    slow_disk_until: int = 0
    gone_until: int = 0
    """No process runs here before, not even after faults have stopped."""

    def mono(self, now: int) -> MonoMs:
        return MonoMs(self.offset + now + now * self.rate_ppm // 1_000_000)

    def real(self, mono: int) -> int:
        """The first real time at which the clock shows that."""
        now = (mono - self.offset) * 1_000_000 // (1_000_000 + self.rate_ppm)
        while self.mono(now) < mono:
            now += 1
        return now


class Process:
    """One process start."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host = world, host
        host.starts += 1
        self.peer = host.peer
        self.boot = BootId(digest_of(host.peer, host.starts)[:16])
        self.alive, self.paused = True, False
        me = Myself(
            peer=PeerBoot(host.peer, self.boot),
            fresh_enrolment=host.disk.enrolment,
            host=f"host {host.index}",
            address=f"host{host.index}:1" if host.dialable else "",
            may_serve=host.dialable,
            may_elect=True,
        )
        jitter = world.clockwork.random.randrange(2**32)
        self.machine = Election(me, world.plan.rules(world.founder), host.disk.record, jitter=jitter)
        self.machine._books.wall_error = 0  # type: ignore[attr-defined]
        self.pool: dict[Use, None] = {}
        self._backlog: deque[PollEvent] = deque(maxlen=BACKLOG_MAX)
        self._drafts: deque[SealFound | SealOpen | SealRoster | Term] = deque()
        self._sealing: EntryFacts | None = None
        self._writing_until = 0
        self._tick_at: int | None = None
        self._fetching = False
        self.rescue_at = 0
        self._starved = 0
        """How often in a row nobody had the blob that is missing first."""

    def mono(self) -> MonoMs:
        return self.host.mono(self.world.clockwork.now)

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: PollEvent) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.append(event)
            return
        self.machine._books.wall_error = self.host.wall_error  # type: ignore[attr-defined]
        effects = self.machine.handle(event, self.mono())
        self.machine.check_invariants()
        deadline = self.machine.deadline
        assert deadline is None or deadline > self.mono() or not isinstance(event, Tick), "a deadline that is over"
        self.world.handled(self, event, effects)
        for effect in effects:
            if self.alive:
                self.do(effect)
        self._set_tick()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        backlog = list(self._backlog)
        self._backlog.clear()
        for event in backlog:
            self.handle(event)
        self.handle(Tick())
        self._next_seal()

    def _set_tick(self) -> None:
        deadline = self.machine.deadline
        if deadline is None or not self.alive:
            return
        now = self.world.clockwork.now
        when = max(now, self.host.real(deadline))
        if self._tick_at is not None and now < self._tick_at <= when:
            return
        self._tick_at = when
        self.world.clockwork.at(when, lambda: self._tick(when))

    def _tick(self, when: int) -> None:
        if self._tick_at == when:
            self._tick_at = None
            self.handle(Tick())

    # -- effects --------------------------------------------------------------------------------------------------

    def do(self, effect: PollEffect) -> None:
        world = self.world
        match effect:
            case PersistVote():
                self.write(lambda: self._persist(effect))
            case Tell():
                if isinstance(effect.ballot, Ask) and world.mishaps.amnesic and world.by_peer[effect.to].dialable:
                    world.mishaps.amnesia(self, effect.to)
                world.watch_tell(self, effect)
                heard = Heard(self.peer, effect.branch, effect.term, self.boot, effect.ballot)
                world.send(self, effect.to, lambda receiver: receiver.handle(heard))
                world.mishaps.provoke(self, effect.ballot)
            case SendEntries():
                self._send_entries(effect)
            case TakeEntries():
                self.write(lambda: self._take(effect.entries))
            case SealOpen():
                self._drafts.clear()
                self._drafts.append(effect)
                self._next_seal()
            case SealFound() | SealRoster():
                self._drafts.append(effect)
                self._next_seal()
            case ServiceEnded():
                self._drafts.clear()
            case Note() | ChainMoved() | ServiceBegan() | DurableReached():
                pass

    def write(self, done: Callable[[], None]) -> None:
        """Writes of a disk are in order; a crash loses those that are not done."""
        world, now = self.world, self.world.clockwork.now
        slow = 1_500 if now < self.host.slow_disk_until else 0
        self._writing_until = max(self._writing_until, now + slow) + world.clockwork.between((1, 8))

        def finish() -> None:
            if self.alive:
                done()

        world.clockwork.at(self._writing_until, finish)

    def _persist(self, effect: PersistVote) -> None:
        self.host.disk.record = effect.record
        self.handle(VotePersisted(effect.number))

    def _take(self, entries: tuple[EntryFacts, ...]) -> None:
        for entry in entries:
            self.host.disk.write(entry)
            if entry.kind != "commit":
                self.stored(entry.digest)
        self._fetch_soon()

    def stored(self, digest: Digest) -> None:
        """An entry's bytes are all on disk now."""
        disk = self.host.disk
        if digest in disk.known and digest not in disk.stored:
            disk.store(digest)
            self.handle(EntryStored(digest))

    # -- blobs ----------------------------------------------------------------------------------------------------

    def _send_entries(self, effect: SendEntries) -> None:
        """Records first, then blobs one after the other."""
        disk, world = self.host.disk, self.world
        entries = tuple(disk.known[digest] for digest in effect.digests if digest in disk.known)
        world.send(self, effect.to, lambda receiver: receiver.handle(EntriesArrived(self.peer, entries)))
        if not effect.upload:
            return
        after = 0
        for entry in entries:
            if entry.kind == "commit" and entry.digest in disk.stored:
                after += world.blob_ms()
                world.clockwork.after(after, lambda digest=entry.digest: self._upload(effect.to, digest))  # type: ignore[misc]

    def _upload(self, to: PeerId, digest: Digest) -> None:
        if self.alive and not self.paused and digest in self.host.disk.stored:
            self.world.send(self, to, lambda receiver: receiver.blob_arrived(digest), reliable=True)

    def blob_arrived(self, digest: Digest) -> None:
        if self.alive and not self.paused and digest in self.host.disk.known:
            self.write(lambda: self.stored(digest))

    def _fetch_soon(self) -> None:
        if not self._fetching:
            self._fetching = True
            self.world.clockwork.after(self.world.clockwork.between((20, 150)), self._fetch)

    def _fetch(self) -> None:
        """Fetch what is missing, lowest first, from anyone whom we can dial and who has it."""
        self._fetching = False
        disk = self.host.disk
        missing = [entry.digest for entry in disk.log[-400:] if entry.digest not in disk.stored]
        if not self.alive or not missing:
            return
        self._fetching = True
        world = self.world
        if self.paused:
            world.clockwork.after(500, self._fetch)
            return
        for digest in missing:
            donors = world.donors(self, digest)
            if donors:
                self._starved = 0
                donor = donors[world.clockwork.random.randrange(len(donors))]
                batch = [each for each in missing if each in donor.disk.stored][:FETCHED_AT_ONCE]
                world.clockwork.after(world.blob_ms(), lambda d=donor, b=batch: self._fetched(d, b))  # type: ignore[misc]
                return
        self._starved += 1
        if self._starved >= STARVED_MAX:
            self._starved = 0
            world.catching_up.find_snapshot(self)
        world.clockwork.after(world.clockwork.between((100, 400)), self._fetch)

    def _fetched(self, donor: Host, batch: list[Digest]) -> None:
        if not self.alive:
            return
        if not self.paused and self.world.reaches(self.host, donor):
            for digest in batch:
                if digest in donor.disk.stored:
                    self.blob_arrived(digest)
        self.world.clockwork.after(self.world.clockwork.between((1, 20)), self._fetch)

    # -- seals ----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The syncer's work: a commit, whenever one is allowed."""
        if not self.alive or self.paused or self._sealing is not None or self._drafts:
            return
        self._forget()
        if self.machine.role == "syncer":
            self._drafts.append(self.machine.record.term)
            self._next_seal()

    def _forget(self) -> None:
        """Old entries leave the memory, if this world's plan says so; the log on disk stays."""
        machine, keep = self.machine, self.world.plan.remembered
        heard = machine.durable_heard
        durable = machine.durable_seq if machine.role == "syncer" else None if heard is None else heard.rank.seq
        if keep is not None and durable is not None and durable > keep:
            machine.forget(Seq(durable - keep))

    def _next_seal(self) -> None:
        while self._sealing is None and self._drafts and not self.paused:
            entry = self._draft(self._drafts.popleft())
            if entry is not None:
                self._sealing = entry
                self.world.drafted(self, entry)
                self.write(lambda entry=entry: self._sealed(entry))  # type: ignore[misc]

    def _draft(self, draft: SealFound | SealOpen | SealRoster | Term) -> EntryFacts | None:
        machine, now = self.machine, self.mono()
        match draft:
            case SealFound():
                return self._entry("found", draft.term, Digest(""), Seq(0), roster=draft.roster)
            case SealOpen():
                opened = Opened(self.peer, self.boot, "", draft.votes)
                seq = Seq(draft.head.rank.seq + 1)
                return self._entry("open", draft.term, draft.head.digest, seq, opened=opened)
            case SealRoster():
                if machine.begin_append(draft.term, now, roster=True) is not None:
                    return None
                head = machine.head
                return self._entry("roster", draft.term, head.digest, Seq(head.rank.seq + 1), roster=draft.roster)
            case _:
                return self._draft_commit(draft, now)

    def _draft_commit(self, term: Term, now: MonoMs) -> EntryFacts | None:
        machine, world = self.machine, self.world
        if machine.begin_append(term, now) is not None:
            return None
        head = machine.head
        uses: list[Use] = []
        fragment = FragmentId(world.clockwork.random.randrange(FRAGMENTS))
        for use in [each for each in self.pool if each.fragment == fragment]:
            if machine.why_not_use(use) is None:
                uses.append(use)
            del self.pool[use]
        version = Version(world.book.versions(head.digest)[fragment] + 1)
        entry = self._entry(
            "commit", term, head.digest, Seq(head.rank.seq + 1), uses=tuple(uses), fragment=fragment, version=version
        )
        return entry

    def _entry(
        self,
        kind: EntryKind,
        term: Term,
        prev: Digest,
        seq: Seq,
        *,
        opened: Opened | None = None,
        roster: Roster | None = None,
        uses: tuple[Use, ...] = (),
        fragment: FragmentId = FragmentId(0),
        version: Version = Version(0),
    ) -> EntryFacts:
        branch = BranchId("") if kind == "found" else self.world.book.branch(prev)
        digest = digest_of(kind, branch, term, prev, seq, self.peer, self.boot, self.world.clockwork.now, uses)
        return EntryFacts(
            kind=kind,
            branch=branch,
            term=term,
            seq=seq,
            prev=prev,
            digest=digest,
            signer=self.peer,
            opened=opened,
            roster=roster,
            uses=uses,
            fragment=fragment,
            version=version,
        )

    def _sealed(self, entry: EntryFacts) -> None:
        self._sealing = None
        self._put(entry)
        self.handle(EntrySealed(entry))
        if self.alive and self.world.mishaps.provoke_sealed(self, entry):
            return
        self._push(entry)
        self._next_seal()

    def _push(self, entry: EntryFacts) -> None:
        """What `Announce` does: the sealed bytes to everyone connected; the machine's Append follows or preceded."""
        if not self.alive or self.paused or self.machine.role != "syncer":
            return
        for host in self.world.hosts:
            if host.index != self.host.index:
                event = EntriesArrived(self.peer, (entry,))
                self.world.send(self, host.peer, lambda receiver, event=event: receiver.handle(event))  # type: ignore[misc]

    def _put(self, entry: EntryFacts) -> None:
        self.host.disk.write(entry)
        self.host.disk.store(entry.digest)
        self.world.sealed(self, entry)

    def crash(self, *, torn: bool) -> None:
        """Die. What was being sealed may be on disk all the same."""
        self.alive = False
        if self._sealing is not None and torn:
            self._put(self._sealing)


class Book:
    """Every entry ever sealed, by digest."""

    def __init__(self) -> None:
        self.entries: dict[Digest, EntryFacts] = {}
        self._versions: dict[Digest, tuple[int, ...]] = {}
        self._rosters: dict[Digest, Roster] = {}
        self._lineages: dict[Digest, int] = {}
        self.sealed_at: dict[Digest, int] = {}
        self.reforms: dict[int, EntryFacts] = {}

    def add(self, entry: EntryFacts, now: int) -> None:
        self.entries[entry.digest] = entry
        self.sealed_at[entry.digest] = now
        if entry.kind == "reform":
            self.reforms[entry.lineage] = entry
        versions = list(self._versions.get(entry.prev, (0,) * FRAGMENTS))
        if entry.kind == "commit":
            versions[entry.fragment] = entry.version
        self._versions[entry.digest] = tuple(versions)
        self._rosters[entry.digest] = entry.roster or self._rosters.get(entry.prev, ())
        self._lineages[entry.digest] = entry.lineage or self._lineages.get(entry.prev, 0)

    def versions(self, digest: Digest) -> tuple[int, ...]:
        return self._versions[digest]

    def roster(self, digest: Digest) -> Roster:
        return self._rosters[digest]

    def branch(self, digest: Digest) -> BranchId:
        entry = self.entries[digest]
        return BranchId(entry.digest) if entry.kind in ("found", "reform") else entry.branch

    def lineage(self, digest: Digest) -> int:
        return self._lineages[digest]

    def begins(self, digest: Digest) -> bool:
        """Whether no term of its branch is opened there yet."""
        return self.entries[digest].kind in ("found", "reform")

    def root(self, head: Head) -> Root:
        """What a peer is told that begins at that entry."""
        opened = named = None
        for entry in reversed(self.path(head.digest)):
            opened = opened or entry.opened
            named = named or (entry if entry.roster is not None else None)
        assert opened is not None and named is not None
        return Root(
            head=head,
            branch=self.branch(head.digest),
            roster=self.roster(head.digest),
            roster_seq=named.seq,
            opened=opened,
        )

    def is_ancestor(self, old: Digest, new: Digest) -> bool:
        seq, at = self.entries[old].seq, self.entries.get(new)
        while at is not None and at.seq > seq:
            at = self.entries.get(at.prev)
        return at is not None and at.digest == old

    def path(self, digest: Digest) -> list[EntryFacts]:
        """From the first entry to that one."""
        path: list[EntryFacts] = []
        at = self.entries.get(digest)
        while at is not None:
            path.append(at)
            at = self.entries.get(at.prev)
        return path[::-1]
