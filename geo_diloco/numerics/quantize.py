"""Numbers to small integers and back, one chunk at a time, in reused buffers.

Apart from `codec.py` so that what a code *means* (here) can be read without how it is framed, checked for length and
compressed (there). Exactness is the point: a scale has 8 significant bits and is never subnormal, a code at most 7,
so `q * scale` is exact in float32 and every peer decodes the same bits. A chunk is cut into blocks of consecutive
elements that share a scale; the last one of a fragment may be short.

Speed comes from numpy passes over buffers that stay in cache; they run on the calling thread. The one torch call,
the maximum per block, is kept below the size at which torch would start others.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geo_diloco.errors import FrameError, NonFiniteFrame

if sys.byteorder != "little":
    raise ImportError("geo_diloco needs a little-endian machine")

CHUNK_ELEMENTS: Final = 262_144
"""Elements per chunk: 1 MiB of float32."""
BLOCK_SIZES: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Blocks allowed: powers of two, so that no block crosses a chunk."""

Floats = NDArray[np.float32]
Octets = NDArray[np.uint8]
Codes = NDArray[np.int8]
Words = NDArray[np.uint32]

_INFINITY_BITS: Final = 0x7F800000
_SCALE_BITS_MIN: Final = 0x00800000
"""Smallest normal float32: a block whose scale would be below it counts as zero."""
_BF16_INFINITY: Final = 0x7F80
_BF16_MAX: Final = 3.3895313892515355e38
_NIBBLE_ZERO: Final = 8
"""int4 codes are stored plus 8, as 1 to 15; 0 is not a code."""
_NIBBLE_SHIFT: Final = np.uint16(16)
_HALF: Final = np.uint64(4)
_LOW_HALVES: Final = np.uint64(0x0F0F0F0F0F0F0F0F)
_HIGH_HALVES: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
_ELEMENTS_UNTHREADED: Final = 32_767
"""torch keeps a reduction of fewer than 32,768 elements on the calling thread."""


