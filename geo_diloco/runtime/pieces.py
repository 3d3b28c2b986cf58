"""How a blob is named by its pieces, and a blob of which some pieces are still missing.

A blob's digest covers its size and the digests of its 1 MiB pieces (together: its index), so that every piece can be
checked on its own. That makes resume, parallel streams, several donors and a corrupt middle one mechanism: a piece is
held, and then it has been verified, or it is not. Nothing unverified is ever written to disk: an unfinished piece
lives in memory, and after a restart the held pieces are found again by hashing them.
"""

from __future__ import annotations

import os
import re
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from geo_diloco.errors import BlobError, RemoteProtocolError
from geo_diloco.manifest import Digest
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.disk import StoreFullError, atomic_write, disk_errors, fsync_folder, read_at, write_at
from geo_diloco.runtime.ranges import Range, joined, without

PIECE_BYTES = 1 << 20
PIECE_DIGEST_BYTES = 32
BLOB_BYTES_MAX = 1 << 40
PART_SUFFIX = ".part"
INDEX_SUFFIX = ".index"


class IndexMissingError(BlobError):
    """Pieces of a blob of several can't be checked before its index is known."""


@dataclass(frozen=True, slots=True)
class BlobStatus:
    """How much of a blob is held."""

    complete: bool
    has_index: bool
    held: frozenset[int]
    """Pieces that are whole and verified."""
    unverified: tuple[Range, ...] = ()
    """Bytes of other pieces that came so far."""

    def lacking(self, blob_size: int) -> list[Range]:
        """What has yet to come."""
        held = (piece_range(blob_size, i) for i in self.held)
        return without([(0, blob_size)], [*held, *self.unverified])


