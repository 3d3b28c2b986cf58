"""Manifests that are known to work: the demo's, and the same run with other models for `simulate train --model`.

The demo's numbers come from the study in `training/README.md`; the other models are those of the examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from geo_diloco.manifest import (
    CodecSpec,
    DataSpec,
    EvalSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunManifest,
    StopSpec,
    SyncSpec,
)

DEMO_MINUTES = 2.0

ModelName = Literal["dense", "dense-1M", "moe", "vit"]


def demo_manifest() -> RunManifest:
    """Four learners on two cores for two minutes, on Python's own source text. Without founder and nonce."""
    return RunManifest(
        name="demo",
        model=ModelSpec(config=demo_model_config()),
        data=DataSpec(source="stdlib", tokenizer="bytes", sequence_length=128, batch_size=8, num_shares=8),
        inner=InnerSpec(learning_rate=2e-3, schedule="cosine", schedule_by="run", warmup_steps=20, final_share=0.1),
        sync=SyncSpec(
            interval_steps=24,
            num_fragments=4,
            overlap_steps=2,
            quorum=1,
            grace=True,
            grace_gamma=1.0,  # four learners of one speed: all of the slack, so that nearly all are merged
            kappa=1.0,
        ),
        outer=OuterSpec(eta=0.7, mu=0.5),
        codec_up=CodecSpec(name="int4", block=64),
        codec_down=CodecSpec(name="int4", block=64),
        stop=StopSpec(minutes=DEMO_MINUTES),
        evaluation=EvalSpec(every_seconds=10.0, sequences=64),
    )


def demo_model_config() -> dict[str, Any]:
    """A Llama of about 0.2M parameters over bytes, chosen for two minutes on two cores (training/README.md)."""
    return {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_cache": False,
    }


def preset_manifest(name: ModelName) -> RunManifest:
    """The demo's run with that model; only what belongs to the model differs."""
    demo = demo_manifest()
    match name:
        case "dense":
            return demo
        case "dense-1M":
            larger = {"hidden_size": 176, "intermediate_size": 352, "num_hidden_layers": 3}
            return replace(demo, model=ModelSpec(config=demo_model_config() | larger))
        case "moe":
            return replace(demo, model=ModelSpec(config=moe_model_config()))
        case "vit":
            return replace(
                demo,
                model=ModelSpec(
                    factory="geo_diloco.training.digits:vit_on_digits",
                    factory_arguments={"width": 32, "num_layers": 2},
                ),
                data=replace(demo.data, sequence_length=16, batch_size=32),
            )


def moe_model_config() -> dict[str, Any]:
    """The Mixtral of `examples/mixture_of_experts.toml`: four experts, two of them for each token; 0.14M parameters."""
    return {
        "model_type": "mixtral",
        "vocab_size": 256,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
