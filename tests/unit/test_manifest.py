"""What the run id depends on, and what the core is told of the manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from geo_diloco.manifest import (
    WIRE_VERSION,
    ModelSpec,
    OuterSpec,
    PeerId,
    RunManifest,
    SyncSpec,
    run_id_from_bytes,
)

FOUNDED = RunManifest(
    name="a run", model=ModelSpec(config={"model_type": "llama"}), founder=PeerId("ab" * 32), nonce="cd" * 16
)


def test_canonical_bytes_are_sorted_json_without_spaces() -> None:
    canonical = FOUNDED.canonical_bytes()
    assert canonical == json.dumps(json.loads(canonical), sort_keys=True, separators=(",", ":")).encode()
    assert canonical.isascii()


def test_the_run_id_is_the_hash_of_the_canonical_bytes() -> None:
    expected = hashlib.sha256(FOUNDED.canonical_bytes()).hexdigest()[:40]
    assert FOUNDED.run_id() == run_id_from_bytes(FOUNDED.canonical_bytes()) == expected


def test_the_run_id_of_a_known_manifest_never_changes() -> None:
    # A changed id means that peers of this release and of the last one can't meet: then WIRE_VERSION must change too.
    assert WIRE_VERSION == 5
    assert FOUNDED.run_id() == "618713af3f6543fb0c22c65a10d023d732fba146"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RunManifest)])
def test_every_field_is_part_of_the_run_id(field: str) -> None:
    others = {
        "model": ModelSpec(config={"model_type": "mixtral"}),
        "data": dataclasses.replace(FOUNDED.data, seed=1),
        "inner": dataclasses.replace(FOUNDED.inner, warmup_steps=1),
        "sync": SyncSpec(quorum=2),
        "outer": OuterSpec(mu=0.9),
        "codec_up": dataclasses.replace(FOUNDED.codec_up, block=256),
        "codec_up_choices": (dataclasses.replace(FOUNDED.codec_up, name="bf16"),),
        "codec_down": dataclasses.replace(FOUNDED.codec_down, name="none"),
        "stop": dataclasses.replace(FOUNDED.stop, commits=3),
        "evaluation": dataclasses.replace(FOUNDED.evaluation, sequences=1),
        "election": dataclasses.replace(FOUNDED.election, electors=3),
        "admission": "token",
        "founder": PeerId("ba" * 32),
        "nonce": "dc" * 16,
        "name": "another run",
        "wire_version": WIRE_VERSION + 1,
    }
    changed = dataclasses.replace(FOUNDED, **{field: others[field]})
    assert changed.run_id() != FOUNDED.run_id()


def test_the_order_in_which_a_config_was_written_does_not_matter() -> None:
    one = dataclasses.replace(FOUNDED, model=ModelSpec(config={"model_type": "llama", "vocab_size": 256}))
    other = dataclasses.replace(FOUNDED, model=ModelSpec(config={"vocab_size": 256, "model_type": "llama"}))
    assert one.run_id() == other.run_id()


def test_the_core_is_told_the_rules_and_nothing_about_models() -> None:
    rules = FOUNDED.rules()
    told = {field.name for field in dataclasses.fields(rules)}
    copied = {
        "sync",
        "outer",
        "stop",
        "evaluation",
        "founder",
        "election",
        "codec_up",
        "codec_up_choices",
        "codec_down",
    }
    assert told == copied | {"num_shares", "tokens_per_step"}
    assert rules.num_shares == FOUNDED.data.num_shares
    assert rules.tokens_per_step == FOUNDED.data.sequence_length * FOUNDED.data.batch_size
    assert all(getattr(rules, name) == getattr(FOUNDED, name) for name in copied)


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FOUNDED.name = "other"  # type: ignore[misc]
