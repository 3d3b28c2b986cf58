"""What a run came to, in a few numbers: its chain's own figures, and its token books as run-wide terms.

Apart from the books themselves because here one may round: a demo, a benchmark and a simulation print the same
figures, made the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from geo_diloco.protocol.messages import Commit, Entry, Finished, Found, Record
from geo_diloco.tape.balance import FragmentBalance, TokenSummary

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
    bytes_up: int = 0
    """Of all merged contributions."""
    quorum_wait_ms_mean: float = 0.0
    grace_ms_mean: float = 0.0
    rho_mean: float = 0.0
    """Cosine between successive updates of a fragment; 0 without any."""
    mu_mean: float = 0.0
    """Momentum that was used."""
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
        bytes_up=sum(sizes_up),
        bytes_per_param_down=sum(commit.update.size for commit in commits) / max(1, params_down),
        quorum_wait_ms_mean=_mean([commit.quorum_wait_ms for commit in commits]),
        grace_ms_mean=_mean([commit.grace_ms for commit in commits]),
        rho_mean=_mean([commit.rho for commit in commits if commit.rho is not None]),
        mu_mean=_mean([commit.mu for commit in commits]),
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
