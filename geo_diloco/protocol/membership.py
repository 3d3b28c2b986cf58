"""Who is here: the syncer's view of the other peers, their habits, and the shares of data lent to them.

A learner is *live* while it is connected and its inner steps are heard of; nobody waits for one that isn't. Habits are
moving averages (weight 0.2, as in the paper). Shares: a learner keeps its share over short absences; a share whose
holder is gone is lent again from the cursor up to which its tokens were merged.

Who is live is kept, not counted anew at every event: a peer is looked at when it does something, and everybody only
when somebody may have fallen silent by time alone, which is some seconds after the last look at all. `take_changed`
names those whose place in a round may be another now.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from itertools import takewhile

from geo_diloco.manifest import BootId, FragmentId, MonoMs, PeerId
from geo_diloco.protocol.messages import Allotment, Hello, Progress
from geo_diloco.protocol.schedule import MICRO, live_for_ms
from geo_diloco.protocol.status import LearnerStatus

AWAY_MS = 60_000
"""A learner gone for longer gives back its share."""
DEPARTED_MAX = 256
"""Peers that are gone and still remembered."""
HOST_CHARACTERS_MAX = 200
CURSOR_MAX = 2**50
PASSES_MAX = 2**20
"""Beyond any honest share: what others are told must stay far from the wire's largest integer."""
FOR_EVER = MonoMs(2**62)
PACE_MS = 15_000
"""What `status` calls a learner's tokens per second is over one to two of these."""


def moving_average(old: int | None, new: int) -> int:
    """Weight 0.2 for the new value; the first value is the average."""
    return new if old is None else (4 * old + new) // 5


@dataclass(slots=True)
class Member:
    """One other peer, as the syncer sees it."""

    peer: PeerId
    boot: BootId
    host: str
    trains: bool
    address: str
    connected: bool
    heard_at: MonoMs
    """Last Hello or Progress."""
    gone_at: MonoMs | None = None
    step: int = 0
    tokens: int = 0
    step_time_us: int = 0
    upload_bytes_per_s: int = 0
    loss: float | None = None
    marks: tuple[tuple[MonoMs, int], ...] = ()
    """When it had trained how many tokens: at the beginning of this stretch of its pace, and of the one before."""
    cursor: int = 0
    uplink: str = ""
    keeps_up: bool = True
    """Takes part in every round, as far as its link goes."""
    delivery_ms: int | None = None
    """Moving average from opening a round to a valid contribution, be that too late for it."""
    takes_ms: int | None = None
    """The same from the moment in which it said that it sampled."""
    sampled: dict[FragmentId, tuple[MonoMs, MonoMs]] = field(default_factory=dict)
    """Of work that is not valid yet: when its round was opened, and when it said that it sampled."""
    allotment: Allotment | None = None
    said_goodbye: bool = False

    def mark(self, now: MonoMs) -> None:
        """It has told how far it is."""
        if not self.marks or now - self.marks[0][0] >= PACE_MS:
            self.marks = ((now, self.tokens), *self.marks[:1])

    def tokens_per_s(self, now: MonoMs) -> int | None:
        """Over some time, while it says how far it is; none if that is too short."""
        if not self.marks or now - self.marks[-1][0] < PACE_MS // 3:
            return None
        at, tokens = self.marks[-1]
        return 1000 * (self.tokens - tokens) // (now - at)

    def status(self, doing: str, now: MonoMs) -> LearnerStatus:
        """For people."""
        return LearnerStatus(
            peer=self.peer,
            host=self.host,
            connected=self.connected,
            step=self.step,
            tokens=self.tokens,
            step_time_us=self.step_time_us,
            tokens_per_s=self.tokens_per_s(now),
            loss=self.loss,
            upload_bytes_per_s=self.upload_bytes_per_s,
            share=None if self.allotment is None else self.allotment.share,
            doing=doing,
            uplink=self.uplink,
        )

    @property
    def heard_until(self) -> MonoMs:
        """Until then it counts as heard of."""
        return MonoMs(self.heard_at + live_for_ms(self.step_time_us))

    def live(self, now: MonoMs) -> bool:
        return self.connected and self.trains and now <= self.heard_until


@dataclass(slots=True)
class _Share:
    holders: set[PeerId] = field(default_factory=set)
    passes: int = 0
    """How often it was lent while someone else held it, or anew to another data order."""
    merged_cursor: int = 0
    """Tokens merged by holders of pass 0."""


