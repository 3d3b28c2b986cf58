"""Frames from a liar: each is refused by name, and before anything large is allocated."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Callable

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_diloco.errors import (
    FrameError,
    FrameLayoutError,
    FrameLengthError,
    GeoDilocoError,
    NonFiniteFrame,
    OversizedFrame,
    TruncatedFrame,
)
from geo_diloco.manifest import CodecName, CodecSpec, Digest
from geo_diloco.numerics.codec import decode, decoded_chunks, encode, inspect
from geo_diloco.numerics.gate import GateResult, check_contribution
from geo_diloco.numerics.merge import l2_norm

LAYOUT = Digest("0123456789abcdef" * 4)
OTHER_LAYOUT = Digest("fedcba9876543210" * 4)
LARGE = 4 << 20
"""Elements: 16 MiB decoded."""
SMALL_BYTES = 1 << 20
"""What may be allocated before a bad frame of LARGE elements is refused."""
CHUNK = 262_144
_HEADER_BYTES = 56
INT4 = CodecSpec(name="int4", block=64)
CODECS: dict[CodecName, int] = {"none": 0, "bf16": 1, "int8": 2, "int4": 3}
compress = zstandard.ZstdCompressor(level=1).compress


def frame_of(
    parts: list[bytes],
    *,
    codec: str = "int4",
    block: int = 64,
    fragment: int = 0,
    num_elements: int = 128,
    layout: str = LAYOUT,
    magic: bytes = b"GDF1",
) -> bytes:
    """A frame around compressed parts, written without the codec."""
    number = CODECS.get(codec, 77)  # type: ignore[call-overload]
    header = struct.pack(
        "<4sBxHIQI32s", magic, number, block, fragment, num_elements, len(parts), bytes.fromhex(layout)
    )
    return header + struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts)


def large_parts(
    scales: bytes = bytes([0x3F, 0x80]), *, bad_scales: bytes | None = None, bad_at: int = 0
) -> list[bytes]:
    """Parts of a valid int4 frame of LARGE elements (all codes zero), with other scales in one chunk."""
    good = compress(scales[:1] * 4096 + scales[1:] * 4096)
    bad = compress(bad_scales) if bad_scales is not None else good
    codes = compress(b"\x88" * (CHUNK // 2))
    return list(itertools.chain.from_iterable((bad if i == bad_at else good, codes) for i in range(LARGE // CHUNK)))


def decode_large(frame: bytes, num_elements: int = LARGE) -> torch.Tensor:
    return decode(
        frame, num_elements=num_elements, layout_digest=LAYOUT, fragment=0, spec=CodecSpec(name="int4", block=64)
    )


def peak_of(action: Callable[[], object]) -> int:
    """Bytes allocated at most while it runs; numpy and zstandard report theirs to tracemalloc."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def scales_with(high: int, low: int) -> bytes:
    """One bad scale, the last of 4096."""
    return bytes([0x3F] * 4095 + [high] + [0x80] * 4095 + [low])


def lying_bomb(declared: int, actual: int) -> bytes:
    """zstd data that says `declared` and decompresses to `actual` bytes: the 4-byte content size is overwritten."""
    data = bytearray(compress(bytes(actual)))
    single_segment = bool(data[4] & 0x20)
    assert data[4] >> 6 == 2, "a content size of 4 bytes"
    struct.pack_into("<I", data, 5 if single_segment else 6, declared)
    assert zstandard.get_frame_parameters(bytes(data)).content_size == declared
    return bytes(data)


def replaced(parts: list[bytes], index: int, part: bytes) -> list[bytes]:
    return [*parts[:index], part, *parts[index + 1 :]]


def test_the_valid_frame_of_these_tests_is_valid_and_is_what_takes_memory() -> None:
    frame = frame_of(large_parts(), num_elements=LARGE)
    assert decode_large(frame).shape == (LARGE,)
    assert peak_of(lambda: decode_large(frame)) > 4 * LARGE, "the measurement sees the vector"


