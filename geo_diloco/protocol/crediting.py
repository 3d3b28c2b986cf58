"""Applies `plausibility` to a merge: what a peer may have trained by now, and how long deltas usually are.

The syncer's memory for that, and nothing else: it lives as long as a term's process. It keeps one sum, the tokens that
the median live learner has trained since the process began to serve; a learner's credit grows with it from the moment
it is met, so it makes no difference when its work was sampled, uploaded or held up. A learner that the chain knew
before is given what the median would have trained since the chain's last entry, while nobody served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from geo_diloco.manifest import FragmentId, MonoMs, PeerId, RunRules
from geo_diloco.protocol.holdings import Held
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import Membership
from geo_diloco.protocol.plausibility import Counted, Pace, count, credit_max, tokens_per_second
from geo_diloco.protocol.portion import Interval, portion

STRANGERS_MAX = 4096
"""More peers met than that, and those who are gone are forgotten."""


class Crediting:
    """What of the contributions in a merge counts."""

    def __init__(self, rules: RunRules, ledger: Ledger, membership: Membership) -> None:
        self._rules, self._ledger, self._membership = rules, ledger, membership
        self._away_ms = 0
        self._known: frozenset[PeerId] = frozenset()
        self._at: MonoMs | None = None
        self._rate = 0
        self._rate_max = 0
        self._rates: dict[PeerId, int] = {}
        """Tokens per second that each live learner is counted by."""
        self._sorted_rates: list[int] = []
        self._median_trained = 0
        """In thousandths of a token."""
        self._met_at: dict[PeerId, int] = {}
        """The median's sum when a peer was met."""
        self._credited: dict[tuple[PeerId, FragmentId], int] = {}

    def begin(self, *, away_ms: int) -> None:
        """This process serves; nobody did for `away_ms` before it."""
        self._away_ms = away_ms
        self._known = frozenset(peer for peer, _ in self._ledger.merged_until)

    def met(self, peer: PeerId, now: MonoMs) -> None:
        """It said Hello. Only the first time counts."""
        self._advance(now)
        self._met_at.setdefault(peer, self._median_trained)
        if len(self._met_at) > STRANGERS_MAX:
            here = {member.peer for member in self._membership.all()}
            self._met_at = {each: at for each, at in self._met_at.items() if each in here}
            self._credited = {key: tokens for key, tokens in self._credited.items() if key[0] in here}

    def count(self, taken: Sequence[Held], fragment: FragmentId, now: MonoMs) -> tuple[Counted, ...]:
        self._advance(now)
        credits = [self._credit(item.contribution.id.peer, fragment) for item in taken]
        claims = [(item.contribution, item.norm) for item in taken]
        lengths = self._ledger.lengths.get(fragment, ())
        sync, spans = self._rules.sync, None
        if self._weighs_absent:
            interval = self._interval()
            spans = [interval.span(self._pace(item.contribution.id.peer).step_time_us) for item in taken]
        return count(claims, credits, lengths, token_weights=sync.token_weights, spans=spans)

    def portion(self, counted: Sequence[Counted], absent: Iterable[PeerId]) -> float:
        """Of a merge of these: `absent` train, and are not in it."""
        if not self._weighs_absent:
            return 1.0
        interval, by_tokens = self._interval(), self._rules.sync.token_weights
        missing = [interval.weight(self._pace(peer)) if by_tokens else 1.0 for peer in absent]
        return portion([each.weight for each in counted], missing)

    @property
    def _weighs_absent(self) -> bool:
        """In lockstep nothing that is measured decides anything, and nobody is absent."""
        return self._rules.sync.weigh_absent and not self._rules.sync.lockstep

    def _interval(self) -> Interval:
        return Interval(
            steps=self._rules.sync.interval_steps,
            median_us=self._membership.median_us(told=True),
            tokens_per_step=self._rules.tokens_per_step,
        )

    def _pace(self, peer: PeerId) -> Pace:
        """As it told it; zeros of one that this process has not met."""
        member = self._membership.get(peer)
        return Pace(0, 0, 0) if member is None else Pace(member.step, member.tokens, member.step_time_us)

    def merged(self, fragment: FragmentId, taken: Sequence[Held], counted: Sequence[Counted]) -> None:
        """A commit says so."""
        for item, each in zip(taken, counted, strict=True):
            key = item.contribution.id.peer, fragment
            self._credited[key] = self._credited.get(key, 0) + each.tokens_unmerged

    def _credit(self, peer: PeerId, fragment: FragmentId) -> int | None:
        trained = self._median_trained - self._met_at.get(peer, self._median_trained)
        if peer in self._known:
            trained += self._rate_max * self._away_ms
        credited = self._credited.get((peer, fragment), 0)
        return credit_max(trained // 1000, credited, tokens_per_step=self._rules.tokens_per_step, sync=self._rules.sync)

    def _advance(self, now: MonoMs) -> None:
        """The faster of the median's pace before and now: one that stalls for a moment costs nobody credit."""
        rate = self._median_rate(now) or self._rate
        if self._at is not None:
            self._median_trained += max(rate, self._rate) * max(0, now - self._at)
        self._at, self._rate, self._rate_max = now, rate, max(self._rate_max, rate)

    def _median_rate(self, now: MonoMs) -> int:
        """Tokens per second of the median live learner, the lower one of two; 0 if nobody has told."""
        self._membership.look_at_silent(now)
        for peer in self._membership.take_paced():
            member, counted = self._membership.live_member(peer), self._rates.pop(peer, None)
            if counted is not None:
                del self._sorted_rates[bisect_left(self._sorted_rates, counted)]
            pace = Pace(0, 0, 0) if member is None else Pace(member.step, member.tokens, member.step_time_us)
            rate = tokens_per_second(pace, self._rules.tokens_per_step)
            if rate is not None:
                insort(self._sorted_rates, rate)
                self._rates[peer] = rate
        rates = self._sorted_rates
        return rates[(len(rates) - 1) // 2] if rates else 0
