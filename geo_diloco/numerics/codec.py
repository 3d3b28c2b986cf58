"""A fragment as bytes and back: none, bf16, int8 and int4 frames, zstd level 1 last.

Apart from everything else because these are the only bytes of a peer that become numbers: what a frame declares is
checked against the layout, part by part, before anything is allocated by it. Encoding is lossy and
only one peer does it per frame; decoding is what everyone must agree on to the bit. It is one multiply, `q * scale`,
and the encoder keeps it exact: scales have 8 significant bits (float32 whose low half is zero, rounded *up* from
absmax / qmax), q has at most 7, so the product needs no rounding, fused or not, on any device.

Frame, little-endian: header (`_HEADER`), one uint32 length per part, the parts. The fragment is cut into chunks of
262,144 elements; each chunk has the parts

    none        raw float32
    bf16        high bytes | low bytes                       (rounded to nearest even)
    int8        scales (high bytes then low bytes) | high halves of q | low halves of q
    int4        scales (high bytes then low bytes) | q       (two to a byte, first in the low half, stored + 8)

What is left to zstd is what it can shrink: low halves of int8 are noise, and decoding them as if they were not took as
long as all the rest. Halves lie two to a byte, so either plane is half a chunk. A block's scale is shared by `block`
consecutive elements; the last block of a fragment may be short. Scratch buffers are reused, per thread; everything runs
on the calling thread alone.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from geo_diloco.errors import (
    FrameError,
    FrameLayoutError,
    FrameLengthError,
    ManifestError,
    OversizedFrame,
    TruncatedFrame,
)
from geo_diloco.manifest import CodecName, CodecSpec, Digest
from geo_diloco.numerics import quantize
from geo_diloco.numerics.quantize import BLOCK_SIZES, CHUNK_ELEMENTS, Codes, Floats, Octets, num_blocks, num_halves

Bytes = bytes | bytearray | memoryview

_MAGIC: Final = b"GDF1"
_HEADER: Final = struct.Struct("<4sBxHIQI32s")
"""Magic, codec, padding, block, fragment, num_elements, num_parts, layout digest."""
_CODEC_IDS: Final[dict[CodecName, int]] = {"none": 0, "bf16": 1, "int8": 2, "int4": 3}
_CODEC_NAMES: Final = {number: name for name, number in _CODEC_IDS.items()}
_QMAX: Final[dict[CodecName, int]] = {"int8": 127, "int4": 7}
_PARTS: Final[dict[CodecName, int]] = {"none": 1, "bf16": 2, "int8": 3, "int4": 2}
"""Of a chunk."""
_NUM_ELEMENTS_MAX: Final = 1 << 40
_WINDOW_BYTES_MIN: Final = 1024
"""zstd's own smallest window."""


@dataclass(frozen=True)
class FrameHeader:
    """What a frame says about itself; nothing of it is trusted before it is compared with the layout."""

    codec: CodecName
    block: int
    """0 for `none` and `bf16`."""
    fragment: int
    num_elements: int
    layout_digest: Digest
    part_bytes: tuple[int, ...]
    """Compressed length of every part."""


@dataclass(frozen=True, slots=True)
class _Part:
    data: memoryview
    wanted: int
    """Decompressed length."""


def encode(vector: Tensor, spec: CodecSpec, *, layout_digest: Digest, fragment: int) -> bytes:
    """The frame of a flat float32 CPU vector. NonFiniteFrame if a value is NaN or infinite: it can't be sent.

    Largest error: none 0; bf16 2^-8 of the value; int8 and int4 half a scale, scale <= (1 + 2^-7) * absmax / qmax of
    the block. Blocks whose scale would be subnormal become 0.
    """
    _check_spec(spec)
    if vector.dtype != torch.float32 or vector.device.type != "cpu" or vector.dim() != 1 or not len(vector):
        raise FrameLayoutError(
            f"a vector of {tuple(vector.shape)} {vector.dtype} on {vector.device}: frames are made of flat, non-empty "
            "torch.float32 vectors on cpu"
        )
    values: Floats = np.ascontiguousarray(vector.detach().numpy())
    block = spec.block if spec.name in _QMAX else 0
    num_parts = _num_parts(spec.name, len(values))
    header = _HEADER.pack(
        _MAGIC, _CODEC_IDS[spec.name], block, fragment, len(values), num_parts, bytes.fromhex(layout_digest)
    )
    frame = io.BytesIO()  # parts go where they belong at once: joining them in the end costs a tenth more
    frame.write(header + bytes(4 * num_parts))
    part_bytes: list[int] = []
    for start in range(0, len(values), CHUNK_ELEMENTS):
        for plane, compressor in _planes(values[start : start + CHUNK_ELEMENTS], spec):
            part_bytes.append(frame.write(compressor.compress(plane.data)))
    frame.seek(len(header))
    frame.write(struct.pack(f"<{num_parts}I", *part_bytes))
    return frame.getvalue()


