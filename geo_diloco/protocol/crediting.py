"""Applies `plausibility` to a merge: who was merged when, how fast the others are, how long deltas usually are.

The syncer's memory for that, and nothing else: it lives as long as a term's process. Of the time before it, a learner
that the chain knows is given the time since the chain's last entry, in which it may have trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

from geo_diloco.manifest import FragmentId, MonoMs, PeerId, RunRules
from geo_diloco.protocol.holdings import Held
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import Membership
from geo_diloco.protocol.plausibility import Counted, Pace, count, credit_max, tokens_per_second


class Crediting:
    """What of the contributions in a merge counts."""

    def __init__(self, rules: RunRules, ledger: Ledger, membership: Membership) -> None:
        self._rules, self._ledger, self._membership = rules, ledger, membership
        self._began_at = MonoMs(0)
        self._merged_at: dict[tuple[PeerId, FragmentId], MonoMs] = {}

    def begin(self, now: MonoMs, *, away_ms: int) -> None:
        """This process serves; nobody did for `away_ms` before it."""
        self._began_at = MonoMs(now - away_ms)

    def merged(self, fragment: FragmentId, taken: Sequence[Held], at: MonoMs) -> None:
        """A round that closed at that time was committed."""
        for item in taken:
            self._merged_at[item.contribution.id.peer, fragment] = at

    def count(self, taken: Sequence[Held], fragment: FragmentId, now: MonoMs) -> tuple[Counted, ...]:
        paces = [Pace(each.step, each.tokens, each.step_time_us) for each in self._membership.live(now)]
        per_step = self._rules.tokens_per_step
        rate = tokens_per_second(paces, per_step)
        since_ms = [now - self._unmerged_since(item.contribution.id.peer, fragment, now) for item in taken]
        credits = [credit_max(ms, rate=rate, tokens_per_step=per_step, sync=self._rules.sync) for ms in since_ms]
        claims = [(item.contribution, item.norm) for item in taken]
        return count(claims, credits, self._ledger.lengths.get(fragment, ()))

    def _unmerged_since(self, peer: PeerId, fragment: FragmentId, now: MonoMs) -> MonoMs:
        """Since when its work on the fragment may have been trained, as far as this process can tell."""
        merged_at = self._merged_at.get((peer, fragment))
        if merged_at is not None:
            return merged_at
        if (peer, fragment) in self._ledger.merged_until:
            return self._began_at
        member = self._membership.get(peer)
        return now if member is None else member.since
