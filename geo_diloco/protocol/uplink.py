"""What a learner makes of its way up: which codec it encodes with, and how many of the rounds it can take part in.

A run may allow several codecs for the push leg. Uploads go one after another, and the schedule asks a learner for a
fragment H/P inner steps after the one before, so a codec *keeps up* if an upload takes no longer than that. The least
lossy that keeps up is the right one: what is lost in encoding is carried, and so comes later. Rates and sizes are
measured, and they wobble: to a lossier codec a learner goes at once, to a less lossy one only with room to spare,
several times in a row.

The decisions are pure functions, and their answers carry their reasons; `Uplink` holds what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from geo_diloco.manifest import CodecName, CodecSpec, FragmentId, MonoMs, RunRules
from geo_diloco.protocol.events import UploadDone
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import moving_average
from geo_diloco.protocol.messages import BlobRef, Contribution
from geo_diloco.protocol.uploads import Uploads

ROOM = 0.8
"""Share of the time between two samples that an upload with a less lossy codec may take before that is gone over to."""
STREAK = 4
"""So many samples in a row there must be room."""

STEPS_AHEAD = 2
"""What is asked for after one boundary is sampled at the next: with less the link would stand idle. More, where it
takes longer until a sample is encoded."""

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
    if held.better in allowed:
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


class Uplink:
    """One learner's way up, as measured."""

    def __init__(self, rules: RunRules, ledger: Ledger) -> None:
        self._sync = rules.sync
        self._ledger = ledger
        self._choice: Choice | None = None
        self._millibits: dict[CodecSpec, int] = {}
        """Thousandths of a bit an element took, moving average."""
        self._step_time_us: int | None = None
        self._now = MonoMs(0)
        """Of the last inner-step boundary."""
        self._began_at = MonoMs(0)
        """When the upload that is under way, or was last, began."""
        self._ordered_at: dict[FragmentId, MonoMs] = {}
        """When a sample was ordered that is not encoded yet."""
        self._ahead_ms = 0
        """From such an order until there is something to upload, moving average; a machine that sleeps in between
        makes it long for a while."""
        self.bytes_per_s = 0
        """Moving average; 0 while nothing is measured."""

    def stepped(self, step_time_us: int, now: MonoMs) -> None:
        """An inner step was done."""
        self._now = now
        if step_time_us > 0:
            self._step_time_us = moving_average(self._step_time_us, step_time_us)

    def ordered(self, fragment: FragmentId) -> None:
        """A sample."""
        self._ordered_at[fragment] = self._now

    def encoded(self, codec: CodecSpec, contribution: Contribution, now: MonoMs) -> None:
        ordered_at = self._ordered_at.pop(contribution.id.fragment, now)
        self._ahead_ms = moving_average(self._ahead_ms or None, max(1, now - ordered_at))
        elements = self._ledger.num_elements[contribution.id.fragment]
        millibits = -(-8000 * contribution.blob.size // max(1, elements))
        self._millibits[codec] = moving_average(self._millibits.get(codec), millibits)

    def began(self) -> None:
        """An upload is under way from now on."""
        self._began_at = self._now

    def done(self, event: UploadDone) -> None:
        if event.bytes_per_s > 0:
            self.bytes_per_s = moving_average(self.bytes_per_s or None, event.bytes_per_s)

    def take_codec(self, rules: RunRules) -> CodecSpec:
        """For the sample that was taken just now. In lockstep nothing that is measured decides anything."""
        choices = () if self._sync.lockstep else rules.codec_up_choices
        self._choice = choose(self._choice, rules.codec_up, choices, self._link())
        return self._choice.codec

    def has_room(self, uploads: Uploads, *, being_encoded: int) -> bool:
        """Whether a fragment may be sampled at the next boundary. Where uploads keep up with the schedule, always.
        Where they don't, when all that came before is sent by the time that the sample is encoded: whoever samples
        earlier hands in older work, and no more of it, because uploads go one after another. Until a rate is measured
        there is room for one."""
        if uploads.is_idle and not being_encoded:
            return True
        link = self._link()
        if not link.is_known or self._choice is None or self._step_time_us is None:
            return False
        upload_ms = link.upload_ms(self._choice.codec)
        if upload_ms <= link.interval_ms:
            return True
        left_ms = 1000 * uploads.queued_bytes // link.bytes_per_s + being_encoded * upload_ms
        left_ms += self._left_ms(uploads.under_way, link)
        return left_ms <= max(STEPS_AHEAD * self._step_time_us // 1000, min(self._ahead_ms, upload_ms))

    def _left_ms(self, under_way: BlobRef | None, link: Link) -> int:
        if under_way is None:
            return 0
        return max(0, 1000 * under_way.size // link.bytes_per_s - (self._now - self._began_at))

    def rests(self, steps: int) -> bool:
        """Whether a fragment that was sampled so many inner steps ago is left to others this time: on a link that takes
        n times too long each has every n-th round, and none is starved by those whose turn happens to come when the
        link is free."""
        upload_ms, interval_ms = self._times()
        if upload_ms <= interval_ms:
            return False
        return 4 * steps < 3 * self._sync.interval_steps * upload_ms // interval_ms

    def turn(self) -> int:
        """Every how many-th round of a fragment is taken part in."""
        return turn_of(*self._times())

    def text(self) -> str:
        """For people; empty where nothing was chosen and all that is asked for can be handed in."""
        reason = "" if self._choice is None else self._choice.reason
        return "; ".join(filter(None, (reason, participation(*self._times()))))

    def _link(self) -> Link:
        num_fragments = max(1, len(self._ledger.num_elements))
        interval_us = self._sync.interval_steps * (self._step_time_us or 0) // num_fragments
        return Link(
            bytes_per_s=self.bytes_per_s,
            interval_ms=interval_us // 1000,
            num_elements=sum(self._ledger.num_elements) // num_fragments,
            measured=self._millibits,
        )

    def _times(self) -> tuple[int, int]:
        """An upload's, and between two samples, in milliseconds; zeros while not known."""
        link = self._link()
        if self._choice is None or not link.is_known:
            return 0, 0
        return link.upload_ms(self._choice.codec), link.interval_ms
