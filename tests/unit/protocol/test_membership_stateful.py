"""Peers come, go, progress and are merged in any order: who is live and whose share is whose stays true throughout."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from geo_diloco.manifest import BootId, MonoMs, PeerId, Seq
from geo_diloco.protocol.membership import AWAY_MS, Membership
from geo_diloco.protocol.messages import Allotment, Hello, Progress
from geo_diloco.protocol.schedule import LIVE_MS, LIVE_STEPS
from geo_diloco.sim.fakes import LAYOUT

NUM_SHARES = 2
PEERS = tuple(PeerId(letter * 64) for letter in "abcd")
WHO = st.sampled_from(PEERS)
HELLO = Hello(
    wire_version=1,
    layout_digest=LAYOUT,
    trains=True,
    host="machine",
    software="",
    address="",
    step=0,
    tokens=0,
    head_seq=Seq(0),
    undecided=(),
    proof="",
)
HOLDS = st.none() | st.builds(
    Allotment,
    share=st.integers(-1, NUM_SHARES),
    num_shares=st.integers(1, NUM_SHARES + 1),
    cursor=st.integers(-5, 100),
    pass_number=st.integers(-1, 3),
)


class Members(RuleBasedStateMachine):
    """A syncer's view, against a model that remembers only what everybody did last."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000
        self.members = Membership(NUM_SHARES)
        self.connected: set[PeerId] = set()
        self.gone_at: dict[PeerId, int] = {}
        self.heard_at: dict[PeerId, int] = {}
        self.steps: dict[PeerId, int] = {}
        self.starts: dict[PeerId, int] = {}
        self.merged: dict[int, int] = {}
        """Highest merged cursor of pass 0, by share."""

    @property
    def at(self) -> MonoMs:
        return MonoMs(self.now)

    @rule(peer=WHO, again=st.booleans(), trains=st.booleans(), holds=HOLDS)
    def hello(self, peer: PeerId, again: bool, trains: bool, holds: Allotment | None) -> None:
        """Of the same process, or of its next one."""
        if not again or peer not in self.starts:
            self.starts[peer] = self.starts.get(peer, 0) + 1
            self.steps[peer] = 0
        boot = BootId(f"{self.starts[peer]:016d}")
        before = self.members.get(peer)
        held = before.allotment if before is not None else None
        member = self.members.hello(peer, boot, replace(HELLO, trains=trains, holds=holds), self.at)
        self.connected.add(peer)
        self.gone_at.pop(peer, None)
        self.heard_at[peer] = self.now
        assert member.boot == boot and member.connected
        if held is not None:
            assert member.allotment == held, "a share is kept over short absences and restarts"
        if member.trains:
            assert member.allotment is not None and 0 <= member.allotment.share < NUM_SHARES

    @rule(peer=WHO, steps=st.integers(-2, 3), step_time_ms=st.integers(0, 5_000))
    def progress(self, peer: PeerId, steps: int, step_time_ms: int) -> None:
        if peer not in self.connected:
            return
        step = max(0, self.steps[peer] + steps)
        first = self.members[peer].step_time_us == 0
        message = Progress(
            step=step, tokens=step, step_time_us=1_000 * step_time_ms, upload_bytes_per_s=0, loss=None, cursor=step
        )
        known = self.members[peer].step
        self.members.progress(peer, message, self.at)
        assert self.members[peer].step == max(step, known), "steps never fall back"
        if step > known or (step == known and first):
            self.heard_at[peer] = self.now
        self.steps[peer] = max(step, known)

    @rule(peer=WHO, away_ms=st.sampled_from((0, AWAY_MS - 1, AWAY_MS)))
    def disconnect(self, peer: PeerId, away_ms: int) -> None:
        self.members.disconnected(peer, self.at)
        if peer in self.connected:
            self.connected.discard(peer)
            self.gone_at[peer] = self.now
        self.wait(away_ms)

    @rule(peer=WHO)
    def leave(self, peer: PeerId) -> None:
        if peer not in self.starts:
            return
        self.members.left(peer, self.at)
        self.connected.discard(peer)
        self.gone_at.pop(peer, None)
        assert self.members[peer].allotment is None, "who said Goodbye keeps no share"

    @rule(ms=st.sampled_from((1, 1_000, LIVE_MS, AWAY_MS)))
    def later(self, ms: int) -> None:
        self.wait(ms)

    def wait(self, ms: int) -> None:
        self.now += ms
        until = self.members.away_until()
        long = {peer for peer, at in self.gone_at.items() if self.now - at >= AWAY_MS}
        due = any(self.members[peer].allotment is not None for peer in long)
        assert due == (until is not None and until <= self.now), "the deadline tells when that is"
        back = self.members.forget_away(self.at)
        assert back == sorted(long), "who is away for long gives back its share, and nobody else"
        for peer in long:
            del self.gone_at[peer]
            assert self.members[peer].allotment is None

    @rule(peer=WHO, cursor=st.integers(0, 200))
    def merge(self, peer: PeerId, cursor: int) -> None:
        member = self.members.get(peer)
        before = None if member is None else member.allotment
        self.members.merged(peer, cursor)
        if member is None or before is None or member.allotment is None:
            return
        assert member.allotment.cursor == max(before.cursor, cursor), "a cursor never falls back"
        if before.pass_number == 0:
            self.merged[before.share] = max(self.merged.get(before.share, 0), cursor)

    @invariant()
    def live_are_those_who_are_connected_train_and_are_heard(self) -> None:
        for member in self.members.all():
            patience_ms = max(LIVE_MS, LIVE_STEPS * member.step_time_us // 1_000)
            lively = self.now - self.heard_at[member.peer] <= patience_ms
            assert member.live(self.at) == (member.peer in self.connected and member.trains and lively)
            assert member.connected == (member.peer in self.connected)
        assert [member.peer for member in self.members.all()] == sorted(self.starts)

    @invariant()
    def a_share_is_with_those_it_was_lent_to(self) -> None:
        """A newcomer takes the share that the fewest have."""
        for index, share in enumerate(self.members._shares):
            holders = {m.peer for m in self.members.all() if m.allotment is not None and m.allotment.share == index}
            assert share.holders <= holders
            trains = {peer for peer in holders if self.members[peer].trains}
            assert trains <= share.holders
            assert share.merged_cursor == self.merged.get(index, 0)


Members.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestMembers = Members.TestCase
