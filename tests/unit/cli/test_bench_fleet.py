"""`bench fleet`: what of a fleet a real run on this machine is made of, and what is compared."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from geo_diloco.cli.app import app
from geo_diloco.cli.bench_fleet import (
    LEARNERS_MAX,
    beside_each_other,
    compared,
    held_out,
    lived_on,
    rig_plan_from_fleet,
)
from geo_diloco.cli.bench_star_learner import Pace
from geo_diloco.cli.bench_star_plan import Site
from geo_diloco.cli.bench_star_rig import Rig
from geo_diloco.cli.goodput_fleet import fleet_from_file
from geo_diloco.config import load_fleet
from geo_diloco.errors import ConfigError, GeoDilocoError
from geo_diloco.sim.goodput.fleet import Fleet, Timing
from geo_diloco.sim.goodput.relived import Phase, Relived

FLEET = """
[model]
parameters = 2e6
tokens_per_step = 1024

[sync]
interval_steps = 16
fragments = 8
quorum = 2
codec = "int8"

[[machine]]
name = "desk"
count = 2
step_s = 0.25
up_mbit = 20.0
down_mbit = 100.0
rtt_ms = 30.0

[[machine]]
name = "laptop"
step_s = 1.0
up_mbit = 2.0
down_mbit = 16.0

[[volunteer]]
name = "late"
step_s = 1.0
up_mbit = 2.0
down_mbit = 16.0
"""
WHERE = Path("fleet.toml")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "fleet.toml").write_text(FLEET, encoding="utf-8")
    return fleet_from_file(load_fleet(tmp_path / "fleet.toml"))


def test_each_machine_is_a_learner_at_its_pace_behind_its_line(fleet: Fleet) -> None:
    plan = rig_plan_from_fleet(WHERE, fleet, warm_up_s=20.0, seconds=90.0)
    assert [site.pace_ms for site in plan.sites] == [250, 250, 1000], "volunteers are not there yet"
    desk, _, laptop = plan.sites
    assert (desk.up_bytes_per_s, desk.down_bytes_per_s, desk.round_trip_s) == (2.5e6, 12.5e6, 0.03)
    assert (laptop.up_bytes_per_s, laptop.down_bytes_per_s, laptop.round_trip_s) == (2.5e5, 2e6, 0.04)
    assert desk.spread == fleet.step_spread
    sync = plan.run.sync
    assert (sync.interval_steps, sync.num_fragments, sync.quorum) == (16, 8, 2)
    assert plan.run.codec_up.name == plan.run.codec_down.name == "int8"
    assert plan.run.model.factory_arguments == {"num_parameters": 2_000_000}
    assert (plan.warm_up_s, plan.seconds, plan.mirrors) == (20.0, 90.0, 0)


def test_a_fleet_that_this_machine_can_not_stand_for_is_refused_in_one_line(fleet: Fleet) -> None:
    def refused(other: Fleet) -> str:
        with pytest.raises(ConfigError) as caught:
            rig_plan_from_fleet(WHERE, other, warm_up_s=20.0, seconds=90.0)
        return str(caught.value)

    assert "17 machines; a real run on this machine takes 16" in refused(
        replace(fleet, machines=fleet.machines[:1] * (LEARNERS_MAX + 1))
    )
    for params in (1e9, 100.0):
        assert f"parameters = {params:g}; a real run of 3 machines on this one takes 12,288 to" in refused(
            replace(fleet, params=params)
        )
    assert "fragments = 7: wanted fragments of one size: 1, 2, 3" in refused(replace(fleet, fragments=7))
    slow = replace(fleet.machines[0], name="slow", step_s=60.0)
    assert "slow has steps of 60 s; a real run takes" in refused(replace(fleet, machines=(slow,)))


def test_what_is_wrong_with_the_file_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET.replace("fragments = 8", "fragments = 7"), encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "fleet", str(tmp_path / "fleet.toml")])
    assert result.exit_code != 0
    assert "wanted fragments of one size" in result.output + str(result.exception)


def test_a_tape_without_a_merge_tells_no_phases(tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_text("")
    assert lived_on(tmp_path / "tape.jsonl") == Relived()
    assert held_out(tmp_path / "tape.jsonl") == {}


class Joining:
    """`Links` and `Children` of a run whose learners come to work one after another, each when the last one's link is
    thin."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.thinned: list[str] = []
        self.pid = 1

    def _works(self, number: int) -> None:
        (self._folder / f"learner-{number}.moments").write_text("[1, 1, 0.0, 0.0]\n")

    def start(self, name: str, *command: str) -> Joining:
        if name == "learner-1":
            self._works(1)
        return self

    def wait_ready(self, child: object, *keys: str) -> dict[str, str]:
        return {"invite": "an invite"}

    def check(self) -> None:
        pass

    def open_door(self, name: str) -> tuple[str, ...]:
        return ()

    def inside(self, name: str) -> nullcontext[None]:
        return nullcontext()

    def link(self, name: str, pid: int) -> None:
        pass

    def thin(self, name: str, site: Site) -> None:
        self.thinned.append(name)
        self._works(len(self.thinned) + 1)


