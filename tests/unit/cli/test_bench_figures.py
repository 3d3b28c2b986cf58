"""What the benchmarks compute from tapes and clocks, on tapes written here."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from geo_diloco.cli.bench import app
from geo_diloco.cli.bench_kill import commit_times_ms
from geo_diloco.cli.bench_overhead import WARM_UP_STEPS, StepWindow
from geo_diloco.cli.bench_quality import steps_of
from geo_diloco.cli.bench_syncer import measure_syncer, size_of
from geo_diloco.errors import ConfigError
from geo_diloco.manifest import BootId, Digest, FragmentId, MonoMs, PeerId, RunId, RunRules, Seq, Term
from geo_diloco.protocol.events import Merged, Sealed, StepDone
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.protocol.seat import HelloFacts, Seat
from geo_diloco.tape import Boot, TapeWriter


def tape(path: Path) -> TapeWriter:
    boot = Boot(
        peer=PeerId("a" * 64),
        boot=BootId("b" * 16),
        role="follower",
        run=RunId("c" * 40),
        layout_digest=Digest("d" * 64),
        hello=HelloFacts(),
        seat=Seat(),
        rules=RunRules(),
    )
    return TapeWriter(path, boot)


def merged(fragment: int) -> Merged:
    digest = Digest("e" * 64)
    return Merged(
        fragment=FragmentId(fragment),
        round=1,
        attempt=1,
        update=BlobRef(digest, 10),
        state_digest=digest,
        momentum_digest=digest,
        rbar=1.0,
        rho=None,
    )


def test_commits_are_seals_after_merges_and_nothing_else(tmp_path: Path) -> None:
    writer = tape(tmp_path / "tape.jsonl")
    writer.event(Sealed(Term(1), Seq(0), Digest("f" * 64)), MonoMs(5))
    writer.event(merged(0), MonoMs(90))
    writer.event(merged(1), MonoMs(95))
    writer.event(Sealed(Term(1), Seq(1), Digest("f" * 64)), MonoMs(100))
    writer.event(Sealed(Term(1), Seq(2), Digest("f" * 64)), MonoMs(250))
    writer.event(Sealed(Term(1), Seq(3), Digest("f" * 64)), MonoMs(300))
    writer.close()
    assert commit_times_ms(tmp_path / "tape.jsonl") == [100, 250]


def test_steps_are_those_of_the_last_process(tmp_path: Path) -> None:
    for last in (7, 12):
        writer = tape(tmp_path / "tape.jsonl")
        writer.event(StepDone(last - 1, 10, 1, None, 0), MonoMs(1))
        writer.event(StepDone(last, 20, 1, None, 0), MonoMs(2))
        writer.close()
    assert steps_of(tmp_path) == 12


def test_a_window_counts_only_steps_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10_000))
    monkeypatch.setattr("geo_diloco.cli.bench_overhead.time.perf_counter", lambda: float(next(times)))
    window = StepWindow(seconds=4.0)
    ticks = 0
    while not window.tick():
        ticks += 1
    assert ticks + 1 == WARM_UP_STEPS + 4
    assert window.steps_per_s == 1.0


def test_what_a_syncer_hears_and_says_is_counted_per_learner_and_second() -> None:
    said: list[str] = []
    result = measure_syncer(num_learners=(2, 6), seconds=6.0, say=said.append)
    first, second = result["rows"]
    assert (first["learners"], second["learners"], len(said)) == (2, 6, 2)
    assert first["ratio"] == 1.0 and second["ratio"] == result["ratio"] > 0
    for row in result["rows"]:
        assert row["participants"] > 0.8 * row["learners"], "nearly everybody is in every commit"
        assert row["commits"] == pytest.approx(6, abs=2), "one with every inner step of a second"
        assert row["heard"]["progress"] == pytest.approx(6 * row["learners"], rel=0.2)
        assert 0 <= row["said"]["entry"] - row["commits"] * row["learners"] <= 2 * row["learners"], "records too"
        assert row["entry_bytes_max"] > 500 * row["learners"], "every participant is listed"
        assert 200 * row["learners"] < row["control_bytes_per_s"] < 20_000 * row["learners"]


def test_a_thing_that_is_reached_twice_is_counted_once() -> None:
    inner = ["x" * 1_000]
    assert size_of([inner]) > 1_000
    assert size_of([inner, inner]) < size_of([inner]) + 100


@pytest.mark.parametrize("learners", ["", "0", "100,", "many", "100,-3", "1000000"])
def test_numbers_of_learners_that_are_none_are_named(learners: str) -> None:
    with pytest.raises(ConfigError, match="--learners"):
        CliRunner().invoke(app, ["syncer", "--learners", learners], catch_exceptions=False)
