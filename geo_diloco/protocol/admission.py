"""Is this contribution admissible? Pure: the ledger, what is held already, the claim; the answer carries its reason.

A contribution names its base by digest (versions alone are ambiguous), is consumed at most once per (peer, fragment,
base), and may not stand for inner steps that were merged before. What it *contains* is checked later, when its bytes
are here; this is about what it *claims*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_diloco.manifest import PeerId, SyncSpec
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.messages import Contribution

COUNT_MAX = 2**50
"""No honest step, token or cursor count is near this; it keeps every weight finite, and sums below the wire's limit."""


@dataclass(frozen=True, slots=True)
class Admission:
    """`known`: it is merged or held already, nothing to do; the chain or an earlier decision tells its fate."""

    verdict: Literal["fresh", "late", "known", "refused"]
    reason: str


def blob_size_max(num_elements: int) -> int:
    """Upper bound in bytes of any encoded delta: float32 that zstd could not shrink, and frame headers."""
    return 4 * num_elements + num_elements // 64 + 65_536


def admit(
    contribution: Contribution, sender: PeerId, *, ledger: Ledger, held: Contribution | None, sync: SyncSpec
) -> Admission:
    """`held`: the undecided contribution of that peer for that fragment, if any."""
    if (malformed := _why_malformed(contribution, sender, ledger)) is not None:
        return Admission("refused", malformed)
    claim = contribution.id
    consumed = ledger.is_consumed(claim)
    if consumed is not None:
        if consumed:
            return Admission("known", "merged already")
        return Admission("refused", "consumed: that base was merged for this learner")
    base_version = ledger.bases[claim.fragment].get(claim.base)
    if base_version is None:
        return Admission("refused", "unknown_base: not on this chain, or too old to be remembered")
    if base_version != contribution.base_version:
        return Admission("refused", f"malformed: base is version {base_version}, not {contribution.base_version}")
    behind = ledger.heads[claim.fragment].version - base_version
    if behind > sync.staleness_max:
        return Admission("refused", f"too_old: base is {behind} versions behind, {sync.staleness_max} allowed")
    if contribution.first_step < ledger.merged_until.get((claim.peer, claim.fragment), 0):
        return Admission("refused", "overlap: some of its inner steps are merged already")
    if held is not None:
        if held.id == claim and held.blob == contribution.blob:
            return Admission("known", "held already")
        return Admission("refused", "undecided: another contribution of this learner for the fragment is")
    return Admission("fresh" if behind == 0 else "late", f"{behind} versions behind")


def _why_malformed(contribution: Contribution, sender: PeerId, ledger: Ledger) -> str | None:
    claim = contribution.id
    if claim.peer != sender:
        return "malformed: made by another peer"
    if not 0 <= claim.fragment < len(ledger.heads):
        return f"malformed: fragment {claim.fragment} of {len(ledger.heads)}"
    if not 0 <= contribution.first_step < claim.last_step:
        return f"malformed: inner steps ({contribution.first_step}, {claim.last_step}]"
    if not 1 <= contribution.steps <= claim.last_step:
        return f"malformed: {contribution.steps} fresh steps up to step {claim.last_step}"
    largest = max(claim.last_step, contribution.tokens_unmerged, abs(contribution.cursor))
    if largest > COUNT_MAX:
        return f"malformed: a count of {largest}, at most {COUNT_MAX} allowed"
    if not 1 <= contribution.tokens <= contribution.tokens_unmerged:
        return f"malformed: {contribution.tokens} fresh of {contribution.tokens_unmerged} tokens"
    size_max = blob_size_max(ledger.num_elements[claim.fragment])
    if not 1 <= contribution.blob.size <= size_max:
        return f"malformed: {contribution.blob.size} bytes, at most {size_max} allowed"
    return None
