"""Lint and types are tests, so that pytest is everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _run(repository: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", *arguments]
    ran = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_ruff_finds_nothing(repository: Path) -> None:
    _run(repository, "ruff", "check", "--no-cache", "--output-format", "concise", ".")


@pytest.mark.timeout(600)
def test_mypy_finds_nothing(repository: Path) -> None:
    _run(repository, "mypy")
