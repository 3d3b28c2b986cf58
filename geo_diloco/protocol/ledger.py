"""The chain as one peer knows it, folded: heads, bases, tokens, who was merged until where.

Every peer keeps one of what is durable and applies the same entries in the same order, so any of them could say what
a syncer may append next; the syncer has a second one, up to its newest entry. It goes back only by the owner's reform
(`chain.py`). It answers `why_not(entry)` and then applies; who may sign an entry, and which of two chains counts, is
the election's business (`election/forks.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields, replace

from geo_diloco.manifest import BranchId, Digest, FragmentId, PeerId, Seq, Term, Version
from geo_diloco.protocol.amendments import Amended, newest_number, with_amendment
from geo_diloco.protocol.election.ballots import Amends, Elector, EntryFacts, Opened
from geo_diloco.protocol.events import SnapshotLoaded
from geo_diloco.protocol.messages import (
    Amendment,
    Commit,
    ContributionId,
    Entry,
    Finished,
    Found,
    FragmentHead,
    Open,
    Participant,
    Record,
    Reform,
    RosterChange,
)
from geo_diloco.protocol.momentum import mu_max
from geo_diloco.protocol.plausibility import LENGTHS_KEPT

BASES_KEPT = 64
"""Versions of a fragment whose bases are remembered; S_max may not be larger."""

NO_SEQ = Seq(-1)


@dataclass(slots=True)
class Ledger:
    """State of the chain up to `seq`; empty at first (`seq` -1)."""

    seq: Seq = NO_SEQ
    head_digest: Digest = Digest("")
    branch: BranchId = BranchId("")
    lineage: int = 0
    """Number of the reform that began the branch; 0 for `found`."""
    term: Term = Term(0)
    opened: Opened | None = None
    """Who serves `term`, as its `open` entry says."""
    roster: tuple[Elector, ...] = ()
    roster_seq: Seq = NO_SEQ
    layout_digest: Digest = Digest("")
    num_elements: tuple[int, ...] = ()
    heads: list[FragmentHead] = field(default_factory=list)
    contained: list[Version] = field(default_factory=list)
    """Per fragment: the version the snapshot held. Commits up to it, met again, change books but not heads."""
    bases: list[dict[Digest, Version]] = field(default_factory=list)
    """Per fragment: recent bases a contribution may name, oldest first."""
    tokens: list[int] = field(default_factory=list)
    """Per fragment: tokens merged."""
    merged_until: dict[tuple[PeerId, FragmentId], int] = field(default_factory=dict)
    consumed: dict[tuple[FragmentId, Digest], dict[PeerId, int]] = field(default_factory=dict)
    """Per base that may be named: whose work on it was merged, up to which step."""
    gain_max: float = 0.0
    """The manifest's limit for momentum."""
    only: PeerId | None = None
    """Whose merged work is remembered, where nothing will ever be appended; none: everybody's."""
    lengths: dict[FragmentId, deque[float]] = field(default_factory=dict)
    """L2 norms of the deltas merged lately, as merged."""
    num_commits: int = 0
    progress: float = 0.0
    heldout: list[tuple[Seq, float]] = field(default_factory=list)
    amended: tuple[Amended, ...] = ()
    """What is in force beside the manifest (`amendments.rules_at`)."""
    finished: str | None = None
    before_the_end: Ledger | None = None
    """As it was when the run finished: no commit has followed."""

    def load(self, snapshot: SnapshotLoaded) -> None:
        """Start from a snapshot. What lies before it (consumption, steps merged) is known to those with the whole
        chain only."""
        self.seq, self.head_digest = snapshot.seq, snapshot.head_digest
        self.branch, self.term, self.opened = snapshot.branch, snapshot.term, snapshot.opened
        self.lineage = snapshot.lineage
        self.roster, self.roster_seq = snapshot.roster, snapshot.roster_seq
        self.layout_digest, self.num_elements = snapshot.layout_digest, snapshot.num_elements
        self.heads = list(snapshot.heads)
        self.contained = [head.version for head in snapshot.heads]
        self.bases = [{head.base: head.version} for head in snapshot.heads]
        self.tokens = list(snapshot.tokens_per_fragment)
        self.progress, self.amended = snapshot.progress, snapshot.amended
        self.num_commits = sum(head.version for head in snapshot.heads)

    def snapshot(self) -> SnapshotLoaded:
        """What `load` would begin with here; without the chain before it."""
        return SnapshotLoaded(
            branch=self.branch,
            term=self.term,
            seq=self.seq,
            head_digest=self.head_digest,
            heads=tuple(self.heads),
            num_elements=self.num_elements,
            layout_digest=self.layout_digest,
            tokens_per_fragment=tuple(self.tokens),
            progress=self.progress,
            roster=self.roster,
            roster_seq=self.roster_seq,
            opened=self.opened,
            amended=self.amended,
            lineage=self.lineage,
        )

    def copy(self) -> Ledger:
        """Another one, for the entries of a term that are not durable yet."""
        return replace(
            self,
            heads=list(self.heads),
            contained=list(self.contained),
            bases=[dict(bases) for bases in self.bases],
            tokens=list(self.tokens),
            merged_until=dict(self.merged_until),
            consumed={base: dict(steps) for base, steps in self.consumed.items()},
            lengths={fragment: deque(lengths, maxlen=LENGTHS_KEPT) for fragment, lengths in self.lengths.items()},
            heldout=list(self.heldout),
        )

    def become(self, other: Ledger) -> None:
        """Stand where that one stands: those who have this one see it."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def why_not(self, entry: Entry) -> str | None:
        """Why this entry can't be the next one; none if it can."""
        header = entry.header
        if header.seq != self.seq + 1:
            return f"seq {header.seq} does not follow {self.seq}"
        if header.prev != self.head_digest:
            return f"entry {header.seq} continues another chain: prev {header.prev[:12]}, head {self.head_digest[:12]}"
        if header.branch != self.branch:
            return f"branch {header.branch[:12]}, not {self.branch[:12]}"
        if self.finished is not None and not isinstance(entry, Open):
            return "the run is finished"
        if isinstance(entry, Found) != (self.seq == NO_SEQ):
            return "found is the first entry and only that"
        if isinstance(entry, Open):
            opens = header.term > self.term or self.opened is None
            return None if opens else f"term {header.term} is not above {self.term}"
        if isinstance(entry, Reform):
            follows = entry.lineage > self.lineage
            return None if follows else f"reform {entry.lineage} does not follow {self.lineage}"
        if header.term != self.term and not isinstance(entry, Found):
            return f"term {header.term} was not opened, the chain is in term {self.term}"
        if isinstance(entry, Amendment) and entry.number != newest_number(self.amended) + 1:
            return f"amendment {entry.number} does not follow {newest_number(self.amended)}"
        return self._why_not_commit(entry) if isinstance(entry, Commit) else None

    def _why_not_commit(self, commit: Commit) -> str | None:
        if not 0 <= commit.fragment < len(self.heads):
            return f"fragment {commit.fragment} of {len(self.heads)}"
        head = self.heads[commit.fragment]
        contained = 1 <= commit.version <= self.contained[commit.fragment]
        if commit.version != head.version + 1 and not contained:
            return f"version {commit.version} of fragment {commit.fragment} does not follow {head.version}"
        if not contained and commit.mu > mu_max(self.gain_max, head):
            return f"mu {commit.mu:g} after rho {head.rho}: {mu_max(self.gain_max, head):g} is allowed"
        for participant in commit.participants:
            if participant.first_step < self.merged_until.get((participant.peer, commit.fragment), 0):
                return f"steps of {participant.peer[:8]} would be merged twice"
        return None

    def apply(self, entry: Entry, digest: Digest) -> None:
        """Append an entry that `why_not` has nothing against."""
        if isinstance(entry, Finished) and self.finished is None:
            self.before_the_end = self.copy()
        self.seq, self.head_digest = entry.header.seq, digest
        match entry:
            case Found():
                self._found(entry, digest)
            case Open():
                self.term, self.opened = entry.header.term, opened_of(entry)
            case Reform():
                self.branch, self.lineage, self.term, self.opened = (
                    BranchId(digest),
                    entry.lineage,
                    entry.header.term,
                    None,
                )
                self.roster, self.roster_seq = entry.roster, entry.header.seq
            case RosterChange():
                self.roster, self.roster_seq = entry.roster, entry.header.seq
            case Commit():
                self._commit(entry, digest)
            case Record():
                self.heldout.append((entry.measured_seq, entry.heldout_loss))
            case Amendment():
                self.amended = with_amendment(self.amended, _amended_of(entry))
            case Finished():
                self.finished = entry.reason

    def _found(self, entry: Found, digest: Digest) -> None:
        self.branch, self.term = BranchId(digest), entry.header.term
        self.roster, self.roster_seq = entry.roster, entry.header.seq
        self.layout_digest, self.num_elements = entry.layout_digest, entry.num_elements
        self.heads = [
            FragmentHead(version=Version(0), base=digest, state_digest=state, momentum_digest=momentum)
            for state, momentum in zip(entry.state_digests, entry.momentum_digests, strict=True)
        ]
        self.contained = [Version(0)] * len(self.heads)
        self.bases = [{digest: Version(0)} for _ in self.heads]
        self.tokens = [0] * len(self.heads)

    def _commit(self, entry: Commit, digest: Digest) -> None:
        fragment = entry.fragment
        if entry.version > self.contained[fragment]:
            self.num_commits += 1
            self.heads[fragment] = head_of(entry, digest)
        self._remember_base(fragment, digest, entry.version)
        lengths = self.lengths.setdefault(fragment, deque(maxlen=LENGTHS_KEPT))
        for participant in entry.participants:
            lengths.append(participant.norm)
            self.tokens[fragment] += participant.tokens_unmerged
            if self.only is None or self.only == participant.peer:
                steps = self.consumed.setdefault((fragment, participant.base), {})
                steps[participant.peer] = self.merged_until[participant.peer, fragment] = participant.last_step
        self.progress = entry.progress

    def _remember_base(self, fragment: FragmentId, digest: Digest, version: Version) -> None:
        bases = self.bases[fragment]
        bases[digest] = version
        if len(bases) > BASES_KEPT:
            forgotten = next(iter(bases))
            del bases[forgotten]
            self.consumed.pop((fragment, forgotten), None)

    def is_consumed(self, claim: ContributionId) -> bool | None:
        """Whether that very contribution was merged; none if nothing of its learner on that base was."""
        step = self.consumed.get((claim.fragment, claim.base), {}).get(claim.peer)
        return None if step is None else step == claim.last_step

    def tokens_total(self, fragment: FragmentId | None = None, more: int = 0) -> int:
        """floor(sum_p N_p * tokens_p / sum_p N_p), with `more` tokens added to one fragment."""
        weighted = sum(n * t for n, t in zip(self.num_elements, self.tokens, strict=True))
        if fragment is not None:
            weighted += self.num_elements[fragment] * more
        return weighted // max(1, sum(self.num_elements))


