"""Manifests that are known to work: today the demo's. The numbers come from the study in `training/README.md`."""

from __future__ import annotations

from typing import Any

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
