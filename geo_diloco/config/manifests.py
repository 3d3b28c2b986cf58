"""Run manifests as people write them (TOML) and as peers send them (canonical JSON), checked.

The facts a run shares are `manifest.RunManifest`, which stands below the core and knows no ranges; here is what each of
its values may be, alone and beside the others. The pydantic models are made from those dataclasses, so names, types and
defaults exist once, and a manifest from a peer goes through the same checks as a person's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from geo_diloco.config.mistakes import FILE_BYTES_MAX, named, parse_toml, read_toml, sentence, shown
from geo_diloco.errors import ManifestError
from geo_diloco.manifest import (
    CODEC_CHOICES_MAX,
    WIRE_VERSION,
    CodecSpec,
    DataSpec,
    ElectionSpec,
    EvalSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    PeerId,
    RunManifest,
    StopSpec,
    SyncSpec,
    keys_naming_code,
)

_COUNT_MAX = 1 << 62
_SEED = {"ge": 0, "le": (1 << 63) - 1}
_SHARE = {"ge": 0.0, "le": 1.0}
_NOT_EMPTY = {"min_length": 1, "max_length": 4096}

_LIMITS: dict[type, dict[str, dict[str, Any]]] = {
    ModelSpec: {
        "factory": {"pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", "description": 'text of the form "module:function"'},
        "pretrained": _NOT_EMPTY,
        "seed": _SEED,
    },
    DataSpec: {
        "source": _NOT_EMPTY,
        "text_field": _NOT_EMPTY,
        "tokenizer": _NOT_EMPTY,
        "sequence_length": {"ge": 2, "le": 1 << 20},
        "batch_size": {"ge": 1, "le": 1 << 16},
        "num_shares": {"ge": 1, "le": 100_000},
        "heldout_share": {"gt": 0.0, "le": 0.5},
        "seed": _SEED,
    },
    InnerSpec: {
        "learning_rate": {"gt": 0.0, "le": 10.0},
        "betas": {"strict": False, "description": "two numbers, each at least 0 and below 1"},
        "weight_decay": {"ge": 0.0, "le": 10.0},
        "gradient_clip": {"ge": 0.0, "le": 1e6},
        "warmup_steps": {"ge": 0, "le": 10_000_000},
        "final_share": _SHARE,
    },
    SyncSpec: {
        "interval_steps": {"ge": 1, "le": 1_000_000},
        "num_fragments": {"ge": 1, "le": 1024},
        "overlap_steps": {"ge": 0, "le": 1_000_000},
        "quorum": {"ge": 1, "le": 1024},
        "grace_gamma": _SHARE,
        "staleness_max": {"ge": 0, "le": 10_000},
        "kappa": _SHARE,
        "carry_cap": {"gt": 0.0, "le": 1e6},
        "rounds_in_flight_max": {"ge": 1, "le": 1024},
    },
    OuterSpec: {
        "eta": {"gt": 0.0, "le": 10.0},
        "mu": {"ge": 0.0, "lt": 1.0},
        "gain_max": {"ge": 0.0, "le": 1e6},
    },
    CodecSpec: {"block": {"ge": 16, "le": 4096}},
    StopSpec: {
        "tokens": {"ge": 0, "le": _COUNT_MAX},
        "minutes": {"ge": 0.0, "le": 1e7},
        "commits": {"ge": 0, "le": _COUNT_MAX},
    },
    EvalSpec: {"every_seconds": {"ge": 0.0, "le": 1e6}, "sequences": {"ge": 1, "le": 1_000_000}},
    ElectionSpec: {"lease_seconds": {"ge": 1.0, "le": 300.0}, "electors": {"ge": 1, "le": 7}},
}
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def _section(spec: type) -> type[BaseModel]:
    """The strict model of one dataclass of the manifest."""
    types = typing.get_type_hints(spec)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(spec):
        limit = _LIMITS[spec].get(field.name, {})
        if field.default_factory is not dataclasses.MISSING:
            fields[field.name] = (types[field.name], Field(default_factory=field.default_factory, **limit))
        else:
            fields[field.name] = (types[field.name], Field(default=field.default, **limit))
    return create_model(spec.__name__, __config__=_STRICT, **fields)


_SECTIONS: dict[str, type] = {
    "model": ModelSpec,
    "data": DataSpec,
    "inner": InnerSpec,
    "sync": SyncSpec,
    "outer": OuterSpec,
    "stop": StopSpec,
    "evaluation": EvalSpec,
    "election": ElectionSpec,
}
_LEGS = ("up", "up_choices", "down")
_NAME: dict[str, Any] = {
    "pattern": r"^\S[^\x00-\x1f\x7f]{0,79}$",
    "description": "one line of 1 to 80 printable characters",
}


def _whole() -> type[BaseModel]:
    """The model of a whole file: a section for each part, `[codec.up]` and `[codec.down]` for the legs."""
    codec = _section(CodecSpec)
    leg = (codec, Field(default_factory=codec))
    several: Any = tuple[codec, ...]  # type: ignore[valid-type]
    such = f'up to {CODEC_CHOICES_MAX} codecs such as {{ name = "int8", block = 64 }}: none, bf16, int8 or int4'
    choices = (several, Field(default=(), strict=False, max_length=CODEC_CHOICES_MAX, description=such))
    legs = create_model("Legs", __config__=_STRICT, up=leg, up_choices=choices, down=leg)
    fields: dict[str, Any] = {
        "name": (str, Field(default="run", **_NAME)),
        "admission": (Literal["open", "token"], "open"),
    }
    for key, spec in _SECTIONS.items():
        model = _section(spec)
        fields[key] = (model, Field(default_factory=model))
    fields["codec"] = (legs, Field(default_factory=legs))
    return create_model("Manifest", __config__=_STRICT, **fields)


_Manifest = _whole()


def load_manifest(path: Path) -> RunManifest:
    """A person's manifest, without founder and nonce (`start` writes those). Raises ManifestError."""
    return _from_values(read_toml(path, ManifestError), source=str(path), founded=False)


