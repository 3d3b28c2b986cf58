"""A mixture of experts and images, simulated by the same core: arms begin alike and learn, accuracy is told."""

from __future__ import annotations

import pytest

from geo_diloco.errors import ConfigError
from geo_diloco.sim.train import arms as arms_module
from geo_diloco.sim.train.arms import Arm, arms_from, base_manifest
from geo_diloco.sim.train.comparing import run_arm
from geo_diloco.sim.train.results import summarize
from geo_diloco.training.presets import ModelName

from .runs import fleet


def arm(text: str, model: ModelName, tokens: int, num_learners: int = 2) -> Arm:
    base = base_manifest(num_learners=num_learners, tokens=tokens, lockstep=False, model=model)
    return arms_from([text], base, num_learners=num_learners)[0]


def test_images_are_learnt_by_every_kind_of_arm_and_accuracy_is_told() -> None:
    texts = ["decoupled:H=8,P=2", "diloco:H=8", "data-parallel"]
    arms = tuple(arm(text, "vit", 80 * 1024) for text in texts)
    results = [run_arm(each, fleet(100, 130), 1) for each in arms]
    assert len({(result.curve[0], result.curve_accuracy[0]) for result in results}) == 1
    for result in results:
        assert result.accuracy == result.curve_accuracy[-1] > 0.2 > result.curve_accuracy[0]  # type: ignore[operator]
        assert len(result.curve_accuracy) == len(result.curve)
        assert result.tokens_balance
    rows = summarize(arms, results, {})["arms"]
    assert [row["accuracy_mean"] for row in rows] == [result.accuracy for result in results]


def test_a_mixture_of_experts_is_learnt() -> None:
    result = run_arm(arm("decoupled:H=4,P=2,lr=1e-2,warmup_steps=0", "moe", 2 * 10 * 1024), fleet(100, 130), 1)
    assert result.heldout < result.curve[0][2] - 0.5  # type: ignore[operator]
    assert result.accuracy is None and result.curve_accuracy == ()
    assert result.tokens_balance


def test_sixteen_learners_share_the_images() -> None:
    result = run_arm(arm("decoupled:H=4,P=2", "vit", 16 * 8 * 512, num_learners=16), fleet(*[100] * 16), 1)
    assert result.participants_mean > 8
    assert result.tokens_balance


def test_images_without_scikit_learn_are_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms_module, "digits_missing", lambda: "scikit-learn is not installed")
    with pytest.raises(ConfigError, match="--model vit: scikit-learn is not installed"):
        base_manifest(num_learners=2, tokens=1024, lockstep=False, model="vit")
    base_manifest(num_learners=2, tokens=1024, lockstep=False)
