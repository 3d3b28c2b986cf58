"""A run that is resumed is where its peers look for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.config import PeerConfig, load_peer_config
from geo_diloco.errors import ConfigError
from geo_diloco.node.addresses import as_before
from geo_diloco.node.rundir import RunDir, hold

FOUNDED = {
    "host": "0.0.0.0",
    "announce": "192.0.2.2",
    "port": 31777,
    "bootstraps": ["/ip4/127.0.0.1/tcp/9/p2p/QmSoLnSGccFuZQJzRadHn95W2CrSFmZuTdDWP8HXaHca9z"],
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    held = hold(tmp_path / "run")
    yield held
    held.release()


def said(**flags: Any) -> PeerConfig:
    return load_peer_config(flags, environment={})


def test_a_start_that_says_nothing_of_addresses_uses_those_of_the_start_before(run_dir: RunDir) -> None:
    as_before(run_dir, said(**FOUNDED))
    again = as_before(run_dir, said(threads=3))
    assert {key: getattr(again, key) for key in FOUNDED} == {**FOUNDED, "bootstraps": tuple(FOUNDED["bootstraps"])}  # type: ignore[arg-type]
    assert (again.threads, again.dht_host) == (3, "0.0.0.0")


def test_what_is_said_this_time_outranks_what_was_said_before_and_is_kept(run_dir: RunDir) -> None:
    as_before(run_dir, said(**FOUNDED))
    as_before(run_dir, said(announce="192.0.2.9"))
    again = as_before(run_dir, said())
    assert (again.announce, again.port) == ("192.0.2.9", 31777)


def test_limits_and_what_is_to_be_kept_are_as_before_until_somebody_says_otherwise(run_dir: RunDir) -> None:
    as_before(
        run_dir, said(keep_contributions=True, max_up="2mbit", quota="50GB/day", mirror=False, congestion="cubic")
    )
    again = as_before(run_dir, said())
    assert (again.keep_contributions, again.max_up, again.mirror, again.congestion) == (True, 250_000, False, "cubic")
    assert again.quota == 50 * 10**9
    as_before(run_dir, said(keep_contributions=False, max_up="none", quota="none"))
    again = as_before(run_dir, said())
    assert (again.keep_contributions, again.max_up, again.quota, again.mirror) == (False, 0, 0, False)


def test_defaults_are_not_kept_as_if_they_had_been_said(run_dir: RunDir) -> None:
    as_before(run_dir, said())
    assert as_before(run_dir, said(host="127.0.0.2")).host == "127.0.0.2"
    assert as_before(run_dir, said()).announce == said().announce


@pytest.mark.parametrize("kept", [b"{", b"[1]", b'{"port": "many"}'])
def test_a_damaged_file_is_named(run_dir: RunDir, kept: bytes) -> None:
    run_dir.addresses.write_bytes(kept)
    with pytest.raises(ConfigError, match=r"addresses\.json|port"):
        as_before(run_dir, said())
