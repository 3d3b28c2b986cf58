"""Whatever happens, the syncer knows of its rounds what it would know if it looked at everybody after every event."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from geo_diloco.manifest import BootId, Digest, FragmentId, MonoMs, PeerId, SyncSpec
from geo_diloco.protocol.effects import Effect, Merge
from geo_diloco.protocol.events import BlobArrived, ContributionChecked, Disconnected, Event, MergeFailed
from geo_diloco.protocol.membership import AWAY_MS
from geo_diloco.protocol.messages import BlobRef, Goodbye, RoundOpen, Sampled
from geo_diloco.protocol.schedule import LIVE_MS
from geo_diloco.sim.fakes import fake_digest
from tests.support.chains import contribution
from tests.support.naive_rounds import Naive, away_until, pace, slower_median, tokens_per_second
from tests.support.single import Syncing, hello, merged, only, progress, said

PEERS = tuple(PeerId(letter * 64) for letter in "abcdef")
WHO = st.sampled_from(PEERS)
FRAGMENT = st.sampled_from((FragmentId(0), FragmentId(1)))
SYNC = st.builds(
    SyncSpec,
    interval_steps=st.sampled_from((4, 30)),
    num_fragments=st.just(2),
    overlap_steps=st.sampled_from((0, 1, 30)),
    quorum=st.sampled_from((1, 1, 2, 3)),
    grace=st.sampled_from((True, True, False)),
    rounds_in_flight_max=st.sampled_from((1, 2)),
    staleness_max=st.just(2),
)


class Compared(Syncing):
    """A syncer that is compared with the naive one after every event."""

    naive: Naive | None = None

    def give(self, event: Event) -> list[Effect]:
        effects = super().give(event)
        syncer = self.core._syncer
        if syncer is not None and syncer.serving:
            self.naive = self.naive or Naive(syncer)
            self.compare(self.naive, MonoMs(self.now))
        return effects

    def compare(self, naive: Naive, now: MonoMs) -> None:
        membership, rounds = naive.syncer._membership, naive.syncer._rounds
        here = naive.live(now)
        naive.look(now)
        assert membership.live(now) == here and membership.num_live(now) == len(here)
        assert membership.median_us(told=False) == slower_median([each.step_time_us for each in here])
        assert rounds._clock.pace == pace(here)
        crediting = naive.syncer._crediting
        assert crediting._median_rate(now) == tokens_per_second(here, crediting._rules.tokens_per_step)
        assert membership.away_until() == away_until(membership.all())
        for round_ in rounds._rounds.values():
            facts = naive.facts(round_, now)
            if naive.is_waiting(round_, now):
                decision = naive.decision(round_, now)
                assert not decision.close, "nobody looked at a round that may close"
                assert (round_.reason, round_.look_at, round_.quorum_at) == (
                    decision.reason,
                    decision.until,
                    facts.quorum_at,
                )
            assert rounds._outlook is not None
            assert facts == round_.tally.facts(
                now,
                rounds._outlook,
                opened_at=round_.opened_at,
                quorum_at=facts.quorum_at,
                due_again_at=facts.due_again_at,
                was_due=facts.was_due,
                sync=rounds.rules.sync,
            )
            assert round_.tally == naive.tally(round_), "somebody's place in a round is not what it was counted by"
        assert naive.syncer.deadline == naive.deadline(now)


class Rounds(RuleBasedStateMachine):
    """Learners that come, go, fall silent, deliver early, late, badly or never; merges that succeed or fail."""

    @initialize(sync=SYNC)
    def found(self, sync: SyncSpec) -> None:
        self.syncing = Compared.founding(sync, tokens_per_step=10)
        self.boots = dict.fromkeys(PEERS, 0)
        self.steps = dict.fromkeys(PEERS, 0)
        self.asked: dict[FragmentId, RoundOpen] = {}
        self.merges: list[Merge] = []
        for peer in PEERS[:3]:
            self.hello(peer, again=False, trains=True)
            self.progress(peer, 1, 100)

    def take(self, effects: list[Effect]) -> None:
        self.asked |= {each.fragment: each for each in said(effects, RoundOpen)}
        self.merges += only(effects, Merge)

    def boot(self, peer: PeerId) -> BootId:
        return BootId(f"{self.boots[peer]:016d}")

    def hear(self, peer: PeerId, message: Sampled | Goodbye) -> None:
        self.take(self.syncing.hear(message, peer, self.boot(peer)))

    def hello(self, peer: PeerId, again: bool, trains: bool) -> None:
        self.boots[peer] += 0 if again else 1
        self.take(self.syncing.hear(hello(trains=trains), peer, self.boot(peer)))

    @rule(peer=WHO, steps=st.integers(0, 2), step_time_ms=st.sampled_from((0, 50, 100, 100, 400, 5_000)))
    def progress(self, peer: PeerId, steps: int, step_time_ms: int) -> None:
        self.steps[peer] += steps
        message = progress(self.steps[peer], 1_000 * step_time_ms)
        self.take(self.syncing.hear(message, peer, self.boot(peer)))

    @rule(peer=WHO, fragment=FRAGMENT)
    def sample(self, peer: PeerId, fragment: FragmentId) -> None:
        if fragment in self.asked:
            asked = self.asked[fragment]
            self.hear(peer, Sampled(round=asked.round, fragment=fragment, attempt=asked.attempt))

    @rule(peer=WHO, fragment=FRAGMENT, behind=st.sampled_from((0, 0, 0, 1)))
    def announce(self, peer: PeerId, fragment: FragmentId, behind: int) -> None:
        ledger = self.syncing.core.ledger
        bases = list(ledger.bases[fragment].items())
        base, version = bases[max(0, len(bases) - 1 - behind)]
        first = ledger.merged_until.get((peer, fragment), 0)
        self.steps[peer] = max(self.steps[peer], first) + 1
        claim = contribution(
            peer,
            base=Digest(base),
            fragment=fragment,
            base_version=version,
            first_step=first,
            last_step=self.steps[peer],
            steps=1,
            blob=f"delta {self.steps[peer] % 3}",
        )
        self.take(self.syncing.hear(claim, peer, self.boot(peer)))

    @rule(peer=WHO, fragment=FRAGMENT, ok=st.sampled_from((True, True, True, False)), checked=st.booleans())
    def deliver(self, peer: PeerId, fragment: FragmentId, ok: bool, checked: bool) -> None:
        syncer = self.syncing.core._syncer
        item = None if syncer is None else syncer._holdings.of_fragment(fragment).get(peer)
        if item is not None:
            self.take(self.syncing.give(BlobArrived(item.contribution.blob)))
            if checked:
                self.take(self.syncing.give(ContributionChecked(item.contribution.id, ok, "", 1.0)))

    @rule(peer=WHO, fragment=FRAGMENT, behind=st.sampled_from((0, 0, 0, 1)), sampled=st.booleans())
    def hand_in(self, peer: PeerId, fragment: FragmentId, behind: int, sampled: bool) -> None:
        if sampled:
            self.sample(peer, fragment)
        self.announce(peer, fragment, behind)
        self.deliver(peer, fragment, ok=True, checked=True)

    @rule(first=st.integers(0, 2), fragment=FRAGMENT)
    def hand_in_several(self, first: int, fragment: FragmentId) -> None:
        for peer in PEERS[first : first + 2]:
            self.hand_in(peer, fragment, 0, True)

    @rule(peer=WHO, what=st.sampled_from(("hello", "hello again", "follow", "break", "leave", "silence", "absence")))
    def disturb(self, peer: PeerId, what: str) -> None:
        """One rule, so that rounds have time to come to something."""
        match what:
            case "hello" | "hello again":
                self.hello(peer, again=what != "hello", trains=True)
            case "follow":
                self.hello(peer, again=False, trains=False)
            case "break":
                self.take(self.syncing.give(Disconnected(peer, "cut")))
            case "leave":
                self.hear(peer, Goodbye(reason="leaving"))
            case _:
                self.wait(LIVE_MS if what == "silence" else AWAY_MS)

    @rule(ms=st.sampled_from((1, 10, 50, 400)))
    def wait(self, ms: int) -> None:
        self.take(self.syncing.pass_time(ms))

    @rule(ms=st.sampled_from((1, 20, 100, 400)), slow=st.sampled_from((1, 1, 4)))
    def train_on(self, ms: int, slow: int) -> None:
        """Everybody who is here; merges under way are done."""
        while self.merges:
            self.merge(True, False)
        for index, peer in enumerate(PEERS):
            self.progress(peer, 1, 100 if index % 2 else 100 * slow)
        self.wait(ms)

    @rule()
    def wait_until_the_deadline(self) -> None:
        deadline = self.syncing.core.deadline
        self.wait(400 if deadline is None else max(0, deadline - self.syncing.now))

    @precondition(lambda self: self.merges)
    @rule(ok=st.sampled_from((True, True, False)), blames=st.booleans())
    def merge(self, ok: bool, blames: bool) -> None:
        merge = self.merges.pop(0)
        culprit = merge.inputs[0].peer if blames else None
        failed = MergeFailed(merge.fragment, merge.round, merge.attempt, "disk full", culprit)
        update = BlobRef(fake_digest("update", merge), 10)
        self.take(self.syncing.give(replace(merged(merge), update=update) if ok else failed))
        self.asked.pop(merge.fragment, None)


Rounds.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestRounds = Rounds.TestCase
