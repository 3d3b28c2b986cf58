"""The rounds that a syncer has open: each is opened when its fragment's turn comes, asked for, closed when the quorum
decides, merged, and over with its commit.

Not every round is looked at after every event: one whose tally is as it was, under an outlook that is as it was, is
decided as it was until its `look_at`. So what an event costs does not grow with the learners or the rounds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from geo_diloco.manifest import FragmentId, MonoMs, PeerId, RunRules, Version
from geo_diloco.protocol.crediting import Crediting
from geo_diloco.protocol.effects import Effect, Merge, Note, Send
from geo_diloco.protocol.events import Merged, MergeFailed
from geo_diloco.protocol.holdings import Holdings
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import Membership, moving_average
from geo_diloco.protocol.messages import Commit, RoundOpen, Sampled
from geo_diloco.protocol.momentum import guarded
from geo_diloco.protocol.patience import Patience
from geo_diloco.protocol.quorum import decide
from geo_diloco.protocol.rounds import Closing, Round, close_round, merge_inputs
from geo_diloco.protocol.schedule import MICRO, InnerClock, Turns, progress_every_ms
from geo_diloco.protocol.status import RoundStatus
from geo_diloco.protocol.tally import Estimates, Outlook, standing_of

MERGE_RETRY_MS = 1000
ROUNDS_REMEMBERED = 12


class OpenRounds:
    """Of one term. At most one for each fragment."""

    def __init__(
        self, rules: RunRules, ledger: Ledger, membership: Membership, holdings: Holdings, crediting: Crediting
    ) -> None:
        self.rules = rules
        self._ledger, self._membership = ledger, membership
        self._holdings, self._crediting = holdings, crediting
        self._rounds: dict[FragmentId, Round] = {}
        self._number = 0
        self._clock = InnerClock()
        self._turns = Turns(rules.sync, ())
        self._patience = Patience(rules.sync.interval_steps)
        self._estimates = Estimates()
        self._outlook: Outlook | None = None
        self._remembered: deque[RoundStatus] = deque(maxlen=ROUNDS_REMEMBERED)

    def begin(self, now: MonoMs) -> None:
        """The ledger is loaded, and this term serves."""
        self._clock = InnerClock(at=now)
        self._turns = Turns(self.rules.sync, [head.version for head in self._ledger.heads])

    def amend(self, rules: RunRules) -> None:
        """The rules are others from here on: every round is looked at anew, but those that have closed."""
        self.rules, self._outlook = rules, None

    def get(self, fragment: FragmentId) -> Round | None:
        return self._rounds.get(fragment)

    def asking(self) -> list[Round]:
        """Those that still take contributions, in sorted order."""
        return [self._rounds[p] for p in sorted(self._rounds) if self._rounds[p].closing is None]

    def is_merging(self) -> bool:
        return any(round_.closing is not None for round_ in self._rounds.values())

    def remembered(self) -> tuple[RoundStatus, ...]:
        """Those that were committed last."""
        return tuple(self._remembered)

    # -- time -----------------------------------------------------------------------------------------------------

    def move_clock(self, now: MonoMs) -> None:
        self._clock.advance(now, self._membership.median_us(told=True))

    def waits(self, now: MonoMs, *, is_ending: bool) -> list[MonoMs]:
        """When to look again, though nothing happens. Nobody is woken for a fragment that can't be opened then."""
        waits = [at for round_ in self._rounds.values() for at in (round_.retry_at, round_.look_at) if at is not None]
        if (end := self._patience.next_end) is not None and (wait_ms := self._clock.ms_until(end)) is not None:
            waits.append(MonoMs(now + max(1, wait_ms)))
        due = self._turns.next_due
        has_room = len(self._rounds) < self.rules.sync.rounds_in_flight_max
        if due is not None and has_room and not is_ending and self._membership.num_live(now):
            wait_ms = self._clock.ms_until(due)
            if wait_ms is not None:
                waits.append(MonoMs(now + max(1, wait_ms)))
        return waits

    # -- opening --------------------------------------------------------------------------------------------------

    def open_due(self, now: MonoMs) -> list[Effect]:
        sync = self.rules.sync
        effects: list[Effect] = []
        if not sync.lockstep and not self._membership.num_live(now):
            return effects
        while (due := self._turns.next_due) is not None:
            has_room = len(self._rounds) < sync.rounds_in_flight_max
            if not sync.lockstep and not (has_room and due <= self._clock.micro_steps):
                break
            effects += self._open(self._turns.take(), now)
        return effects

    def _open(self, fragment: FragmentId, now: MonoMs) -> list[Effect]:
        head = self._ledger.heads[fragment]
        self._number += 1
        due_again = self._clock.micro_steps + self.rules.sync.interval_steps * MICRO
        round_ = Round(self._number, fragment, head.version, head.base, now, due_again)
        self._rounds[fragment] = round_
        for peer in [*self._membership.live_peers(), *self._holdings.of_fragment(fragment)]:
            self._count(round_, peer)
        return self._ask(round_)

    def _ask(self, round_: Round) -> list[Effect]:
        asked = self.question(round_)
        return [self._send(member.peer, asked) for member in self._membership.connected() if member.trains]

    def _send(self, to: PeerId, message: RoundOpen) -> Send:
        return Send(to, self._ledger.branch, self._ledger.term, message)

    def question(self, round_: Round) -> RoundOpen:
        """What learners are asked."""
        return RoundOpen(
            round=round_.number,
            fragment=round_.fragment,
            attempt=round_.attempt,
            version=round_.version,
            base=round_.base,
            collect_at="",
            progress_ms=progress_every_ms(learners=len(self._membership.live_peers())),
        )

    # -- who has delivered ----------------------------------------------------------------------------------------

    def sampled(self, peer: PeerId, message: Sampled, now: MonoMs) -> None:
        """Said twice it counts from the first time."""
        round_ = self._rounds.get(message.fragment)
        if round_ is not None and round_.number == message.round and peer not in round_.sampled:
            round_.sampled[peer] = now - round_.opened_at
            self._membership.sampled(peer, message.fragment, opened_at=round_.opened_at, now=now)
            self._count(round_, peer)

    def delivered(self, peer: PeerId) -> None:
        """Some work of it became valid."""
        self._patience.begin_again(peer)

    def _count_changed(self) -> None:
        changed = self._membership.take_changed()
        for peer in changed:
            if self._membership.live_member(peer) is None:
                self._patience.begin_again(peer)
        for peer in [*changed, *self._patience.take_changed(self._clock.micro_steps)]:
            for round_ in self._rounds.values():
                self._count(round_, peer)
        for fragment, peer in self._holdings.take_changed():
            if fragment in self._rounds:
                self._count(self._rounds[fragment], peer)

    def _count(self, round_: Round, peer: PeerId) -> None:
        live, item = self._membership.live_member(peer), self._holdings.of_fragment(round_.fragment).get(peer)
        standing = standing_of(live, item, base=round_.base, sampled_ms=round_.sampled.get(peer))
        if standing is not None and standing.is_missing:
            self._patience.awaited(peer, self._clock.micro_steps)
            standing = replace(standing, is_given_up=self._patience.is_over(peer))
        if round_.tally.look(peer, standing):
            round_.touched = True

    # -- closing --------------------------------------------------------------------------------------------------

    def close_due(self, now: MonoMs, *, ending: str | None) -> list[Effect]:
        """`ending`: why the run is over."""
        self._count_changed()
        outlook = Outlook(
            live=self._membership.num_live(now),
            median_us=self._membership.median_us(told=False),
            pace=self._clock.pace,
            estimates=self._estimates,
            ending=ending,
        )
        is_new, self._outlook = outlook != self._outlook, outlook
        effects: list[Effect] = []
        for fragment in sorted(self._rounds):
            round_ = self._rounds[fragment]
            round_.touched = round_.touched or is_new
            if round_.closing is not None or (round_.retry_at is not None and now < round_.retry_at):
                continue
            if round_.touched or (round_.look_at is not None and now >= round_.look_at):
                effects += self._look(round_, outlook, now)
        return effects

    def _look(self, round_: Round, outlook: Outlook, now: MonoMs) -> list[Effect]:
        sync = self.rules.sync
        facts = round_.facts(now, outlook, self._clock.ms_until(round_.due_again), sync)
        decision = decide(facts, sync)
        round_.reason, round_.look_at = decision.reason, decision.until
        close, reason = decision.close, decision.reason
        if outlook.ending is not None and facts.fresh >= sync.quorum:
            close, reason = True, f"the run ends: {outlook.ending}"
        if close and self._may_commit_more():
            round_.touched = False
            return [self._close(round_, now, reason)]
        round_.touched = close
        return []

    def _may_commit_more(self) -> bool:
        """A run that stops after a number of commits stops at exactly that number."""
        limit = self.rules.stop.commits
        under_way = sum(round_.closing is not None for round_ in self._rounds.values())
        return limit == 0 or self._ledger.num_commits + under_way < limit

    def _close(self, round_: Round, now: MonoMs, reason: str) -> Merge:
        held, live = self._holdings.of_fragment(round_.fragment), self._membership.live(now)
        outer = guarded(self.rules.outer, self._ledger.heads[round_.fragment])
        closing = close_round(round_, held, live, now=now, reason=reason, outer=outer)
        counted = self._crediting.count(closing.taken, round_.fragment, now)
        taken = {item.contribution.id.peer for item in closing.taken}
        absent = [each.peer for each in live if each.peer not in taken and not self._patience.is_over(each.peer)]
        portion = self._crediting.portion(counted, absent)
        round_.closing = closing = replace(closing, counted=counted, portion=portion)
        round_.retry_at = round_.look_at = None
        for item in closing.taken:
            item.merging = True
        return Merge(
            fragment=round_.fragment,
            round=round_.number,
            attempt=round_.attempt,
            version=Version(round_.version + 1),
            inputs=merge_inputs(closing),
            eta=outer.eta,
            mu=outer.mu,
            codec=self.rules.codec_down,
            portion=portion,
        )

    # -- merging --------------------------------------------------------------------------------------------------

    def merging(self, event: Merged | MergeFailed) -> Round | None:
        """The round that this answer is for; none if that attempt was given up."""
        round_ = self._rounds.get(event.fragment)
        if round_ is None or round_.closing is None or (round_.number, round_.attempt) != (event.round, event.attempt):
            return None
        return round_

    def merge_failed(self, event: MergeFailed, now: MonoMs) -> list[Effect]:
        round_ = self.merging(event)
        if round_ is None or round_.closing is None:
            return []
        for item in round_.closing.taken:
            item.merging = False
        round_.closing, round_.attempt, round_.touched = None, round_.attempt + 1, True
        effects: list[Effect] = [Note("merge", f"fragment {event.fragment}: {event.reason}", "warning")]
        held = self._holdings.of_fragment(event.fragment)
        culprit = None if event.culprit is None else held.get(event.culprit)
        if culprit is None:
            round_.retry_at = MonoMs(now + MERGE_RETRY_MS)
            round_.reason = f"the merge failed and is tried again: {event.reason}"
        else:
            effects += self._holdings.refuse(culprit, f"invalid: {event.reason}")
        return effects + self._ask(round_)

    def committed(self, entry: Commit, now: MonoMs) -> Closing:
        """The round is over; its fragment waits for its next turn."""
        round_ = self._rounds.pop(entry.fragment)
        closing = round_.closing
        assert closing is not None
        self._turns.give(entry.fragment, round_.due_again)
        self._crediting.merged(entry.fragment, closing.taken, closing.counted)
        self._estimates = Estimates(
            moving_average(self._estimates.quorum_ms, closing.quorum_wait_ms),
            moving_average(self._estimates.sync_ms, now - closing.at),
        )
        self._remembered.append(
            RoundStatus(
                round=round_.number,
                fragment=entry.fragment,
                version=entry.version,
                seq=entry.header.seq,
                participants=len(entry.participants),
                live=closing.live,
                quorum_wait_ms=closing.quorum_wait_ms,
                grace_ms=closing.grace_ms,
                reason=closing.reason,
            )
        )
        return closing

    def give_up(self) -> None:
        """The run is over: what has no quorum yet gets none."""
        for round_ in self._rounds.values():
            self._turns.give(round_.fragment, round_.due_again)
        self._rounds.clear()

    def why_waiting(self, fragment: FragmentId, now: MonoMs) -> str:
        """For people."""
        if fragment in self._rounds:
            return self._rounds[fragment].reason
        if not self._membership.num_live(now):
            return "nobody trains: no learner is heard of"
        wait_ms = self._clock.ms_until(self._turns.due(fragment))
        if wait_ms is None:
            return "no learner has told its step time yet"
        if wait_ms == 0 and len(self._rounds) >= self.rules.sync.rounds_in_flight_max:
            return f"due, but {len(self._rounds)} rounds are open"
        return f"due in {wait_ms / 1000:.1f} s"

    def check_invariants(self) -> None:
        for fragment, round_ in self._rounds.items():
            assert round_.version == self._ledger.heads[fragment].version, (fragment, round_.version)
