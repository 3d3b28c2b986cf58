"""Which parameter lies where: the layout of a model's fragments, and flat vectors in that layout.

Whole tensors are packed into P fragments by greedy LPT (largest first into the lightest bin; the largest fragment is
at most 4/3 - 1/(3P) of the optimum). Two peers whose layouts differ by a single name, shape or offset would add
unlike numbers and notice nothing, so the layout is hashed, the hash is part of the run, and a difference is refused
by the name of its first tensor. Here also are the only two byte forms of a fragment: its vector as little-endian
float32, and the digest of those bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from geo_diloco.errors import BlobError, LayoutError, ModelError
from geo_diloco.manifest import Digest

BYTES_PER_ELEMENT = 4
"""Fragments are float32, whatever the model's own dtype."""

_COMPILED_PREFIX = "_orig_mod."
"""What torch.compile puts before a parameter's name; the parameter is the same one."""


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The model's own, such as `float32`; the fragment is float32 always."""
    fragment: int
    offset: int
    """Elements from the start of the fragment."""
    num_elements: int
    embedding: bool
    """Input or output embedding: merged by plain mean."""


@dataclass(frozen=True)
class Layout:
    """All trainable tensors, sorted by (fragment, offset). Validated at construction: LayoutError."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        _validate(self.tensors)

    @cached_property
    def num_fragments(self) -> int:
        return self.tensors[-1].fragment + 1

    @cached_property
    def num_elements(self) -> tuple[int, ...]:
        """Elements per fragment."""
        return tuple(sum(spec.num_elements for spec in part) for part in self._parts)

    @cached_property
    def digest(self) -> Digest:
        """BLAKE3 of the canonical JSON."""
        return Digest(blake3(self.to_json().encode()).hexdigest())

    def of(self, fragment: int) -> tuple[TensorSpec, ...]:
        """The fragment's tensors in the order of their offsets."""
        if not 0 <= fragment < self.num_fragments:
            raise LayoutError(f"fragment {fragment} does not exist: this layout has 0 to {self.num_fragments - 1}")
        return self._parts[fragment]

    def to_json(self) -> str:
        """Canonical: sorted keys, no spaces, ASCII. The digest covers these bytes."""
        rows = [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "fragment": spec.fragment,
                "offset": spec.offset,
                "embedding": spec.embedding,
            }
            for spec in self.tensors
        ]
        return json.dumps({"tensors": rows}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read `to_json`'s form; LayoutError on anything else. The caller bounds the length of `text`."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise LayoutError(f"a layout that is not JSON: {exc}") from exc
        if not isinstance(document, dict) or set(document) != {"tensors"} or not isinstance(document["tensors"], list):
            raise LayoutError("a layout is an object with one key, `tensors`, that holds a list")
        return cls(tuple(_spec_from_row(row) for row in document["tensors"]))

    def first_difference(self, other: Layout) -> str | None:
        """What differs first, named for people: `self` is "here", `other` is "there". None if the layouts are equal."""
        if self.tensors == other.tensors:
            return None
        here = {spec.name: spec for spec in self.tensors}
        there = {spec.name: spec for spec in other.tensors}
        for name in sorted(here.keys() | there.keys()):
            if name not in there:
                return f"tensor {name!r} is here but not there"
            if name not in here:
                return f"tensor {name!r} is there but not here"
        for field in ("shape", "dtype", "embedding"):
            for name in sorted(here):
                mine, theirs = getattr(here[name], field), getattr(there[name], field)
                if mine != theirs:
                    return f"tensor {name!r} has {field} {mine} here and {theirs} there"
        if self.num_fragments != other.num_fragments:
            return f"{self.num_fragments} fragments here and {other.num_fragments} there"
        for name in sorted(here):
            mine, theirs = (here[name].fragment, here[name].offset), (there[name].fragment, there[name].offset)
            if mine != theirs:
                return f"tensor {name!r} lies at (fragment, offset) {mine} here and {theirs} there"
        raise AssertionError("unequal layouts without a difference")  # every field was compared above

    @cached_property
    def _parts(self) -> tuple[tuple[TensorSpec, ...], ...]:
        parts: list[list[TensorSpec]] = [[] for _ in range(self.num_fragments)]
        for spec in self.tensors:
            parts[spec.fragment].append(spec)
        return tuple(tuple(part) for part in parts)


def layout_from_module(module: nn.Module, *, num_fragments: int) -> Layout:
    """Pack the module's trainable tensors into fragments; the same on every peer with the same model.

    ModelError if there is nothing to train, a trainable tensor is not floating point, or there are more fragments
    than tensors.
    """
    tensors = named_trainable(module)
    if not tensors:
        raise ModelError("the model has no trainable parameters: at least one must have requires_grad=True")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ModelError(
                f"trainable parameter {name!r} has dtype {tensor.dtype}: only floating point can be merged"
            )
    if not 1 <= num_fragments <= len(tensors):
        raise ModelError(
            f"num_fragments is {num_fragments}: this model has {len(tensors)} trainable tensors, which are packed "
            f"whole, so 1 to {len(tensors)} are possible"
        )
    embeddings = _embedding_keys(module)
    fragment_of = _pack({name: tensor.numel() for name, tensor in tensors.items()}, num_fragments)
    offsets = [0] * num_fragments
    specs = []
    for name, tensor in tensors.items():  # sorted by name, hence so is every fragment
        fragment = fragment_of[name]
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                fragment=fragment,
                offset=offsets[fragment],
                num_elements=tensor.numel(),
                embedding=_tie_key(tensor) in embeddings,
            )
        )
        offsets[fragment] += tensor.numel()
    return Layout(tuple(sorted(specs, key=lambda spec: (spec.fragment, spec.offset))))


