from __future__ import annotations

import gc

import pytest

from geo_diloco.node.collector import LONG_S, THOROUGH_EVERY_S, Sparing


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: done.append("unfreeze"))
    return done


def test_what_outlives_a_long_collection_is_spared_until_the_next_thorough_one(done: list[str]) -> None:
    now = [100.0]
    sparing = Sparing(lambda: now[0])

    def collect(generation: int, took_s: float) -> list[str]:
        done.clear()
        sparing("start", {"generation": generation})
        now[0] += took_s
        sparing("stop", {"generation": generation, "collected": 0, "uncollectable": 0})
        return list(done)

    assert collect(2, LONG_S / 2) == []
    assert collect(1, 2 * LONG_S) == [], "a young generation's says nothing of the old"
    assert collect(2, 2 * LONG_S) == ["freeze"]
    now[0] += THOROUGH_EVERY_S
    assert collect(2, LONG_S / 2) == ["unfreeze"]
    assert collect(2, 2 * LONG_S) == ["freeze"]


def test_a_real_collector_calls_it() -> None:
    now = iter(float(n) for n in range(100))
    sparing = Sparing(lambda: next(now))
    before = gc.get_freeze_count()
    gc.callbacks.append(sparing)
    try:
        gc.collect()
        assert gc.get_freeze_count() > before
    finally:
        gc.callbacks.remove(sparing)
        gc.unfreeze()
