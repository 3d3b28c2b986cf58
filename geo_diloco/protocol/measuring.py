"""When the held-out loss of Theta is measured: at the beginning, every so often if Theta changed, and at the end."""

from __future__ import annotations

from geo_diloco.manifest import EvalSpec, MonoMs

PATIENCE_MS = 120_000
"""A measurement that takes longer is given up."""


class Measuring:
    """One measurement at a time. Counts commits to know whether Theta changed."""

    def __init__(self, spec: EvalSpec) -> None:
        self._every_ms = int(spec.every_seconds * 1000)
        self._since: MonoMs | None = None
        self._next_at: MonoMs | None = None
        self._measured_commits = -1

    def begin(self, now: MonoMs) -> None:
        self._next_at = now

    def up_to_date(self, num_commits: int) -> bool:
        """Theta as it stands is measured, or was given up."""
        return self._since is None and self._measured_commits == num_commits

    def due(self, num_commits: int, now: MonoMs, *, last: bool) -> bool:
        """Whether to measure now; if so it counts as begun. `last`: nothing will change any more."""
        if self._since is not None:
            if now - self._since < PATIENCE_MS:
                return False
            self._since = None
            return False
        by_time = self._next_at is not None and now >= self._next_at
        if num_commits == self._measured_commits or not (by_time or last):
            return False
        self._next_at = MonoMs(now + self._every_ms) if self._every_ms > 0 else None
        self._since, self._measured_commits = now, num_commits
        return True

    def done(self) -> None:
        self._since = None

    @property
    def deadline(self) -> MonoMs | None:
        return self._next_at if self._since is None else MonoMs(self._since + PATIENCE_MS)
