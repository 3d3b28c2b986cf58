"""`geo-diloco init`: writes a commented run manifest to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geo_diloco.cli.options import answer
from geo_diloco.errors import ConfigError


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a commented run manifest: a model of about 0.2 million parameters, ready to start."""
    from geo_diloco.config import manifest_template
    from geo_diloco.runtime.disk import atomic_write

    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file in it, such as {path / 'run.toml'}")
    if path.exists() and not force:
        raise ConfigError(f"{path}: is there already; choose another name, or replace it with --force")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is no plain file, and is not replaced; choose another name")
    try:
        atomic_write(path, manifest_template().encode())
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}; choose a file that you can write") from exc
    answer(f"wrote {path}; found a run with it: geo-diloco start {path}")
