"""What every test runs under: no network hub, no settings of the person who runs them, no process left behind."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

# Before anything imports torch, hivemind or transformers.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HIVEMIND_LOGLEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
for _key in [key for key in os.environ if key.startswith("GEO_DILOCO_")]:
    del os.environ[_key]

_SESSION_VARIABLE = "PYTEST_SESSION_OF_GEO_DILOCO"
os.environ[_SESSION_VARIABLE] = uuid.uuid4().hex
"""Inherited by every child, so that one left behind is known as ours, whoever its parent is by then."""

hypothesis.settings.register_profile("here", deadline=None, max_examples=30, database=None)
hypothesis.settings.load_profile("here")


@pytest.fixture(scope="session", autouse=True)
def _state_home() -> Iterator[None]:
    """Runs, demos and identities of this session go to a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="geo-diloco-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", folder)
        patch.setenv("XDG_CONFIG_HOME", folder)
        yield


@pytest.fixture
def repository() -> Path:
    """The folder that pyproject.toml is in."""
    return Path(__file__).resolve().parent.parent


def _left_behind() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_SESSION_VARIABLE) == os.environ[_SESSION_VARIABLE]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    """No test may leave a process behind: a survivor fails the session, by name, and is ended."""
    deadline = time.monotonic() + 3
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        try:
            print(f"\nleft behind by the tests: {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.Error:
            continue
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
