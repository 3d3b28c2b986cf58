"""Contributions at the syncer, from their announcement until a commit takes them or they are refused.

Announced, then arrived (every piece is here), then ready (its frame is valid). A contribution belongs to a fragment,
not to a round: one that misses its round waits for the next. One undecided per learner and fragment.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import FragmentId, PeerId, SyncSpec
from geo_diloco.protocol.admission import admit
from geo_diloco.protocol.effects import AcceptBlob, CheckContribution, Effect, ForgetBlob, Send
from geo_diloco.protocol.events import BlobArrived, ContributionChecked
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import BlobRef, Commit, Contribution, ContributionId, Decision, Verdict


@dataclass(slots=True, eq=False)
class Held:
    """An undecided contribution at the syncer."""

    contribution: Contribution
    arrived: bool = False
    ready: bool = False
    norm: float = 0.0
    told_late: bool = False
    merging: bool = False
    """A merge that is under way takes it."""


class Holdings:
    """All of them, per fragment and peer; iterated in sorted order."""

    def __init__(self, ledger: Ledger, sync: SyncSpec) -> None:
        self._ledger = ledger
        self._sync = sync
        self._held: dict[FragmentId, dict[PeerId, Held]] = {}
        self._by_blob: dict[BlobRef, list[Held]] = {}
        """The same; several learners may have sent the same bytes."""
        self._changed: dict[tuple[FragmentId, PeerId], None] = {}

    def begin(self) -> None:
        """The ledger is loaded."""
        self._held = {FragmentId(p): {} for p in range(len(self._ledger.heads))}

    def of_fragment(self, fragment: FragmentId) -> dict[PeerId, Held]:
        return self._held[fragment]

    def of_peer(self, peer: PeerId) -> list[Held]:
        return [self._held[fragment][peer] for fragment in sorted(self._held) if peer in self._held[fragment]]

    def uploading(self, peer: PeerId) -> FragmentId | None:
        """The first fragment of which it announced what is not here yet."""
        return next((item.contribution.id.fragment for item in self.of_peer(peer) if not item.arrived), None)

    def merged_or_merging(self, peer: PeerId) -> tuple[int, ...]:
        """Per fragment: the last inner step of a peer that is merged or about to be."""
        until = [self._ledger.merged_until.get((peer, fragment), 0) for fragment in sorted(self._held)]
        for item in self.of_peer(peer):
            claim = item.contribution.id
            if item.merging:
                until[claim.fragment] = max(until[claim.fragment], claim.last_step)
        return tuple(until)

    def take_changed(self) -> list[tuple[FragmentId, PeerId]]:
        """Whose work for which fragment has come, become valid or gone since this was asked last."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def announced(self, sender: PeerId, contribution: Contribution) -> list[Effect]:
        """Twice is once: what is known already is answered by what is known of it.

        A learner announces another contribution only when it knows the former to be decided. If that is still here it
        came back by an announcement that crossed our refusal, and its bytes never will: the new one takes its place.
        """
        items = self._held.get(contribution.id.fragment, {})
        item = items.get(sender)
        given_up: list[Effect] = []
        if item is not None and not _same(item.contribution, contribution) and not item.merging:
            others = admit(contribution, sender, ledger=self._ledger, held=None, sync=self._sync)
            if others.verdict in ("fresh", "late"):
                given_up, item = self.let_go(item), None
        return given_up + self._admit(sender, contribution, items, item)

    def _admit(
        self, sender: PeerId, contribution: Contribution, items: dict[PeerId, Held], item: Held | None
    ) -> list[Effect]:
        held = None if item is None else item.contribution
        admission = admit(contribution, sender, ledger=self._ledger, held=held, sync=self._sync)
        if admission.verdict == "refused":
            return [self._decide(contribution.id, sender, "refused", admission.reason)]
        if admission.verdict == "known":
            if item is None or not _same(item.contribution, contribution):
                return []
            if item.ready:
                return [self._decide(contribution.id, sender, "held", "held already")]
            return [] if item.arrived else [AcceptBlob(sender, contribution.blob)]
        items[sender] = Held(contribution, told_late=admission.verdict == "late")
        self._by_blob.setdefault(contribution.blob, []).append(items[sender])
        self._changed[contribution.id.fragment, sender] = None
        return [AcceptBlob(sender, contribution.blob)]

    def arrived(self, event: BlobArrived) -> list[Effect]:
        items = sorted(self._by_blob.get(event.blob, ()), key=lambda item: _place(item.contribution.id))
        effects: list[Effect] = []
        for item in items:
            if not item.arrived:
                item.arrived = True
                effects.append(CheckContribution(item.contribution.id, event.blob))
        return effects

    def checked(self, event: ContributionChecked) -> tuple[Held | None, list[Effect]]:
        """Returns what became ready by it."""
        item = self._held.get(event.id.fragment, {}).get(event.id.peer)
        if item is None or item.contribution.id != event.id or not item.arrived or item.ready:
            return None, []
        if not event.ok:
            return None, self.refuse(item, f"invalid: {event.reason}")
        item.ready, item.norm = True, event.norm
        self._changed[event.id.fragment, event.id.peer] = None
        return item, [self._decide(event.id, event.id.peer, "held", "here and valid")]

    def keep_late(self, entry: Commit) -> list[Effect]:
        """What missed this commit waits for the next, unless its base has become too old."""
        effects: list[Effect] = []
        for peer in sorted(self._held[entry.fragment]):
            item = self._held[entry.fragment][peer]
            behind = entry.version - item.contribution.base_version
            if behind > self._sync.staleness_max:
                effects += self.refuse(item, f"too_old: {behind} versions behind")
            elif not item.told_late:
                item.told_late = True
                reason = f"missed round {entry.round}, waits for the next"
                effects.append(self._decide(item.contribution.id, peer, "kept_late", reason))
        return effects

    def drop_forgotten(self, peer: PeerId, undecided: tuple[ContributionId, ...]) -> list[Effect]:
        """Work that the peer no longer knows (its process died after its last checkpoint) can't be subtracted from
        its carry: merging it would count the same inner steps twice."""
        forgotten = [item for item in self.of_peer(peer) if item.contribution.id not in undecided]
        return [effect for item in forgotten if not item.merging for effect in self.let_go(item)]

    def left(self, peer: PeerId) -> list[Effect]:
        """The peer said Goodbye: what is here counts, what isn't will never come."""
        unfinished = [item for item in self.of_peer(peer) if not item.arrived]
        return [effect for item in unfinished for effect in self.let_go(item)]

    def refuse(self, item: Held, reason: str) -> list[Effect]:
        claim = item.contribution.id
        return [*self.let_go(item), self._decide(claim, claim.peer, "refused", reason)]

    def let_go_of_all(self) -> list[Effect]:
        """The term is over."""
        items = [self._held[fragment][peer] for fragment in sorted(self._held) for peer in sorted(self._held[fragment])]
        return [effect for item in items for effect in self.let_go(item)]

    def let_go(self, item: Held) -> list[Effect]:
        claim, blob = item.contribution.id, item.contribution.blob
        del self._held[claim.fragment][claim.peer]
        self._changed[claim.fragment, claim.peer] = None
        self._by_blob[blob].remove(item)
        if self._by_blob[blob]:
            return []
        del self._by_blob[blob]
        return [ForgetBlob(blob)]

    def _decide(self, claim: ContributionId, to: PeerId, verdict: Verdict, reason: str) -> Send:
        decision = Decision(id=claim, verdict=verdict, reason=reason)
        return Send(to, self._ledger.branch, self._ledger.term, decision)

    def check_invariants(self) -> None:
        for fragment, items in self._held.items():
            for peer, item in items.items():
                assert (item.contribution.id.peer, item.contribution.id.fragment) == (peer, fragment)
                assert item.arrived or not item.ready
                assert item in self._by_blob[item.contribution.blob]


def _place(claim: ContributionId) -> tuple[FragmentId, PeerId]:
    return claim.fragment, claim.peer


def _same(one: Contribution, other: Contribution) -> bool:
    """Steps that a crash lost are numbered again, so an id may come back with other bytes."""
    return (one.id, one.blob) == (other.id, other.blob)
