"""Codecs: what comes back, how far it may be off, how long it may be, and the frame byte by byte."""

from __future__ import annotations

import math
import struct
import threading

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from geo_diloco.errors import FrameLayoutError, ManifestError, NonFiniteFrame
from geo_diloco.manifest import CodecName, CodecSpec, Digest
from geo_diloco.numerics.codec import decode, encode, inspect
from geo_diloco.numerics.quantize import BLOCK_SIZES, CHUNK_ELEMENTS
from geo_diloco.protocol.admission import blob_size_max

LAYOUT = Digest("0123456789abcdef" * 4)
QMAX = {"int8": 127, "int4": 7}
ALL_SPECS = [
    CodecSpec(name="none"),
    CodecSpec(name="bf16"),
    CodecSpec(name="int8", block=64),
    CodecSpec(name="int8", block=256),
    CodecSpec(name="int4", block=64),
    CodecSpec(name="int4", block=256),
]
ids = [f"{spec.name}-{spec.block}" for spec in ALL_SPECS]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ORDINARY = st.floats(-1000, 1000, width=32)


def round_trip(vector: torch.Tensor, spec: CodecSpec) -> torch.Tensor:
    frame = encode(vector, spec, layout_digest=LAYOUT, fragment=3)
    assert len(frame) <= blob_size_max(len(vector))
    return decode(frame, num_elements=len(vector), layout_digest=LAYOUT, fragment=3, spec=spec)


