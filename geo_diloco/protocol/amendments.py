"""What the run's owner may change while it goes on, and what is in force by that.

The rules in force are a pure function of the manifest's rules and of the amendments on the chain, so everybody who
folds the same entries goes by the same rules. An owner's order counts up and names run and branch: it can be appended
once, in its place, and nowhere else. Of the amendments on a chain only those are kept that still decide something, with
the owner's signature, so that a snapshot can carry them and nobody has to believe who made it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from geo_diloco.manifest import CODEC_CHOICES_MAX, BranchId, CodecSpec, PeerId, RunId, RunRules, Seq


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What an amendment sets, by the manifest's names; none: that stays as it was."""

    commits: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    eta: float | None = None
    mu: float | None = None
    quorum: int | None = None
    grace: bool | None = None
    grace_gamma: float | None = None
    codec_up: CodecSpec | None = None
    codec_up_choices: tuple[CodecSpec, ...] | None = None
    """All of them; empty: none besides `codec_up`."""
    codec_down: CodecSpec | None = None

    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        values = ((name, getattr(self, name)) for name in AMENDABLE)
        return {name: value for name, value in values if value is not None}


AMENDABLE = tuple(field.name for field in dataclasses.fields(Changes))
SECTIONS = {
    "stop": ("commits", "tokens", "minutes"),
    "outer": ("eta", "mu"),
    "sync": ("quorum", "grace", "grace_gamma"),
}
"""Where a name is in the manifest."""
CODECS = ("codec_up", "codec_up_choices", "codec_down")
"""These stand for themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AmendmentOrder:
    """What the owner signs."""

    run: RunId
    branch: BranchId
    """Of the chain that it is meant for: an order that a reform left behind is worth nothing after it."""
    number: int
    """Counts the owner's amendments along the chain, from 1."""
    changes: Changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """How progress goes on where the stop rule was changed: from where it stood to 1 at the new end, so that it neither
    jumps nor goes back, and neither do learning rates."""

    progress: float
    """When the stop rule changed."""
    share: float
    """Of the new stop rule that was done by then, in [0, 1]."""

    def progress_at(self, share: float) -> float:
        """In [0, 1], never below where it began."""
        if share >= 1 or self.share >= 1:
            return 1.0
        gone = max(0.0, (share - self.share) / (1 - self.share))
        return min(1.0, self.progress + (1 - self.progress) * gone)

    def share_at(self, progress: float) -> float:
        """The other way round. Where progress was at its end already, it does not tell how much has been done since: no
        more than then, so that a run that is prolonged does not end at the next change of its syncer."""
        if self.progress >= 1:
            return min(1.0, self.share)
        if progress >= 1:
            return 1.0
        gone = max(0.0, (progress - self.progress) / (1 - self.progress))
        return min(1.0, self.share + (1 - self.share) * gone)


UNSTRETCHED = Stretch(progress=0.0, share=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Amended:
    """An amendment of the chain, as ledgers and snapshots keep it."""

    seq: Seq
    """Of its entry."""
    branch: BranchId
    owner: PeerId
    number: int
    changes: Changes
    stretch: Stretch
    order: str
    """The owner's order as signed."""


def with_amendment(amended: tuple[Amended, ...], new: Amended) -> tuple[Amended, ...]:
    """One more: the newest stays, and of the others those with a value that no later one has changed."""
    kept = [new]
    decided = set(new.changes.given())
    for each in reversed(amended):
        names = each.changes.given().keys()
        if names - decided:
            kept.append(each)
        decided |= names
    return tuple(reversed(kept))


def newest_number(amended: tuple[Amended, ...]) -> int:
    """0 before the first."""
    return amended[-1].number if amended else 0


def stretch_of(amended: tuple[Amended, ...]) -> Stretch:
    """In force after those."""
    return amended[-1].stretch if amended else UNSTRETCHED


def rules_at(rules: RunRules, amended: tuple[Amended, ...]) -> RunRules:
    """In force after those, on top of the manifest's."""
    for each in amended:
        rules = rules_after(rules, each.changes)
    return rules


def rules_after(rules: RunRules, changes: Changes) -> RunRules:
    """Those rules with the changes made."""
    given = changes.given()
    for section, names in SECTIONS.items():
        values = {name: given[name] for name in names if name in given}
        if values:
            rules = replace(rules, **{section: replace(getattr(rules, section), **values)})
    codecs = {name: given[name] for name in CODECS if name in given}
    return replace(rules, **codecs) if codecs else rules


def amended_at(amended: tuple[Amended, ...]) -> Mapping[str, Seq]:
    """Of each value that is not the manifest's: the entry that set it."""
    return {name: each.seq for each in amended for name in each.changes.given()}


def codecs_up(rules: RunRules, amended: tuple[Amended, ...]) -> tuple[CodecSpec, ...]:
    """What a contribution may be encoded with, what is in force first: one that was encoded before an amendment is as
    good as it was. `rules` are the manifest's."""
    allowed: list[CodecSpec] = [rules.codec_up, *rules.codec_up_choices]
    for each in amended:
        rules = rules_after(rules, each.changes)
        allowed = [rules.codec_up, *rules.codec_up_choices, *allowed]
    return tuple(dict.fromkeys(allowed))


def why_not_changes(changes: Changes) -> str | None:
    """Why no run can have such rules; none if it can. The same ranges as of a manifest."""
    given = changes.given()
    if not given:
        return "an amendment that changes nothing"
    for name, value in given.items():
        if name in CODECS:
            codecs = (value,) if isinstance(value, CodecSpec) else value
            if len(codecs) > CODEC_CHOICES_MAX:
                return f"{name} with {len(codecs)} codecs: {CODEC_CHOICES_MAX} are allowed"
            odd = next((each.block for each in codecs if not _is_block(each.block)), None)
            if odd is not None:
                return f"{name} with blocks of {odd}: a power of two from 16 to 4096 is allowed"
        elif name in _RANGES and not _RANGES[name][0] <= value <= _RANGES[name][1]:
            return f"{name} = {value}: {_RANGES[name][0]:g} to {_RANGES[name][1]:g} is allowed"
    if changes.eta == 0 or changes.mu == 1:
        return "eta is above 0, and mu below 1"
    return None


def _is_block(size: int) -> bool:
    return 16 <= size <= 4096 and not size & (size - 1)


_COUNT_MAX = (1 << 53) - 1
_RANGES: dict[str, tuple[float, float]] = {
    "commits": (0, _COUNT_MAX),
    "tokens": (0, _COUNT_MAX),
    "minutes": (0.0, 1e7),
    "eta": (0.0, 10.0),
    "mu": (0.0, 1.0),
    "quorum": (1, 1024),
    "grace_gamma": (0.0, 1.0),
}
