"""What M outer gradients become: one, in the memory of one.

Apart from everything else because it is the only place where the work of several learners meets, and because its
memory must not grow with their number: per contribution one pass adds to a running sum, and nothing else is kept.
Two rules, over a fragment's outer gradients g_m (pointing uphill) with token weights w_m (arXiv 2604.21428):

    mean   sum(w g) / sum(w)
    rda    R * phi(U),  R = sum(w |g|) / sum(w),  U = sum(w phi(g)) / sum(w),  phi(x) = x / |x|, phi(0) = 0

`rda` is taken tensor by tensor, so that one loud tensor doesn't drown the direction of the others; `rda-fragment`
takes the fragment as one vector. Embeddings, whose rows are touched by few tokens, take `mean` unless told otherwise.
Norms accumulate in float64 over rows of 2,048 elements. Contributions are added in sorted order of peer id by the
caller: the same inputs then give the same bits on the same machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from geo_diloco.errors import LayoutError, LocalProtocolError, NonFiniteFrame
from geo_diloco.manifest import EmbeddingRule, LateForm, MergeRule
from geo_diloco.numerics.fragments import Layout

_DIRECTION_MIN: Final = 1e-12
"""|U| below this has no direction: the learners cancel out."""
_FACTOR_MAX: Final = 1e30
"""A factor above this might overflow float32: the tensor is scaled in float64 instead."""
_NORM_ELEMENTS: Final = 8192
"""Elements per float64 dot product: in cache, and few enough that BLAS stays on the calling thread."""
_ROW_ELEMENTS: Final = 2048
"""Elements per float32 dot product, likewise."""
_SQUARES_SAFE: Final = (1e-20, 1e30)
"""A sum of squares in between has lost nothing to float32's range."""


@dataclass(frozen=True)
class MergeResult:
    """`gradient`: what the outer step consumes. `num_degenerate`: how many directions cancelled to nothing."""

    gradient: Tensor
    num_degenerate: int


def outer_gradient(delta: Tensor, *, form: LateForm, drift: Tensor | None) -> Tensor:
    """A learner's outer gradient from its decoded delta d.

    `drift` is Theta_now - Theta_base, None while the base is current. `base-relative`: -d, whatever the drift;
    `paper`: Theta_now - (Theta_base + d), which for late work pulls back towards the old base.
    """
    if form == "paper" and drift is not None:
        return torch.sub(drift, delta)
    return torch.neg(delta)


def l2_norm(vector: Tensor) -> float:
    """L2 norm, accumulated in float64; NaN or infinity if a value is."""
    return math.sqrt(sum_of_squares(vector))


def sum_of_squares(vector: Tensor, total: float = 0.0) -> float:
    """`total` and the squares of these values, in float64. In pieces of whole multiples of 8192 elements, each added to
    the last one's result, a vector gives the same bits as at once."""
    values = vector.detach().numpy()
    work = np.empty(min(_NORM_ELEMENTS, len(values)))
    for start in range(0, len(values), _NORM_ELEMENTS):
        part = values[start : start + _NORM_ELEMENTS]
        wide = work[: len(part)]
        np.copyto(wide, part)
        total += float(np.dot(wide, wide))
    return total


def quick_norm(vector: Tensor) -> float:
    """L2 norm to about 1e-7, in half the time of `l2_norm`: float32 within a row, float64 over rows.

    Exact where float32's range would show; NaN or infinity if a value is.
    """
    values = vector.detach().numpy()
    whole = len(values) - len(values) % _ROW_ELEMENTS
    rows, rest = values[:whole].reshape(-1, _ROW_ELEMENTS), values[whole:]
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.dot(rest, rest))
    low, high = _SQUARES_SAFE
    return math.sqrt(squares) if low < squares < high else l2_norm(vector)