def gradient_like(num_elements: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed, with a scale that differs from row to row, as deltas of a transformer have."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(num_elements // 100 + 1, generator=generator).exp_().repeat_interleave(100)
    return torch.randn(num_elements, generator=generator) * rows[:num_elements] * 1e-3


def blocks_of(values: np.ndarray, block: int) -> np.ndarray:
    """Rows of `block` elements, the last filled up with zeros."""
    padded = np.zeros(math.ceil(len(values) / block) * block, dtype=np.float64)
    padded[: len(values)] = values
    return padded.reshape(-1, block)


def largest_scale(values: np.ndarray, name: str, block: int) -> np.ndarray:
    """Per element: absmax / qmax of its block, plus the rounding up to 8 bits; nothing is finer than 2^-126."""
    scale = np.abs(blocks_of(values, block)).max(axis=1) / QMAX[name] * (1 + 2**-7)
    return np.repeat(np.maximum(scale, 2.0**-126 * QMAX[name] * 2), block)[: len(values)]


@settings(max_examples=40, deadline=None)
@given(
    values=hnp.arrays(np.float32, st.integers(1, 700), elements=FINITE | ORDINARY),
    name=st.sampled_from(["int8", "int4"]),
    block=st.sampled_from([16, 64, 256]),
)
def test_an_integer_code_is_off_by_at_most_half_a_scale(values: np.ndarray, name: CodecName, block: int) -> None:
    back = round_trip(torch.from_numpy(values), CodecSpec(name=name, block=block)).numpy()
    error = np.abs(back.astype(np.float64) - values.astype(np.float64))
    # 2^-16: value times 1 / scale is rounded before the code is
    assert (error <= largest_scale(values, name, block) * (0.5 + 2.0**-16)).all()


@settings(max_examples=40, deadline=None)
@given(values=hnp.arrays(np.float32, st.integers(1, 700), elements=FINITE))
def test_bf16_rounds_to_nearest_even_and_never_to_infinity(values: np.ndarray) -> None:
    back = round_trip(torch.from_numpy(values), CodecSpec(name="bf16"))
    expected = torch.from_numpy(values).bfloat16().float()
    largest = torch.finfo(torch.bfloat16).max
    assert torch.equal(back, expected.clamp(-largest, largest))


@settings(max_examples=40, deadline=None)
@given(values=hnp.arrays(np.float32, st.integers(1, 700), elements=FINITE))
def test_none_keeps_every_bit(values: np.ndarray) -> None:
    back = round_trip(torch.from_numpy(values), CodecSpec(name="none")).numpy()
    assert (back.view(np.uint32) == values.view(np.uint32)).all()


@pytest.mark.parametrize("spec", ALL_SPECS, ids=ids)
@pytest.mark.parametrize("num_elements", [1, 15, 63, 64, 65, 4097, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS + 1])
def test_every_length_comes_back_whole(spec: CodecSpec, num_elements: int) -> None:
    vector = gradient_like(num_elements)
    back = round_trip(vector, spec)
    assert back.shape == vector.shape and back.dtype == torch.float32
    limit = {"none": 0.0, "bf16": 2**-8, "int8": 0.02, "int4": 0.2}[spec.name]
    assert (back - vector).norm() <= limit * vector.norm()


@pytest.mark.parametrize("spec", ALL_SPECS, ids=ids)
def test_chunks_are_independent_of_each_other(spec: CodecSpec) -> None:
    vector = gradient_like(2 * CHUNK_ELEMENTS + 77)
    whole = round_trip(vector, spec)
    apart = [round_trip(part.clone(), spec) for part in torch.split(vector, CHUNK_ELEMENTS)]
    assert torch.equal(whole, torch.cat(apart))


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_allowed_block_size_works(name: CodecName, block: int) -> None:
    vector = gradient_like(10_000)
    assert (round_trip(vector, CodecSpec(name=name, block=block)) - vector).norm() < 0.5 * vector.norm()


@pytest.mark.parametrize("spec", ALL_SPECS, ids=ids)
def test_zeros_stay_zeros_and_cost_nothing(spec: CodecSpec) -> None:
    vector = torch.zeros(100_000)
    frame = encode(vector, spec, layout_digest=LAYOUT, fragment=0)
    assert len(frame) < 300
    assert torch.equal(decode(frame, num_elements=100_000, layout_digest=LAYOUT, fragment=0), vector)


def test_a_block_of_zeros_among_others_has_scale_zero() -> None:
    vector = torch.cat([torch.ones(64), torch.zeros(64), torch.full((64,), 1e-42), torch.full((10,), -1.0)])
    back = round_trip(vector, CodecSpec(name="int4", block=64))
    assert torch.allclose(back[:64], torch.ones(64), rtol=2**-7)
    assert back[64:192].count_nonzero() == 0, "below the smallest scale is zero"
    assert torch.allclose(back[192:], -torch.ones(10), rtol=2**-7)


def test_the_extremes_of_float32_survive() -> None:
    top = torch.finfo(torch.float32).max
    vector = torch.tensor([top, -top, 0.0, top / 2])
    for spec in ALL_SPECS:
        back = round_trip(vector, spec)
        assert torch.isfinite(back).all()
        assert ((back / top - vector / top).abs() <= 0.08).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", ALL_SPECS, ids=ids)
@pytest.mark.parametrize("where", [0, 70, 99])
def test_a_value_that_is_not_finite_is_not_sent(spec: CodecSpec, bad: float, where: int) -> None:
    vector = torch.ones(100)
    vector[where] = bad
    with pytest.raises(NonFiniteFrame):
        encode(vector, spec, layout_digest=LAYOUT, fragment=0)


@pytest.mark.parametrize("spec", ALL_SPECS, ids=ids)
def test_encoding_leaves_its_input_alone_and_gives_the_same_bytes_again(spec: CodecSpec) -> None:
    vector = gradient_like(5_000)
    before = vector.clone()
    first = encode(vector, spec, layout_digest=LAYOUT, fragment=0)
    round_trip(gradient_like(300_000, seed=1), spec)  # leaves other numbers in the scratch buffers
    assert encode(vector, spec, layout_digest=LAYOUT, fragment=0) == first
    assert torch.equal(vector, before)


@pytest.mark.parametrize("spec", ALL_SPECS, ids=ids)
def test_what_is_decoded_encodes_to_itself_nearly(spec: CodecSpec) -> None:
    once = round_trip(gradient_like(10_000), spec)
    twice = round_trip(once, spec)
    assert (twice - once).norm() <= 0.02 * once.norm()


def test_two_threads_do_not_share_buffers() -> None:
    vectors = [gradient_like(200_000, seed=seed) for seed in range(2)]
    spec = CodecSpec(name="int4", block=64)
    expected = [round_trip(vector, spec) for vector in vectors]
    results: list[list[torch.Tensor]] = [[], []]

    def work(index: int) -> None:
        results[index].extend(round_trip(vectors[index], spec) for _ in range(10))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(results[index]) == 10
        assert all(torch.equal(result, expected[index]) for result in results[index])


def test_decoding_into_a_given_vector_writes_there() -> None:
    vector = gradient_like(1_000)
    spec = CodecSpec(name="int8", block=256)
    frame = encode(vector, spec, layout_digest=LAYOUT, fragment=0)
    out = torch.full((1_000,), 5.0)
    assert decode(frame, num_elements=1_000, layout_digest=LAYOUT, fragment=0, out=out) is out
    assert torch.equal(out, decode(frame, num_elements=1_000, layout_digest=LAYOUT, fragment=0))
    for wrong in (torch.zeros(999), torch.zeros(1_000, dtype=torch.float64), torch.zeros(2_000)[::2]):
        with pytest.raises(FrameLayoutError):
            decode(frame, num_elements=1_000, layout_digest=LAYOUT, fragment=0, out=wrong)


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        (CodecSpec(name="bf16"), 11.15),
        (CodecSpec(name="int8", block=256), 7.5),
        (CodecSpec(name="int4", block=64), 3.7),
        (CodecSpec(name="int4", block=256), 3.3),
    ],
    ids=lambda value: str(value) if isinstance(value, float) else f"{value.name}-{value.block}",
)
@pytest.mark.parametrize("num_elements", [50_000, 600_000])
def test_bits_per_element_stay_near_those_of_a_real_gradient(spec: CodecSpec, bits: float, num_elements: int) -> None:
    frame = encode(gradient_like(num_elements), spec, layout_digest=LAYOUT, fragment=0)
    assert len(frame) * 8 / num_elements <= bits + 0.05


