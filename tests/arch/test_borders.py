"""Who may import whom: the contracts in pyproject.toml, checked by import-linter, and a core that is only logic."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
# Some of these import a clock or a file system themselves; what matters is that the core can't use one.
ALLOWED_IN_THE_CORE = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "typing",
    "geo_diloco",
}


def test_import_contracts_hold(repository: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 broken" in ran.stdout


def test_the_core_imports_nothing_that_could_wait_or_differ(sources: list[Any]) -> None:
    core = [s for s in sources if s.path.startswith("protocol/") or s.path in ("manifest.py", "errors.py")]
    assert len(core) > 5
    found = {(s.path, name) for s in core for name in s.imported_libraries() if name not in ALLOWED_IN_THE_CORE}
    assert not found


def test_the_core_iterates_no_set_it_has_just_made(sources: list[Any]) -> None:
    """A set's order depends on the hash seed; what comes of it would differ between two processes."""
    found = [
        f"{source.path}:{node.lineno}"
        for source in sources
        if source.path.startswith("protocol/")
        for loop in ast.walk(source.tree)
        if isinstance(loop, ast.For | ast.comprehension) and _makes_a_set(node := loop.iter)
    ]
    assert not found


def _makes_a_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
