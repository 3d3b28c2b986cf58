"""One word per idea. These have a better one here (on the right), so they name nothing in the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

BANNED = {
    "leader": "syncer",
    "master": "syncer",
    "swarm": "run",
    "experiment": "run",
    "shard": "fragment or share",
    "submission": "contribution",
    "proposal": "contribution",
    "payload": "delta, update or body",
    "reducer": "aggregator",
    "utils": "the name of what it does",
    "util": "the name of what it does",
    "helpers": "the name of what it does",
    "helper": "the name of what it does",
    "common": "the name of what it does",
    "misc": "the name of what it does",
}
UPPER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def words_of(name: str) -> list[str]:
    return [word for part in name.split("_") for word in UPPER.sub("_", part).lower().split("_") if word]


def _names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What the file names itself: definitions, parameters, assigned variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_a_name_is_split_into_words() -> None:
    assert words_of("_LeaderUtils") == ["leader", "utils"]
    assert words_of("num_payloads_max") == ["num", "payloads", "max"]


def test_no_name_uses_a_banned_word(sources: list[Any]) -> None:
    found = [
        f"{source.path}:{line} {name}: say {BANNED[word]}"
        for source in sources
        for name, line in [*_names(source.tree), (source.path.removesuffix(".py").replace("/", "_"), 1)]
        for word in words_of(name)
        if word in BANNED
    ]
    assert not found