@pytest.mark.parametrize("num_elements", [1, 2, 100, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 5])
def test_no_frame_is_longer_than_the_admitted_size(num_elements: int) -> None:
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 2**32, num_elements, dtype=np.uint32)
    noise &= 0xBFFFFFFF  # no exponent of all ones: finite, and as incompressible as it gets
    vector = torch.from_numpy(noise.view(np.float32))
    for spec in [*ALL_SPECS, CodecSpec(name="int8", block=16)]:
        assert len(encode(vector, spec, layout_digest=LAYOUT, fragment=0)) <= blob_size_max(num_elements)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (CodecSpec(name="int4", block=48), "block = 48: one of 16, 32"),
        (CodecSpec(name="int8", block=0), "block = 0"),
        (CodecSpec(name="fp4"), "name = 'fp4': one of none"),  # type: ignore[arg-type]
    ],
)
def test_a_codec_that_does_not_exist_is_named(spec: CodecSpec, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        encode(torch.ones(3), spec, layout_digest=LAYOUT, fragment=0)


@pytest.mark.parametrize("vector", [torch.zeros(0), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)])
def test_only_flat_float32_vectors_are_framed(vector: torch.Tensor) -> None:
    with pytest.raises(FrameLayoutError, match="flat, non-empty"):
        encode(vector, CodecSpec(name="none"), layout_digest=LAYOUT, fragment=0)


# ---- the frame, byte by byte, read and written here without the codec ---------------------------------------------


def parts_of(frame: bytes) -> list[bytes]:
    num_parts = struct.unpack_from("<I", frame, 20)[0]
    lengths = struct.unpack_from(f"<{num_parts}I", frame, 56)
    parts, offset = [], 56 + 4 * num_parts
    for length in lengths:
        parts.append(zstandard.ZstdDecompressor().decompress(frame[offset : offset + length]))
        offset += length
    assert offset == len(frame)
    return parts


def test_the_header_says_what_was_asked_for() -> None:
    frame = encode(torch.ones(300_000), CodecSpec(name="int4", block=256), layout_digest=LAYOUT, fragment=5)
    assert frame[:4] == b"GDF1"
    assert struct.unpack_from("<BxHIQI", frame, 4) == (3, 256, 5, 300_000, 4)
    assert frame[24:56].hex() == LAYOUT
    header = inspect(frame)
    assert (header.codec, header.block, header.fragment, header.num_elements) == ("int4", 256, 5, 300_000)
    assert header.layout_digest == LAYOUT
    assert sum(header.part_bytes) + 56 + 4 * 4 == len(frame)
    assert inspect(memoryview(frame)) == header
    plain = inspect(encode(torch.ones(3), CodecSpec(name="bf16", block=64), layout_digest=LAYOUT, fragment=0))
    assert (plain.codec, plain.block) == ("bf16", 0)


def test_int4_is_two_codes_to_a_byte_first_in_the_low_half_plus_8() -> None:
    vector = torch.tensor([7.0, -7.0, 0.0, 3.0, -1.0])
    frame = encode(vector, CodecSpec(name="int4", block=16), layout_digest=LAYOUT, fragment=0)
    scales, codes = parts_of(frame)
    assert scales == bytes([0x3F, 0x80]), "1.0, high byte and low byte"
    assert codes == bytes([15 | 1 << 4, 8 | 11 << 4, 7 | 8 << 4]), "the filling nibble is a zero"


