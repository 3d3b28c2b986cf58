"""The training thread of a simulated learner: inner steps on a timer, orders carried out at their boundaries."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from geo_diloco.manifest import FragmentId
from geo_diloco.protocol.effects import Adopt, Reset, StartTraining, TakeSample
from geo_diloco.protocol.events import Adopted, Event, SampleTaken, Saved, StepDone
from geo_diloco.protocol.schedule import Duty, lockstep_duties
from geo_diloco.sim.work import PPM, Replica, StepKey, Work

if TYPE_CHECKING:
    from geo_diloco.sim.disk import Checkpoint
    from geo_diloco.sim.process import Process

Order = TakeSample | Adopt | Reset


class Training:
    """Never waits, except in lockstep for the orders that the schedule names."""

    def __init__(self, process: Process, step_ms: int) -> None:
        self._process = process
        self._step_ms = self._told_ms = step_ms
        self._sync = process.world.plan.sync
        least, most = process.world.plan.step_spread
        self._jitter_ms = (least * step_ms // 100, most * step_ms // 100)
        self.replica = Replica(len(process.world.plan.num_elements))
        self.step = self.tokens = self.cursor = 0
        self.num_orders_carried_out = 0
        self.adopted_versions: dict[int, int] = {}
        self._orders: deque[Order] = deque()
        self._duties: deque[Duty] = deque()
        self._running = False
        self._finished = False
        self._save = 0
        self._saved_at = 0

    def resume(self, checkpoint: Checkpoint) -> None:
        accounts = checkpoint.accounts
        self.replica = checkpoint.replica.copy()
        self.step, self.tokens = accounts.step, accounts.tokens
        self._save = accounts.save

    def start(self, effect: StartTraining) -> None:
        """May come again with another share of the data."""
        self.cursor = effect.cursor
        if self._running or self._finished:
            return
        assert effect.resume_step >= self.step, "a step number would be used again"
        self.step = effect.resume_step
        self._running = True
        self._saved_at = self._process.clock.now
        self._next_step()

    def order(self, order: Order) -> None:
        self._orders.append(order)
        if self._duties:
            self._do_duties()

    def finish(self) -> None:
        """The run is done: training ends, what was ordered before is still carried out."""
        self._finished, self._running = True, False
        self._duties.clear()
        while self._orders:
            self._carry_out(self._orders.popleft())

    def stop_with_save(self) -> None:
        if self._running:
            self._running = False
            self._save_now()

    def _next_step(self) -> None:
        jitter_ms = 0 if self._sync.lockstep else self._process.clock.between(self._jitter_ms)
        self._told_ms = self._step_ms + (jitter_ms if self._process.world.plan.tells_each_step else 0)
        self._process.clock.after(self._step_ms + jitter_ms, self._step_ends)

    def _step_ends(self) -> None:
        process = self._process
        if not process.alive or not self._running:
            return
        if process.frozen:
            self._next_step()
            return
        self.step += 1
        tokens = 16 + self.step % 3 * 8
        self.tokens += tokens
        self.cursor += tokens
        if process.world.plan.is_watched:
            self.replica.train(StepKey(process.peer, process.boot, self.step))
        self._report(StepDone(self.step, self.tokens, self._told_ms * 1_000, 2.0, self.cursor))
        if self._sync.lockstep:
            self._duties.extend(lockstep_duties(self.step, self._sync))
            self._do_duties()
            return
        while self._orders:
            self._carry_out(self._orders.popleft())
        self._boundary_over()

    def _boundary_over(self) -> None:
        clock, every_ms = self._process.clock, self._process.world.plan.save_every_ms
        if every_ms > 0 and clock.now - self._saved_at >= every_ms:
            self._save_now()
        self._next_step()

    def _do_duties(self) -> None:
        """Lockstep: the order that the first duty names, or wait for it."""
        while self._duties:
            duty = self._duties[0]
            wanted = TakeSample if duty.kind == "sample" else Adopt
            order = next(
                (each for each in self._orders if isinstance(each, wanted) and each.fragment == duty.fragment), None
            )
            if order is None:
                return
            self._orders.remove(order)
            self._duties.popleft()
            self._carry_out(order)
        self._boundary_over()

    def _carry_out(self, order: Order) -> None:
        process = self._process
        self.num_orders_carried_out += 1
        if isinstance(order, TakeSample):
            delta = self.replica.sample(order.fragment)
            self._report(SampleTaken(order.fragment, order.round, self.step, self.tokens, self.cursor), delta=delta)
            return
        before = self.adopted_versions.get(order.fragment, -1)
        reformed = process.core.election.record.lineage > 0
        assert order.version > before or reformed, (
            f"version {order.version} of fragment {order.fragment} after {before}"
        )
        self.adopted_versions[order.fragment] = order.version
        scale_ppm = 0
        if isinstance(order, Reset):
            self.replica.reset(order.fragment)
        else:
            mine = None if order.participant is None else process.world.contents[order.participant.digest]
            scale_ppm = self._scale_ppm()
            self.replica.adopt(order.fragment, mine, scale_ppm)
        self._report(Adopted(FragmentId(order.fragment), order.version, self.step, self.tokens, scale_ppm))

    def _scale_ppm(self) -> int:
        """s: kappa, and sometimes less because the carry is large."""
        chance, odds = self._process.clock.random, self._process.world.plan.odds
        scale_ppm = round(self._sync.kappa * PPM)
        return chance.randrange(scale_ppm) if scale_ppm and chance.random() < odds.shrink else scale_ppm

    def _save_now(self) -> None:
        self._save += 1
        self._saved_at = self._process.clock.now
        self._report(Saved(self._save, self.step, self.tokens), replica=self.replica.copy())

    def _report(self, event: Event, *, delta: Work | None = None, replica: Replica | None = None) -> None:
        assert self._process.learn is not None
        self._process.learn.report(event, delta=delta, replica=replica)
