"""Results that outlive a command: the same settings are taken over, others are not, and damage costs one arm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.config import Fault, FaultPlan
from geo_diloco.errors import ConfigError
from geo_diloco.sim.train.arms import Arm, arms_from, base_manifest
from geo_diloco.sim.train.fleet import Fleet
from geo_diloco.sim.train.keeping import FILE_NAME, Kept, key_of
from geo_diloco.sim.train.results import ArmResult

from .runs import fleet

PLAN = FaultPlan(faults=(Fault(learner=1, kind="freeze", from_s=1.0, until_s=2.0),))


def arm(text: str, tokens: int = 100_000) -> Arm:
    return arms_from([text], base_manifest(num_learners=2, tokens=tokens, lockstep=False), num_learners=2)[0]


def result(text: str = "decoupled", seed: int = 0, accuracy: float | None = None) -> ArmResult:
    return ArmResult(
        arm=text, kind="decoupled", seed=seed, heldout=None, accuracy=accuracy,
        curve=((0, 0, 5.5), (4096, 9000, None)), curve_accuracy=() if accuracy is None else (0.1, accuracy),
        tokens_trained=4096, tokens_merged=3072, tokens_in_flight=0, tokens_carried=1000, tokens_dropped=24,
        dropped_by_reason={"shrunk": 24}, tokens_balance=True, commits=7, participants_mean=3.5,
        bytes_per_param_up=0.46, bytes_per_param_down=0.47, bytes_up=15, bytes_down=6, virtual_ms=9_000, wall_s=3.0,
        effects_digest="ab",
    )  # fmt: skip


def opened(folder: Path) -> tuple[Kept, list[str]]:
    warned: list[str] = []
    return Kept(folder, warned.append, version="1"), warned


def test_a_result_comes_back_as_it_was_under_the_name_it_is_asked_by(tmp_path: Path) -> None:
    first, _ = opened(tmp_path / "new" / "folder")
    first.add("key", result(accuracy=0.75))
    first.add("other", result(seed=1))
    again, warned = opened(tmp_path / "new" / "folder")
    assert again.get("key", arm("decoupled:K=1")) == replace(result(accuracy=0.75), arm="decoupled:K=1")
    assert again.get("other", arm("decoupled")) == result(seed=1)
    assert again.get("third", arm("decoupled")) is None
    assert not warned


def test_a_key_is_of_what_is_asked_for_and_not_of_how_it_is_typed() -> None:
    two = fleet(100, 100, plan=PLAN)
    key = key_of(arm("decoupled"), two, 0, version="1")
    assert key == key_of(arm("decoupled:K=1"), fleet(100, 100, plan=PLAN), 0, version="1")
    assert key != key_of(arm("decoupled"), two, 0, version="2")
    others: list[tuple[Arm, Fleet, int]] = [
        (arm("decoupled"), two, 1),
        (arm("decoupled:K=2"), two, 0),
        (arm("diloco"), two, 0),
        (arm("decoupled", tokens=200_000), two, 0),
        (arm("decoupled:faults=off"), two, 0),
        (arm("decoupled"), fleet(100, 110, plan=PLAN), 0),
        (arm("decoupled"), fleet(100, 100), 0),
        (arm("decoupled"), fleet(100, 100, plan=replace(PLAN, upscale_s=2.0)), 0),
        (arm("decoupled"), fleet(100, 100, plan=PLAN, joins=(5,)), 0),
    ]
    keys = {key_of(*each, version="1") for each in others}
    assert len(keys) == len(others) and key not in keys


def test_an_arm_without_faults_is_the_same_under_any_plan(tmp_path: Path) -> None:
    calm = arm("data-parallel:faults=off")
    kept, _ = opened(tmp_path)
    assert kept.key(calm, fleet(100, 100, plan=PLAN), 0) == kept.key(calm, fleet(100, 100), 0)


def test_a_line_that_was_cut_off_costs_its_arm_and_no_other(tmp_path: Path) -> None:
    first, _ = opened(tmp_path)
    first.add("a", result())
    first.add("b", result(seed=1))
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-40])
    again, warned = opened(tmp_path)
    assert again.get("a", arm("decoupled")) is not None and again.get("b", arm("decoupled")) is None
    assert len(warned) == 1 and "line 2: no result that can be read; its arm is run again" in warned[0]
    again.add("b", result(seed=1))
    assert opened(tmp_path)[0].get("b", arm("decoupled")) == result(seed=1), "not glued to what was left"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_trained": "many"}, {"curve": []}, {"curve": [[0, 0]]}, {"curve": [[0.5, 0, 1.0]]}, {"curve": [1]},
        {"heldout": True}, {"heldout": "2"}, {"dropped_by_reason": {"late": None}}, {"key": 3}, {"more": 1},
        {"curve_accuracy": None}, {"tokens_balance": 1}, {"effects_digest": 4},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_result_is_not_taken_for_one(tmp_path: Path, change: dict[str, object]) -> None:
    line = json.dumps({"key": "a"} | result().to_json() | change)
    (tmp_path / FILE_NAME).write_text(line + "\n[]\n\n" + "[" * 5000 + "\n")
    kept, warned = opened(tmp_path)
    assert kept.get("a", arm("decoupled")) is None
    assert len(warned) == 3


def test_a_folder_that_is_none_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file: File exists; choose another folder"):
        opened(tmp_path / "file")
    (tmp_path / "folder" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(ConfigError, match="Is a directory; choose another folder"):
        opened(tmp_path / "folder")
