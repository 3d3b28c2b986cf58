"""The demo's folder and the manifest it writes."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.cli.demo_files import create_demo_files, demo_run, toml_from_manifest
from geo_diloco.errors import ConfigError
from geo_diloco.manifest import CodecSpec, DataSpec, InnerSpec, ModelSpec, RunManifest


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def test_the_written_manifest_reads_back_as_the_same_values() -> None:
    manifest = RunManifest(
        name='a "quoted" name\nwith é, a tab\tand \U0001f600 and \x7f',
        model=ModelSpec(
            config={
                "model_type": "llama",
                "hidden_size": 64,
                "rope": {"theta": 1e-05, "odd key!": [1, 2.5, "x"], "none": None, "empty": {}},
                "tie": True,
                "pad": None,
                "nothing": [],
            }
        ),
        inner=InnerSpec(learning_rate=1e-9, gradient_clip=1e22),
        codec_up_choices=(CodecSpec(name="bf16"),),
        codec_down=CodecSpec(name="int8", block=256),
    )
    read = tomllib.loads(toml_from_manifest(manifest))
    legs = read.pop("codec")
    wanted = without_none(dataclasses.asdict(manifest))
    for key in ("founder", "nonce", "wire_version"):
        del wanted[key]
    wanted["codec_up_choices"] = list(wanted["codec_up_choices"])
    assert legs == {leg: wanted.pop(f"codec_{leg}") for leg in ("up", "up_choices", "down")}
    assert read == wanted


def test_the_founders_own_fields_are_never_written() -> None:
    text = toml_from_manifest(RunManifest(nonce="cafe" * 8))
    assert "nonce" not in text and "founder" not in text and "wire_version" not in text


def test_a_demo_run_has_a_share_for_every_learner_and_stops_by_time_alone() -> None:
    run = demo_run(RunManifest(data=DataSpec(num_shares=4)), minutes=0.5, num_learners=9)
    assert run.data.num_shares == 9
    assert (run.stop.minutes, run.stop.tokens, run.stop.commits) == (0.5, 0, 0)
    assert 0 < run.evaluation.every_seconds <= 30


def test_few_learners_keep_the_presets_shares() -> None:
    preset = RunManifest(data=DataSpec(num_shares=8))
    assert demo_run(preset, minutes=2, num_learners=2).data.num_shares == 8


def test_every_process_has_a_place_of_its_own(tmp_path: Path) -> None:
    files = create_demo_files(tmp_path / "new" / "demo")
    places = [files.bootstrap, files.logs, *(files.learner(number) for number in (1, 2, 11))]
    assert len(set(places)) == len(places)
    assert all(place.parent == files.root for place in places)
    for number in (11, 2, 1):
        files.learner(number).mkdir()
    assert files.learner_dirs() == [files.learner(1), files.learner(2), files.learner(11)]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        create_demo_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_cant_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file/demo"):
        create_demo_files(tmp_path / "file" / "demo")


def test_two_demos_in_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    assert create_demo_files(None).root != create_demo_files(None).root


def test_a_home_folder_that_nobody_has_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="nobody's home folder"):
        create_demo_files(Path("~no-such-person-here/demo"))
