"""The study's driver: what it asks for can be run, what was run is not run again, and differences are paired."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from geo_diloco.sim.train.arms import arms_from, base_manifest

NAMES = ("plan", "churn", "errands", "second", "trials", "run", "central", "central_report", "report")


class Study:
    plan: ModuleType
    churn: ModuleType
    errands: ModuleType
    second: ModuleType
    trials: ModuleType
    central: ModuleType
    central_report: ModuleType
    run: ModuleType
    report: ModuleType


@pytest.fixture
def study(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its files, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(repository / "examples" / "study"))
    found = Study()
    for name in NAMES:
        setattr(found, name, importlib.import_module(name))
    yield found
    for name in (*NAMES, "finetune"):
        sys.modules.pop(name, None)


def test_every_cell_is_an_arm_that_can_be_run_once(study: Any) -> None:
    for name, part in study.plan.PARTS.items():
        keys = [study.run.key_of(cell, seed) for cell in part.cells for seed in part.seeds]
        assert len(set(keys)) == len(keys), name
        for cell in part.cells:
            learners = cell.fleet.learners
            base = base_manifest(num_learners=learners, tokens=cell.tokens, lockstep=False, model=cell.model)
            arms_from([cell.arm], base, num_learners=learners)
            assert len(cell.fleet.speeds) in (1, learners) and len(cell.fleet.batch_sizes) in (0, learners)
        assert bool(part.cells) != bool(part.after), name
        for arm in part.against if part.cells else ():
            assert any(study.report.reference_of(cell, part, arm) for cell in part.cells), (name, arm)


def test_what_is_there_is_not_run_again(study: Any, tmp_path: Path) -> None:
    part = study.plan.PARTS["i"]
    everything = study.run.missing("i", tmp_path)
    assert [seed for _, seed in everything] == [0, 0, 1, 1, 2, 2]
    key = study.run.key_of(part.cells[1], 0)
    (tmp_path / "another.jsonl").write_text(json.dumps(dict.fromkeys(study.run.NEEDED, 0) | {"key": key}) + "\n")
    assert study.run.missing("i", tmp_path) == [job for job in everything if job != (part.cells[1], 0)]


def test_a_line_that_was_cut_off_is_named(study: Any, tmp_path: Path) -> None:
    row = json.dumps(dict.fromkeys(study.run.NEEDED, "x"))
    (tmp_path / "i.jsonl").write_text(row + '\n{"key": ')
    with pytest.raises(SystemExit, match=r"i\.jsonl, line 2: no result; .* delete the line"):
        study.run.missing("i", tmp_path)
    for damaged in (b'{"key": "x"}', b'{"key": "\xff"}', b"[]", b"\xff\xfe"):
        (tmp_path / "i.jsonl").write_bytes(damaged)
        with pytest.raises(SystemExit, match=r"i\.jsonl, line 1: no result"):
            study.report.report(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["i", "--jobs", "0"], "--jobs 0: wanted a number from 1 to 64"),
        (["i", "--minutes", "nan"], "--minutes nan: wanted a number above 0"),
        (["i", "--results", "FILE"], "FILE: File exists; give a folder that can be written to"),
    ],
)
def test_a_command_that_can_t_be_run_is_one_line(
    study: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        study.run.main()
    assert said in f"{ended.value} {capsys.readouterr().err}"


def test_the_study_of_codecs_starts(repository: Path) -> None:
    command = [sys.executable, str(repository / "examples" / "study" / "thin_codecs.py"), "--help"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_line_holds_what_an_arm_came_to(study: Any) -> None:
    fleet = study.plan.Fleet(learners=2, speeds=(1.0, 0.5), batch_sizes=(8, 2), away="freeze")
    row = study.run.run_one(study.plan.Cell(arm="decoupled:H=8", tokens=8192, fleet=fleet), 1)
    assert row["key"] == study.run.key_of(study.plan.Cell(arm="decoupled:H=8", tokens=8192, fleet=fleet), 1)
    assert "\n" not in json.dumps(row)
    assert row["tokens_balance"] and row["tokens_trained"] >= 8192
    assert row["heldout"] < row["curve"][0][2] < 6
    assert -1 <= row["rho_mean"] <= 1 and row["mu_mean"] == 0.5


def test_learners_are_away_a_fifth_of_the_time(study: Any) -> None:
    fleet = study.plan.Fleet(learners=2, away="crash")
    faults = study.churn.faults_of(fleet, 0, until_s=50_000)
    assert {fault.kind for fault in faults} == {"crash"} and faults != study.churn.faults_of(fleet, 1, until_s=50_000)
    away_s = sum(fault.until_s - fault.from_s for fault in faults)
    assert away_s / 100_000 == pytest.approx(0.2, abs=0.02)
    assert away_s / len(faults) == pytest.approx(9.6, abs=0.8)
    for learner in (1, 2):
        own = [fault for fault in faults if fault.learner == learner]
        assert all(one.until_s < two.from_s for one, two in pairwise(own))
    assert study.churn.faults_of(study.plan.Fleet(), 0, until_s=50_000) == ()


def test_differences_are_taken_seed_by_seed(study: Any) -> None:
    part = study.plan.PARTS["f"]
    reference, other = part.cells
    rows: dict[str, Any] = {}
    for seed, (one, two) in enumerate([(2.0, 2.02), (1.0, 1.01), (4.0, 4.04)]):
        rows[study.run.key_of(reference, seed)] = {"heldout": one}
        rows[study.run.key_of(other, seed)] = {"heldout": two}
    assert study.report.difference(other, part, "decoupled", rows) == "+1.00 ± 0.00 %"
    assert study.report.difference(reference, part, "decoupled", rows) == ""
    rows[study.run.key_of(other, 2)] = {"heldout": None}
    assert study.report.difference(other, part, "decoupled", rows) == "not finite"


def test_a_baseline_is_the_same_whoever_is_away(study: Any) -> None:
    part = study.plan.PARTS["g"]
    plain = part.cells[-1]
    assert plain.arm == "diloco"
    assert [study.report.reference_of(cell, part, "diloco") for cell in part.cells] == [plain] * 3 + [None]


def test_a_difference_is_told_with_its_interval(study: Any) -> None:
    assert study.report.in_percent([(1.01, 1.0), (2.04, 2.0), (3.09, 3.0)]) == "+2.00 ± 2.48 %"
    assert study.report.in_percent([(0.985, 1.0)]) == "-1.50 %"
    assert study.report.in_points([(0.9, 0.92), (0.95, 0.99)]) == "-3.0 (s 1.4)"


def test_what_was_not_run_is_said(study: Any, tmp_path: Path) -> None:
    made = study.report.report(tmp_path)
    assert made.count("Not run yet") == len(study.plan.PARTS) + 1, "the central experiment as well"