def test_int8_is_high_halves_then_low_halves_after_the_scales_planes() -> None:
    vector = torch.cat([torch.tensor([127.0, -1.0]), torch.zeros(14), torch.tensor([254.0, -4.0])])
    frame = encode(vector, CodecSpec(name="int8", block=16), layout_digest=LAYOUT, fragment=0)
    scales, high, low = parts_of(frame)
    assert scales == bytes([0x3F, 0x40, 0x80, 0x00]), "high bytes of 1.0 and 2.0, then low bytes"
    codes = [127, 255, *[0] * 14, 127, 254, *[0] * 14]
    assert high == bytes(codes[i] >> 4 | codes[16 + i] & 0xF0 for i in range(16))
    assert low == bytes(codes[i] & 0x0F | (codes[16 + i] & 0x0F) << 4 for i in range(16))


def test_what_zstd_cannot_shrink_is_stored_and_what_repeats_is_not() -> None:
    """Decoding stored bytes takes no time, and a fragment that was hardly touched costs hardly anything."""
    num_elements, spec = 262_144, CodecSpec(name="int8", block=256)

    def low_half_bytes(vector: torch.Tensor) -> int:
        return inspect(encode(vector, spec, layout_digest=LAYOUT, fragment=0)).part_bytes[2]

    noise = gradient_like(num_elements)
    assert num_elements // 2 < low_half_bytes(noise) < num_elements // 2 + 32
    noise[1_000:] = 0.0
    assert low_half_bytes(noise) < 1_500


def test_ties_round_to_even() -> None:
    vector = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert round_trip(vector, CodecSpec(name="int4", block=16)).tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


def test_bf16_ties_round_to_even_as_they_do_elsewhere() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F808001, 0x3F807FFF], dtype=np.uint32)
    back = round_trip(torch.from_numpy(bits.view(np.float32)), CodecSpec(name="bf16")).numpy()
    expected = [0x3F800000, 0x3F820000, 0xBF800000, 0xBF820000, 0x3F810000, 0x3F800000]
    assert back.view(np.uint32).tolist() == expected


def test_a_scale_has_8_significant_bits_and_is_rounded_up() -> None:
    frame = encode(torch.tensor([1.0]), CodecSpec(name="int4", block=16), layout_digest=LAYOUT, fragment=0)
    high, low = parts_of(frame)[0]
    scale = struct.unpack("<f", bytes([0, 0, low, high]))[0]
    assert 1 / 7 <= scale < 1 / 7 * (1 + 2**-7)


@settings(max_examples=50, deadline=None)
@given(values=hnp.arrays(np.float32, st.integers(1, 200), elements=ORDINARY), name=st.sampled_from(["int8", "int4"]))
def test_code_times_scale_needs_no_rounding(values: np.ndarray, name: CodecName) -> None:
    """Hence a fused multiply-add somewhere can't make other bits."""
    frame = encode(torch.from_numpy(values), CodecSpec(name=name, block=16), layout_digest=LAYOUT, fragment=0)
    planes, *codes = parts_of(frame)
    blocks = len(planes) // 2
    scales = [struct.unpack("<f", bytes([0, 0, planes[blocks + i], planes[i]]))[0] for i in range(blocks)]
    if name == "int8":
        pairs = [(high & 15, low & 15) for high, low in zip(*codes, strict=True)]
        pairs += [(high >> 4, low >> 4) for high, low in zip(*codes, strict=True)]
        integers = [16 * (high - 16 if high > 7 else high) + low for high, low in pairs]
    else:
        integers = [nibble - 8 for code in codes[0] for nibble in (code & 15, code >> 4)]
    exact = [integers[i] * scales[i // 16] for i in range(len(values))]  # Python floats: float64
    decoded = decode(frame, num_elements=len(values), layout_digest=LAYOUT, fragment=0)
    assert decoded.tolist() == exact


def test_a_frame_written_by_hand_decodes() -> None:
    compress = zstandard.ZstdCompressor(level=1).compress
    high, low = bytes([7, 8, 0, 0, 0, 0, 0, 0]), bytes([15, 1, 3, 0, 0, 0, 0, 0])
    parts = [compress(bytes([0x3F, 0x80])), compress(high), compress(low)]
    head = struct.pack("<4sBxHIQI32s", b"GDF1", 2, 64, 9, 3, 3, bytes.fromhex(LAYOUT))
    frame = head + struct.pack("<3I", *map(len, parts)) + b"".join(parts)
    assert decode(frame, num_elements=3, layout_digest=LAYOUT, fragment=9).tolist() == [127.0, -127.0, 3.0]
