"""What is compared: an arm is a way to train, named in one word and a few settings, as a person types it.

    decoupled:quorum=1,kappa=0,codec_up=int8        diloco:H=48        data-parallel:learning_rate=3e-3

Keys are the manifest's, or the paper's letters for them; whatever is not said is as in the demo. Every arm becomes a
run manifest, and is checked as one, so an arm can't ask for what a run could not. `links` alone is not of the manifest:
the rates of everybody's link, up and down, times that number.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from geo_diloco.config import changed_manifest
from geo_diloco.config.mistakes import nearest, shown
from geo_diloco.errors import ConfigError, ManifestError
from geo_diloco.manifest import EvalSpec, RunManifest, StopSpec
from geo_diloco.training.digits import digits_missing
from geo_diloco.training.presets import ModelName, preset_manifest

ArmKind = Literal["decoupled", "diloco", "data-parallel", "elastic-data-parallel"]
DEFAULT_ARMS = ("decoupled", "diloco", "data-parallel")

_INNER = {key: ("inner", key) for key in ("learning_rate", "schedule", "schedule_by", "warmup_steps", "final_share")}
_INNER["sequences"] = ("evaluation", "sequences")
_OUTER = {"eta": ("outer", "eta"), "mu": ("outer", "mu"), "interval_steps": ("sync", "interval_steps")}
_SYNC_KEYS = (
    "num_fragments",
    "overlap_steps",
    "quorum",
    "grace",
    "grace_gamma",
    "staleness_max",
    "kappa",
    "carry_cap",
    "late_form",
    "merge",
    "merge_embeddings",
    "token_weights",
    "weigh_absent",
    "rounds_in_flight_max",
)
_LEGS = {
    "codec_up": ("codec_up", "name"),
    "codec_down": ("codec_down", "name"),
    "block_up": ("codec_up", "block"),
    "block_down": ("codec_down", "block"),
}
_GUARD = {"gain_max": ("outer", "gain_max")}
_KEYS: dict[ArmKind, dict[str, tuple[str, str]]] = {
    "data-parallel": _INNER,
    "elastic-data-parallel": _INNER,
    "diloco": _INNER | _OUTER,
    "decoupled": _INNER | _OUTER | _GUARD | {key: ("sync", key) for key in _SYNC_KEYS} | _LEGS,
}
"""Per kind of arm: what may be set, and where it stands in the manifest."""
_LINKS = "links"
_LINKS_RANGE = (1e-6, 1e6)
_LETTERS = {
    "H": "interval_steps",
    "K": "quorum",
    "cap": "carry_cap",
    "P": "num_fragments",
    "S_max": "staleness_max",
    "gamma": "grace_gamma",
    "lr": "learning_rate",
    "tau": "overlap_steps",
}
_OWN = "arm"
"""Section of what is no manifest's: whether the fault plan is for this arm, too."""
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train. `text` is what a person typed."""

    text: str
    kind: ArmKind
    manifest: RunManifest
    links: float = 1.0
    """What the fleet's rates are multiplied by."""
    under_faults: bool = True
    """The fault plan is for this arm, too."""

    def seeded(self, seed: int) -> RunManifest:
        """Theta_0, the order of the data and which documents are held out, all from the seed."""
        model, data = replace(self.manifest.model, seed=seed), replace(self.manifest.data, seed=seed)
        return replace(self.manifest, model=model, data=data)


def base_manifest(
    *, num_learners: int, tokens: int, lockstep: bool, model: ModelName = "dense", seconds: float | None = None
) -> RunManifest:
    """The demo's with that model, a budget of tokens (rounded to whole inner steps of all learners), a share for each.

    `seconds`: a budget of virtual time instead. Raises ConfigError if this machine lacks what the model trains on.
    """
    if model == "vit" and (missing := digits_missing()):
        raise ConfigError(f"--model vit: {missing}")
    preset = preset_manifest(model)
    together = preset.rules().tokens_per_step * num_learners
    stop = StopSpec(tokens=max(1, round(tokens / together)) * together)
    sync = replace(preset.sync, lockstep=lockstep, quorum=num_learners if lockstep else preset.sync.quorum)
    return replace(
        preset,
        name="simulated",
        sync=sync,
        data=replace(preset.data, num_shares=max(preset.data.num_shares, num_learners)),
        stop=stop if seconds is None else StopSpec(minutes=seconds / 60),
        evaluation=EvalSpec(every_seconds=0.0, sequences=preset.evaluation.sequences),
    )


