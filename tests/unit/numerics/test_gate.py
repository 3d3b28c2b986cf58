"""The gate: good contributions pass with their norm, bad ones are refused by name, bugs are not hidden."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from geo_diloco.manifest import CodecSpec, Digest
from geo_diloco.numerics import gate
from geo_diloco.numerics.codec import encode
from geo_diloco.numerics.gate import GateResult, check_contribution, cosine

LAYOUT = Digest("0123456789abcdef" * 4)
INT8 = CodecSpec(name="int8", block=64)


def frame() -> bytes:
    return encode(torch.tensor([3.0, -4.0, 0.0]), CodecSpec(name="none"), layout_digest=LAYOUT, fragment=2)


def test_a_good_contribution_passes_with_the_norm_of_the_whole_delta() -> None:
    assert check_contribution(frame(), num_elements=3, layout_digest=LAYOUT, fragment=2) == GateResult(True, "ok", 5.0)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"num_elements": 4}, "GD-303 3 elements: fragment 2 has 4"),
        ({"fragment": 0}, "GD-306 made for fragment 2"),
        ({"layout_digest": Digest("00" * 32)}, "GD-306 made for layout 0123456789ab"),
        ({"specs": (INT8,)}, "GD-306 codec none with block 0: int8 with block 64 was agreed"),
        (
            {"specs": (INT8, CodecSpec(name="bf16"))},
            "GD-306 codec none with block 0: int8 with block 64 or bf16 with block 64 was agreed",
        ),
    ],
)
def test_a_contribution_for_something_else_is_refused_by_name(wanted: dict[str, Any], reason: str) -> None:
    arguments: dict[str, Any] = {"num_elements": 3, "layout_digest": LAYOUT, "fragment": 2}
    result = check_contribution(frame(), **(arguments | wanted))
    assert not result.ok and result.norm == 0.0
    assert result.reason.startswith(reason)


def test_a_contribution_may_be_in_any_codec_that_was_agreed() -> None:
    wanted: dict[str, Any] = {"num_elements": 3, "layout_digest": LAYOUT, "fragment": 2}
    assert check_contribution(frame(), specs=(INT8, CodecSpec(name="none")), **wanted).ok
    int8 = encode(torch.ones(3), CodecSpec(name="int8", block=128), layout_digest=LAYOUT, fragment=2)
    assert check_contribution(int8, specs=(CodecSpec(name="int8", block=128), INT8), **wanted).ok
    assert not check_contribution(int8, specs=(INT8, CodecSpec(name="none")), **wanted).ok


def test_damaged_bytes_are_refused_not_raised() -> None:
    for data in (b"", b"hello", frame()[:-1], frame() + b"x"):
        result = check_contribution(data, num_elements=3, layout_digest=LAYOUT, fragment=2)
        assert not result.ok and result.reason.startswith("GD-30")


def test_a_bug_of_ours_is_not_taken_for_a_bad_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise ZeroDivisionError

    monkeypatch.setattr(gate, "decoded_chunks", broken)
    with pytest.raises(ZeroDivisionError):
        check_contribution(frame(), num_elements=3, layout_digest=LAYOUT, fragment=2)


def test_cosine_measures_the_angle_and_has_none_without_a_direction() -> None:
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert cosine(x, y) == pytest.approx(math.sqrt(0.5))
    assert cosine(x, -x) == -1.0
    assert cosine(y, y) == pytest.approx(1.0) and cosine(y, y) <= 1.0  # type: ignore[operator]
    assert cosine(x, torch.zeros(2)) is None
    assert cosine(x, torch.tensor([math.nan, 1.0])) is None
    long = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    other = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    expected = torch.dot(long.double(), other.double()) / long.double().norm() / other.double().norm()
    assert cosine(long, other) == pytest.approx(expected.item(), rel=1e-9)
