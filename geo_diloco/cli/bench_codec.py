"""What the codecs cost here: bytes per parameter of either leg, their speed beside a plain copy of memory, and how long
it takes until a peer has a delta in its hands.

Speeds are shares of a memcpy between two large buffers in the same run, because a machine's own speed drifts; each is
the median of several rounds in which all codecs and the copy take turns. The time to a peer is what a user feels:
encode, send over a relay of that rate, decode what came out, one after the other; hivemind's own codecs, as its
averager uses them, take their turns among ours.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from geo_diloco.cli.bench_deltas import TrainedDeltas, one_thread, trained_deltas
from geo_diloco.cli.bench_hivemind import FLOAT16, QUANTILE_8BIT, UNIFORM_8BIT, HivemindCodec
from geo_diloco.cli.bench_wire import Wire, wire
from geo_diloco.manifest import CodecSpec
from geo_diloco.numerics import codec
from geo_diloco.numerics.gate import cosine

CODECS = (
    CodecSpec(name="none", block=0),
    CodecSpec(name="bf16", block=0),
    CodecSpec(name="int8", block=256),
    CodecSpec(name="int4", block=64),
    CodecSpec(name="int4", block=256),
)
HIVEMINDS = (FLOAT16, UNIFORM_8BIT, QUANTILE_8BIT)
COPY_BYTES = 256 << 20


def measure_codecs(
    *, num_rounds: int, hidden_size: int, bytes_per_s: float, round_trip_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Keys: `memcpy_gbytes_per_s`, what the link was, and `rows`, one per codec, keys as in `row_of`."""
    one_thread()
    deltas = trained_deltas(hidden_size=hidden_size, num_layers=6, say=say)
    contenders: dict[str, _Contender] = {_name(spec): _Ours(spec, deltas.layout.digest) for spec in CODECS}
    contenders |= {f"hivemind {name}": HivemindCodec(name) for name in HIVEMINDS}

    async def rounds() -> tuple[list[float], dict[str, Seen]]:
        async with wire(bytes_per_s=bytes_per_s, round_trip_s=round_trip_s) as made:
            return await _rounds(contenders, deltas.delta_N, made, num_rounds, say)

    copy_s, seen = asyncio.run(rounds())
    copy_bytes_per_s = COPY_BYTES / statistics.median(copy_s)
    rows = [row_of(name, contenders[name], deltas, seen[name], copy_bytes_per_s) for name in contenders]
    return {
        "parameters": len(deltas.delta_N),
        "memcpy_gbytes_per_s": copy_bytes_per_s / 1e9,
        "link_mbit": bytes_per_s * 8 / 1e6,
        "link_rtt_ms": round_trip_s * 1000,
        "rows": with_shares(rows, of=f"hivemind {FLOAT16}"),
    }


@dataclass
class Seen:
    """Seconds, by round."""

    encode: list[float] = field(default_factory=list)
    send: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    @property
    def to_peer_s(self) -> float:
        """The median round, all three together."""
        return statistics.median(map(sum, zip(self.encode, self.send, self.decode, strict=True)))


async def _rounds(
    contenders: dict[str, _Contender], delta_N: Tensor, made: Wire, num_rounds: int, say: Callable[[str], None]
) -> tuple[list[float], dict[str, Seen]]:
    """Nothing of it runs beside anything else: the link rests while a codec works."""
    copy_s: list[float] = []
    seen = {name: Seen() for name in contenders}
    source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
    _copy(source, target)
    for number in range(num_rounds):
        copy_s.append(_timed(partial(_copy, source, target))[0])
        for name, contender in contenders.items():
            seconds, frame = _timed(partial(contender.encode, delta_N))
            seen[name].encode.append(seconds)
            began = time.perf_counter()
            arrived = await made.send(frame)
            seen[name].send.append(time.perf_counter() - began)
            seen[name].decode.append(_timed(partial(contender.decode, arrived))[0])
        say(f"round {number + 1}/{num_rounds}: memcpy {COPY_BYTES / copy_s[-1] / 1e9:.1f} GB/s")
    return copy_s, seen


class _Contender(Protocol):
    def encode(self, vector_N: Tensor) -> bytes:
        """What goes over the wire."""

    def decode(self, data: bytes) -> Tensor:
        """What the other side works with."""


class _Ours:
    def __init__(self, spec: CodecSpec, layout_digest: Any) -> None:
        self._spec, self._digest = spec, layout_digest
        self._out_N: Tensor | None = None
        """Decoded into again and again, as a merge does."""

    def encode(self, vector_N: Tensor) -> bytes:
        if self._out_N is None or len(self._out_N) != len(vector_N):
            self._out_N = torch.zeros_like(vector_N)
        return codec.encode(vector_N, self._spec, layout_digest=self._digest, fragment=0)

    def decode(self, data: bytes) -> Tensor:
        assert self._out_N is not None
        return codec.decode(
            data, num_elements=len(self._out_N), layout_digest=self._digest, fragment=0, out=self._out_N
        )


def row_of(name: str, contender: _Contender, deltas: TrainedDeltas, seen: Seen, copy: float) -> dict[str, Any]:
    """`copy`: bytes per second of a memcpy."""
    delta_N = deltas.delta_N
    frame = contender.encode(delta_N)
    raw, millions = 4 * len(delta_N), len(delta_N) / 1e6
    encode, decode = statistics.median(seen.encode), statistics.median(seen.decode)
    return {
        "codec": name,
        "bytes_per_param": len(frame) / len(delta_N),
        "bytes_per_param_down": len(contender.encode(deltas.update_N)) / len(delta_N),
        "one_minus_cosine": 1.0 - (cosine(contender.decode(frame), delta_N) or 0.0),
        "encode_share_of_memcpy": raw / encode / copy,
        "decode_share_of_memcpy": raw / decode / copy,
        "encode_ms": 1e3 * encode,
        "send_ms": 1e3 * statistics.median(seen.send),
        "decode_ms": 1e3 * decode,
        "ms_to_peer": 1e3 * seen.to_peer_s,
        "ms_to_peer_per_million": 1e3 * seen.to_peer_s / millions,
    }


def with_shares(rows: Sequence[dict[str, Any]], *, of: str) -> list[dict[str, Any]]:
    """Beside each time to a peer, what share it is of that one's."""
    whole = next(row["ms_to_peer"] for row in rows if row["codec"] == of)
    return [row | {"to_peer_share_of_float16": row["ms_to_peer"] / whole} for row in rows]


def _name(spec: CodecSpec) -> str:
    return f"{spec.name}/{spec.block}" if spec.block else spec.name


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result
