"""Fragments: packing, ties, embeddings, the layout's one form, and vectors in and out of a model."""

from __future__ import annotations

import itertools
import json
import struct

import blake3
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from geo_diloco.errors import BlobError, LayoutError, ModelError
from geo_diloco.numerics.fragments import (
    Layout,
    TensorSpec,
    bytes_from_vector,
    fragment_digest,
    gather,
    layout_from_module,
    named_trainable,
    scatter_,
    vector_from_bytes,
)


class TinyLanguageModel(nn.Module):
    """Embedding tied to the head, a block, a frozen tensor."""

    def __init__(self, *, tied: bool = True, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.block = nn.Linear(width, 3)
        self.lm_head = nn.Linear(width, 6, bias=False)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def sized_module(sizes: list[int]) -> nn.Module:
    module = nn.Module()
    for index, size in enumerate(sizes):
        module.register_parameter(f"p{index:02d}", nn.Parameter(torch.zeros(size)))
    return module


def best_largest_bin(sizes: list[int], num_bins: int) -> int:
    """Optimal makespan by trying every assignment."""
    best = sum(sizes)
    for choice in itertools.product(range(num_bins), repeat=len(sizes)):
        loads = [0] * num_bins
        for size, bin_index in zip(sizes, choice, strict=True):
            loads[bin_index] += size
        best = min(best, max(loads))
    return best


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7), data=st.data())
def test_the_largest_fragment_keeps_the_lpt_bound(sizes: list[int], data: st.DataObject) -> None:
    num_fragments = data.draw(st.integers(1, min(3, len(sizes))))
    layout = layout_from_module(sized_module(sizes), num_fragments=num_fragments)
    assert layout.num_fragments == num_fragments
    assert sum(layout.num_elements) == sum(sizes)
    assert min(layout.num_elements) >= 1
    bound = (4 / 3 - 1 / (3 * num_fragments)) * best_largest_bin(sizes, num_fragments)
    assert max(layout.num_elements) <= bound + 1e-9


def test_packing_is_greedy_by_size_then_name_and_fragments_are_sorted_by_name() -> None:
    module = nn.Module()
    for name, size in (("b", 5), ("a", 5), ("d", 4), ("c", 3), ("e", 3)):
        module.register_parameter(name, nn.Parameter(torch.zeros(size)))
    layout = layout_from_module(module, num_fragments=2)
    # a -> 0 (5), b -> 1 (5), d -> 0 (9), c -> 1 (8), e -> 1 (11)
    assert [(spec.name, spec.fragment, spec.offset) for spec in layout.tensors] == [
        ("a", 0, 0),
        ("d", 0, 5),
        ("b", 1, 0),
        ("c", 1, 5),
        ("e", 1, 8),
    ]
    assert layout.num_elements == (9, 11)
    assert [spec.name for spec in layout.of(1)] == ["b", "c", "e"]


def test_tied_weights_appear_once_and_frozen_ones_never() -> None:
    layout = layout_from_module(TinyLanguageModel(), num_fragments=1)
    assert [spec.name for spec in layout.tensors] == ["block.bias", "block.weight", "embed.weight"]
    assert set(named_trainable(TinyLanguageModel())) == {"block.bias", "block.weight", "embed.weight"}
    untied = layout_from_module(TinyLanguageModel(tied=False), num_fragments=1)
    assert [spec.name for spec in untied.tensors] == ["block.bias", "block.weight", "embed.weight", "lm_head.weight"]


def test_weights_tied_by_shared_memory_appear_once() -> None:
    model = TinyLanguageModel(tied=False)
    model.lm_head.weight.data = model.embed.weight.data
    assert list(named_trainable(model)) == ["block.bias", "block.weight", "embed.weight"]


def test_equal_but_separate_tensors_are_not_tied() -> None:
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.ones(3)))
    model.register_parameter("b", nn.Parameter(torch.ones(3)))
    assert list(named_trainable(model)) == ["a", "b"]


