"""Small runs for the tests of the train simulator: a model of a few thousand parameters on the demo's text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from geo_diloco.config import FaultPlan
from geo_diloco.manifest import CodecSpec, DataSpec, EvalSpec, InnerSpec, ModelSpec, OuterSpec, RunManifest, StopSpec
from geo_diloco.sim.train.fleet import Fleet, Machine
from geo_diloco.training.presets import demo_manifest

TOKENS_PER_STEP = 2 * 32


def small_manifest(*, tokens: int, **sync: Any) -> RunManifest:
    """`tokens` to train; `sync` changes the demo's rules of synchronising."""
    config = dict(demo_manifest().model.config or {})
    config |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    rules = {"interval_steps": 8, "num_fragments": 2} | sync
    return RunManifest(
        model=ModelSpec(config=config, seed=5),
        data=DataSpec(sequence_length=32, batch_size=2, num_shares=4, seed=5),
        inner=InnerSpec(learning_rate=3e-3, schedule="constant", warmup_steps=4),
        sync=replace(demo_manifest().sync, **rules),
        outer=OuterSpec(eta=0.7, mu=0.5),
        stop=StopSpec(tokens=tokens),
        evaluation=EvalSpec(every_seconds=0.0, sequences=8),
    )


def lockstep_manifest(*, num_learners: int, num_steps: int, **sync: Any) -> RunManifest:
    """A run that is synchronous DiLoCo: one fragment, K = M, no overlap, no carry, plain mean, no encoding."""
    rules = {
        "num_fragments": 1,
        "overlap_steps": 0,
        "quorum": num_learners,
        "kappa": 0.0,
        "merge": "mean",
        "lockstep": True,
    }
    manifest = small_manifest(tokens=num_learners * num_steps * TOKENS_PER_STEP, **(rules | sync))
    return replace(manifest, codec_up=CodecSpec(name="none"), codec_down=CodecSpec(name="none"))


def fleet(*step_ms: int, **changes: Any) -> Fleet:
    """Learners of these step times on quick links."""
    link: dict[str, Any] = {"up_mbit": 100.0, "down_mbit": 100.0, "delay_ms": 5}
    plan, joins = FaultPlan(faults=changes.pop("faults", ())), changes.pop("joins", ())
    plan = changes.pop("plan", plan)
    machines = tuple(Machine(step_ms=ms, **(link | changes)) for ms in step_ms)
    return Fleet(machines=machines, plan=plan, joins=joins)
