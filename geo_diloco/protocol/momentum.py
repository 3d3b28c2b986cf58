"""How much momentum a commit may have, by the fragment's commit before it.

Steps that point the same way add up: with momentum mu and a cosine rho between successive updates of a fragment, to
1 / (1 - mu * rho) of one step (numerics.md, 4). Where H is short they do point the same way, and a run with much
momentum overshoots until it is lost. With `gain_max` in the manifest that sum has a limit: mu is lowered at once to
what the last commit's rho allows, and rises again by at most RISE with each commit. The owner's mu is the ceiling.

All of it is a function of one commit on the chain and a manifest that nobody can change, so every peer comes to the
same number, whoever served before; a commit with more is on nobody's chain.
"""

from __future__ import annotations

from dataclasses import replace

from geo_diloco.manifest import OuterSpec
from geo_diloco.protocol.messages import FragmentHead

RISE = 0.05


def mu_max(gain_max: float, head: FragmentHead) -> float:
    """What the commit after `head` may have, besides the owner's mu; 1 where nothing holds it back."""
    if gain_max == 0 or head.mu is None:
        return 1.0
    risen = head.mu + RISE
    if head.rho is None or head.rho <= 0:
        return risen
    return min(risen, (1 - 1 / gain_max) / head.rho)


def guarded(outer: OuterSpec, head: FragmentHead) -> OuterSpec:
    """What a round of that fragment closes with, where `outer` is in force."""
    allowed = mu_max(outer.gain_max, head)
    return outer if outer.mu <= allowed else replace(outer, mu=allowed)