def test_input_and_output_embeddings_are_marked_and_nothing_else_is() -> None:
    untied = layout_from_module(TinyLanguageModel(tied=False), num_fragments=1)
    assert {spec.name for spec in untied.tensors if spec.embedding} == {"embed.weight", "lm_head.weight"}

    class HeadByMethod(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_head = nn.Linear(4, 6, bias=False)
            self.body = nn.Linear(4, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.a_head

    layout = layout_from_module(HeadByMethod(), num_fragments=1)
    assert {spec.name for spec in layout.tensors if spec.embedding} == {"a_head.weight"}


def test_a_head_tied_to_an_embedding_is_an_embedding_under_either_name() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_projection = nn.Linear(4, 6, bias=False)
            self.z_embed = nn.Embedding(6, 4)
            self.a_projection.weight = self.z_embed.weight

    layout = layout_from_module(HeadFirst(), num_fragments=1)
    assert [(spec.name, spec.embedding) for spec in layout.tensors] == [("a_projection.weight", True)]


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    compiled = nn.Module()
    compiled.add_module("_orig_mod", TinyLanguageModel())
    assert layout_from_module(compiled, num_fragments=2) == layout_from_module(TinyLanguageModel(), num_fragments=2)


@pytest.mark.parametrize("num_fragments", [0, 4, -1])
def test_an_impossible_number_of_fragments_names_the_most_that_is_possible(num_fragments: int) -> None:
    with pytest.raises(ModelError, match=rf"num_fragments is {num_fragments}.*1 to 3"):
        layout_from_module(TinyLanguageModel(), num_fragments=num_fragments)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable"):
        layout_from_module(TinyLanguageModel().requires_grad_(False), num_fragments=1)


def test_the_layouts_json_is_canonical_and_comes_back_equal() -> None:
    layout = layout_from_module(TinyLanguageModel(), num_fragments=2)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest == layout.digest == blake3.blake3(layout.to_json().encode()).hexdigest()
    shuffled = json.dumps(json.loads(layout.to_json()), indent=3)
    assert Layout.from_json(shuffled).digest == layout.digest


def test_the_digest_of_a_known_layout_never_changes() -> None:
    layout = Layout((TensorSpec("w", (2, 3), "float32", 0, 0, 6, False),))
    assert layout.to_json() == (
        '{"tensors":[{"dtype":"float32","embedding":false,"fragment":0,"name":"w","offset":0,"shape":[2,3]}]}'
    )
    assert layout.digest == "c50a8613585f0d32ec4db348660db1e392d9805c1e07314e6ce4d65469d2c553"


def test_every_part_of_a_tensor_changes_the_digest() -> None:
    base = TensorSpec("w", (2, 3), "float32", 0, 0, 6, False)
    variants = [
        base,
        TensorSpec("v", (2, 3), "float32", 0, 0, 6, False),
        TensorSpec("w", (3, 2), "float32", 0, 0, 6, False),
        TensorSpec("w", (2, 3), "bfloat16", 0, 0, 6, False),
        TensorSpec("w", (2, 3), "float32", 0, 0, 6, True),
    ]
    assert len({Layout((spec,)).digest for spec in variants}) == len(variants)


GOOD_ROW = {"name": "w", "shape": [2], "dtype": "float32", "fragment": 0, "offset": 0, "embedding": False}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"tensors":[]}',
        '{"tensors":3}',
        "[" * 100_000,
        json.dumps({"tensors": [GOOD_ROW], "more": 1}),
        json.dumps({"tensors": [{"name": "w"}]}),
        json.dumps({"tensors": [GOOD_ROW | {"shape": [0]}]}),
        json.dumps({"tensors": [GOOD_ROW | {"shape": [-2]}]}),
        json.dumps({"tensors": [GOOD_ROW | {"shape": [True]}]}),
        json.dumps({"tensors": [GOOD_ROW | {"shape": "2"}]}),
        json.dumps({"tensors": [GOOD_ROW | {"fragment": 1}]}),
        json.dumps({"tensors": [GOOD_ROW | {"fragment": -1}]}),
        json.dumps({"tensors": [GOOD_ROW | {"offset": 1}]}),
        json.dumps({"tensors": [GOOD_ROW | {"offset": 0.0}]}),
        json.dumps({"tensors": [GOOD_ROW | {"embedding": 1}]}),
        json.dumps({"tensors": [GOOD_ROW | {"name": None}]}),
        json.dumps({"tensors": [GOOD_ROW, GOOD_ROW | {"offset": 2}]}),
        json.dumps({"tensors": [GOOD_ROW, GOOD_ROW | {"name": "v", "offset": 1}]}),
        json.dumps({"tensors": [GOOD_ROW, GOOD_ROW | {"name": "v", "fragment": 2}]}),
        json.dumps({"tensors": [GOOD_ROW | {"fragment": 1}, GOOD_ROW | {"name": "v"}]}),
    ],
)
def test_a_layout_that_is_not_one_is_refused_by_name(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_the_first_difference_between_layouts_has_a_name() -> None:
    base = layout_from_module(TinyLanguageModel(), num_fragments=1)
    assert base.first_difference(Layout.from_json(base.to_json())) is None
    untied = layout_from_module(TinyLanguageModel(tied=False), num_fragments=1)
    assert base.first_difference(untied) == "tensor 'lm_head.weight' is there but not here"
    assert untied.first_difference(base) == "tensor 'lm_head.weight' is here but not there"
    wider = layout_from_module(TinyLanguageModel(width=8), num_fragments=1)
    assert base.first_difference(wider) == "tensor 'block.weight' has shape (3, 4) here and (3, 8) there"
    half = layout_from_module(TinyLanguageModel().bfloat16(), num_fragments=1)
    assert base.first_difference(half) == "tensor 'block.bias' has dtype float32 here and bfloat16 there"
    finer = layout_from_module(TinyLanguageModel(), num_fragments=2)
    assert base.first_difference(finer) == "1 fragments here and 2 there"
    swapped = Layout(
        (TensorSpec("b", (2,), "float32", 0, 0, 2, False), TensorSpec("a", (3,), "float32", 0, 2, 3, False))
    )
    ordered = Layout(
        (TensorSpec("a", (3,), "float32", 0, 0, 3, False), TensorSpec("b", (2,), "float32", 0, 3, 2, False))
    )
    assert swapped.first_difference(ordered) == "tensor 'a' lies at (fragment, offset) (0, 2) here and (0, 0) there"


def test_gather_and_scatter_are_inverse_and_keep_the_models_dtype() -> None:
    torch.manual_seed(0)
    source, target = TinyLanguageModel().bfloat16(), TinyLanguageModel().bfloat16()
    layout = layout_from_module(source, num_fragments=2)
    for fragment in range(2):
        vector = gather(named_trainable(source), layout, fragment)
        assert vector.dtype == torch.float32 and vector.shape == (layout.num_elements[fragment],)
        scatter_(vector, named_trainable(target), layout, fragment)
    for name, tensor in named_trainable(target).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, named_trainable(source)[name])
    assert torch.equal(target.lm_head.weight, source.lm_head.weight)


