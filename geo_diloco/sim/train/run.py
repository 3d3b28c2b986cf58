"""One run under virtual time, from founding to the last commit, and what it came to.

The budget is of tokens *trained*, so that arms that throw work away don't get more of it, or of virtual time. When it
is spent learners leave in good order, what they had sampled is merged, and Theta is measured as it stands then. A run
in which nothing can happen any more, or in which nobody has trained for long, is given up with the syncer's own reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from geo_diloco.config import Fault
from geo_diloco.errors import ConfigError
from geo_diloco.manifest import ElectionSpec, FragmentId, RunManifest
from geo_diloco.numerics.fragments import gather, layout_from_module, named_trainable, scatter_
from geo_diloco.runtime.merger import OuterState
from geo_diloco.sim.clock import Clockwork
from geo_diloco.sim.outages import NEVER, Group, occurrences
from geo_diloco.sim.train.budget import Budget
from geo_diloco.sim.train.disk import MemberDisk
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.sim.train.member import MemberParts, MemberProcess
from geo_diloco.sim.train.syncer import SyncerProcess
from geo_diloco.sim.train.world import World, peer_named
from geo_diloco.tape import TokenSummary, summarize_boots
from geo_diloco.training.evaluate import Evaluator, heldout_accuracy
from geo_diloco.training.models import build_model

DRAIN_MS = 10_000
"""After the budget is spent, for what is on its way to be merged."""
STALL_MS = 600_000
"""Nobody trained for so long: nobody ever will."""
LOOK_EVERY_MS = 10_000


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Theta's held-out loss, in mean nats per token, when so many tokens were trained; none if it is not finite."""

    tokens: int
    virtual_ms: int
    heldout: float | None
    accuracy: float | None = None
    """On the held-out images; none of a language model."""


