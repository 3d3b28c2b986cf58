"""What a syncer's parts keep event by event, counted anew from everybody each time: slow, and too simple to be wrong.

The reference for `membership`, `tally` and `open_rounds`; it looks at the same members, contributions and rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from geo_diloco.manifest import FragmentId, MonoMs, PeerId, SyncSpec
from geo_diloco.protocol import plausibility
from geo_diloco.protocol.holdings import Held
from geo_diloco.protocol.membership import AWAY_MS, Member, Membership
from geo_diloco.protocol.open_rounds import OpenRounds
from geo_diloco.protocol.patience import INTERVALS
from geo_diloco.protocol.plausibility import Pace, lower_median
from geo_diloco.protocol.quorum import Decision, RoundFacts, decide
from geo_diloco.protocol.rounds import Round
from geo_diloco.protocol.schedule import LIVE_MS, LIVE_STEPS, MICRO
from geo_diloco.protocol.syncer import Syncer
from geo_diloco.protocol.tally import Estimates, Tally, standing_of


def live(members: list[Member], now: MonoMs) -> list[Member]:
    def patience_ms(member: Member) -> int:
        return max(LIVE_MS, LIVE_STEPS * member.step_time_us // 1000)

    return [each for each in members if each.connected and each.trains and now - each.heard_at <= patience_ms(each)]


def away_until(members: list[Member]) -> int | None:
    return min(
        (each.gone_at + AWAY_MS for each in members if each.gone_at is not None and each.allotment), default=None
    )


def slower_median(numbers: list[int]) -> int | None:
    return sorted(numbers)[len(numbers) // 2] if numbers else None


def pace(live: list[Member]) -> int:
    median_us = slower_median([each.step_time_us for each in live if each.step_time_us > 0])
    return 0 if median_us is None else max(1, 1000 * MICRO // median_us)


def tokens_per_second(live: list[Member], tokens_per_step: int) -> int:
    told = [Pace(each.step, each.tokens, each.step_time_us) for each in live if each.step > 0 and each.step_time_us > 0]
    return lower_median([plausibility.tokens_per_second(pace, tokens_per_step) or 0 for pace in told]) if told else 0


@dataclass
class Naive:
    """Beside one syncer: to be asked after every event."""

    syncer: Syncer
    quorum_at: dict[int, MonoMs | None] = field(default_factory=dict)
    """By number of round."""
    awaited: dict[PeerId, int] = field(default_factory=dict)
    """Since which reading of the inner clock, without a delivery."""
    delivered: list[Held] = field(default_factory=list)
    """All that was valid after some event, in this term."""

    @property
    def _sync(self) -> SyncSpec:
        return self.syncer._rules.sync

    @property
    def _rounds(self) -> OpenRounds:
        return self.syncer._rounds

    @property
    def _membership(self) -> Membership:
        return self.syncer._membership

    def live(self, now: MonoMs) -> list[Member]:
        return live(self._membership.all(), now)

    def look(self, now: MonoMs) -> None:
        """Once after every event: who has delivered, who is away, who is awaited."""
        here = {each.peer: each for each in self.live(now)}
        for held in self._held().values():
            for peer, item in held.items():
                if item.ready and not any(item is each for each in self.delivered):
                    self.delivered.append(item)
                    self.awaited.pop(peer, None)
        self.awaited = {peer: since for peer, since in self.awaited.items() if peer in here}
        for round_ in self._rounds._rounds.values():
            for member in here.values():
                if _could_deliver(member, round_, self._held()[round_.fragment]):
                    self.awaited.setdefault(member.peer, self._rounds._clock.micro_steps)

    def _held(self) -> dict[FragmentId, dict[PeerId, Held]]:
        fragments = [FragmentId(p) for p in range(len(self.syncer.ledger.heads))]
        return {fragment: self.syncer._holdings.of_fragment(fragment) for fragment in fragments}

    def given_up(self, peer: PeerId) -> bool:
        since = self.awaited.get(peer)
        return since is not None and self._end(since) <= self._rounds._clock.micro_steps

    def _end(self, since: int) -> int:
        return since + INTERVALS * self._sync.interval_steps * MICRO

    def facts(self, round_: Round, now: MonoMs) -> RoundFacts:
        held, here = self.syncer._holdings.of_fragment(round_.fragment), self.live(now)
        ready = {peer: item for peer, item in held.items() if item.ready}
        fresh = [peer for peer, item in ready.items() if item.contribution.id.base == round_.base]
        missing = [each for each in here if _could_deliver(each, round_, held)]
        due_again_ms = self._rounds._clock.ms_until(round_.due_again)
        due_again_at = None if due_again_ms is None else MonoMs(now + due_again_ms)
        quorum_at = self._quorum_at(round_, len(fresh), now)
        quorum_ms = 0 if quorum_at is None else quorum_at - round_.opened_at
        step_times_us = {each.peer: each.step_time_us for each in here}
        return RoundFacts(
            now=now,
            opened_at=round_.opened_at,
            quorum_at=quorum_at,
            fresh=len(fresh),
            late=len(ready) - len(fresh),
            live=len(here),
            missing=len(missing),
            given_up=sum(self.given_up(each.peer) for each in missing),
            expected_missing=sum(
                _expected(each, round_, held, due_again_at, self._sync, quorum_ms) for each in missing
            ),
            slack_ms=_slack_ms([*step_times_us.values()], self._rounds._estimates, self._sync),
            cap_ms=max((step_times_us.get(peer, 0) for peer in fresh), default=0) // 1000,
            due_again_at=due_again_at,
            was_due=round_.was_due,
        )

    def tally(self, round_: Round) -> Tally:
        """From everybody's standing, one by one."""
        tally, held = Tally(round_.base), self.syncer._holdings.of_fragment(round_.fragment)
        members = {each.peer: each for each in self._membership.all()}
        for peer in sorted(members.keys() | held.keys()):
            live = self._membership.live_member(peer)
            standing = standing_of(live, held.get(peer), base=round_.base, sampled_ms=round_.sampled.get(peer))
            if standing is not None and standing.is_missing:
                standing = replace(standing, is_given_up=self.given_up(peer))
            tally.look(peer, standing)
        return tally

    def _quorum_at(self, round_: Round, fresh: int, now: MonoMs) -> MonoMs | None:
        closing = round_.closing
        if closing is not None and sum(round_.is_fresh(item) for item in closing.taken) >= self._sync.quorum:
            # Perhaps it was not seen waiting with its quorum: it closed within the event that brought the last of it.
            self.quorum_at[round_.number] = self.quorum_at.get(round_.number) or MonoMs(closing.at - closing.grace_ms)
        if not self.is_waiting(round_, now):
            return self.quorum_at.get(round_.number)
        since = self.quorum_at.get(round_.number) or now
        self.quorum_at[round_.number] = since if fresh >= self._sync.quorum else None
        return self.quorum_at[round_.number]

    def is_waiting(self, round_: Round, now: MonoMs) -> bool:
        """For contributions, or for time to pass; not for its merge."""
        return round_.closing is None and (round_.retry_at is None or now >= round_.retry_at)

    def decision(self, round_: Round, now: MonoMs) -> Decision:
        return decide(self.facts(round_, now), self._sync)

    def deadline(self, now: MonoMs) -> int | None:
        syncer, rounds = self.syncer, self._rounds
        waits: list[int | None] = [syncer._measuring.deadline, syncer._stop.deadline]
        waits.append(away_until(self._membership.all()))
        for round_ in rounds._rounds.values():
            waits += [round_.retry_at, round_.look_at]
        ends = [self._end(since) for peer, since in self.awaited.items() if not self.given_up(peer)]
        end_ms = rounds._clock.ms_until(min(ends)) if ends else None
        waits.append(None if end_ms is None else now + max(1, end_ms))
        has_room = len(rounds._rounds) < self._sync.rounds_in_flight_max
        for p in range(len(syncer.ledger.heads)) if has_room and self.live(now) else ():
            if rounds.get(FragmentId(p)) is None:
                wait_ms = rounds._clock.ms_until(rounds._turns.due(FragmentId(p)))
                waits.append(None if wait_ms is None else now + max(1, wait_ms))
        return min((wait for wait in waits if wait is not None and wait > now), default=None)


