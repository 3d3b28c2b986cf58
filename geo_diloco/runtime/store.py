"""What a peer keeps on disk for others and for its own return: blobs by digest, and the chain as signed.

Both are written so that a crash at any moment leaves nothing half true: a blob appears by a rename after it was
verified and synced, the chain grows by one synced line at a time and a torn last line is cut off. Both are safe to use
from the event loop and the worker thread at once. How a blob is made of pieces is `pieces.py`'s matter.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from geo_diloco.errors import BlobError, RemoteProtocolError, RunDirError
from geo_diloco.manifest import Digest
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.disk import StoreFullError, atomic_write, disk_errors, fsync_folder, read_at, remove_drafts
from geo_diloco.runtime.pieces import (
    INDEX_SUFFIX,
    PART_SUFFIX,
    PIECE_BYTES,
    BlobStatus,
    OpenBudget,
    PartialBlob,
    blob_ref,
    check_index,
    check_size,
    digest_from_index,
    digest_in_index,
    num_pieces,
    piece_digests,
    piece_size,
)
from geo_diloco.runtime.wire import LINE_BYTES_MAX, Signed

__all__ = ["PIECE_BYTES", "BlobStatus", "BlobStore", "ChainStore", "atomic_write", "blob_ref", "piece_digests"]

DISK_RESERVE_BYTES = 64 << 20
"""Left free on the disk for the chain and the tape, which must not fail."""
_INDEXES_MAX = 256
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """Blobs under one folder, which belongs to one process."""

    def __init__(self, root: Path, *, budget: OpenBudget | None = None, is_read_only: bool = False) -> None:
        """`is_read_only`: whoever holds the folder may be at work in it; nothing is tidied up or dropped."""
        self.on_damaged: Callable[[BlobRef], None] = lambda ref: None
        """Told of a blob that was dropped because its bytes had changed on disk; from any thread."""
        self._root = root
        self._is_read_only = is_read_only
        self._budget = budget or OpenBudget()
        self._lock = threading.Lock()
        self._partials: dict[Digest, PartialBlob] = {}
        self._indexes: dict[Digest, bytes] = {}
        if is_read_only:
            return
        with disk_errors():
            root.mkdir(parents=True, exist_ok=True)
            remove_drafts(root)

    def put(self, data: bytes | memoryview) -> BlobRef:
        """Hold these bytes; they are on disk when it returns."""
        index = b"".join(piece_digests(data))
        size = memoryview(data).nbytes
        ref = BlobRef(digest_from_index(size, index), size)
        self._remember(ref, index)
        if not self.has(ref):
            self._check_space(ref.size)
            with disk_errors():
                atomic_write(self._path(ref), data)
            self._discard_partial(ref)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """The whole blob, verified. A damaged one is dropped, so that it can be fetched again."""
        if not self.has(ref):
            raise BlobError(f"blob {ref.digest[:12]} of {ref.size} bytes is not held")
        with disk_errors():
            data = self._path(ref).read_bytes()
        if blob_ref(data) != ref:
            raise self._damaged(ref)
        return data

    def has(self, ref: BlobRef) -> bool:
        """Whether the blob is complete here."""
        try:
            return self._path(ref).stat().st_size == ref.size
        except OSError:
            return False

    def find(self, digest: str) -> BlobRef | None:
        """The complete blob of that digest, if held."""
        if not _DIGEST.fullmatch(digest):
            return None
        try:
            return BlobRef(Digest(digest), (self._root / digest).stat().st_size)
        except OSError:
            return None

    def delete(self, ref: BlobRef) -> None:
        """Forget it, complete or partial. Forgetting what is not held is harmless."""
        self._discard_partial(ref)
        with self._lock:
            self._indexes.pop(ref.digest, None)
        with disk_errors():
            self._path(ref).unlink(missing_ok=True)

    def sweep(self, keep: Collection[str]) -> int:
        """Delete every blob, complete or partial, whose digest is not in `keep`; returns how many."""
        with disk_errors():
            found = {path.name.removesuffix(PART_SUFFIX).removesuffix(INDEX_SUFFIX) for path in self._root.iterdir()}
        unwanted = sorted(name for name in found if _DIGEST.fullmatch(name) and name not in keep)
        for name in unwanted:
            self.delete(BlobRef(Digest(name), 0))
        return len(unwanted)

    def status(self, ref: BlobRef) -> BlobStatus:
        if self.has(ref):
            return BlobStatus(True, True, frozenset(range(num_pieces(ref.size))))
        return self._partial(ref).status()

    def index(self, ref: BlobRef) -> bytes:
        """The joined digests of its pieces. Raises BlobError if not known."""
        if not self.has(ref):
            return self._partial(ref).index()
        with self._lock:
            known = self._indexes.get(ref.digest)
        if known is None:
            known = b"".join(piece_digests(self.get(ref)))
            self._remember(ref, known)
        return known

    def _remember(self, ref: BlobRef, index: bytes) -> None:
        """Else all of the blob is read again for the first who asks, while he waits."""
        with self._lock:
            if len(self._indexes) >= _INDEXES_MAX:
                self._indexes.pop(next(iter(self._indexes)))
            self._indexes[ref.digest] = index

    def set_index(self, ref: BlobRef, index: bytes) -> None:
        """Wanted before the pieces of a blob of several. Raises BlobError if it is not the index of `ref`."""
        if self.has(ref):
            return
        check_index(ref, index)
        self._check_space(ref.size)
        self._remember(ref, index)
        partial = self._partial(ref)
        partial.set_index(index)
        self._drop_if_over(partial)

    def append_piece(self, ref: BlobRef, i: int, offset: int, chunk: bytes | memoryview, *, syncs: bool = True) -> bool:
        """Add bytes of piece `i` from `offset` on; True once the piece is held. Without `syncs` the disk is not waited
        for: what a crash of the machine leaves of the blob may be broken, which is found when it is read.

        Bytes may come in any order and more than once, from any number of writers. When all of the piece is there its
        digest is checked: if it is wrong the piece begins again and BlobError is raised.
        """
        size = piece_size(ref.size, i)
        if offset < 0 or offset + len(chunk) > size:
            raise BlobError(f"bytes {offset} to {offset + len(chunk)} of a piece of {size}")
        if self.has(ref):
            return True
        partial = self._partial(ref)
        if not partial.has_begun(i):
            self._check_space(size)
        is_held = partial.append(i, offset, chunk, syncs=syncs)
        self._drop_if_over(partial)
        return is_held

    def is_piece_filled_by(self, ref: BlobRef, i: int, offset: int, size: int) -> bool:
        """Whether `append_piece` with so many bytes would have to hash piece `i` and wait for the disk."""
        return not self.has(ref) and self._partial(ref).is_filled_by(i, offset, size)

    def drop_open(self, ref: BlobRef, i: int) -> None:
        """Piece `i`, if it is unfinished, begins again."""
        if not self.has(ref):
            self._partial(ref).drop_open(i)

    def read_piece(self, ref: BlobRef, i: int) -> bytes:
        """Piece `i`, verified; of a partial blob too. Raises BlobError if it is not held."""
        size = piece_size(ref.size, i)
        if not self.has(ref):
            return self._partial(ref).read(i)
        wanted = digest_in_index(self.index(ref), i)
        with disk_errors():
            data = read_at(self._path(ref), i * PIECE_BYTES, size)
        if blake3(data).digest() != wanted:
            raise self._damaged(ref)
        return data

    def _path(self, ref: BlobRef) -> Path:
        if not _DIGEST.fullmatch(ref.digest):
            raise BlobError(f"{ref.digest[:80]!r} is not a digest")
        return self._root / ref.digest

    def _partial(self, ref: BlobRef) -> PartialBlob:
        path = self._path(ref)
        check_size(ref)
        with self._lock:
            partial = self._partials.get(ref.digest)
            if partial is None or partial.ref != ref or partial.is_over:
                partial = self._partials[ref.digest] = PartialBlob(ref, path, self._budget)
        return partial

    def _drop_if_over(self, partial: PartialBlob) -> None:
        if partial.is_over:
            with self._lock:
                if self._partials.get(partial.ref.digest) is partial:
                    self._partials.pop(partial.ref.digest)

    def _discard_partial(self, ref: BlobRef) -> None:
        path = self._path(ref)
        with self._lock:
            partial = self._partials.pop(ref.digest, None) or PartialBlob(ref, path, self._budget)
            partial.discard()

    def _damaged(self, ref: BlobRef) -> BlobError:
        if self._is_read_only:
            return BlobError(f"blob {ref.digest[:12]} is damaged on disk")
        self.delete(ref)
        self.on_damaged(ref)
        return BlobError(f"blob {ref.digest[:12]} was damaged on disk and is dropped")

    def why_full(self, needed: int = PIECE_BYTES) -> str:
        """Why so many bytes can't be taken now; empty if they can."""
        with disk_errors():
            free = shutil.disk_usage(self._root).free
        if free >= needed + DISK_RESERVE_BYTES:
            return ""
        return (
            f"disk full: {needed} bytes wanted, {free} free of which {DISK_RESERVE_BYTES} are kept back; "
            f"free some space for {self._root}"
        )

    def _check_space(self, needed: int) -> None:
        if why := self.why_full(needed):
            raise StoreFullError(why)


