"""The relay is the link that it says it is, and the benchmark reports what it did over it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from geo_diloco.cli.app import app
from geo_diloco.cli.bench_transfer import Link, measure_peer, measure_relayed
from geo_diloco.cli.relay import PACKET_BYTES, Line, Relay
from geo_diloco.errors import ConfigError
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.store import BlobStore
from geo_diloco.runtime.wire import seal_snapshot
from tests.unit.runtime.samples import RememberingPort, bytes_of, served, snapshot

RATE = 2_000_000.0


def test_a_link_is_read_and_a_mistake_is_one_line() -> None:
    assert Link.parse("10mbit,200ms") == Link(bytes_per_s=1_250_000, round_trip_s=0.2)
    assert Link.parse("10mbit,200ms", cap="9mbit").cap == 1_125_000
    with pytest.raises(ConfigError, match="--cap: 'quick' is not a rate"):
        Link.parse("10mbit,200ms", cap="quick")
    for text in ("10mbit", "10mbit,200", "fast,200ms", "10mbit,-1ms", "10mbit,1e9ms", "10mbit,xms", ""):
        with pytest.raises(ConfigError, match=r"--relay .*; write RATE,RTT, such as 100mbit,100ms") as caught:
            Link.parse(text)
        assert "\n" not in str(caught.value)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def test_the_queue_of_a_thin_line_has_an_end_for_bulk_and_room_for_what_is_short() -> None:
    async def run() -> tuple[float, float]:
        line = Line(200_000.0, 0.0, 0.1)
        for _ in range(15):
            await line.wait_arrival(line.chunk_bytes)
        waits_s = line.free_at - time.monotonic()
        began_at = time.monotonic()
        await line.wait_arrival(100)
        return waits_s, time.monotonic() - began_at

    waits_s, took_s = asyncio.run(run())
    assert waits_s < 0.1 + 2 * 2 * PACKET_BYTES / 200_000, "300 ms of bulk were sent"
    assert took_s < 0.02


def test_what_passes_takes_as_long_as_it_would_on_such_a_link() -> None:
    async def run() -> tuple[float, float]:
        listening = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with listening:
            relay = Relay(listening.sockets[0].getsockname()[1], bytes_per_s=RATE, round_trip_s=0.1)
            async with relay.running() as url:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
                writer.write(b"x")
                await reader.readexactly(1)
                began_at = time.monotonic()
                writer.write(b"x")
                await reader.readexactly(1)
                round_trip_s = time.monotonic() - began_at
                began_at = time.monotonic()
                writer.write(bytes(1_000_000))
                await reader.readexactly(1_000_000)
                took_s = time.monotonic() - began_at
                writer.close()
                assert relay.passed == 2 * (1_000_000 + 2)
        return round_trip_s, took_s

    round_trip_s, took_s = asyncio.run(run())
    assert round_trip_s >= 0.1
    assert took_s >= 1_000_000 / RATE + 0.1


def test_a_short_message_waits_for_the_queue_and_not_for_all_that_wants_to_get_in() -> None:
    async def run() -> float:
        line = Relay(1, bytes_per_s=100_000, round_trip_s=0.0, queue_s=0.2)._there
        bulk = [asyncio.create_task(line.wait_arrival(16_000)) for _ in range(20)]
        await asyncio.sleep(0)
        wait_s = await line.wait_arrival(PACKET_BYTES) - time.monotonic()
        for each in bulk:
            each.cancel()
        await asyncio.gather(*bulk, return_exceptions=True)
        return wait_s

    assert asyncio.run(run()) < 0.2 + 16_000 / 100_000 + PACKET_BYTES / 100_000 + 0.05


def test_a_cut_resets_what_is_open_and_lets_new_connections_through() -> None:
    async def run() -> None:
        listening = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with listening:
            relay = Relay(listening.sockets[0].getsockname()[1], bytes_per_s=RATE, round_trip_s=0.0)
            async with relay.running() as url, asyncio.timeout(10):
                port = int(url.rsplit(":", 1)[1])
                for _ in range(2):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(b"x")
                    assert await reader.readexactly(1) == b"x"
                    relay.cut()
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await reader.readexactly(1)
                    writer.close()

    asyncio.run(run())


def test_the_benchmark_fills_no_more_than_the_link_and_counts_what_came_twice() -> None:
    said: list[str] = []
    link = Link(bytes_per_s=4_000_000, round_trip_s=0.02)
    result = measure_relayed(link, size=3_000_000, cuts=2, congestion=["system"], say=said.append)
    assert result["link_mbit_per_s"] == 32.0 and len(said) == 2
    assert [row["direction"] for row in result["rows"]] == ["up", "down"]
    for row in result["rows"]:
        assert 0.0 < row["rate_share"] <= 1.02
        assert 0.0 <= row["resent_share"] < 0.5
        assert row["control_rtt_p99_ms"] >= row["control_rtt_p50_ms"] >= 20.0
        assert row["cuts"] == 2 and row["congestion"] == "system"
    json.dumps(result)


def test_bulk_that_is_held_below_the_link_leaves_its_queue_empty() -> None:
    link = Link(bytes_per_s=4_000_000, round_trip_s=0.02, cap=2_000_000)
    result = measure_relayed(link, size=2_000_000, cuts=0, congestion=["system"], say=lambda line: None)
    assert result["cap_mbit_per_s"] == 16.0
    for row in result["rows"]:
        assert row["rate_share"] < 0.55
        assert row["control_rtt_p50_ms"] < 20.0 + 60.0, "with a full queue it is 120 ms"


def test_another_peers_snapshot_is_fetched_and_the_rate_reported(tmp_path: Path) -> None:
    served_at: list[str] = []
    stop = threading.Event()

    async def serve() -> None:
        store = BlobStore(tmp_path)
        theta, momentum = store.put(bytes_of(700_000, 1)), store.put(bytes_of(700_000, 2))
        whole = dataclasses.replace(snapshot(), theta=(theta,), momentum=(momentum,))
        async with served(store, RememberingPort(newest_snapshot=seal_snapshot(whole, Identity.generate()))) as it:
            served_at.append(it.url.removeprefix("http://"))
            await asyncio.to_thread(stop.wait)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    try:
        while not served_at:
            server.join(0.01)
        result = measure_peer(served_at[0], congestion="system", say=lambda line: None)
    finally:
        stop.set()
        server.join()
    (row,) = result["rows"]
    assert (row["direction"], row["bytes"], row["congestion"]) == ("down", 1_400_000, "system")
    assert row["mbit_per_s"] > 0 and row["control_rtt_p99_ms"] > 0


def test_a_mistyped_command_is_one_line() -> None:
    for arguments in (["--relay", "10"], ["--congestion", "vegas"], ["--to", "nowhere"], ["--to", "127.0.0.1:9"]):
        result = CliRunner().invoke(app, ["bench", "transfer", *arguments])
        assert result.exit_code != 0
        assert isinstance(result.exception, ConfigError | SystemExit), result.exception