def manifest_from_toml(text: str, *, source: str = "manifest") -> RunManifest:
    """Like `load_manifest`, from text; `source` names it in errors."""
    return _from_values(parse_toml(text, source, ManifestError), source=source, founded=False)


def manifest_from_bytes(canonical: bytes) -> RunManifest:
    """The manifest of a founded run, from another peer or from disk, checked like a person's.

    It must be in its canonical form: what is hashed must be what is understood. Raises ManifestError.
    """
    source = "the run's manifest"
    if len(canonical) > FILE_BYTES_MAX:
        raise ManifestError(f"{source}: {len(canonical)} bytes; allowed are {FILE_BYTES_MAX}")
    try:
        values = json.loads(canonical)
    except (ValueError, RecursionError) as exc:
        raise ManifestError(f"{source}: not JSON ({type(exc).__name__}); fetch it again, or from another peer") from exc
    if not isinstance(values, dict):
        raise ManifestError(f"{source}: a {type(values).__name__}; wanted an object")
    version = values.pop("wire_version", None)
    if version != WIRE_VERSION or isinstance(version, bool):
        raise ManifestError(
            f"{source}: wire_version = {shown(version)}; this software speaks {WIRE_VERSION}: "
            "install the release of geo_diloco that the founder runs"
        )
    identity = {key: values.pop(key, None) for key in ("founder", "nonce")}
    for key, num_digits in (("founder", 64), ("nonce", 32)):
        value = identity[key]
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{num_digits}}}", value):
            raise ManifestError(f"{source}: {key} = {shown(value)}; allowed are {num_digits} hexadecimal digits")
    legs = {leg: values.pop(f"codec_{leg}") for leg in _LEGS if f"codec_{leg}" in values}
    manifest = _from_values(values | {"codec": legs}, source=source, founded=True)
    manifest = dataclasses.replace(manifest, founder=PeerId(str(identity["founder"])), nonce=str(identity["nonce"]))
    if manifest.canonical_bytes() != canonical:
        raise ManifestError(f"{source}: not in canonical form; fetch it again, or from another peer")
    return manifest


def changed_manifest(base: RunManifest, changes: Mapping[str, Any], *, source: str) -> RunManifest:
    """A manifest with other values, by section and key as a file has them (`codec_up` for `[codec.up]`), checked as if
    they had been written there. `source` names them in errors. Raises ManifestError."""
    values = dataclasses.asdict(base)
    for section, given in changes.items():
        values[section] = values[section] | given if isinstance(given, Mapping) else given
    for key in ("founder", "nonce", "wire_version"):
        del values[key]
    legs = {leg: values.pop(f"codec_{leg}") for leg in _LEGS}
    return _from_values(values | {"codec": legs}, source=source, founded=False)


def manifest_template() -> str:
    """A commented manifest that `load_manifest` accepts: the byte-level Llama of the demo."""
    return resources.files("geo_diloco.config").joinpath("run_template.toml").read_text(encoding="utf-8")


# ---- from values to a manifest -----------------------------------------------------------------------------------


