"""What is in the repository: nothing of one machine, and a README that tells the truth about it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

FIRST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt . && .venv/bin/geo-diloco demo"
SECOND_COMMAND = (
    "python3 -m venv .venv-test && .venv-test/bin/pip install -c constraints.txt -e '.[test]' "
    "&& .venv-test/bin/python -m pytest"
)
# Written so that this file does not contain what it looks for.
OF_ONE_MACHINE = re.compile(r"/(?:home|Users|root)/\w|/wor[k]/|/opt/\w|file:/{2}/")
PACKAGE_INDEX = re.compile(r"index-ur[l]|find-link[s]|pypi\.or[g]|pythonhosted\.or[g]|download\.pytorch")
TREE_LINE = re.compile(r"^(?P<indent> *)(?P<name>[\w./-]+?)(?P<folder>/?)  +(?P<says>\S.*)$")


def _tracked(repository: Path) -> list[Path]:
    """Files that are, or may be, committed; all text files outside ignored folders if this is no git checkout."""
    ran = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode == 0 and ran.stdout:
        return [repository / name for name in ran.stdout.splitlines() if (repository / name).is_file()]
    return [p for p in repository.rglob("*.*") if p.is_file() and not any(part.startswith(".") for part in p.parts)]


def _texts(repository: Path) -> list[tuple[str, str]]:
    found = []
    for path in _tracked(repository):
        try:
            found.append((path.relative_to(repository).as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    assert len(found) > 30
    return found


def test_no_tracked_file_names_a_path_of_one_machine(repository: Path) -> None:
    found = [f"{name}: {m[0]}" for name, text in _texts(repository) for m in OF_ONE_MACHINE.finditer(text)]
    assert not found


def test_no_tracked_file_names_a_package_index(repository: Path) -> None:
    found = [f"{name}: {m[0]}" for name, text in _texts(repository) for m in PACKAGE_INDEX.finditer(text)]
    assert not found


def test_the_readme_has_both_commands_word_for_word(repository: Path) -> None:
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert readme.index(FIRST_COMMAND) < readme.index(SECOND_COMMAND)


def test_ci_runs_the_second_command_and_the_demo(repository: Path) -> None:
    script = (repository / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip\" install --quiet -c constraints.txt -e '.[test]'\n" in script
    assert 'python" -m pytest ' in script
    assert 'pip" install --quiet -c constraints.txt .\n' in script
    assert "demo --minutes 0.5 --json" in script


def test_versions_that_were_tested_are_pinned_plainly(repository: Path) -> None:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "hivemind==1.1.12" in pins
    assert not [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)]


def _tree(readme: str) -> dict[str, str]:
    """Paths (relative to the repository) that the README's tree lists, with what it says of each."""
    block = re.search(r"^## The tree\n.*?^```\n(.*?)^```", readme, re.M | re.S)
    assert block, "README.md has no section '## The tree' with a block"
    listed: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in block[1].splitlines():
        found = TREE_LINE.match(line)
        assert found, f"not a line of the tree: {line!r}"
        indent = len(found["indent"])
        above = [(width, name) for width, name in above if width < indent]
        listed["/".join([*(name for _, name in above), found["name"]])] = found["says"]
        if found["folder"]:
            above.append((indent, found["name"]))
    return listed


def test_the_tree_reader_understands_nesting() -> None:
    text = "## The tree\n\n```\na/     one\n    b/   two\n        c.py  three\n    d.py  four\ne  five\n```\n"
    assert list(_tree(text)) == ["a", "a/b", "a/b/c.py", "a/d.py", "e"]


def test_the_readme_lists_every_file_of_the_package_and_no_other(repository: Path) -> None:
    listed = _tree((repository / "README.md").read_text(encoding="utf-8"))
    wanted = {
        path.relative_to(repository).as_posix()
        for path in _tracked(repository)
        if path.is_relative_to(repository / "geo_diloco") and not _goes_without_saying(path, repository)
    }
    files = {name for name in listed if name.startswith("geo_diloco/") and not (repository / name).is_dir()}
    assert wanted - files == set(), "not in the README's tree"
    assert files - wanted == set(), "in the README's tree, but not there"
    assert [name for name in listed if not (repository / name).exists()] == []


def _goes_without_saying(path: Path, repository: Path) -> bool:
    return path.name == "__init__.py" and path.parent != repository / "geo_diloco"


@pytest.mark.parametrize("name", ["geo_diloco/protocol", "geo_diloco/numerics", "geo_diloco/runtime", "geo_diloco/sim"])
def test_the_parts_with_rules_explain_them(repository: Path, name: str) -> None:
    assert len((repository / name / "README.md").read_text(encoding="utf-8")) > 500


def test_the_borders_have_no_drawer_for_everything(sources: list[Any]) -> None:
    drawers = {"utils.py", "common.py", "helpers.py", "types.py", "misc.py"}
    assert not [source.path for source in sources if source.path.rpartition("/")[2] in drawers]