class Scratch(threading.local):
    """One thread's buffers. What a function returns may lie in them and is good until the next call."""

    def __init__(self) -> None:
        self.floats: Floats = np.zeros(CHUNK_ELEMENTS, dtype=np.float32)
        self.words: Words = np.zeros(CHUNK_ELEMENTS, dtype=np.uint32)
        self.codes: Codes = np.zeros(CHUNK_ELEMENTS, dtype=np.int8)
        self.halves = np.zeros(CHUNK_ELEMENTS, dtype=np.uint16)
        self.octets: Octets = np.zeros(2 * CHUNK_ELEMENTS, dtype=np.uint8)
        self.peaks: Floats = np.zeros(CHUNK_ELEMENTS // BLOCK_SIZES[0], dtype=np.float32)
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def block_peaks(self, num_blocks: int, block: int) -> Floats:
        """Maximum of each of the first blocks of `floats`."""
        rows = _ELEMENTS_UNTHREADED // block
        if block not in self._views:
            source = torch.from_numpy(self.floats).view(-1, block)
            target = torch.from_numpy(self.peaks)[: len(source)]
            self._views[block] = list(zip(torch.split(source, rows), torch.split(target, rows), strict=True))
        num_views = (num_blocks + rows - 1) // rows
        for source, target in self._views[block][:num_views]:
            torch.amax(source, 1, out=target)
        return self.peaks[:num_blocks]


def num_blocks(num_elements: int, block: int) -> int:
    return (num_elements + block - 1) // block


def check_finite(values: Floats, scratch: Scratch) -> float:
    """Largest magnitude; NonFiniteFrame if a value is NaN or infinite."""
    peak = float(np.abs(values, out=scratch.floats[: len(values)]).max())
    if not np.isfinite(peak):
        raise NonFiniteFrame("a value is NaN or infinite")
    return peak


# ---- int8 and int4 -----------------------------------------------------------------------------------------------


def codes_from_values(values: Floats, qmax: int, block: int, scratch: Scratch) -> tuple[Octets, Codes]:
    """(scale planes, codes in [-qmax, qmax]); code = value / scale, rounded to nearest even.

    scale is absmax / qmax rounded up to 8 significant bits; 0 for a block of zeros or of less than 2^-126 * qmax.
    """
    size = len(values)
    blocks = num_blocks(size, block)
    work = scratch.floats
    np.abs(values, out=work[:size])
    work[size : blocks * block] = 0.0
    peaks = scratch.block_peaks(blocks, block)
    if not np.isfinite(peaks.max()):
        raise NonFiniteFrame("a value is NaN or infinite")
    bits = (peaks / np.float32(qmax)).view(np.uint32)
    bits += 0xFFFF
    bits &= 0xFFFF0000
    bits[bits < _SCALE_BITS_MIN] = 0
    np.minimum(bits, _scale_bits_max(qmax), out=bits)  # at the very top of float32; still value / scale < qmax + 0.5
    inverse = np.zeros(blocks, dtype=np.float32)
    np.divide(np.float32(1.0), bits.view(np.float32), out=inverse, where=bits != 0)
    np.copyto(work[: blocks * block].reshape(blocks, block), inverse[:, None])
    rounded = np.multiply(values, work[:size], out=work[:size])  # spread first: faster than a broadcast multiply
    np.rint(rounded, out=rounded)
    codes = scratch.codes[:size]
    np.copyto(codes, rounded, casting="unsafe")
    planes = np.empty(2 * blocks, dtype=np.uint8)
    planes[:blocks] = bits >> 24
    planes[blocks:] = (bits >> 16) & 0xFF
    return planes, codes


def scales_from_planes(high: Octets, low: Octets, qmax: int) -> Floats:
    """NonFiniteFrame if a scale (times qmax) is NaN or infinite, FrameError if it is negative or subnormal."""
    bits = high.astype(np.uint32)
    bits <<= 8
    bits |= low
    bits <<= 16
    highest = int(bits.max())
    if highest > _scale_bits_max(qmax):
        if (bits & 0x7FFFFFFF).max() >= _INFINITY_BITS:
            raise NonFiniteFrame("a scale is NaN or infinite")
        if highest > 0x7FFFFFFF:
            raise FrameError("a scale is negative")
        raise NonFiniteFrame(f"a scale is so large that {qmax} times it is infinite")
    if ((bits != 0) & (bits < _SCALE_BITS_MIN)).any():
        raise FrameError("a scale is subnormal")
    return bits.view(np.float32)


def values_from_codes(codes: Codes, scales: Floats, block: int, out: Floats) -> None:
    """out = code * scale, exact. Made in `out` itself: it is seldom in cache, but after the first pass it is."""
    whole = len(codes) // block
    end = whole * block
    np.copyto(out, codes)
    blocks = out[:end].reshape(whole, block)
    np.multiply(blocks, scales[:whole, None], out=blocks)
    if end < len(codes):
        out[end:] *= scales[whole]


def num_halves(num_elements: int) -> int:
    """Bytes of either half of so many int8 codes: two halves to a byte, in whole words of 8."""
    return 8 * ((num_elements + 15) // 16)


def halves_from_codes(codes: Codes, scratch: Scratch) -> tuple[Octets, Octets]:
    """(high halves, low halves) of int8 codes, those of i and i + num_halves in one byte, the first in the low half of
    it. `codes` must lie in the scratch buffer."""
    count = num_halves(len(codes))
    scratch.codes[len(codes) : 2 * count] = 0
    first, second = _words(scratch.codes[:count]), _words(scratch.codes[count : 2 * count])
    high, low = scratch.octets[:count], scratch.octets[count : 2 * count]
    work = _words(scratch.halves)[: count // 8]
    words = np.right_shift(first, _HALF, out=_words(high))
    words &= _LOW_HALVES
    words |= np.bitwise_and(second, _HIGH_HALVES, out=work)
    words = np.left_shift(second, _HALF, out=_words(low))
    words &= _HIGH_HALVES
    words |= np.bitwise_and(first, _LOW_HALVES, out=work)
    return high, low


def codes_from_halves(high: Octets, low: Octets, size: int, scratch: Scratch) -> Codes:
    """Back from `halves_from_codes`. FrameError for a code that no encoder writes."""
    count = len(high)
    first, second = _words(scratch.codes[:count]), _words(scratch.codes[count : 2 * count])
    work = _words(scratch.halves)[: count // 8]
    np.left_shift(_words(high), _HALF, out=first)
    first &= _HIGH_HALVES
    first |= np.bitwise_and(_words(low), _LOW_HALVES, out=work)
    np.right_shift(_words(low), _HALF, out=second)
    second &= _LOW_HALVES
    second |= np.bitwise_and(_words(high), _HIGH_HALVES, out=work)
    codes = scratch.codes[:size]
    if codes.min() < -127 or scratch.codes[size : 2 * count].any():
        raise FrameError("an int8 code outside [-127, 127], or one after the last")
    return codes


def pack_nibbles(codes: Codes, scratch: Scratch) -> Octets:
    """Two int4 codes to a byte, the first in the low half. Overwrites `codes`, which must lie in the scratch buffer."""
    size = len(codes)
    num_octets = (size + 1) // 2
    codes += _NIBBLE_ZERO
    if size % 2:
        scratch.codes[size] = _NIBBLE_ZERO
    pairs = scratch.codes[: 2 * num_octets].view(np.uint16)
    shifted = np.right_shift(pairs, 4, out=scratch.halves[:num_octets])
    shifted |= pairs
    packed = scratch.octets[:num_octets]
    np.copyto(packed, shifted, casting="unsafe")
    return packed


def unpack_nibbles(packed: Octets, size: int, scratch: Scratch) -> Codes:
    """Back from `pack_nibbles`. FrameError for a nibble that no encoder writes."""
    pairs = scratch.halves[: len(packed)]
    np.multiply(packed, _NIBBLE_SHIFT, out=pairs, dtype=np.uint16)
    pairs |= packed
    pairs &= 0x0F0F
    nibbles = pairs.view(np.uint8)
    if nibbles.min() == 0 or (size % 2 and nibbles[size] != _NIBBLE_ZERO):
        raise FrameError("an int4 code outside [-7, 7]")
    codes = nibbles[:size].view(np.int8)
    codes -= _NIBBLE_ZERO
    return codes


# ---- bf16 --------------------------------------------------------------------------------------------------------


def planes_from_values(values: Floats, scratch: Scratch) -> tuple[Octets, Octets]:
    """(high bytes, low bytes) of the values rounded to bf16, nearest even; never to infinity."""
    size = len(values)
    if check_finite(values, scratch) > _BF16_MAX:
        values = np.clip(values, -_BF16_MAX, _BF16_MAX, out=scratch.floats[:size])
    bits = values.view(np.uint32)
    work = np.right_shift(bits, 16, out=scratch.words[:size])
    work &= 1
    work += 0x7FFF
    work += bits
    work >>= 16
    halves = scratch.halves[:size]
    np.copyto(halves, work, casting="unsafe")
    pairs = halves.view(np.uint8)
    high, low = scratch.octets[:size], scratch.octets[size : 2 * size]
    np.copyto(high, pairs[1::2])
    np.copyto(low, pairs[::2])
    return high, low


def values_from_planes(high: Octets, low: Octets, out: Floats, scratch: Scratch) -> None:
    """NonFiniteFrame if a value is NaN or infinite."""
    halves = scratch.halves[: len(out)]
    pairs = halves.view(np.uint8)
    pairs[1::2] = high
    pairs[::2] = low
    if (halves & 0x7FFF).max() >= _BF16_INFINITY:
        raise NonFiniteFrame("a value is NaN or infinite")
    bits = out.view(np.uint32)
    np.copyto(bits, halves)
    bits <<= 16


# ---- shared ------------------------------------------------------------------------------------------------------


def _words(octets: NDArray[Any]) -> NDArray[np.uint64]:
    """Eight at a time, which is how numpy is quick with halves of bytes."""
    return octets.view(np.uint64)


def _scale_bits_max(qmax: int) -> Any:
    """Bits of the largest scale with qmax * scale finite."""
    return np.float32(np.finfo(np.float32).max / np.float32(qmax)).view(np.uint32) & 0xFFFF0000
