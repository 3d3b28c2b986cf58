"""Events and effects as plain JSON, and back: a parser of our own, typed by the dataclasses themselves.

The same text gives the same objects, or TapeError that names the place. It is used for what this machine wrote for
itself (tapes, a checkpoint's books); what comes from peers is read by `runtime/wire.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from geo_diloco.errors import TapeError
from geo_diloco.protocol import effects as effect_types
from geo_diloco.protocol import events as event_types
from geo_diloco.protocol.effects import Effect, Send
from geo_diloco.protocol.events import Event


def effects_hash(effects: Sequence[Effect]) -> str:
    """16 hex characters over the effects' canonical text, in order."""
    said: dict[int, Any] = {}
    text = json.dumps([_effect_json(effect, said) for effect in effects], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


def _effect_json(effect: Effect, said: dict[int, Any]) -> dict[str, Any]:
    """As `to_json`. What is said to a thousand peers is one message, and is gone through once: `said`, by its id."""
    if not isinstance(effect, Send):
        return to_json(effect)
    message = said.get(id(effect.message))
    if message is None:
        message = said[id(effect.message)] = plain(effect.message)
    names = _field_names(Send)
    return {"type": "Send", **{name: getattr(effect, name) for name in names if name != "message"}, "message": message}


def to_json(thing: Event | Effect) -> dict[str, Any]:
    """An event or effect as plain JSON, `type` being its class."""
    return {"type": type(thing).__name__, **plain(thing)}


def plain(thing: Any) -> Any:
    """A dataclass as JSON, without its class."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {name: plain(getattr(thing, name)) for name in _field_names(type(thing))}
    if isinstance(thing, (tuple, list)):
        return [plain(item) for item in thing]
    return thing


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(kind))


def from_json(record: dict[str, Any], *, where: str = "record") -> Event | Effect:
    """The event or effect that `to_json` wrote. Raises TapeError for anything else."""
    fields = dict(record)
    name = fields.pop("type", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise TapeError(f"{where}: unknown type {name!r}")
    return cast("Event | Effect", build(kind, fields, where))


def build(kind: type, fields: object, where: str) -> Any:
    """A dataclass from its fields, checked by its type hints. Raises TapeError."""
    if not isinstance(fields, dict):
        raise TapeError(f"{where}: {kind.__name__} must be an object, not {fields!r}")
    wanted = _readers(kind)
    if fields.keys() != wanted.keys():
        odd = sorted(fields.keys() ^ wanted.keys())
        raise TapeError(f"{where}: {kind.__name__} has other fields than expected: {', '.join(odd)}")
    return kind(**{name: read(fields[name], f"{where}: {kind.__name__}.{name}") for name, read in wanted.items()})


Reader = Callable[[Any, str], Any]

_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (*typing.get_args(event_types.Event), *typing.get_args(effect_types.Effect))
}


@functools.cache
def _readers(kind: type) -> dict[str, Reader]:
    hints = typing.get_type_hints(kind)
    return {name: _reader(hints[name]) for name in _field_names(kind)}


def _reader(hint: Any) -> Reader:
    """A function that checks a JSON value against a type hint and gives the value the dataclass holds."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    origin = typing.get_origin(hint)
    if origin is Literal:
        allowed = typing.get_args(hint)
        return lambda value, where: value if value in allowed else _wrong(value, f"one of {allowed}", where)
    if origin is tuple:
        return _tuple_reader(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return _union_reader(typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return _named_tuple_reader(hint)
    if dataclasses.is_dataclass(hint):
        return lambda value, where: build(cast(type, hint), value, where)
    if hint is float:
        return lambda value, where: value if type(value) in (float, int) else _wrong(value, "a number", where)
    if hint in (int, str, bool):
        return lambda value, where: value if type(value) is hint else _wrong(value, hint.__name__, where)
    raise TapeError(f"a tape can't hold {hint!r}")


def _tuple_reader(arguments: tuple[Any, ...]) -> Reader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        read = _reader(arguments[0])
        return lambda value, where: (
            tuple(read(item, where) for item in value) if isinstance(value, list) else _wrong(value, "a list", where)
        )
    reads = [_reader(argument) for argument in arguments]

    def read_fixed(value: Any, where: str) -> Any:
        if not isinstance(value, list) or len(value) != len(reads):
            return _wrong(value, f"a list of {len(reads)}", where)
        return tuple(read(item, where) for read, item in zip(reads, value, strict=True))

    return read_fixed


def _named_tuple_reader(kind: Any) -> Reader:
    hints = typing.get_type_hints(kind)
    read = _tuple_reader(tuple(hints[name] for name in kind._fields))
    return lambda value, where: kind(*read(value, where))


def _union_reader(arguments: tuple[Any, ...]) -> Reader:
    """None, plain values, or dataclasses told apart by their `kind`."""
    kinds = [argument for argument in arguments if dataclasses.is_dataclass(argument)]
    by_kind = {each.default: kind for kind in kinds for each in dataclasses.fields(kind) if each.name == "kind"}
    plain = [_reader(argument) for argument in arguments if argument is not type(None) and argument not in kinds]
    optional = type(None) in arguments

    def read(value: Any, where: str) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, dict) and kinds:
            kind = kinds[0] if len(kinds) == 1 else by_kind.get(value.get("kind"))
            if kind is None:
                return _wrong(value.get("kind"), "a known kind", where)
            return build(cast(type, kind), value, where)
        for each in plain:
            try:
                return each(value, where)
            except TapeError:
                continue
        return _wrong(value, "another type", where)

    return read


def _wrong(value: Any, wanted: str, where: str) -> Any:
    raise TapeError(f"{where}: {value!r}, wanted {wanted}")