class StreamingMerge:
    """One fragment's merge. Add each contribution in sorted order of peer id, then take `result` once."""

    def __init__(self, layout: Layout, fragment: int, rule: MergeRule, *, embeddings: EmbeddingRule = "mean") -> None:
        """Starts from nothing; takes one vector of the fragment's size."""
        self._parts = _parts(layout, fragment, rule, embeddings)
        self._sums = torch.zeros(layout.num_elements[fragment], dtype=torch.float32)
        self._norms = [0.0] * len(self._parts)
        self._weights = 0.0
        self._unit: float | None = None
        self._num_added = 0

    def add(self, gradient: Tensor, weight: float) -> float:
        """Add one outer gradient with its token weight (not normalised, >= 0); returns its L2 norm. It is not kept.

        NonFiniteFrame, and nothing is added, if the gradient holds NaN or infinity.
        """
        return self._add(gradient, weight, sign=1.0)

    def add_delta(self, delta: Tensor, weight: float) -> float:
        """As `add` of -delta: a delta points downhill. Spares the pass that turns it round."""
        return self._add(delta, weight, sign=-1.0)

    def _add(self, vector: Tensor, weight: float, *, sign: float) -> float:
        if vector.shape != self._sums.shape or vector.dtype != torch.float32:
            raise LayoutError(
                f"an outer gradient of {tuple(vector.shape)} {vector.dtype}: this fragment is "
                f"{tuple(self._sums.shape)} torch.float32"
            )
        if not (math.isfinite(weight) and weight >= 0.0):
            raise LocalProtocolError(f"a merge weight of {weight}: it must be finite and not negative")
        norms = [part.norm(vector) for part in self._parts]
        if not all(map(math.isfinite, norms)):
            raise NonFiniteFrame("an outer gradient with a value that is NaN or infinite")
        self._num_added += 1
        length = math.hypot(*norms)
        if weight == 0.0:
            return length
        if self._unit is None:
            self._unit = weight  # sums are kept in units of the first weight: near 1, whatever tokens^2 / steps is
        share = weight / self._unit
        self._weights += share
        for index, (part, norm) in enumerate(zip(self._parts, norms, strict=True)):
            self._norms[index] += share * norm
            if part.by_mean or norm > 0.0:
                factor = sign * share if part.by_mean else sign * share / norm
                for where in part.slices:
                    _add_scaled(self._sums[where], vector[where], factor)
        return length

    def result(self, *, portion: float = 1.0) -> MergeResult:
        """The merged gradient, times `portion`; this object must not be used again. Zero if all weights were zero.

        `portion`: of the weight of all learners, how much was added here.
        """
        if not 0.0 < portion <= 1.0:
            raise LocalProtocolError(f"a portion of {portion}: above 0 and at most 1 is wanted")
        if not self._num_added:
            raise LocalProtocolError("a merge of nothing: add at least one outer gradient")
        if self._weights == 0.0:
            return MergeResult(self._sums, len(self._parts))
        num_degenerate = 0
        for part, norms in zip(self._parts, self._norms, strict=True):
            factor: float | None = 1.0 / self._weights if part.by_mean else self._stretch(part, norms)
            num_degenerate += factor is None
            for where in part.slices:
                if factor is None:
                    self._sums[where].zero_()
                else:
                    self._sums[where].mul_(factor * portion)
        return MergeResult(self._sums, num_degenerate)

    def _stretch(self, part: _Part, norms: float) -> float | None:
        """What makes the sum of directions as long as the mean of lengths; none if they cancelled."""
        length = part.norm(self._sums)
        return None if length / self._weights < _DIRECTION_MIN else norms / self._weights / length


@dataclass(frozen=True)
class _Part:
    """What has one direction and one length: a tensor, or several."""

    slices: tuple[slice, ...]
    by_mean: bool

    def norm(self, vector: Tensor) -> float:
        return math.hypot(*[quick_norm(vector[where]) for where in self.slices])


def _parts(layout: Layout, fragment: int, rule: MergeRule, embeddings: EmbeddingRule) -> list[_Part]:
    """Of a fragment, in its order; with `rda-fragment`, what is no mean is the last part."""
    parts, together = [], []
    for spec in layout.of(fragment):
        where = slice(spec.offset, spec.offset + spec.num_elements)
        by_mean = rule == "mean" or (spec.embedding and embeddings == "mean")
        if rule == "rda-fragment" and not by_mean:
            together.append(where)
        else:
            parts.append(_Part((where,), by_mean))
    return [*parts, _Part(tuple(together), by_mean=False)] if together else parts


def _add_scaled(sums: Tensor, gradient: Tensor, factor: float) -> None:
    if abs(factor) > _FACTOR_MAX:
        sums.add_(gradient.double().mul_(factor).float())
    else:
        sums.add_(gradient, alpha=factor)
