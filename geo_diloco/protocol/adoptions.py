"""What a learner has adopted and is to adopt, and what the chain took of its own work.

It stands apart because it speaks for the chain where the rest of a learner speaks for its training: what a commit took
is known when it is folded, ordered from the training thread when the outer state is there, booked when that thread got
there, and taken back if the owner's reform leaves it behind, at whichever of these moments that comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from geo_diloco.manifest import FragmentId, PeerId, Seq, Version
from geo_diloco.protocol.accounts import Account
from geo_diloco.protocol.effects import Adopt, Effect, Reset, TokensDropped, TokensMerged
from geo_diloco.protocol.events import Adopted
from geo_diloco.protocol.fold import Step
from geo_diloco.protocol.ledger import Ledger, head_of, id_of
from geo_diloco.protocol.messages import Commit, Contribution, ContributionId, FragmentHead, Participant

MERGED_REMEMBERED = 4096
"""Commits with work of ours that could be taken back."""
CARRY_ALL = 1e30
"""As length of the others' deltas: nothing of the carry is cut."""


@dataclass(slots=True)
class Adoption:
    """An adoption ordered from the training thread: what it will mean for the books."""

    step: Step
    taken: tuple[Participant, ...]
    """Our participations in its commits, oldest first."""
    remembered: bool
    """Whether all we took part with is the contribution in our books."""
    head: FragmentHead
    """What is adopted then."""
    back_to: Seq | None = None
    """The owner's reform left behind what came after that entry before the training thread got there."""

    @property
    def abandoned(self) -> bool:
        return self.back_to is not None

    def left_behind(self, peer: PeerId) -> int:
        """Tokens of that peer in the commits that do not go on; over several commits some may."""
        after = [
            commit for commit in self.step.commits if self.back_to is not None and commit.header.seq > self.back_to
        ]
        return sum(each.tokens_unmerged for commit in after for each in commit.participants if each.peer == peer)


