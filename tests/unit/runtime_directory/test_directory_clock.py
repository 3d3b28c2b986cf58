"""The directory's clock, which the machine's owner may set while a peer runs."""

from __future__ import annotations

import importlib
import time

import pytest

from geo_diloco.runtime.dht import _steady_clock, load_library


def test_setting_the_machines_clock_moves_the_directorys_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wall = _steady_clock(), time.time
    assert abs(clock() - wall()) < 60
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    assert abs(clock() - wall()) < 60


def test_hivemind_goes_by_that_clock_wherever_it_looks() -> None:
    load_library()
    modules = ("utils.timed_storage", "utils", "dht.routing", "dht.node", "dht.protocol")
    clocks = {importlib.import_module(f"hivemind.{name}").get_dht_time for name in modules}
    assert len(clocks) == 1 and time.time not in clocks
