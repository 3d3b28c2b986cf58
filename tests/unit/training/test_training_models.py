"""Models come from a manifest that somebody else wrote: what is built, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from geo_diloco.errors import ModelError
from geo_diloco.manifest import ModelSpec
from geo_diloco.numerics.fragments import named_trainable
from geo_diloco.training.models import build_model, model_factory, with_config
from geo_diloco.training.presets import demo_model_config

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@model_factory
def make_linear(*, width: int = 3) -> nn.Module:
    return nn.Linear(width, 2)


@model_factory
def make_frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@model_factory
def make_nothing() -> object:  # type: ignore[type-var]
    return "a string"


@model_factory
def make_trouble() -> nn.Module:
    class OwnError(Exception):
        pass

    raise OwnError("of its author's")


@model_factory
def make_lazy() -> nn.Module:
    return nn.LazyLinear(3)


@model_factory
def make_meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


@model_factory
def make_complex() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


@model_factory
def make_nan() -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float("nan"))
    return model


def not_marked(command: str = "") -> nn.Module:
    raise AssertionError("must never be called")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("models_of_the_test")
    odd = (make_trouble, make_lazy, make_meta, make_complex, make_nan)
    for function in (make_linear, make_frozen, make_nothing, not_marked, *odd):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "models_of_the_test", module)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("make_trouble", "failed: OwnError: of its author's"),
        ("make_lazy", "parameter 'bias' has no values yet"),
        ("make_meta", "parameter 'bias' has no values yet"),
        ("make_complex", r"parameter 'bias' is torch\.complex64; only floating point"),
        ("make_nan", "parameter 'weight' begins with values that are NaN"),
    ],
)
def test_whatever_is_wrong_with_a_factorys_model_is_said_when_it_is_built(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_model(ModelSpec(factory=f"models_of_the_test:{name}"))


@pytest.mark.parametrize("body", ["import syntax error (", "raise ValueError('at import')", "import sys; sys.exit(7)"])
def test_a_factorys_module_may_fail_in_any_way_when_it_is_imported(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_in_trouble.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="module_in_trouble:build"):
        build_model(ModelSpec(factory="module_in_trouble:build"))


def test_a_home_of_nobody_is_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="'~nobody-here/model': no folder"):
        build_model(ModelSpec(pretrained="~nobody-here/model"))


def test_the_same_seed_builds_the_same_theta_and_leaves_the_callers_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one = build_model(ModelSpec(config=TINY, seed=5))
    assert torch.equal(torch.rand(3), expected)
    two = build_model(ModelSpec(config=TINY, seed=5))
    other = build_model(ModelSpec(config=TINY, seed=6))
    weights = named_trainable(one)
    assert all(torch.equal(tensor, named_trainable(two)[name]) for name, tensor in weights.items())
    assert any(not torch.equal(tensor, named_trainable(other)[name]) for name, tensor in weights.items())


def test_the_demo_model_has_about_two_hundred_thousand_parameters_over_bytes() -> None:
    model = build_model(ModelSpec(config=demo_model_config()))
    assert 180_000 < sum(tensor.numel() for tensor in named_trainable(model).values()) < 260_000
    assert model.config.vocab_size == 256
    assert model.training and all(tensor.dtype == torch.float32 for tensor in model.parameters())


def test_the_demo_model_config_can_be_written_as_toml() -> None:
    assert None not in demo_model_config().values()


@pytest.mark.parametrize(
    "key", ["auto_map", "trust_remote_code", "_name_or_path", "attn_implementation", "_attn_implementation"]
)
def test_a_config_that_points_to_code_or_a_hub_is_refused_by_the_key(key: str) -> None:
    with pytest.raises(ModelError, match=rf"model\.config\.{key} is not allowed"):
        build_model(ModelSpec(config={**TINY, key: "someone/kernel"}))
    with pytest.raises(ModelError, match=rf"model\.config\.text_config\.{key} is not allowed"):
        build_model(ModelSpec(config={**TINY, "text_config": {key: "someone/kernel"}}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "no model_type"),
        ({**TINY, "model_type": "no_such_family"}, "no_such_family"),
        ({**TINY, "num_attention_heads": 3}, "can't be built"),
        ({**TINY, "hidden_size": "many"}, "can't be built"),
        ({**TINY, "model_type": "vit"}, "can't be built"),
    ],
)
def test_a_config_that_can_not_be_built_is_one_model_error(config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        build_model(ModelSpec(config=config))
    assert "\n" not in str(caught.value)


def test_a_marked_factory_is_called_with_the_manifests_arguments() -> None:
    model = build_model(ModelSpec(factory="models_of_the_test:make_linear", factory_arguments={"width": 5}))
    assert isinstance(model, nn.Linear) and model.in_features == 5


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("models_of_the_test:not_marked", "not marked"),
        ("os:system", "not marked"),
        ("subprocess:run", "not marked"),
        ("torch:load", "not marked"),
        ("models_of_the_test:missing", "has no missing"),
        ("no_such_module_anywhere:f", "must be importable on every peer"),
        ("models_of_the_test", "module:function"),
        (":make_linear", "module:function"),
        ("models_of_the_test:make_nothing", "returned str"),
        ("models_of_the_test:make_frozen", "no trainable parameters"),
    ],
)
def test_a_factory_that_is_not_one_is_refused_without_being_called(factory: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(ModelSpec(factory=factory))


def test_a_factory_that_fails_on_its_arguments_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="TypeError"):
        build_model(ModelSpec(factory="models_of_the_test:make_linear", factory_arguments={"depth": 5}))


def test_a_manifest_without_a_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.config, model\.factory, model\.pretrained"):
        build_model(ModelSpec())


def test_a_pretrained_folder_gives_weights_to_the_founder_and_shapes_to_others(tmp_path: Path) -> None:
    original = build_model(ModelSpec(config=TINY, seed=9))
    original.save_pretrained(tmp_path)  # type: ignore[operator]
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "_name_or_path": "someone/model"}), "utf-8")
    spec = with_config(ModelSpec(pretrained=str(tmp_path), seed=1))
    assert spec.config is not None and spec.config["hidden_size"] == 8
    weights = named_trainable(original)
    for_founder = named_trainable(build_model(spec, with_weights=True))
    assert all(torch.equal(tensor, for_founder[name]) for name, tensor in weights.items())
    assert "_name_or_path" not in spec.config
    elsewhere = ModelSpec(pretrained="/nowhere", config=spec.config)
    assert {n: t.shape for n, t in named_trainable(build_model(elsewhere)).items()} == {
        n: t.shape for n, t in weights.items()
    }


def test_a_missing_pretrained_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder with a config"):
        build_model(ModelSpec(pretrained=str(tmp_path / "missing")), with_weights=True)
    with pytest.raises(ModelError, match="can't read"):
        with_config(ModelSpec(pretrained=str(tmp_path / "missing")))
