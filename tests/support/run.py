"""Runs a plan from founding to the end of the run, with every checker watching, and looks at what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from geo_diloco.manifest import PeerId
from geo_diloco.protocol.effects import TokensMerged
from geo_diloco.protocol.messages import Commit
from tests.support.checkers import ChainChecker, CommitChecker, StateChecker, TokenChecker, WorkChecker
from tests.support.cluster import Cluster, fake_peer
from tests.support.liar import LiarProcess
from tests.support.member_process import MemberDisk, MemberProcess, World
from tests.support.plans import FOR_GOOD_MS, Fault, Plan
from tests.support.syncer_process import SyncerDisk, SyncerProcess

LIVENESS_MS = 25_000
"""After faults stop, within this every fragment is committed and adopted anew by every live learner."""
DRAIN_MS = 20_000
"""After the run's end, within this everyone has heard of it."""


class Run:
    """One simulated run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cluster = Cluster(plan)
        self.chain = ChainChecker()
        self.commits = CommitChecker(plan.sync)
        self.work = WorkChecker(self.cluster)
        self.states = StateChecker()
        self.tokens = TokenChecker(len(plan.num_elements))
        self.cluster.watches = (self.chain, self.commits, self.work, self.states, self.tokens)
        self.world = World()
        self.syncer_disk = SyncerDisk()
        self.disks = [MemberDisk() for _ in plan.step_ms]
        self.starts = [0] * len(plan.step_ms)
        self.learners: list[MemberProcess] = []
        self.followers: list[MemberProcess] = []
        self._syncer_starts = 0
        self._gone = {fault.learner for fault in plan.faults if fault.for_ms >= FOR_GOOD_MS}

    # -- processes ------------------------------------------------------------------------------------------------

    def _start_syncer(self) -> None:
        self._syncer_starts += 1
        self.world.syncer = SyncerProcess(self.cluster, self.syncer_disk, self._syncer_starts)
        self.world.syncer.start()

    def _start_learner(self, index: int) -> MemberProcess:
        self.starts[index] += 1
        process = MemberProcess(
            self.cluster,
            learner_id(index),
            "learner",
            self.starts[index],
            world=self.world,
            disk=self.disks[index],
            step_ms=self.plan.step_ms[index],
        )
        process.start()
        return process

    def _restart_learner(self, index: int) -> None:
        if not self.learners[index].alive:
            self.learners[index] = self._start_learner(index)

    def _restart_when_gone(self, index: int) -> None:
        """A process that is frozen leaves later."""
        learner = self.learners[index]
        if learner.alive and learner.is_leaving:
            self.cluster.clockwork.after(500, lambda: self._restart_when_gone(index))
        else:
            self._restart_learner(index)

    def _restart_syncer(self) -> None:
        if self.world.syncer is not None and not self.world.syncer.alive:
            self._start_syncer()

    def start(self) -> None:
        clock = self.cluster.clockwork
        self._start_syncer()
        self.learners = [self._start_learner(index) for index in range(len(self.plan.step_ms))]
        for index in range(self.plan.num_followers):
            follower = MemberProcess(
                self.cluster, fake_peer(f"follower {index}"), "follower", 1, world=self.world, disk=MemberDisk()
            )
            follower.start()
            self.followers.append(follower)
        if self.plan.has_liar:
            LiarProcess(self.cluster, self.world).start()
        for fault in self.plan.faults:
            begin, end = self._fault(fault)
            clock.at(fault.at_ms, begin)
            clock.at(fault.at_ms + fault.for_ms, end)

    def _fault(self, fault: Fault) -> tuple[Callable[[], None], Callable[[], None]]:
        index, cut = fault.learner, self.world.cut
        process = self.learners[index]

        def frozen(freeze: bool) -> None:
            nonlocal process
            if freeze:
                process = self.learners[index]
                process.freeze()
            elif process.frozen:
                process.thaw()

        def cut_off() -> None:
            cut.add(learner_id(index))
            self.learners[index].lose_link()

        match fault.kind:
            case "crash":
                return lambda: self.learners[index].crash(), lambda: self._restart_learner(index)
            case "leave":
                return lambda: self.learners[index].leave(), lambda: self._restart_when_gone(index)
            case "freeze":
                return lambda: frozen(True), lambda: frozen(False)
            case "cut":
                return cut_off, lambda: cut.discard(learner_id(index))
            case "crash_syncer":
                return self._crash_syncer, self._restart_syncer

    def _crash_syncer(self) -> None:
        if self.world.syncer is not None and self.world.syncer.alive:
            self.world.syncer.crash()

    # -- from founding to the end -----------------------------------------------------------------------------------

    def go(self, until_ms: int = 400_000) -> Outcome:
        self.start()
        clock = self.cluster.clockwork
        clock.run(self.plan.faults_until_ms)
        if self.plan.faults_until_ms and not self.is_finished():
            self._expect_liveness()
        clock.run(until_ms, self.is_finished)
        assert self.is_finished(), f"the run never ended: {self._whereabouts()}"
        ended_at = clock.now
        clock.run(ended_at + DRAIN_MS)
        self._check_the_end()
        return Outcome(
            effects_digest=self.cluster.effects_digest(),
            num_events=self.cluster.num_events,
            num_commits=len(self.commits.participations),
            participants=tuple(self.commits.participations),
            ended_at_ms=ended_at,
            reasons=tuple(each.entry.close_reason for each in self.chain.chain if isinstance(each.entry, Commit)),
        )

    def is_finished(self) -> bool:
        return self.world.syncer is not None and self.world.syncer.told_finished

    def _expect_liveness(self) -> None:
        """8: after faults stop, every live learner adopts a fresh version of every fragment in bounded time."""
        clock = self.cluster.clockwork
        before = list(self.syncer_disk.versions)

        def fresh_everywhere() -> bool:
            adopted = [
                learner.training.adopted_versions
                for index, learner in enumerate(self.learners)
                if index not in self._gone and learner.training is not None
            ]
            return all(versions.get(p, -1) > before[p] for versions in adopted for p in range(len(before)))

        clock.run(clock.now + LIVENESS_MS, lambda: fresh_everywhere() or self.is_finished())
        assert fresh_everywhere() or self.is_finished(), f"not live: {self._whereabouts()}"

    def _check_the_end(self) -> None:
        head = self.syncer_disk.chain[-1].digest
        assert not self.cluster.bad_blobs & {
            each.contribution.digest
            for signed in self.syncer_disk.chain
            if isinstance(signed.entry, Commit)
            for each in signed.entry.participants
        }
        learners = [learner for index, learner in enumerate(self.learners) if index not in self._gone]
        for member in [*learners, *self.followers]:
            assert member.alive and member.told_finished, f"{member.peer[:8]} never heard of the end"
            assert member.core.ledger.head_digest == head
            assert member.theta == self.syncer_disk.theta, f"{member.peer[:8]} holds another Theta"
            assert member.core.ledger.tokens == self.syncer_disk.tokens
            assert member.core.ledger.num_commits == len(self.commits.participations)
        for learner in learners:
            self._check_learner(learner)
        syncer = self.world.syncer
        assert syncer is not None and syncer.core._syncer is not None
        held = {item.contribution.blob for p in range(len(self.plan.num_elements)) for item in _held(syncer, p)}
        assert set(syncer.accepted) == held, "blobs are accepted that nobody wants"

    def _check_learner(self, learner: MemberProcess) -> None:
        """Merged tokens are those of the chain; work is nowhere twice, and nowhere lost where nothing was dropped."""
        book = self.tokens.books[learner.peer]
        training = learner.training
        assert training is not None
        tokens = learner.core.status(learner.mono()).tokens
        for p, now in enumerate(tokens):
            on_chain = sum(
                each.tokens_unmerged
                for signed in self.syncer_disk.chain
                if isinstance(signed.entry, Commit) and signed.entry.fragment == p
                for each in signed.entry.participants
                if each.peer == learner.peer
            )
            merged = book.sums[TokensMerged, p]
            assert merged == on_chain or (book.was_lost_unsaved and merged < on_chain), f"{merged} of {on_chain} merged"
            carried = training.replica.carried[p]
            for key, share in carried.items():
                assert -1e-9 <= share <= 1 + 1e-9, (key, share)
                assert self.work.merged[p][key] + share <= 1 + 1e-9, f"{key} is carried and merged"
            if self.plan.odds.shrink == 0 and self.plan.sync.kappa == 1:
                in_books = now.in_flight + now.carried
                exact = sum(tokens_of(key.step) * share for key, share in carried.items())
                assert abs(in_books - exact) < 1e-6, f"fragment {p}: {in_books} in the books, {exact} in the replica"

    def _whereabouts(self) -> str:
        syncer = self.world.syncer
        assert syncer is not None
        waiting = syncer.core.status(syncer.mono()).waiting
        learners = [
            (learner.peer[:8], learner.core.status(learner.mono()).versions, learner.training and learner.training.step)
            for learner in self.learners
        ]
        return f"{waiting}, syncer at {self.syncer_disk.versions}, learners {learners}"


def _held(syncer: SyncerProcess, fragment: int):  # type: ignore[no-untyped-def]
    assert syncer.core._syncer is not None
    return syncer.core._syncer._holdings.of_fragment(fragment).values()  # type: ignore[arg-type]


def learner_id(index: int) -> PeerId:
    return fake_peer(f"learner {index}")


def tokens_of(step: int) -> int:
    """Of an inner step, as `training.py` has it."""
    return 16 + step % 3 * 8


@dataclass(frozen=True)
class Outcome:
    """What a run that passed every checker looked like."""

    effects_digest: str
    num_events: int
    num_commits: int
    participants: tuple[int, ...] = field(default=())
    ended_at_ms: int = 0
    reasons: tuple[str, ...] = ()


def simulate(plan: Plan) -> Outcome:
    return Run(plan).go()
