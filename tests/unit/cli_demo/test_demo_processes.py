"""Child processes: small real ones, started, watched, ended."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

import pytest

from geo_diloco.cli.demo_processes import (
    Child,
    ChildFailed,
    Children,
    child_environment,
    describe_status,
    json_line,
)

WAITS = "import sys; print('{\"ready\": 1}', flush=True); sys.stdin = None; import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pidfd and the parent-death signal")
DIES = "print('last words'); raise SystemExit(3)"


def children(logs: Path, *, interrupted: threading.Event | None = None) -> Children:
    return Children(logs, program=(sys.executable, "-I", "-S", "-c"), interrupted=interrupted)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ended_within(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


def started(group: Children, code: str = WAITS, name: str = "one") -> Child:
    child = group.start(name, code)
    group.wait_ready(child, "ready")
    return child


def test_a_child_is_ready_when_its_line_is_there(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        child = group.start("one", WAITS)
        assert group.wait_ready(child, "ready") == {"ready": 1}
        group.check()
    assert is_gone(child.pid)


def test_one_that_dies_before_it_is_ready_is_named_with_its_log(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        child = group.start("one", DIES)
        with pytest.raises(ChildFailed, match=r"one ended before it was ready \(exit status 3\).*one\.log") as caught:
            group.wait_ready(child, "ready")
        assert caught.value.child.last_lines() == ["last words"]


def test_a_line_printed_just_before_the_end_still_counts(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        child = group.start("one", "print('{\"ready\": 2}')")
        assert group.wait_ready(child, "ready") == {"ready": 2}


def test_waiting_for_readiness_has_a_bound(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        child = group.start("one", "import signal; signal.pause()")
        with pytest.raises(ChildFailed, match="not ready within"):
            group.wait_ready(child, "ready", limit_s=0.0)


def test_another_child_that_dies_meanwhile_is_the_one_named(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        first = started(group, name="first")
        second = group.start("second", "import signal; signal.pause()")
        first.process.kill()
        first.process.wait()
        with pytest.raises(ChildFailed, match="first ended unexpectedly"):
            group.wait_ready(second, "ready")


def test_waiting_for_readiness_ends_at_ctrl_c(tmp_path: Path) -> None:
    asked = threading.Event()
    asked.set()
    with children(tmp_path, interrupted=asked) as group:
        child = group.start("one", "import signal; signal.pause()")
        with pytest.raises(KeyboardInterrupt):
            group.wait_ready(child, "ready")


def test_a_child_that_dies_by_a_signal_is_noticed(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        child = started(group)
        os.kill(child.pid, signal.SIGKILL)
        child.process.wait()
        with pytest.raises(ChildFailed, match="killed by SIGKILL"):
            group.check()


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_status_0_is_a_surprise_only_from_one_that_should_stay(tmp_path: Path, ends_by_itself: bool) -> None:
    with children(tmp_path) as group:
        child = group.start("one", "pass", ends_by_itself=ends_by_itself)
        child.process.wait()
        if ends_by_itself:
            group.check()
        else:
            with pytest.raises(ChildFailed, match="exit status 0"):
                group.check()


def test_a_failure_is_a_surprise_from_anyone(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        group.start("one", DIES, ends_by_itself=True).process.wait()
        with pytest.raises(ChildFailed, match="exit status 3"):
            group.check()


def test_one_killed_on_purpose_is_no_surprise_and_starts_again_in_the_same_log(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        first = started(group, "print('first life'); " + WAITS)
        group.kill(first)
        group.check()
        assert first.status == -signal.SIGKILL
        second = started(group, "print('second life'); " + WAITS)
        assert second.last_lines() == ["second life", '{"ready": 1}']
        assert "first life" in second.log.read_text()


def test_ending_waits_for_all_together_and_kills_the_stubborn(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        willing, stubborn = started(group), started(group, STUBBORN, "two")
        assert group.end([willing, stubborn], signal.SIGTERM, limit_s=0.3) == [stubborn]
        assert willing.status == -signal.SIGTERM
        assert stubborn.status == -signal.SIGKILL
        group.check()


def test_hurry_ends_the_wait_at_once(tmp_path: Path) -> None:
    hurry = threading.Event()
    hurry.set()
    with children(tmp_path) as group:
        stubborn = started(group, STUBBORN)
        assert group.end([stubborn], signal.SIGTERM, limit_s=600, hurry=hurry) == [stubborn]


@needs_linux
def test_leaving_kills_what_a_child_started(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys, signal; child = subprocess.Popen([sys.executable, '-I', '-S', '-c',"
        " 'import signal; signal.pause()']); print('{\"ready\": %d}' % child.pid, flush=True); signal.pause()"
    )
    with children(tmp_path) as group:
        child = group.start("one", parent)
        grandchild = group.wait_ready(child, "ready")["ready"]
        watch = os.pidfd_open(grandchild)
        assert not ended_within(watch, 0.0)
    assert child.status == -signal.SIGKILL
    assert ended_within(watch, 10.0)
    os.close(watch)


@needs_linux
def test_children_end_when_the_demo_is_killed(tmp_path: Path) -> None:
    demo = f"""
import sys, signal
from pathlib import Path
from geo_diloco.cli.demo_processes import Children
group = Children(Path({str(tmp_path)!r}), program=(sys.executable, "-I", "-S", "-c"))
child = group.start("one", {WAITS!r})
group.wait_ready(child, "ready")
print('{{"ready": %d}}' % child.pid, flush=True)
signal.pause()
"""
    logs = tmp_path / "outer"
    logs.mkdir()
    with Children(logs, program=(sys.executable, "-c")) as group:
        outer = group.start("demo", demo)
        pid = group.wait_ready(outer, "ready")["ready"]
        watch = os.pidfd_open(pid)
        group.kill(outer)
        assert ended_within(watch, 10.0)
        os.close(watch)


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        (b"", None),
        (b'noise\n{"ready": 5}\n', {"ready": 5}),
        (b'{"ready": 5}', None),
        (b'{"other": 1}\n{broken\n[1]\n{"ready": 6}\n', {"ready": 6}),
        (b'\xff\xfe{\n  {"ready": 7}\r\n', {"ready": 7}),
    ],
)
def test_only_a_whole_line_of_json_with_the_key_counts(output: bytes, wanted: dict[str, int] | None) -> None:
    assert json_line(output, "ready") == wanted


def test_the_tail_of_a_log_is_short_and_clean(tmp_path: Path) -> None:
    with children(tmp_path) as group:
        child = group.start("one", "for n in range(5000): print('line %d \\x1b[31m' % n)", ends_by_itself=True)
        child.process.wait()
    assert child.last_lines(2) == ["line 4998  [31m", "line 4999  [31m"]


def test_children_share_nothing_of_our_settings_but_the_log_level() -> None:
    ours = {"PATH": "/bin", "GEO_DILOCO_PORT": "1", "GEO_DILOCO_LOG_LEVEL": "debug", "OMP_NUM_THREADS": "8"}
    assert child_environment(ours) == {
        "PATH": "/bin",
        "GEO_DILOCO_LOG_LEVEL": "debug",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_an_exit_status_is_said_in_words() -> None:
    assert describe_status(3) == "exit status 3"
    assert describe_status(-9) == "killed by SIGKILL"
    assert describe_status(-500) == "killed by signal 500"
