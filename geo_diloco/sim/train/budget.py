"""When a simulated run is over: after so many tokens trained by all learners, or after so much virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.manifest import RunManifest


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One of the two; the other is 0."""

    tokens: int = 0
    ms: int = 0

    @classmethod
    def of(cls, manifest: RunManifest) -> Budget:
        """The manifest's stop rule, which counts tokens merged, read as one of tokens trained."""
        stop = manifest.stop
        return cls(tokens=stop.tokens, ms=0 if stop.tokens else round(60_000 * stop.minutes))

    def is_spent(self, tokens: int, now_ms: int) -> bool:
        return tokens >= self.tokens if self.tokens else now_ms >= self.ms

    def share(self, tokens: int, now_ms: int) -> float:
        """Of it, spent: from 0 to 1."""
        return min(1.0, tokens / self.tokens if self.tokens else now_ms / self.ms)

    def reaches(self, tokens: int, now_ms: int, *, part: int, of: int) -> bool:
        """Are `part` of `of` parts spent?"""
        return tokens >= part * self.tokens // of if self.tokens else now_ms >= part * self.ms // of
