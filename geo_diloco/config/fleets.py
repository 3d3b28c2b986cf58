"""A fleet as a person writes it: what trains, on which rules, on which machines, and which volunteers might come.

[model]
parameters = 1e9           # all that travels
tokens_per_step = 8192     # of one learner's inner step

[sync]                     # each key has the manifest's default
interval_steps = 24
fragments = 24
quorum = 1
codec = "int4"

[[machine]]                # in the run today
name = "desk"
step_s = 1.5               # one inner step
up_mbit = 40.0
down_mbit = 200.0
rtt_ms = 40.0              # to the syncer and back
fails_every_hours = 500.0  # while it is on, on average
back_after_minutes = 10.0  # from a failure until it starts again
on_from = 0.0              # hours of the day between which it is on; equal: all day
on_until = 0.0
count = 1

[[volunteer]]              # the same keys: what if these came, too?
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from geo_diloco.config.mistakes import named, read_toml, sentence, shown
from geo_diloco.errors import ConfigError

MACHINES_MAX = 1000
"""Of all tables together, each counted `count` times."""

Section = TypeVar("Section", bound=BaseModel)
_FORM = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)
"""Strict: `step_s = true` is no second."""


class FleetModel(BaseModel):
    model_config = _FORM

    parameters: float = Field(ge=1, le=1e15)
    tokens_per_step: int = Field(ge=1, le=10**9)


class FleetSync(BaseModel):
    model_config = _FORM

    interval_steps: int = Field(default=24, ge=1, le=100_000)
    fragments: int = Field(default=24, ge=1, le=10_000)
    quorum: int = Field(default=1, ge=1, le=MACHINES_MAX)
    codec: Literal["none", "bf16", "int8", "int4"] = "int4"


def _on_one_line(name: str) -> str:
    """It is printed as it is."""
    if not name.isprintable():
        raise ValueError("has characters that do more than to stand there")
    return name


class FleetMachine(BaseModel):
    model_config = _FORM

    name: Annotated[str, AfterValidator(_on_one_line)] = Field(
        min_length=1, max_length=60, description="text of 1 to 60 characters, on one line"
    )
    step_s: float = Field(ge=1e-3, le=1e5)
    up_mbit: float = Field(ge=1e-3, le=1e7)
    down_mbit: float = Field(ge=1e-3, le=1e7)
    rtt_ms: float = Field(default=40.0, ge=0.0, le=10_000.0)
    fails_every_hours: float = Field(default=1000.0, ge=0.05, le=1e6)
    back_after_minutes: float = Field(default=10.0, ge=0.0, le=1e6)
    on_from: float = Field(default=0.0, ge=0.0, lt=24.0)
    on_until: float = Field(default=0.0, ge=0.0, lt=24.0)
    count: int = Field(default=1, ge=1, le=MACHINES_MAX)


class FleetFile(BaseModel):
    """A whole file, checked."""

    model_config = _FORM

    model: FleetModel
    sync: FleetSync = FleetSync()
    machines: tuple[FleetMachine, ...]
    volunteers: tuple[FleetMachine, ...] = ()


def load_fleet(path: Path) -> FleetFile:
    """Raises ConfigError."""
    values = read_toml(path, ConfigError, example="examples/fleet.toml in the sources is one to begin with")
    model = _section(path, values.pop("model", {}), "model", FleetModel)
    sync = _section(path, values.pop("sync", {}), "sync", FleetSync)
    machines = _tables(path, values.pop("machine", []), "machine")
    volunteers = _tables(path, values.pop("volunteer", []), "volunteer")
    for key in values:
        raise ConfigError(
            f"{path}: {named(key)} is no known key; allowed are [model], [sync], [[machine]] and [[volunteer]]"
        )
    if not machines:
        raise ConfigError(
            f"{path}: no machines; write each as a [[machine]] table with name, step_s, up_mbit, down_mbit"
        )
    number = sum(each.count for each in (*machines, *volunteers))
    if number > MACHINES_MAX:
        raise ConfigError(f"{path}: {number} machines; allowed are {MACHINES_MAX} together")
    if sync.quorum > sum(each.count for each in machines):
        raise ConfigError(f"{path}: quorum = {sync.quorum}: more than there are machines; no round would ever close")
    return FleetFile(model=model, sync=sync, machines=machines, volunteers=volunteers)


def _section(path: Path, value: Any, name: str, kind: type[Section]) -> Section:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {name} = {shown(value)}; wanted is a table with {', '.join(kind.model_fields)}")
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        if all(error["type"] == "missing" for error in errors):
            needed = ", ".join(str(error["loc"][0]) for error in errors)
            raise ConfigError(f"{path}: {name} has no {needed}; write it into the table") from exc
        raise ConfigError(f"{path}: {name}: {sentence(exc, kind)}") from exc


def _tables(path: Path, value: Any, name: str) -> tuple[FleetMachine, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{path}: {name} is no list; write each as a [[{name}]] table")
    return tuple(_section(path, table, f"{name} {i}", FleetMachine) for i, table in enumerate(value, 1))
