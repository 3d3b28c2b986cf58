"""Tokens balance at whatever moment a learner's last process ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from geo_diloco import tape
from geo_diloco.manifest import BootId, MonoMs, RunRules
from geo_diloco.protocol.effects import PersistAccounts
from geo_diloco.protocol.events import (
    Applied,
    ChainLoaded,
    Connected,
    EntryStored,
    Event,
    Received,
    Resumed,
    Saved,
    SnapshotLoaded,
    StepDone,
)
from geo_diloco.protocol.messages import Allotment, Commit, Durable, Message, Welcome
from geo_diloco.protocol.seat import HelloFacts
from geo_diloco.sim.fakes import LAYOUT, RUN
from geo_diloco.tape.balance import FragmentBalance
from tests.support.chains import ANN, FOUNDER, FOUNDER_BOOT, SYNC, ChainBuilder, participant
from tests.support.single import P0, only


def boot(number: int) -> tape.Boot:
    return tape.Boot(
        peer=ANN,
        boot=BootId(f"{number:016d}"),
        role="learner",
        run=RUN,
        layout_digest=LAYOUT,
        hello=HelloFacts(),
        rules=RunRules(sync=SYNC, num_shares=4, founder=FOUNDER),
    )


class Process:
    """One start of the learner: a core, and the tape it writes."""

    def __init__(self, path: Path, number: int) -> None:
        self.core = boot(number).fresh_core()
        self.writer = tape.TapeWriter(path, boot(number))
        self.saved: list[PersistAccounts] = []

    def hear(self, *events: Event) -> None:
        for event in events:
            self.writer.event(event, MonoMs(0))
            effects = self.core.handle(event, MonoMs(0))
            self.saved += only(effects, PersistAccounts)
            if effects:
                self.writer.effects(effects)

    def train(self, first: int, last: int) -> None:
        self.hear(*(StepDone(step, 100 * step, 1000, 2.0, 100 * step) for step in range(first, last + 1)))


def welcome(chain: ChainBuilder) -> list[Event]:
    ledger = chain.ledger()
    message = Welcome(
        head_seq=ledger.seq,
        head_digest=ledger.head_digest,
        merged_until=(0, 0),
        resume_step=0,
        allotment=Allotment(share=0, num_shares=4, cursor=0, pass_number=0),
    )
    return [Connected(FOUNDER, seeking=True), heard(chain, message)]


def heard(chain: ChainBuilder, message: Message) -> Received:
    ledger = chain.ledger()
    return Received(FOUNDER, ledger.branch, ledger.term, FOUNDER_BOOT, message)


@pytest.mark.parametrize("reached", [False, True], ids=["known only", "applied"])
def test_work_of_a_dead_process_that_was_merged_and_not_adopted_counts_once(tmp_path: Path, reached: bool) -> None:
    """The first process saves at step 3, hands in (0, 4], and dies after step 5. The second knows nothing of what was
    handed in, and ends before it adopts the commit that took it."""
    path = tmp_path / "tape.jsonl"
    chain = ChainBuilder.opened()
    first = Process(path, 1)
    first.hear(chain.snapshot(), ChainLoaded(), *welcome(chain))
    first.train(1, 3)
    first.hear(Saved(1, 3, 300))
    first.train(4, 5)
    first.writer.close()

    (persist,) = first.saved
    commit = chain.commit(0, participant(ANN, chain.bases[0], 0, 0, 4, tokens=400))
    assert isinstance(commit.entry, Commit)
    second = Process(path, 2)
    assert isinstance(persist.resume_at, SnapshotLoaded)
    second.hear(persist.resume_at, ChainLoaded(), Resumed(3, 300, persist.accounts, 2, 200), *welcome(chain), commit)
    second.hear(heard(chain, Durable(seq=commit.entry.header.seq, digest=commit.digest)))
    if reached:
        version, digest = commit.entry.version, commit.entry.state_digest
        second.hear(EntryStored(commit.digest), Applied(P0, version, digest))
    second.writer.close()

    summary = tape.summarize_tokens([path], [event.entry for event in chain.events], chain.num_elements)
    assert summary.balances
    (learner,) = summary.learners
    assert learner.fragments == (
        FragmentBalance(trained=500, merged=400, dropped=learner.fragments[0].dropped),
        FragmentBalance(trained=500, carried=300, dropped=learner.fragments[1].dropped),
    )
    assert learner.fragments[0].dropped == {"crashed": 100, "restarted": 0}
    assert learner.fragments[1].dropped == {"crashed": 200}
