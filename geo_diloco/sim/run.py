"""One simulated run: faults first, watched for safety; then they stop, progress is demanded, and the end looked at."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from geo_diloco.protocol.effects import TokensMerged
from geo_diloco.protocol.messages import Commit
from geo_diloco.sim.chaincheckers import AppendChecker, BranchChecker, DurableChecker, LeaseChecker
from geo_diloco.sim.checkers import (
    CommitChecker,
    PruneChecker,
    RulesChecker,
    StateChecker,
    TokenChecker,
    WorkChecker,
)
from geo_diloco.sim.contributions import ContributionWatch, fresh_in
from geo_diloco.sim.plans import Plan
from geo_diloco.sim.process import Process
from geo_diloco.sim.world import World

LIVENESS_MS = 25_000
"""After faults stop and somebody serves, within this every fragment is committed and adopted anew by every learner."""
DRAIN_MS = 20_000
"""After the run's end, within this everyone has heard of it."""
FILM_SHOWN = 60


class Violation(AssertionError):
    """What broke, with the seed and the last lines of the film."""

    def __init__(self, world: World, what: str) -> None:
        self.what = what
        film = "\n".join(list(world.film)[-FILM_SHOWN:])
        super().__init__(f"{film}\nseed {world.plan.seed} at {world.clock.now} ms: {what}")


@dataclass(frozen=True)
class Outcome:
    """What a run that passed every checker looked like."""

    effects_digest: str
    num_events: int
    num_commits: int
    num_elections: int
    num_amendments: int
    num_branches: int
    participants: tuple[int, ...] = field(default=())
    ended_at_ms: int = 0
    simulated_ms: int = 0
    gap_ms: int = 0
    """Longest time without a durable commit, from the first fault on (or from the first commit)."""
    num_pruned: int = 0
    """Updates let go of, all disks together."""
    reasons: tuple[str, ...] = ()
    fresh: tuple[int, ...] = ()
    """Participants of each commit whose work was based on the version before."""
    round_ms: float = 0.0
    """Mean time between the commits of a fragment."""
    admitted: Mapping[int, float] = field(default_factory=dict)
    """Share of each host's decided contributions that was merged; the others were refused."""


