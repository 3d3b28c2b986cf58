"""Files that are whole or absent, and the operating system's complaints in our own words."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from geo_diloco.errors import BlobError


class StoreFullError(BlobError):
    """No room, on the disk or for unfinished pieces; the same call may succeed later."""


def atomic_write(path: Path, data: bytes | memoryview, *, mode: int = 0o644, syncs: bool = True) -> None:
    """Write a file that is there with all of `data` or, after a crash at any moment, as it was before. Without `syncs`
    that is so if the process dies, and nothing waits for the disk."""
    draft = draft_path(path)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if syncs:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if syncs:
        fsync_folder(path.parent)


def draft_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def remove_drafts(folder: Path) -> None:
    """What a killed process left of its `atomic_write`s. Only where no other process writes."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in it durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Up to `size` bytes; fewer at the end of the file."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def write_at(path: Path, offset: int, data: bytes | memoryview) -> None:
    """Create the file if need be; a gap before `offset` reads as zeros."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(handle, view, offset)
            offset += written
            view = view[written:]
    finally:
        os.close(handle)


@contextmanager
def disk_errors() -> Iterator[None]:
    """OSError becomes StoreFullError or BlobError."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(f"disk full: {exc}") from exc
        raise BlobError(f"blob store: {exc}") from exc
