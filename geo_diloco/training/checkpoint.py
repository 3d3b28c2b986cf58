"""A learner's own state on disk, and a model folder for people.

A checkpoint is taken at an inner-step boundary: weights, optimizer state, anchors, the undecided scales and random
state are copied together, so that a learner that comes back continues the very trajectory it left. The protocol's
books belong to the same instant and lie in the same folder. A folder appears whole, by rename, or not at all; the
one before is kept as well, in case the disk tells otherwise. Tensors are safetensors, the rest JSON: reading a
checkpoint never runs code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from geo_diloco.errors import ConfigError, LayoutError, ModelError, RunDirError
from geo_diloco.manifest import RunManifest
from geo_diloco.numerics.fragments import Layout, named_trainable, scatter_
from geo_diloco.training.models import build_model

if TYPE_CHECKING:
    from geo_diloco.training.replica import Replica

KEPT = 2
"""Checkpoints kept: the newest, and one to fall back on."""
_PREFIX = "save-"
_TENSORS, _EXTRA, _ACCOUNTS = "state.safetensors", "extra.json", "accounts.json"
_DIGESTS = "digests.json"
"""Of the other three: a flipped bit in a weight would otherwise be read as a weight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnerCheckpoint:
    """What was saved, read back and not yet applied."""

    save: int
    """Its number; the next one is higher."""
    step: int
    tokens: int
    cursor: int
    """Tokens consumed of the share it was trained on."""
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    accounts_json: str
    """The protocol's books, as they were handed in."""


