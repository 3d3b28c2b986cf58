"""Most electors are gone for good: the owner reforms the run, and it goes on with what is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from geo_diloco.errors import ConfigError
from geo_diloco.node import amend, reform, replay
from geo_diloco.protocol.messages import Commit, Reform

from .test_failover import ElectedRun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElectedRun]:
    made = ElectedRun(tmp_path, num_commits=1000)
    yield made
    made.close()


def test_the_owner_goes_on_without_most_electors(run: ElectedRun) -> None:
    run.begin()
    key = run.root / "founder" / "key.pem"
    left = run.standby_dir(2)
    with pytest.raises(ConfigError, match="3 of 3 electors answer it, a majority"):
        reform(str(left), ["all-live"], key=key, confirm=lambda text: True)
    for process in (run.founder, run.standbys[1]):
        process.kill()
        process.wait()
    before = run.commits()
    text = reform(str(left), ["all-live"], key=key, dry_run=True, confirm=lambda text: False)
    assert "reform 1: the run goes on after entry" in text and "gone for good are then 2 of 3" in text
    with pytest.raises(ConfigError, match="not that of the run's owner"):
        reform(str(left), ["all-live"], key=left / "identity.key", confirm=lambda text: True)
    with pytest.raises(ConfigError, match="names 0 of the peers that are here"):
        reform(str(left), ["nobody"], key=key, confirm=lambda text: True)
    assert reform(str(left), ["all-live"], key=key, confirm=lambda text: False) == "nothing is reformed"
    assert "reformed" in reform(str(left), ["all-live"], key=key, confirm=lambda text: True)
    run.wait(lambda: run.commits() > before + 2, "commits in the new branch")
    run.start_founder()
    run.wait(lambda: run.status_of(run.root / "founder").get("lineage") == 1, "the founder, back in the new branch")
    end = run.commits() + 60
    amend(str(left), [f"stop.commits={end}"], key=key)
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    run.standbys.pop(1)
    run.end()
    run.check()
    for folder in run.folders():
        entries = run.entries_of(folder)
        assert [entry.lineage for entry in entries if isinstance(entry, Reform)] == [1]
        assert sum(isinstance(entry, Commit) for entry in entries) == end
        assert replay(folder / "tape.jsonl").divergence is None
