"""`simulate goodput --write-plan`: a fault plan with the failures of many chips, for `simulate train --faults`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from geo_diloco.cli.options import answer
from geo_diloco.config import fault_plan_text
from geo_diloco.errors import ConfigError
from geo_diloco.runtime.disk import atomic_write
from geo_diloco.sim.goodput.plans import draw_plan, goodput_by_plan

if TYPE_CHECKING:
    from geo_diloco.sim.goodput.model import System, World

FAULTS_MAX = 10_000
"""Of a plan: about what fits into a file that `--faults` reads."""


def write_plan(path: Path, systems: list[System], world: World, *, scale: float, seconds: float, as_json: bool) -> None:
    """Raises ConfigError if there is more than one Decoupled system to write a plan for, or the file can't be
    written."""
    decoupled = [system for system in systems if system.kind == "decoupled"]
    if len(decoupled) != 1:
        raise ConfigError(f"--write-plan {path}: wanted one number each of --chips and --learners, as 1.2M and 8")
    if world.step_spread or world.times.lost_s:
        raise ConfigError(f"--write-plan {path}: a plan holds failures only; leave out --step-spread and --lost-s")
    system = decoupled[0]
    expected = system.learners * system.group(world).rate * scale * seconds
    if not 1 <= expected <= FAULTS_MAX:
        raise ConfigError(
            f"--write-plan {path}: about {expected:.3g} failures in {seconds:g} s, wanted 1 to {FAULTS_MAX}; "
            f"give {'fewer' if expected > 1 else 'more'} --plan-seconds, or another --plan-scale"
        )
    plan = draw_plan(system, world, seconds=seconds, scale=scale)
    if not plan.faults:
        raise ConfigError(
            f"--write-plan {path}: no failure in {seconds:g} s; give more --plan-seconds, or another --seed"
        )
    shares = goodput_by_plan(plan, system.learners, seconds=seconds)
    said = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    comment = [
        f"{system.chips:,} chips, {system.learners} learners of {plan.slices} slices, an interruption of a chip every "
        f"{world.mtbi_s / 86400:g} days, seed {world.seeds[0]}",
        f"(geo-diloco simulate goodput --write-plan). {scale:g} s of the chips are 1 s here, of whatever kind.",
        f"goodput by this plan: {said}",
    ]
    try:
        _write(path, fault_plan_text(plan, comment).encode())
    except OSError as exc:
        raise ConfigError(f"--write-plan {path}: {exc.strerror or exc}; choose another file") from exc
    facts = {"plan": str(path), "faults": len(plan.faults), "seconds": seconds, "scale": scale, "goodput": shares}
    text = f"{path}: {len(plan.faults)} failures in {seconds:g} s, {scale:g} s of the chips in one; goodput: {said}"
    answer(json.dumps(facts | {"system": asdict(system)}) if as_json else text)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all; into what is no plain file (a pipe, a device) as it comes, since that can't be replaced."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
    else:
        atomic_write(path, data)