def save_learner(folder: Path, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], accounts_json: str) -> Path:
    """Write one checkpoint as `folder/save-<number>` and drop the oldest; `extra["save"]` is its number.

    Any thread may call it, one at a time; nobody may write to the tensors meanwhile. Raises RunDirError if the disk
    does not take it; the checkpoints before stay.
    """
    final = folder / f"{_PREFIX}{int(extra['save']):08d}"
    draft = folder / f".{final.name}.{os.getpid()}"
    for left in folder.glob(f".{_PREFIX}*"):  # by a process that was killed; each is as large as a checkpoint
        shutil.rmtree(left, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        save_file(dict(tensors), draft / _TENSORS)
        (draft / _EXTRA).write_text(json.dumps(dict(extra), sort_keys=True), "utf-8")
        (draft / _ACCOUNTS).write_text(accounts_json, "utf-8")
        digests = {name: _digest_of(draft / name) for name in (_TENSORS, _EXTRA, _ACCOUNTS)}
        (draft / _DIGESTS).write_text(json.dumps(digests), "utf-8")
        for name in (_TENSORS, _EXTRA, _ACCOUNTS, _DIGESTS):
            _sync_to_disk(draft / name)
        _sync_to_disk(draft)
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        _sync_to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunDirError(f"checkpoint {final}: {error}") from error
    for old in _saved(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_learner(folder: Path) -> LearnerCheckpoint | None:
    """The newest checkpoint that can be read; None if nothing was ever saved.

    Raises RunDirError if there are checkpoints and none can be read.
    """
    saved = _saved(folder)
    problem = ""
    for path in reversed(saved):
        try:
            return _load(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            problem = problem or f"{path}: {type(error).__name__}: {error}"
    if saved:
        raise RunDirError(f"no checkpoint in {folder} can be read ({problem}); remove that folder to start afresh")
    return None


def capture_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica, *, warm_from: int | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies, on the CPU, of everything a learner needs to go on; and what of it is not a tensor. Anchors are never
    written to, so they are not copied."""
    tensors = {f"model.{name}": _copy(tensor) for name, tensor in replica.tensors.items()}
    tensors |= {f"buffer.{name}": _copy(buffer) for name, buffer in _persistent_buffers(model).items()}
    tensors |= {f"anchor.{p}": replica.anchor(p) for p in range(replica.layout.num_fragments)}
    numbers: dict[str, dict[str, float | int | bool]] = {}
    not_saved: list[str] = []
    names = {id(tensor): name for name, tensor in replica.tensors.items()}
    for index, parameter in enumerate(_optimized(optimizer)):
        name = names.get(id(parameter), f"#{index}")
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = _copy(value)
            elif isinstance(value, bool | int | float):
                numbers.setdefault(name, {})[key] = value
            elif value is not None:
                not_saved.append(f"{name}.{key}")
    tensors["rng.cpu"] = torch.get_rng_state()
    device = next(iter(replica.tensors.values())).device
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors, {
        "layout": replica.layout.digest,
        "optimizer": numbers,
        "not_saved": not_saved,
        "undecided_scale": list(replica.undecided_scale),
        "warm_from": warm_from,
    }


def restore_state(
    checkpoint: LearnerCheckpoint, model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica
) -> int | None:
    """Put a checkpoint into model, optimizer, anchors and torch's random state; returns where warm-up began, if it
    still goes on. The optimizer keeps the hyperparameters it was built with. Raises ModelError if they don't fit."""
    tensors, extra = checkpoint.tensors, checkpoint.extra
    if extra.get("layout") != replica.layout.digest:
        raise ModelError("this learner's checkpoint was made with another model than the run's")
    try:
        with torch.no_grad():
            for name, tensor in replica.tensors.items():
                tensor.copy_(tensors[f"model.{name}"])
            for name, buffer in _persistent_buffers(model).items():
                buffer.copy_(tensors[f"buffer.{name}"])
        anchors = [tensors[f"anchor.{p}"] for p in range(replica.layout.num_fragments)]
        replica.restore(anchors, extra["undecided_scale"])
        optimizer.load_state_dict(_optimizer_state(optimizer, replica, tensors, extra["optimizer"]))
        torch.set_rng_state(tensors["rng.cpu"])
        device = next(iter(replica.tensors.values())).device
        if "rng.cuda" in tensors and device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ModelError(f"this learner's checkpoint does not fit its model and optimizer: {error}") from error
    warm_from = extra.get("warm_from")
    return warm_from if isinstance(warm_from, int) else None


def export_model(
    theta: Sequence[Tensor] | Mapping[int, Tensor], layout: Layout, manifest: RunManifest, to_dir: Path
) -> Path:
    """Write Theta as a `save_pretrained` folder (a factory's model: `model.safetensors` and `geo_diloco.json`), with a
    README that says how to load it.

    theta: one float32 vector per fragment. What the run does not train (frozen parameters, buffers) comes from
    building the model anew, so a pretrained folder with frozen parts must be at hand. Raises ConfigError if `to_dir`
    holds anything already, LayoutError if the model is not the layout's.
    """
    check_export_folder(to_dir)
    spec = manifest.model
    has_folder = spec.pretrained is not None and Path(os.path.expanduser(spec.pretrained)).is_dir()
    model = build_model(spec, with_weights=has_folder)
    tensors = named_trainable(model)
    if set(tensors) != {part.name for part in layout.tensors}:
        raise LayoutError("the manifest builds another model than the one that was trained")
    for fragment in range(layout.num_fragments):
        scatter_(theta[fragment], tensors, layout, fragment)
    draft = to_dir.with_name(f".{to_dir.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        _write_model(model, tensors, manifest, draft)
        draft.replace(to_dir)
    except OSError as error:
        raise ConfigError(f"--to {to_dir}: {error.strerror or error}; name a folder that can be written") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return to_dir


def check_export_folder(to_dir: Path) -> None:
    """Raises ConfigError if nothing can be written there. To be asked before the long part."""
    try:
        if to_dir.exists() and (not to_dir.is_dir() or any(to_dir.iterdir())):
            raise ConfigError(f"--to {to_dir}: already there and not an empty folder; name a new one")
    except OSError as error:
        raise ConfigError(f"--to {to_dir}: {error.strerror or error}; name a folder that can be written") from error


def _write_model(model: nn.Module, tensors: Mapping[str, Tensor], manifest: RunManifest, folder: Path) -> None:
    save_pretrained = getattr(model, "save_pretrained", None)
    (folder / "README.md").write_text(_model_card(manifest, is_pretrained=callable(save_pretrained)), "utf-8")
    if callable(save_pretrained):
        save_pretrained(str(folder))
        _export_tokenizer(manifest.data.tokenizer, folder)
        return
    try:
        save_file(
            {name: _copy(tensor) for name, tensor in {**tensors, **_persistent_buffers(model)}.items()},
            folder / "model.safetensors",
        )
    except SafetensorError as error:  # the disk, in that library's words
        raise OSError(str(error)) from error
    spec = manifest.model
    built_by = {"factory": spec.factory, "factory_arguments": dict(spec.factory_arguments)}
    (folder / "geo_diloco.json").write_text(json.dumps(built_by, indent=2, sort_keys=True) + "\n", "utf-8")


def _model_card(manifest: RunManifest, *, is_pretrained: bool) -> str:
    """What the folder is, for who finds it, and how to load it."""
    if is_pretrained:
        load = 'model = transformers.AutoModelForCausalLM.from_pretrained("this folder")'
    else:
        load = (
            f"# the model itself is built by {manifest.model.factory} (geo_diloco.json)\n"
            'model.load_state_dict(safetensors.torch.load_file("model.safetensors"))'
        )
    tokens = (
        "its tokens are the bytes of UTF-8 text, so there is no tokenizer: `torch.tensor([list(text.encode())])`"
        if manifest.data.tokenizer == "bytes"
        else "its tokenizer was saved beside it where the exporting machine had it"
    )
    return (
        f"# {manifest.name}\n\nTrained by geo_diloco in run `{manifest.run_id()}`; {tokens}.\n\n"
        f"```python\n{load}\n```\n"
    )


def _export_tokenizer(tokenizer: str, to_dir: Path) -> None:
    folder = Path(os.path.expanduser(tokenizer))
    if tokenizer == "bytes" or not folder.is_dir():
        return
    from transformers import AutoTokenizer  # seconds to import

    AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False).save_pretrained(to_dir)


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _load(path: Path) -> LearnerCheckpoint:
    for name, digest in json.loads((path / _DIGESTS).read_text("utf-8")).items():
        if _digest_of(path / name) != digest:
            raise ValueError(f"{name} was damaged on disk")
    extra = json.loads((path / _EXTRA).read_text("utf-8"))
    return LearnerCheckpoint(
        save=int(extra["save"]),
        step=int(extra["step"]),
        tokens=int(extra["tokens"]),
        cursor=int(extra["cursor"]),
        tensors=load_file(path / _TENSORS),
        extra=extra,
        accounts_json=(path / _ACCOUNTS).read_text("utf-8"),
    )


def _optimizer_state(
    optimizer: torch.optim.Optimizer, replica: Replica, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """In the form of `Optimizer.state_dict`, which also moves each value to its parameter's device."""
    names = {id(tensor): name for name, tensor in replica.tensors.items()}
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(_optimized(optimizer)):
        name = names.get(id(parameter), f"#{index}")
        prefix = f"optimizer.{name}."
        values: dict[str, Any] = {
            key.removeprefix(prefix): tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        values |= numbers.get(name, {})
        if values:
            state[index] = values
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _optimized(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _saved(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*")) if folder.is_dir() else []


def _sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