def test_gather_copies_and_lays_tensors_out_row_by_row() -> None:
    weight = torch.arange(6.0).view(2, 3)
    layout = Layout(
        (TensorSpec("b", (2,), "float32", 0, 0, 2, False), TensorSpec("w", (2, 3), "float32", 0, 2, 6, False))
    )
    tensors = {"w": weight.t().contiguous().t(), "b": torch.tensor([8.0, 9.0])}  # not contiguous
    out = torch.full((8,), -1.0)
    vector = gather(tensors, layout, 0, out=out)
    assert vector is out
    assert vector.tolist() == [8.0, 9.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    vector.zero_()
    assert tensors["w"].sum() == 15.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathering_less_a_vector_and_scattering_with_one_on_top_is_as_in_two_passes(dtype: torch.dtype) -> None:
    """One pass where a tensor is as vectors are, and float32 arithmetic where it isn't."""
    torch.manual_seed(0)
    model = TinyLanguageModel().to(dtype)
    tensors, layout = named_trainable(model), layout_from_module(model, num_fragments=2)
    tensors["block.weight"] = tensors["block.weight"].detach().t().contiguous().t()
    for fragment in range(2):
        other = torch.randn(layout.num_elements[fragment])
        before = gather(tensors, layout, fragment)
        assert torch.equal(gather(tensors, layout, fragment, minus=other), before - other)
        vector = torch.randn(layout.num_elements[fragment])
        kept = vector.clone()
        scatter_(vector, tensors, layout, fragment, plus=other)
        assert torch.equal(gather(tensors, layout, fragment), (kept + other).to(dtype).float())
        assert torch.equal(vector, kept)
        for wrong in (other[1:], other.double()):
            with pytest.raises(LayoutError):
                gather(tensors, layout, fragment, minus=wrong)
            with pytest.raises(LayoutError):
                scatter_(vector, tensors, layout, fragment, plus=wrong)


def test_gather_and_scatter_refuse_what_the_layout_does_not_have() -> None:
    layout = Layout(
        (TensorSpec("w", (2,), "float32", 0, 0, 2, False), TensorSpec("z", (1,), "float32", 0, 2, 1, False))
    )
    good = {"w": torch.zeros(2), "z": torch.zeros(1)}
    with pytest.raises(LayoutError, match="'z' of the layout is not among"):
        gather({"w": torch.zeros(2)}, layout, 0)
    with pytest.raises(LayoutError, match=r"'w' has shape \(3,\)"):
        gather(good | {"w": torch.zeros(3)}, layout, 0)
    with pytest.raises(LayoutError, match="fragment 1 does not exist"):
        gather(good, layout, 1)
    for wrong in (torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        with pytest.raises(LayoutError, match=r"this fragment is \(3,\)"):
            gather(good, layout, 0, out=wrong)
    touched: dict[str, Tensor] = {"w": torch.zeros(2)}
    with pytest.raises(LayoutError):
        scatter_(torch.ones(3), touched, layout, 0)
    assert touched["w"].sum() == 0.0, "nothing is written if a tensor is missing"


def test_scatter_works_on_parameters_that_require_a_gradient() -> None:
    model = TinyLanguageModel()
    layout = layout_from_module(model, num_fragments=1)
    scatter_(torch.arange(float(layout.num_elements[0])), named_trainable(model), layout, 0)
    assert model.block.bias.tolist() == [0.0, 1.0, 2.0]
    assert model.block.bias.requires_grad


def test_bytes_and_digest_are_those_of_little_endian_float32() -> None:
    values = [1.0, -2.5, 0.0, -0.0, 1e-45, 3e38]
    vector = torch.tensor(values, dtype=torch.float32)
    raw = struct.pack("<6f", *values)
    assert bytes_from_vector(vector) == raw
    assert fragment_digest(vector) == blake3.blake3(raw).hexdigest()
    assert fragment_digest(torch.stack([vector, vector], dim=1)[:, 0]) == fragment_digest(vector)
    back = vector_from_bytes(raw, num_elements=6)
    assert bytes_from_vector(back) == raw
    assert bytes_from_vector(vector_from_bytes(memoryview(raw), num_elements=6)) == raw
    back.add_(1.0)  # a copy that may be written to


@pytest.mark.parametrize("length", [0, 4, 11, 13, 16])
def test_bytes_of_another_length_are_not_a_fragment(length: int) -> None:
    with pytest.raises(BlobError, match="3 elements takes 12 bytes"):
        vector_from_bytes(bytes(length), num_elements=3)
