"""What `bench failover` makes of chains, tapes and step records, on some that are written here."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from geo_diloco.cli.bench_failover import measure_failover
from geo_diloco.cli.bench_gaps import (
    Change,
    CommitTimes,
    commit_times,
    digests_equal,
    gap_after,
    is_one_chain,
    percentile,
    step_figures,
)
from geo_diloco.cli.bench_steps import StepCall, WaitWatch, read_steps
from geo_diloco.errors import ConfigError, GeoDilocoError
from geo_diloco.protocol.messages import Commit, Found
from tests.support.chains import FOUNDER_SEAT, ChainBuilder


def times(term: int, seq: int, at: int) -> CommitTimes:
    return CommitTimes(term=term, seq=seq, sealed_ms=at - 20, durable_ms=at)


BEFORE, LAST, FIRST, AFTER = times(1, 7, 9_000), times(1, 8, 10_000), times(3, 11, 30_000), times(3, 12, 31_000)
KILL = Change(who="founder", term=1, at_ms=10_500)


def two_commits() -> tuple[Found, list[Commit]]:
    chain = ChainBuilder.opened()
    chain.commit(0)
    chain.change_roster(FOUNDER_SEAT)
    chain.commit(1)
    entries = [event.entry for event in chain.events]
    assert isinstance(entries[0], Found)
    return entries[0], [entry for entry in entries if isinstance(entry, Commit)]


# ---- gaps


def test_after_a_kill_the_time_runs_from_the_kill_to_the_first_durable_commit_of_a_later_term() -> None:
    gap = gap_after(KILL, [BEFORE, LAST, FIRST, AFTER], since_ms=KILL.at_ms)
    assert (gap.durable_s, gap.sealed_s) == (19.5, 19.48)
    assert (gap.from_ms, gap.until_ms) == (10_500, 30_000)


def test_after_a_hand_over_it_runs_from_commit_to_commit() -> None:
    gap = gap_after(KILL, [BEFORE, LAST, FIRST, AFTER], since_ms=None)
    assert (gap.durable_s, gap.sealed_s) == (20.0, 20.0)


def test_a_failover_without_a_commit_is_no_figure() -> None:
    with pytest.raises(GeoDilocoError, match="no commit in a term after 1"):
        gap_after(KILL, [BEFORE, LAST], since_ms=KILL.at_ms)


def test_a_commit_is_durable_when_a_learner_first_hears_of_it_or_of_a_later_one() -> None:
    _, commits = two_commits()
    seqs = [commit.header.seq for commit in commits]
    assert seqs == [2, 4]
    sealed = {(1, 2): 100, (1, 3): 150, (1, 4): 200}
    heard = [(90, 1), (170, 3), (180, 3), (260, 9), (300, 9)]
    assert [
        (each.seq, each.sealed_ms, each.durable_ms) for each in commit_times(commits, sealed=sealed, durable=heard)
    ] == [
        (2, 100, 170),
        (4, 200, 260),
    ]
    assert [each.seq for each in commit_times(commits, sealed=sealed, durable=heard[:3])] == [2], "nobody heard of 4"


# ---- the chain


def test_a_peer_that_holds_another_theta_than_the_chain_is_told_apart() -> None:
    found, commits = two_commits()
    held = {"versions": [1, 1], "state_digests": [commits[0].state_digest, commits[1].state_digest]}
    behind = {"versions": [1, 0], "state_digests": [commits[0].state_digest, found.state_digests[1]]}
    other = {"versions": [1, 1], "state_digests": [commits[0].state_digest, found.state_digests[1]]}
    assert digests_equal(commits, found, [held, behind])
    assert not digests_equal(commits, found, [held, other])
    assert not digests_equal(commits, found, [held, {}]), "who left no word agrees with nobody"


def test_chains_are_one_if_one_goes_on_where_the_other_ends() -> None:
    _, commits = two_commits()
    assert is_one_chain(commits[:1], commits) and is_one_chain(commits, commits)
    assert not is_one_chain(commits[1:], commits)


def test_a_folder_that_is_there_already_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--keep .*exists"):
        measure_failover(num_kills=1, num_handovers=0, keep=tmp_path, say=print)
    assert list(tmp_path.iterdir()) == []


# ---- steps


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(20, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile(values, 0.999)) == (10, 19, 20)
    assert percentile([], 0.5) == 0.0


def test_calls_that_waited_are_counted_and_named() -> None:
    calls = [
        StepCall(0, 1_000, 900, ()),
        StepCall(1, 3_000, 400, ("posix.fsync", "_io.write")),
        StepCall(2, 2_000, 700, ("_io.write",)),
    ]
    figures = step_figures("step", calls)
    assert (figures["step_calls"], figures["step_calls_that_waited"]) == (3, 2)
    assert figures["step_waited_for"] == ["_io.write", "posix.fsync"]
    assert (figures["step_ms_p50"], figures["step_ms_max"]) == (2.0, 3.0)
    assert figures["step_cpu_ms_max"] == 0.9


def test_a_torn_last_line_of_a_record_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text('[5, 700, 1, []]\n[6, 800, 2, ["posix.read"]]\n[7, 9')
    assert read_steps(tmp_path / "steps") == [StepCall(5, 700, 1, ()), StepCall(6, 800, 2, ("posix.read",))]


# ---- what waits


def watched(action: object) -> list[str]:
    watch = WaitWatch()
    with watch:
        assert callable(action)
        action()
    return watch.entered


def test_files_blocking_sockets_sleep_and_waiting_for_a_thread_are_waits(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.send(b"x")
        assert watched(lambda: here.recv(1)) == ["socket.recv"]
    assert "io.open" in watched(lambda: (tmp_path / "a").write_text("a"))
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert watched(lambda: os.fsync(descriptor)) == ["posix.fsync"]
    os.close(descriptor)
    assert watched(lambda: time.sleep(0)) == ["time.sleep"]
    assert "_thread.acquire" in watched(lambda: threading.Event().wait(0.001))


def test_computing_and_waking_another_thread_up_are_none() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        assert watched(lambda: here.send(b"\0")) == []
    assert watched(lambda: (time.perf_counter(), os.fspath("a"), threading.Event().set())) == []


def test_nothing_is_watched_outside() -> None:
    watch = WaitWatch()
    with watch:
        pass
    time.sleep(0)
    assert watch.entered == []
