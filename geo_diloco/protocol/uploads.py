"""A learner's way up: what waits to be handed in, in which order it goes, and what was measured of it.

Apart from `learner` because this is about the link alone: it knows blobs, sizes and rates, not where tokens are. What
to make of the measurements is decided in `uplink`.
"""

from __future__ import annotations

from geo_diloco.manifest import CodecSpec, FragmentId, MonoMs, RunRules
from geo_diloco.protocol.effects import Upload
from geo_diloco.protocol.events import UploadDone
from geo_diloco.protocol.ledger import Ledger
from geo_diloco.protocol.membership import moving_average
from geo_diloco.protocol.messages import BlobRef, Contribution
from geo_diloco.protocol.uplink import Choice, Link, choose, participation, turn_of

STEPS_AHEAD = 2
"""What is asked for after one boundary is sampled at the next: with less the link would stand idle."""


class Uploads:
    """Of one learner. At most one is under way."""

    def __init__(self, rules: RunRules, ledger: Ledger) -> None:
        self._sync = rules.sync
        self._ledger = ledger
        self._under_way: BlobRef | None = None
        self._began_at = MonoMs(0)
        self._now = MonoMs(0)
        """Of the last inner-step boundary."""
        self._waiting: list[Contribution] = []
        self._overtaken: dict[BlobRef, int] = {}
        """How often each that waits was passed over."""
        self._collect_at: dict[FragmentId, str] = {}
        self._choice: Choice | None = None
        self._millibits: dict[CodecSpec, int] = {}
        """Thousandths of a bit an element took, moving average."""
        self._step_time_us: int | None = None
        self.bytes_per_s = 0
        """Moving average; 0 while nothing is measured."""

    # -- the queue ------------------------------------------------------------------------------------------------

    def collected_at(self, fragment: FragmentId, place: str) -> None:
        self._collect_at[fragment] = place

    def add(self, contribution: Contribution) -> None:
        if not self.has(contribution):
            self._waiting.append(contribution)

    def has(self, contribution: Contribution) -> bool:
        """Whether it is on its way, or waits for that."""
        return self._under_way == contribution.blob or any(each.blob == contribution.blob for each in self._waiting)

    def begin_again(self, contributions: list[Contribution]) -> None:
        """All that is undecided, and nothing else, is to be handed in, to whoever it is now."""
        self._waiting = contributions

    def withdraw(self, blob: BlobRef) -> None:
        """It is decided. What is under way ends by itself, and unheard."""
        self._waiting = [each for each in self._waiting if each.blob != blob]
        self.over(blob)

    def over(self, blob: BlobRef) -> None:
        if self._under_way == blob:
            self._under_way = None

    def next(self) -> list[Upload]:
        """One at a time, newest round first; one that runs is finished. What was overtaken once per fragment goes
        before: on a link that is always behind, a round that lacks its quorum is an old one, and would always lose."""
        if self._under_way is not None or not self._waiting:
            return []
        overtaken = {each.blob: self._overtaken.get(each.blob, 0) for each in self._waiting}
        oldest = next((each for each in self._waiting if overtaken[each.blob] >= len(self._ledger.heads)), None)
        chosen = oldest or max(self._waiting, key=lambda each: (each.round, each.id.last_step))
        self._waiting.remove(chosen)
        self._overtaken = {each.blob: overtaken[each.blob] + 1 for each in self._waiting}
        self._under_way, self._began_at = chosen.blob, self._now
        return [Upload(chosen.blob, self._collect_at.get(chosen.id.fragment, ""))]

    def has_room(self, *, being_encoded: int) -> bool:
        """Whether a fragment may be sampled at the next boundary. Where uploads keep up with the schedule, always.
        Where they don't, when all that came before is through but for two steps: whoever samples earlier hands in
        older work, and no more of it, because uploads go one after another. Until a rate is measured there is room for
        one."""
        if self.is_idle and not being_encoded:
            return True
        link = self._link()
        if not link.is_known or self._choice is None or self._step_time_us is None:
            return False
        upload_ms = link.upload_ms(self._choice.codec)
        if upload_ms <= link.interval_ms:
            return True
        waiting = sum(each.blob.size for each in self._waiting)
        left_ms = 1000 * waiting // link.bytes_per_s + being_encoded * upload_ms
        if self._under_way is not None:
            left_ms += max(0, 1000 * self._under_way.size // link.bytes_per_s - (self._now - self._began_at))
        return left_ms <= STEPS_AHEAD * self._step_time_us // 1000

    def rests(self, steps: int) -> bool:
        """Whether a fragment that was sampled so many inner steps ago is left to others this time: on a link that takes
        n times too long each has every n-th round, and none is starved by those whose turn happens to come when the
        link is free."""
        upload_ms, interval_ms = self._times()
        if upload_ms <= interval_ms:
            return False
        return 4 * steps < 3 * self._sync.interval_steps * upload_ms // interval_ms

    @property
    def is_idle(self) -> bool:
        return self._under_way is None and not self._waiting

    # -- what is measured -----------------------------------------------------------------------------------------

    def stepped(self, step_time_us: int, now: MonoMs) -> None:
        self._now = now
        if step_time_us > 0:
            self._step_time_us = moving_average(self._step_time_us, step_time_us)

    def encoded(self, codec: CodecSpec, contribution: Contribution) -> None:
        elements = self._ledger.num_elements[contribution.id.fragment]
        millibits = -(-8000 * contribution.blob.size // max(1, elements))
        self._millibits[codec] = moving_average(self._millibits.get(codec), millibits)

    def done(self, event: UploadDone) -> None:
        if event.bytes_per_s > 0:
            self.bytes_per_s = moving_average(self.bytes_per_s or None, event.bytes_per_s)

    def take_codec(self, rules: RunRules) -> CodecSpec:
        """For the sample that was taken just now. In lockstep nothing that is measured decides anything."""
        choices = () if self._sync.lockstep else rules.codec_up_choices
        self._choice = choose(self._choice, rules.codec_up, choices, self._link())
        return self._choice.codec

    def _link(self) -> Link:
        num_fragments = max(1, len(self._ledger.num_elements))
        interval_us = self._sync.interval_steps * (self._step_time_us or 0) // num_fragments
        return Link(
            bytes_per_s=self.bytes_per_s,
            interval_ms=interval_us // 1000,
            num_elements=sum(self._ledger.num_elements) // num_fragments,
            measured=self._millibits,
        )

    def turn(self) -> int:
        """Every how many-th round of a fragment is taken part in."""
        return turn_of(*self._times())

    def text(self) -> str:
        """For people; empty where nothing was chosen and all that is asked for can be handed in."""
        reason = "" if self._choice is None else self._choice.reason
        return "; ".join(filter(None, (reason, participation(*self._times()))))

    def _times(self) -> tuple[int, int]:
        """An upload's, and between two samples, in milliseconds; zeros while not known."""
        link = self._link()
        if self._choice is None or not link.is_known:
            return 0, 0
        return link.upload_ms(self._choice.codec), link.interval_ms