def decode(
    frame: Bytes,
    *,
    num_elements: int,
    layout_digest: Digest,
    fragment: int,
    spec: CodecSpec | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The float32 vector that every peer gets from these bytes, to the bit.

    `num_elements`, `layout_digest` and `fragment` say what is wanted; `spec`, if given, which codec. A subclass of
    FrameError if the frame is anything else; what is allocated before that is bounded by the *wanted* size, and the
    vector itself comes last. `out` is written to and returned if given (its contents are void after an error).
    """
    opened = _open(frame, num_elements, layout_digest, fragment, spec)
    values: Floats = np.empty(num_elements, dtype=np.float32) if out is None else _writable(out, num_elements)
    for index, start in enumerate(range(0, num_elements, CHUNK_ELEMENTS)):
        _decode_chunk(opened, index, values[start : start + CHUNK_ELEMENTS])
    return torch.from_numpy(values) if out is None else out


def decoded_chunks(
    frame: Bytes,
    *,
    num_elements: int,
    layout_digest: Digest,
    fragment: int,
    spec: CodecSpec | None = None,
) -> Iterator[Tensor]:
    """The vector of `decode`, and its errors, a chunk at a time: each is good until the next is asked for."""
    opened = _open(frame, num_elements, layout_digest, fragment, spec)
    room: Floats = np.empty(min(CHUNK_ELEMENTS, num_elements), dtype=np.float32)
    for index, start in enumerate(range(0, num_elements, CHUNK_ELEMENTS)):
        chunk = room[: min(CHUNK_ELEMENTS, num_elements - start)]
        _decode_chunk(opened, index, chunk)
        yield torch.from_numpy(chunk)


def inspect(frame: Bytes) -> FrameHeader:
    """Read the header and the table of parts, and check that the parts fill the frame exactly."""
    view = memoryview(frame).cast("B")
    return _with_table(view, _read_header(view))


# ---- chunks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Opened:
    """A frame of what is wanted, with all that can be checked before its chunks are decoded."""

    header: FrameHeader
    parts: list[_Part]
    scales: Floats | None
    """Of all chunks. They are small, and most lies show there."""


def _open(frame: Bytes, num_elements: int, layout_digest: Digest, fragment: int, spec: CodecSpec | None) -> _Opened:
    view = memoryview(frame).cast("B")
    header = _read_header(view)
    _check_wanted(header, num_elements, layout_digest, fragment, spec)
    parts = _checked_parts(view, _with_table(view, header))
    if header.codec not in _QMAX:
        return _Opened(header, parts, None)
    return _Opened(header, parts, _scales(parts[:: _PARTS[header.codec]], _QMAX[header.codec]))


def _decode_chunk(opened: _Opened, index: int, out: Floats) -> None:
    header, per_chunk = opened.header, _PARTS[opened.header.codec]
    planes = opened.parts[per_chunk * index : per_chunk * (index + 1)]
    if header.codec == "none":
        np.copyto(out.view(np.uint8), _decompress(planes[0]))
        quantize.check_finite(out, _scratch)
    elif header.codec == "bf16":
        high, low = map(_decompress, planes)
        quantize.values_from_planes(high, low, out, _scratch)
    else:
        assert opened.scales is not None
        first = CHUNK_ELEMENTS // header.block * index
        quantize.values_from_codes(_codes(planes[1:], len(out)), opened.scales[first:], header.block, out)


def _planes(values: Floats, spec: CodecSpec) -> Iterator[tuple[NDArray[Any], zstandard.ZstdCompressor]]:
    """What the parts of a chunk hold, uncompressed, and what is to compress it; each is good until the next is asked
    for."""
    compressor = _zstd.compressor
    if spec.name == "none":
        quantize.check_finite(values, _scratch)
        yield values, compressor
    elif spec.name == "bf16":
        for plane in quantize.planes_from_values(values, _scratch):
            yield plane, compressor
    else:
        scales, codes = quantize.codes_from_values(values, _QMAX[spec.name], spec.block, _scratch)
        yield scales, compressor
        if spec.name == "int4":
            yield quantize.pack_nibbles(codes, _scratch), compressor
        else:
            high, low = quantize.halves_from_codes(codes, _scratch)
            yield high, compressor
            yield low, _zstd.repeats_only


def _scales(parts: Sequence[_Part], qmax: int) -> Floats:
    """Of all chunks, one after the other."""
    halves = [_decompress(part).reshape(2, -1) for part in parts]
    high, low = (np.concatenate([each[half] for each in halves]) for half in (0, 1))
    return quantize.scales_from_planes(high, low, qmax)


def _codes(planes: Sequence[_Part], size: int) -> Codes:
    """Of a chunk, from what follows its scales: one plane for int4, two for int8."""
    first, *rest = map(_decompress, planes)
    if rest:
        return quantize.codes_from_halves(first, rest[0], size, _scratch)
    return quantize.unpack_nibbles(first, size, _scratch)


# ---- checks ------------------------------------------------------------------------------------------------------


def _read_header(view: memoryview) -> FrameHeader:
    """The fixed part, with an empty table."""
    if len(view) < _HEADER.size:
        raise TruncatedFrame(f"a frame of {len(view)} bytes: the header alone takes {_HEADER.size}")
    magic, number, block, fragment, num_elements, num_parts, digest = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise FrameError(f"not a codec frame: it begins with {magic!r}, not {_MAGIC!r}")
    if number not in _CODEC_NAMES:
        raise FrameLayoutError(f"codec number {number} is unknown: {_CODEC_NAMES} are known")
    codec = _CODEC_NAMES[number]
    if block not in (BLOCK_SIZES if codec in _QMAX else (0,)):
        raise FrameLayoutError(f"codec {codec} with block {block}: {_blocks_allowed(codec)}")
    if not 1 <= num_elements <= _NUM_ELEMENTS_MAX:
        raise FrameLengthError(f"a frame of {num_elements} elements: 1 to {_NUM_ELEMENTS_MAX} are possible")
    if num_parts != _num_parts(codec, num_elements):
        raise FrameLengthError(
            f"{num_parts} parts: {num_elements} elements of codec {codec} make {_num_parts(codec, num_elements)}"
        )
    return FrameHeader(codec, block, fragment, num_elements, Digest(digest.hex()), ())


def _with_table(view: memoryview, header: FrameHeader) -> FrameHeader:
    num_parts = _num_parts(header.codec, header.num_elements)
    body = _HEADER.size + 4 * num_parts
    if len(view) < body:
        raise TruncatedFrame(f"a frame of {len(view)} bytes: header and part lengths take {body}")
    part_bytes = struct.unpack_from(f"<{num_parts}I", view, _HEADER.size)
    total = body + sum(part_bytes)
    if len(view) < total:
        raise TruncatedFrame(f"a frame of {len(view)} bytes: it declares {total}")
    if len(view) > total:
        raise FrameLengthError(f"a frame of {len(view)} bytes: it declares {total}")
    return replace(header, part_bytes=part_bytes)


def _writable(out: Tensor, num_elements: int) -> Floats:
    if out.dtype != torch.float32 or tuple(out.shape) != (num_elements,) or not out.is_contiguous():
        raise FrameLayoutError(f"out is {tuple(out.shape)} {out.dtype}: ({num_elements},) torch.float32 was wanted")
    values: Floats = out.detach().numpy()
    return values


def _num_parts(codec: CodecName, num_elements: int) -> int:
    return _num_chunks(num_elements) * _PARTS[codec]


def _check_spec(spec: CodecSpec) -> None:
    if spec.name not in _CODEC_IDS:
        raise ManifestError(f"codec name = {spec.name!r}: one of {', '.join(_CODEC_IDS)} is allowed")
    if spec.name in _QMAX and spec.block not in BLOCK_SIZES:
        raise ManifestError(f"codec block = {spec.block!r}: {_blocks_allowed(spec.name)}")


def _blocks_allowed(codec: CodecName) -> str:
    return f"one of {', '.join(map(str, BLOCK_SIZES))} is allowed" if codec in _QMAX else "it has no blocks"


def _check_wanted(
    header: FrameHeader, num_elements: int, layout_digest: Digest, fragment: int, spec: CodecSpec | None
) -> None:
    if header.layout_digest != layout_digest:
        raise FrameLayoutError(f"made for layout {header.layout_digest[:12]}: this run has {layout_digest[:12]}")
    if header.fragment != fragment:
        raise FrameLayoutError(f"made for fragment {header.fragment}: fragment {fragment} was wanted")
    if header.num_elements != num_elements:
        raise FrameLengthError(f"{header.num_elements} elements: fragment {fragment} has {num_elements}")
    if spec is not None:
        block = spec.block if spec.name in _QMAX else 0
        if (header.codec, header.block) != (spec.name, block):
            raise FrameLayoutError(
                f"codec {header.codec} with block {header.block}: {spec.name} with block {block} was agreed"
            )


def _checked_parts(view: memoryview, header: FrameHeader) -> list[_Part]:
    """The parts, each of which says that it holds exactly what the layout wants (zstd frame headers; no contents)."""
    parts: list[_Part] = []
    offset = _HEADER.size + 4 * len(header.part_bytes)
    for size, wanted in zip(header.part_bytes, _raw_sizes(header), strict=True):
        part = view[offset : offset + size]
        offset += size
        if size > _compressed_max(wanted):
            raise FrameLengthError(f"a part of {size} bytes for {wanted} bytes of data: it can't be that long")
        try:
            parameters = zstandard.get_frame_parameters(part)
        except zstandard.ZstdError as exc:
            raise FrameError(f"a part that is not zstd data: {exc}") from exc
        declared = parameters.content_size
        if declared == zstandard.CONTENTSIZE_UNKNOWN:
            raise FrameLengthError("a part that doesn't say how long it is decompressed")
        if declared > wanted:
            raise OversizedFrame(f"a part that would decompress to {declared} bytes: {wanted} are wanted")
        if declared < wanted:
            raise FrameLengthError(f"a part that would decompress to {declared} bytes: {wanted} are wanted")
        if parameters.window_size > max(wanted, _WINDOW_BYTES_MIN) or parameters.dict_id:
            raise OversizedFrame(f"a part that needs a window of {parameters.window_size} bytes or a dictionary")
        parts.append(_Part(part, wanted))
    return parts


def _raw_sizes(header: FrameHeader) -> Iterator[int]:
    """Decompressed length of every part, from codec, block and element count alone."""
    for start in range(0, header.num_elements, CHUNK_ELEMENTS):
        size = min(CHUNK_ELEMENTS, header.num_elements - start)
        if header.codec == "none":
            yield 4 * size
        elif header.codec == "bf16":
            yield size
            yield size
        else:
            yield 2 * num_blocks(size, header.block)
            if header.codec == "int4":
                yield (size + 1) // 2
            else:
                yield num_halves(size)
                yield num_halves(size)


def _num_chunks(num_elements: int) -> int:
    return (num_elements + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS


def _compressed_max(size: int) -> int:
    """Longest zstd frame for `size` bytes: ZSTD_compressBound, rounded up, and 64 bytes."""
    return size + size // 128 + 64


# ---- zstd --------------------------------------------------------------------------------------------------------


class _Zstd(threading.local):
    """One thread's contexts."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=True)
        self.repeats_only = zstandard.ZstdCompressor(level=-1, write_checksum=False, write_content_size=True)
        """For what has no statistics worth coding: stored as it is, but for repetitions such as runs of zeros."""
        self.decompressor = zstandard.ZstdDecompressor()


_zstd: Final = _Zstd()
_scratch: Final = quantize.Scratch()


def _decompress(part: _Part) -> Octets:
    """The part was checked to declare `part.wanted` bytes, so that this allocates no more than a chunk."""
    try:
        data = _zstd.decompressor.decompress(part.data, max_output_size=part.wanted, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise FrameError(f"a part that is not valid zstd data: {exc}") from exc
    if len(data) != part.wanted:
        raise FrameLengthError(f"a part decompressed to {len(data)} bytes: it declared {part.wanted}")
    return np.frombuffer(data, dtype=np.uint8)