def named_trainable(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name in sorted order; tied ones once, under their first name.

    ModelError if one has no values yet.
    """
    found: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    for name, parameter in sorted(_plain_names(module)):
        if nn.parameter.is_lazy(parameter) or parameter.is_meta:
            raise ModelError(f"parameter {name!r} has no values yet: it is lazy or on the meta device")
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        if found.setdefault(_tie_key(parameter), name) == name:
            tensors[name] = parameter
    return tensors


def gather(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    fragment: int,
    *,
    minus: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Copy a fragment's tensors, less `minus` if given, into one float32 CPU vector (into `out`, if given)."""
    size = layout.num_elements[fragment] if 0 <= fragment < layout.num_fragments else 0
    specs = layout.of(fragment)
    if out is None:
        out = torch.empty(size, dtype=torch.float32)
    _check_vector(out, size)
    if minus is not None:
        _check_vector(minus, size)
    with torch.no_grad():
        for spec in specs:
            part, source = _part(out, spec), _lookup(tensors, spec)
            if minus is None:
                part.copy_(source)
            elif _is_plain(source):
                torch.sub(source, _part(minus, spec), out=part)  # in one pass: training waits for it
            else:
                part.copy_(source).sub_(_part(minus, spec))
    return out


def scatter_(
    vector: Tensor, tensors: Mapping[str, Tensor], layout: Layout, fragment: int, *, plus: Tensor | None = None
) -> None:
    """Copy a fragment's vector, and `plus` on top if given, into the tensors, in place, each in its own dtype and on
    its own device."""
    specs = layout.of(fragment)
    for each in (vector, plus):
        if each is not None:
            _check_vector(each, layout.num_elements[fragment])
    targets = [(spec, _lookup(tensors, spec)) for spec in specs]  # all of them are there, or nothing is written
    with torch.no_grad():
        for spec, target in targets:
            if plus is None:
                target.copy_(_part(vector, spec))
            elif _is_plain(target):
                torch.add(_part(vector, spec), _part(plus, spec), out=target)
            else:
                target.copy_(_part(vector, spec) + _part(plus, spec))


def fragment_digest(vector: Tensor) -> Digest:
    """BLAKE3 of the vector's little-endian float32 bytes: `state_digest` and `momentum_digest` of a commit."""
    digesting = FragmentDigest()
    digesting.add(vector)
    return digesting.result()


class FragmentDigest:
    """`fragment_digest` of a vector that comes part by part."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def add(self, part: Tensor) -> None:
        self._hasher.update(_little_endian(part).view(np.uint8).data)

    def result(self) -> Digest:
        return Digest(self._hasher.hexdigest())


def bytes_from_vector(vector: Tensor) -> bytes:
    """The vector's little-endian float32 bytes: what a snapshot blob holds."""
    return _little_endian(vector).tobytes()


def vector_from_bytes(data: bytes | memoryview, *, num_elements: int) -> Tensor:
    """Back from `bytes_from_vector`, as a copy that may be written to. BlobError if the length is another."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size != num_elements * BYTES_PER_ELEMENT:
        raise BlobError(
            f"a fragment of {num_elements} elements takes {num_elements * BYTES_PER_ELEMENT} bytes, not {size}"
        )
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))


def _pack(sizes: Mapping[str, int], num_fragments: int) -> dict[str, int]:
    """Greedy LPT. Ties between tensors go by name, between bins to the lowest."""
    loads = [0] * num_fragments
    placed: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = min(range(num_fragments), key=loads.__getitem__)
        placed[name] = lightest
        loads[lightest] += sizes[name]
    return placed


def _plain_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name.replace(_COMPILED_PREFIX, ""), parameter


def _tie_key(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two parameters that are one: the same object, or the same memory seen in the same shape."""
    if tensor.device.type == "meta" or tensor.data_ptr() == 0:
        return ("object", id(tensor))
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _embedding_keys(module: nn.Module) -> set[tuple[Any, ...]]:
    """Tie keys of input and output embeddings: a tied pair is covered whichever name the layout uses."""
    keys: set[tuple[Any, ...]] = set()
    for name, part in module.named_modules():
        is_head = isinstance(part, nn.Linear) and name.rsplit(".", 1)[-1] == "lm_head"
        if is_head or isinstance(part, nn.Embedding | nn.EmbeddingBag):
            keys.add(_tie_key(part.weight))
    getter = getattr(module, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor):
        keys.add(_tie_key(weight))
    return keys


def _lookup(tensors: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    try:
        tensor = tensors[spec.name]
    except KeyError:
        raise LayoutError(f"tensor {spec.name!r} of the layout is not among the model's") from None
    if tuple(tensor.shape) != spec.shape:
        raise LayoutError(f"tensor {spec.name!r} has shape {tuple(tensor.shape)}: the layout has {spec.shape}")
    return tensor.detach()


def _part(vector: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor's place in its fragment's vector."""
    return vector[spec.offset : spec.offset + spec.num_elements].view(spec.shape)


def _is_plain(tensor: Tensor) -> bool:
    """As vectors are, so that it may be calculated with as it lies."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _check_vector(vector: Tensor, size: int) -> None:
    if vector.dtype != torch.float32 or vector.device.type != "cpu" or tuple(vector.shape) != (size,):
        raise LayoutError(
            f"a vector of {tuple(vector.shape)} {vector.dtype} on {vector.device}: this fragment is "
            f"({size},) torch.float32 on cpu"
        )


def _little_endian(vector: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    if vector.dtype != torch.float32 or vector.dim() != 1:
        raise LayoutError(f"a vector of {tuple(vector.shape)} {vector.dtype}: fragments are flat torch.float32")
    return np.ascontiguousarray(vector.detach().cpu().numpy(), dtype="<f4")


_ROW_KEYS = {"name", "shape", "dtype", "fragment", "offset", "embedding"}


def _spec_from_row(row: object) -> TensorSpec:
    if not isinstance(row, dict) or set(row) != _ROW_KEYS:
        raise LayoutError(f"a tensor of a layout has the keys {sorted(_ROW_KEYS)}")
    shape = row["shape"]
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise LayoutError(f"tensor {row['name']!r} has shape {shape!r}: a list of positive integers is wanted")
    return TensorSpec(
        name=row["name"],
        shape=tuple(shape),
        dtype=row["dtype"],
        fragment=row["fragment"],
        offset=row["offset"],
        num_elements=math.prod(shape),
        embedding=row["embedding"],
    )


def _validate(tensors: tuple[TensorSpec, ...]) -> None:
    """Names are unique, fragments count up from 0, and each fragment is filled without a gap or an overlap."""
    if not tensors:
        raise LayoutError("a layout without tensors")
    names: set[str] = set()
    fragment, offset = 0, 0
    for spec in tensors:
        if type(spec.name) is not str or type(spec.dtype) is not str or type(spec.embedding) is not bool:
            raise LayoutError(f"tensor {spec.name!r}: name and dtype are strings, embedding is true or false")
        if type(spec.fragment) is not int or type(spec.offset) is not int:
            raise LayoutError(f"tensor {spec.name!r}: fragment and offset are integers")
        if spec.num_elements != math.prod(spec.shape) or spec.num_elements < 1:
            raise LayoutError(f"tensor {spec.name!r}: {spec.num_elements} elements do not fit shape {spec.shape}")
        if spec.name in names:
            raise LayoutError(f"tensor {spec.name!r} is there twice")
        names.add(spec.name)
        if offset and spec.fragment == fragment + 1:
            fragment, offset = spec.fragment, 0
        if (spec.fragment, spec.offset) != (fragment, offset):
            raise LayoutError(
                f"tensor {spec.name!r} lies at (fragment, offset) {(spec.fragment, spec.offset)}: "
                f"{(fragment, offset)} is next"
            )
        offset += spec.num_elements
