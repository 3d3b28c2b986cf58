"""The package's source, parsed once for all tests of its shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Source:
    """One Python file of the package; `path` is relative to the package, with slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    def imported_libraries(self) -> Iterator[str]:
        """Top-level names of everything imported, anywhere in the file, from outside the package."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


@pytest.fixture(scope="session")
def package() -> Path:
    return Path(__file__).resolve().parents[2] / "geo_diloco"


@pytest.fixture(scope="session")
def sources(package: Path) -> list[Source]:
    found = [
        Source(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    ]
    assert len(found) > 20, "the package was not found"
    return found
