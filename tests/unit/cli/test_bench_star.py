"""What `bench star` makes of a run, on rounds and readings that are written here; and that its links are links."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from geo_diloco.cli.app import app
from geo_diloco.cli.bench_star import learner_seen, measure_star
from geo_diloco.cli.bench_star_figures import (
    LearnerSeen,
    Moment,
    Reading,
    Round,
    Sample,
    Seen,
    admissions,
    limited_by,
    merge_gaps,
    progress_between,
    read_moments,
    rounds_of,
    star_figures,
)
from geo_diloco.cli.bench_star_plan import Site, StarPlan, link_from, parameters_from, rig_plan, star_run
from geo_diloco.cli.star_links import Star
from geo_diloco.errors import ConfigError
from geo_diloco.manifest import BootId, Digest, FragmentId, MonoMs, PeerId, RunId, RunRules
from geo_diloco.protocol.events import DeltaEncoded, StepDone
from geo_diloco.protocol.messages import BlobRef, Commit, Progress
from geo_diloco.protocol.seat import HelloFacts
from geo_diloco.tape import Boot, TapeWriter
from tests.support.chains import ANN, BEN, ChainBuilder, participant

PLAN = StarPlan(
    learners=4,
    parameters=30_800_000,
    bytes_per_s=6_250_000,
    round_trip_s=0.08,
    pace_ms=30,
    quorum=1,
    fragments=8,
    interval=0,
    slow_one=1.0,
    mirrors=0,
    choices=False,
    congestion="auto",
    warm_up_s=30.0,
    seconds=180.0,
)

BOOT = Boot(
    peer=ANN,
    boot=BootId("b" * 16),
    role="learner",
    run=RunId("c" * 40),
    layout_digest=Digest("d" * 64),
    hello=HelloFacts(),
    rules=RunRules(),
)


def round_at(at_ms: int, fragment: int, fresh: tuple[PeerId, ...], late: tuple[PeerId, ...] = ()) -> Round:
    left_out = {peer: "uploading" for peer in {ANN, BEN} - {*fresh, *late}}
    return Round(
        at_ms=at_ms,
        fragment=fragment,
        open_ms=400,
        fresh=frozenset(fresh),
        late=frozenset(late),
        left_out=left_out,
        reason=f"window over: {at_ms} ms",
        contributions=tuple((f"{peer[:4]}{fragment}@{at_ms}", 500) for peer in (*fresh, *late)),
        update_size=600,
    )


def reading(at_ms: int, up: int, down: int, cpu_s: float) -> Reading:
    """Each learner has sent and received so much, of the latter half from the mirror."""
    passed: dict[tuple[str, str], tuple[int, int]] = {}
    for name in ("ann", "ben"):
        passed[name, "syncer"] = (up, down // 2)
        passed[name, "mirror-1"] = (0, down - down // 2)
    passed["mirror-1", "syncer"] = (0, down // 2)
    cpu = {name: cpu_s for name in ("ann", "ben", "syncer", "mirror-1", "relays")}
    return Reading(at_ms=at_ms, passed=passed, cpu_s=cpu, late_s=cpu_s / 100, machine_busy_s=6 * cpu_s)


def seen() -> Seen:
    """Ten seconds of two learners and two fragments: a merge of one of them each second, ann in all, ben in half."""
    rounds = [round_at(1_000 * n + 500, n % 2, (ANN, BEN) if n % 4 < 2 else (ANN,)) for n in range(20)]
    moments = [Moment(at_ms, at_ms // 100, at_ms / 100_000, at_ms / 200_000) for at_ms in range(0, 21_000, 500)]
    samples = [
        Sample(at_ms=each.at_ms - 300, fragment=each.fragment, digest=each.contributions[0][0]) for each in rounds
    ]
    ann = LearnerSeen(name="ann", peer=ANN, bytes_per_s=1_000.0, moments=moments, samples=samples, codec="int4:64")
    return Seen(
        learners=[ann, replace(ann, name="ben", peer=BEN, samples=[], turn=2)],
        rounds=rounds,
        num_elements=(1_000, 1_000),
        first=reading(5_000, 4_000, 6_000, 1.0),
        last=reading(15_000, 9_000, 16_000, 2.0),
        num_processors=2,
        mirrors=("mirror-1",),
    )


def test_the_figures_of_a_stretch_are_of_that_stretch_alone() -> None:
    figures = star_figures(seen())
    assert (figures["seconds"], figures["rounds"]) == (10.0, 10)
    assert figures["fresh_mean"] == 1.5, "of rounds 5 to 14 five are ann's alone"
    assert figures["fresh_mean_share"] == 0.75
    ann, ben = figures["rows"]
    assert (ann["share_of_rounds"], ben["share_of_rounds"]) == (1.0, 0.5)
    assert ben["left_out"] == {"uploading": 5}
    assert figures["share_of_rounds_min"] == 0.5
    assert ann["utilisation"] == pytest.approx(0.99) and ann["utilisation_alone"] == pytest.approx(0.995)
    assert ann["step_ms"] == pytest.approx(100.0)
    assert ann["cores"] == pytest.approx(0.1)
    assert ann["up_share"] == pytest.approx(0.5)
    assert ann["down_share"] == pytest.approx(1.0)
    assert figures["close_reasons"] == {"window over: # ms": 10}


def test_how_often_fragments_are_merged_is_told_in_steps_and_in_sweeps_of_the_link() -> None:
    figures = star_figures(seen())
    assert (figures["round_s"], figures["round_open_s"]) == (2.0, 0.4)
    assert figures["steps_between_merges_median"] == figures["steps_between_merges_max"] == 20
    assert figures["sweep_s"] == 1.0, "two fragments of 500 bytes at 1000 bytes a second"
    assert (figures["sweep_ratio"], figures["sweep_ratio_max"]) == (2.0, 2.0)


def test_a_fragment_that_is_not_merged_any_more_shows_in_the_longest_time() -> None:
    starved = replace(seen(), rounds=[each for each in seen().rounds if each.fragment == 0 or each.at_ms < 7_000])
    figures = star_figures(starved)
    assert figures["steps_between_merges_max"] == pytest.approx(95), "since 5.5 s"
    assert figures["sweep_ratio_max"] == pytest.approx(9.5)


def test_what_leaves_the_syncer_is_told_in_copies_of_the_updates() -> None:
    figures = star_figures(seen())
    assert figures["syncer_in_bytes_per_learner"] == 5_000
    assert figures["syncer_out_copies"] == pytest.approx(15_000 / 6_000), "two learners and the mirror"
    assert figures["mirrors_out_copies"] == pytest.approx(10_000 / 6_000)
    assert figures["bytes_per_param_up"] == 0.5
    assert figures["bytes_per_param_down"] == 0.6


def test_who_used_the_processors_and_what_was_the_limit() -> None:
    figures = star_figures(seen())
    assert figures["cores_syncer"] == figures["cores_relays"] == figures["cores_mirrors"] == pytest.approx(0.1)
    assert figures["cores_learners"] == pytest.approx(0.2)
    assert figures["cores_others"] == pytest.approx(0.1)
    assert figures["relays_late_ms_max"] == pytest.approx(20.0), "as the last reading says"
    assert figures["machine_share"] == pytest.approx(0.3)
    assert figures["link_share"] == pytest.approx(1.0)
    assert figures["limited_by"] == "the links"
    assert limited_by(0.95, 0.99, others_share=0.05) == "the processors of this machine"
    assert limited_by(0.95, 0.1, others_share=0.6).endswith("of which other programs use 60%")
    assert limited_by(0.5, 0.5, others_share=0.4).startswith("the interval")


def test_of_what_was_handed_in_only_the_newest_of_a_fragment_can_be_undecided() -> None:
    samples = [Sample(at_ms=n * 10, fragment=n % 2, digest=f"d{n}") for n in range(1, 8)]
    assert admissions(samples, {"d1", "d2", "d4", "d7"}, 15, 100) == (5, 3, 1), "d3, d5 refused; d6 is the newest of 0"
    assert admissions(samples, {"d1", "d7"}, 0, 15) == (1, 1, 0), "what comes later is another time's"
    assert admissions([], set(), 0, 100) == (0, 0, 0)


def test_steps_and_time_inside_are_read_between_two_records() -> None:
    moments = [Moment(1_000, 10, 1.0, 1.0), Moment(2_000, 20, 1.5, 1.25), Moment(3_000, 40, 1.5, 1.25)]
    assert progress_between(moments, 1_500, 2_500) == (15.0, 0.25, 0.125)
    assert progress_between(moments, 0, 9_000) == (30.0, 0.5, 0.25), "nothing is known beyond them"
    assert progress_between([], 0, 9_000) == (0.0, 0.0, 0.0)


def test_a_gap_counts_where_it_ends() -> None:
    rounds = [round_at(at_ms, 0, (ANN,)) for at_ms in (1_000, 4_000, 6_000, 9_000)]
    closed, still_open = merge_gaps(rounds, 2, 3_000, 7_000)
    assert closed == [(1_000, 4_000), (4_000, 6_000)]
    assert still_open == [(6_000, 7_000), (3_000, 7_000)], "of fragment 1 there is none"


def test_a_commit_tells_fresh_work_from_late() -> None:
    chain = ChainBuilder.opened()
    old_base = chain.bases[0]
    first = chain.commit(0).entry
    assert isinstance(first, Commit)
    both = (participant(ANN, chain.bases[0], 1, 8, 16), participant(BEN, old_base, 0, 0, 3))
    second = replace(first, version=2, participants=both, quorum_wait_ms=300)
    sealed = {(second.header.term, second.header.seq): 7_000}
    (found,) = rounds_of([second], sealed)
    assert (found.fresh, found.late, found.at_ms) == ({ANN}, {BEN}, 7_000)
    assert found.open_ms == 300 + second.grace_ms
    assert rounds_of([second], {}) == [], "its sealing is on no tape"


def test_a_learners_tape_and_its_last_progress_say_what_it_handed_in_and_how(tmp_path: Path) -> None:
    (tmp_path / "learner-2").mkdir()
    with closing(TapeWriter(tmp_path / "learner-2" / "tape.jsonl", BOOT)) as tape:
        tape.event(StepDone(7, 700, 30_000, None, 0), MonoMs(1_000))
        tape.event(DeltaEncoded(FragmentId(1), 3, BlobRef(Digest("e" * 64), 50), 1.0), MonoMs(2_000))
    (tmp_path / "learner-2.moments").write_text("[1000, 7, 0.25, 0.125]\n")
    why = "int8:64: takes 1 s"
    said = Progress(step=7, tokens=700, step_time_us=1, upload_bytes_per_s=1, loss=None, cursor=0, turn=3, uplink=why)
    plan = replace(PLAN, learners=2, slow_one=5.0)
    seen = learner_seen(rig_plan(plan), tmp_path, 2, {ANN: said})
    assert seen.samples == [Sample(at_ms=2_000, fragment=1, digest="e" * 64)]
    assert seen.moments == [Moment(1_000, 7, 0.25, 0.125)]
    assert (seen.peer, seen.bytes_per_s, seen.turn, seen.uplink) == (ANN, 1_250_000, 3, why)
    assert seen.codec == "int4:64", "the run's own"
    assert learner_seen(rig_plan(replace(plan, choices=True)), tmp_path, 2, {ANN: said}).codec == "int8:64"
    assert learner_seen(rig_plan(plan), tmp_path, 2, {}).turn == 1, "it never said"


# ---- the plan


def test_without_an_interval_a_link_has_half_as_much_time_again_as_it_needs() -> None:
    assert PLAN.interval_steps == 184, "a fragment takes 290 ms: 1.5 times that and 3 round trips are 23 steps of 30 ms"
    assert star_run(PLAN).sync.interval_steps == 184
    assert replace(PLAN, interval=24).interval_steps == 24
    assert replace(PLAN, slow_one=1.25).interval_steps == 184
    assert replace(PLAN, slow_one=5.0).interval_steps == 528, "six times 290 ms and 3 round trips are 66 steps"
    assert replace(PLAN, slow_one=5.0).link_bytes_per_s(4) == 1_250_000
    assert replace(PLAN, slow_one=5.0).link_bytes_per_s(3) == 6_250_000


def test_sizes_and_links_are_read_and_a_mistake_is_one_line() -> None:
    assert parameters_from("30.8M") == 30_800_000
    assert parameters_from("200k") == 200_000
    assert parameters_from("1000000") == 1_000_000
    for text in ("many", "30.8T", "10", "-5M", "2G", "", "nan", "inf"):
        with pytest.raises(ConfigError, match=r"--parameters .*such as 30\.8M"):
            parameters_from(text)
    assert link_from("50mbit", "80ms") == (6_250_000, 0.08)
    for rate, round_trip in (("fast", "80ms"), ("", "80ms"), ("50mbit", "80"), ("50mbit", "-1ms"), ("50mbit", "xms")):
        with pytest.raises(ConfigError, match=r"--(rate|rtt)"):
            link_from(rate, round_trip)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--fragments", "7"), "--fragments 7: wanted fragments of one size: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"),
        (("--slow-one", "5", "--learners", "1"), "--slow-one: wanted two learners or more"),
        (("--congestion", "fast"), "--congestion 'fast'; allowed are"),
    ],
)
def test_what_can_not_be_measured_is_said_in_one_line(flags: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "star", *flags])
    assert result.exit_code != 0
    assert said in (result.output + str(result.exception))


def test_a_folder_that_is_there_already_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--keep .*exists"):
        measure_star(PLAN, keep=tmp_path, say=print)
    assert list(tmp_path.iterdir()) == []


def test_of_a_record_that_is_being_written_whole_lines_are_read(tmp_path: Path) -> None:
    record = tmp_path / "moments"
    assert read_moments(record) == []
    record.write_text(json.dumps([10, 1, 0.5, 0.25]) + "\n" + "[20, 2")
    assert read_moments(record) == [Moment(10, 1, 0.5, 0.25)]


# ---- links

DIAL = """
import socket, sys, time
sys.stdin.readline()
began = time.monotonic()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as there:
    there.sendall(b"x" * int(sys.argv[2]))
    print(len(there.recv(1)), time.monotonic() - began)
