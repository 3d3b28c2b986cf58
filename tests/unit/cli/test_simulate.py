"""`geo-diloco simulate train`: flags, lines and table; what it simulates is tested in tests/sim."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from geo_diloco.cli import app as cli
from geo_diloco.cli.simulate_table import table
from geo_diloco.sim.train.arms import Arm
from geo_diloco.sim.train.comparing import Progress
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.sim.train.results import ArmResult

FREEZE = '[[fault]]\nlearner = 2\nkind = "freeze"\nfrom_s = 1\nuntil_s = 2\n'


def result(arm: str, seed: int, heldout: float | None = 2.0, *, balance: bool = True) -> ArmResult:
    return ArmResult(
        arm=arm,
        kind=arm.partition(":")[0],
        seed=seed,
        heldout=heldout,
        accuracy=None,
        curve=((0, 0, 5.5), (4096, 9000, heldout)),
        curve_accuracy=(),
        tokens_trained=4096,
        tokens_merged=3072,
        tokens_in_flight=0,
        tokens_carried=1024,
        tokens_dropped=0,
        dropped_by_reason={},
        tokens_balance=balance,
        commits=7,
        participants_mean=3.5,
        bytes_per_param_up=0.46,
        bytes_per_param_down=0.47,
        bytes_up=1_500_000,
        bytes_down=6_000_000,
        virtual_ms=9_000,
        wall_s=3.0,
        effects_digest=None,
    )


class Told:
    """Takes the place of `run_arm`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Arm, Fleet, int]] = []

    def __call__(self, arm: Arm, fleet: Fleet, seed: int, progress: Progress) -> ArmResult:
        progress(0.5)
        self.asked.append((arm, fleet, seed))
        return result(arm.text, seed, 2.0 + seed)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    fake = Told()
    monkeypatch.setattr("geo_diloco.sim.train.comparing.run_arm", fake)
    return fake


