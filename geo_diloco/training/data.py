"""Where a learner's tokens come from: documents, disjoint shares of them, and a stream that can be taken up again.

Every peer must agree on who may train on what without talking about it, so the split is a hash of a document's
*name*: the same file falls into the same share on every machine, whatever else lies beside it, and the held-out
documents are in nobody's share. A share is cut into windows of one sequence each, which are visited in a seeded
order: `TokenStream` is a pure function of (share, pass number, cursor), and the cursor counts tokens, as the ledger
does. So a share can be handed to another learner, or taken up after a crash, at the token where it was left.

The whole share is held in memory (1 byte a token for `bytes`, 2 or 4 for a tokenizer). That is right for the sizes
this package is tested at; a share larger than memory needs its files split over more shares.
"""

from __future__ import annotations

import functools
import glob as globbing
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from geo_diloco.errors import DataError
from geo_diloco.manifest import DataSpec

TEXT_SUFFIXES = (".txt", ".py", ".md")
ROW_SUFFIXES = (".jsonl", ".parquet")
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
"""Of the standard library: third-party code, and the test suite, which many systems don't install."""

Tokens = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Document:
    """A text by name; `read` is called only where the name falls into the wanted share."""

    name: str
    read: Callable[[], bytes]


def documents(spec: DataSpec, *, data_dir: Path | None = None) -> Iterator[Document]:
    """All documents of the source, sorted by name. `data_dir` takes the place of the manifest's folder on this machine.

    A file is named by its path below the source's folder, a row of a jsonl or parquet file also by its number.
    Raises DataError if there are none.
    """
    try:
        root, files = _find_files(spec, data_dir)
    except OSError as error:
        raise DataError(f"{source_of(spec, data_dir)}: {error.strerror or error}") from error
    if not files:
        wanted = ", ".join(TEXT_SUFFIXES + ROW_SUFFIXES)
        raise DataError(
            f"{source_of(spec, data_dir)}: no training data, for there is no file here ending in {wanted}; "
            "check the path, or point --data-dir at the data on this machine"
        )
    for path in files:
        name = path.relative_to(root).as_posix()
        if path.suffix == ".jsonl":
            yield from _jsonl_rows(path, name, spec.text_field)
        elif path.suffix == ".parquet":
            yield from _parquet_rows(path, name, spec.text_field)
        else:
            yield Document(name, functools.partial(_file_text, path))


def source_of(spec: DataSpec, data_dir: Path | None) -> str:
    """How a person said where the data is."""
    return f"--data-dir {data_dir}" if data_dir is not None else f"data.source = {spec.source!r}"


def share_of(name: str, spec: DataSpec) -> int | Literal["heldout"]:
    """Which share a document belongs to: a pure function of its name and the manifest."""
    digest = hashlib.blake2b(f"{spec.seed}\0{name}".encode("utf-8", "surrogateescape"), digest_size=16).digest()
    if int.from_bytes(digest[:8], "little") / 2**64 < spec.heldout_share:
        return "heldout"
    return int.from_bytes(digest[8:], "little") % spec.num_shares


def share_tokens(spec: DataSpec, share: int | Literal["heldout"], *, data_dir: Path | None = None) -> Tokens:
    """One share's tokens, its documents joined in order of name with a newline (or end-of-text) between them."""
    encode, dtype = _tokenizer(spec.tokenizer)
    parts: list[NDArray[Any]] = []
    for document in documents(spec, data_dir=data_dir):
        if share_of(document.name, spec) == share:
            parts.append(np.asarray(encode(document.read()), dtype=dtype))
    if not parts:
        which = "the held-out share" if share == "heldout" else f"share {share}"
        raise DataError(
            f"{source_of(spec, data_dir)}: no data in {which}: the source has too few documents for "
            f"data.num_shares = {spec.num_shares} and data.heldout_share = {spec.heldout_share}; "
            "lower num_shares or add documents"
        )
    joined: Tokens = np.concatenate(parts)
    return joined


