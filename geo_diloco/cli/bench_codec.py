"""What the codecs cost here: bytes per parameter of either leg, and their speed beside a plain copy of memory.

Speeds are shares of a memcpy between two large buffers in the same run, because a machine's own speed drifts; each is
the median of several rounds in which all codecs and the copy take turns. The time to a peer is what a user feels:
encode, send at 100 Mbit/s, decode; hivemind's FLOAT16 stands beside ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from geo_diloco.cli.bench_deltas import one_thread, trained_deltas
from geo_diloco.manifest import CodecSpec
from geo_diloco.numerics import codec
from geo_diloco.numerics.gate import cosine

CODECS = (
    CodecSpec(name="bf16", block=0),
    CodecSpec(name="int8", block=256),
    CodecSpec(name="int4", block=64),
    CodecSpec(name="int4", block=256),
)
COPY_BYTES = 256 << 20
LINK_BITS_PER_S = 100e6
HIVEMIND = "hivemind FLOAT16"


def measure_codecs(*, num_rounds: int, hidden_size: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Keys: `memcpy_gbytes_per_s` and `rows`, one per codec, keys as in `_row`."""
    one_thread()
    deltas = trained_deltas(hidden_size=hidden_size, num_layers=6, say=say)
    contenders: dict[str, _Contender] = {_name(spec): _Ours(spec, deltas.layout.digest) for spec in CODECS}
    contenders[HIVEMIND] = _Hivemind()
    copy_s: list[float] = []
    encode_s: dict[str, list[float]] = {name: [] for name in contenders}
    decode_s: dict[str, list[float]] = {name: [] for name in contenders}
    source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
    _copy(source, target)
    for number in range(num_rounds):
        copy_s.append(_timed(partial(_copy, source, target))[0])
        for name, contender in contenders.items():
            seconds, frame = _timed(partial(contender.encode, deltas.delta_N))
            encode_s[name].append(seconds)
            decode_s[name].append(_timed(partial(contender.decode, frame))[0])
        say(f"round {number + 1}/{num_rounds}: memcpy {COPY_BYTES / copy_s[-1] / 1e9:.1f} GB/s")
    copy_bytes_per_s = COPY_BYTES / statistics.median(copy_s)
    rows = []
    for name, contender in contenders.items():
        encode, decode = statistics.median(encode_s[name]), statistics.median(decode_s[name])
        rows.append(_row(name, contender, deltas.delta_N, deltas.update_N, encode, decode, copy_bytes_per_s))
    return {
        "parameters": len(deltas.delta_N),
        "memcpy_gbytes_per_s": copy_bytes_per_s / 1e9,
        "rows": rows,
    }


class _Contender:
    def encode(self, vector_N: Tensor) -> Any:
        raise NotImplementedError

    def decode(self, frame: Any) -> Tensor:
        raise NotImplementedError

    def num_bytes(self, frame: Any) -> int:
        raise NotImplementedError


class _Ours(_Contender):
    def __init__(self, spec: CodecSpec, layout_digest: Any) -> None:
        self._spec, self._digest = spec, layout_digest
        self._num_elements = 0
        self._out_N: Tensor | None = None
        """Decoded into again and again, as a merge does."""

    def encode(self, vector_N: Tensor) -> bytes:
        if self._out_N is None or len(self._out_N) != len(vector_N):
            self._out_N = torch.zeros_like(vector_N)
        return codec.encode(vector_N, self._spec, layout_digest=self._digest, fragment=0)

    def decode(self, frame: bytes) -> Tensor:
        assert self._out_N is not None
        return codec.decode(
            frame, num_elements=len(self._out_N), layout_digest=self._digest, fragment=0, out=self._out_N
        )

    def num_bytes(self, frame: bytes) -> int:
        return len(frame)


class _Hivemind(_Contender):
    """As its averager does: the tensor as a message, and that as bytes."""

    def __init__(self) -> None:
        from hivemind.compression import CompressionInfo, Float16Compression

        self._codec = Float16Compression()
        self._info: Any = CompressionInfo

    def encode(self, vector_N: Tensor) -> Any:
        return self._codec.compress(vector_N, self._info.from_tensor(vector_N))

    def decode(self, frame: Any) -> Tensor:
        decoded: Tensor = self._codec.extract(frame)
        return decoded

    def num_bytes(self, frame: Any) -> int:
        return int(frame.ByteSize())


def _row(
    name: str, contender: _Contender, delta_N: Tensor, update_N: Tensor, encode: float, decode: float, copy: float
) -> dict[str, Any]:
    """`copy`: bytes per second of a memcpy; `encode`, `decode`: seconds for the delta."""
    num_bytes = {}
    for leg, vector_N in (("up", delta_N), ("down", update_N)):
        num_bytes[leg] = contender.num_bytes(contender.encode(vector_N)) / len(vector_N)
    frame = contender.encode(delta_N)
    raw = 4 * len(delta_N)
    return {
        "codec": name,
        "bytes_per_param": num_bytes["up"],
        "bytes_per_param_down": num_bytes["down"],
        "one_minus_cosine": 1.0 - (cosine(contender.decode(frame), delta_N) or 0.0),
        "encode_share_of_memcpy": raw / encode / copy,
        "decode_share_of_memcpy": raw / decode / copy,
        "ms_to_peer_per_million": 1e3
        * (encode + decode + 8 * num_bytes["up"] * len(delta_N) / LINK_BITS_PER_S)
        / (len(delta_N) / 1e6),
    }


def _name(spec: CodecSpec) -> str:
    return f"{spec.name}/{spec.block}" if spec.block else spec.name


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result
