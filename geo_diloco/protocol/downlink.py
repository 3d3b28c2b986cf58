"""What a learner makes of its way down: whether the updates that the run makes get through to it.

To a learner whose link carries less than that, every commit comes later than the one before. It trains on, but is
asked for versions that it has not reached, and so hands in nothing; that it is only slow can't be seen from its steps.
Both rates are of a time in which updates were waiting without a break: a link that always has something to carry
carries what it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import CodecSpec, Digest, FragmentId, MonoMs, Version
from geo_diloco.protocol.messages import Commit, Entry

WINDOW_MS = 30_000
"""Rates are over one to two of these."""
MARGIN = 1.1
"""By how much more must be needed than comes: both are measured in whole updates."""
WAITING_MAX = 4096
"""Updates remembered; beyond, the oldest are of no interest."""


@dataclass(frozen=True, slots=True)
class _Mark:
    at: MonoMs
    heard: int
    came: int


class Downlink:
    """One learner's way down, as measured. For people: nothing is decided by it."""

    def __init__(self) -> None:
        self._waiting: dict[Digest, Commit] = {}
        """Heard of, and their updates are not here; by entry."""
        self._heard = 0
        self._came = 0
        self._since: MonoMs | None = None
        """Something has been waiting since then; none if nothing is. At first that may be what somebody missed who was
        away, so the first window does not count."""
        self._marks: tuple[_Mark, ...] = ()
        """The beginning of this window and of the one before."""
        self._now = MonoMs(0)

    def heard(self, entry: Entry, digest: Digest, now: MonoMs) -> None:
        """Of a commit whose update is not here."""
        if not isinstance(entry, Commit) or digest in self._waiting:
            return
        self.look(now)
        if len(self._waiting) >= WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[digest] = entry
        self._heard += entry.update.size

    def came(self, digest: Digest, now: MonoMs, *, lost: bool = False) -> None:
        """The update is here, or it can't be had."""
        commit = self._waiting.pop(digest, None)
        if commit is not None:
            self._came += 0 if lost else commit.update.size
        self.look(now)

    def replaced(self, fragment: FragmentId, version: Version, num_bytes: int, now: MonoMs) -> None:
        """A fragment came whole, as one's do who is far behind: its updates are not needed any more."""
        self._came += num_bytes
        for digest, commit in list(self._waiting.items()):
            if commit.fragment == fragment and commit.version <= version:
                del self._waiting[digest]
        self.look(now)

    def look(self, now: MonoMs) -> None:
        """Time has passed."""
        self._now = now
        if not self._waiting:
            self._since, self._marks = None, ()
            return
        self._since = now if self._since is None else self._since
        last = self._marks[0].at if self._marks else self._since
        if now - last >= WINDOW_MS:
            self._marks = (_Mark(now, self._heard, self._came), *self._marks[:1])

    def rates(self) -> tuple[float, float] | None:
        """What comes and what is needed, in Mbit/s, of a link that always has something to carry; none of another."""
        if len(self._marks) < 2 or self._now - self._marks[-1].at < WINDOW_MS:
            return None
        since = self._marks[-1]
        per_ms = 8e-3 / (self._now - since.at)
        return (self._came - since.came) * per_ms, (self._heard - since.heard) * per_ms

    def text(self, codec_down: CodecSpec) -> str:
        """For people; empty where updates get through."""
        rates = self.rates()
        if rates is None or rates[1] <= MARGIN * rates[0]:
            return ""
        thinner = "" if codec_down.name == "int4" else " or a thinner codec (codec.down)"
        return (
            f"behind: its way down carries {rates[0]:.2g} Mbit/s, updates need {rates[1]:.2g} Mbit/s; "
            f"a larger interval (H){thinner} would let it keep up"
        )
