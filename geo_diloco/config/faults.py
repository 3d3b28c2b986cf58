"""A fault plan: what befalls the learners of a simulated run, as data that a person or `simulate goodput` writes.

    repeat_s = 120.0       # the plan begins anew after so long; without it, it ends
    slices = 586           # chips of each learner that fail together, if "slice" faults are in the plan
    downscale_s = 0.56     # a group that trains in step stands still so long to go on without one that fails,
    upscale_s = 0.56       # and so long to take it back

    [[fault]]
    learner = 4            # counted from 1
    kind = "crash"         # or "freeze", "cut", "slice"
    from_s = 20.0
    until_s = 40.0         # without it, for good

A *crash* ends the process; a new one resumes from the last checkpoint. A *freeze* stops it and lets it go on (a
suspended laptop, a busy machine). A *cut* takes its link away while it trains on. A *slice* is a small part of a
learner that is itself a group of chips: it takes the slice out and back in, and stands still for both
(`sim/outages.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geo_diloco.config.mistakes import named, read_toml, sentence
from geo_diloco.errors import ConfigError

FaultKind = Literal["crash", "freeze", "cut", "slice"]

RESHAPE_S = 0.56
"""14 s of the chips (`sim/goodput/model.py`), 25 of whose seconds are one of the run's, as `simulate goodput`
scales."""
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Fault(BaseModel):
    """Something that befalls one learner for a while."""

    model_config = _STRICT

    learner: int = Field(ge=1)
    """Counted from 1."""
    kind: FaultKind
    slice: int | None = Field(default=None, ge=1, le=10**6)
    """Which one of the learner's, counted from 1; only of kind "slice"."""
    from_s: float = Field(ge=0.0, le=1e7)
    until_s: float | None = Field(
        default=None, le=2e7, description="a number above from_s and up to 20000000, in seconds, or nothing: for good"
    )

    @property
    def from_ms(self) -> int:
        return round(self.from_s * 1000)

    @property
    def until_ms(self) -> int | None:
        return None if self.until_s is None else round(self.until_s * 1000)


class _Head(BaseModel):
    """What a plan says of all its faults."""

    model_config = _STRICT

    slices: int = Field(default=0, ge=0, le=10**6)
    downscale_s: float = Field(default=RESHAPE_S, ge=0.0, le=1e7)
    upscale_s: float = Field(default=RESHAPE_S, ge=0.0, le=1e7)
    repeat_s: float | None = Field(default=None, ge=0.001, le=1e7, description="a number from 0.001, or nothing: once")


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """All faults, in the order of the file."""

    faults: tuple[Fault, ...] = ()
    slices: int = 0
    """Of each learner; 0 where no slices fail."""
    downscale_s: float = RESHAPE_S
    upscale_s: float = RESHAPE_S
    repeat_s: float | None = None

    @property
    def of_learners(self) -> tuple[Fault, ...]:
        """Without those of slices."""
        return tuple(fault for fault in self.faults if fault.kind != "slice")

    @property
    def of_slices(self) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.kind == "slice")


def load_fault_plan(path: Path, *, num_learners: int) -> FaultPlan:
    """Raises ConfigError."""
    values = read_toml(path, ConfigError)
    tables = values.pop("fault", None)
    for key in values:
        if key not in _Head.model_fields:
            raise ConfigError(
                f"{path}: {named(key)} is no known key; a fault plan is a list of [[fault]] tables, "
                f"with {', '.join(_Head.model_fields)} before them if need be"
            )
    try:
        head = _Head.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(f"{path}: {sentence(exc, _Head)}") from exc
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: no faults; write each as a [[fault]] table with learner, kind, from_s, until_s")
    faults = tuple(_fault(table, f"{path}: fault {i}", num_learners, head) for i, table in enumerate(tables, 1))
    return FaultPlan(faults=faults, **head.model_dump())


def _fault(table: object, where: str, num_learners: int, head: _Head) -> Fault:
    try:
        fault = Fault.model_validate(table)
    except ValidationError as exc:
        raise ConfigError(f"{where}: {sentence(exc, Fault)}") from exc
    if fault.learner > num_learners:
        raise ConfigError(f"{where}: learner = {fault.learner}; allowed is a whole number from 1 to {num_learners}")
    if fault.until_s is not None and fault.until_s <= fault.from_s:
        raise ConfigError(f"{where}: until_s = {fault.until_s:g}; allowed is a number above from_s ({fault.from_s:g})")
    if (fault.slice is not None) != (fault.kind == "slice"):
        raise ConfigError(f'{where}: kind = "{fault.kind}"; slice = NUMBER goes with kind = "slice" and only with it')
    if fault.slice is not None and fault.slice > head.slices:
        raise ConfigError(f"{where}: slice = {fault.slice}; allowed is a whole number from 1 to slices = {head.slices}")
    if head.repeat_s is not None and fault.from_s >= head.repeat_s:
        raise ConfigError(f"{where}: from_s = {fault.from_s:g}; allowed is less than repeat_s = {head.repeat_s:g}")
    return fault


def fault_plan_text(plan: FaultPlan, comment: Iterable[str]) -> str:
    """The file that `load_fault_plan` reads the same plan from; `comment` line by line at its head."""
    lines = [f"# {line}" for line in comment]
    lines += [f"slices = {plan.slices}", f"downscale_s = {plan.downscale_s!r}", f"upscale_s = {plan.upscale_s!r}"]
    if plan.repeat_s is not None:
        lines.append(f"repeat_s = {plan.repeat_s!r}")
    for fault in plan.faults:
        lines += ["", "[[fault]]", f"learner = {fault.learner}", f'kind = "{fault.kind}"']
        written = {"slice": fault.slice, "from_s": fault.from_s, "until_s": fault.until_s}
        lines += [f"{key} = {value!r}" for key, value in written.items() if value is not None]
    return "\n".join(lines) + "\n"
