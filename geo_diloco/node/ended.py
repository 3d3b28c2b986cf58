"""A run that is over, told from a folder on this machine: when everybody has left, nobody is there to be asked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from geo_diloco.errors import RunDirError
from geo_diloco.manifest import RunId
from geo_diloco.node.rundir import RunDir, default_root, read_manifest
from geo_diloco.protocol.messages import Commit, Entry, Finished, Found, Record
from geo_diloco.runtime.chain import counting_chain, read_log


def folders_of(run: RunId) -> list[RunDir]:
    """Those among this user's state: the founder's, and those of peers that joined, with the standby of each."""
    root = default_root(run)
    peers = sorted(root.glob("peer-*"))
    found = [root, *peers, *(peer / "standby" for peer in peers)]
    return [RunDir(each) for each in found if each.is_dir()]


def ended_status(run: RunId, folders: Iterable[RunDir]) -> dict[str, Any] | None:
    """As far as it can be told without a process, in the form of `GET /v1/status`; none where no folder knows of the
    end. `from_folder` says that it is of this kind; `end_is_durable`, that the peer of that folder had it so: else, if
    it was cut off then, a reform may have left that end behind. The best of the folders is the one with the model."""
    found: dict[str, Any] | None = None
    for folder in folders:
        with suppress(RunDirError, OSError):  # damaged, or somebody else's: it does not tell
            status = _of_folder(run, folder)
            if status is not None and (found is None or _worth(status) > _worth(found)):
                found = status
    return found


def _worth(status: dict[str, Any]) -> tuple[bool, bool]:
    return status["end_is_durable"], status["holds_model"]


def _of_folder(run: RunId, folder: RunDir) -> dict[str, Any] | None:
    if not folder.chain.exists():
        return None
    manifest = read_manifest(folder)
    entries = [entry for _, entry in counting_chain(read_log(folder.chain))]
    finished = next((each for each in reversed(entries) if isinstance(each, Finished)), None)
    if manifest.run_id() != run or finished is None:
        return None
    heldout = [[each.measured_seq, each.heldout_loss, 0.0] for each in entries if isinstance(each, Record)]
    return {
        "run": run,
        "name": manifest.name,
        "role": "",
        "term": finished.header.term,
        "seq": finished.header.seq,
        "finished": True,
        "finish_reason": finished.reason,
        "heldout": heldout,
        "tokens_total": finished.tokens_total,
        "commits": _num_commits(entries),
        "progress": 1.0,
        "served_by": None,
        "learners": [],
        "rounds": [],
        "waiting": [],
        "from_folder": str(folder.root),
        "end_is_durable": _left_at_the_end(folder),
        "holds_model": folder.key.exists() or folder.state.is_dir(),
    }


def _left_at_the_end(folder: RunDir) -> bool:
    """By the last word of that peer's process."""
    try:
        return json.loads(folder.summary.read_bytes()).get("finished") is True
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _num_commits(entries: Sequence[Entry]) -> int | None:
    """Of the run; none where the chain is not here from its beginning."""
    return sum(isinstance(each, Commit) for each in entries) if isinstance(entries[0], Found) else None