class Membership:
    """All peers the syncer has met in this term, in sorted order wherever they are iterated."""

    def __init__(self, num_shares: int) -> None:
        self._members: dict[PeerId, Member] = {}
        self._gone: dict[PeerId, Member] = {}
        """Not connected."""
        self._away: dict[PeerId, Member] = {}
        """Of those: who may still come back to its share, in the order in which they went."""
        self._live: dict[PeerId, int] = {}
        """Step time that each live learner is counted by."""
        self._step_times_us: list[int] = []
        """Of the live learners, sorted; 0 until told."""
        self._all_heard_until = FOR_EVER
        """Nobody falls silent before."""
        self._changed: dict[PeerId, None] = {}
        self._paced: dict[PeerId, None] = {}
        self._shares = [_Share() for _ in range(num_shares)]

    def __getitem__(self, peer: PeerId) -> Member:
        return self._members[peer]

    def get(self, peer: PeerId) -> Member | None:
        return self._members.get(peer)

    def all(self) -> list[Member]:
        return [self._members[peer] for peer in sorted(self._members)]

    def connected(self) -> list[Member]:
        return [member for member in self.all() if member.connected]

    def live(self, now: MonoMs) -> list[Member]:
        self.look_at_silent(now)
        return [self._members[peer] for peer in sorted(self._live)]

    def num_live(self, now: MonoMs) -> int:
        self.look_at_silent(now)
        return len(self._live)

    def live_peers(self) -> list[PeerId]:
        """As of the last look, in no order."""
        return list(self._live)

    def live_member(self, peer: PeerId) -> Member | None:
        """If it is a live learner, as of the last look."""
        return self._members[peer] if peer in self._live else None

    def median_us(self, *, told: bool) -> int | None:
        """Step time of the median live learner (the slower of two): of those who have told theirs, or of all."""
        first = bisect_right(self._step_times_us, 0) if told else 0
        num = len(self._step_times_us) - first
        return self._step_times_us[first + num // 2] if num else None

    def take_changed(self) -> list[PeerId]:
        """Learners that have become live, or not, or have other habits, since this was asked last."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def num_known_learners(self) -> int:
        """Those who train, and those who did when they were last heard of; whoever said Goodbye is not one."""
        return sum(member.trains and not member.said_goodbye for member in self._members.values())

    def take_paced(self) -> list[PeerId]:
        """Peers that have told how far they are, or have become live, or not, since this was asked last."""
        paced, self._paced = self._paced, {}
        return list(paced)

    def hello(self, peer: PeerId, boot: BootId, hello: Hello, now: MonoMs) -> Member:
        """Admit a peer, or take it back. The same Hello twice changes nothing."""
        known = self._members.get(peer)
        if known is None or known.boot != boot:
            allotment = self._believed(hello.holds) if known is None else known.allotment
            host = hello.host[:HOST_CHARACTERS_MAX]
            known = Member(peer, boot, host, hello.trains, hello.address, True, now, allotment=allotment)
            self._members[peer] = known
        known.connected, known.gone_at, known.heard_at, known.said_goodbye = True, None, now, False
        known.address = hello.address
        known.step, known.tokens = max(known.step, hello.step), max(known.tokens, hello.tokens)
        if known.trains:
            known.allotment = self._allot(known)
        self._gone.pop(peer, None)
        self._away.pop(peer, None)
        self._look_at(known, now)
        self._changed[peer] = None
        return known

    def progress(self, peer: PeerId, progress: Progress, now: MonoMs) -> None:
        member = self._members[peer]
        if progress.step < member.step:
            return
        if progress.step > member.step or member.step_time_us == 0:
            member.heard_at = now
        member.step, member.tokens = progress.step, progress.tokens
        member.step_time_us = min(max(progress.step_time_us, 1), 3_600 * MICRO)
        member.upload_bytes_per_s, member.cursor = progress.upload_bytes_per_s, progress.cursor
        member.loss, member.uplink = progress.loss, progress.uplink[:HOST_CHARACTERS_MAX]
        member.mark(now)
        if member.keeps_up != (progress.turn <= 1):
            member.keeps_up = progress.turn <= 1
            self._changed[peer] = None
        self._look_at(member, now)

    def sampled(self, peer: PeerId, fragment: FragmentId, *, opened_at: MonoMs, now: MonoMs) -> None:
        self._members[peer].sampled[fragment] = (opened_at, now)

    def delivered(self, peer: PeerId, fragment: FragmentId, now: MonoMs) -> None:
        """A contribution became valid, and says how long its learner takes, unless an earlier term asked for it."""
        member = self._members.get(peer)
        times = None if member is None else member.sampled.pop(fragment, None)
        if member is not None and times is not None:
            member.delivery_ms = moving_average(member.delivery_ms, now - times[0])
            member.takes_ms = moving_average(member.takes_ms, now - times[1])
            self._changed[peer] = None

    def disconnected(self, peer: PeerId, now: MonoMs) -> None:
        member = self._members.get(peer)
        if member is not None and member.connected:
            member.connected, member.gone_at = False, now
            self._gone[peer] = self._away[peer] = member
            self._look_at(member, now)

    def left(self, peer: PeerId, now: MonoMs) -> None:
        """It said Goodbye: its share is free at once."""
        self.disconnected(peer, now)
        self._members[peer].said_goodbye = True
        self._give_back(peer)

    def forget_away(self, now: MonoMs) -> list[PeerId]:
        """Shares of those gone for long go back. If too many are gone, those who went first are forgotten as well:
        nobody fills our memory by coming and going. Returns whose unfinished work won't come any more."""
        if not self._away and len(self._gone) <= DEPARTED_MAX:
            return []
        long = list(takewhile(lambda each: now - (each.gone_at or 0) >= AWAY_MS, self._away.values()))
        forgotten: list[Member] = []
        if len(self._gone) > DEPARTED_MAX:
            by_age = sorted(self._gone.values(), key=lambda each: (each.heard_at, each.peer))
            forgotten = by_age[: len(by_age) - DEPARTED_MAX]
        for member in [*long, *forgotten]:
            self._give_back(member.peer)
        for member in forgotten:
            del self._members[member.peer], self._gone[member.peer]
        return sorted({member.peer for member in [*long, *forgotten]})

    def away_until(self) -> MonoMs | None:
        """When the next absence becomes long."""
        waits = (each.gone_at for each in self._away.values() if each.gone_at is not None and each.allotment)
        first = next(waits, None)
        return None if first is None else MonoMs(first + AWAY_MS)

    # -- who is live ----------------------------------------------------------------------------------------------

    def _look_at(self, member: Member, now: MonoMs) -> None:
        """Count it as it is now, after whatever it did."""
        peer, counted = member.peer, self._live.get(member.peer)
        self._paced[peer] = None
        step_time_us = member.step_time_us if member.live(now) else None
        if step_time_us is not None:
            self._all_heard_until = min(self._all_heard_until, member.heard_until)
        if step_time_us == counted:
            return
        self._changed[peer] = None
        if counted is not None:
            del self._step_times_us[bisect_left(self._step_times_us, counted)]
            del self._live[peer]
        if step_time_us is not None:
            insort(self._step_times_us, step_time_us)
            self._live[peer] = step_time_us

    def look_at_silent(self, now: MonoMs) -> None:
        """Whoever has fallen silent by now is not live any more."""
        if now <= self._all_heard_until:
            return
        self._all_heard_until = FOR_EVER
        for peer in list(self._live):
            self._look_at(self._members[peer], now)

    # -- shares ---------------------------------------------------------------------------------------------------

    def _believed(self, holds: Allotment | None) -> Allotment | None:
        """What a peer says it trains on, unless that can't be."""
        if holds is None or holds.num_shares != len(self._shares) or not 0 <= holds.share < len(self._shares):
            return None
        possible = 0 <= holds.cursor <= CURSOR_MAX and 0 <= holds.pass_number <= PASSES_MAX
        return holds if possible else None

    def _allot(self, member: Member) -> Allotment:
        held = member.allotment
        if held is not None and 0 <= held.share < len(self._shares):
            self._shares[held.share].holders.add(member.peer)
            self._shares[held.share].passes = max(self._shares[held.share].passes, held.pass_number)
            return held
        index = min(range(len(self._shares)), key=lambda i: (len(self._shares[i].holders), self._shares[i].passes, i))
        share = self._shares[index]
        if share.holders:
            share.passes += 1
        share.holders.add(member.peer)
        cursor = share.merged_cursor if share.passes == 0 else 0
        return Allotment(share=index, num_shares=len(self._shares), cursor=cursor, pass_number=share.passes)

    def _give_back(self, peer: PeerId) -> None:
        member = self._members[peer]
        member.gone_at = None
        self._away.pop(peer, None)
        if member.allotment is not None:
            self._shares[member.allotment.share].holders.discard(peer)
            member.allotment = None

    def merged(self, peer: PeerId, cursor: int) -> None:
        """Tokens of a peer's share are merged up to `cursor`: whoever comes after it starts there."""
        member = self._members.get(peer)
        if member is None or member.allotment is None or cursor > CURSOR_MAX:
            return
        share = self._shares[member.allotment.share]
        if member.allotment.pass_number == 0:
            share.merged_cursor = max(share.merged_cursor, cursor)
        cursor = max(member.allotment.cursor, cursor)
        member.allotment = Allotment(
            share=member.allotment.share,
            num_shares=member.allotment.num_shares,
            cursor=cursor,
            pass_number=member.allotment.pass_number,
        )
