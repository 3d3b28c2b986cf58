"""Who has delivered to an open round, who still could, and who of those is expected: what the quorum's decision asks.

It stands apart because it is kept event by event. With a thousand learners and eight open rounds nobody may be looked
at who did nothing: whoever did something, or fell silent, is looked at once (`look`), and is counted by its new
standing instead of the old one. The facts of a round then cost the same whatever the number of learners.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Literal

from geo_diloco.manifest import Digest, MonoMs, PeerId, SyncSpec
from geo_diloco.protocol.holdings import Held
from geo_diloco.protocol.membership import Member
from geo_diloco.protocol.quorum import RoundFacts, window_ms

NO_HABIT_MS = -1
"""Of a learner that has never delivered, or that announced what another term asked for: it is expected whenever the
window ends."""

Kind = Literal["fresh", "late", "coming", "unheard", "resting"]
"""Delivered, by freshness; not delivered, but it sampled or announced; neither, so that its habits must do; neither,
and its link lets it take part in some rounds only, of which this need not be one. A learner that its own undecided
older work keeps from sampling is none of them: it neither has delivered nor could."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One peer's place in a round."""

    kind: Kind
    number: int = 0
    """`fresh`: its step time in microseconds, 0 if it is not live; of the others how long after opening its
    work will be here by its habits, in milliseconds."""
    is_slow: bool = False
    """`fresh`: its link does not keep up with every round."""
    is_given_up: bool = False
    """Not delivered, as ever: it has been awaited for long."""

    @property
    def is_missing(self) -> bool:
        """It has not delivered, and could."""
        return self.kind not in ("fresh", "late")


def standing_of(live: Member | None, item: Held | None, *, base: Digest, sampled_ms: int | None) -> Standing | None:
    """`live`: the member, if it is a live learner; `item`: its undecided contribution for the fragment; `sampled_ms`:
    how long after opening it said that it sampled, if it did."""
    fresh = item is not None and item.contribution.id.base == base
    if item is not None and item.ready:
        if not fresh:
            return Standing("late")
        return Standing("fresh", live.step_time_us, not live.keeps_up) if live is not None else Standing("fresh")
    if live is None or (item is not None and not fresh):
        return None
    if sampled_ms is not None and live.takes_ms is not None:
        return Standing("coming", sampled_ms + live.takes_ms)
    if item is not None or sampled_ms is not None:
        return Standing("coming", NO_HABIT_MS)
    return Standing(
        "unheard" if live.keeps_up else "resting", NO_HABIT_MS if live.delivery_ms is None else live.delivery_ms
    )


@dataclass(frozen=True, slots=True)
class Estimates:
    """Moving averages behind the grace window, in milliseconds; none until measured."""

    quorum_ms: int | None = None
    sync_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the decisions on all rounds depend on, besides who has delivered. While it stays the same, only a round
    that somebody touched or whose time has come need be looked at."""

    live: int
    median_us: int | None
    """Step time of the median live learner, those who have not told theirs counting as fastest."""
    pace: int
    """Of the inner clock: it moves the time at which a fragment is due again."""
    estimates: Estimates
    ending: str | None
    """Why the run is over."""


@dataclass(slots=True)
class Tally:
    """Of one round."""

    base: Digest
    """What a fresh contribution is based on."""
    _standings: dict[PeerId, Standing] = field(default_factory=dict)
    _late: int = 0
    _fresh_us: list[int] = field(default_factory=list)
    """Step times of those who delivered fresh work, sorted."""
    num_slow: int = 0
    """Of those who delivered fresh work: whose link does not keep up."""
    _given_up: int = 0
    _coming_ms: list[int] = field(default_factory=list)
    """Of those who said that they sampled, or announced, sorted."""
    _resting_ms: list[int] = field(default_factory=list)
    """Of those who are not expected in every round, sorted."""
    _habits_ms: list[int] = field(default_factory=list)
    """Of the others not heard of in this round, sorted."""

    @property
    def fresh(self) -> int:
        """How many have delivered fresh work."""
        return len(self._fresh_us)

    def look(self, peer: PeerId, standing: Standing | None) -> bool:
        """Count that peer by where it stands now. False if nothing changed."""
        before = self._standings.get(peer)
        if before == standing:
            return False
        if before is not None:
            self._count(before, -1)
            del self._standings[peer]
        if standing is not None:
            self._count(standing, 1)
            self._standings[peer] = standing
        return True

    def _count(self, standing: Standing, one: Literal[1, -1]) -> None:
        self._given_up += one if standing.is_given_up else 0
        match standing.kind:
            case "late":
                self._late += one
            case "coming":
                _put(self._coming_ms, standing.number, one)
            case "fresh":
                _put(self._fresh_us, standing.number, one)
                self.num_slow += one if standing.is_slow else 0
            case "resting":
                _put(self._resting_ms, standing.number, one)
            case "unheard":
                _put(self._habits_ms, standing.number, one)

    def facts(
        self,
        now: MonoMs,
        outlook: Outlook,
        *,
        opened_at: MonoMs,
        quorum_at: MonoMs | None,
        due_again_at: MonoMs | None,
        was_due: bool,
        sync: SyncSpec,
    ) -> RoundFacts:
        """Everything `quorum.decide` asks for."""
        return RoundFacts(
            now=now,
            opened_at=opened_at,
            quorum_at=quorum_at,
            fresh=self.fresh,
            late=self._late,
            live=outlook.live,
            missing=len(self._coming_ms) + len(self._resting_ms) + len(self._habits_ms),
            given_up=self._given_up,
            expected_missing=self._expected(
                window_ms(opened_at, quorum_at, due_again_at, sync, was_due=was_due), was_due=was_due
            ),
            slack_ms=_slack_ms(outlook, sync),
            cap_ms=self._fresh_us[-1] // 1000 if self._fresh_us else 0,
            due_again_at=due_again_at,
            was_due=was_due,
        )

    def _expected(self, latest_ms: int | None, *, was_due: bool) -> int:
        """Of those who have not delivered: whose work will be here by then, or whose habits are not known. Who rests is
        expected where all wait for uplinks: there it takes the round that is open longest, as everybody does."""
        if latest_ms is None:
            latest_ms = NO_HABIT_MS
        groups = (self._coming_ms, self._habits_ms, *((self._resting_ms,) if was_due else ()))
        return sum(bisect_right(each, latest_ms) for each in groups)


def _put(numbers: list[int], number: int, one: Literal[1, -1]) -> None:
    """Into sorted numbers, or out of them."""
    if one == 1:
        insort(numbers, number)
    else:
        del numbers[bisect_left(numbers, number)]


def _slack_ms(outlook: Outlook, sync: SyncSpec) -> int | None:
    """Eq. 3 of arXiv 2604.21428."""
    quorum_ms, sync_ms = outlook.estimates.quorum_ms, outlook.estimates.sync_ms
    if outlook.median_us is None or quorum_ms is None or sync_ms is None:
        return None
    return sync.overlap_steps * outlook.median_us // 1000 - (quorum_ms + sync_ms)
