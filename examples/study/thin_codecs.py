"""Two codecs thinner than int4, tried out: what they save, and what they cost in loss. The package has neither.

    python examples/study/thin_codecs.py bytes                     # bytes and error on a trained model's own deltas
    python examples/study/thin_codecs.py loss --seeds 3            # lockstep, beside none and int4; about 2 min an arm

What a codec drops is not lost: of a delta it stays in the learner's carry, of an update in the syncer's residual. So a
coarse codec delays rather than destroys, as long as what is left is shorter than what was there: that is why the scale
of a block is fitted to its codes (least squares) and not to its largest value.

    two-bit   -3, -1, 1, 3 times half a step; a block of normal numbers is cut where its mean square error is least
    ternary   -1, 0, 1; 0 below half the scale, likewise

Codes are packed four to a byte, then zstd level 1, scales as in `numerics/codec.py`. In the arms below the thin codec
goes by the name of int8, which takes its place in this process.
"""

from __future__ import annotations

import argparse
import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from geo_diloco.cli.bench_deltas import trained_deltas
from geo_diloco.manifest import CodecSpec, Digest
from geo_diloco.numerics import codec, gate
from geo_diloco.numerics.codec import CHUNK_ELEMENTS, Bytes, FrameHeader
from geo_diloco.sim.train.arms import arms_from, base_manifest
from geo_diloco.sim.train.comparing import run_arm
from geo_diloco.sim.train.fleet import Fleet, Machine
from geo_diloco.sim.train.results import summarize

Floats = NDArray[np.float32]
MAGIC = b"GDX1"
HEADER = struct.Struct("<4sHIQ32s")
"""Magic, block, fragment, elements, layout digest; then per chunk the lengths of two parts, and the parts."""
LENGTHS = struct.Struct("<II")
STEP_OF_RMS = {"two-bit": 0.4978, "ternary": 1.224}
"""Half the distance of two levels, or the only level, as a share of a block's root mean square: least error for
normally distributed numbers."""
LARGEST = {"two-bit": 3.0, "ternary": 1.0}
REAL = {"encode": codec.encode, "decode": codec.decode, "inspect": codec.inspect}


