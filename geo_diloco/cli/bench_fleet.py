"""Is `simulate goodput --fleet` right about rounds? A real run of the same file on this machine tells.

The fleet's machines are learners whose compute is simulated (`bench_star_learner.py`), each at its pace and behind a
link of its own; a syncer serves them. What fails, and which hours a machine is on, is left out: rounds are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_folder import kept_folder
from geo_diloco.cli.bench_star import Say, watch_run
from geo_diloco.cli.bench_star_figures import star_figures
from geo_diloco.cli.bench_star_plan import NUM_TENSORS, ROW, RigPlan, Site, check_fragments, paced_run
from geo_diloco.cli.bench_star_rig import SYNCER
from geo_diloco.cli.goodput_fleet import fleet_from_file
from geo_diloco.cli.star_links import Star
from geo_diloco.config import load_fleet
from geo_diloco.errors import ConfigError, TapeError
from geo_diloco.manifest import CodecSpec, SyncSpec
from geo_diloco.sim.goodput.fleet import Fleet, Timing
from geo_diloco.sim.goodput.relived import PHASES, Phase, Relived, relive
from geo_diloco.sim.goodput.tapes import fleet_from_tape, read_syncer
from geo_diloco.sim.goodput.timing import time_rounds

STEP_SPREAD = 0.1
"""Share of its pace that a learner's step may be longer or shorter. With 0.05, as is usual, 90 s of four equal machines
see two or three ways in which these can stand to each other, and participants are 3.43 with a standard deviation of
0.32 from one such run to the next; with 0.1 they are 3.44 with 0.10 (eight simulated runs each)."""
LEARNERS_MAX = 16
STEP_S_MAX = 10.0
PARAMETERS_MAX = 200_000_000
"""Of all learners together: each takes some 30 bytes for one."""


def measure_fleet(path: Path, *, warm_up_s: float, seconds: float, keep: Path | None, say: Say) -> dict[str, Any]:
    """Keys: of both figures what the run came to, what was predicted, and the ratio of the second to the first; what
    this computer was busy with; `phases`, `machines`: the same for each.

    What is predicted is of the file's machines and of how long encoding, checking, merging and the disk took while the
    run warmed up: a machine on which everything runs at once is not the one that has these times built in (`SHELL`).
    What is predicted with those stands beside it (`participants_by_file`).

    Raises ConfigError, or GeoDilocoError if a process dies by itself or learners don't get to work.
    """
    fleet = replace(fleet_from_file(load_fleet(path)), step_spread=STEP_SPREAD)
    plan = rig_plan_from_fleet(path, fleet, warm_up_s=warm_up_s, seconds=seconds)
    by_file = time_rounds(fleet)
    say(f"by the file: {60 * by_file.rounds_per_s:.1f} rounds a minute with {by_file.participants:.2f} participants")
    farthest_s = max(site.round_trip_s for site in plan.sites)  # until links are their own
    with kept_folder(keep, prefix="geo-diloco-fleet-") as folder, Star(round_trip_s=farthest_s) as star:
        seen = watch_run(plan, folder / "run", star, say)
        tape = folder / "run" / SYNCER / "tape.jsonl"
        lived, begin, end = lived_on(tape), seen.first.at_ms, seen.last.at_ms
        warmed_up = replace(fleet, shell=lived.between(begin - 1000 * warm_up_s, begin).shell())
        timing = time_rounds(warmed_up)
        result = compared(fleet, timing, star_figures(seen), by_file)
        result["shell_ms"] = asdict(warmed_up.shell)
        result["phases"] = beside_each_other(lived.between(begin, end).medians(), timing.phases_ms)
        return result | held_out(tape)


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
                spread=fleet.step_spread,
                up_bytes_per_s=machine.up_mbit * 1e6 / 8,
                down_bytes_per_s=machine.down_mbit * 1e6 / 8,
                round_trip_s=machine.rtt_s,
            )
            for machine in fleet.machines
        ),
        warm_up_s=warm_up_s,
        seconds=seconds,
    )


def lived_on(tape: Path) -> Relived:
    """Empty if nothing was merged."""
    try:
        return relive(read_syncer(tape))
    except TapeError:
        return Relived()


def held_out(tape: Path) -> dict[str, Any]:
    """What the first half of a syncer's tape foretells of the second, by `simulate goodput --from-tape`: predicted over
    real. Empty if the tape is too short for it."""
    try:
        fleet, actual = fleet_from_tape(tape, hold_out=0.5)
    except TapeError:
        return {}
    timing = time_rounds(replace(fleet, step_spread=STEP_SPREAD))
    rounds, participants = actual.rounds_per_hour, actual.participants
    return {
        "tape_rounds_per_minute_ratio": 3600 * timing.rounds_per_s / rounds if rounds else 0.0,
        "tape_participants_ratio": timing.participants / participants if participants else 0.0,
    }


def beside_each_other(real: Mapping[Phase, float], predicted: Mapping[str, float]) -> list[dict[str, Any]]:
    """Medians of phases of a round, in milliseconds."""
    return [
        {"phase": phase, "ms": real[phase], "ms_predicted": predicted[phase]}
        for phase in PHASES
        if phase in real and phase in predicted
    ]


def compared(fleet: Fleet, timing: Timing, figures: dict[str, Any], by_file: Timing) -> dict[str, Any]:
    """`figures`: of `bench_star_figures.star_figures`; `by_file`: with the shell's times that are built in."""
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
        "participants_by_file": by_file.participants,
        "participants_by_file_ratio": by_file.participants / participants if participants else 0.0,
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