def _could_deliver(member: Member, round_: Round, held: dict[PeerId, Held]) -> bool:
    item = held.get(member.peer)
    return item is None or (not item.ready and item.contribution.id.base == round_.base)


def _expected(
    member: Member, round_: Round, held: dict[PeerId, Held], due_again_at: MonoMs | None, sync: SyncSpec, quorum_ms: int
) -> bool:
    if member.peer in round_.sampled and member.takes_ms is not None:
        habit_ms: int | None = round_.sampled[member.peer] + member.takes_ms
    else:
        is_heard = member.peer in round_.sampled or member.peer in held
        if not is_heard and not member.keeps_up and not round_.was_due:
            return False
        habit_ms = None if member.peer in round_.sampled or member.peer in held else member.delivery_ms
    if habit_ms is None or due_again_at is None:
        return habit_ms is None
    left_ms = quorum_ms if round_.was_due else max(0, due_again_at - round_.opened_at - quorum_ms)
    return habit_ms <= quorum_ms + int(sync.grace_gamma * left_ms)


def _slack_ms(step_times_us: list[int], estimates: Estimates, sync: SyncSpec) -> int | None:
    median_us = slower_median(step_times_us)
    if median_us is None or estimates.quorum_ms is None or estimates.sync_ms is None:
        return None
    return sync.overlap_steps * median_us // 1000 - (estimates.quorum_ms + estimates.sync_ms)