def quantized(values: Floats, kind: str, block: int) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """(scales as the upper halves of float32, codes), blocks padded with zeros."""
    padded = np.zeros(-(-len(values) // block) * block, dtype=np.float32)
    padded[: len(values)] = values
    rows = padded.reshape(-1, block)
    step = STEP_OF_RMS[kind] * np.sqrt(np.mean(rows * rows, axis=1, keepdims=True))
    unit = np.divide(rows, step, out=np.zeros_like(rows), where=step > 0)
    codes = np.rint(unit) if kind == "ternary" else 2 * np.floor(unit / 2) + 1
    codes = np.clip(codes, -LARGEST[kind], LARGEST[kind])
    codes[step[:, 0] == 0] = 0 if kind == "ternary" else 1
    fitted = np.sum(codes * rows, axis=1) / np.maximum(np.sum(codes * codes, axis=1), 1.0)
    bits = (fitted.astype(np.float32).view(np.uint32) + 0x8000) >> 16
    return bits.astype(np.uint16), codes.astype(np.int8).reshape(-1)


def packed(codes: NDArray[np.int8], kind: str) -> NDArray[np.uint8]:
    symbols = (codes + 1 if kind == "ternary" else (codes + 3) // 2).astype(np.uint8).reshape(-1, 4)
    return symbols[:, 0] | symbols[:, 1] << 2 | symbols[:, 2] << 4 | symbols[:, 3] << 6


def unpacked(octets: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    symbols = np.stack([octets >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1).astype(np.float32)
    return symbols - 1 if kind == "ternary" else 2 * symbols - 3


def encode(vector: Tensor, kind: str, block: int, *, layout_digest: Digest, fragment: int) -> bytes:
    values: Floats = vector.numpy()
    compressor = zstandard.ZstdCompressor(level=1)
    parts = [HEADER.pack(MAGIC, block, fragment, len(values), bytes.fromhex(layout_digest))]
    for start in range(0, len(values), CHUNK_ELEMENTS):
        scales, codes = quantized(values[start : start + CHUNK_ELEMENTS], kind, block)
        planes = np.concatenate([scales >> 8, scales & 0xFF]).astype(np.uint8)
        both = [compressor.compress(plane.tobytes()) for plane in (planes, packed(codes, kind))]
        parts += [LENGTHS.pack(*map(len, both)), *both]
    return b"".join(parts)


def decode(frame: Bytes, kind: str) -> Tensor:
    _, block, _, num_elements, _ = HEADER.unpack_from(frame)
    decompressor, at, chunks = zstandard.ZstdDecompressor(), HEADER.size, []
    while at < len(frame):
        sizes = LENGTHS.unpack_from(frame, at)
        at += LENGTHS.size
        both = []
        for size in sizes:
            both.append(np.frombuffer(decompressor.decompress(bytes(frame[at : at + size])), dtype=np.uint8))
            at += size
        high, low = both[0].reshape(2, -1).astype(np.uint32)
        scales = (high << 24 | low << 16).view(np.float32)
        chunks.append((unpacked(both[1], kind).reshape(-1, block) * scales[:, None]).reshape(-1))
    return torch.from_numpy(np.concatenate(chunks)[:num_elements])


def take_the_place_of_int8(kind: str) -> None:
    """Wherever this process encodes, decodes or looks at a frame."""

    def encoding(vector: Tensor, spec: CodecSpec, *, layout_digest: Digest, fragment: int) -> bytes:
        if spec.name != "int8":
            return REAL["encode"](vector, spec, layout_digest=layout_digest, fragment=fragment)
        return encode(vector, kind, spec.block, layout_digest=layout_digest, fragment=fragment)

    def decoding(frame: Bytes, *, out: Tensor | None = None, **wanted: Any) -> Tensor:
        if bytes(frame[:4]) != MAGIC:
            return REAL["decode"](frame, out=out, **wanted)
        values = decode(frame, kind)
        return values if out is None else out.copy_(values)

    def inspecting(frame: Bytes) -> FrameHeader:
        if bytes(frame[:4]) != MAGIC:
            return REAL["inspect"](frame)
        _, block, fragment, num_elements, digest = HEADER.unpack_from(frame)
        return FrameHeader("int8", block, fragment, num_elements, Digest(digest.hex()), ())

    codec.encode, codec.decode, codec.inspect = encoding, decoding, inspecting
    gate.decode, gate.inspect = decoding, inspecting


def bytes_and_error(given: argparse.Namespace) -> None:
    deltas = trained_deltas(hidden_size=given.hidden_size, num_layers=given.layers, say=print)
    print("codec               bytes/param up, down    1 - cosine    |lost| / |delta|")
    for name, block in (("int4", 64), ("int4", 256), *((kind, b) for kind in STEP_OF_RMS for b in (64, 256, 1024))):
        sizes, hats = [], []
        for vector_N in (deltas.delta_N, deltas.update_N):
            if name == "int4":
                spec = CodecSpec(name="int4", block=block)
                frame = codec.encode(vector_N, spec, layout_digest=deltas.layout.digest, fragment=0)
                hats.append(
                    codec.decode(frame, num_elements=len(vector_N), layout_digest=deltas.layout.digest, fragment=0)
                )
            else:
                frame = encode(vector_N, name, block, layout_digest=deltas.layout.digest, fragment=0)
                hats.append(decode(frame, name))
            sizes.append(len(frame) / len(vector_N))
        off = 1 - (gate.cosine(hats[0], deltas.delta_N) or 0.0)
        lost = float((deltas.delta_N - hats[0]).norm() / deltas.delta_N.norm())
        print(f"{name + ', block ' + str(block):<20}{sizes[0]:.3f}, {sizes[1]:.3f}{off:>18.4f}{lost:>16.3f}")


def losses(given: argparse.Namespace, seeds: list[int]) -> None:
    """JSON lines, a summary last."""
    fleet = Fleet(machines=(Machine(step_ms=160, up_mbit=100.0, down_mbit=100.0, delay_ms=20),) * given.learners)
    base = base_manifest(num_learners=given.learners, tokens=given.tokens, lockstep=True)
    legs = {"none": "codec_up=none,codec_down=none", "up": "codec_up=int8", "both": "codec_up=int8,codec_down=int8"}
    thin = [(kind, leg) for kind in given.codec or STEP_OF_RMS for leg in given.leg or ("up", "both")]
    plan = [("int4", "none"), ("int4", ""), *thin]
    arms, results = [], []
    for kind, leg in plan:
        text = ",".join(filter(None, (f"decoupled:H={given.interval}", legs.get(leg))))
        (arm,) = arms_from([text], base, num_learners=given.learners)
        arms.append(replace(arm, text=f"{kind} {leg}" if leg in ("up", "both") else leg or kind))
    for seed in seeds:
        for (kind, _), arm in zip(plan, arms, strict=True):
            if kind != "int4":
                take_the_place_of_int8(kind)
            results.append(run_arm(arm, fleet, seed))
            print(json.dumps(results[-1].to_json()), flush=True)
    print(json.dumps(summarize(tuple(arms), results, {"tokens": base.stop.tokens})), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bytes", "loss"))
    parser.add_argument("--hidden-size", type=int, default=256, help="of the model whose deltas are encoded")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--codec", choices=tuple(STEP_OF_RMS), action="append")
    parser.add_argument("--leg", choices=("up", "both"), action="append")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--interval", type=int, default=24, help="H")
    given = parser.parse_args()
    if given.what == "bytes":
        bytes_and_error(given)
        return
    seeds = list(range(given.seeds)) if given.seed is None else [given.seed]
    losses(given, seeds)


if __name__ == "__main__":
    main()
