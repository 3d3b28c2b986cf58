"""`geo-diloco simulate goodput`: flags, objects and tables; what it computes is tested in tests/sim."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.cli import app as cli
from geo_diloco.config import load_fault_plan
from geo_diloco.sim.goodput.model import Outcome, System, World
from geo_diloco.sim.goodput.published import rows

SMALL = ("--chips", "20k", "--learners", "2", "--days", "0.2", "--seeds", "2")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["geo-diloco", "simulate", "goodput", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(monkeypatch, *arguments) == 0
    return capsys.readouterr().out


def parsed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return dict(json.loads(printed(monkeypatch, capsys, *arguments, "--json")))


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every system a point above what is published."""
    figures = {system: figure for systems, row in rows() for system, figure in zip(systems, row, strict=True)}

    def fake(system: System, world: World) -> Outcome:
        share = (figures[system] + 1) / 100
        return Outcome(
            system=system, goodput=share, goodput_by_seed=(share, share - 0.002), uptime=0.5,
            interruptions_per_hour=1.0, participants=1.0, in_time=1.0,
        )  # fmt: skip

    monkeypatch.setattr("geo_diloco.sim.goodput.paper.simulate", fake)


def test_a_table_of_systems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = parsed(monkeypatch, capsys, *SMALL, "--quorum", "2", "--step-spread", "0.01")
    assert [cell["system"] for cell in said["cells"]] == ["data-parallel", "elastic data-parallel", "decoupled M=2"]
    assert all(90 < cell["goodput"] < 100 and cell["chips"] == 20_000 for cell in said["cells"])
    assert said["world"]["quorum"] == 2 and said["world"]["seeds"] == [0, 1]
    text = printed(monkeypatch, capsys, *SMALL)
    assert "decoupled M=2" in text and "20k" in text and "return 66 s" in text


@pytest.mark.usefixtures("instant")
def test_paper_is_one_object_with_cells_and_differences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = parsed(monkeypatch, capsys, "--paper")
    assert len(said["cells"]) == 30
    assert said["cells"][0] | {"goodput": 73.0, "published": 72, "difference": 1.0, "spread": 0.2} == said["cells"][0]
    assert said["mean_abs_diff_decoupled"] == said["max_abs_diff_decoupled"] == 1.0
    text = printed(monkeypatch, capsys, "--paper")
    assert "89.0 / 88 / +1.0" in text and "largest spread over 5 seeds of 30 days: 0.20 points" in text


def test_scavenging_and_bandwidth_stand_beside_what_is_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parsed(monkeypatch, capsys, "--scavenge")["max_abs_diff_decoupled"] <= 0.05
    assert "0.62 / 0.62" in printed(monkeypatch, capsys, "--scavenge")
    said = parsed(monkeypatch, capsys, "--bandwidth", "--params", "5B", "--codec", "int4")
    assert said["lines"][0]["decoupled"] == pytest.approx(20 / 24)
    assert [pair["decoupled_gbit"] for pair in said["published"]] == [1.7, 0.84]
    assert "103 / 104 / -1%" in printed(monkeypatch, capsys, "--bandwidth")


def test_calibration_prints_fitted_beside_shipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from geo_diloco.sim.goodput.calibration import Fit

    fit = Fit(first=3.5, second=4.5, residuals=(1.0, -1.0))
    monkeypatch.setattr("geo_diloco.sim.goodput.calibration.fit_times", lambda world, told: fit)
    said = parsed(monkeypatch, capsys, "--calibrate")
    assert (said["reshape_s"], said["return_s"], said["rms"]) == (3.5, 4.5, 1.0)
    assert said["scavenging"]["tokens_share"] == 0.51
    text = printed(monkeypatch, capsys, "--calibrate")
    assert "3.5" in text and "66" in text and "square difference 1.00 points" in text