def head_of(commit: Commit, digest: Digest) -> FragmentHead:
    """Where a fragment stands after that commit."""
    return FragmentHead(
        version=commit.version,
        base=digest,
        state_digest=commit.state_digest,
        momentum_digest=commit.momentum_digest,
        mu=commit.mu,
        rho=commit.rho,
    )


def opened_of(entry: Open) -> Opened:
    """Who serves the term that it opens."""
    return Opened(entry.syncer, entry.boot, entry.address, entry.votes)


def _amended_of(entry: Amendment) -> Amended:
    return Amended(
        seq=entry.header.seq,
        branch=entry.header.branch,
        owner=entry.owner,
        number=entry.number,
        changes=entry.changes,
        stretch=entry.stretch,
        order=entry.order,
    )


def facts_of(entry: Entry, digest: Digest, signer: PeerId) -> EntryFacts:
    """An entry as far as elections go."""
    header = entry.header
    return EntryFacts(
        kind=entry.kind,
        branch=BranchId("") if isinstance(entry, Reform) else header.branch,
        term=header.term,
        seq=header.seq,
        prev=Digest(header.prev),
        digest=digest,
        signer=signer,
        opened=opened_of(entry) if isinstance(entry, Open) else None,
        roster=entry.roster if isinstance(entry, Found | RosterChange | Reform) else None,
        lineage=entry.lineage if isinstance(entry, Reform) else 0,
        amends=Amends(entry.owner, entry.number, entry.changes) if isinstance(entry, Amendment) else None,
    )


def id_of(participant: Participant, fragment: FragmentId) -> ContributionId:
    """Which contribution a commit's participant was."""
    return ContributionId(participant.peer, fragment, participant.base, participant.last_step)