"""


@contextmanager
def answering(port: int, size: int) -> Iterator[None]:
    """A server of another process' thread: one byte back once so many have come."""
    code = f"""
import asyncio
async def take(reader, writer):
    await reader.readexactly({size})
    writer.write(b"x")
    await writer.drain()
async def main():
    async with await asyncio.start_server(take, "127.0.0.1", {port}):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"up\n"
        try:
            yield
        finally:
            server.kill()


def dial(star: Star, name: str, front: int, size: int, *, bytes_per_s: float) -> float:
    """Seconds from dialing to the answer, which comes when so many bytes are there."""
    command = [sys.executable, "-c", DIAL, str(front), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dialer:
        star.link(name, dialer.pid)
        site = Site(pace_ms=1, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s, round_trip_s=0.05)
        star.thin(name, site)
        received, took_s = dialer.communicate(b"\n", timeout=60)[0].split()
    assert received == b"1"
    return float(took_s)


def test_each_dialer_has_a_link_of_its_own_and_who_has_none_is_turned_away() -> None:
    size = 60_000
    with Star(round_trip_s=0.05) as star:
        flags = star.open_door("syncer")
        port, front = int(flags[3]), int(flags[5].rpartition(":")[2])
        with answering(port, size):
            slow_s = dial(star, "slow", front, size, bytes_per_s=100_000.0)
            assert slow_s > 0.7, "60 kB at 100 kB/s, a handshake and a round trip"
            names = [f"fast-{number}" for number in range(10)]
            quick = (name for name in names if dial(star, name, front, size, bytes_per_s=10_000_000.0) < 0.6)
            fast = next(quick, None)
            assert fast is not None, "on a busy machine it may take several tries"
            passed = star.passed()
            assert passed["slow", "syncer"] == passed[fast, "syncer"] == (size, 1)
            with socket.create_connection(("127.0.0.1", front)) as stranger:
                stranger.settimeout(30)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
            assert star.passed() == passed
        star.late_s()
        star._loop.call_soon_threadsafe(time.sleep, 0.3)
        deadline = time.monotonic() + 30
        while (late_s := star.late_s()) < 0.2 and time.monotonic() < deadline:
            pass
        assert late_s >= 0.2, "it stood still for 300 ms"
