"""What a peer tells whoever started it while all is well: what has changed, and once a minute how it gets on.

Silence and trouble look the same from a chair. Nothing here is for programs: they ask for the status.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import TokensMerged
from geo_diloco.protocol.status import LearnerStatus, PeerStatus
from geo_diloco.runtime.driver import Driver

LOOK_S = 5.0
FIRST_S = 10.0
EVERY_S = 60.0
NAMED_MAX = 4
"""Learners that come or go at once and are named one by one."""


class Telling:
    """Of one process, to its log. For the event loop's thread."""

    def __init__(
        self, driver: Driver, log: EventLog, *, folder: Path, may_serve: bool, is_connected: Callable[[], bool]
    ) -> None:
        """`is_connected`: to whoever serves."""
        self._driver = driver
        self._log = log
        self._folder = folder
        self._may_serve = may_serve
        self._is_connected = is_connected
        self._begun_at = driver.now()
        self._next_at = self._begun_at + FIRST_S * 1000
        self._serves: bool | None = None
        """None before the first look."""
        self._here: dict[str, str] | None = None
        """Learners that are connected, and how they are called; none before the first look at them."""
        self._commits = -1
        self.num_rounds = 0
        """That took work of this learner, since this process began."""

    def merged(self, effect: TokensMerged) -> None:
        """A commit took work of ours, or, with negative tokens, a reform left one behind."""
        if effect.tokens:
            self.num_rounds += 1 if effect.tokens > 0 else -1

    async def run(self) -> None:
        """Until the run is finished or this is cancelled."""
        ledger = self._driver.core.ledger
        while ledger.finished is None:
            self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._driver.wait_until(lambda: self._driver.core.ledger.finished is not None)
            ledger = self._driver.core.ledger
        self._say("finished", self.end_text())

    def look(self) -> None:
        """Say what is new since the last look, and how it goes if it is time for that."""
        now, core = self._driver.now(), self._driver.core
        is_due = now >= self._next_at
        was, self._serves = self._serves, core.serves
        if not (is_due or was or self._serves):
            return
        status = core.status(now)
        if self._serves != was:
            self._here = None
            if self._serves and was is False:
                self._say("syncer", f"this peer serves the run now, in term {core.election.record.term}")
        if self._serves:
            self._tell_learners(status.learners)
            self._tell_first_commit(status)
            self._commits = status.num_commits if self._commits < 0 else self._commits
        if is_due:
            self._next_at = now + EVERY_S * 1000
            self._say("run", self._text(status))
            self._commits = status.num_commits

    def _say(self, topic: str, text: str) -> None:
        self._log.note(topic, text)

    # ---- what changed ----

    def _tell_learners(self, learners: tuple[LearnerStatus, ...]) -> None:
        here: dict[str, str] = {each.peer: f"{each.peer[:8]} ({each.host})" for each in learners if each.connected}
        before, self._here = self._here or {}, here
        for changed, verb in (
            ([here[peer] for peer in here if peer not in before], "trains here"),
            ([before[peer] for peer in before if peer not in here], "has gone"),
        ):
            names = [*changed[:NAMED_MAX], f"{len(changed) - NAMED_MAX} more"][: len(changed)]
            if names:
                verb = verb if len(changed) == 1 else {"trains here": "train here", "has gone": "have gone"}[verb]
                self._say("learners", f"{', '.join(names)} {verb}; {_num(len(here), 'learner')} now")

    def _tell_first_commit(self, status: PeerStatus) -> None:
        if self._commits == 0 < status.num_commits:
            self._say("run", f"{_num(status.num_commits, 'commit')}: learners' work is being merged")
            self._commits = status.num_commits

    # ---- how it gets on ----

    def _text(self, status: PeerStatus) -> str:
        run = f"{status.progress:.0%} of the run is done, {_num(status.num_commits, 'commit')}"
        if self._serves:
            return "; ".join(
                filter(None, (run, self._learners_text(status), _loss_text(status), self._held_up(status)))
            )
        if status.training is not None:
            return f"{self._training_text(status)}; {run}; {self._syncer_text(status)}"
        if not self._may_serve:
            return f"following; {run}; {self._syncer_text(status)}"
        if self._is_connected() or status.election is None:
            return f"a standby, ready to take over; {run}; {self._syncer_text(status)}"
        return f"a standby, and nobody serves now: {status.election.candidacy}; {run}"

    def _learners_text(self, status: PeerStatus) -> str:
        here = [each for each in status.learners if each.connected]
        if not here:
            invite = shlex.quote(str(self._folder / "invite.txt"))
            return f"no learners are here: they join with the invite in {invite}"
        rate = sum(each.tokens_per_s or 0 for each in here)
        return f"{_num(len(here), 'learner')}{f' at {rate} tokens/s' if rate else ''}"

    def _held_up(self, status: PeerStatus) -> str:
        if status.num_commits != self._commits or not status.waiting or not status.learners:
            return ""
        return f"no commit in the last minute: fragment {status.waiting[0].fragment} waits: {status.waiting[0].reason}"

    def _training_text(self, status: PeerStatus) -> str:
        mine = status.training
        assert mine is not None
        loss = "" if mine.loss is None else f", loss {mine.loss:.4f}"
        took = f"{mine.tokens} tokens, took part in {_num(self.num_rounds, 'round')}"
        return f"step {mine.step}{loss}, {took}{f' ({status.uplink})' if status.uplink else ''}"

    def _syncer_text(self, status: PeerStatus) -> str:
        opened = self._driver.core.election.opened
        if opened is None or not self._is_connected():
            return "no syncer is there now" + ("" if status.training is None else ", training goes on")
        return f"{opened.syncer[:8]} serves"

    # ---- the end ----

    def end_text(self) -> str:
        """What the run came to, and where its model is."""
        status = self._driver.core.status(self._driver.now())
        facts = [f"{_num(status.num_commits, 'commit')}, {status.tokens_total} tokens merged", _loss_text(status)]
        if status.training is not None:
            facts.append(f"this learner: {self._training_text(status)}")
        beside = self._folder / "standby"  # of a learner that others can reach
        if self._may_serve or beside.is_dir():
            folder = shlex.quote(str(self._folder if self._may_serve else beside))
            facts.append(f"once this process has left: geo-diloco export {folder} --to my-model")
        else:
            facts.append("the model is with the founder and the standbys: geo-diloco export RUN_DIR --to my-model")
        return f"the run is finished ({status.finished}): {'; '.join(filter(None, facts))}"


def _loss_text(status: PeerStatus) -> str:
    return f"held-out loss {status.heldout[-1][1]:.4f}" if status.heldout else ""


def _num(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
