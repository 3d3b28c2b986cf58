"""Every entry a peer knows, as a tree: the chain that counts is the path to the entry of highest rank.

A tree, because a peer may know of a better chain long before it holds its bytes, and must not give up the whole one
it has meanwhile: whoever had those bytes may be gone for good. So there are two ends. `head` is the highest entry
known: what learners follow and what a syncer's entries are compared with. `best` is the highest entry whose records
and blobs are on disk without a gap: what is offered, acked and asked with. The tree never fetches or signs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from geo_diloco.manifest import BranchId, Digest, PeerId, Seq, Term
from geo_diloco.protocol.election.ballots import NO_HEAD, EntryFacts, EntryKind, Head, Opened, Rank, Root, Roster, Use
from geo_diloco.protocol.election.validity import Before, why_not_next

SENT_MAX = 256
"""Entries sent in answer to one Need."""
CHECKED = 32


@dataclass(slots=True, eq=False)
class _Node:
    entry: EntryFacts
    parent: _Node | None
    head: Head
    branch: BranchId
    roster: Roster
    """In force from this entry on."""
    roster_seq: Seq
    opened: Opened | None
    """Of this entry's term; none between `found` or `reform` and the first `open`."""
    amendments: int = 0
    """Number of the newest up to here."""
    children: list[_Node] = field(default_factory=list)
    stored: bool = False
    complete: bool = False
    refused: bool = False
    """There is another entry of its place: neither is acked, whoever sends its bytes."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of entries that arrived."""

    new: tuple[EntryFacts, ...]
    fork: Seq | None
    """The chain moved: it leaves the old one after this seq."""
    why_not: str | None
    """Of the first entry not taken."""
    gap: bool = False
    """It was because an entry before it is missing here."""
    parted: EntryFacts | None = None
    """The latest reform among them that is later than our branch, on top of what we don't have (yet, or any more)."""


