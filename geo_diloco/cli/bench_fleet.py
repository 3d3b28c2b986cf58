"""Is `simulate goodput --fleet` right about rounds? A real run of the same file on this machine tells.

The fleet's machines are learners whose compute is simulated (`bench_star_learner.py`), each at its pace and behind a
link of its own; a syncer serves them. What fails, and which hours a machine is on, is left out: rounds are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_folder import kept_folder
from geo_diloco.cli.bench_star import Say, measure_run
from geo_diloco.cli.bench_star_plan import NUM_TENSORS, ROW, RigPlan, Site, check_fragments, paced_run
from geo_diloco.cli.bench_star_rig import SYNCER
from geo_diloco.cli.goodput_fleet import fleet_from_file
from geo_diloco.cli.star_links import Star
from geo_diloco.config import load_fleet
from geo_diloco.errors import ConfigError, TapeError
from geo_diloco.manifest import CodecSpec, SyncSpec
from geo_diloco.sim.goodput.fleet import Fleet, Timing
from geo_diloco.sim.goodput.tapes import fleet_from_tape
from geo_diloco.sim.goodput.timing import STEP_SPREAD, time_rounds

LEARNERS_MAX = 16
STEP_S_MAX = 10.0
PARAMETERS_MAX = 200_000_000
"""Of all learners together: each takes some 30 bytes for one."""


def measure_fleet(path: Path, *, warm_up_s: float, seconds: float, keep: Path | None, say: Say) -> dict[str, Any]:
    """Keys: of both figures what the run came to, what was predicted, and the ratio of the second to the first; what
    this computer was busy with; `machines`, the same for each.

    Raises ConfigError, or GeoDilocoError if a process dies by itself or learners don't get to work.
    """
    fleet = fleet_from_file(load_fleet(path))
    plan = rig_plan_from_fleet(path, fleet, warm_up_s=warm_up_s, seconds=seconds)
    timing = time_rounds(fleet)
    say(f"predicted: {60 * timing.rounds_per_s:.1f} rounds a minute with {timing.participants:.2f} participants")
    farthest_s = max(site.round_trip_s for site in plan.sites)  # until links are their own
    with kept_folder(keep, prefix="geo-diloco-fleet-") as folder, Star(round_trip_s=farthest_s) as star:
        figures = measure_run(plan, folder / "run", star, say)
        return compared(fleet, timing, figures) | held_out(folder / "run" / SYNCER / "tape.jsonl")


def rig_plan_from_fleet(path: Path, fleet: Fleet, *, warm_up_s: float, seconds: float) -> RigPlan:
    """Raises ConfigError if this machine can't stand for that fleet."""
    number = len(fleet.machines)
    if number > LEARNERS_MAX:
        raise ConfigError(f"{path}: {number} machines; a real run on this machine takes {LEARNERS_MAX} at most")
    if not NUM_TENSORS * ROW <= fleet.params <= PARAMETERS_MAX / number:
        raise ConfigError(
            f"{path}: parameters = {fleet.params:g}; a real run of {number} machines on this one takes "
            f"{NUM_TENSORS * ROW:,} to {PARAMETERS_MAX // number:,}"
        )
    slowest = max(fleet.machines, key=lambda machine: machine.step_s)
    if slowest.step_s > STEP_S_MAX:
        raise ConfigError(
            f"{path}: {slowest.name} has steps of {slowest.step_s:g} s; a real run takes {STEP_S_MAX:g} at most, or it "
            "would last for hours"
        )
    check_fragments(fleet.fragments, f"{path}: fragments =")
    sync = SyncSpec(interval_steps=fleet.interval_steps, num_fragments=fleet.fragments, quorum=fleet.quorum)
    codec = CodecSpec(name=fleet.codec)  # type: ignore[arg-type]
    return RigPlan(
        run=paced_run("fleet", round(fleet.params), sync, num_learners=number, codec=codec),
        sites=tuple(
            Site(
                pace_ms=max(1, round(1000 * machine.step_s)),
                spread=STEP_SPREAD,
                up_bytes_per_s=machine.up_mbit * 1e6 / 8,
                down_bytes_per_s=machine.down_mbit * 1e6 / 8,
                round_trip_s=machine.rtt_s,
            )
            for machine in fleet.machines
        ),
        warm_up_s=warm_up_s,
        seconds=seconds,
    )


def held_out(tape: Path) -> dict[str, Any]:
    """What the first half of a syncer's tape foretells of the second, by `simulate goodput --from-tape`: predicted over
    real. Empty if the tape is too short for it."""
    try:
        fleet, actual = fleet_from_tape(tape, hold_out=0.5)
    except TapeError:
        return {}
    timing = time_rounds(fleet)
    rounds, participants = actual.rounds_per_hour, actual.participants
    return {
        "tape_rounds_per_minute_ratio": 3600 * timing.rounds_per_s / rounds if rounds else 0.0,
        "tape_participants_ratio": timing.participants / participants if participants else 0.0,
    }


def compared(fleet: Fleet, timing: Timing, figures: dict[str, Any]) -> dict[str, Any]:
    """`figures`: of `bench_star_figures.star_figures`."""
    per_minute = 60 * figures["rounds"] / figures["seconds"]
    predicted = 60 * timing.rounds_per_s
    participants = figures["participants_mean"]
    return {
        "seconds": figures["seconds"],
        "rounds_per_minute": per_minute,
        "rounds_per_minute_predicted": predicted,
        "rounds_per_minute_ratio": predicted / per_minute if per_minute else 0.0,
        "participants": participants,
        "participants_predicted": timing.participants,
        "participants_ratio": timing.participants / participants if participants else 0.0,
        "machine_share": figures["machine_share"],
        "cores_others": figures["cores_others"],
        "relays_late_ms_max": figures["relays_late_ms_max"],
        "limited_by": figures["limited_by"],
        "close_reasons": figures["close_reasons"],
        "machines": [
            {
                "machine": machine.name,
                "step_ms": row["step_ms"],
                "share_of_rounds": row["share_of_rounds"],
                "share_of_rounds_predicted": joins,
                "fresh_share": row["fresh_share"],
                "fresh_share_predicted": fresh,
            }
            for machine, row, joins, fresh in zip(
                fleet.machines, figures["rows"], timing.joins, timing.fresh, strict=True
            )
        ],
    }