def num_pieces(size: int) -> int:
    return -(-size // PIECE_BYTES)


def piece_size(size: int, i: int) -> int:
    """Bytes of piece `i` of a blob of `size` bytes. Raises BlobError if there is no such piece."""
    if not 0 <= i < num_pieces(size):
        raise BlobError(f"piece {i} of a blob of {num_pieces(size)} pieces")
    return min(PIECE_BYTES, size - i * PIECE_BYTES)


def piece_range(size: int, i: int) -> Range:
    """Where piece `i` of a blob of `size` bytes lies in it."""
    begin = i * PIECE_BYTES
    return begin, begin + piece_size(size, i)


def by_piece(blob_size: int, at: int, chunk: bytes | memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Bytes from `at` within a blob on, piece by piece: the piece, the offset in it, its part of them."""
    rest = memoryview(chunk)
    while rest:
        i, offset = divmod(at, PIECE_BYTES)
        size = piece_size(blob_size, i)
        part = rest[: size - offset]
        yield i, offset, part
        at, rest = at + len(part), rest[len(part) :]


def piece_digests(data: bytes | memoryview) -> list[bytes]:
    view = memoryview(data).cast("B")
    return [blake3(view[i : i + PIECE_BYTES]).digest() for i in range(0, len(view), PIECE_BYTES)]


def digest_from_index(size: int, index: bytes) -> Digest:
    """The blob's digest, from its size and its joined piece digests."""
    return Digest(blake3(size.to_bytes(8, "little") + index).hexdigest())


def blob_ref(data: bytes | memoryview) -> BlobRef:
    size = memoryview(data).nbytes
    return BlobRef(digest_from_index(size, b"".join(piece_digests(data))), size)


def check_size(ref: BlobRef) -> None:
    """Raises BlobError for a size that no blob of ours has."""
    if not 0 <= ref.size <= BLOB_BYTES_MAX:
        raise BlobError(f"a blob of {ref.size} bytes; at most {BLOB_BYTES_MAX} are handled")


def check_index(ref: BlobRef, index: bytes) -> None:
    """Raises BlobError unless these are the joined piece digests of `ref`."""
    check_size(ref)
    wanted = num_pieces(ref.size) * PIECE_DIGEST_BYTES
    if len(index) != wanted:
        raise BlobError(f"index of {len(index)} bytes for a blob whose index has {wanted}")
    if digest_from_index(ref.size, index) != ref.digest:
        raise BlobError(f"index that is not that of blob {ref.digest[:12]}")


def digest_in_index(index: bytes, i: int) -> bytes:
    return index[i * PIECE_DIGEST_BYTES : (i + 1) * PIECE_DIGEST_BYTES]


# ---- what both ends of a transfer say about a blob --------------------------------------------------------------

SIZE_HEADER = "X-Blob-Size"
INDEX_HEADER = "X-Blob-Index"
HELD_HEADER = "X-Blob-Held"
UNVERIFIED_HEADER = "X-Blob-Unverified"
INDEX_BROUGHT_HEADER = "X-Blob-Piece-Digests"
"""With bytes that are sent: the index, in base64, for a receiver that may not have it."""
INDEX_WANTED_HEADER = "X-Blob-Piece-Digests-Wanted"
"""With a question for bytes: the answer may bring the index along."""
INDEX_BROUGHT_PIECES_MAX = 128
"""A longer index is sent by itself: a header has at most 8 KB, and beside so much a round trip is nothing."""
COMPLETE_HEADER = "X-Blob-Complete"
"""In the answer to bytes that came: all of the blob is there now."""
_HEADER_CHARACTERS_MAX = 4000
"""A longer list is cut: what is left out is merely sent again, and found to be held."""
_RANGES = re.compile(r"(?:[0-9]{1,13}-[0-9]{1,13}(?:,[0-9]{1,13}-[0-9]{1,13})*)?")


def headers_from_status(ref: BlobRef, status: BlobStatus) -> dict[str, str]:
    ranges: list[list[int]] = []
    for i in sorted(status.held):
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return {
        SIZE_HEADER: str(ref.size),
        INDEX_HEADER: "1" if status.has_index else "0",
        HELD_HEADER: _join_bounded(f"{first}-{last}" for first, last in ranges),
        UNVERIFIED_HEADER: _join_bounded(f"{begin}-{end - 1}" for begin, end in status.unverified),
    }


def _join_bounded(parts: Iterator[str]) -> str:
    joined = ""
    for part in parts:
        if len(joined) + len(part) >= _HEADER_CHARACTERS_MAX:
            break
        joined += f",{part}" if joined else part
    return joined


def status_from_headers(headers: Mapping[str, str], ref: BlobRef) -> BlobStatus:
    """Raises RemoteProtocolError if they can't be about `ref`."""
    held_ranges, came = headers.get(HELD_HEADER, ""), headers.get(UNVERIFIED_HEADER, "")
    if headers.get(SIZE_HEADER) != str(ref.size) or not _RANGES.fullmatch(held_ranges) or not _RANGES.fullmatch(came):
        raise RemoteProtocolError(f"answer that is not about blob {ref.digest[:12]} of {ref.size} bytes")
    held: set[int] = set()
    for first, last in _split(held_ranges):
        if last >= num_pieces(ref.size):
            raise RemoteProtocolError(f"answer about piece {last} of a blob of {num_pieces(ref.size)}")
        held.update(range(first, last + 1))
    unverified = joined((first, min(last + 1, ref.size)) for first, last in _split(came))
    has_index = headers.get(INDEX_HEADER) == "1"
    return BlobStatus(len(held) == num_pieces(ref.size) and has_index, has_index, frozenset(held), tuple(unverified))


def _split(ranges: str) -> Iterator[tuple[int, int]]:
    for part in filter(None, ranges.split(",")):
        first, last = part.split("-")
        yield int(first), int(last)


def header_from_index(index: bytes) -> str:
    return b64encode(index).decode("ascii")


def index_from_header(text: str) -> bytes:
    """Raises RemoteProtocolError if it is no base64."""
    try:
        return b64decode(text, validate=True)
    except ValueError as exc:
        raise RemoteProtocolError("piece digests that are no base64") from exc


# ---- blobs of which pieces are missing ---------------------------------------------------------------------------


class OpenBudget:
    """Memory that unfinished pieces of all blobs may take. A piece that nobody added to for a while gives way."""

    def __init__(self, bytes_max: int = 256 << 20, idle_s: float = 60.0) -> None:
        self._bytes_max = bytes_max
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._open: dict[OpenPiece, None] = {}

    def open_piece(self, size: int) -> OpenPiece:
        with self._lock:
            taken = sum(piece.size for piece in self._open)
            for piece in list(self._open):
                if taken + size <= self._bytes_max:
                    break
                if time.monotonic() - piece.touched_at >= self._idle_s:
                    taken -= piece.size
                    self._open.pop(piece)
                    piece.give_up()
            if taken + size > self._bytes_max:
                raise StoreFullError(f"too many unfinished pieces: {taken} of {self._bytes_max} bytes are taken")
            piece = OpenPiece(size)
            self._open[piece] = None
        return piece

    def close_piece(self, piece: OpenPiece) -> None:
        with self._lock:
            self._open.pop(piece, None)


class OpenPiece:
    """An unfinished piece: its bytes come in any order. Hashed only when it is full."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer = bytearray(size)
        self.came: list[Range] = []
        """Offsets in the piece."""
        self.touched_at = time.monotonic()
        self.is_given_up = False

    def is_filled_by(self, offset: int, size: int) -> bool:
        return joined([*self.came, (offset, offset + size)]) == [(0, self.size)]

    def put(self, offset: int, chunk: bytes | memoryview) -> bool:
        """True when full."""
        self.buffer[offset : offset + len(chunk)] = chunk
        self.came = joined([*self.came, (offset, offset + len(chunk))])
        self.touched_at = time.monotonic()
        return self.came == [(0, self.size)]

    def give_up(self) -> None:
        self.is_given_up = True
        self.buffer = bytearray()


class PartialBlob:
    """A blob that is not complete: `path`.part holds its verified pieces, `path`.index their digests.

    Thread-safe. When the last piece is held it renames itself to `path` and is over.
    """

    def __init__(self, ref: BlobRef, path: Path, budget: OpenBudget) -> None:
        self.ref = ref
        self.is_over = False
        self._path = path
        self._part = path.with_name(path.name + PART_SUFFIX)
        self._index_path = path.with_name(path.name + INDEX_SUFFIX)
        self._budget = budget
        self._lock = threading.Condition()
        self._index: bytes | None = None
        self._held: set[int] | None = None
        self._is_complete = False
        self._open: dict[int, OpenPiece] = {}
        self._closing: set[int] = set()
        """Full pieces that a thread is hashing and writing, outside the lock."""

    def status(self) -> BlobStatus:
        """Waits for pieces that are being written: else a whole one would be asked for again."""
        with self._lock:
            held = self._load()
            closing = set(self._closing)
            self._lock.wait_for(lambda: not closing & self._closing)
            unverified = [
                (i * PIECE_BYTES + begin, i * PIECE_BYTES + end)
                for i, piece in sorted(self._open.items())
                if not piece.is_given_up
                for begin, end in piece.came
            ]
            return BlobStatus(self._is_complete, self._index is not None, frozenset(held), tuple(joined(unverified)))

    def index(self) -> bytes:
        with self._lock:
            self._load()
            if self._index is None:
                raise IndexMissingError(f"index of blob {self.ref.digest[:12]} is not held")
            return self._index

    def set_index(self, index: bytes) -> None:
        """`index` has passed `check_index`."""
        with self._lock:
            held = self._load()
            if self._is_complete:
                return  # an earlier process was killed when all but the new name was there
            self._check_alive()
            if self._index is None:
                with disk_errors():
                    atomic_write(self._index_path, index)
                self._index = index
                self._complete_if_all(held)

    def has_begun(self, i: int) -> bool:
        """Whether room for piece `i` is taken."""
        with self._lock:
            return i in self._load() or i in self._open or i in self._closing

    def is_filled_by(self, i: int, offset: int, size: int) -> bool:
        """Whether `append` of so many bytes from `offset` on waits for the disk."""
        with self._lock:
            if i in self._closing:
                return offset + size == piece_size(self.ref.size, i)
            piece = self._open.get(i)
            if piece is None or piece.is_given_up:
                return size == piece_size(self.ref.size, i)
            return piece.is_filled_by(offset, size)

    def append(self, i: int, offset: int, chunk: bytes | memoryview, *, syncs: bool = True) -> bool:
        """True once piece `i` is held. Waits for the disk only with a chunk that fills the piece, or that reaches its
        end while it is written. `syncs`: once complete the blob outlives a crash of the machine."""
        size = piece_size(self.ref.size, i)
        with self._lock:
            held = self._load()
            if i in self._closing and offset + len(chunk) == size:
                self._lock.wait_for(lambda: i not in self._closing)
            if i in held:
                return True
            if i in self._closing:
                return False
            self._check_alive()
            if self._index is None and num_pieces(self.ref.size) > 1:
                raise IndexMissingError(f"index of blob {self.ref.digest[:12]} is wanted before its pieces")
            piece = self._open.get(i)
            if piece is None or piece.is_given_up:
                piece = self._open[i] = self._budget.open_piece(size)
            if not piece.put(offset, chunk):
                return False
            self._close(i)
            self._closing.add(i)
        try:
            self._hold(i, piece.buffer, held, syncs=syncs)
        finally:
            with self._lock:
                self._closing.discard(i)
                self._lock.notify_all()
        return True

    def read(self, i: int) -> bytes:
        with self._lock:
            if i not in self._load() or self._index is None or (self.is_over and not self._is_complete):
                raise BlobError(f"piece {i} of blob {self.ref.digest[:12]} is not held")
            with disk_errors():
                path = self._path if self._is_complete else self._part
                data = read_at(path, i * PIECE_BYTES, piece_size(self.ref.size, i))
            if blake3(data).digest() != digest_in_index(self._index, i):
                self._load().discard(i)
                raise BlobError(f"piece {i} of blob {self.ref.digest[:12]} was damaged on disk and is dropped")
            return data

    def drop_open(self, i: int) -> None:
        """What came of an unfinished piece is forgotten."""
        with self._lock:
            self._close(i)

    def discard(self) -> None:
        """Remove all that is held of it, unless it is complete."""
        with self._lock:
            self.is_over = True
            for i in list(self._open):
                self._close(i)
            with disk_errors():
                self._part.unlink(missing_ok=True)
                self._index_path.unlink(missing_ok=True)

    def _hold(self, i: int, data: bytearray, held: set[int], *, syncs: bool) -> None:
        """Verify a full piece and put it on disk, outside the lock; then it is held, under it."""
        digest = blake3(data).digest()
        index = self._index
        if index is None and digest_from_index(self.ref.size, digest) == self.ref.digest:
            index = digest
        if index is None or digest != digest_in_index(index, i):
            raise BlobError(f"piece {i} of blob {self.ref.digest[:12]} has a wrong digest and begins again")
        with disk_errors():
            write_at(self._part, i * PIECE_BYTES, memoryview(data))
        with self._lock:
            if self.is_over:
                with disk_errors():
                    self._part.unlink(missing_ok=True)
            self._check_alive()
            self._index = index
            self._complete_if_all(held | {i}, syncs=syncs)
            held.add(i)

    # Below: with the lock held.

    def _load(self) -> set[int]:
        """Held pieces; the first time, those that an earlier process left and that are still right."""
        if self._held is None:
            held: set[int] = set()
            with disk_errors():
                self._index = self._load_index()
                if self._index is not None and self._part.exists():
                    held.update(i for i in range(num_pieces(self.ref.size)) if self._is_right_on_disk(i, self._index))
            self._complete_if_all(held)
            self._held = held
        return self._held

    def _load_index(self) -> bytes | None:
        if self.is_over or not self._index_path.exists():
            return None
        index = read_at(self._index_path, 0, num_pieces(self.ref.size) * PIECE_DIGEST_BYTES + 1)
        try:
            check_index(self.ref, index)
        except BlobError:
            self._index_path.unlink(missing_ok=True)
            return None
        return index

    def _is_right_on_disk(self, i: int, index: bytes) -> bool:
        return blake3(read_at(self._part, i * PIECE_BYTES, PIECE_BYTES)).digest() == digest_in_index(index, i)

    def _complete_if_all(self, held: set[int], *, syncs: bool = True) -> None:
        if self._index is None or len(held) < num_pieces(self.ref.size):
            return
        with disk_errors():
            handle = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.ftruncate(handle, self.ref.size)
                if syncs:
                    os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(self._part, self._path)
            if syncs:
                fsync_folder(self._path.parent)
            self._index_path.unlink(missing_ok=True)
        self.is_over = self._is_complete = True

    def _check_alive(self) -> None:
        if self.is_over:
            raise BlobError(f"blob {self.ref.digest[:12]} was forgotten meanwhile")

    def _close(self, i: int) -> None:
        piece = self._open.pop(i, None)
        if piece is not None:
            self._budget.close_piece(piece)
