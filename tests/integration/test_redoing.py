"""What a syncer merged can be merged again from its folder, to the same bits; whatever was changed there is named."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from geo_diloco.errors import RunDirError
from geo_diloco.node import replay
from geo_diloco.numerics.outer import outer_update
from geo_diloco.protocol.messages import Commit
from geo_diloco.runtime import merger
from geo_diloco.runtime.identity import Identity
from geo_diloco.runtime.wire import Signed, open_entry, seal_entry

from .test_run import LIMIT_S, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, num_commits=14)
    yield made
    made.close()


def play(run: Run) -> tuple[Path, list[Commit]]:
    """A run whose syncer is killed once; its folder, and what it committed."""
    run.start_founder("--keep-contributions")
    run.start_learner(1)
    run.start_learner(2)
    run.wait(lambda: run.status()["commits"] >= 5, "the first commits")
    run.founder.kill()
    run.founder.wait()
    run.start_founder("--keep-contributions")
    run.wait_ended()
    run.founder.send_signal(signal.SIGTERM)
    assert run.founder.wait(LIMIT_S) == 0
    return run.root / "founder", [entry for entry in run.entries() if isinstance(entry, Commit)]


def with_another_weight(line: str, identity: Identity | None) -> str:
    """A commit's line with one weight changed; signed anew, if there is a key to do it with."""
    signed = Signed.from_line(line)
    commit = open_entry(signed)
    assert isinstance(commit, Commit)
    first, *others = commit.participants
    changed = replace(commit, participants=(replace(first, weight=first.weight * 0.99), *others))
    if identity is not None:
        return seal_entry(changed, identity).to_line()
    return replace(signed, body=seal_entry(changed, Identity.generate()).body).to_line()


def test_merges_are_redone_bit_for_bit_and_every_change_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, commits = play(run)
    tape = folder / "tape.jsonl"
    result = replay(tape)
    assert result.divergence is None and result.num_boots == 2
    # What was made before the kill may have got to the disk and not to the tape.
    assert len(commits) - 1 <= result.merges_redone <= len(commits) and result.merges_missing == 0
    assert result.updates_checked == len(commits)
    chain = folder / "chain.jsonl"
    lines = chain.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if json.loads(json.loads(line)["body"])["kind"] == "commit")
    first = commits[0]
    named = f"entry {first.header.seq} "

    # one byte of a contribution
    blob = folder / "blobs" / first.participants[0].contribution.digest
    kept = bytearray(blob.read_bytes())
    blob.write_bytes(bytes([*kept[:-1], kept[-1] ^ 1]))
    changed = replay(tape).divergence
    assert changed is not None and named in changed and "contribution" in changed

    # a contribution that is gone: said, and what builds on it with it, until the next start
    blob.unlink()
    without = replay(tape)
    assert without.divergence is None
    assert without.merges_missing > 0 and without.merges_redone > 0
    assert without.merges_missing + without.merges_redone == result.merges_redone
    blob.write_bytes(kept)

    # another arithmetic than the one that merged
    with monkeypatch.context() as patched:
        patched.setattr(merger, "outer_update", lambda gradient, *of, **how: outer_update(gradient * 1.001, *of, **how))
        changed = replay(tape).divergence
    assert changed is not None and f"{named}(" in changed and "merged again has update" in changed

    # one weight in the copy of the chain, by one who can't sign, and by one who can
    for identity in (None, Identity.load_or_create(folder / "key.pem")):
        forged = [*lines[:number], with_another_weight(lines[number], identity), *lines[number + 1 :]]
        chain.write_text("\n".join(forged) + "\n")
        if identity is None:
            with pytest.raises(RunDirError, match=f"line {number + 1}"):
                replay(tape)
        else:
            changed = replay(tape).divergence
            assert changed is not None and named in changed and "chain.jsonl" in changed
