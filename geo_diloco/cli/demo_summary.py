"""What a demo's run came to, added up from what its processes left on disk.

Nothing is taken from the view but the bytes on the wire: losses, commits and sizes come from the founder's chain,
verified again entry by entry; each token term from the learners' tapes on its own; and the digests that must agree
from each learner's own last word, `summary.json`, against the chain.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from geo_diloco.cli.demo_files import DemoFiles
from geo_diloco.cli.demo_status import RunStatus
from geo_diloco.cli.demo_view import size
from geo_diloco.protocol.messages import Entry
from geo_diloco.tape.figures import ChainFigures, TokenFigures, chain_figures, token_figures

_WORD_BYTES_MAX = 4 << 20


@dataclass(frozen=True, kw_only=True)
class DemoSummary:
    """The keys of `--json`."""

    heldout_before: float | None
    heldout_after: float | None
    tokens_trained: int
    tokens_merged: int
    tokens_in_flight: int
    tokens_carried: int
    tokens_dropped: int
    commits: int
    participants_mean: float
    bytes_per_param_up: float
    bytes_per_param_down: float
    digests_equal: bool
    run_dir: str
    finished: bool
    learners: int
    dropped_by_reason: dict[str, int]
    tokens_balance: bool
    bytes_up: int
    """All that reached the founder, messages included."""
    bytes_down: int
    quorum_wait_ms_mean: float
    grace_ms_mean: float
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(files: DemoFiles, *, status: RunStatus | None, elapsed_s: float) -> DemoSummary:
    """Read what the demo's processes, now ended, left behind. What never came to be is 0 or None.

    Raises RunDirError or TapeError if what they left can't be read.
    """
    from geo_diloco.tape import summarize_tokens

    learners = files.learner_dirs()
    entries = _chain(files.root)
    chain = chain_figures(entries)
    tapes = [tape for learner in learners for tape in sorted(learner.glob("tape.jsonl"))]
    tokens = TokenFigures()
    if chain.num_elements:
        tokens = token_figures(summarize_tokens(tapes, entries, chain.num_elements), chain.num_elements)
    return DemoSummary(
        heldout_before=chain.heldout[0] if chain.heldout else None,
        heldout_after=chain.heldout[-1] if len(chain.heldout) > 1 else None,
        tokens_trained=tokens.trained,
        tokens_merged=tokens.merged,
        tokens_in_flight=tokens.in_flight,
        tokens_carried=tokens.carried,
        tokens_dropped=sum(tokens.dropped_by_reason.values()),
        commits=chain.commits,
        participants_mean=chain.participants_mean,
        bytes_per_param_up=chain.bytes_per_param_up,
        bytes_per_param_down=chain.bytes_per_param_down,
        digests_equal=digests_agree(chain, [_last_word(learner) for learner in learners]),
        run_dir=str(files.root),
        finished=chain.finished,
        learners=len(learners),
        dropped_by_reason=tokens.dropped_by_reason,
        tokens_balance=tokens.balance,
        bytes_up=status.bytes_in if status is not None else 0,
        bytes_down=status.bytes_out if status is not None else 0,
        quorum_wait_ms_mean=chain.quorum_wait_ms_mean,
        grace_ms_mean=chain.grace_ms_mean,
        elapsed_s=round(elapsed_s, 1),
    )


def digests_agree(chain: ChainFigures, words: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether every learner left its last word, and the Theta in it is the chain's, fragment by fragment: that of the
    version it holds, and of the last version if the run is finished."""
    if not words:
        return False
    for word in words:
        versions = word.get("versions") if word is not None else None
        digests = word.get("state_digests") if word is not None else None
        if not isinstance(versions, list) or not isinstance(digests, list):
            return False
        if not len(versions) == len(digests) == len(chain.digests):
            return False
        for known, version, digest in zip(chain.digests, versions, digests, strict=True):
            if known.get(version) != digest or (chain.finished and version != max(known)):
                return False
    return True


def print_summary(console: Console, summary: DemoSummary) -> None:
    """The same for people, a line for each thing; lines are never broken, so that the command can be copied."""
    dropped = ", ".join(f"{reason} {number:,}" for reason, number in summary.dropped_by_reason.items())
    rows = {
        "held-out loss of Theta": f"{_loss(summary.heldout_before)} -> {_loss(summary.heldout_after)} nats/token",
        "commits": f"{summary.commits}, {summary.participants_mean:.2f} participants each, quorum after "
        f"{summary.quorum_wait_ms_mean:.0f} ms, grace {summary.grace_ms_mean:.0f} ms (means)",
        "bytes per parameter": f"up {summary.bytes_per_param_up:.3f}, down {summary.bytes_per_param_down:.3f}",
        "bytes in all": f"up {size(summary.bytes_up)}, down {size(summary.bytes_down)}",
        "tokens trained": f"{summary.tokens_trained:,} = merged {summary.tokens_merged:,} + in flight "
        f"{summary.tokens_in_flight:,} + carried {summary.tokens_carried:,} + dropped {summary.tokens_dropped:,}"
        + (f" ({dropped})" if dropped else ""),
        "tokens balance": "yes" if summary.tokens_balance else "NO",
        "Theta equal on all peers": "yes" if summary.digests_equal else "NO",
        "run directory": summary.run_dir,
        "export the model": f"geo-diloco export {shlex.quote(summary.run_dir)} --to model",
    }
    for name, text in rows.items():
        console.print(Text.assemble((f"{name:>24}", "bold"), "  ", text), soft_wrap=True)


def _chain(root: Path) -> list[Entry]:
    """The founder's chain, signatures and links checked; empty if the run was never founded."""
    from geo_diloco.runtime.chain import read_entries

    return read_entries(root / "chain.jsonl") if (root / "manifest.json").exists() else []


def _last_word(learner: Path) -> Mapping[str, Any] | None:
    """A learner's summary.json; None if it left none that can be read."""
    try:
        with (learner / "summary.json").open("rb") as file:
            word = json.loads(file.read(_WORD_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return word if isinstance(word, dict) else None


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"
