"""This machine's wishes about its line, as what its bulk goes through."""

from __future__ import annotations

from geo_diloco.config import PeerConfig
from geo_diloco.node.rundir import RunDir
from geo_diloco.runtime.bulk import Bulk, make_bulk


def limits_text(config: PeerConfig) -> str:
    """What this machine's owner allows on its line, for others to read; empty if that is everything."""
    rates = (("up", config.max_up), ("down", config.max_down))
    return " and ".join(f"at most {8 * rate / 1e6:g} Mbit/s {way}" for way, rate in rates if rate)


def bulk_of(config: PeerConfig, run_dir: RunDir) -> Bulk:
    """To be made in the event loop."""
    return make_bulk(
        max_up=config.max_up,
        max_down=config.max_down,
        quota=config.quota,
        quota_path=run_dir.quota,
        congestion=config.congestion,
    )