class Place(NamedTuple):
    """Where a line of the chain lies on disk, in bytes."""

    offset: int
    size: int


class ChainStore:
    """Entries as signed, one line each, in the order in which they came; those of chains that do not count any more
    stay among them. Belongs to one process. Signatures and places are the reader's matter (`chain.py`).
    """

    def __init__(self, path: Path, *, is_read_only: bool = False, repair: str = "") -> None:
        """`is_read_only`: another process may be appending to it; a torn last line is left alone. `repair`: what to do
        about a damaged one, for whoever's it is."""
        self._path = path
        self._is_read_only = is_read_only
        self.repair = repair and f"; {repair}"
        self._lock = threading.Lock()
        self._end = 0
        self.num_entries = 0
        try:
            if not is_read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not path.exists()
            self._file = path.open("rb" if is_read_only else "a+b", buffering=0)
        except OSError as exc:
            raise RunDirError(f"chain {path}: {exc.strerror or exc}") from exc
        try:
            if is_new:
                fsync_folder(path.parent)
            self._scan()
        except OSError as exc:
            self._file.close()
            raise RunDirError(f"chain {path}: {exc.strerror or exc}") from exc
        except RunDirError:
            self._file.close()
            raise

    def append(self, signed: Signed, *, sync: bool = True) -> Place:
        """On disk when it returns; without `sync`, on its way there. Raises RunDirError, and is as before."""
        with self._lock:
            line = signed.to_line().encode() + b"\n"
            try:
                _write_all(self._file.fileno(), line)
                if sync:
                    os.fsync(self._file.fileno())
            except OSError as exc:
                os.ftruncate(self._file.fileno(), self._end)
                raise RunDirError(f"chain {self._path}: {exc.strerror or exc}; free some space") from exc
            place = Place(self._end, len(line))
            self._end += len(line)
            self.num_entries += 1
            return place

    def load(self) -> list[Signed]:
        """All entries, oldest first."""
        return [signed for signed, _ in self.load_placed()]

    def load_placed(self) -> list[tuple[Signed, Place]]:
        """The same, each with where it lies."""
        with self._lock, disk_errors():
            lines = read_at(self._path, 0, self._end).splitlines(keepends=True)
        placed: list[tuple[Signed, Place]] = []
        offset = 0
        for line in lines:
            placed.append((Signed.from_line(line.rstrip(b"\n")), Place(offset, len(line))))
            offset += len(line)
        return placed

    def read(self, place: Place) -> Signed:
        """The entry there, as it is now. Raises BlobError or RemoteProtocolError if it can't be read."""
        with disk_errors():
            return Signed.from_line(read_at(self._path, *place).rstrip(b"\n"))

    def close(self) -> None:
        self._file.close()

    def _scan(self) -> None:
        """Find the lines; cut off a torn last one. Raises RunDirError if an earlier one is damaged."""
        size = os.fstat(self._file.fileno()).st_size
        with self._path.open("rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                end = self._end + len(line)
                try:
                    if not line.endswith(b"\n"):
                        raise RemoteProtocolError("line without an end")
                    Signed.from_line(line.rstrip(b"\n"))
                except RemoteProtocolError as exc:
                    if end >= size:
                        break
                    where = f"chain {self._path}, line {self.num_entries + 1}"
                    raise RunDirError(f"{where} is damaged{self.repair}") from exc
                self._end = end
                self.num_entries += 1
        if self._end < size and not self._is_read_only:
            os.ftruncate(self._file.fileno(), self._end)
            os.fsync(self._file.fileno())


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