FLEET = """
model = { parameters = 1e6, tokens_per_step = 1024 }
sync = { interval_steps = 8, fragments = 2 }
machine = [
  { name = "desk", step_s = 1.0, up_mbit = 50.0, down_mbit = 100.0, fails_every_hours = 1e6 },
  { name = "laptop", step_s = 2.0, up_mbit = 50.0, down_mbit = 100.0, fails_every_hours = 1e6 },
]
volunteer = [{ name = "late", step_s = 1.0, up_mbit = 50.0, down_mbit = 100.0, fails_every_hours = 1e6 }]
"""


def test_a_fleet_and_what_volunteers_bring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET, encoding="utf-8")
    asked = ("--fleet", str(tmp_path / "fleet.toml"), "--days", "0.2", "--seeds", "1")
    said = parsed(monkeypatch, capsys, *asked)
    before, after = said["fleets"]["the fleet"], said["fleets"]["with volunteers"]
    assert before["rounds_per_hour"] == pytest.approx(450, rel=0.05), "of two the slower sets the pace"
    assert after["rounds_per_hour"] == pytest.approx(900, rel=0.05)
    assert 1.0 < before["participants"] < 2.0 < after["participants"] < 3.0, "not everybody is in every round"
    assert before["tokens_per_hour"] < after["tokens_per_hour"]
    assert [each["rule"] for each in said["advice"]] == ["K", "H", "codec"]
    assert "with volunteers" in printed(monkeypatch, capsys, *asked)


def test_what_would_take_all_memory_is_told_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET, encoding="utf-8")
    assert run(monkeypatch, "--fleet", str(tmp_path / "fleet.toml"), "--days", "36500") == 2
    said = capsys.readouterr().err
    assert "3 machines would be followed for 2.6e+08 minutes; give at most 1.45e+03 days" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--paper", "--scavenge"), "error GD-103: --paper together with --scavenge: one question at a time"),
        (("--paper", "--chips", "1k"), "--paper with --chips, --learners or --mtbi-days: it has its own"),
        (("--chips", "many"), "--chips many: 'many' is no number; wanted some as 150k,1.2M"),
        (("--chips", "0"), "--chips 0: wanted a number from 1 to 1e+09"),
        (("--learners", "8", "--chips", "4"), "--learners 8: more than the 4 chips of --chips"),
        (("--learners", "2", "--quorum", "3"), "--quorum 3: more than the 2 learners of --learners"),
        (("--return-s", "-1"), "--return-s -1: wanted a number from 0 to 1e+08"),
        (("--mtbi-days", "nan"), "--mtbi-days nan: wanted a number"),
        (("--days", "3000", "--return-s", "9e6"), "failures and returns one after another"),
        (("--bandwidth", "--codec", "int5"), "--codec int5: no such codec; there are: none, bf16, int8, int4"),
        (("--bandwidth", "--sites", "1"), "--sites 1: wanted a number from 2"),
        (("--from-tape", "t", "--hold-out", "0.95"), "--hold-out 0.95: wanted a number from 0 to 0.9"),
        (("--paper", "--hold-out", "0.5"), "--hold-out with --paper says nothing: it is for --from-tape; leave it out"),
        (
            ("--fleet", "f", "--hold-out", "0"),
            "--hold-out with --fleet says nothing: it is for --from-tape; leave it out",
        ),
        (("--from-tape", "t", "--hold-out", "nan"), "--hold-out nan: wanted a number from 0 to 0.9"),
        (("--fleet", "f", "--quorum", "3"), "--quorum with --fleet says nothing: it is for the table or"),
        (("--fleet", "f", "--codec", "int8"), "--codec with --fleet says nothing: it is for --bandwidth; leave it out"),
        (("--plan-seconds", "5"), "--plan-seconds here says nothing: it is for --write-plan; leave it out"),
        (("--fleet", "nowhere.toml"), "nowhere.toml: No such file or directory; examples/fleet.toml in the sources"),
    ],
)
def test_a_flag_that_can_t_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    written = capsys.readouterr()
    assert written.out == "" and said in written.err and written.err.count("\n") == 1


