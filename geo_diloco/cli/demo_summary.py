"""What a demo's run came to, added up from what its processes left on disk.

Nothing is taken from the view but the bytes on the wire: losses, commits and sizes come from the founder's chain,
verified again entry by entry; each token term from the learners' tapes on its own; and the digests that must agree
from each learner's own last word, `summary.json`, against the chain.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from geo_diloco.cli.demo_files import DemoFiles
from geo_diloco.cli.demo_status import RunStatus
from geo_diloco.cli.demo_view import size
from geo_diloco.protocol.messages import Commit, Entry, Finished, Found, Record

if TYPE_CHECKING:
    from geo_diloco.tape import FragmentBalance, TokenSummary

_WORD_BYTES_MAX = 4 << 20
_TERMS = ("merged", "in_flight", "carried")


@dataclass(frozen=True, kw_only=True)
class ChainFigures:
    """What the chain alone tells."""

    heldout: tuple[float, ...] = ()
    """Every measurement of Theta, nats per token, oldest first."""
    commits: int = 0
    participants_mean: float = 0.0
    bytes_per_param_up: float = 0.0
    """Mean bytes of a merged contribution per parameter of its fragment."""
    bytes_per_param_down: float = 0.0
    """The same for updates."""
    quorum_wait_ms_mean: float = 0.0
    grace_ms_mean: float = 0.0
    finished: bool = False
    num_elements: tuple[int, ...] = ()
    digests: tuple[dict[int, str], ...] = field(default=(), repr=False)
    """Per fragment: version -> state digest."""


@dataclass(frozen=True, kw_only=True)
class TokenFigures:
    """Run-wide token terms (weighted by fragment size), rounded so that what balances exactly adds up exactly."""

    trained: int = 0
    merged: int = 0
    in_flight: int = 0
    carried: int = 0
    dropped_by_reason: dict[str, int] = field(default_factory=dict)
    balance: bool = True
    """Trained = merged + in flight + carried + dropped, in integers, for every learner and fragment."""


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


def chain_figures(entries: Iterable[Entry]) -> ChainFigures:
    """Add up a chain from its first entry on."""
    heldout: list[float] = []
    commits: list[Commit] = []
    num_elements: tuple[int, ...] = ()
    digests: tuple[dict[int, str], ...] = ()
    finished = False
    for entry in entries:
        if isinstance(entry, Found):
            num_elements = entry.num_elements
            digests = tuple({0: digest} for digest in entry.state_digests)
        elif isinstance(entry, Commit):
            commits.append(entry)
            digests[entry.fragment][entry.version] = entry.state_digest
        elif isinstance(entry, Record):
            heldout.append(entry.heldout_loss)
        elif isinstance(entry, Finished):
            finished = True
    sizes_up = [each.contribution.size for commit in commits for each in commit.participants]
    params_up = sum(num_elements[commit.fragment] * len(commit.participants) for commit in commits)
    params_down = sum(num_elements[commit.fragment] for commit in commits)
    return ChainFigures(
        heldout=tuple(heldout),
        commits=len(commits),
        participants_mean=_mean([len(commit.participants) for commit in commits]),
        bytes_per_param_up=sum(sizes_up) / max(1, params_up),
        bytes_per_param_down=sum(commit.update.size for commit in commits) / max(1, params_down),
        quorum_wait_ms_mean=_mean([commit.quorum_wait_ms for commit in commits]),
        grace_ms_mean=_mean([commit.grace_ms for commit in commits]),
        finished=finished,
        num_elements=num_elements,
        digests=digests,
    )


def token_figures(tokens: TokenSummary, num_elements: Sequence[int]) -> TokenFigures:
    """From books per learner and fragment, where the balance is exact, to one number for each term.

    A term is its tokens weighted by fragment size. Terms floored one by one would miss the total by a token or two, so
    running sums are floored instead: each term is still within a token of its own sum, and the terms add up to what
    was trained if and only if the books do (to within a token).
    """
    fragments = [fragment for learner in tokens.learners for fragment in learner.fragments]
    sizes = [n for _ in tokens.learners for n in num_elements]

    def weighted(amounts: Iterable[int]) -> int:
        return sum(n * amount for n, amount in zip(sizes, amounts, strict=True))

    reasons = sorted({reason for fragment in fragments for reason in fragment.dropped})
    sums = [weighted(_term(fragment, term) for fragment in fragments) for term in _TERMS]
    sums += [weighted(fragment.dropped[reason] for fragment in fragments) for reason in reasons]
    rounded = _floor_running(sums, max(1, sum(num_elements)))
    return TokenFigures(
        trained=weighted(fragment.trained for fragment in fragments) // max(1, sum(num_elements)),
        merged=rounded[0],
        in_flight=rounded[1],
        carried=rounded[2],
        dropped_by_reason=dict(zip(reasons, rounded[len(_TERMS) :], strict=True)),
        balance=tokens.balances,
    )


def _term(fragment: FragmentBalance, term: str) -> int:
    amount: int = getattr(fragment, term)
    return amount


def _floor_running(sums: Sequence[int], divisor: int) -> list[int]:
    floors, total = [0], 0
    for amount in sums:
        total += amount
        floors.append(total // divisor)
    return [after - before for before, after in pairwise(floors)]


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
    from geo_diloco.config import manifest_from_bytes
    from geo_diloco.runtime.chain import ChainCopy
    from geo_diloco.runtime.store import ChainStore

    path = root / "manifest.json"
    if not path.exists():
        return []
    manifest = manifest_from_bytes(path.read_bytes())
    chain = ChainStore(root / "chain.jsonl", is_read_only=True)
    copy = ChainCopy(chain, run=manifest.run_id(), signer=manifest.founder)
    try:
        return [entry for _, entry in copy.load()]
    finally:
        copy.close()


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
