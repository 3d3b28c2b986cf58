"""What a peer tells whoever started it: nothing that is usual reads like trouble, and silence lasts a minute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geo_diloco.manifest import FragmentId, PeerId, Version
from geo_diloco.node.telling import EVERY_S, FIRST_S, NAMED_MAX, Telling
from geo_diloco.observability import EventLog
from geo_diloco.protocol.effects import TokensMerged

ANN, BEN, SYNCER = (PeerId(letter * 64) for letter in "abc")
MERGED = TokensMerged(FragmentId(0), Version(1), 100)


def learner(peer: PeerId, *, connected: bool = True, rate: int | None = 900) -> Any:
    return SimpleNamespace(peer=peer, host="box", connected=connected, tokens_per_s=rate)


class Peer:
    """Its core and its driver, as far as is looked at, and a clock to turn."""

    def __init__(self, folder: Path, *, may_serve: bool = True) -> None:
        self.ms = 1_000_000
        self.serves = False
        self.ledger = SimpleNamespace(finished=None)
        self.election = SimpleNamespace(opened=SimpleNamespace(syncer=SYNCER), record=SimpleNamespace(term=2))
        self.is_connected = True
        self.facts: dict[str, Any] = {
            "progress": 0.25,
            "num_commits": 0,
            "tokens_total": 4096,
            "finished": None,
            "heldout": ((7, 2.5),),
            "learners": (),
            "waiting": (),
            "training": None,
            "uplink": "",
            "election": SimpleNamespace(candidacy="1 of the 2 electors needed are here"),
        }
        self.file = folder / "log.jsonl"
        driver: Any = self
        log = EventLog(self.file)
        connected: Callable[[], bool] = lambda: self.is_connected  # noqa: E731
        self.telling = Telling(driver, log, folder=folder, may_serve=may_serve, is_connected=connected)

    @property
    def core(self) -> Peer:
        return self

    def now(self) -> int:
        return self.ms

    def status(self, now: int) -> Any:
        return SimpleNamespace(**self.facts)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        self.ledger.finished = self.facts["finished"] = "3 minutes are over"

    def look(self, after_s: float = 0.0, **facts: Any) -> list[str]:
        """What is said now that was not before."""
        before = len(self.said())
        self.ms += round(after_s * 1000)
        self.facts |= facts
        self.telling.look()
        return self.said()[before:]

    def said(self) -> list[str]:
        lines = map(json.loads, self.file.read_text().splitlines())
        return [f"{line['topic']}: {line['text']}" for line in lines]


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer(tmp_path)


def test_a_learner_says_once_a_minute_how_it_gets_on(peer: Peer) -> None:
    training = SimpleNamespace(step=7, tokens=7168, loss=2.25)
    assert peer.look() == []
    peer.telling.merged(MERGED)
    said = "step 7, loss 2.2500, 7168 tokens, took part in 1 round; 25% of the run is done, 3 commits; cccccccc serves"
    assert peer.look(FIRST_S, training=training, num_commits=3) == [f"run: {said}"]
    training.step = 8
    assert peer.look(EVERY_S - 1) == []
    peer.is_connected = False
    assert peer.look(1, uplink="takes part in 1 of 2 rounds")[0].endswith(
        "(takes part in 1 of 2 rounds); 25% of the run is done, 3 commits; no syncer is there now, training goes on"
    )


def test_rounds_that_a_reform_left_behind_are_not_counted(peer: Peer) -> None:
    peer.telling.merged(MERGED)
    peer.telling.merged(TokensMerged(FragmentId(0), Version(1), 0))
    peer.telling.merged(TokensMerged(FragmentId(0), Version(1), -100))
    assert peer.telling.num_rounds == 0


def test_a_syncer_tells_of_learners_as_they_come_and_go_and_of_the_first_commit(peer: Peer) -> None:
    peer.serves = True
    assert peer.look() == [], "whoever started it was told that it is open"
    assert peer.look(5, learners=(learner(ANN),)) == ["learners: aaaaaaaa (box) trains here; 1 learner now"]
    both = (learner(ANN), learner(BEN))
    assert peer.look(1, learners=both, num_commits=1) == [
        "learners: bbbbbbbb (box) trains here; 2 learners now",
        "run: 1 commit: learners' work is being merged",
    ]
    gone = (learner(ANN, connected=False), learner(BEN))
    assert peer.look(1, learners=gone, num_commits=2) == ["learners: aaaaaaaa (box) has gone; 1 learner now"]
    said = "run: 25% of the run is done, 3 commits; 1 learner at 900 tokens/s; held-out loss 2.5000"
    assert peer.look(FIRST_S, num_commits=3) == [said]


def test_many_learners_at_once_are_one_line(peer: Peer) -> None:
    peer.serves = True
    many = tuple(learner(PeerId(f"{number:x}" * 64)) for number in range(NAMED_MAX + 5))
    (said,) = peer.look(1, learners=many)
    assert said.endswith(f", 5 more train here; {NAMED_MAX + 5} learners now") and said.count("(box)") == NAMED_MAX


def test_a_syncer_without_learners_or_commits_says_what_it_waits_for(peer: Peer) -> None:
    peer.serves = True
    assert "no learners are here: they join with the invite in " in peer.look(FIRST_S)[0]
    waiting = (SimpleNamespace(fragment=1, reason="quorum: 0 of 2"),)
    peer.look(EVERY_S, learners=(learner(ANN),), num_commits=4)
    (said,) = peer.look(EVERY_S, waiting=waiting)
    assert said.endswith("no commit in the last minute: fragment 1 waits: quorum: 0 of 2")


def test_a_standby_says_that_it_is_one_and_when_it_takes_over(peer: Peer) -> None:
    assert peer.look() == []
    peer.serves = True
    assert peer.look(5) == ["syncer: this peer serves the run now, in term 2"], "soon after it began, too"
    peer.serves = False
    assert peer.look(5) == ["run: a standby, ready to take over; 25% of the run is done, 0 commits; cccccccc serves"]


def test_a_standby_that_can_not_take_over_says_why(peer: Peer) -> None:
    peer.is_connected = False
    said = "a standby, and nobody serves now: 1 of the 2 electors needed are here; 25% of the run is done, 0 commits"
    assert peer.look(FIRST_S) == [f"run: {said}"]


def test_who_takes_over_in_the_midst_of_a_run_does_not_tell_of_first_commits(peer: Peer) -> None:
    peer.look(FIRST_S, num_commits=17)
    peer.serves = True
    assert [line.partition(":")[0] for line in peer.look(5, num_commits=18)] == ["syncer"]
    other = peer.telling = Telling(
        peer,  # type: ignore[arg-type]
        EventLog(peer.file),
        folder=peer.file.parent,
        may_serve=True,
        is_connected=lambda: True,
    )
    assert peer.look(1) == [] and other.num_rounds == 0


@pytest.mark.parametrize("may_serve", [True, False])
def test_the_end_says_what_the_run_came_to_and_where_its_model_is(tmp_path: Path, may_serve: bool) -> None:
    peer = Peer(tmp_path, may_serve=may_serve)
    asyncio.run(peer.telling.run())
    said = peer.said()[-1]
    assert said.startswith("finished: the run is finished (3 minutes are over): 0 commits, 4096 tokens merged;")
    folder = str(tmp_path) if may_serve else "RUN_DIR"
    assert said.endswith(f"geo-diloco export {folder} --to my-model")
    (tmp_path / "standby").mkdir()
    folder = str(tmp_path if may_serve else tmp_path / "standby")
    assert peer.telling.end_text().endswith(f"once this process has left: geo-diloco export {folder} --to my-model")
