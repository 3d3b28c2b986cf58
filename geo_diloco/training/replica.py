"""The learner's own copy of the model, held against the run's: anchors, deltas and adoptions.

A fragment's **anchor** is the float32 value of Theta at the version last adopted; a **delta** is the fragment as it
is now minus its anchor. Both are exact copies on the CPU, whatever device and dtype the model has. Everything here
happens on the training thread between two inner steps, so nothing is locked; formulas are in numerics.md section 5
and `numerics/adopt.py`.

Anchors are never written to: a new Theta replaces the old one, so a vector may be shared with whoever sent it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from geo_diloco.errors import LayoutError
from geo_diloco.numerics.adopt import shrink_to_carry_
from geo_diloco.numerics.fragments import Layout, gather, layout_from_module, named_trainable, scatter_

SCALE_ONE = 1_000_000
"""A scale of one, in parts per million."""


class Replica:
    """A module's trainable parameters by fragment. `theta` and `delta` vectors are float32, 1-D, on the CPU."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Raises LayoutError, naming the first difference, if the module has another layout than the run."""
        difference = layout_from_module(model, num_fragments=layout.num_fragments).first_difference(layout)
        if difference is not None:
            raise LayoutError(f"this model is not the run's (here: this model; there: the run): {difference}")
        self.layout = layout
        self.tensors = named_trainable(model)
        self._anchors: list[Tensor | None] = [None] * layout.num_fragments
        self._room = torch.empty(max(layout.num_elements), dtype=torch.float32)
        """For one fragment, kept: new memory would cost the training thread more than all that is done in it."""
        self.undecided_scale: list[float] = [1.0] * layout.num_fragments
        """Per fragment, the product of s over the adoptions since its undecided sample was taken."""

    def anchor(self, fragment: int) -> Tensor:
        """Theta of the fragment at the version last adopted. Read only."""
        anchor = self._anchors[fragment]
        if anchor is None:
            raise LayoutError(f"fragment {fragment} has no anchor yet: the replica holds no Theta")
        return anchor

    def reset(self, fragment: int, theta: Tensor) -> None:
        """Take Theta as it is and drop what the replica carries."""
        scatter_(theta, self.tensors, self.layout, fragment)
        self._anchors[fragment] = theta
        self.undecided_scale[fragment] = 1.0

    def restore(self, anchors: Sequence[Tensor], undecided_scale: Sequence[float]) -> None:
        """Take up saved anchors without touching the model, whose own weights came from the same checkpoint."""
        self._anchors = list(anchors)
        self.undecided_scale = list(undecided_scale)

    def sample(self, fragment: int) -> Tensor:
        """The delta, in a tensor of its own. What is sampled is undecided until merged or refused."""
        delta = gather(self.tensors, self.layout, fragment, minus=self.anchor(fragment))
        self.undecided_scale[fragment] = 1.0
        return delta

    def adopt(
        self, fragment: int, theta: Tensor, d_hat: Tensor | None, *, kappa: float, rbar: float, cap: float = 2.0
    ) -> int:
        """Move to a new Theta, carrying what the merge has not seen; returns s in parts per million.

        `d_hat`: this learner's delta as merged (decoded), if it was a participant. Where s < 1 the undecided delta
        shrinks with the carry that holds it, else merging it late would push the learner backwards.
        """
        if d_hat is not None and self.undecided_scale[fragment] != 1.0:
            d_hat = d_hat * self.undecided_scale[fragment]
        room = self._room[: self.layout.num_elements[fragment]]
        delta = gather(self.tensors, self.layout, fragment, minus=self.anchor(fragment), out=room)
        scale_ppm = shrink_to_carry_(delta, d_hat, kappa=kappa, rbar=rbar, cap=cap)
        if scale_ppm == 0:
            scatter_(theta, self.tensors, self.layout, fragment)
        else:
            scatter_(delta, self.tensors, self.layout, fragment, plus=theta)
        self._anchors[fragment] = theta
        if d_hat is not None:
            self.undecided_scale[fragment] = 1.0
        else:
            self.undecided_scale[fragment] *= scale_ppm / SCALE_ONE
        return scale_ppm
