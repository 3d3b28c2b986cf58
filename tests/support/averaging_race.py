"""`python -m tests.support.averaging_race`: a merge by a syncer against hivemind's `DecentralizedAverager`, same links.

Four hosts by default, each behind one link, the same for both sides (network namespaces, so it needs root). Theirs is
an all-reduce of everybody with everybody; ours has a syncer, either on one of these hosts, sharing its link with a
learner, or on a host of its own behind one more such link. Timed is how long it takes until all hold the mean of all
parameters: theirs from the first peer's begin (the group is there already) to the last one's end, ours from the first
sample of a sweep to the last adoption of it, while the run goes on. (`int4-wide`, if asked for: its own host has a
link as wide as the others' together, as a server has; theirs is given nothing like it.) Sides take turns; medians and
all values are printed, and beside them what the busiest link carried, how long that takes it at its rate, and the
processor time of either side and of the links, because all of it shares this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_folder import kept_folder
from geo_diloco.cli.bench_star_plan import NUM_TENSORS, link_from, parameters_from
from geo_diloco.errors import ConfigError, GeoDilocoError
from geo_diloco.runtime.bulk import CONTROLS
from geo_diloco.runtime.sockets import congestion_granted
from tests.support.namespaces import why_no_namespaces
from tests.support.race_figures import Turn, ratio_of, row_of
from tests.support.race_ours import Ours, Syncer, run_ours
from tests.support.race_theirs import Theirs, run_theirs

THEIRS = {"theirs-16": "FLOAT16", "theirs-8": "UNIFORM_8BIT"}
OURS: dict[str, tuple[str, Syncer]] = {
    "int4-shared": ("int4", "shared"),
    "int4-own": ("int4", "own"),
    "int4-wide": ("int4", "wide"),
    "int8-shared": ("int8", "shared"),
    "int8-own": ("int8", "own"),
    "bf16-shared": ("bf16", "shared"),
    "bf16-own": ("bf16", "own"),
}
USUAL = ("theirs-16", "int4-shared", "int4-own", "bf16-shared", "theirs-8", "int8-shared")
RATIOS = (
    ("int4-shared", "theirs-16"),
    ("int4-own", "theirs-16"),
    ("int4-wide", "theirs-16"),
    ("bf16-shared", "theirs-16"),
    ("bf16-own", "theirs-16"),
    ("int8-shared", "theirs-8"),
    ("int8-own", "theirs-8"),
)
COLUMNS = {
    "side": "side",
    "rounds": "rounds",
    "seconds_median": "s",
    "seconds_min": "least",
    "seconds_max": "most",
    "formed_s_median": "forming s",
    "fragment_s_median": "fragment s",
    "mb_busiest_link": "MB",
    "link_alone_s": "link alone s",
    "cpu_s": "cpu s",
    "wires_cpu_s": "links' cpu s",
    "wires_late_ms_max": "links late ms",
    "machine_share": "machine",
}


@dataclass(frozen=True, kw_only=True)
class Race:
    """What is run."""

    sides: Sequence[str]
    peers: int = 4
    parameters: int = 10_000_000
    bytes_per_s: float = 6.25e6
    round_trip_s: float = 0.08
    congestion: str = "bbr"
    turns: int = 3
    rounds: int = 4
    """That are counted in each turn."""
    fragments: int = 8
    room: float = 1.5
    part_kb: int = 512

    def check(self) -> None:
        """Raises ConfigError."""
        allowed = {
            "peers": (2, 64),
            "turns": (1, 1000),
            "rounds": (1, 1000),
            "fragments": (1, 48),
            "part-kb": (1, 8192),
        }
        for name, (least, most) in allowed.items():
            given = getattr(self, name.replace("-", "_"))
            if not least <= given <= most:
                raise ConfigError(f"--{name} {given}: wanted {least} to {most}")
        if not 0.1 <= self.room <= 100.0:
            raise ConfigError(f"--room {self.room}: wanted 0.1 to 100")
        if NUM_TENSORS % self.fragments:
            raise ConfigError(f"--fragments {self.fragments}: wanted fragments of one size, a divisor of {NUM_TENSORS}")
        if congestion_granted(CONTROLS[self.congestion]) != self.congestion:
            raise ConfigError(f"--congestion {self.congestion}: this kernel does not have it; take the other one")

    def turn(self, side: str, folder: Path) -> Turn:
        """Raises GeoDilocoError."""
        if side in THEIRS:
            return run_theirs(
                Theirs(
                    name=side,
                    compression=THEIRS[side],
                    peers=self.peers,
                    parameters=self.parameters,
                    bytes_per_s=self.bytes_per_s,
                    round_trip_s=self.round_trip_s,
                    congestion=self.congestion,
                    rounds=self.rounds,
                    part_bytes=self.part_kb << 10,
                ),
                folder,
            )
        codec, syncer = OURS[side]
        return run_ours(
            Ours(
                name=side,
                codec=codec,
                syncer=syncer,
                peers=self.peers,
                parameters=self.parameters,
                bytes_per_s=self.bytes_per_s,
                round_trip_s=self.round_trip_s,
                fragments=self.fragments,
                congestion=self.congestion,
                room=self.room,
                sweeps=self.rounds,
            ),
            folder,
        )


def measure_race(race: Race, folder: Path) -> dict[str, Any]:
    """Keys: what was asked for, `rows` and the ratios. Raises GeoDilocoError."""
    turns: dict[str, list[Turn]] = {side: [] for side in race.sides}
    for number in range(1, race.turns + 1):
        for side in race.sides:
            turn = race.turn(side, folder / f"{side}-{number}")
            turns[side].append(turn)
            took = " ".join(f"{each:.2f}" for each in turn.seconds)
            print(f"turn {number}/{race.turns} {side:>12}: {took or 'no whole round'} s", flush=True)
    rows = [row_of(each) for each in turns.values()]
    return {
        "peers": race.peers,
        "parameters": race.parameters,
        "link_mbit": race.bytes_per_s * 8 / 1e6,
        "link_rtt_ms": race.round_trip_s * 1000,
        "congestion": race.congestion,
        "fragments": race.fragments,
        "room": race.room,
        "part_kb": race.part_kb,
        "ratios": ratios_of(rows),
        "rows": rows,
    }


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of those that can be compared, and have been."""
    there = {row["side"] for row in rows if row["rounds"]}
    return {f"{a}/{b}": ratio_of(rows, a, b) for a, b in RATIOS if {a, b} <= there}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [list(COLUMNS.values())]
    lines += [[f"{v:.2f}" if isinstance(v := row[key], float) else str(v) for key in COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="averaging_race", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--side", action="append", choices=[*THEIRS, *OURS], help=f"default: {', '.join(USUAL)}")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", default="10M")
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--rtt", default="80ms")
    parser.add_argument("--congestion", choices=("bbr", "cubic"), default="bbr", help="of both sides")
    parser.add_argument("--turns", type=int, default=3, help="of each side")
    parser.add_argument("--rounds", type=int, default=4, help="in each turn")
    parser.add_argument("--fragments", type=int, default=8, help="ours")
    parser.add_argument("--room", type=float, default=1.5, help="ours: an interval against what links need for a sweep")
    parser.add_argument("--part-kb", type=int, default=512, help="theirs; 512 is their own default")
    parser.add_argument("--keep", type=Path, help="new folder for all files, which are kept then")
    parser.add_argument("--json", action="store_true", help="one object, on the last line")
    asked = parser.parse_args(arguments)
    if reason := why_no_namespaces():
        print(f"the averaging race can't be run here: {reason}", file=sys.stderr)
        return 2
    try:
        bytes_per_s, round_trip_s = link_from(asked.rate, asked.rtt)
        race = Race(
            sides=asked.side or USUAL,
            peers=asked.peers,
            parameters=parameters_from(asked.parameters),
            bytes_per_s=bytes_per_s,
            round_trip_s=round_trip_s,
            congestion=asked.congestion,
            turns=asked.turns,
            rounds=asked.rounds,
            fragments=asked.fragments,
            room=asked.room,
            part_kb=asked.part_kb,
        )
        race.check()
        with kept_folder(asked.keep, prefix="geo-diloco-race-") as folder:
            result = measure_race(race, folder)
    except GeoDilocoError as exc:
        print(f"the averaging race ended: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("the averaging race was interrupted", file=sys.stderr)
        return 130
    print(_table(result["rows"]))
    for name, value in result["ratios"].items():
        print(f"{name}: {value:.2f} of its time")
    if asked.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
