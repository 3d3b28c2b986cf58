"""Where a demo keeps its files, and the run manifest it writes.

The demo hands `start` a manifest as a person would: a TOML file. The standard library reads TOML but doesn't write it,
so the few lines that do are here, next to the paths; what they write is read back by `config.load_manifest` in the
founder, which is also what checks it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geo_diloco.errors import ConfigError
from geo_diloco.manifest import RunManifest, StopSpec

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SECTIONS = ("model", "data", "inner", "sync", "outer", "stop", "evaluation", "election")
_FOUNDERS_OWN = ("founder", "nonce", "wire_version")
"""Written by `start`, never by a person."""


@dataclass(frozen=True)
class DemoFiles:
    """The folder of one demo. It is the founder's run directory, so it can be exported, replayed and resumed as any
    other; the learners' own lie below it, and a log file for each process."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "run.toml"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def bootstrap(self) -> Path:
        return self.root / "bootstrap"

    def learner(self, number: int) -> Path:
        """`number` counts from 1."""
        return self.root / f"learner-{number}"

    def learner_dirs(self) -> list[Path]:
        found = [path for path in self.root.glob("learner-*") if path.is_dir()]
        return sorted(found, key=lambda path: (len(path.name), path.name))


def create_demo_files(root: Path | None) -> DemoFiles:
    """Make the folder: `root`, which must be new or empty, or a fresh one among this user's state.

    Raises ConfigError.
    """
    if root is None:
        from geo_diloco.config import state_root

        base = state_root() / "demos"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        candidates = [base / stamp, *(base / f"{stamp}-{n}" for n in range(2, 100))]
        root = next(path for path in candidates if not path.exists())
    root = Path(os.path.expanduser(root))
    if str(root).startswith("~"):
        raise ConfigError(f"--run-dir {root}: nobody's home folder; give a path")
    files = DemoFiles(root.absolute())
    try:
        files.root.mkdir(parents=True, exist_ok=True)
        if any(files.root.iterdir()):
            raise ConfigError(f"--run-dir {files.root}: is not empty; a demo wants a new or empty folder")
        files.logs.mkdir()
        files.bootstrap.mkdir()
    except OSError as exc:
        raise ConfigError(f"--run-dir {files.root}: {exc.strerror or exc}; choose a folder you can write to") from exc
    return files


def demo_run(preset: RunManifest, *, minutes: float, num_learners: int) -> RunManifest:
    """The preset with this demo's length, and a share of the data for each learner."""
    return replace(
        preset,
        stop=StopSpec(minutes=minutes),
        data=replace(preset.data, num_shares=max(preset.data.num_shares, num_learners)),
        evaluation=replace(preset.evaluation, every_seconds=min(preset.evaluation.every_seconds, minutes * 60 / 8)),
    )


def toml_from_manifest(manifest: RunManifest) -> str:
    """The manifest as a person would write it. What is None is left out, and so is what only the founder writes."""
    values = dataclasses.asdict(manifest)
    lines = [f"{key} = {_toml(values[key])}" for key in ("name", "admission")]
    for section in _SECTIONS:
        lines += _table(section, values[section])
    lines += ["", "[codec]", f"up_choices = {_toml(values['codec_up_choices'])}"]
    for leg in ("up", "down"):
        lines += _table(f"codec.{leg}", values[f"codec_{leg}"])
    codecs = {"codec_up", "codec_up_choices", "codec_down"}
    unknown = set(values) - {"name", "admission", *codecs, *_SECTIONS, *_FOUNDERS_OWN}
    assert not unknown, f"manifest fields this file does not write: {sorted(unknown)}"
    return "\n".join(lines) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    """A table and, below it, one for each mapping in it; deeper ones stay in their line."""
    own = {key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)}
    inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = ["", f"[{name}]", *_pairs(own)]
    for key, value in inner.items():
        lines += ["", f"[{name}.{_key(key)}]", *_pairs(value)]
    return lines


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{_key(str(key))} = {_toml(value)}" for key, value in values.items() if value is not None]


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    """JSON's escapes are TOML's, except that TOML also wants DEL escaped and takes no surrogate pairs."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        inner = ", ".join(_pairs(value))
        return "{ " + inner + " }" if inner else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    raise TypeError(f"a {type(value).__name__} has no place in a manifest")