UNKNOWN_SIZE = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"\x88" * (CHUNK // 2))
SKIPPABLE = struct.pack("<II", 0x184D2A50, 1000) + bytes(1000)
CODES = compress(b"\x88" * (CHUNK // 2))

BAD_LARGE_FRAMES: dict[str, tuple[bytes, type[FrameError]]] = {
    "empty": (b"", TruncatedFrame),
    "half a header": (frame_of(large_parts(), num_elements=LARGE)[:30], TruncatedFrame),
    "cut in the table": (frame_of(large_parts(), num_elements=LARGE)[:70], TruncatedFrame),
    "cut in the parts": (frame_of(large_parts(), num_elements=LARGE)[:-5], TruncatedFrame),
    "one byte too many": (frame_of(large_parts(), num_elements=LARGE) + b"x", FrameLengthError),
    "another magic": (frame_of(large_parts(), num_elements=LARGE, magic=b"GDF2"), FrameError),
    "another layout": (frame_of(large_parts(), num_elements=LARGE, layout=OTHER_LAYOUT), FrameLayoutError),
    "another fragment": (frame_of(large_parts(), num_elements=LARGE, fragment=1), FrameLayoutError),
    "another block": (frame_of(large_parts(), num_elements=LARGE, block=128), FrameLayoutError),
    "impossible block": (frame_of(large_parts(), num_elements=LARGE, block=3), FrameLayoutError),
    "unknown codec": (frame_of(large_parts(), num_elements=LARGE, codec="fp4"), FrameLayoutError),
    "codec not agreed on": (
        frame_of(large_parts() + large_parts()[: LARGE // CHUNK], num_elements=LARGE, codec="int8"),
        FrameLayoutError,
    ),
    "int8 as it was in two planes": (frame_of(large_parts(), num_elements=LARGE, codec="int8"), FrameLengthError),
    "fewer elements": (frame_of(large_parts()[:2], num_elements=CHUNK), FrameLengthError),
    "more elements": (frame_of(large_parts() * 2, num_elements=2 * LARGE), FrameLengthError),
    "no elements": (frame_of([], num_elements=0), FrameLengthError),
    "2^63 elements": (frame_of(large_parts(), num_elements=1 << 63), FrameLengthError),
    "a part missing": (frame_of(large_parts()[:-1], num_elements=LARGE), FrameLengthError),
    "a part too many": (frame_of([*large_parts(), b""], num_elements=LARGE), FrameLengthError),
    "parts swapped": (frame_of(large_parts()[::-1], num_elements=LARGE), OversizedFrame),
    "an empty part": (frame_of(replaced(large_parts(), 9, b""), num_elements=LARGE), FrameError),
    "a part of noise": (frame_of(replaced(large_parts(), 9, b"noise" * 20), num_elements=LARGE), FrameError),
    "a part of unknown size": (
        frame_of(replaced(large_parts(), 9, UNKNOWN_SIZE), num_elements=LARGE),
        FrameLengthError,
    ),
    "a skippable part": (frame_of(replaced(large_parts(), 9, SKIPPABLE), num_elements=LARGE), FrameLengthError),
    "a part too long": (
        frame_of(replaced(large_parts(), 9, CODES + bytes(CHUNK)), num_elements=LARGE),
        FrameLengthError,
    ),
    "a part one short": (
        frame_of(replaced(large_parts(), 9, compress(b"\x88" * (CHUNK // 2 - 1))), num_elements=LARGE),
        FrameLengthError,
    ),
    "a zip bomb": (frame_of(replaced(large_parts(), 9, compress(bytes(1 << 28))), num_elements=LARGE), OversizedFrame),
    "a zip bomb of scales": (
        frame_of(replaced(large_parts(), 30, compress(bytes(1 << 28))), num_elements=LARGE),
        OversizedFrame,
    ),
    "a huge window": (
        frame_of(replaced(large_parts(), 30, lying_bomb(8192, 1 << 28)), num_elements=LARGE),
        OversizedFrame,
    ),
    "a NaN scale": (
        frame_of(large_parts(bad_scales=scales_with(0x7F, 0xC0), bad_at=15), num_elements=LARGE),
        NonFiniteFrame,
    ),
    "an infinite scale": (
        frame_of(large_parts(bad_scales=scales_with(0x7F, 0x80), bad_at=15), num_elements=LARGE),
        NonFiniteFrame,
    ),
    "a negative infinite scale": (
        frame_of(large_parts(bad_scales=scales_with(0xFF, 0x80), bad_at=15), num_elements=LARGE),
        NonFiniteFrame,
    ),
    "a scale that overflows": (
        frame_of(large_parts(bad_scales=scales_with(0x7F, 0x00), bad_at=15), num_elements=LARGE),
        NonFiniteFrame,
    ),
    "a negative scale": (
        frame_of(large_parts(bad_scales=scales_with(0xBF, 0x80), bad_at=15), num_elements=LARGE),
        FrameError,
    ),
    "a subnormal scale": (
        frame_of(large_parts(bad_scales=scales_with(0x00, 0x40), bad_at=15), num_elements=LARGE),
        FrameError,
    ),
}


@pytest.mark.parametrize("name", BAD_LARGE_FRAMES)
def test_a_bad_frame_is_refused_by_name_before_anything_large_is_allocated(name: str) -> None:
    frame, error = BAD_LARGE_FRAMES[name]
    caught: list[FrameError] = []

    def attempt() -> None:
        try:
            decode_large(frame)
        except FrameError as exc:
            caught.append(exc)

    attempt()  # the first call makes this thread's scratch buffers
    assert peak_of(attempt) < SMALL_BYTES
    assert len(caught) == 2
    assert type(caught[0]) is error
    assert len(str(caught[0])) > 10


@pytest.mark.parametrize("name", BAD_LARGE_FRAMES)
def test_the_gate_refuses_a_bad_frame_by_the_same_name_and_with_less_memory_than_a_vector(name: str) -> None:
    frame, error = BAD_LARGE_FRAMES[name]
    results: list[GateResult] = []
    with pytest.raises(error) as caught:
        decode_large(frame)

    def attempt() -> None:
        results.append(check_contribution(frame, num_elements=LARGE, layout_digest=LAYOUT, fragment=0, specs=(INT4,)))

    attempt()
    assert peak_of(attempt) < SMALL_BYTES
    assert {(result.ok, result.reason) for result in results} == {(False, f"{error.code} {caught.value}")}


def test_what_lies_in_the_last_chunk_alone_is_found_too() -> None:
    """The gate has let go of all chunks before it by then."""
    vector = torch.ones(2 * CHUNK + 5)
    spec = CodecSpec(name="none")
    frame = bytearray(encode(vector, spec, layout_digest=LAYOUT, fragment=0))
    rest = zstandard.ZstdCompressor(level=1).compress(struct.pack("<5f", 1, 1, float("nan"), 1, 1))
    *_, last = inspect(frame).part_bytes
    frame[-last:] = rest
    frame[_HEADER_BYTES + 8 : _HEADER_BYTES + 12] = struct.pack("<I", len(rest))
    result = check_contribution(frame, num_elements=len(vector), layout_digest=LAYOUT, fragment=0)
    assert not result.ok and result.reason.startswith(NonFiniteFrame.code)


def test_a_good_frame_is_checked_in_the_memory_of_a_chunk() -> None:
    frame = encode(torch.ones(LARGE), CodecSpec(name="int4", block=64), layout_digest=LAYOUT, fragment=0)

    def attempt() -> None:
        assert check_contribution(frame, num_elements=LARGE, layout_digest=LAYOUT, fragment=0).ok

    attempt()
    assert peak_of(attempt) < 4 * LARGE / 2


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4"])
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 77])
def test_chunks_together_are_the_vector_to_the_bit(codec: CodecName, size: int) -> None:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    frame = encode(vector, CodecSpec(name=codec, block=64), layout_digest=LAYOUT, fragment=0)
    whole = decode(frame, num_elements=size, layout_digest=LAYOUT, fragment=0)
    chunks = decoded_chunks(frame, num_elements=size, layout_digest=LAYOUT, fragment=0)
    assert torch.equal(torch.cat([chunk.clone() for chunk in chunks]), whole)
    assert check_contribution(frame, num_elements=size, layout_digest=LAYOUT, fragment=0).norm == l2_norm(whole)


def test_a_wrong_layout_fragment_codec_or_length_is_named_in_the_message() -> None:
    frame = encode(torch.ones(128), CodecSpec(name="int4", block=64), layout_digest=LAYOUT, fragment=0)
    with pytest.raises(FrameLayoutError, match=r"layout 0123456789ab: this run has fedcba987654"):
        decode(frame, num_elements=128, layout_digest=OTHER_LAYOUT, fragment=0)
    with pytest.raises(FrameLayoutError, match=r"fragment 0: fragment 4 was wanted"):
        decode(frame, num_elements=128, layout_digest=LAYOUT, fragment=4)
    with pytest.raises(FrameLengthError, match=r"128 elements: fragment 0 has 127"):
        decode(frame, num_elements=127, layout_digest=LAYOUT, fragment=0)
    for spec in (CodecSpec(name="int8", block=64), CodecSpec(name="int4", block=256), CodecSpec(name="none")):
        with pytest.raises(FrameLayoutError, match="was agreed"):
            decode(frame, num_elements=128, layout_digest=LAYOUT, fragment=0, spec=spec)


@pytest.mark.parametrize("name", CODECS)
def test_a_frame_cut_anywhere_is_truncated(name: CodecName) -> None:
    spec = CodecSpec(name=name, block=64)
    frame = encode(torch.linspace(-1, 1, 200), spec, layout_digest=LAYOUT, fragment=0)
    for length in range(len(frame)):
        with pytest.raises(TruncatedFrame):
            decode(frame[:length], num_elements=200, layout_digest=LAYOUT, fragment=0)
        with pytest.raises(TruncatedFrame):
            inspect(frame[:length])


@pytest.mark.parametrize("name", CODECS)
def test_a_part_cut_anywhere_is_not_valid(name: CodecName) -> None:
    """The table tells the truth about the bytes, but the zstd data inside stops early."""
    spec = CodecSpec(name=name, block=64)
    frame = encode(torch.linspace(-1, 1, 200), spec, layout_digest=LAYOUT, fragment=0)
    sizes = inspect(frame).part_bytes
    offset = 56 + 4 * len(sizes)
    parts = []
    for size in sizes:
        parts.append(frame[offset : offset + size])
        offset += size
    for index, part in enumerate(parts):
        for length in range(len(part)):
            bad = frame_of(
                replaced(parts, index, part[:length]),
                codec=name,
                block=64 if name.startswith("int") else 0,
                num_elements=200,
            )
            with pytest.raises(FrameError):
                decode(bad, num_elements=200, layout_digest=LAYOUT, fragment=0)


def test_a_bomb_that_lies_about_its_size_never_gets_more_than_it_declared() -> None:
    """64 MiB of zeros that claim to be the 1 MiB wanted."""
    bomb = lying_bomb(4 * CHUNK, 1 << 26)
    frame = frame_of([bomb], codec="none", block=0, num_elements=CHUNK)

    def attempt() -> None:
        with pytest.raises(FrameError):
            decode(frame, num_elements=CHUNK, layout_digest=LAYOUT, fragment=0)

    attempt()
    assert peak_of(attempt) < 3 * 4 * CHUNK, "the vector and one chunk"


def test_a_part_is_one_zstd_frame_and_nothing_else() -> None:
    codes = compress(bytes([0x88] * 64))
    scales = compress(bytes([0x3F, 0x3F, 0x80, 0x80]))
    assert decode(frame_of([scales, codes]), num_elements=128, layout_digest=LAYOUT, fragment=0).count_nonzero() == 0
    skippable = struct.pack("<II", 0x184D2A50, 64) + bytes([0x88] * 64)  # passes for 64 bytes, holds none
    with pytest.raises(FrameError):
        decode(frame_of([scales, skippable]), num_elements=128, layout_digest=LAYOUT, fragment=0)
    for extra in (compress(b"x"), b"x", skippable):
        with pytest.raises(FrameError):
            decode(frame_of([scales, codes + extra]), num_elements=128, layout_digest=LAYOUT, fragment=0)


def test_codes_that_no_encoder_writes_are_refused() -> None:
    scales = compress(bytes([0x3F, 0x3F, 0x80, 0x80]))
    for octet in (0x80, 0x08, 0x00):
        codes = compress(bytes([0x88] * 63 + [octet]))
        with pytest.raises(FrameError, match=r"\[-7, 7\]"):
            decode(frame_of([scales, codes]), num_elements=128, layout_digest=LAYOUT, fragment=0)
    zeros = bytes(64)
    for high, num_elements in ((bytes(63) + b"\x80", 128), (bytes(63) + b"\x10", 127)):  # -128; 16 after the last one
        frame = frame_of([scales, compress(high), compress(zeros)], codec="int8", num_elements=num_elements)
        with pytest.raises(FrameError, match=r"\[-127, 127\]"):
            decode(frame, num_elements=num_elements, layout_digest=LAYOUT, fragment=0)
    odd = compress(bytes([0x88] * 63 + [0x98]))  # the half byte past the end is not zero
    with pytest.raises(FrameError):
        decode(frame_of([scales, odd], num_elements=127), num_elements=127, layout_digest=LAYOUT, fragment=0)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800000, 0xFF800000, 0x7F810000, 0xFFFFFFFF])
def test_values_that_are_not_finite_are_refused(bits: int) -> None:
    raw = struct.pack("<3I", 0, bits, 0)
    with pytest.raises(NonFiniteFrame):
        decode(
            frame_of([compress(raw)], codec="none", block=0, num_elements=3),
            num_elements=3,
            layout_digest=LAYOUT,
            fragment=0,
        )
    planes = [compress(bytes([0, bits >> 24, 0])), compress(bytes([0, bits >> 16 & 255, 0]))]
    with pytest.raises(NonFiniteFrame):
        decode(
            frame_of(planes, codec="bf16", block=0, num_elements=3), num_elements=3, layout_digest=LAYOUT, fragment=0
        )


VALID = {
    name: encode(
        torch.sin(torch.arange(300.0)),
        CodecSpec(name=name, block=64),
        layout_digest=LAYOUT,
        fragment=0,
    )
    for name in CODECS
}


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(CODECS)),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_a_damaged_frame_gives_a_frame_error_or_a_finite_vector(
    name: CodecName, changes: list[tuple[int, int]]
) -> None:
    damaged = bytearray(VALID[name])
    for where, octet in changes:
        damaged[where % len(damaged)] = octet
    try:
        vector = decode(bytes(damaged), num_elements=300, layout_digest=LAYOUT, fragment=0)
    except FrameError:
        return
    assert vector.shape == (300,) and bool(torch.isfinite(vector).all())


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200), prefix=st.integers(0, 60))
def test_bytes_that_were_never_a_frame_give_a_frame_error(data: bytes, prefix: int) -> None:
    with pytest.raises(FrameError):
        decode(VALID["int4"][:prefix] + data, num_elements=300, layout_digest=LAYOUT, fragment=0)


def test_every_frame_error_is_one_of_the_projects() -> None:
    assert issubclass(FrameError, GeoDilocoError)
    for error in (TruncatedFrame, FrameLengthError, NonFiniteFrame, OversizedFrame, FrameLayoutError):
        assert issubclass(error, FrameError)
