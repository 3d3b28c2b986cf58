"""Where a benchmark has its run's files: a folder that goes with it, or one that its person asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from geo_diloco.errors import ConfigError


@contextmanager
def kept_folder(keep: Path | None, *, prefix: str) -> Iterator[Path]:
    """`keep`, which must be new, or a temporary one. Raises ConfigError."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True)
    except OSError as exc:
        raise ConfigError(f"--keep {keep}: {exc.strerror or exc}; give a folder that is not there yet") from exc
    yield keep