def simulate(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["geo-diloco", "simulate", "train", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["geo-diloco", "simulate", "train", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err


def test_flags_become_a_fleet_and_arms(monkeypatch: pytest.MonkeyPatch, told: Told, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(FREEZE)
    speeds = ("--learners", "4", "--speeds", "1,0.8,0.5,0.2", "--step-ms", "100", "--faults", str(plan))
    links = ("--up", "10", "--down", "20,20,20,5", "--delay-ms", "30", "--tokens", "50000", "--seed", "7")
    simulate(monkeypatch, *speeds, *links, "--arm", "decoupled:K=2", "--arm", "diloco")
    assert [(arm.text, seed) for arm, _, seed in told.asked] == [("decoupled:K=2", 7), ("diloco", 7)]
    arm, fleet, _ = told.asked[0]
    assert [machine.step_ms for machine in fleet.machines] == [100, 125, 200, 500]
    assert [machine.up_mbit for machine in fleet.machines] == [10.0] * 4
    assert [machine.down_mbit for machine in fleet.machines] == [20.0, 20.0, 20.0, 5.0]
    assert [machine.delay_ms for machine in fleet.machines] == [30] * 4
    assert [(fault.learner, fault.kind, fault.until_ms) for fault in fleet.plan.faults] == [(2, "freeze", 2000)]
    assert (arm.manifest.sync.quorum, arm.manifest.stop.tokens) == (2, 49_152)


def test_json_lines_are_one_for_each_arm_and_seed_and_a_summary(
    monkeypatch: pytest.MonkeyPatch, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(monkeypatch, "--seeds", "2", "--arm", "diloco", "--arm", "data-parallel", "--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["arm"], line["seed"]) for line in lines[:-1]] == [
        ("diloco", 0),
        ("data-parallel", 0),
        ("diloco", 1),
        ("data-parallel", 1),
    ]
    assert lines[0]["curve"] == [[0, 0, 5.5], [4096, 9000, 2.0]]
    summary = lines[-1]
    assert summary["arms"][0] == {
        "arm": "diloco",
        "heldout": [2.0, 3.0],
        "heldout_mean": 2.5,
        "against_first": None,
    }
    assert summary["arms"][1]["against_first"] == {"by_seed": [0.0, 0.0], "mean": 0.0, "margin": 0.0}
    assert (summary["summary"], summary["seeds"], summary["tokens_balance"]) == (True, [0, 1], True)


def test_without_arms_each_kind_is_run(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    simulate(monkeypatch, "--lockstep")
    assert [arm.kind for arm, _, _ in told.asked] == ["decoupled", "diloco", "data-parallel"]
    assert told.asked[0][0].manifest.sync.lockstep


def test_really_training_gives_lines_that_agree_with_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of two learners: Theta_0 is the same for both arms, and one of them has learnt from it."""
    tokens = ("--learners", "2", "--tokens", "4096", "--seed", "3")
    simulate(monkeypatch, *tokens, "--arm", "decoupled", "--arm", "data-parallel", "--json")
    decoupled, data_parallel, summary = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert decoupled["curve"][0] == data_parallel["curve"][0]
    assert data_parallel["heldout"] < data_parallel["curve"][0][2]
    assert decoupled["tokens_trained"] == data_parallel["tokens_trained"] == 4096
    assert (decoupled["commits"], data_parallel["commits"]) == (0, 2)
    assert decoupled["tokens_carried"] == 4096
    assert summary["arms"][1]["heldout"] == [data_parallel["heldout"]]


def test_what_is_added_and_for_how_long_reaches_the_arms(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    later = ("--learners", "2", "--add-at", "30k:2", "--add-at", "20000:1", "--speeds", "1,1,0.5,0.5,0.5")
    simulate(monkeypatch, *later, "--seconds", "90", "--arm", "elastic-data-parallel:faults=off")
    arm, fleet, _ = told.asked[0]
    assert fleet.joins == (20_000, 30_000, 30_000)
    assert [machine.step_ms for machine in fleet.machines] == [160, 160, 320, 320, 320]
    assert (arm.manifest.stop.tokens, arm.manifest.stop.minutes, arm.under_faults) == (0, 1.5, False)


def test_a_second_command_takes_over_what_is_done_and_runs_the_rest(
    monkeypatch: pytest.MonkeyPatch, told: Told, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path / "results"), "--json")
    simulate(monkeypatch, "--arm", "diloco", *out)
    first = capsys.readouterr().out.splitlines()[0]
    simulate(monkeypatch, "--arm", "diloco", "--arm", "data-parallel", "--seeds", "2", *out)
    written = capsys.readouterr()
    assert written.out.splitlines()[0] == first
    assert [(arm.text, seed) for arm, _, seed in told.asked] == [
        ("diloco", 0),
        ("data-parallel", 0),
        ("diloco", 1),
        ("data-parallel", 1),
    ]
    assert "diloco, seed 0: held-out loss 2.0000, kept from before" in written.err
    simulate(monkeypatch, "--arm", "diloco", "--tokens", "500000", *out)
    assert len(told.asked) == 5, "another budget is another result"


def test_a_picture_of_the_curves(monkeypatch: pytest.MonkeyPatch, told: Told, tmp_path: Path) -> None:
    simulate(monkeypatch, "--seeds", "2", "--arm", "diloco", "--plot", str(tmp_path / "curves.svg"))
    drawn = (tmp_path / "curves.svg").read_text()
    assert drawn.startswith("<?xml") and len(drawn) > 10_000


@pytest.mark.parametrize("plot", ["curves.txt", "nowhere/curves.png"])
def test_a_picture_that_can_not_be_drawn_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: Told, tmp_path: Path, plot: str
) -> None:
    assert "error GD-103: --plot" in refused(monkeypatch, capsys, "--plot", str(tmp_path / plot))
    assert not told.asked


def test_the_bar_is_for_terminals_and_leaves_standard_output_alone(
    monkeypatch: pytest.MonkeyPatch, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(monkeypatch, "--arm", "diloco", "--json")
    assert "1 of 1" not in capsys.readouterr().err
    monkeypatch.setattr("geo_diloco.cli.simulate_progress.on_terminal", lambda: True)
    simulate(monkeypatch, "--arm", "diloco", "--arm", "decoupled", "--json")
    written = capsys.readouterr()
    assert "2 of 2: decoupled, seed 0" in written.err
    assert [json.loads(line).get("arm") for line in written.out.splitlines()] == ["diloco", "decoupled", None]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "60", "--tokens", "5"], "--seconds 60: together with --tokens; give one of them"),
        (["--seconds", "0"], "--seconds 0: wanted a number from 1"),
        (["--seconds", "nan"], "--seconds nan: wanted a number from 1"),
        (["--add-at", "half:2"], "--add-at half:2: wanted TOKENS:N, as 500000:2 or 500k:2"),
        (["--add-at", "1k"], "--add-at 1k: wanted TOKENS:N"),
        (["--add-at", ":"], "--add-at :: wanted TOKENS:N"),
        (["--add-at", "-5:1"], "--add-at -5:1: wanted TOKENS:N"),
        (["--add-at", "²:1"], "wanted TOKENS:N"),
        (["--add-at", "2M:1"], "--add-at 2M:1: 2000000 tokens; allowed is a number from 1, below the 1000000 in all"),
        (["--add-at", "1k:0"], "--add-at 1k:0: wanted 1 or more learners, 64 at most in all"),
        (["--add-at", "1k:30", "--add-at", "2k:31"], "--add-at 2k:31: wanted 1 or more learners, 64 at most in all"),
        (["--add-at", "1k:" + "0" * 5 + "10999"], "wanted 1 or more learners, 64 at most in all"),
        (["--add-at", "1k:" + "9" * 5000], "wanted 1 or more learners, 64 at most in all"),
        (["--add-at", "9" * 5000 + ":1"], "tokens; allowed is a number from 1"),
        (["--add-at", "0" * 18 + "2000000:1"], "2000000 tokens; allowed is a number from 1"),
        (["--add-at", "1k:1", "--lockstep"], "--add-at 1k:1: not with --lockstep"),
        (["--seconds", "9", "--lockstep"], "--seconds 9: not with --lockstep"),
        (["--add-at", "1k:1", "--speeds", "1,1,1,1"], "4 numbers; wanted one, or one for each of 5 learners"),
        (["--add-at", "1k:1", "--arm", "decoupled:K=5"], "quorum = 5; allowed is a whole number from 1 to 4"),
        (["--arm", "decoupled:faults=2"], "--arm decoupled:faults=2: faults = 2; allowed is on or off"),
        (["--out", "/dev/null"], "--out /dev/null: File exists; choose another folder"),
        (["--arm", "decoupled:quorm=1"], '--arm decoupled:quorm=1: "quorm" is no known key of decoupled; did you'),
        (["--arm", "decoupled:kappa=2"], "sync.kappa = 2; allowed is a number from 0.0 to 1.0"),
        (["--model", "cnn"], "--model cnn: no such model; there are: dense, dense-1M, moe, vit"),
        (["--learners", "0"], "--learners 0: wanted a number from 1 to 64"),
        (["--speeds", "1,2"], "--speeds 1,2: 2 numbers; wanted one, or one for each of 4 learners"),
        (["--speeds", "1,fast"], "--speeds 1,fast: not numbers; wanted one, or 4 with commas between"),
        (["--speeds", "0"], "--speeds 0: wanted a number from 0.001 to 1000"),
        (["--up", "nan"], "--up nan: wanted a number from 0.001"),
        (["--delay-ms", "-1"], "--delay-ms -1: wanted a number from 0 to 60000"),
        (["--step-ms", "0"], "--step-ms 0: wanted a number from 1"),
        (["--tokens", "0"], "--tokens 0: wanted a number from 1"),
        (["--seed", "-4"], "--seed -4: wanted a number from 0"),
        (["--seed", "1", "--seeds", "2"], "--seeds 2: together with --seed; give one of them"),
        (["--faults", "nowhere.toml"], "nowhere.toml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: Told, arguments: list[str], said: str
) -> None:
    line = refused(monkeypatch, capsys, *arguments)
    assert line.startswith("error GD-103: ")
    assert said in line
    assert line.count("\n") == 1
    assert not told.asked


def test_faults_in_lockstep_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(FREEZE)
    assert "not with --lockstep" in refused(monkeypatch, capsys, "--faults", str(plan), "--lockstep")


def test_the_table_has_a_row_for_each_arm_with_every_seed_and_the_mean() -> None:
    runs = [result("diloco", seed, 1.0 + seed) for seed in (1, 2)]
    runs += [result("decoupled:K=1", 1, 2.0), result("decoupled:K=1", 2, 3.03)]
    lines = table(runs).splitlines()
    assert "at 4,096 tokens trained" in lines[0]
    row = next(line for line in lines if line.startswith("decoupled:K=1"))
    cells = [cell.strip() for cell in row.split("│")]
    assert cells[1:4] == ["2.0000", "3.0300", "2.5150"]
    assert cells[4] == "+0.50 +- 6.35 %", "0 and 1 %: t is 12.7 with two seeds"
    assert cells[5:10] == ["75.0%", "25.0%", "0.0%", "7", "3.50"]
    assert cells[10:] == ["0.460, 0.470", "1.5, 6.0", "9 s", "3 s"]
    assert lines[-1].endswith("carried + dropped): yes")


def test_the_table_says_what_does_not_balance_or_diverged() -> None:
    lines = table([result("diloco", 0), result("decoupled", 0, None, balance=False)]).splitlines()
    assert next(line for line in lines if line.startswith("decoupled")).split("│")[1].strip() == "-"
    assert lines[-1].endswith("NO: decoupled")
