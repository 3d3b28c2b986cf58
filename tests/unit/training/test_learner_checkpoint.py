"""A learner's checkpoint appears whole or not at all, and a model folder is one that others can load."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from geo_diloco.errors import ConfigError, LayoutError, RunDirError
from geo_diloco.manifest import ModelSpec, RunManifest
from geo_diloco.numerics.fragments import layout_from_module
from geo_diloco.training import checkpoint
from geo_diloco.training.checkpoint import export_model, load_learner, save_learner
from geo_diloco.training.models import build_model

from .test_training_models import TINY
from .toy import layout_of, make_toy, vectors_of


def save(folder: Path, number: int, *, accounts: str = "{}") -> Path:
    tensors = {"model.w": torch.full((3,), float(number))}
    extra: dict[str, Any] = {"save": number, "step": number * 10, "tokens": number * 100, "cursor": number * 50}
    return save_learner(folder, tensors, extra, accounts)


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    save(tmp_path, 3, accounts='{"books": [1, 2]}')
    found = load_learner(tmp_path)
    assert found is not None
    assert (found.save, found.step, found.tokens, found.cursor) == (3, 30, 300, 150)
    assert found.accounts_json == '{"books": [1, 2]}'
    assert torch.equal(found.tensors["model.w"], torch.full((3,), 3.0))


def test_a_folder_without_checkpoints_is_a_new_learners(tmp_path: Path) -> None:
    assert load_learner(tmp_path) is None
    assert load_learner(tmp_path / "missing") is None


def test_the_newest_is_read_and_two_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 9, 10, 11):
        save(tmp_path, number)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["save-00000010", "save-00000011"]
    found = load_learner(tmp_path)
    assert found is not None and found.save == 11


def test_saving_the_same_number_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, accounts="old")
    save(tmp_path, 1, accounts="new")
    found = load_learner(tmp_path)
    assert found is not None and found.accounts_json == "new"


@pytest.mark.parametrize("name", ["state.safetensors", "extra.json", "accounts.json"])
@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2) / name
    if harm == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:-1] if name != "accounts.json" else b"\xff")
    found = load_learner(tmp_path)
    assert found is not None and found.save == 1


def test_no_readable_checkpoint_is_an_error_and_not_a_new_start(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "extra.json").write_text("{", "utf-8")
    with pytest.raises(RunDirError, match="save-00000001"):
        load_learner(tmp_path)


def test_a_process_that_dies_while_saving_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def die(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", die)
        save(tmp_path, 2)
    found = load_learner(tmp_path)
    assert found is not None and found.save == 1
    save(tmp_path, 2)
    found = load_learner(tmp_path)
    assert found is not None and found.save == 2


def test_what_a_killed_process_left_of_a_checkpoint_goes_with_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".save-00000001.4194305"  # the number of no process
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half of it")
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["save-00000001"]


def made_theta(manifest: RunManifest, seed: int) -> tuple[Any, list[Tensor]]:
    model = build_model(ModelSpec(config=manifest.model.config, seed=seed))
    layout = layout_from_module(model, num_fragments=2)
    return layout, vectors_of(model, layout)


def test_an_exported_folder_loads_with_transformers_and_holds_theta(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    manifest = RunManifest(model=ModelSpec(config=TINY, seed=1))
    layout, theta = made_theta(manifest, seed=2)
    export_model(theta, layout, manifest, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert manifest.run_id() in card and "AutoModelForCausalLM" in card and "the bytes of UTF-8 text" in card
    assert all(torch.equal(a, b) for a, b in zip(vectors_of(loaded, layout), theta, strict=True))


def test_a_factorys_model_is_exported_as_safetensors(tmp_path: Path) -> None:
    model = make_toy(1)
    layout = layout_of(model)
    theta = vectors_of(make_toy(2), layout)
    manifest = RunManifest(model=ModelSpec(factory="tests.unit.training.toy:build_toy", factory_arguments={"seed": 5}))
    export_model(theta, layout, manifest, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    model.load_state_dict(tensors)
    assert all(torch.equal(a, b) for a, b in zip(vectors_of(model, layout), theta, strict=True))
    assert (tmp_path / "out" / "geo_diloco.json").is_file()
    assert "tests.unit.training.toy:build_toy" in (tmp_path / "out" / "README.md").read_text("utf-8")


def test_export_does_not_write_into_a_folder_that_holds_something(tmp_path: Path) -> None:
    manifest = RunManifest(model=ModelSpec(config=TINY))
    layout, theta = made_theta(manifest, seed=2)
    (tmp_path / "thesis.txt").write_text("mine", "utf-8")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_model(theta, layout, manifest, tmp_path)
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_model(theta, layout, manifest, tmp_path / "thesis.txt")


def test_an_export_that_fails_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = RunManifest(model=ModelSpec(config=TINY))
    layout, theta = made_theta(manifest, seed=2)

    def full(tokenizer: str, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_export_tokenizer", full)
    with pytest.raises(ConfigError, match=r"--to .*out: No space left on device"):
        export_model(theta, layout, manifest, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_a_layout_of_another_model(tmp_path: Path) -> None:
    layout = layout_of(make_toy())
    manifest = RunManifest(model=ModelSpec(config=TINY))
    with pytest.raises(LayoutError, match="another model"):
        export_model(vectors_of(make_toy(), layout), layout, manifest, tmp_path / "out")


@pytest.mark.parametrize("name", ["state.safetensors", "extra.json", "accounts.json"])
def test_a_flipped_bit_is_seen_and_the_checkpoint_before_is_read(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2, accounts='{"tokens": 1000}') / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    found = load_learner(tmp_path)
    assert found is not None and found.save == 1


def test_a_disk_that_takes_no_checkpoint_is_said_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunDirError, match="No space"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["save-00000001"], "what was half written is gone as well"
