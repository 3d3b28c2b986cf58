"""`bench star` with real processes: everybody takes part over thin links, and over links that lose packets.

The first is what the command does for everyone, relays on loopback. The second puts each peer into a network namespace
(root only): there packets are delayed and lost one by one, and TCP sees it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.cli.bench_star import measure_run
from geo_diloco.cli.bench_star_plan import StarPlan, link_from, rig_plan
from geo_diloco.cli.bench_star_rig import SYNCER
from tests.support.namespace_links import Line, NamespaceLinks
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


# Not with cubic: a fragment here is one piece, so one stream, and cubic's carries 1.2 segments / (RTT * sqrt(loss))
# however wide the link is, 0.5 Mbit/s. Learners take part in every fourth round then, not always in the same ones.
def test_everybody_takes_part_over_links_that_lose_packets(tmp_path: Path) -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    plan = replace(PLAN, congestion="bbr")
    hosts = {SYNCER: 0} | {f"learner-{number}": number for number in range(1, 1 + plan.learners)}
    thin = Line(delay_ms=500 * plan.round_trip_s, loss=LOSS)
    with Namespaces(len(hosts)) as namespaces:
        links = NamespaceLinks(namespaces, hosts, {host: thin if host else Line() for host in hosts.values()})
        figures = measure_run(rig_plan(plan), tmp_path / "run", links, print)
    print(json.dumps(figures))
    check_all_take_part(figures, plan)
