"""Each library has one home; everywhere else the package speaks its own types and errors."""

from __future__ import annotations

import ast
import sys
from typing import Any

HOMES: dict[str, tuple[str, ...]] = {
    "aiohttp": (
        "runtime/answers.py",
        "runtime/blobs.py",
        "runtime/control.py",
        "runtime/http.py",
        "runtime/session.py",
    ),
    "annotated_types": ("config/mistakes.py",),
    "blake3": ("numerics/", "runtime/"),
    "cryptography": ("runtime/identity.py",),
    "datasets": ("training/data.py",),
    "hivemind": ("runtime/dht.py", "cli/bench_hivemind.py"),
    "huggingface_hub": ("training/",),
    "matplotlib": ("cli/goodput_plot.py", "cli/simulate_plot.py"),
    "numpy": ("numerics/", "sim/goodput/", "training/"),
    "platformdirs": ("config/peer.py", "cli/demo_files.py"),
    "psutil": ("cli/bench_usage.py",),
    "pyarrow": ("training/data.py",),
    "pydantic": ("config/", "runtime/wire.py"),
    "pydantic_core": ("config/", "runtime/wire.py"),
    "rich": ("cli/",),
    "safetensors": ("training/checkpoint.py",),
    "sklearn": ("training/digits.py",),
    "torch": (
        "cli/bench_",
        "node/",
        "numerics/",
        "runtime/dht.py",
        "runtime/following.py",
        "runtime/merger.py",
        "sim/train/",
        "training/",
    ),
    "transformers": ("training/",),
    "typer": ("cli/",),
    "zstandard": ("numerics/codec.py",),
}
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "requests"}
"""Bytes from peers are never unpickled, and there is one HTTP library."""


def test_each_library_is_imported_only_at_home(sources: list[Any]) -> None:
    own = {"geo_diloco"} | set(sys.stdlib_module_names)
    strays = [
        f"{source.path} imports {name}"
        for source in sources
        for name in sorted(set(source.imported_libraries()) - own)
        if not source.path.startswith(HOMES.get(name, ("no home",)))
    ]
    assert not strays


def test_nothing_that_runs_code_from_bytes_is_imported_or_called(sources: list[Any]) -> None:
    found = []
    for source in sources:
        found += [f"{source.path} imports {name}" for name in source.imported_libraries() if name in FORBIDDEN]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "torch.load", "pickle.loads"):
                found.append(f"{source.path}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
                found.append(f"{source.path}:{node.lineno} trusts remote code")
    assert not found