class Forks:
    """The tree and its two ends."""

    def __init__(self, owner: PeerId) -> None:
        self._owner = owner
        self._nodes: dict[Digest, _Node] = {}
        self._by_place: dict[tuple[BranchId, Term, Seq], _Node] = {}
        self._terms: dict[tuple[BranchId, Term], Opened] = {}
        self._chain: list[_Node] = []
        self._base = Seq(0)
        """Seq of the first entry in `_chain`."""
        self._num_whole = 0
        """Entries of `_chain` that are complete, from its beginning."""
        self._used: dict[Use, Seq] = {}
        self._reforms: dict[int, EntryFacts] = {}
        """By number; never forgotten, because they prove to anybody which branch goes on."""
        self._cut = False
        """The tree begins later than `found`: there, or because what came before is forgotten."""
        self._planted: Digest | None = None
        """The entry it began with, if we have its state but not itself."""
        self._settled: list[Digest] = []
        """The chain's entries before `_base` that are forgotten, oldest first: their digests, to be told to others."""
        self._best: _Node | None = None
        self._states: set[Digest] = set()
        """Entries as of which a snapshot is on disk."""

    # -- where we stand -------------------------------------------------------------------------------------------

    @property
    def head(self) -> Head:
        return self._chain[-1].head if self._chain else NO_HEAD

    @property
    def best(self) -> Head:
        return self._best.head if self._best is not None else NO_HEAD

    @property
    def whole(self) -> Head:
        """The highest entry of the chain that is on disk without a gap: what may be acked."""
        chain, at = self._chain, self._num_whole
        if at == 0 or not chain[at - 1].complete:
            at = next((index + 1 for index in reversed(range(len(chain))) if chain[index].complete), 0)
        while at < len(chain) and chain[at].complete:
            at += 1
        self._num_whole = at
        return chain[at - 1].head if at else NO_HEAD

    @property
    def branch(self) -> BranchId:
        return self._chain[-1].branch if self._chain else BranchId("")

    @property
    def roster(self) -> Roster:
        """Of the head."""
        return self._chain[-1].roster if self._chain else ()

    @property
    def best_roster(self) -> Roster:
        return self._best.roster if self._best is not None else ()

    @property
    def roster_seq(self) -> Seq:
        """Of the newest entry of the chain that named a roster."""
        return self._chain[-1].roster_seq if self._chain else Seq(-1)

    def opened(self, branch: BranchId, term: Term) -> Opened | None:
        """Who serves that term, as a proven `open` said."""
        return self._terms.get((branch, term))

    def knows(self, digest: Digest) -> bool:
        return digest in self._nodes

    def on_chain(self, head: Head) -> bool:
        return head.digest != "" and self.digest_at(head.rank.seq) == head.digest

    def digest_at(self, seq: Seq) -> Digest | None:
        """Of our chain's entry with that seq, forgotten ones included."""
        node = self._at(seq)
        if node is not None:
            return node.entry.digest
        index = seq - self._settled_from
        return self._settled[index] if 0 <= index < len(self._settled) else None

    @property
    def _settled_from(self) -> Seq:
        return Seq(self._base - len(self._settled))

    def head_at(self, seq: Seq) -> Head | None:
        """The entry of our chain with that seq, if it is not forgotten."""
        node = self._at(seq)
        return None if node is None else node.head

    def rank_of(self, digest: Digest) -> Rank | None:
        """Of an entry known here, on whichever chain."""
        node = self._nodes.get(digest)
        return None if node is None else node.head.rank

    def last_syncer(self) -> PeerId | None:
        """Who appended the highest complete entry."""
        return None if self._best is None else self._best.entry.signer

    def _at(self, seq: Seq) -> _Node | None:
        index = seq - self._base
        return self._chain[index] if 0 <= index < len(self._chain) else None

    def plant(self, root: Root) -> None:
        """Begin at a snapshot's entry instead of `found`."""
        assert not self._nodes, "the tree has begun"
        rank, opened = root.head.rank, root.opened
        begins: EntryKind = "reform" if rank.lineage else "found"
        entry = EntryFacts(
            kind="record" if opened is not None else begins,
            branch=root.branch,
            term=rank.term,
            seq=rank.seq,
            prev=Digest(""),
            digest=root.head.digest,
            signer=self._owner if opened is None else opened.syncer,
        )
        node = _Node(entry, None, root.head, root.branch, root.roster, root.roster_seq, opened, root.amendments)
        node.stored = node.complete = self._cut = True
        self._nodes[entry.digest] = self._by_place[root.branch, rank.term, rank.seq] = node
        if opened is not None:
            self._terms[root.branch, rank.term] = opened
        self._chain, self._base, self._best, self._planted = [node], rank.seq, node, entry.digest

    # -- growing --------------------------------------------------------------------------------------------------

    def take(self, entries: tuple[EntryFacts, ...]) -> Taken:
        """Add what is valid. What isn't takes along only what builds on it."""
        new: list[EntryFacts] = []
        fork: Seq | None = None
        reason: str | None = None
        gap = False
        parted: EntryFacts | None = None
        for entry in entries:
            if entry.digest in self._nodes:
                continue
            why_not = self.why_not(entry)
            if why_not is not None:
                gap = gap or (reason is None and entry.kind != "found" and entry.prev not in self._nodes)
                reason = reason or why_not
                parted = entry if self._parts(entry, parted) else parted
                if self._why_not_alone(entry) is None:
                    self._refuse(self._double_of(entry))
                continue
            moved = self._add(entry)
            new.append(entry)
            if moved is not None:
                fork = moved if fork is None else min(fork, moved)
        return Taken(tuple(new), fork, reason, gap, parted)

    def _parts(self, entry: EntryFacts, before: EntryFacts | None) -> bool:
        signed = entry.kind == "reform" and entry.signer == self._owner and bool(entry.roster)
        later_than = max(self.head.rank.lineage, 0 if before is None else before.lineage)
        return signed and entry.prev not in self._nodes and entry.lineage > later_than

    def _refuse(self, double: _Node | None) -> None:
        if double is not None:
            double.refused = True
            self._spoil(double)

    def why_not(self, entry: EntryFacts) -> str | None:
        """Why this entry can't follow the one it names; none if it can."""
        why_not = self._why_not_alone(entry)
        if why_not is None and self._double_of(entry) is not None:
            return f"ALARM: two entries of term {entry.term}, seq {entry.seq}"
        return why_not

    def _why_not_alone(self, entry: EntryFacts) -> str | None:
        """As if there were no other of its place."""
        parent = self._nodes.get(entry.prev)
        if entry.kind == "found":
            founds = not self._nodes and entry.seq == 0 and entry.signer == self._owner and bool(entry.roster)
            return None if founds else "found is the first entry, by the founder"
        if parent is None:
            return f"entry {entry.seq} continues what is not known here"
        before = Before(
            parent.entry, parent.branch, parent.head.rank.lineage, parent.roster, parent.opened, parent.amendments
        )
        why_not = why_not_next(entry, before, self._owner) or self._why_not_uses(entry, parent)
        return why_not or self._why_not_begun(entry)

    def _why_not_begun(self, entry: EntryFacts) -> str | None:
        """A term is opened once, and the owner's reforms have a number each."""
        opened = self._terms.get((entry.branch, entry.term))
        if entry.opened is not None and opened is not None:
            return f"ALARM: term {entry.term} was opened by {opened.syncer[:8]} already"
        if entry.kind == "reform" and entry.lineage in self._reforms:
            return f"ALARM: two reforms of number {entry.lineage}"
        return None

    def _double_of(self, entry: EntryFacts) -> _Node | None:
        """Another entry of the same branch, term and seq, if there is one."""
        return self._by_place.get((entry.branch, entry.term, entry.seq))

    def _why_not_uses(self, entry: EntryFacts, parent: _Node) -> str | None:
        """Rule 26, for an entry of others: where our tree begins late, older bases can't be looked up and are
        believed."""
        if len(set(entry.uses)) < len(entry.uses):
            return f"entry {entry.seq} consumes the same work twice"
        uses = [use for use in entry.uses if not self._cut or use.base in self._nodes]
        reasons = (self.why_not_use(use, parent.entry.digest) for use in uses)
        return next((reason for reason in reasons if reason is not None), None)

    def why_not_use(self, use: Use, on: Digest | None = None) -> str | None:
        """Why that work can't be consumed after entry `on` (the head if none is named)."""
        node = self._nodes[on] if on is not None else self._chain[-1]
        base_found = False
        while self._at(node.entry.seq) is not node:
            base_found = base_found or node.entry.digest == use.base
            if use in node.entry.uses:
                return f"work of {use.peer[:8]} on fragment {use.fragment} is consumed already"
            assert node.parent is not None
            node = node.parent
        used_at = self._used.get(use)
        if used_at is not None and used_at <= node.entry.seq:
            return f"work of {use.peer[:8]} on fragment {use.fragment} is consumed already"
        base = self._nodes.get(use.base)
        on_chain = base is not None and base.entry.seq <= node.entry.seq and self._at(base.entry.seq) is base
        return None if base_found or on_chain else f"base {use.base[:12]} is off the chain"

    def _add(self, entry: EntryFacts) -> Seq | None:
        parent = self._nodes.get(entry.prev)
        begins = entry.kind in ("found", "reform")
        branch = BranchId(entry.digest) if begins else entry.branch
        inherited = 0 if parent is None else parent.head.rank.lineage
        lineage = entry.lineage if entry.kind == "reform" else inherited
        opened = entry.opened
        if opened is None and parent is not None and not begins:
            opened = parent.opened
        if entry.roster is not None or parent is None:
            roster, roster_seq = entry.roster or (), entry.seq
        else:
            roster, roster_seq = parent.roster, parent.roster_seq
        head = Head(Rank(lineage, entry.term, entry.seq), entry.digest)
        amendments = 0 if parent is None else parent.amendments
        if entry.amends is not None:
            amendments = entry.amends.number
        node = _Node(entry, parent, head, branch, roster, roster_seq, opened, amendments)
        self._nodes[entry.digest] = node
        self._by_place[branch, entry.term, entry.seq] = node
        if entry.opened is not None:
            self._terms[branch, entry.term] = entry.opened
        if entry.kind == "reform":
            self._reforms[lineage] = entry
        if parent is not None:
            parent.children.append(node)
        moved = self._move(node) if head.rank > self.head.rank or not self._chain else None
        if entry.digest in self._states:
            self._complete_from(node)
        return moved

    def _move(self, node: _Node) -> Seq:
        """The chain ends with that node now. Returns the last seq that stays."""
        path: list[_Node] = []
        at: _Node | None = node
        while at is not None and self._at(at.entry.seq) is not at:
            path.append(at)
            at = at.parent
        fork = Seq(self._base - 1) if at is None else at.entry.seq
        keep = fork - self._base + 1
        for dropped in self._chain[keep:]:
            for use in dropped.entry.uses:
                self._used.pop(use, None)
        del self._chain[keep:]
        self._num_whole = min(self._num_whole, keep)
        for added in reversed(path):
            self._chain.append(added)
            for use in added.entry.uses:
                self._used[use] = added.entry.seq
        return fork

    # -- disk -----------------------------------------------------------------------------------------------------

    def stored(self, digest: Digest) -> None:
        """Record and blob of that entry are on disk."""
        node = self._nodes.get(digest)
        if node is None or node.stored or node.refused:
            return
        node.stored = True
        self._complete_from(node)

    def based_on(self, digest: Digest) -> None:
        """A snapshot as of that entry is on disk: it is complete without what comes before it."""
        self._states.add(digest)
        if (node := self._nodes.get(digest)) is not None:
            self._complete_from(node)

    def unfounded(self) -> None:
        """No snapshot on disk is of our chain any more: nothing is complete until one is."""
        for node in self._nodes.values():
            node.complete = False
        self._states.clear()
        self._best, self._num_whole = None, 0

    def _complete_from(self, node: _Node) -> None:
        waiting = [node]
        while waiting:
            each = waiting.pop()
            follows = each.stored and (each.parent is None or each.parent.complete)
            based = each.entry.digest in self._states
            if based and self._at(each.entry.seq) is each:
                self._num_whole = max(self._num_whole, each.entry.seq - self._base + 1)
            if not each.complete and (follows or based):
                each.complete = True
                if self._best is None or each.head.rank > self._best.head.rank:
                    self._best = each
                waiting += each.children

    def lost(self, digest: Digest) -> None:
        """Its bytes are gone; what comes after it is no longer complete."""
        node = self._nodes.get(digest)
        if node is not None:
            self._spoil(node)

    def _spoil(self, node: _Node) -> None:
        node.stored = False
        waiting = [node]
        while waiting:
            each = waiting.pop()
            each.complete = False
            waiting += each.children
        complete = [each for each in self._nodes.values() if each.complete]
        self._best = max(complete, key=lambda each: each.head.rank) if complete else None
        self._num_whole = 0

    # -- telling others -------------------------------------------------------------------------------------------

    def points(self, *, whole: bool = False) -> tuple[Head, ...]:
        """Some entries of our chain, ever farther apart, by which another peer finds where ours and its own part. With
        `whole` only those that we hold with all bytes, because the bytes of the others are wanted too."""
        points = [self.best] if self._best is not None else []
        back, index = 1, (self.whole.rank.seq - self._base if whole else len(self._chain) - 1)
        while index >= 0:
            points.append(self._chain[index].head)
            index -= back
            back *= 2
        if self._chain and self._chain[0].complete:
            points.append(self._chain[0].head)
        return tuple(dict.fromkeys(points))

    def after(self, points: tuple[Head, ...]) -> tuple[Digest, ...]:
        """Digests to send to one who knows those entries: the rest of our best chain, then of our highest. If that
        does not continue what they have, the reform that began its branch comes first."""
        known = {point.digest for point in points}
        sent: dict[Digest, None] = {}
        for end in (self._best, self._chain[-1] if self._chain else None):
            path: list[Digest] = []
            at = end
            while at is not None and at.entry.digest not in known and at.entry.digest != self._planted:
                path.append(at.entry.digest)
                at = at.parent
            fits = at is not None and at.entry.digest in known
            if at is None and end is not None:
                older, fits = self._settled_after(points)
                path += reversed(older)
            if (points or self._planted is not None) and not fits and end is not None:
                path += [each.digest for each in self._reforms.values() if each.lineage == end.head.rank.lineage]
            sent.update(dict.fromkeys(reversed(path)))
        return tuple(sent)[:SENT_MAX]

    def _settled_after(self, points: tuple[Head, ...]) -> tuple[list[Digest], bool]:
        """Forgotten entries after the highest of those points, and whether one of them is among them."""
        known = [point.rank.seq for point in points if point.rank.seq < self._base and self.on_chain(point)]
        begin = max(known, default=self._settled_from - 1) + 1 - self._settled_from
        return self._settled[begin:], bool(known)

    def forget(self, below: Seq) -> tuple[Digest, ...]:
        """Drop what is older than `below` on the chain, but for its digests, and all that forks off before it. Only
        under the durable head. Returns what was dropped; entries that are `reform`s are needed on."""
        keep = self._at(below)
        if keep is None or not keep.complete or below <= self._base:
            return ()
        kept: set[int] = set()
        waiting = [keep]
        while waiting:
            each = waiting.pop()
            kept.add(id(each))
            waiting += each.children
        dropped = [node for node in self._nodes.values() if id(node) not in kept]
        for node in dropped:
            del self._nodes[node.entry.digest]
            self._by_place.pop((node.branch, node.entry.term, node.entry.seq), None)
        self._used = {use: seq for use, seq in self._used.items() if seq >= below}
        settled = [each.entry.digest for each in self._chain[: below - self._base]]
        self._settled += [digest for digest in settled if digest != self._planted]
        self._chain = self._chain[below - self._base :]
        self._base, self._num_whole, self._cut = below, 0, self._cut or bool(dropped)
        keep.parent = None
        if self._best is None or id(self._best) not in kept:
            self._best = keep
            self._best = max((n for n in self._nodes.values() if n.complete), key=lambda n: n.head.rank)
        return tuple(node.entry.digest for node in dropped if node.entry.kind != "reform")

    def check_invariants(self) -> None:
        """Raise AssertionError if the tree contradicts itself, as far as its newest entries go."""
        newest = self._chain[-CHECKED:]
        for before, node in pairwise(newest):
            assert node.parent is before and node.entry.seq == before.entry.seq + 1
            assert node.head.rank > before.head.rank, "rank must grow along a chain"
        assert self._best is None or self._best.complete
        assert self.best.rank <= self.head.rank or not self._chain
