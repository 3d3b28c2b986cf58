"""Gbit/s that a site needs in each direction, for a compute utilisation, by data-parallel and by Decoupled DiLoCo.

Data-parallel: a ring all-reduce of the gradients in every step, 2 (1 - 1/sites) times their size at each site, hidden
behind the backward pass (two thirds of a step) and waited for beyond it. Decoupled: every parameter goes up once and
comes down once in H inner steps, a fragment at a time, and nobody waits; below that rate rounds come less often (H
grows), the chips stay busy. The syncer carries the sum over learners, unless mirrors share the way down.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKWARD_SHARE = 2.0 / 3.0
"""Of a step's floating-point operations: a backward pass has twice those of a forward pass."""
BITS = {"none": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.0}
"""A parameter's, as named, without scales and without zstd (numerics/README.md has measured ones)."""
GRADIENT_BITS = 16.0
"""Data-parallel exchanges bf16."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A model and how it is trained over several sites."""

    params: float
    step_s: float
    sites: int
    codec: str = "int4"
    interval_steps: int = 24
    utilisation: float = 0.99


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Gbit/s, each way."""

    data_parallel: float
    decoupled: float
    """At each learner's site."""
    syncer: float
    """At the syncer's, one way, for all learners together."""

    @property
    def ratio(self) -> float:
        return self.data_parallel / self.decoupled


def needs(line: Line) -> Needs:
    ring = 2.0 * (1.0 - 1.0 / line.sites)
    hidden_s = line.step_s * (BACKWARD_SHARE + 1.0 / line.utilisation - 1.0)
    each = line.params * BITS[line.codec] / (line.interval_steps * line.step_s) / 1e9
    return Needs(
        data_parallel=ring * line.params * GRADIENT_BITS / hidden_s / 1e9, decoupled=each, syncer=each * line.sites
    )
