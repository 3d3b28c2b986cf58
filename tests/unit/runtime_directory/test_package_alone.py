"""hivemind is imported without what its `__init__` imports, and is whole for whoever asks it for more."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_diloco.runtime.dht import package_alone

NAME = "geo_diloco_example_of_a_package"
INIT = "from {name}.heavy import Heavy\n__version__ = '7'\n"
FILES = {
    "__init__.py": INIT,
    "heavy.py": "from {name}.light import Light\nclass Heavy(Light): ...\n",
    "light/__init__.py": "from {name}.light.deep import Light\n",
    "light/deep.py": "import {name}.light.leaf as leaf\nclass Light:\n    leaf = leaf\n",
    "light/leaf.py": "",
}
"""`import a.b.c as d` while `a.b` is being imported asks `a` for `b`, as hivemind's own modules do."""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for path, text in FILES.items():
        (tmp_path / NAME / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / NAME / path).write_text(text.format(name=NAME))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_a_submodule_is_imported_without_what_the_package_imports() -> None:
    package = package_alone(NAME)
    light = importlib.import_module(f"{NAME}.light")
    assert package.light is light and package.__file__
    assert not hasattr(package, "__wrapped__"), "who looks at modules in passing doesn't read it"
    assert f"{NAME}.heavy" not in sys.modules


@pytest.mark.parametrize("asked", ["Heavy", "__version__"])
def test_whoever_asks_for_a_name_of_it_finds_it_whole(asked: str) -> None:
    package = package_alone(NAME)
    light = importlib.import_module(f"{NAME}.light")
    found: dict[str, object] = {}
    exec(f"from {NAME} import {asked}", found)
    assert importlib.import_module(NAME) is package
    assert package.__version__ == "7"
    assert found[asked] is getattr(package, asked)
    assert issubclass(package.Heavy, light.Light), "what was imported before is what it uses"
    with pytest.raises(AttributeError):
        package.nothing_like_this  # noqa: B018


def test_a_package_that_is_there_is_left_as_it_is() -> None:
    whole = importlib.import_module(NAME)
    assert package_alone(NAME) is whole and type(whole) is type(sys)
