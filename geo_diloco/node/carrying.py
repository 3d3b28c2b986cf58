"""This machine's wishes about its line, as what its bulk goes through."""

from __future__ import annotations

from geo_diloco.config import PeerConfig
from geo_diloco.node.rundir import RunDir
from geo_diloco.runtime.bulk import Bulk, make_bulk


def bulk_of(config: PeerConfig, run_dir: RunDir) -> Bulk:
    """To be made in the event loop."""
    return make_bulk(
        max_up=config.max_up,
        max_down=config.max_down,
        quota=config.quota,
        quota_path=run_dir.quota,
        congestion=config.congestion,
    )
