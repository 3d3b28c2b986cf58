"""Sizes that keep a file one noun and a function one thought."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 8
COMMAND_MODULES = "cli/"
"""A command's parameters are its flags; there the number says nothing."""


def _functions(sources: list[Any]) -> Iterator[tuple[Any, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield source, node


def test_no_file_is_too_long(sources: list[Any]) -> None:
    long = {s.path: n for s in sources if (n := s.text.count("\n")) > FILE_LINES_MAX}
    assert not long


def test_no_function_is_too_long(sources: list[Any]) -> None:
    long = {
        f"{source.path}:{node.name}": length
        for source, node in _functions(sources)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert not long


def test_no_function_takes_too_much(sources: list[Any]) -> None:
    greedy = {}
    for source, node in _functions(sources):
        parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        number = len([name for name in parameters if name not in ("self", "cls")])
        if number > PARAMETERS_MAX and not source.path.startswith(COMMAND_MODULES):
            greedy[f"{source.path}:{node.name}"] = number
    assert not greedy


def test_every_module_opens_by_saying_why(sources: list[Any]) -> None:
    silent = [s.path for s in sources if s.text.strip() and not ast.get_docstring(s.tree)]
    assert not silent


def test_every_module_has_modern_annotations(sources: list[Any]) -> None:
    old = [
        s.path
        for s in sources
        if any(isinstance(node, ast.FunctionDef | ast.AnnAssign) for node in ast.walk(s.tree))
        and "from __future__ import annotations" not in s.text
    ]
    assert not old


def test_only_a_supervisor_catches_everything(sources: list[Any]) -> None:
    """A bare `except` also swallows cancellation; `BaseException` must be raised again."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            named = ast.unparse(node.type) if node.type else ""
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if not named or (named == "BaseException" and not raises):
                found.append(f"{source.path}:{node.lineno}")
    assert not found
