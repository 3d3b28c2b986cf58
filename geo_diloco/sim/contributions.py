"""What became of everybody's contributions in a simulated run: how many were merged, and how many refused.

It checks nothing; scenarios have bounds on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from geo_diloco.protocol.effects import Effect
from geo_diloco.protocol.events import Event, Received
from geo_diloco.protocol.messages import Commit, ContributionId, Decision
from geo_diloco.sim.world import Watch

if TYPE_CHECKING:
    from geo_diloco.sim.process import Process
    from geo_diloco.sim.world import World


class ContributionWatch(Watch):
    """Counts what learners hear."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._refused: dict[str, set[ContributionId]] = defaultdict(set)

    def handled(self, process: Process, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, Received) and isinstance(event.message, Decision) and event.message.verdict == "refused":
            self._refused[process.peer].add(event.message.id)

    def admitted(self, commits: Sequence[Commit]) -> Mapping[int, float]:
        """By host: the share of what was decided that is in a commit."""
        merged: dict[str, int] = defaultdict(int)
        for commit in commits:
            for each in commit.participants:
                merged[each.peer] += 1
        found = {}
        for host in self._world.hosts:
            decided = merged[host.peer] + len(self._refused[host.peer])
            if decided:
                found[host.index] = merged[host.peer] / decided
        return found


def fresh_in(commit: Commit) -> int:
    """Participants whose work was based on the version before."""
    return sum(each.base_version == commit.version - 1 for each in commit.participants)
