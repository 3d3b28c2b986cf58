"""What a merge and its outer step cost here, beside the least they could: one pass per contribution that adds it up.

Time: M decoded deltas merged by radial-directional averaging, then the outer step; the bound is M in-place additions
(axpy) of the same vectors, measured in turn with it. Memory: what a syncer's process grows by at most while it decodes,
merges, encodes and commits a fragment, in units of a fragment's float32 vector.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geo_diloco.cli.bench_deltas import one_thread
from geo_diloco.manifest import Digest, FragmentId, PeerId, RunManifest, Version
from geo_diloco.numerics import codec
from geo_diloco.numerics.fragments import Layout, TensorSpec
from geo_diloco.numerics.merge import StreamingMerge
from geo_diloco.numerics.outer import apply_update, outer_update
from geo_diloco.protocol.effects import Merge, MergeInput
from geo_diloco.protocol.messages import BlobRef
from geo_diloco.runtime.merger import OuterState
from geo_diloco.training.presets import demo_manifest

WEIGHT = 1024.0
TENSOR_ELEMENTS = 1 << 20
"""Of each tensor of the fragment: as in a model of some hundred million parameters."""
DISTINCT = 4
"""Deltas in memory; each is merged several times, far enough apart to have left the cache."""


def measure_merge(
    *, num_elements: int, num_contributions: int, num_rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Keys: `axpy_share` (the bound's time over the merge's, median), `peak_fragments` (None where the system doesn't
    tell), and `rows`, one per round."""
    one_thread()
    layout = _layout(num_elements)
    rows = _rounds(layout, num_contributions, num_rounds, say)
    return {
        "elements": num_elements,
        "contributions": num_contributions,
        "axpy_share": statistics.median(row["axpy_share"] for row in rows),
        "peak_fragments": _peak_fragments(layout, num_contributions),
        "rows": rows,
    }


def _rounds(
    layout: Layout, num_contributions: int, num_rounds: int, say: Callable[[str], None]
) -> list[dict[str, float]]:
    deltas = _deltas(layout)
    inputs = [deltas[i % DISTINCT] for i in range(num_contributions)]
    theta_N, momentum_N, residual_N = (torch.randn_like(deltas[0]) for _ in range(3))
    rows = []
    _bound(inputs)
    for number in range(num_rounds):
        bound_s = _timed(lambda: _bound(inputs))
        merge_s = _timed(lambda: _merge(layout, inputs, theta_N, momentum_N, residual_N))
        rows.append({"axpy_s": bound_s, "merge_s": merge_s, "axpy_share": bound_s / merge_s})
        say(f"round {number + 1}/{num_rounds}: axpy {bound_s:.3f} s, merge and outer step {merge_s:.3f} s")
    return rows


def _deltas(layout: Layout) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(layout.num_elements[0], generator=generator).mul_(1e-3) for _ in range(DISTINCT)]


def _layout(num_elements: int) -> Layout:
    sizes = [TENSOR_ELEMENTS] * (num_elements // TENSOR_ELEMENTS)
    if num_elements % TENSOR_ELEMENTS:
        sizes.append(num_elements % TENSOR_ELEMENTS)
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return Layout(
        tuple(
            TensorSpec(
                name=f"tensor.{i}",
                shape=(size,),
                dtype="float32",
                fragment=0,
                offset=offset,
                num_elements=size,
                embedding=False,
            )
            for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        )
    )


def _bound(inputs: list[Tensor]) -> None:
    sums = torch.zeros_like(inputs[0])
    for delta_N in inputs:
        sums.add_(delta_N, alpha=0.25)


def _merge(layout: Layout, inputs: list[Tensor], theta_N: Tensor, momentum_N: Tensor, residual_N: Tensor) -> None:
    """All but the codecs, which `bench codec` measures: what was merged is taken for what it decodes to. Memory as a
    syncer has it: Theta goes where the residual was, b where it was."""
    merging = StreamingMerge(layout, 0, "rda")
    for delta_N in inputs:
        merging.add_delta(delta_N, WEIGHT)
    gradient_N = merging.result().gradient
    update_N = outer_update(gradient_N, momentum_N, residual_N, eta=0.7, mu=0.5, out=gradient_N)
    apply_update(theta_N, momentum_N, update_N, eta=0.7, mu=0.5, theta_out=residual_N, momentum_out=momentum_N)


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


# ---- memory --------------------------------------------------------------------------------------------------------


def _peak_fragments(layout: Layout, num_contributions: int) -> float | None:
    """Of two outer steps of a whole syncer; the second one, when all that is held is there."""
    run = demo_manifest()
    run = replace(run, sync=replace(run.sync, num_fragments=1, merge="rda"))
    frames = [codec.encode(each, run.codec_up, layout_digest=layout.digest, fragment=0) for each in _deltas(layout)]
    outer = OuterState(layout, with_momentum=True, with_residual=True)
    outer.start_fragment(FragmentId(0), torch.zeros(layout.num_elements[0]))
    _step(outer, run, frames, num_contributions, Version(1))
    before = _reset_peak()
    if before is None:
        return None
    _step(outer, run, frames, num_contributions, Version(2))
    return (_status_bytes("VmHWM") - before) / (4 * layout.num_elements[0])


def _step(outer: OuterState, run: RunManifest, frames: list[bytes], num_contributions: int, version: Version) -> None:
    order = Merge(
        fragment=FragmentId(0),
        round=version,
        attempt=1,
        version=version,
        inputs=tuple(
            MergeInput(
                peer=PeerId(f"{i:064x}"),
                blob=BlobRef(Digest(f"{i % len(frames):064x}"), len(frames[i % len(frames)])),
                base_version=Version(version - 1),
                weight=WEIGHT,
                scale=1.0,
            )
            for i in range(num_contributions)
        ),
        eta=0.7,
        mu=0.5,
        codec=run.codec_down,
    )
    outer.merge(order, lambda blob: frames[int(blob.digest, 16)], run)
    outer.commit(FragmentId(0), version)


def _reset_peak() -> int | None:
    """Bytes resident now, from where the peak counts from here on; None where there is no such thing (not Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return None


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {key}")
