"""Who is here: the syncer's view of the other peers, their habits, and the shares of data lent to them.

A learner is *live* while it is connected and its inner steps are heard of; nobody waits for one that isn't. Habits are
moving averages (weight 0.2, as in the paper). Shares: a learner keeps its share over short absences; a share whose
holder is gone is lent again from the cursor up to which its tokens were merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geo_diloco.manifest import BootId, MonoMs, PeerId, SyncSpec
from geo_diloco.protocol.messages import Allotment, Hello, Progress
from geo_diloco.protocol.schedule import MICRO
from geo_diloco.protocol.status import LearnerStatus

LIVE_MS = 15_000
LIVE_STEPS = 8
AWAY_MS = 60_000
"""A learner gone for longer gives back its share."""
DEPARTED_MAX = 256
"""Peers that are gone and still remembered."""
HOST_CHARACTERS_MAX = 200
CURSOR_MAX = 2**50
PASSES_MAX = 2**20
"""Beyond any honest share: what others are told must stay far from the wire's largest integer."""


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
    cursor: int = 0
    delivery_ms: int | None = None
    """Moving average from opening a round to a valid contribution."""
    allotment: Allotment | None = None
    said_goodbye: bool = False

    def status(self, doing: str) -> LearnerStatus:
        """For people."""
        return LearnerStatus(
            peer=self.peer,
            host=self.host,
            connected=self.connected,
            step=self.step,
            tokens=self.tokens,
            step_time_us=self.step_time_us,
            loss=self.loss,
            upload_bytes_per_s=self.upload_bytes_per_s,
            share=None if self.allotment is None else self.allotment.share,
            doing=doing,
        )

    def live(self, now: MonoMs) -> bool:
        patience_ms = max(LIVE_MS, LIVE_STEPS * self.step_time_us // 1000)
        return self.connected and self.trains and now - self.heard_at <= patience_ms


@dataclass(slots=True)
class _Share:
    holders: set[PeerId] = field(default_factory=set)
    passes: int = 0
    """How often it was lent while someone else held it, or anew to another data order."""
    merged_cursor: int = 0
    """Tokens merged by holders of pass 0."""


class Membership:
    """All peers the syncer has met in this term, in sorted order wherever they are iterated."""

    def __init__(self, sync: SyncSpec, num_shares: int) -> None:
        self._sync = sync
        self._members: dict[PeerId, Member] = {}
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
        return [member for member in self.all() if member.live(now)]

    def num_known_learners(self) -> int:
        """Those who train, and those who did when they were last heard of; whoever said Goodbye is not one."""
        return sum(member.trains and not member.said_goodbye for member in self._members.values())

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
        member.loss = progress.loss

    def delivered(self, peer: PeerId, delivery_ms: int) -> None:
        member = self._members.get(peer)
        if member is not None:
            member.delivery_ms = moving_average(member.delivery_ms, delivery_ms)

    def disconnected(self, peer: PeerId, now: MonoMs) -> None:
        member = self._members.get(peer)
        if member is not None and member.connected:
            member.connected, member.gone_at = False, now

    def left(self, peer: PeerId, now: MonoMs) -> None:
        """It said Goodbye: its share is free at once."""
        self.disconnected(peer, now)
        self._members[peer].said_goodbye = True
        self._give_back(peer)

    def forget_away(self, now: MonoMs) -> list[PeerId]:
        """Shares of those gone for long go back. If too many are gone, those who went first are forgotten as well:
        nobody fills our memory by coming and going. Returns whose unfinished work won't come any more."""
        gone = [member for member in self._members.values() if not member.connected]
        long = [each for each in gone if each.gone_at is not None and now - each.gone_at >= AWAY_MS]
        forgotten = sorted(gone, key=lambda each: (each.heard_at, each.peer))[: max(0, len(gone) - DEPARTED_MAX)]
        for member in [*long, *forgotten]:
            self._give_back(member.peer)
        for member in forgotten:
            del self._members[member.peer]
        return sorted({member.peer for member in [*long, *forgotten]})

    def away_until(self) -> MonoMs | None:
        """When the next absence becomes long."""
        waits = [member.gone_at + AWAY_MS for member in self.all() if member.gone_at is not None and member.allotment]
        return MonoMs(min(waits)) if waits else None

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
