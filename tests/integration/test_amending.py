"""The owner changes the rules of a run that goes on: whoever serves appends it, and everybody goes by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geo_diloco.errors import ConfigError, DirectoryError, ManifestError
from geo_diloco.node import amend, replay
from geo_diloco.numerics import codec
from geo_diloco.protocol.messages import Amendment, Commit
from geo_diloco.runtime.store import BlobStore

from .test_failover import ElectedRun

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElectedRun]:
    made = ElectedRun(tmp_path, num_commits=1000)
    yield made
    made.close()


def in_force(status: dict[str, Any], name: str) -> Any:
    return status["rules"][name]["value"] if "rules" in status else None


def test_the_owner_amends_a_run_whoever_serves_it(run: ElectedRun) -> None:
    run.begin()
    founder = run.root / "founder"
    wanted = ["quorum=2", "outer.eta=0.5", "codec_up=int8", "codec_down=bf16"]
    done = amend(str(founder), wanted)
    assert done["number"] == 1
    seq = done["rules"]["quorum"]["amended_at"]
    assert done["rules"]["eta"] == {"value": 0.5, "amended_at": seq}
    run.founder.kill()
    run.founder.wait()
    with pytest.raises(DirectoryError, match="nobody serves this run now"):
        amend(str(founder), ["quorum=1"], limit_s=2.0)
    run.wait(lambda: run.syncer()[0] is not None, "another syncer")
    assert in_force(run.syncer()[1], "quorum") == 2
    before = run.commits()
    run.wait(lambda: run.commits() >= before + 4, "commits by it")
    run.start_founder()
    run.wait(lambda: run.status_of(founder).get("role") == "follower", "the founder, as a peer")
    run.wait(lambda: in_force(run.status_of(founder), "codec_down") == "bf16:64", "what is in force, at the founder")
    invite = (founder / "invite.txt").read_text().strip()
    hostile = run.standby_dir(1) / "identity.key"
    with pytest.raises(ConfigError, match="is not that of the run's owner"):
        amend(invite, ["quorum=1"], key=hostile)
    with pytest.raises(ConfigError, match=r"only commits, tokens, .*codec_down can be amended"):
        amend(str(founder), ["inner.learning_rate=1"])
    with pytest.raises(ManifestError, match="quorum"):
        amend(str(founder), ["quorum=0"])
    last = run.commits() + 60
    done = amend(invite, [f"stop.commits={last}"], key=founder / "key.pem")
    assert done["number"] == 2 and done["rules"]["commits"]["value"] == last
    run.wait_ended()
    assert [learner.returncode for learner in run.learners.values()] == [0, 0]
    with pytest.raises(ConfigError, match=r"is finished .* can't be amended any more"):
        amend(str(founder), ["commits=2000"])
    run.end()
    run.check()
    check_chain(run, seq, last)


def check_chain(run: ElectedRun, seq: int, last: int) -> None:
    """Two amendments on everybody's chain; commits go by them, frames are in the codecs that were wanted."""
    for folder in run.folders():
        entries = run.entries_of(folder)
        assert [entry.number for entry in entries if isinstance(entry, Amendment)] == [1, 2]
        assert replay(folder / "tape.jsonl").divergence is None
    commits = [entry for entry in run.entries_of(run.standby_dir(1)) if isinstance(entry, Commit)]
    assert len(commits) == last
    late = [commit for commit in commits if commit.header.seq > seq + 4]
    assert late and all((commit.eta, len(commit.participants)) == (0.5, 2) for commit in late)
    updates = BlobStore(run.standby_dir(1) / "blobs", is_read_only=True)
    assert {codec.inspect(updates.get(commit.update)).codec for commit in late} == {"bf16"}
    handed_in = BlobStore(run.learner_dir(1) / "blobs", is_read_only=True)
    mine = [each.contribution for commit in late for each in commit.participants if handed_in.has(each.contribution)]
    assert mine and {codec.inspect(handed_in.get(blob)).codec for blob in mine} == {"int8"}