class Gauge:
    """Measures Theta on the held-out sequences at every `1/num_points` of the budget."""

    def __init__(self, manifest: RunManifest, *, num_points: int) -> None:
        self.curve: list[CurvePoint] = []
        self._evaluator = Evaluator(manifest)
        self._budget, self._num_points = Budget.of(manifest), num_points

    def loss(self, model: nn.Module) -> float | None:
        return self._evaluator.measure(model)

    def look(self, tokens: int, virtual_ms: int, theta: Callable[[], nn.Module]) -> None:
        """Measure if the next point of the curve is reached; the last one is for `end`."""
        reached = len(self.curve)
        if reached < self._num_points and self._budget.reaches(tokens, virtual_ms, part=reached, of=self._num_points):
            self.end(tokens, virtual_ms, theta())

    def end(self, tokens: int, virtual_ms: int, theta: nn.Module) -> None:
        self.curve.append(CurvePoint(tokens, virtual_ms, self.loss(theta), heldout_accuracy(theta)))


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What a simulated run left."""

    curve: tuple[CurvePoint, ...]
    """From Theta_0 to the end; the last point is Theta after the last commit."""
    tokens: TokenSummary
    syncer: SyncerProcess
    effects_digest: str
    wall_s: float


@dataclass
class Simulation:
    """One run of the manifest by a fleet. The same manifest, fleet and seed give the same run."""

    manifest: RunManifest
    fleet: Fleet
    seed: int
    num_points: int = 20
    progress: Callable[[float], None] = lambda share: None
    """Told, after each inner step, how much of the budget is spent."""
    syncer: SyncerProcess = field(init=False)
    members: list[MemberProcess] = field(init=False)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # with more, sums depend on the machine
        alone = ElectionSpec(electors=1)
        self.manifest = replace(self.manifest, founder=peer_named("founder"), election=alone, nonce=f"{self.seed:032x}")
        model = build_model(self.manifest.model, with_weights=True)
        layout = layout_from_module(model, num_fragments=self.manifest.sync.num_fragments)
        theta_0 = [gather(named_trainable(model), layout, p) for p in range(layout.num_fragments)]
        self._model = model
        self._measured = build_model(self.manifest.model)
        self._gauge = Gauge(self.manifest, num_points=self.num_points)
        self.world = World(self.manifest, layout, self.fleet, Clockwork(self.seed), on_trained=self._look)
        self.syncer = SyncerProcess(self.world, theta_0, lambda outer: self._gauge.loss(self._with_theta(outer)))
        crashing = {fault.learner - 1 for fault in self.fleet.plan.faults if fault.kind == "crash"}
        self._disks = [MemberDisk(keeps_checkpoints=i in crashing) for i in range(self.fleet.num_learners)]
        self._holds = [0] * self.fleet.num_learners
        self._is_reshaped = [False] * self.fleet.num_learners
        self.members = [self._member(index) for index in range(self.fleet.num_founders)]

    def _member(self, index: int) -> MemberProcess:
        parts = MemberParts(
            peer=peer_named(f"learner {index}"),
            machine=self.fleet.machines[index],
            syncer=self.syncer,
            model=self._model,
            disk=self._disks[index],
        )
        return MemberProcess(self.world, parts)

    def _look(self, tokens: int) -> None:
        while len(self.members) < self.fleet.num_learners and tokens >= self.fleet.begins[len(self.members)]:
            self.members.append(self._member(len(self.members)))
            self._start(len(self.members) - 1)
        self.progress(self.world.budget.share(tokens, self.world.clock.now))
        self._gauge.look(tokens, self.world.clock.now, lambda: self._with_theta(self.syncer.outer))

    def _with_theta(self, outer: OuterState) -> nn.Module:
        """Theta as a model of its own, to be measured."""
        tensors = named_trainable(self._measured)
        for fragment in range(outer.layout.num_fragments):
            scatter_(outer.theta(FragmentId(fragment)), tensors, outer.layout, fragment)
        return self._measured

    # ---- from founding to the end

    def go(self) -> RunOutcome:
        """Raises ConfigError if nobody trains any more and the budget is not spent."""
        began = time.perf_counter()
        self._look(0)
        self.syncer.start()
        self._start_members()
        self._plan_next(occurrences(self.fleet.plan.of_learners, self.fleet.plan.repeat_s))
        for index in sorted({fault.learner - 1 for fault in self.fleet.plan.of_slices}):
            self._follow(index, Group(self.fleet.plan, {index}, elastic=True, with_learners=False))
        self._run_to_the_budget()
        trained_at = self.world.clock.now
        for member in self.members:
            member.leave()
        self.world.clock.run(trained_at + DRAIN_MS)
        ended_at = max(trained_at, self.syncer.last_commit_at)
        self._gauge.end(self.world.num_tokens, ended_at, self._with_theta(self.syncer.outer))
        return RunOutcome(
            curve=tuple(self._gauge.curve),
            tokens=self._books(),
            syncer=self.syncer,
            effects_digest=self.world.effects_digest(),
            wall_s=time.perf_counter() - began,
        )

    def _start_members(self) -> None:
        """So that Hellos arrive in the order of the learners: shares of the data are lent in that order."""
        latest_ms = max(member.machine.delay_ms for member in self.members)
        for index, member in enumerate(self.members):
            lead_ms = 3 * (latest_ms - member.machine.delay_ms)
            self.world.clock.after(10 + index + lead_ms, partial(member.start, founding=True))

    def _run_to_the_budget(self) -> None:
        clock, world = self.world.clock, self.world
        tokens, trained_at, until_ms = -1, 0, 0
        if world.budget.ms:
            clock.at(world.budget.ms, lambda: None)  # so that the time comes, whatever happens

        def done() -> bool:
            return world.is_over and all(member.is_at_rest for member in self.members)

        while not done():
            until_ms += LOOK_EVERY_MS
            clock.run(until_ms, done)
            if world.num_tokens > tokens or world.budget.ms:
                tokens, trained_at = world.num_tokens, until_ms
            elif clock.is_idle or until_ms - trained_at > STALL_MS:
                waiting = self.syncer.core.status(self.syncer.now()).waiting
                reason = waiting[0].reason if waiting else "the run is finished"
                raise ConfigError(
                    f"nobody trains any more, {world.num_tokens} of {self.manifest.stop.tokens} tokens are trained "
                    f"({reason}); give fewer tokens, a smaller quorum or a fault plan that lets learners come back"
                )

    def _books(self) -> TokenSummary:
        entries = [link.entry for link in self.syncer.chain]
        tapes = [self.world.tapes[member.peer] for member in self.members]
        return summarize_boots(tapes, entries, self.world.layout.num_elements)

    def theta(self) -> Sequence[Tensor]:
        """Per fragment, as the syncer has it."""
        return [self.syncer.outer.theta(FragmentId(p)) for p in range(self.world.layout.num_fragments)]

    def trained_model(self) -> nn.Module:
        """Theta as the syncer has it, as a model of the manifest's."""
        return self._with_theta(self.syncer.outer)

    # ---- faults

    def _plan_next(self, coming: Iterator[tuple[int, int, Fault]]) -> None:
        """One after another: a plan that is repeated has no last fault."""
        if (coming_next := next(coming, None)) is None:
            return
        begins_at, ends_at, fault = coming_next
        index, clock = fault.learner - 1, self.world.clock

        def begins() -> None:
            self._plan_next(coming)
            self._begins(fault, index)

        clock.at(begins_at, begins)
        if ends_at != NEVER:
            clock.at(ends_at, lambda: self._ends(fault, index))

    def _follow(self, index: int, group: Group) -> None:
        """A learner that is a group of chips stands still, as a whole, while it is reshaped."""
        now = self.world.clock.now
        group.follow(now)
        stands = group.stands_until > now
        if stands != self._is_reshaped[index]:
            self._is_reshaped[index] = stands
            (self._hold if stands else self._release)(index)
        coming = [at for at in (group.next_at, group.stands_until) if at is not None and now < at < NEVER]
        if coming:
            self.world.clock.at(min(coming), lambda: self._follow(index, group))

    def _begins(self, fault: Fault, index: int) -> None:
        if fault.kind == "freeze":
            self._hold(index)
        if index >= len(self.members):
            return  # has not come yet
        match fault.kind:
            case "crash":
                self.members[index].crash()
            case "cut":
                self.world.cut.add(self.members[index].peer)
                self.members[index].lose_link()

    def _ends(self, fault: Fault, index: int) -> None:
        if fault.kind == "freeze":
            self._release(index)
        if index >= len(self.members):
            return
        member = self.members[index]
        match fault.kind:
            case "crash" if not member.is_alive and not self.world.is_over:
                self.members[index] = self._member(index)
                self._start(index)
            case "cut":
                self.world.cut.discard(member.peer)

    def _start(self, index: int) -> None:
        self.members[index].start()
        if self._holds[index]:
            self.members[index].freeze()

    def _hold(self, index: int) -> None:
        """For one more reason."""
        self._holds[index] += 1
        if self._holds[index] == 1 and index < len(self.members):
            self.members[index].freeze()

    def _release(self, index: int) -> None:
        self._holds[index] -= 1
        if self._holds[index] == 0 and index < len(self.members) and self.members[index].is_frozen:
            self.members[index].thaw()
