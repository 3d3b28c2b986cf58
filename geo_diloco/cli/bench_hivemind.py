"""hivemind's codecs, for benchmarks that set ours beside them.

They are taken as its averager uses them: a tensor becomes a protobuf message, that becomes bytes, and back. Its 8-bit
codecs fail to decode with numpy 2.4 and newer, which no longer takes an array of one element for a number; here they
are read by the same steps without that, so that they can be compared at all.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

FLOAT16 = "FLOAT16"
UNIFORM_8BIT = "UNIFORM_8BIT"
QUANTILE_8BIT = "QUANTILE_8BIT"
_SIZE_BYTES = 8


class HivemindCodec:
    """One of them, by hivemind's name for it."""

    def __init__(self, name: str) -> None:
        from hivemind.compression import CompressionInfo
        from hivemind.proto import runtime_pb2

        self._codec = averager_codec(name)
        self._info: Any = CompressionInfo
        self._message: Any = runtime_pb2.Tensor

    def encode(self, vector_N: Tensor) -> bytes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that torch will drop what it uses
            message = self._codec.compress(vector_N, self._info.from_tensor(vector_N))
        data: bytes = message.SerializeToString()
        return data

    def decode(self, data: bytes) -> Tensor:
        message = self._message()
        message.ParseFromString(data)
        decoded: Tensor = self._codec.extract(message)
        return decoded


def averager_codec(name: str) -> Any:
    """For `DecentralizedAverager(compression=...)`; whatever the averager of this process receives is decoded by the
    readable one, too, so this comes before it starts."""
    from hivemind.compression import (
        Float16Compression,
        Quantile8BitQuantization,
        Uniform8BitQuantization,
        serialization,
    )

    if name == FLOAT16:
        return Float16Compression()
    kind = {UNIFORM_8BIT: Uniform8BitQuantization, QUANTILE_8BIT: Quantile8BitQuantization}[name]
    readable = type(kind.__name__, (kind,), {"extract": lambda self, message: _extract(message)})()
    serialization._BASE_COMPRESSION_TYPES[name] = readable
    return readable


def _extract(message: Any) -> Tensor:
    """`Quantization.extract`, step by step."""
    begin = _SIZE_BYTES + 4 * int.from_bytes(message.buffer[:_SIZE_BYTES], "little")
    data = memoryview(bytearray(message.buffer))
    codebook = torch.frombuffer(data[_SIZE_BYTES:begin], dtype=torch.float32)
    indices = torch.frombuffer(data[begin:], dtype=torch.uint8).to(torch.int64).reshape(tuple(message.size))
    return codebook.to(getattr(torch, message.dtype))[indices].requires_grad_(message.requires_grad)