class Adoptions:
    """Per fragment: the version adopted, the orders that go beyond it, and our own work in both."""

    def __init__(self, peer: PeerId, ledger: Ledger) -> None:
        self._peer = peer
        self._ledger = ledger
        self.heads: list[FragmentHead] = []
        """What is adopted."""
        self._back_at: list[FragmentHead] = []
        """Where the newest reform set the ledger back to: a version that is reached without a commit."""
        self._ordered: list[deque[Adoption]] = []
        """Oldest first."""
        self._taken: list[dict[ContributionId, Version]] = []
        """Own work that commits on our ledger took, and the version they made, until that is adopted."""
        self._merged: deque[tuple[Seq, FragmentId, int]] = deque(maxlen=MERGED_REMEMBERED)
        """Tokens of ours that commits took, by their seq: if they are abandoned, so is that work."""

    def start(self) -> None:
        """The ledger is loaded, and all it holds is adopted."""
        self.heads, self._back_at = list(self._ledger.heads), list(self._ledger.heads)
        self._ordered = [deque() for _ in self.heads]
        self._taken = [{} for _ in self.heads]

    def folded(self, commit: Commit) -> None:
        """The ledger took that commit."""
        for each in commit.participants:
            if each.peer == self._peer:
                self._taken[commit.fragment][id_of(each, commit.fragment)] = commit.version

    def has_taken(self, claim: ContributionId) -> bool:
        """Whether a commit on our chain took it, and is not adopted yet. The ledger's own memory does not reach as far
        back as one who was away for long may need."""
        return claim in self._taken[claim.fragment]

    def is_ordered(self, fragment: FragmentId) -> bool:
        """Whether an adoption is under way."""
        return bool(self._ordered[fragment])

    def reached(self, step: Step, contribution: Contribution | None) -> list[Effect]:
        """The outer state reached a version: order its adoption. `contribution`: the one in our books."""
        fragment = step.fragment
        mine = tuple(taken for commit in step.commits for taken in commit.participants if taken.peer == self._peer)
        known = None if contribution is None else contribution.id
        remembered = all(id_of(taken, fragment) == known for taken in mine)
        head = head_of(step.commits[-1], step.base) if step.commits else self._back_at[fragment]
        self._ordered[fragment].append(Adoption(step, mine, remembered, head))
        if not remembered:
            return [Reset(fragment, step.version)]
        if not step.commits:
            return [Adopt(fragment, step.version, None, CARRY_ALL)]
        blob = contribution.blob if mine and contribution is not None else None
        return [Adopt(fragment, step.version, blob, step.commits[-1].rbar)]

    def done(self, fragment: FragmentId, version: Version) -> Adoption | None:
        """The training thread adopted that version; none if it was not the next one ordered."""
        ordered = self._ordered[fragment]
        if not ordered or ordered[0].step.version != version:
            return None
        adoption = ordered.popleft()
        if not adoption.abandoned:
            self.heads[fragment] = adoption.head
            taken = self._taken[fragment]
            self._taken[fragment] = {claim: made for claim, made in taken.items() if made > version}
        return adoption

    def book(self, adoption: Adoption, account: Account, event: Adopted) -> list[Effect]:
        """Into the books with it, as it was ordered. What was abandoned meanwhile is to be taken back then."""
        taken = adoption.taken
        for commit in adoption.step.commits:
            mine = sum(each.tokens_unmerged for each in commit.participants if each.peer == self._peer)
            if mine and (adoption.back_to is None or commit.header.seq <= adoption.back_to):
                self._merged.append((commit.header.seq, account.fragment, mine))
        if not taken:
            return list(account.adopt(event.version, event.step, event.tokens, event.scale_ppm))
        credited = sum(each.tokens_unmerged for each in taken)
        if adoption.remembered:
            merged, dropped = account.merge(event.version, event.step, event.tokens, event.scale_ppm, credited)
            return [TokensMerged(account.fragment, event.version, merged), *dropped]
        corrections = account.restart(
            event.version, event.step, event.tokens, merged=credited, last_step=taken[-1].last_step
        )
        return [TokensMerged(account.fragment, event.version, credited), *corrections]

    def take_back(self, adoption: Adoption, account: Account) -> list[Effect]:
        """It was adopted after all, on the way back to what goes on: what its abandoned commits took of ours is in
        nobody's Theta."""
        account.adopted_version = self.heads[account.fragment].version
        return self._abandon(account, adoption.left_behind(self._peer))

    def rewound(self, to: Seq, accounts: Sequence[Account]) -> list[Effect]:
        """The owner's reform left behind what came after `to`, and the ledger is back there. Fragments that differ are
        on their way and what the replica carries stays; work that the abandoned commits took is lost with them."""
        effects: list[Effect] = []
        self._back_at = list(self._ledger.heads)
        for account, head in zip(accounts, self._ledger.heads, strict=True):
            p = account.fragment
            for adoption in self._ordered[p]:
                if adoption.step.version > head.version or adoption.abandoned:
                    adoption.back_to = to if adoption.back_to is None else min(adoption.back_to, to)
            if account.adopted_version > head.version:
                self.heads[p], account.adopted_version = head, head.version
            self._taken[p] = {claim: made for claim, made in self._taken[p].items() if made <= head.version}
            effects += self._abandon(account, sum(n for seq, q, n in self._merged if q == p and seq > to))
        self._forget_merged(to)
        return effects

    def _abandon(self, account: Account, merged: int) -> list[Effect]:
        if not merged:
            return []
        account.merged -= merged
        fragment = account.fragment
        return [TokensMerged(fragment, account.adopted_version, -merged), TokensDropped(fragment, merged, "abandoned")]

    def _forget_merged(self, after: Seq) -> None:
        self._merged = deque((each for each in self._merged if each[0] <= after), maxlen=MERGED_REMEMBERED)