def _from_values(values: Mapping[str, Any], *, source: str, founded: bool) -> RunManifest:
    for key in ("founder", "nonce", "wire_version"):
        if key in values:
            raise ManifestError(f"{source}: {key} = {shown(values[key])}; nothing is allowed here, `start` writes it")
    try:
        parsed: Any = _Manifest.model_validate(dict(values))
    except ValidationError as exc:
        raise ManifestError(f"{source}: {sentence(exc, _Manifest)}") from exc
    except RecursionError as exc:
        raise ManifestError(f"{source}: nested too deeply; allowed are a few levels") from exc
    sections = {key: _spec_from(getattr(parsed, key), spec) for key, spec in _SECTIONS.items()}
    manifest = RunManifest(
        name=parsed.name,
        admission=parsed.admission,
        codec_up=_spec_from(parsed.codec.up, CodecSpec),
        codec_up_choices=tuple(_spec_from(each, CodecSpec) for each in parsed.codec.up_choices),
        codec_down=_spec_from(parsed.codec.down, CodecSpec),
        **sections,
    )
    for key, value, allowed in _conflicts(manifest, founded=founded):
        raise ManifestError(f"{source}: {named(key)} = {shown(value)}; allowed is {allowed}")
    return manifest


def _spec_from(parsed: BaseModel, spec: type) -> Any:
    return spec(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(spec)})


def _conflicts(m: RunManifest, *, founded: bool) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what is allowed) of each value that is fine alone but not beside the others."""
    if not m.name.isprintable():  # it will be in the invite, and on other people's terminals
        yield "name", m.name, "one line of 1 to 80 printable characters"
    yield from _model_conflicts(m, founded=founded)
    for i, beta in enumerate(m.inner.betas):
        if not 0 <= beta < 1:
            yield f"inner.betas[{i}]", beta, "a number that is at least 0 and below 1"
    if m.inner.schedule_by == "own" and not m.stop.tokens:
        yield "inner.schedule_by", m.inner.schedule_by, '"own" only with a token budget: set stop.tokens'
    sync = m.sync
    if sync.overlap_steps >= sync.interval_steps:
        yield "sync.overlap_steps", sync.overlap_steps, f"less than sync.interval_steps ({sync.interval_steps})"
    if sync.lockstep and sync.num_fragments > sync.interval_steps:
        wanted = f"at most sync.interval_steps ({sync.interval_steps}) in lockstep: one fragment a step"
        yield "sync.num_fragments", sync.num_fragments, wanted
    if 0 < m.outer.gain_max < 1:
        yield "outer.gain_max", m.outer.gain_max, "0 (no limit), or a number of at least 1: no step is less than itself"
    if m.election.electors % 2 == 0:
        yield "election.electors", m.election.electors, "1, 3, 5 or 7: an even number bears no more than one less"
    if m.codec_up_choices and sync.lockstep:
        yield (
            "codec.up_choices",
            [c.name for c in m.codec_up_choices],
            "nothing in lockstep: measured rates would decide",
        )
    legs = [("up", m.codec_up), *((f"up_choices[{i}]", each) for i, each in enumerate(m.codec_up_choices))]
    for leg, codec in (*legs, ("down", m.codec_down)):
        if codec.block & (codec.block - 1):
            yield f"codec.{leg}.block", codec.block, "a power of two from 16 to 4096"


def _model_conflicts(m: RunManifest, *, founded: bool) -> Iterator[tuple[str, Any, str]]:
    model = m.model
    given = [key for key in ("config", "factory", "pretrained") if getattr(model, key) is not None]
    # `start` keeps the config of a pretrained model beside it, for peers that don't have its folder.
    if len(given) != 1 and not (founded and given == ["config", "pretrained"]):
        yield "model", given, 'exactly one of "config", "factory", "pretrained"'
    if model.factory_arguments and model.factory is None:
        yield "model.factory_arguments", dict(model.factory_arguments), "nothing without model.factory"
    for key in ("config", "factory_arguments"):
        for odd, value in _not_plain(getattr(model, key), f"model.{key}"):
            yield odd, value, "text, finite numbers, true, false, lists and tables, not nested deeper than 16"
            return
    config = model.config
    if config is None:
        return
    if not isinstance(config.get("model_type"), str):
        yield "model.config.model_type", config.get("model_type"), 'the name of an architecture, such as "llama"'
    for key in keys_naming_code(config):
        value = functools.reduce(lambda inner, part: inner[part], key.split("."), config)
        yield f"model.config.{key}", value, "nothing: code that comes with a model is never run or fetched"
    vocabulary, positions = config.get("vocab_size"), config.get("max_position_embeddings")
    if m.data.tokenizer == "bytes" and isinstance(vocabulary, int) and vocabulary < 256:
        yield "model.config.vocab_size", vocabulary, 'at least 256 with data.tokenizer = "bytes"'
    if isinstance(positions, int) and positions < m.data.sequence_length:
        wanted = f"at most model.config.max_position_embeddings ({positions})"
        yield "data.sequence_length", m.data.sequence_length, wanted


def _not_plain(value: Any, key: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of whatever JSON can't carry unchanged (TOML's dates, for one)."""
    if depth > 16:
        yield key, "..."
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _not_plain(item, f"{key}.{name}", depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _not_plain(item, f"{key}[{i}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield key, value
    elif value is not None and not isinstance(value, str | int):
        yield key, value