def test_a_tape_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "t").write_text("{}\n")
    assert run(monkeypatch, "--from-tape", str(tmp_path / "t")) == 1
    assert "error GD-404" in capsys.readouterr().err


def test_without_matplotlib_a_plot_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("geo_diloco.cli.goodput_plot.find_spec", lambda name: None)
    assert run(monkeypatch, "--paper", "--plot", str(tmp_path / "x.png")) == 2
    assert "matplotlib is not installed; install it with: pip install 'geo-diloco[plot]'" in capsys.readouterr().err
    monkeypatch.setattr("geo_diloco.cli.goodput_plot.find_spec", lambda name: object())
    assert run(monkeypatch, "--paper", "--plot", str(tmp_path / "x.gif")) == 2
    assert "wanted a name that ends in .png, .svg, .pdf" in capsys.readouterr().err
    assert run(monkeypatch, "--bandwidth", "--plot", str(tmp_path / "x.png")) == 2
    assert "there is no picture of --bandwidth" in capsys.readouterr().err
    assert run(monkeypatch, "--scavenge", "--plot", str(tmp_path / "no" / "x.png")) == 2
    assert "make it first" in capsys.readouterr().err


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("arguments", [("--paper",), ("--scavenge",), SMALL])
def test_with_matplotlib_there_is_a_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *arguments, "--plot", str(tmp_path / "x.svg")) == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_failures_of_chips_become_a_plan_that_trainings_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    flags = ("--chips", "1.2M", "--learners", "4", "--write-plan", str(path))
    said = parsed(monkeypatch, capsys, *flags, "--plan-seconds", "100", "--plan-scale", "50")
    plan = load_fault_plan(path, num_learners=4)
    assert said["faults"] == len(plan.faults) and (plan.repeat_s, plan.upscale_s, plan.slices) == (100.0, 0.28, 1172)
    assert said["goodput"]["data-parallel"] < said["goodput"]["elastic data-parallel"] < said["goodput"]["decoupled"]
    assert path.read_text().startswith("# 1,200,000 chips, 4 learners of 1172 slices")
    assert "failures in 600 s, 25 s of the chips in one; goodput:" in printed(monkeypatch, capsys, *flags)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "wanted one number each of --chips and --learners, as 1.2M and 8"),
        (("--chips", "1M", "--learners", "2,4"), "wanted one number each of --chips and --learners"),
        (("--chips", "1M", "--learners", "2", "--lost-s", "3"), "leave out --step-spread and --lost-s"),
        (("--chips", "8", "--learners", "2"), "failures in 600 s, wanted 1 to 10000; give more --plan-seconds"),
        (("--chips", "900M", "--learners", "2"), "wanted 1 to 10000; give fewer --plan-seconds"),
        (("--chips", "1M", "--learners", "2", "--plan-scale", "0"), "--plan-scale 0: wanted a number from 0.001"),
        (("--chips", "1M", "--learners", "2", "--plan-seconds", "0"), "--plan-seconds 0: wanted a number from 1"),
        (("--paper",), "not with --paper; leave one of them out"),
        (("--chips", "1M", "--learners", "2", "--plot", "a.png"), "there is no picture of --write-plan"),
    ],
)
def test_a_plan_that_can_not_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: Any, said: str
) -> None:
    assert run(monkeypatch, "--write-plan", str(tmp_path / "plan.toml"), *arguments) == 2
    written = capsys.readouterr()
    assert written.err.startswith("error GD-103: ") and said in written.err and written.err.count("\n") == 1
    assert not (tmp_path / "plan.toml").exists()


def test_a_plan_without_a_place_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere" / "plan.toml")
    assert run(monkeypatch, "--chips", "1M", "--learners", "2", "--write-plan", nowhere) == 2
    assert "No such file or directory; choose another file" in capsys.readouterr().err