def test_a_link_is_thin_as_soon_as_its_learner_is_at_work(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geo_diloco.cli.bench_star_rig._LOOK_S", 0.0)
    joining: Any = Joining(tmp_path)
    plan = rig_plan_from_fleet(WHERE, fleet, warm_up_s=0.0, seconds=1.0)
    Rig(plan, tmp_path, joining, joining).begin()
    assert joining.thinned == ["learner-1", "learner-2", "learner-3"]
    monkeypatch.setattr("geo_diloco.cli.bench_star_rig.BEGIN_S", -1.0)
    for number in (2, 3):
        (tmp_path / f"learner-{number}.moments").unlink()
    joining.thin = lambda name, site: None
    with pytest.raises(GeoDilocoError, match="learner-2 did not get to work"):
        Rig(plan, tmp_path, joining, joining).begin()


def test_both_figures_are_put_beside_what_was_predicted(fleet: Fleet) -> None:
    rows = [{"step_ms": 250.0, "share_of_rounds": share, "fresh_share": share / 2} for share in (1.0, 0.8, 0.2)]
    figures: dict[str, Any] = {
        "seconds": 120.0, "rounds": 100, "participants_mean": 2.0, "machine_share": 0.5, "cores_others": 0.1,
        "relays_late_ms_max": 3.0, "limited_by": "the interval", "close_reasons": {}, "rows": rows,
    }  # fmt: skip
    timing = Timing(rounds_per_s=0.75, joins=(1.0, 1.0, 0.2), fresh=(0.5, 0.5, 0.1))
    by_file = replace(timing, joins=(1.0, 0.8, 0.2))
    result = compared(fleet, timing, figures, by_file)
    assert (result["rounds_per_minute"], result["rounds_per_minute_predicted"]) == (50.0, 45.0)
    assert result["rounds_per_minute_ratio"] == pytest.approx(0.9)
    assert (result["participants"], result["participants_predicted"]) == (2.0, 2.2)
    assert result["participants_ratio"] == pytest.approx(1.1)
    assert (result["participants_by_file"], result["participants_by_file_ratio"]) == (2.0, 1.0)
    assert [each["machine"] for each in result["machines"]] == ["desk", "desk", "laptop"]
    assert result["machines"][1]["share_of_rounds"] == 0.8
    assert result["machines"][1]["share_of_rounds_predicted"] == 1.0
    none = compared(fleet, timing, figures | {"rounds": 0, "participants_mean": 0.0}, by_file)
    assert none["rounds_per_minute_ratio"] == none["participants_ratio"] == none["participants_by_file_ratio"] == 0.0


def test_phases_are_told_where_both_were_seen() -> None:
    real: dict[Phase, float]
    real, predicted = {"sealing": 9.0, "checking": 3.0, "merging": 30.0}, {"checking": 4.0, "sealing": 10.0}
    assert beside_each_other(real, predicted) == [
        {"phase": "checking", "ms": 3.0, "ms_predicted": 4.0},
        {"phase": "sealing", "ms": 9.0, "ms_predicted": 10.0},
    ], "in the order in which they follow each other"


def test_a_step_lasts_its_time_give_or_take_the_spread() -> None:
    pace = Pace(ms=400, spread=0.05)
    assert pace.ms_min == 380
    waits = [pace.left_s(0.1) for _ in range(200)]
    assert 0.28 <= min(waits) < max(waits) <= 0.32
    assert sum(waits) / 200 == pytest.approx(0.3, abs=0.005)
    assert pace.left_s(1.0) == 0.0
    assert Pace(ms=400).ms_min == 400
