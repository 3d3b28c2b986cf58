"""`bench star` with real processes: everybody takes part over thin links, and over links that lose packets.

The first is what the command does for everyone, relays on loopback. The second puts each peer into a network namespace
(root only): there packets are delayed and lost one by one, and TCP sees it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.cli.bench_star import measure_run
from geo_diloco.cli.bench_star_plan import Site, StarPlan, link_from, rig_plan
from geo_diloco.cli.bench_star_rig import SYNCER
from geo_diloco.cli.star_links import Passed
from tests.support.namespaces import Namespaces, why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

LOSS = 0.02
RATE, RTT = "10mbit", "200ms"
PLAN = StarPlan(
    learners=2,
    parameters=2_000_000,
    bytes_per_s=link_from(RATE, RTT)[0],
    round_trip_s=link_from(RATE, RTT)[1],
    pace_ms=50,
    quorum=1,
    fragments=4,
    interval=0,
    slow_one=1.0,
    mirrors=0,
    choices=False,
    congestion="auto",
    warm_up_s=15.0,
    seconds=45.0,
)


def check_all_take_part(figures: dict[str, Any], plan: StarPlan) -> None:
    assert figures["rounds"] >= 2 * plan.fragments
    assert figures["share_of_rounds_min"] >= 0.8
    assert figures["admitted_share_min"] >= 0.9
    assert plan.interval_steps * 0.9 <= figures["steps_between_merges_median"] <= plan.interval_steps * 1.5
    assert 0.8 * plan.learners <= figures["syncer_out_copies"] <= 1.5 * plan.learners
    assert figures["utilisation_min"] > 0.5, "as coarse as the machine is busy"
    for row in figures["rows"]:
        assert 0.05 < row["up_share"] < 1.0 and 0.05 < row["down_share"] < 1.0
        assert row["step_ms"] >= plan.pace_ms


def test_the_command_says_who_takes_part_over_thin_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "geo_diloco", "bench", "star", "--learners", "2", "--parameters", "2M"]
    command += ["--rate", RATE, "--rtt", RTT, "--pace", "50", "--fragments", "4", "--warm-up", "15", "--seconds", "45"]
    done = subprocess.run([*command, "--keep", str(tmp_path / "kept"), "--json"], capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout.decode().splitlines()[-1])
    assert figures["learners"] == 2 and figures["interval_steps"] == PLAN.interval_steps
    check_all_take_part(figures, PLAN)
    assert (tmp_path / "kept" / "star" / "learner-1" / "tape.jsonl").exists()


class NamespaceLinks:
    """Links that lose packets: a namespace for each peer, the syncer's without a limit."""

    def __init__(self, namespaces: Namespaces, *, round_trip_s: float, loss: float) -> None:
        self._namespaces = namespaces
        self._delay_ms = 500 * round_trip_s
        self._loss = loss
        self._pids: dict[str, int] = {}

    def _host(self, name: str) -> int:
        return 0 if name == SYNCER else int(name.rpartition("-")[2])

    def open_door(self, name: str) -> tuple[str, ...]:
        assert name == SYNCER
        return self._namespaces.flags(0)

    def inside(self, name: str) -> AbstractContextManager[None]:
        return self._namespaces.inside(self._host(name))

    def link(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        if name != SYNCER:
            self._namespaces.shape(self._host(name), delay_ms=self._delay_ms)

    def thin(self, name: str, site: Site) -> None:
        mbit, delay_ms = site.up_bytes_per_s * 8 / 1e6, 500 * site.round_trip_s
        self._namespaces.shape(self._host(name), delay_ms=delay_ms, mbit_per_s=mbit, loss=self._loss)

    def passed(self) -> Passed:
        """By the counters of each peer's own device; who was dialed they don't tell, but there is only the syncer."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for name, pid in self._pids.items():
            if name != SYNCER:
                lines = Path(f"/proc/{pid}/net/dev").read_text("ascii").splitlines()
                fields = next(line.split() for line in lines if line.strip().startswith("wan0"))
                found[name, SYNCER] = int(fields[9]), int(fields[1])
        return found

    def late_s(self) -> float:
        return 0.0


# Not with cubic: a fragment here is one piece, so one stream, and cubic's carries 1.2 segments / (RTT * sqrt(loss))
# however wide the link is, 0.5 Mbit/s. Learners take part in every fourth round then, not always in the same ones.
def test_everybody_takes_part_over_links_that_lose_packets(tmp_path: Path) -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    plan = replace(PLAN, congestion="bbr")
    with Namespaces(1 + plan.learners) as namespaces:
        links = NamespaceLinks(namespaces, round_trip_s=plan.round_trip_s, loss=LOSS)
        figures = measure_run(rig_plan(plan), tmp_path / "run", links, print)
    print(json.dumps(figures))
    check_all_take_part(figures, plan)
