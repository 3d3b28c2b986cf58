"""When a run is over: tokens, minutes or commits, whichever limit that is set comes first, and how far along it is.

Minutes count from the first inner step that is heard of, so that nobody's start-up is on the run's time; a run that is
resumed goes on from the progress its chain records. If the owner changes the rule, progress goes on from where it
stands to 1 at the new end (`amendments.Stretch`).
"""

from __future__ import annotations

from geo_diloco.manifest import MonoMs, RunRules, Seq, StopSpec
from geo_diloco.protocol.amendments import UNSTRETCHED, Stretch
from geo_diloco.protocol.ledger import Ledger

MINUTE_MS = 60_000


class StopRule:
    """`reason` is set once and stays, unless the rule is amended."""

    def __init__(self, rules: RunRules, stretch: Stretch = UNSTRETCHED) -> None:
        self._stop = rules.stop
        self._stretch = stretch
        self._began_at: int | None = None
        self._looked_at: Seq | None = None
        """Where the chain stood when its commits and tokens were counted last."""
        self._now = MonoMs(0)
        """When it was last looked at."""
        self.reason: str | None = None

    def begin(self, ledger: Ledger, now: MonoMs) -> None:
        """Someone trains: the minutes begin, once. What was served in earlier terms counts."""
        if self._began_at is not None:
            return
        served_ms = int(self._stretch.share_at(ledger.progress) * self._stop.minutes * MINUTE_MS)
        self._began_at = now - served_ms

    @property
    def deadline(self) -> MonoMs | None:
        """When the minutes are over; none without that limit or before they begin."""
        if self._stop.minutes == 0 or self.reason is not None or self._began_at is None:
            return None
        return MonoMs(self._began_at + int(self._stop.minutes * MINUTE_MS))

    def look(self, ledger: Ledger, now: MonoMs) -> None:
        """Decide, from the chain and the time, whether the run is over."""
        self._now = now
        if self.reason is None and ledger.seq != self._looked_at:
            self._looked_at = ledger.seq
            self.reason = self._reached(ledger)
        deadline = self.deadline
        if deadline is not None and now >= deadline:
            self.reason = f"{self._stop.minutes:g} minutes are over"

    def _reached(self, ledger: Ledger) -> str | None:
        if self._stop.commits and ledger.num_commits >= self._stop.commits:
            return f"{ledger.num_commits} commits made"
        if self._stop.tokens and ledger.tokens_total() >= self._stop.tokens:
            return f"token budget of {self._stop.tokens} reached"
        return None

    def progress(self, tokens_total: int, num_commits: int, now: MonoMs) -> float:
        """Share of the run done in [0, 1]: the largest share of any limit; 0 without limits."""
        return self._stretch.progress_at(self._share(self._stop, tokens_total, num_commits, now))

    def _share(self, stop: StopSpec, tokens_total: int, num_commits: int, now: MonoMs) -> float:
        shares = [0.0]
        if stop.tokens:
            shares.append(tokens_total / stop.tokens)
        if stop.commits:
            shares.append(num_commits / stop.commits)
        if stop.minutes and self._began_at is not None:
            shares.append((now - self._began_at) / (stop.minutes * MINUTE_MS))
        return min(1.0, max(shares))

    def stretched_to(self, stop: StopSpec, ledger: Ledger) -> Stretch:
        """How progress would go on with another rule from here."""
        if stop == self._stop:
            return self._stretch
        tokens_total, num_commits = ledger.tokens_total(), ledger.num_commits
        progress = max(ledger.progress, self.progress(tokens_total, num_commits, self._now))
        return Stretch(progress=progress, share=self._share(stop, tokens_total, num_commits, self._now))

    def amend(self, stop: StopSpec, stretch: Stretch) -> None:
        """The rule is another from here on: whether the run is over is to be seen anew."""
        self._stop, self._stretch, self.reason, self._looked_at = stop, stretch, None, None
