"""Figures that the paper prints, to stand beside ours: *Decoupled DiLoCo for Resilient Distributed Pre-training*,
arXiv 2604.21428. Data only; nothing is computed from a Decoupled figure but its difference from ours.

Of the settings behind them the paper tells the rate (an interruption a year for each chip) and that downscale, upscale
and return times go in, not their values.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_diloco.sim.goodput.model import System

SOURCE = "arXiv 2604.21428"

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
DATA_PARALLEL = (72, 57, 38, 27, 18)
ELASTIC = (88, 80, 69, 58, 40)
DECOUPLED = {
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
"""Goodput in percent by M; MTBI one year for each chip."""

EXTRA = (0.0, 0.25, 0.5, 1.0, 3.0)
"""Opportunistic compute, as a share of the run's own."""
SCAVENGED_DATA_PARALLEL = (1.00, 1.07, 1.09, 1.02, 0.80)
SCAVENGED_DECOUPLED = (1.00, 0.90, 0.83, 0.75, 0.62)
"""Time to the same number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """A published pair, and what we take it to be for. Only step time or sites are told with it."""

    told: str
    params: float
    """Ours: the sizes of the paper's models (2B and 5B) that fit."""
    codec: str
    sites: int = 8
    step_s: float = 1.0
    data_parallel_gbit: float
    decoupled_gbit: float


BANDWIDTHS = (
    Bandwidth(told="1 s step", params=2.5e9, codec="bf16", data_parallel_gbit=104.0, decoupled_gbit=1.7),
    Bandwidth(told="8 sites", params=5e9, codec="int4", data_parallel_gbit=198.0, decoupled_gbit=0.84),
)


def rows() -> list[tuple[list[System], tuple[int, ...]]]:
    """The goodput table: the systems of each row, and its figures."""
    found: list[tuple[list[System], tuple[int, ...]]] = [
        ([System(kind="data-parallel", chips=chips) for chips in CHIPS], DATA_PARALLEL),
        ([System(kind="elastic data-parallel", chips=chips) for chips in CHIPS], ELASTIC),
    ]
    for learners, figures in DECOUPLED.items():
        found.append(([System(kind="decoupled", chips=chips, learners=learners) for chips in CHIPS], figures))
    return found
