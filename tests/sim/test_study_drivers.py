"""The study's drivers beside its parts: errands, the second stage of the search, and the central experiment."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from geo_diloco.manifest import StopSpec
from geo_diloco.sim.train.arms import arms_from, base_manifest
from geo_diloco.sim.train.comparing import run_arm
from geo_diloco.sim.train.fleet import Fleet, Machine
from geo_diloco.sim.train.timetable import Timetable
from geo_diloco.training.models import build_model

NAMES = ("plan", "churn", "errands", "second", "run", "trials", "finetune", "central", "central_report")
MACHINE = Machine(step_ms=160, up_mbit=10_000, down_mbit=10_000, delay_ms=1)


@pytest.fixture
def study(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its files, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(repository / "examples" / "study"))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)
    # It was begun with the processes that were spawned, and would wait for the end of all tests.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


# ---- errands


def errand(study: Any, words: str, call: Any, *args: Any) -> Any:
    return study.errands.Errand(words=words, tokens=1000, tokens_per_second=1000, call=call, args=args)


def done(study: Any, words: str, loss: float) -> Any:
    return errand(study, words, dict, [("heldout", loss)])


def run_errands(study: Any, path: Path, errands: list[Any], **limits: Any) -> int:
    with study.errands.alone(path) as lines:
        failed: int = study.errands.run_errands(errands, lines, told=study.run.loss_in_words, **limits)
    return failed


def test_a_failure_costs_no_other_its_result(study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "i.jsonl"
    errands = [
        errand(study, "no number", int, "x"),
        done(study, "one", 1.0),
        errand(study, "killed", os._exit, 3),
        done(study, "two", 2.0),
        done(study, "three", 3.0),
    ]
    assert run_errands(study, path, errands, num_jobs=2, minutes=10) == 2
    assert sorted(json.loads(line)["heldout"] for line in path.read_text().splitlines()) == [1.0, 2.0, 3.0]
    said = capsys.readouterr().out
    assert "no number: FAILED, the others go on: ValueError: invalid literal" in said
    assert "killed: FAILED, the others go on: its process was ended (exit status 3)" in said


def test_the_first_is_begun_whatever_it_takes_and_others_only_where_they_fit(study: Any, tmp_path: Path) -> None:
    path = tmp_path / "i.jsonl"
    assert run_errands(study, path, [done(study, "one", 1.0), done(study, "two", 2.0)], num_jobs=1, minutes=1e-6) == 0
    assert len(path.read_text().splitlines()) == 1


def test_a_part_of_which_a_run_fails_says_so_by_its_exit_status(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = study.plan.Fleet(learners=2)
    arms = ("decoupled:H=0", "data-parallel")
    cells = tuple(study.plan.Cell(arm=arm, tokens=2048, fleet=fleet, model="vit") for arm in arms)
    monkeypatch.setitem(study.plan.PARTS, "i", study.plan.Part(question="?", cells=cells, seeds=(0,)))
    monkeypatch.setattr(sys, "argv", ["run.py", "i", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        study.run.main()
    assert ended.value.code == 1
    (row,) = [json.loads(line) for line in (tmp_path / "i.jsonl").read_text().splitlines()]
    assert row["key"] == study.run.key_of(cells[1], 0) and row["model"] == "vit" and 0 <= row["accuracy"] <= 1
    assert "i: 1 of them FAILED" in capsys.readouterr().err


def test_records_of_before_there_were_models_are_found(study: Any) -> None:
    cell = study.plan.cells(1, study.plan.EQUAL, "decoupled:H=24,eta=0.7,mu=0")[0]
    key = '["decoupled:H=24,eta=0.7,mu=0", 1000000, {"away": "", "batch_sizes": [], "learners": 4, "speeds": [1.0]}, 0]'
    assert study.run.key_of(cell, 0) == key
    (other,) = study.plan.cells(1, study.plan.EQUAL, cell.arm, model="moe")
    assert study.run.key_of(other, 0) == key[:-1] + ', "moe"]'


# ---- the second stage


def losses_of_a1(study: Any, **better: float) -> dict[str, float | None]:
    """All 3, but for those that are better."""
    return {cell.arm: 3.0 for cell in study.plan.PARTS["a1"].cells} | better


def test_the_second_stage_is_the_best_six_the_default_and_what_is_next_to_them(study: Any) -> None:
    best = "H=24,eta=1.0,mu=0 H=24,eta=0.7,mu=0 H=8,mu=0.9,gain_max=2 H=8,kappa=0 H=64,eta=1.0,mu=0.9 H=24,kappa=0"
    losses = losses_of_a1(study, **{f"decoupled:{arm}": 2.0 + place / 10 for place, arm in enumerate(best.split())})
    losses["decoupled:H=8,eta=1.0,mu=0"] = 2.95
    losses["decoupled:H=24,eta=1.0,mu=0.5"] = None
    arms = study.second.second_stage(losses)
    assert arms[0] == "decoupled" and len(set(arms)) == len(arms) == study.second.NUM_CELLS
    assert arms[1:7] == (
        "decoupled:eta=1,mu=0",
        "decoupled:mu=0",
        "decoupled:H=8,mu=0.9,gain_max=2",
        "decoupled:H=8,kappa=0",
        "decoupled:H=64,eta=1,mu=0.9",
        "decoupled:kappa=0",
    )
    assert set(arms[7:9]) == {
        "decoupled:eta=1.4,mu=0",
        "decoupled:eta=1,mu=0,kappa=0.5",
    }, "not run, and next to the best"
    assert "decoupled:eta=1,mu=0.5" not in arms, "diverged"
    assert "decoupled:H=8,eta=1,mu=0" not in arms[:9], "was run, and is worse"
    shuffled = dict(sorted(losses.items()))
    assert study.second.second_stage(shuffled) == arms


def test_every_arm_of_the_second_stage_can_be_run(study: Any) -> None:
    base = base_manifest(num_learners=4, tokens=4_000_000, lockstep=False)
    for seed in range(20):
        chance = torch.Generator().manual_seed(seed)
        losses = {arm: float(torch.rand(1, generator=chance)) for arm in losses_of_a1(study)}
        arms_from(study.second.second_stage(losses), base, num_learners=4)


def test_an_arm_is_the_same_after_it_was_taken_apart(study: Any) -> None:
    base = base_manifest(num_learners=4, tokens=1_000_000, lockstep=False)
    for text in losses_of_a1(study):
        again = study.second.settings_of(text).arm
        one, two = (arms_from([each], base, num_learners=4)[0] for each in (text, again))
        assert one.manifest == two.manifest, (text, again)
    with pytest.raises(ValueError, match=r"0\.3"):
        study.second.settings_of("decoupled:eta=0.3")


def test_the_second_stage_waits_for_the_first(study: Any, tmp_path: Path) -> None:
    first = study.plan.PARTS["a1"]
    lines = [
        json.dumps(dict.fromkeys(study.run.NEEDED, 0) | {"key": study.run.key_of(cell, 0), "heldout": 2.0})
        for cell in first.cells
    ]
    (tmp_path / "a1.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(SystemExit, match=r"a2: its cells come out of a1, which is not done; run.py a1 first"):
        study.run.run("a2", tmp_path, num_jobs=1, minutes=1)
    assert not (tmp_path / "a2.jsonl").exists()
    (tmp_path / "a1.jsonl").write_text("\n".join(lines) + "\n")
    jobs = study.run.missing("a2", tmp_path)
    assert len(jobs) == 3 * study.second.NUM_CELLS and {cell.tokens for cell, _ in jobs} == {4_000_000}
    parity = study.plan.PARTS["parity"].cells[0]
    assert study.run.key_of(parity, 0) in [study.run.key_of(cell, seed) for cell, seed in jobs], "is not run twice"


# ---- the central experiment


def test_the_reference_trains_on_its_tokens_in_the_time_that_all_get(study: Any) -> None:
    for model, share in study.trials.SHARES.items():
        base = base_manifest(num_learners=8, tokens=share.tokens, lockstep=False, model=model)
        assert base.stop == StopSpec(tokens=share.tokens), "whole steps"
        num_elements = sum(parameter.numel() for parameter in build_model(base.model).parameters())
        table = Timetable(base, Fleet(machines=(MACHINE,) * 8), num_elements=num_elements)
        *_, last = table.in_step(elastic=False)
        assert last.ended_at == round(1000 * share.seconds)


def test_every_trial_is_an_arm_and_none_is_run_twice(study: Any, tmp_path: Path) -> None:
    trials = study.trials.all_trials()
    assert len({trial.key for trial in trials}) == len(trials) == 42
    assert [trial.seed for trial in trials] == sorted(trial.seed for trial in trials)
    for trial in trials:
        assert (trial.tokens == 0) != (trial.seconds == 0)
    assert study.central.missing(tmp_path) == trials
    line = json.dumps(dict.fromkeys(study.central.NEEDED, 0) | {"key": trials[3].key})
    (tmp_path / "central").mkdir()
    path = tmp_path / study.central.FILE
    path.write_text(line + "\n")
    assert study.central.missing(tmp_path) == [*trials[:3], *trials[4:]]
    path.write_text(line + '\n{"key": ')
    with pytest.raises(SystemExit, match=r"trials\.jsonl, line 2: no result"):
        study.central.missing(tmp_path)


def test_a_trial_is_trained_exported_and_tuned(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.finetune, "STEPS", 2)
    trial = study.trials.Trial(model="vit", arm="decoupled", seed=1, seconds=1.5)
    row = study.central.run_trial(trial)
    assert row["key"] == trial.key and 1500 <= row["virtual_ms"] < 3000
    assert 0 < row["tokens_trained"] < 8 * 512 * 9, "some stood still"
    assert set(row["finetuned"]) == {"exported"}
    assert len(row["finetuned"]["exported"]["after"]) == 3
    assert str(tmp_path.parent) not in json.dumps(row) and "/" not in row["trial"] + row["plan"]
    plan, digest = study.central.drawn_plan(1, tmp_path)
    assert digest == row["plan_digest"] and plan.slices == 586 and len(plan.faults) > 400


@pytest.mark.parametrize("arm", ["decoupled:H=8", "data-parallel"])
@pytest.mark.parametrize("model", ["dense", "vit"])
def test_what_is_exported_is_what_was_measured(study: Any, tmp_path: Path, model: Any, arm: str) -> None:
    base = base_manifest(num_learners=2, tokens=16_384, lockstep=False, model=model)
    (asked,) = arms_from([arm], base, num_learners=2)
    models: list[nn.Module] = []
    result = run_arm(asked, Fleet(machines=(MACHINE,) * 2), 0, num_points=1, ended=models.append)
    loaded = study.central.exported(models[0], asked.seeded(0), tmp_path / "export")()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(models[0].parameters(), loaded.parameters()))  # noqa: B905
    from geo_diloco.training.evaluate import Evaluator

    assert Evaluator(asked.seeded(0)).measure(loaded) == pytest.approx(result.heldout, rel=1e-6)


def test_tuning_teaches_and_held_out_files_are_nobody_s(study: Any) -> None:
    finetune = study.finetune
    ours, theirs = finetune.headers(held_out=False), finetune.headers(held_out=True)
    assert len(theirs) == 256 and len(ours) > 5000 and ours.shape[1] == 128
    known = {bytes(row.tolist()) for row in ours}
    assert sum(bytes(row.tolist()) in known for row in theirs) <= 3, "but for licences"
    images, labels = finetune.turned_digits(held_out=False)
    assert len(images) == len(labels) == 200
    manifest = base_manifest(num_learners=1, tokens=1, lockstep=False, model="vit")
    found = finetune.finetune(lambda: build_model(manifest.model))
    assert all(after["loss"] < found["before"][0]["loss"] for after in found["after"])
    assert finetune.finetune(lambda: build_model(manifest.model)) == found


def test_the_tables_compare_within_a_seed(study: Any, tmp_path: Path) -> None:
    assert study.central_report.central_report(tmp_path).startswith("Not run yet")
    (tmp_path / "central").mkdir()
    lines = []
    for seed, loss in ((0, 2.0), (1, 4.0)):
        for place, trial in enumerate(study.trials.trials_of("vit", seed)):
            tuned = {"before": [{"loss": 3.0}], "after": [{"loss": loss * (1 + place / 50)}] * 3}
            row = dict.fromkeys(study.central.NEEDED, 0) | {"key": trial.key, "date": "2026-12-01"}
            row |= {"heldout": loss * (1 + place / 100), "accuracy": 0.9 - place / 100, "tokens_trained": 1_500_000}
            lines.append(row | {"virtual_ms": 39_000, "finetuned": {"exported": tuned, "untrained": tuned}})
    (tmp_path / study.central.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = study.central_report.central_report(tmp_path)
    assert "12 of 42 trials" in made and made.count("not run yet") == 2
    assert (
        "| `decoupled` | as much time | 1.50M | 39.0 | 2.0600 4.1200 | +3.00 ± 0.00 % | 87.0 87.0 | -3.0 (s 0.0) "
        "| 3.000 | 3.180 | +6.00 ± 0.00 % |"
    ) in made
    assert "| `data-parallel:faults=off` | both | 1.50M | 39.0 | 2.0000 4.0000 |  | 90.0 90.0 |  |" in made
