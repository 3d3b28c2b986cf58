"""A learner's codec: taken when it samples, from what it measured, within the rules in force then."""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import CodecSpec, FragmentId, RunRules
from geo_diloco.protocol.effects import Upload
from geo_diloco.protocol.events import DeltaEncoded, SampleTaken, UploadDone
from geo_diloco.protocol.messages import BlobRef, Decision, Progress
from geo_diloco.protocol.peer import Peer
from geo_diloco.protocol.uplink import STREAK
from geo_diloco.sim.fakes import LAYOUT, RUN, fake_digest
from tests.support.chains import ANN, FOUNDER, SYNC, ChainBuilder
from tests.support.single import BOOT, P0, Learning, known, only, said

ELEMENTS = 1_000_000
BF16, INT8, INT4 = CodecSpec(name="bf16"), CodecSpec(name="int8"), CodecSpec(name="int4")
INTERVAL_MS = SYNC.interval_steps * 100 // 2
"""Steps of 100 ms, two fragments."""
BYTES = {"int4": 460_000, "int8": 950_000, "bf16": 1_390_000}


class Linked(Learning):
    """A learner of two large fragments, in a run that allows several codecs."""

    def __init__(self, chain: ChainBuilder, *, lockstep: bool = False) -> None:
        sync = replace(SYNC, lockstep=lockstep)
        rules = RunRules(sync=sync, num_shares=4, founder=FOUNDER, codec_up_choices=(BF16, INT8))
        self.core = Peer(peer=ANN, boot=BOOT, role="learner", rules=rules, run=RUN, layout_digest=LAYOUT)
        self.step = self.tokens = 0
        self.load(chain.snapshot(), [])
        self.connect()

    def hand_in(self, chain: ChainBuilder, round_: int, *, bytes_per_s: int) -> CodecSpec:
        """One round of fragment 0, from the question to its commit; what it was encoded with."""
        self.hear(self.asked(0, round_))
        self.train()
        self.give(SampleTaken(P0, round_, self.step, self.tokens, self.tokens))
        codec = self.core.codec_for(P0)
        blob = BlobRef(fake_digest("delta", self.step), BYTES[codec.name])
        (upload,) = only(self.give(DeltaEncoded(P0, round_, blob, 1.0)), Upload)
        self.give(UploadDone(upload.blob, bytes_per_s))
        return codec


def refused(learning: Linked) -> None:
    """The work goes back, so that there can be another sample without a chain that grows."""
    (claim,) = learning.core.undecided()
    learning.hear(Decision(id=claim, verdict="refused", reason="not now"))
    learning.train(SYNC.interval_steps)


def rounds(learning: Linked, chain: ChainBuilder, number: int, *, bytes_per_s: int) -> list[str]:
    taken = []
    for round_ in range(1, number + 1):
        taken.append(learning.hand_in(chain, round_, bytes_per_s=bytes_per_s).name)
        refused(learning)
    return taken


def fits(codec: str) -> int:
    """A rate at which that codec keeps up with room to spare, and the next better one does not."""
    return BYTES[codec] * 1000 * 10 // 7 // INTERVAL_MS


def test_it_begins_with_the_runs_codec_and_goes_to_what_its_link_has_room_for() -> None:
    chain = ChainBuilder.opened((ELEMENTS, ELEMENTS))
    learning = Linked(chain)
    assert rounds(learning, chain, STREAK + 3, bytes_per_s=fits("int8")) == ["int4"] * (STREAK) + ["int8"] * 3


def test_status_says_why_and_so_does_progress() -> None:
    chain = ChainBuilder.opened((ELEMENTS, ELEMENTS))
    learning = Linked(chain)
    rounds(learning, chain, 2, bytes_per_s=fits("int4"))
    learning.now += 1000
    (progress,) = said(learning.train(), Progress)
    assert progress.uplink.startswith("int4:64: int8:64 would take 0.")
    assert progress.uplink.endswith(" Mbit/s")
    assert learning.core.status(learning.now).uplink == progress.uplink


def test_a_link_that_became_slow_changes_the_next_sample() -> None:
    chain = ChainBuilder.opened((ELEMENTS, ELEMENTS))
    learning = Linked(chain)
    assert rounds(learning, chain, STREAK + 2, bytes_per_s=fits("bf16"))[-1] == "bf16"
    assert rounds(learning, chain, 20, bytes_per_s=fits("int4"))[-1] == "int4"


def test_choices_that_the_owner_takes_away_are_not_used_any_more() -> None:
    chain = ChainBuilder.opened((ELEMENTS, ELEMENTS))
    learning = Linked(chain)
    rounds(learning, chain, STREAK + 2, bytes_per_s=fits("bf16"))
    known(learning, chain.amendment(1, codec_up_choices=()))
    assert learning.hand_in(chain, 99, bytes_per_s=fits("bf16")) == INT4


def test_in_lockstep_nothing_that_is_measured_decides() -> None:
    chain = ChainBuilder.opened((ELEMENTS, ELEMENTS))
    learning = Linked(chain, lockstep=True)
    assert set(rounds(learning, chain, STREAK + 2, bytes_per_s=10**9)) == {"int4"}


def test_who_encodes_nothing_is_told_the_codec_in_force() -> None:
    chain = ChainBuilder.opened((ELEMENTS, ELEMENTS))
    assert Linked(chain).core.codec_for(FragmentId(1)) == INT4
