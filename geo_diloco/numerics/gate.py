"""What a syncer looks at before it merges a stranger's delta, and how alike two updates are.

Apart from the codec because the codec raises and this decides: a bad contribution is an ordinary event of a run, to be
refused by name and not to stop anything. Only the frame's own faults are caught; any other exception is our bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from geo_diloco.errors import FrameError, FrameLayoutError
from geo_diloco.manifest import CodecSpec, Digest
from geo_diloco.numerics.codec import Bytes, FrameHeader, decoded_chunks, inspect
from geo_diloco.numerics.merge import l2_norm, sum_of_squares

_DOT_ELEMENTS = 8192
LENGTH_FACTOR = 10.0
RMS_USUAL = 0.1
"""Root mean square of a fragment's weights, for one that begins at or near zero."""


@dataclass(frozen=True)
class GateResult:
    """`reason`: "ok", or the error's code and what was wrong. `norm`: L2 of the whole decoded delta, 0 if not ok."""

    ok: bool
    reason: str
    norm: float


def check_contribution(
    frame: Bytes,
    *,
    num_elements: int,
    layout_digest: Digest,
    fragment: int,
    specs: Sequence[CodecSpec] = (),
    length_max: float = math.inf,
) -> GateResult:
    """Can this frame be merged as that fragment, was it made with an agreed codec (if `specs` are given), and is its
    delta no longer than `length_max`? All of it is decoded, and never more than a chunk of it is there."""
    try:
        spec = _agreed(inspect(frame), specs)
        squares = 0.0
        for chunk in decoded_chunks(
            frame, num_elements=num_elements, layout_digest=layout_digest, fragment=fragment, spec=spec
        ):
            squares = sum_of_squares(chunk, squares)
    except FrameError as exc:
        return GateResult(False, f"{exc.code} {exc}", 0.0)
    length = math.sqrt(squares)
    if length > length_max:
        return GateResult(False, f"implausible: a delta of length {length:.3g}, at most {length_max:.3g} is taken", 0.0)
    return GateResult(True, "ok", length)


def _agreed(header: FrameHeader, specs: Sequence[CodecSpec]) -> CodecSpec | None:
    """That of `specs` which the frame says it was made with. FrameLayoutError if it is none of them."""
    said = next((spec for spec in specs if spec.name == header.codec and header.block in (0, spec.block)), None)
    if said is None and specs:
        agreed = " or ".join(f"{spec.name} with block {spec.block}" for spec in specs)
        raise FrameLayoutError(f"codec {header.codec} with block {header.block}: {agreed} was agreed")
    return said


def length_max(theta: Tensor) -> float:
    """No honest delta of a fragment is longer than this beside Theta: LENGTH_FACTOR times its length, or what that
    would be for usual weights. Keeps out what is absurd; finer limits need the company of others (`protocol`)."""
    return LENGTH_FACTOR * max(l2_norm(theta), RMS_USUAL * math.sqrt(len(theta)))


def cosine(first: Tensor, second: Tensor) -> float | None:
    """Cosine of the angle between two vectors, in [-1, 1]; None if one is zero or not finite."""
    lengths = l2_norm(first) * l2_norm(second)
    if lengths == 0.0 or not math.isfinite(lengths):
        return None
    a, b = first.detach().numpy(), second.detach().numpy()
    dot = 0.0
    for start in range(0, len(a), _DOT_ELEMENTS):
        end = start + _DOT_ELEMENTS
        dot += float(np.dot(a[start:end].astype(np.float64), b[start:end].astype(np.float64)))
    return max(-1.0, min(1.0, dot / lengths))
