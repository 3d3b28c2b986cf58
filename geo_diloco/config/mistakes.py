"""A mistake in what a person wrote, said in one line: the key, the value, what is allowed, what was probably meant.

Stands apart because both kinds of file are read this way, and because pydantic's own messages are several lines long
and speak of its types. What is allowed is read off the model's fields, so it can't disagree with the check.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import annotated_types as limits
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from geo_diloco.errors import ConfigError, ManifestError

FILE_BYTES_MAX = 1 << 20


class _Mistake(NamedTuple):
    key: str
    value: Any
    allowed: str
    """Empty if there is no such key."""


def sentence(exc: ValidationError, model: type[BaseModel], *, origins: Mapping[str, str] | None = None) -> str:
    """The first mistake in one line. `origins` says how a person wrote a key (as a flag, say)."""
    known = dict(_keys(model))
    mistake = _first_mistake(exc, known)
    key = (origins or {}).get(mistake.key, mistake.key)
    is_section = isinstance(mistake.value, dict)
    said = f"[{key}]" if is_section else f"{key} = {shown(mistake.value)}"
    if mistake.allowed:
        return f"{said}; allowed is {mistake.allowed}"
    near = nearest(mistake.key, known)
    kind = "section" if is_section else "key"
    if near:
        return f"{said} is no known {kind}; did you mean {near}, {known[near]}?"
    parent = mistake.key.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    return f"{said} is no known {kind}; allowed are {', '.join(siblings)}"


def _first_mistake(exc: ValidationError, known: Mapping[str, str]) -> _Mistake:
    """An unknown key before a bad value, which may be its consequence."""
    errors = exc.errors(include_url=False)
    error = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    location = [named(str(part)) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return _Mistake(".".join(location), error["input"], "")
    inside: list[str] = []
    while location and ".".join(location) not in known:
        inside.insert(0, location.pop())
    key = ".".join(location)
    item = "" if error["type"] == "missing" else "".join(f"[{part}]" for part in inside if part.isdigit())
    return _Mistake(key + item, error["input"], known.get(key, "something else"))


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key, sections too, with what is allowed there."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield prefix + name, f"a section with {', '.join(inner.model_fields)}"
            yield from _keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, _allowed(field)


def nearest(key: str, known: Mapping[str, Any]) -> str:
    """The known key that was probably meant, or an empty string: a slip of the pen, or the right key elsewhere."""
    close: list[str] = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if close:
        return close[0]
    last = key.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    return elsewhere[0] if elsewhere else ""


def _allowed(field: FieldInfo) -> str:
    if field.description:
        return str(field.description)
    kind = field.annotation
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(shown(choice) for choice in typing.get_args(kind))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range_words(field)
    if kind in (str, str | None):
        return "text that is not empty"
    return "a path" if "Path" in str(kind) else "a table"


def _range_words(field: FieldInfo) -> str:
    low, high = "", ""
    for limit in field.metadata:
        match limit:
            case limits.Ge(ge=bound):
                low = f" from {bound}"
            case limits.Gt(gt=bound):
                low = f" above {bound}"
            case limits.Le(le=bound):
                high = f" to {bound}" if low.startswith(" from") else f" up to {bound}"
            case limits.Lt(lt=bound):
                high = f" to below {bound}"
    return low + high


def named(key: str) -> str:
    """A key on one line and not too long; a quoted one in TOML may hold anything."""
    text = "".join(c if c.isprintable() else "?" for c in key)
    return text if len(text) <= 120 else text[:117] + "..."


def shown(value: Any) -> str:
    """A value as a person would write it, on one line and not too long."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=str)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def read_toml(path: Path, error: type[ManifestError] | type[ConfigError], *, example: str = "") -> dict[str, Any]:
    """`example`: a file to begin with, for who has none."""
    try:
        with Path(os.path.expanduser(path)).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        hint = "; `geo-diloco init` writes one" if error is ManifestError else f"; {example}" if example else ""
        hint = hint if isinstance(exc, FileNotFoundError) else ""
        raise error(f"{path}: {exc.strerror or exc}{hint}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise error(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    try:
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as exc:
        raise error(f"{path}: not UTF-8 text (byte {exc.start})") from exc
    return parse_toml(text, str(path), error)


def parse_toml(text: str, source: str, error: type[ManifestError] | type[ConfigError]) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # a number of thousands of digits is a plain ValueError
        reason = " ".join(str(exc).partition("; use sys.")[0].split()) or type(exc).__name__
        raise error(f"{source}: not TOML: {reason}") from exc
