"""When a run is over: tokens, minutes or commits, whichever limit that is set comes first, and how far along it is.

Minutes count from the first inner step that is heard of, so that nobody's start-up is on the run's time; a run that is
resumed goes on from the progress its chain records.
"""

from __future__ import annotations

from geo_diloco.manifest import MonoMs, RunRules, Seq
from geo_diloco.protocol.ledger import Ledger

MINUTE_MS = 60_000


class StopRule:
    """`reason` is set once and stays."""

    def __init__(self, rules: RunRules) -> None:
        self._stop = rules.stop
        self._began_at: int | None = None
        self._looked_at: Seq | None = None
        """Where the chain stood when its commits and tokens were counted last."""
        self.reason: str | None = None

    def begin(self, ledger: Ledger, now: MonoMs) -> None:
        """Someone trains: the minutes begin, once. What was served in earlier terms counts."""
        if self._began_at is not None:
            return
        served_ms = int(ledger.progress * self._stop.minutes * MINUTE_MS)
        self._began_at = now - served_ms

    @property
    def deadline(self) -> MonoMs | None:
        """When the minutes are over; none without that limit or before they begin."""
        if self._stop.minutes == 0 or self.reason is not None or self._began_at is None:
            return None
        return MonoMs(self._began_at + int(self._stop.minutes * MINUTE_MS))

    def look(self, ledger: Ledger, now: MonoMs) -> None:
        """Decide, from the chain and the time, whether the run is over."""
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
        shares = [0.0]
        if self._stop.tokens:
            shares.append(tokens_total / self._stop.tokens)
        if self._stop.commits:
            shares.append(num_commits / self._stop.commits)
        if self._stop.minutes and self._began_at is not None:
            shares.append((now - self._began_at) / (self._stop.minutes * MINUTE_MS))
        return min(1.0, max(shares))
