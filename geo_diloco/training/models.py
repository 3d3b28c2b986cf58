"""From the manifest's `ModelSpec` to a `torch.nn.Module`, without ever running code that came over the network.

Three ways: a Hugging Face config (a dict, built by `AutoModelForCausalLM.from_config`), a factory (`module:function`
that is installed on this machine), or a `save_pretrained` folder. Nothing is downloaded, `trust_remote_code` is never
set, and weights are read from safetensors only.

A manifest comes from somebody else, and a factory in it names a function to be called here with arguments of their
choosing. So only functions whose author marked them with `@model_factory` are ever called; `os:system` is refused.

Only Theta_0 on the founder depends on the seed: everyone else takes its weights from the run. Buffers that training
changes (BatchNorm's running statistics) are not parameters and are not synchronised.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from geo_diloco.errors import ModelError
from geo_diloco.manifest import ModelSpec, keys_naming_code, names_code
from geo_diloco.numerics.fragments import named_trainable

Factory = TypeVar("Factory", bound=Callable[..., nn.Module])
_MARK = "__geo_diloco_model_factory__"


def model_factory(function: Factory) -> Factory:
    """Mark a function that returns a `torch.nn.Module` as safe to be named by a manifest (`module:function`).

    It will be called with the manifest's `factory_arguments` on every peer, so it must trust none of them: no paths,
    no shell, no sizes beyond what the machine can bear.
    """
    setattr(function, _MARK, True)
    return function


def build_model(spec: ModelSpec, *, with_weights: bool = False) -> nn.Module:
    """The model in float32 on the CPU, in training mode, seeded by `spec.seed`; the caller's random state is untouched.

    `with_weights` (the founder): a pretrained folder's weights are read. Others get the right shapes and need only
    its config. Raises ModelError, naming the key, for anything that can't be built or has nothing to train.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)  # `torch.manual_seed` would seed accelerators too
        if spec.factory is not None:
            model = _from_factory(spec.factory, spec.factory_arguments)
        elif spec.pretrained is not None and (with_weights or spec.config is None):
            model = _from_folder(spec.pretrained)
        elif spec.config is not None:
            model = _from_config(spec.config)
        else:
            raise ModelError("the manifest names no model: set one of model.config, model.factory, model.pretrained")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the model has no trainable parameters: all have requires_grad = False")
    for name, tensor in named_trainable(model).items():
        if not tensor.is_floating_point():
            raise ModelError(f"parameter {name!r} is {tensor.dtype}; only floating point can be merged")
        if not torch.isfinite(tensor).all():
            raise ModelError(f"parameter {name!r} begins with values that are NaN or infinite")
    return model.to(dtype=torch.float32).train()


def vocabulary_of(spec: ModelSpec) -> int | None:
    """How many tokens the model knows, if that can be told without building it."""
    size = None if spec.config is None else spec.config.get("vocab_size")
    return size if isinstance(size, int) else None


def with_config(spec: ModelSpec) -> ModelSpec:
    """The spec with its pretrained folder's config written into it, so that peers without the folder can join."""
    if spec.pretrained is None or spec.config is not None:
        return spec
    path = Path(os.path.expanduser(spec.pretrained)) / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model.pretrained = {spec.pretrained!r}: can't read {path}: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"model.pretrained = {spec.pretrained!r}: {path} has no model_type")
    if "auto_map" in config:
        raise ModelError(f"model.pretrained = {spec.pretrained!r}: its code is its own (auto_map); that is never run")
    return replace(spec, config=_without_refused(config))


def _from_config(config: Mapping[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import

    values = dict(config)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ModelError("model.config has no model_type; it is the name transformers knows the family by, as 'llama'")
    for key in keys_naming_code(values):
        raise ModelError(f"model.config.{key} is not allowed: nothing is downloaded and no foreign code is run")
    try:
        built = AutoConfig.for_model(model_type, **values)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            built, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:  # a constructor may raise anything when given somebody else's arguments
        raise ModelError(f"model.config (model_type {model_type!r}) can't be built: {_one_line(error)}") from error
    assert isinstance(model, nn.Module)
    return model


def _without_refused(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_refused(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not names_code(key)
    }


def _from_folder(folder: str) -> nn.Module:
    path = Path(os.path.expanduser(folder))
    if not (path / "config.json").is_file():
        raise ModelError(f"model.pretrained = {folder!r}: no folder with a config.json; make one by save_pretrained")
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
    except Exception as error:  # whatever a damaged folder brings to light in a library
        raise ModelError(f"model.pretrained = {folder!r} can't be loaded: {_one_line(error)}") from error
    assert isinstance(model, nn.Module)
    return model


def _from_factory(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ModelError(f"model.factory = {name!r}: must read 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module is somebody's code, a script even
        raise ModelError(
            f"model.factory = {name!r}: {_one_line(error)}; the module must be importable on every peer"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ModelError(f"model.factory = {name!r}: {module_name} has no {function_name}")
    if getattr(function, _MARK, False) is not True:
        raise ModelError(f"model.factory = {name!r}: not marked with @geo_diloco.model_factory, so it is not called")
    try:
        model = function(**arguments)
    except Exception as error:
        raise ModelError(f"model.factory = {name!r} failed: {_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.factory = {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
