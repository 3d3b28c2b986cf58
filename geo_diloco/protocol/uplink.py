"""What a learner makes of its way up: which codec it encodes with, and how many of the rounds it can take part in.

A run may allow several codecs for the push leg. Uploads go one after another, and the schedule asks a learner for a
fragment H/P inner steps after the one before, so a codec *keeps up* if an upload takes no longer than that. The least
lossy that keeps up is the right one: what is lost in encoding is carried, and so comes later. Rates and sizes are
measured, and they wobble: to a lossier codec a learner goes at once, to a less lossy one only with room to spare,
several times in a row.

Pure functions; the answer carries its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from geo_diloco.manifest import CodecName, CodecSpec

ROOM = 0.8
"""Share of the time between two samples that an upload with a less lossy codec may take before that is gone over to."""
STREAK = 4
"""So many samples in a row there must be room."""

_LOSS: tuple[CodecName, ...] = ("none", "bf16", "int8", "int4")
"""Least lossy first; of one name smaller blocks are."""
_TYPICAL: Mapping[CodecName, tuple[int, int]] = {
    "none": (28_800, 0),
    "bf16": (11_100, 0),
    "int8": (7_400, 34_000),
    "int4": (3_200, 34_000),
}
"""Thousandths of a bit an element takes as a rule: without scales, and those of a block. For codecs that this learner
has not used yet; of deltas of a small transformer (`bench codec`)."""


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of the way up when a sample is taken."""

    bytes_per_s: int
    """Moving average; 0 while nothing is measured."""
    interval_ms: int
    """Between two samples of this learner that the schedule asks for; 0 while its step time is not known."""
    num_elements: int
    """Of a fragment, on average."""
    measured: Mapping[CodecSpec, int] = field(default_factory=dict)
    """Thousandths of a bit that an element took, of codecs used before."""

    def upload_ms(self, codec: CodecSpec) -> int:
        """How long a fragment takes."""
        millibits = self.measured.get(codec) or typical_millibits(codec)
        return -(-self.num_elements * millibits // (8 * self.bytes_per_s))

    @property
    def is_known(self) -> bool:
        return self.bytes_per_s > 0 and self.interval_ms > 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, and why that one."""

    codec: CodecSpec
    reason: str = ""
    """Empty where there is nothing to choose."""
    better: CodecSpec | None = None
    """The least lossy one that there was room for at each of the last `streak` samples; none if there was not."""
    streak: int = 0


def choose(before: Choice | None, first: CodecSpec, choices: Sequence[CodecSpec], link: Link) -> Choice:
    """The codec of the next sample. `first`: of a learner that has measured nothing yet; `choices`: what the run allows
    besides. A choice that the run does not allow any more begins anew."""
    allowed = by_loss([first, *choices])
    held = before if before is not None and before.codec in allowed else Choice(first)
    if len(allowed) == 1:
        return Choice(first)
    if not link.is_known:
        return Choice(held.codec, f"{codec_text(held.codec)}: nothing is measured yet")
    place = allowed.index(held.codec)
    if link.upload_ms(held.codec) > link.interval_ms:
        lossier = allowed[place + 1 :]
        codec = next((each for each in lossier if link.upload_ms(each) <= link.interval_ms), allowed[-1])
        return Choice(codec, _why(codec, allowed, link))
    room_ms = int(ROOM * link.interval_ms)
    better = next((each for each in allowed[:place] if link.upload_ms(each) <= room_ms), None)
    if better is None:
        return Choice(held.codec, _why(held.codec, allowed, link))
    streak = held.streak + 1
    if held.better is not None:
        better = max(better, held.better, key=_loss)
    if streak >= STREAK:
        return Choice(better, _why(better, allowed, link))
    return Choice(held.codec, _why(held.codec, allowed, link), better, streak)


def by_loss(codecs: Iterable[CodecSpec]) -> list[CodecSpec]:
    """Each once, the least lossy first."""
    return sorted(dict.fromkeys(codecs), key=_loss)


def _loss(codec: CodecSpec) -> tuple[int, int]:
    return _LOSS.index(codec.name), codec.block


def typical_millibits(codec: CodecSpec) -> int:
    """Thousandths of a bit that an element takes as a rule."""
    flat, scales = _TYPICAL[codec.name]
    return flat + scales // codec.block


def codec_text(codec: CodecSpec) -> str:
    """`int4:64`: its name, and how many elements share a scale."""
    return f"{codec.name}:{codec.block}"


def _why(codec: CodecSpec, allowed: Sequence[CodecSpec], link: Link) -> str:
    """The next less lossy one is what a reader asks about; there is none for the least lossy."""
    place = allowed.index(codec)
    other = allowed[place - 1] if place else codec
    takes = f"{codec_text(other)} would take" if place else "takes"
    rate = f"{8 * link.bytes_per_s / 1e6:.3g} Mbit/s"
    return f"{codec_text(codec)}: {takes} {_times(link.upload_ms(other), link)} a round at {rate}"


def _times(upload_ms: int, link: Link) -> str:
    return f"{upload_ms / 1000:.3g} s of {link.interval_ms / 1000:.3g} s"


def turn_of(upload_ms: int, interval_ms: int) -> int:
    """Every how many-th round can be taken part in, if an upload takes so long."""
    return max(1, -(-upload_ms // interval_ms)) if interval_ms > 0 else 1


def participation(upload_ms: int, interval_ms: int) -> str:
    """Of a learner that can't keep up, for people; empty for one that can."""
    turn = turn_of(upload_ms, interval_ms)
    return "" if turn == 1 else f"takes part in 1 of {turn} rounds: {upload_ms / 1000:.3g} s per upload"