def arms_from(texts: Sequence[str], base: RunManifest, *, num_learners: int) -> tuple[Arm, ...]:
    """Raises ConfigError, naming the arm and what is allowed."""
    for text in texts:
        if texts.count(text) > 1:
            raise ConfigError(f"--arm {text}: given {texts.count(text)} times; give it once, with several seeds")
    return tuple(_arm(text, base, num_learners) for text in texts)


def _arm(text: str, base: RunManifest, num_learners: int) -> Arm:
    name, _, settings = text.partition(":")
    kinds: dict[str, ArmKind] = {kind: kind for kind in get_args(ArmKind)}
    if name not in kinds:
        near = nearest(name, kinds)
        hint = f"did you mean {near}?" if near else f"allowed are {', '.join(kinds)}"
        raise ConfigError(f"--arm {text}: {shown(name)} is no known arm; {hint}")
    kind = kinds[name]
    changes: dict[str, dict[str, Any]] = {}
    for setting in settings.split(",") if settings else []:
        section, key, value = _setting(setting, text, kind)
        if key in changes.setdefault(section, {}):
            raise ConfigError(f"--arm {text}: {key} is given twice; give it once")
        changes[section][key] = value
    own = changes.pop(_OWN, {})
    links, under_faults = _links(own, text), own.get("faults", True)
    if not isinstance(under_faults, bool):
        raise ConfigError(f"--arm {text}: faults = {shown(under_faults)}; allowed is on or off")
    try:
        manifest = changed_manifest(base, changes, source=f"--arm {text}")
    except ManifestError as exc:
        raise ConfigError(str(exc)) from exc
    _check_quorum(manifest, text, num_learners)
    return Arm(text=text, kind=kind, manifest=manifest, links=links, under_faults=under_faults)


def _links(given: dict[str, Any], text: str) -> float:
    links = given.get(_LINKS, 1.0)
    low, high = _LINKS_RANGE
    if not isinstance(links, int | float) or isinstance(links, bool) or not low <= links <= high:
        raise ConfigError(f"--arm {text}: links = {shown(links)}; allowed is a number from {low:g} to {high:g}")
    return float(links)


def _setting(setting: str, text: str, kind: ArmKind) -> tuple[str, str, Any]:
    """(section, key, value) of `key=value`."""
    written, equals, value = setting.partition("=")
    known = _KEYS[kind] | {key: (_OWN, key) for key in (_LINKS, "faults")}
    key = _LETTERS.get(written, written)
    if not equals:
        raise ConfigError(f"--arm {text}: {shown(setting)} is no setting; write key=value, several with commas")
    if key not in known:
        near = nearest(written, known)
        hint = f"did you mean {near}?" if near else f"allowed are {', '.join(sorted(known))}"
        raise ConfigError(f"--arm {text}: {shown(written)} is no known key of {kind}; {hint}")
    section, name = known[key]
    return section, name, _value(value)


def _value(text: str) -> Any:
    """As TOML has it, where it is TOML; `on` and `off` are true and false, and a bare word is text."""
    if text in _SWITCH:
        return _SWITCH[text]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _check_quorum(manifest: RunManifest, text: str, num_learners: int) -> None:
    quorum = manifest.sync.quorum
    if quorum > num_learners:
        raise ConfigError(
            f"--arm {text}: quorum = {quorum}; allowed is a whole number from 1 to {num_learners}, all learners"
        )
    if manifest.sync.lockstep and quorum != num_learners:
        raise ConfigError(
            f"--arm {text}: quorum = {quorum}; allowed is {num_learners} in lockstep, where a learner that a round "
            "closed without would wait for ever"
        )