class Batches(Protocol):
    """An endless, repeatable stream of batches from one share of the data."""

    @property
    def cursor(self) -> int:
        """Tokens of the share consumed so far, the batch given last included."""

    def next_batch(self) -> Tensor:
        """int64; its `numel()` are the tokens that the cursor advances by."""


def batches_for(model: nn.Module, spec: DataSpec, *, share: int, cursor: int = 0, pass_number: int = 0) -> Batches:
    """What a simulated learner trains on: the model's own `batches(...)` if it brings its data, as one for images may,
    else the manifest's text. Raises DataError."""
    own = getattr(model, "batches", None)
    if callable(own):
        stream: Batches = own(spec, share=share, cursor=cursor, pass_number=pass_number)
        return stream
    return TokenStream(spec, share=share, cursor=cursor, pass_number=pass_number)


class TokenStream:
    """An endless, repeatable stream of batches from one share.

    Iterating gives int64 tensors [batch_size, sequence_length]; `numel()` of a batch is what the cursor advances by.
    Every window of the share is visited once per round through it, in an order seeded by (data.seed, share,
    pass_number, round). Not thread-safe: one training loop owns it.
    """

    def __init__(
        self,
        spec: DataSpec,
        *,
        share: int,
        cursor: int = 0,
        pass_number: int = 0,
        data_dir: Path | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """`cursor`: tokens of this share already consumed; rounded up to the next whole window. `vocabulary`: tokens
        that the model knows.

        Raises DataError if the share has no documents, less than one sequence of tokens, or tokens beyond the model's.
        """
        tokens = share_tokens(spec, share, data_dir=data_dir)
        if vocabulary is not None and len(tokens) and int(tokens.max()) >= vocabulary:
            raise DataError(
                f"data.tokenizer = {spec.tokenizer!r} gives token {int(tokens.max())}, the model has {vocabulary}: "
                "model.config.vocab_size must be at least the tokenizer's"
            )
        self.spec = spec
        self.share = share
        self.pass_number = pass_number
        self._num_windows = len(tokens) // spec.sequence_length
        if self._num_windows == 0:
            raise DataError(
                f"{source_of(spec, data_dir)}: share {share} has {len(tokens)} tokens, fewer than one sequence of "
                f"data.sequence_length = {spec.sequence_length}; shorten sequences, lower num_shares or add documents"
            )
        self._windows = tokens[: self._num_windows * spec.sequence_length].reshape(-1, spec.sequence_length)
        self._window = -(-cursor // spec.sequence_length)
        self._round = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def cursor(self) -> int:
        """Tokens of the share consumed so far, the batch given last included."""
        return self._window * self.spec.sequence_length

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> Tensor:
        """int64 [batch_size, sequence_length]."""
        rows = [self._next_index() for _ in range(self.spec.batch_size)]
        return torch.from_numpy(self._windows[rows].astype(np.int64))

    def _next_index(self) -> int:
        number, place = divmod(self._window, self._num_windows)
        if number != self._round:
            seed = [self.spec.seed, self.share, self.pass_number, number]
            self._order = np.random.default_rng(seed).permutation(self._num_windows)
            self._round = number
        self._window += 1
        return int(self._order[place])


def heldout_batches(spec: DataSpec, num_sequences: int, *, data_dir: Path | None = None) -> list[Tensor]:
    """The same held-out sequences for everyone: `num_sequences` windows spread evenly over the held-out documents.

    int64 [<= batch_size, sequence_length] each; fewer in all if the held-out documents hold fewer.
    """
    tokens = share_tokens(spec, "heldout", data_dir=data_dir)
    num_windows = len(tokens) // spec.sequence_length
    if num_windows == 0:
        raise DataError(
            f"{source_of(spec, data_dir)}: the held-out documents have {len(tokens)} tokens, fewer than one "
            f"sequence of data.sequence_length = {spec.sequence_length}; raise data.heldout_share or add documents"
        )
    windows = tokens[: num_windows * spec.sequence_length].reshape(-1, spec.sequence_length)
    chosen = np.unique(np.linspace(0, num_windows - 1, num=min(num_sequences, num_windows)).round().astype(np.int64))
    picked = torch.from_numpy(windows[chosen].astype(np.int64))
    return list(torch.split(picked, spec.batch_size))


def _find_files(spec: DataSpec, data_dir: Path | None) -> tuple[Path, list[Path]]:
    if data_dir is None and spec.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return root, _files_below(root, (".py",), SKIPPED_FOLDERS)
    source = Path(os.path.expanduser(spec.source)) if data_dir is None else data_dir
    if source.is_file():
        return source.parent, [source]
    if source.is_dir():
        return source, _files_below(source, TEXT_SUFFIXES + ROW_SUFFIXES, frozenset())
    if data_dir is not None:
        raise DataError(f"--data-dir {data_dir}: no such folder or file")
    matches = sorted(Path(found) for found in globbing.glob(str(source), recursive=True))
    root = Path(*_fixed_parts(source))
    return root, [f for f in matches if f.suffix in TEXT_SUFFIXES + ROW_SUFFIXES and f.is_file()]


def _file_text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _files_below(root: Path, suffixes: tuple[str, ...], skipped: frozenset[str]) -> list[Path]:
    """Files by suffix, sorted by their posix path; skipped folders are not even entered."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted((path for path in found if path.is_file()), key=Path.as_posix)


def _fixed_parts(pattern: Path) -> tuple[str, ...]:
    """The leading parts of a glob that hold no wildcard: the folder its names are relative to."""
    parts: list[str] = []
    for part in pattern.parts:
        if globbing.has_magic(part):
            break
        parts.append(part)
    return tuple(parts)


def _jsonl_rows(path: Path, name: str, text_field: str) -> Iterator[Document]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    yield Document(f"{name}#{number}", _jsonl_text(line, f"{path}, line {number + 1}", text_field))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _jsonl_text(line: bytes, where: str, text_field: str) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        text = row.get(text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{where}: no text under data.text_field = {text_field!r}")
        return text.encode("utf-8", "surrogatepass")

    return read


def _parquet_rows(path: Path, name: str, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow  # an optional extra
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: parquet files need pyarrow: install geo-diloco[hub]") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            if text_field not in table.schema_arrow.names:
                columns = ", ".join(table.schema_arrow.names)
                raise DataError(f"{path}: no column data.text_field = {text_field!r}; it has {columns}")
            kind = table.schema_arrow.field(text_field).type
            if not any(text in str(kind) for text in ("string", "null")):
                raise DataError(f"{path}: column data.text_field = {text_field!r} holds {kind}, not text")
            for block in table.iter_batches(batch_size=1024, columns=[text_field]):
                for text in block.column(0).to_pylist():
                    if isinstance(text, str) and text:
                        yield Document(f"{name}#{number}", functools.partial(text.encode, "utf-8", "surrogatepass"))
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _tokenizer(name: str) -> tuple[Callable[[bytes], Any], Any]:
    """How text becomes token ids, and the narrowest dtype that holds them."""
    if name == "bytes":
        return (lambda text: np.frombuffer(text + b"\n", dtype=np.uint8)), np.uint8
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        raise DataError(f"data.tokenizer = {name!r}: neither 'bytes' nor a folder with a tokenizer")
    from transformers import AutoTokenizer  # seconds to import, and only needed here

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged folder brings to light in a library
        said = " ".join(str(error).split())[:300]
        raise DataError(f"data.tokenizer = {name!r}: no tokenizer can be loaded from it: {said}") from error
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: bytes) -> list[int]:
        ids: list[int] = tokenizer(text.decode("utf-8", "replace"), add_special_tokens=False)["input_ids"]
        return ids + end

    return encode, np.uint16 if len(tokenizer) <= 2**16 else np.int32
