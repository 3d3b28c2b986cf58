"""When baselines train and with whom: turns, each of which ends in an exchange that everybody who trains waits for.

Nothing of it depends on what is learnt, so it is known before anything is trained: how many steps fit into a time, who
is there, when a budget is spent. A turn of `diloco` is H inner steps of each learner and an outer step; one of the
others is a single step. `data-parallel` stands still while a learner is away (the rules are `sim/outages.py`'s);
`diloco` waits with its exchange; an elastic group goes on with the others, whose batches are then all there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from geo_diloco.errors import ConfigError
from geo_diloco.manifest import RunManifest
from geo_diloco.sim.outages import Group
from geo_diloco.sim.train.budget import Budget
from geo_diloco.sim.train.fleet import Fleet

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """What is trained between two exchanges."""

    learners: tuple[int, ...]
    """Counted from 0."""
    steps: int
    """Of each."""
    ended_at: int
    """Virtual milliseconds."""


class Timetable:
    """The turns of one baseline. May be gone through any number of times."""

    def __init__(self, manifest: RunManifest, fleet: Fleet, *, num_elements: int) -> None:
        self._fleet = fleet
        self._budget = Budget.of(manifest)
        self._tokens_per_step = manifest.rules().tokens_per_step
        self._interval_steps = manifest.sync.interval_steps
        self._bytes = FLOAT32_BYTES * num_elements

    def in_step(self, *, elastic: bool) -> Iterator[Turn]:
        """One model, a step at a time. Raises ConfigError if it stands still for good before its tokens are trained."""
        group = Group(self._fleet.plan, self._joined(0), elastic=elastic)
        joined, now, tokens = self._joined(0), 0, 0
        while not self._budget.is_spent(tokens, now):
            group.follow(now)
            for learner in self._joined(tokens) - joined:
                group.join(learner, now)
            joined = self._joined(tokens)
            began_with = group.here if elastic else joined
            ended = group.run(now, self._fleet.slowest_step_ms_of(began_with) + self._exchange_ms(began_with))
            if ended is None and self._budget.ms == 0:
                raise ConfigError(self._stuck(tokens))
            if ended is None or (self._budget.ms and ended > self._budget.ms):
                return
            now = ended
            learners = began_with & group.here if elastic else joined
            if learners:  # who was away at either end of the step has no part in it
                tokens += len(learners) * self._tokens_per_step
                yield Turn(tuple(sorted(learners)), 1, now)

    def in_rounds(self) -> Iterator[Turn]:
        """Synchronous DiLoCo: every learner its H steps, then an exchange. Who joins does so with a round."""
        groups: dict[int, Group] = {}
        now, tokens = 0, 0
        while not self._budget.is_spent(tokens, now):
            learners = self._joined(tokens)
            for learner in learners - set(groups):
                groups[learner] = Group(self._fleet.plan, {learner}, elastic=True)
            steps, ended = self._round(groups, now, tokens)
            if steps == 0:
                return
            now = ended
            tokens += steps * len(learners) * self._tokens_per_step
            yield Turn(tuple(sorted(learners)), steps, now)

    def _round(self, groups: dict[int, Group], begin_ms: int, tokens: int) -> tuple[int, int]:
        """(inner steps, when its exchange is over): H, or as many as the budget allows for."""
        exchange_ms = self._exchange_ms(frozenset(groups))
        wanted = self._interval_steps
        if self._budget.tokens:
            together = len(groups) * self._tokens_per_step
            wanted = min(wanted, -(-(self._budget.tokens - tokens) // together))
        ends = dict.fromkeys(groups, begin_ms)
        for done in range(wanted):
            later = {i: group.run(ends[i], self._fleet.machines[i].step_ms) for i, group in groups.items()}
            known = {i: at for i, at in later.items() if at is not None}
            if len(known) < len(later) and self._budget.ms == 0:
                raise ConfigError(self._stuck(tokens))
            if len(known) < len(later) or (self._budget.ms and max(known.values()) + exchange_ms > self._budget.ms):
                return done, max(ends.values()) + exchange_ms
            ends = known
        return wanted, max(ends.values()) + exchange_ms

    def _joined(self, tokens: int) -> frozenset[int]:
        return frozenset(i for i, begins_at in enumerate(self._fleet.begins) if tokens >= begins_at)

    def _exchange_ms(self, learners: frozenset[int]) -> int:
        return self._fleet.exchange_ms(self._bytes, learners)

    def _stuck(self, tokens: int) -> str:
        return (
            f"nobody trains any more, {tokens} of {self._budget.tokens} tokens are trained (who is waited for is away "
            "for good); give fewer tokens, --seconds, or a fault plan that lets learners come back"
        )