class Run:
    """One simulated run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan)
        self.appends = AppendChecker(self.world)
        self.chain = DurableChecker(self.world)
        self.commits = CommitChecker(self.world)
        self.work = WorkChecker(self.world)
        self.states = StateChecker(self.world)
        self.tokens = TokenChecker(self.world)
        self.rules = RulesChecker(self.world)
        self.pruning = PruneChecker(self.world)
        self.contributions = ContributionWatch(self.world)
        self.world.watches = (
            self.appends,
            self.chain,
            self.commits,
            self.work,
            self.states,
            self.tokens,
            self.pruning,
            LeaseChecker(self.world),
            BranchChecker(self.world),
            self.rules,
            self.contributions,
        )

    @property
    def learners(self) -> list[Process]:
        """Those that run now."""
        return [each for each in self.world.processes() if each.learn is not None]

    def go(self, until_ms: int = 600_000) -> Outcome:
        """Raises Violation."""
        try:
            return self._go(until_ms)
        except AssertionError as error:
            raise Violation(self.world, str(error) or _where(error)) from error

    def _go(self, until_ms: int) -> Outcome:
        clock = self.world.clock
        self.world.begin()
        clock.run(self.plan.faults_until_ms)
        if self.plan.faults_until_ms:
            self.world.heal()
            if not self.is_finished():
                self._expect_liveness()
        clock.run(until_ms, self.is_finished)
        assert self.is_finished(), f"the run never ended: {self._whereabouts()}"
        ended_at = clock.now
        clock.run(ended_at + DRAIN_MS)
        if not self._is_level():  # a syncer whom learners did not reach may have handed over just now
            clock.run(clock.now + LIVENESS_MS, self._is_level)
        self._check_the_end()
        return Outcome(
            effects_digest=self.world.effects_digest(),
            num_events=self.world.num_events,
            num_commits=len(self.commits.participations),
            num_elections=self.appends.num_opens,
            num_amendments=self.rules.num_amendments,
            num_branches=self.chain.num_branches,
            participants=tuple(self.commits.participations),
            ended_at_ms=ended_at,
            simulated_ms=clock.now,
            gap_ms=self._gap_ms(),
            num_pruned=self.pruning.num_pruned,
            reasons=tuple(each.close_reason for each in self._commits()),
            fresh=tuple(fresh_in(each) for each in self._commits()),
            round_ms=self._round_ms(),
            admitted=self.contributions.admitted(self._commits()),
        )

    def _commits(self) -> list[Commit]:
        return [each.entry for each in self.chain.chain if isinstance(each.entry, Commit)]

    def _round_ms(self) -> float:
        times, num_fragments = self.commits.times, len(self.plan.num_elements)
        return (times[-1] - times[0]) * num_fragments / (len(times) - 1) if len(times) > 1 else 0.0

    def _gap_ms(self) -> int:
        times = self.commits.times
        begin = min((fault.at_ms for fault in self.plan.faults), default=0)
        return max((after - before for before, after in pairwise(times) if after > begin), default=0)

    def is_finished(self) -> bool:
        if not self.world.was_told_finished:
            return False
        return any(each.told_finished and each.core.serves for each in self.world.able_processes())

    def _is_level(self) -> bool:
        """Whether somebody serves, and everybody has all that is durable."""
        head = self.chain.chain[-1].digest
        return self.world.syncer() is not None and all(
            each.frozen or each.core.ledger.head_digest == head for each in self.world.processes()
        )

    def _expect_liveness(self) -> None:
        """8: after faults stop, every live learner adopts a fresh version of every fragment in bounded time, counted
        from when people have done what the electors could not, if they must."""
        clock = self.world.clock
        wait_ms = LIVENESS_MS + 3 * int(self.plan.election.lease_seconds * 1000)
        seen, before = self.world.num_acts, self._versions()

        def is_live() -> bool:
            return self._is_fresh(before) or self.is_finished()

        def is_over() -> bool:
            return is_live() or self.world.num_acts != seen

        for _ in range(2 * len(self.world.hosts)):
            clock.run(clock.now + wait_ms, is_over)
            if self.world.num_acts == seen:
                break
            seen, before = self.world.num_acts, self._versions()
        assert is_live(), f"not live: {self._whereabouts()}"

    def _versions(self) -> list[int]:
        """Of what is durable, per fragment."""
        versions = [0] * len(self.plan.num_elements)
        for signed in self.chain.chain:
            if isinstance(signed.entry, Commit):
                versions[signed.entry.fragment] = signed.entry.version
        return versions

    def _is_fresh(self, before: list[int]) -> bool:
        adopted = (each.learn.training.adopted_versions for each in self.learners if each.learn is not None)
        return all(versions.get(p, -1) > before[p] for versions in adopted for p in range(len(before)))

    def _check_the_end(self) -> None:
        chain = self.chain.chain
        assert not self.world.bad_blobs & {
            each.contribution.digest
            for signed in chain
            if isinstance(signed.entry, Commit)
            for each in signed.entry.participants
        }
        syncer = self.world.syncer()
        assert syncer is not None
        theta = [state.theta for state in syncer.chain.outer]
        for process in self.world.processes():
            who = f"host {process.host.index}"
            if process.frozen:
                continue
            assert process.told_finished, f"{who} never heard of the end: {self._whereabouts()}"
            assert process.core.ledger.head_digest == chain[-1].digest, f"{who} is at {process.core.ledger.seq}"
            assert [state.theta for state in process.chain.outer] == theta, f"{who} holds another Theta"
            assert process.core.ledger.tokens == syncer.core.ledger.tokens
            assert process.core.ledger.num_commits == len(self.commits.participations)
        on_chain: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Tokens merged, by learner and fragment."""
        for signed in chain:
            if isinstance(signed.entry, Commit):
                for each in signed.entry.participants:
                    on_chain[each.peer, signed.entry.fragment] += each.tokens_unmerged
        for learner in self.learners:
            if not learner.frozen:
                self._check_learner(learner, on_chain)

    def _check_learner(self, learner: Process, on_chain: Mapping[tuple[str, int], int]) -> None:
        """Merged tokens are those of the chain; work is nowhere twice, and nowhere lost where nothing was dropped."""
        book = self.tokens.books[learner.peer]
        assert learner.learn is not None
        training = learner.learn.training
        tokens = learner.core.status(learner.mono()).tokens
        for p, now in enumerate(tokens):
            may_lack = book.was_lost_unsaved or book.began_again
            merged, taken = book.sums[TokensMerged, p], on_chain.get((learner.peer, p), 0)
            assert merged == taken or (may_lack and merged < taken), f"{merged} of {taken} merged"
            carried = training.replica.carried[p]
            for key, share in carried.items():
                assert -1e-9 <= share <= 1 + 1e-9, (key, share)
                assert self.work.merged[p][key] + share <= 1 + 1e-9, f"{key} is carried and merged"
            if self.plan.odds.shrink == 0 and self.plan.sync.kappa == 1:
                in_books = now.in_flight + now.carried
                exact = sum(tokens_of(key.step) * share for key, share in carried.items())
                assert abs(in_books - exact) < 1e-6, f"fragment {p}: {in_books} in the books, {exact} in the replica"

    def _whereabouts(self) -> str:
        lines = []
        for process in self.world.processes():
            status = process.core.status(process.mono())
            election = status.election
            assert election is not None
            lines.append(
                f"  {process.host.index} {status.role}{' frozen' if process.frozen else ''} seq {status.seq} versions "
                f"{status.versions} outer {[each.version for each in process.chain.outer]} term {election.term} head "
                f"{tuple(election.head.rank)} best {tuple(process.core.election.best.rank)} candidacy: "
                f"{election.candidacy}; vote: {election.vote}; append: {election.append}; {election.roster_plan}; "
                f"waiting {[each.reason for each in status.waiting]}; sought {process.sought and process.sought[:6]}; "
                f"step {process.learn and process.learn.training.step}"
            )
        return "\n" + "\n".join(lines)


def _where(error: AssertionError) -> str:
    """Of an assertion that says nothing itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"assertion in {frame.name}, {frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}"


def tokens_of(step: int) -> int:
    """Of an inner step, as `training.py` has it."""
    return 16 + step % 3 * 8


def simulate(plan: Plan) -> Outcome:
    return Run(plan).go()
