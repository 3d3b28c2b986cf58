"""A fault plan: what befalls the learners of a simulated run, as data that a person writes.

    [[fault]]
    learner = 4            # counted from 1
    kind = "crash"         # or "freeze", "cut"
    from_s = 20.0
    until_s = 40.0         # without it, for good

A *crash* ends the process; a new one resumes from the last checkpoint. A *freeze* stops it and lets it go on (a
suspended laptop, a busy machine). A *cut* takes its link away while it trains on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geo_diloco.config.mistakes import named, read_toml, sentence
from geo_diloco.errors import ConfigError

FaultKind = Literal["crash", "freeze", "cut"]


class Fault(BaseModel):
    """Something that befalls one learner for a while."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    learner: int = Field(ge=1)
    """Counted from 1."""
    kind: FaultKind
    from_s: float = Field(ge=0.0, le=1e7)
    until_s: float | None = Field(default=None, description="a number above from_s, in seconds, or nothing: for good")

    @property
    def from_ms(self) -> int:
        return round(self.from_s * 1000)

    @property
    def until_ms(self) -> int | None:
        return None if self.until_s is None else round(self.until_s * 1000)


def load_fault_plan(path: Path, *, num_learners: int) -> tuple[Fault, ...]:
    """Faults in the order of the file. Raises ConfigError."""
    values = read_toml(path, ConfigError)
    tables = values.pop("fault", None)
    for key in values:
        raise ConfigError(f"{path}: {named(key)} is no known key; a fault plan is a list of [[fault]] tables")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: no faults; write each as a [[fault]] table with learner, kind, from_s, until_s")
    return tuple(_fault(table, f"{path}: fault {i}", num_learners) for i, table in enumerate(tables, 1))


def _fault(table: object, where: str, num_learners: int) -> Fault:
    try:
        fault = Fault.model_validate(table)
    except ValidationError as exc:
        raise ConfigError(f"{where}: {sentence(exc, Fault)}") from exc
    if fault.learner > num_learners:
        raise ConfigError(f"{where}: learner = {fault.learner}; allowed is a whole number from 1 to {num_learners}")
    if fault.until_s is not None and fault.until_s <= fault.from_s:
        raise ConfigError(f"{where}: until_s = {fault.until_s:g}; allowed is a number above from_s ({fault.from_s:g})")
    return fault
