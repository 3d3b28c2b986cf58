"""What a run does where links are thin: real processes, each learner behind a link of its own, compute simulated.

A founder and M learners (and mirrors, if wanted) on this machine; `star_links.py` gives each learner its rate and its
round trip, `bench_star_learner.py` has them do everything but compute. After a while, when all take part, a stretch of
the run is watched from outside, and read afterwards from what the processes left on disk (`bench_star_figures.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from geo_diloco.cli.bench_folder import kept_folder
from geo_diloco.cli.bench_star_figures import (
    LearnerSeen,
    Reading,
    Sample,
    Seen,
    read_moments,
    rounds_of,
    star_figures,
)
from geo_diloco.cli.bench_star_plan import NUM_TENSORS, ROW, RigPlan, StarPlan, num_rows_for, rig_plan, star_run
from geo_diloco.cli.bench_star_rig import SYNCER, Links, Rig
from geo_diloco.cli.demo_processes import Children
from geo_diloco.cli.star_links import Star
from geo_diloco.manifest import PeerId
from geo_diloco.protocol.events import DeltaEncoded, Received, Sealed
from geo_diloco.protocol.messages import Commit, Found, Progress
from geo_diloco.protocol.uplink import codec_text
from geo_diloco.tape import TapeBoot, read_tape

Say = Callable[[str], None]


def measure_star(plan: StarPlan, *, keep: Path | None = None, say: Say) -> dict[str, Any]:
    """The keys of `star_figures`; where one learner is slow also those of a run without it. `keep`: a new folder for
    the runs' files, which stay there.

    Raises ConfigError, or GeoDilocoError if a process dies by itself or learners don't get to work.
    """
    star_run(plan)  # what is wrong with it is said before anything is made
    with kept_folder(keep, prefix="geo-diloco-star-") as folder:
        fast_only: dict[str, Any] = {}
        if plan.slow_one > 1.0:
            fast = replace(plan, learners=plan.learners - 1, slow_one=1.0, interval=plan.interval_steps)
            say(f"first without the slow one: {fast.learners} learners")
            with Star(round_trip_s=plan.round_trip_s) as star:
                fast_only = measure_run(rig_plan(fast), folder / "fast-only", star, say)
        with Star(round_trip_s=plan.round_trip_s) as star:
            figures = _head(plan) | measure_run(rig_plan(plan), folder / "star", star, say)
    if fast_only:
        figures["fast_only_round_s"] = fast_only["round_s"]
        figures["round_time_ratio"] = figures["round_s"] / fast_only["round_s"]
        figures["fast_only_round_open_s"] = fast_only["round_open_s"]
        figures["fast_only_rows"] = fast_only["rows"]
    return figures


def measure_run(plan: RigPlan, folder: Path, links: Links, say: Say) -> dict[str, Any]:
    """`watch_run`, as the keys of `star_figures`."""
    return star_figures(watch_run(plan, folder, links, say))


def watch_run(plan: RigPlan, folder: Path, links: Links, say: Say) -> Seen:
    """One run, its files in a new folder.

    Raises GeoDilocoError if a process dies by itself or learners don't get to work.
    """
    folder.mkdir()
    with Children(folder) as children:
        rig = Rig(plan, folder, links, children)
        rig.begin()
        say(f"{len(plan.sites)} learners are at work; {plan.warm_up_s:.0f} s until the watch begins")
        rig.wait(plan.warm_up_s)
        first = rig.read()
        rig.wait(plan.seconds)
        last = rig.read()
        say("watched; ending the run")
        rig.end()
    say("adding up what the tapes say")
    return _seen(plan, folder, first, last)


def _head(plan: StarPlan) -> dict[str, Any]:
    return {
        "learners": plan.learners,
        "parameters": num_rows_for(plan.parameters) * ROW * NUM_TENSORS,
        "fragments": plan.fragments,
        "interval_steps": plan.interval_steps,
        "pace_ms": plan.pace_ms,
        "quorum": plan.quorum,
        "link_mbit": plan.bytes_per_s * 8 / 1e6,
        "link_rtt_ms": plan.round_trip_s * 1000,
        "mirrors": plan.mirrors,
    }


# ---- what they left on disk


def _seen(plan: RigPlan, folder: Path, first: Reading, last: Reading) -> Seen:
    """Raises RunDirError or TapeError if it can't be read."""
    from geo_diloco.runtime.chain import read_entries

    entries = read_entries(folder / SYNCER / "chain.jsonl")
    found = entries[0]
    assert isinstance(found, Found)
    sealed: dict[tuple[int, int], int] = {}
    told: dict[PeerId, Progress] = {}
    for record in (record for boot in read_tape(folder / SYNCER / "tape.jsonl") for record in boot.events):
        event = record.event
        if isinstance(event, Sealed):
            sealed[event.term, event.seq] = record.at
        elif isinstance(event, Received) and isinstance(event.message, Progress) and record.at <= last.at_ms:
            told[event.sender] = event.message
    return Seen(
        learners=[learner_seen(plan, folder, number, told) for number in range(1, len(plan.sites) + 1)],
        rounds=rounds_of([entry for entry in entries if isinstance(entry, Commit)], sealed),
        num_elements=found.num_elements,
        first=first,
        last=last,
        num_processors=os.cpu_count() or 1,
        mirrors=[f"mirror-{number}" for number in range(1, plan.mirrors + 1)],
    )


def learner_seen(plan: RigPlan, folder: Path, number: int, told: Mapping[PeerId, Progress]) -> LearnerSeen:
    """From its tape and its own record. `told`: the last Progress that the syncer heard of each."""
    name = f"learner-{number}"
    boots: list[TapeBoot] = list(read_tape(folder / name / "tape.jsonl"))
    progress = told.get(boots[0].boot.peer)
    uplink = "" if progress is None else progress.uplink
    usual = codec_text(plan.run.codec_up)
    return LearnerSeen(
        name=name,
        peer=boots[0].boot.peer,
        bytes_per_s=plan.sites[number - 1].up_bytes_per_s,
        down_bytes_per_s=plan.sites[number - 1].down_bytes_per_s,
        moments=read_moments(folder / f"{name}.moments"),
        samples=[
            Sample(at_ms=record.at, fragment=record.event.fragment, digest=record.event.blob.digest)
            for boot in boots
            for record in boot.events
            if isinstance(record.event, DeltaEncoded)
        ],
        turn=1 if progress is None else progress.turn,
        codec=uplink.partition(": ")[0] if plan.run.codec_up_choices else usual,
        uplink=uplink,
    )
