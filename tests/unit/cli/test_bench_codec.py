"""`bench codec`: the time to a peer is taken over a link that is as thin as it says, hivemind's codecs are whole."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from geo_diloco.cli import bench_codec
from geo_diloco.cli.bench import app
from geo_diloco.cli.bench_codec import HIVEMINDS, Seen, with_shares
from geo_diloco.cli.bench_deltas import TrainedDeltas
from geo_diloco.cli.bench_hivemind import FLOAT16, QUANTILE_8BIT, UNIFORM_8BIT, HivemindCodec
from geo_diloco.cli.bench_wire import wire
from geo_diloco.errors import ConfigError
from geo_diloco.numerics.fragments import layout_from_module


def test_what_is_sent_comes_out_whole_and_no_sooner_than_the_link_allows() -> None:
    data = [bytes([number]) * size for number, size in enumerate((0, 1, 100_000))]

    async def send_all() -> tuple[list[bytes], float]:
        async with wire(bytes_per_s=500_000, round_trip_s=0.04) as made:
            arrived = [await made.send(each) for each in data[:-1]]
            began = time.monotonic()
            arrived.append(await made.send(data[-1]))
            return arrived, time.monotonic() - began

    arrived, took_s = asyncio.run(send_all())
    assert arrived == data
    assert 0.2 + 0.02 <= took_s < 2.0


def test_the_time_to_a_peer_is_that_of_whole_rounds() -> None:
    seen = Seen(encode=[1.0, 5.0, 1.0], send=[5.0, 1.0, 1.0], decode=[1.0, 1.0, 5.0])
    assert seen.to_peer_s == 7.0, "not the sum of three medians, which no round was"


def test_shares_are_of_the_one_that_is_named() -> None:
    rows = [{"codec": "a", "ms_to_peer": 30.0}, {"codec": "b", "ms_to_peer": 60.0}]
    assert [row["to_peer_share_of_float16"] for row in with_shares(rows, of="b")] == [0.5, 1.0]


@pytest.mark.parametrize(("name", "error"), [(FLOAT16, 1e-3), (UNIFORM_8BIT, 0.15), (QUANTILE_8BIT, 0.15)])
def test_hivemind_codecs_give_back_what_they_were_given(name: str, error: float) -> None:
    vector_N = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    codec = HivemindCodec(name)
    data = codec.encode(vector_N)
    decoded_N = codec.decode(data)
    assert len(data) < len(vector_N) * (2 if name == FLOAT16 else 1) + 2_000
    assert decoded_N.shape == vector_N.shape and decoded_N.dtype == torch.float32
    assert float((decoded_N - vector_N).norm() / vector_N.norm()) < error


def drawn_deltas(**_: object) -> TrainedDeltas:
    """In place of a model that takes a minute to train."""
    layout = layout_from_module(nn.Linear(200, 100), num_fragments=1)
    delta_N, update_N = torch.randn(2, layout.num_elements[0], generator=torch.Generator().manual_seed(1))
    return TrainedDeltas(layout, delta_N, update_N)


def test_the_command_sets_hivemind_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "trained_deltas", drawn_deltas)
    asked = ["codec", "--rounds", "1", "--hidden-size", "32", "--rate", "20mbit", "--rtt", "1ms", "--json"]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    said = json.loads(done.stdout.splitlines()[-1])
    rows = {row["codec"]: row for row in said["rows"]}
    assert set(rows) == {"none", "bf16", "int8/256", "int4/64", "int4/256"} | {f"hivemind {name}" for name in HIVEMINDS}
    assert said["link_mbit"] == 20.0 and said["link_rtt_ms"] == 1.0
    for row in rows.values():
        assert row["send_ms"] >= 8e3 * row["bytes_per_param"] * said["parameters"] / 20e6, "no faster than the link"
        assert row["ms_to_peer"] == pytest.approx(row["encode_ms"] + row["send_ms"] + row["decode_ms"])
    assert rows["hivemind FLOAT16"]["to_peer_share_of_float16"] == 1.0
    assert rows["int4/64"]["bytes_per_param"] < 0.3 * rows["hivemind FLOAT16"]["bytes_per_param"]


@pytest.mark.parametrize(("flag", "value"), [("--rate", "fast"), ("--rate", "0"), ("--rtt", "20"), ("--rtt", "-1ms")])
def test_a_link_that_is_none_is_refused_before_anything_is_trained(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        CliRunner().invoke(app, ["codec", flag, value], catch_exceptions=False)
