"""Where every trained token went, by the tapes: trained = merged + in flight + carried + dropped.

Each term is summed on its own, none is the remainder of the others: what was trained from the inner steps on the
learners' tapes, what was merged from the chain, what was dropped from the effects that a replay gives again, and what
is in flight or carried from the books that the replay ends with. Accounts are per fragment, in integers.

A process that dies takes its books back to its last checkpoint. So of a boot that was resumed from, only the drops up
to that checkpoint stand; what came after is covered by the next boot's `crashed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geo_diloco.errors import TapeError
from geo_diloco.manifest import FragmentId, PeerId, Version
from geo_diloco.protocol.effects import TokensDropped
from geo_diloco.protocol.events import Resumed, Saved, StepDone
from geo_diloco.protocol.ledger import id_of
from geo_diloco.protocol.messages import Commit, ContributionId, Entry
from geo_diloco.protocol.peer import Peer
from geo_diloco.tape.record import TapeBoot, read_tape
from geo_diloco.tape.replaying import replay_boot


@dataclass
class FragmentBalance:
    """One learner's tokens on one fragment."""

    trained: int = 0
    merged: int = 0
    in_flight: int = 0
    carried: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason."""

    @property
    def missing(self) -> int:
        """Tokens that are nowhere; 0 if the books are right."""
        return self.trained - self.merged - self.in_flight - self.carried - self.dropped.total()


@dataclass(frozen=True, slots=True)
class Taken:
    """What a commit took."""

    version: Version
    tokens: int


@dataclass(frozen=True, kw_only=True)
class LearnerBalance:
    peer: PeerId
    fragments: tuple[FragmentBalance, ...]


@dataclass(frozen=True, kw_only=True)
class TokenSummary:
    """Run-wide figures: floor(sum_p N_p * tokens_p / sum_p N_p) of each term, all learners together."""

    trained: int
    merged: int
    in_flight: int
    carried: int
    dropped: dict[str, int]
    learners: tuple[LearnerBalance, ...]

    @property
    def balances(self) -> bool:
        """Exactly, for every learner and fragment."""
        return all(fragment.missing == 0 for learner in self.learners for fragment in learner.fragments)


def summarize_tokens(
    learner_tapes: Sequence[Path], chain_entries: Iterable[Entry], num_elements: Sequence[int]
) -> TokenSummary:
    """Add up a run's tokens. `learner_tapes`: of every learner; `chain_entries`: from the first on.

    Raises TapeError if a tape can't be read.
    """
    return summarize_boots([list(read_tape(tape)) for tape in learner_tapes], chain_entries, num_elements)


def summarize_boots(
    learner_boots: Sequence[Sequence[TapeBoot]], chain_entries: Iterable[Entry], num_elements: Sequence[int]
) -> TokenSummary:
    """The same from tapes in memory: the boots of every learner, oldest first."""
    merged: Counter[tuple[PeerId, int]] = Counter()
    consumed: dict[ContributionId, Taken] = {}
    for entry in chain_entries:
        for participant in entry.participants if isinstance(entry, Commit) else ():
            assert isinstance(entry, Commit)
            merged[participant.peer, entry.fragment] += participant.tokens_unmerged
            taken = Taken(entry.version, participant.tokens_unmerged)
            consumed[id_of(participant, entry.fragment)] = taken
    learners = [
        learner
        for boots in learner_boots
        if (learner := _learner_balance(boots, len(num_elements), merged, consumed)) is not None
    ]
    reasons = sorted({reason for each in learners for fragment in each.fragments for reason in fragment.dropped})
    return TokenSummary(
        trained=_run_wide([[f.trained for f in each.fragments] for each in learners], num_elements),
        merged=_run_wide([[f.merged for f in each.fragments] for each in learners], num_elements),
        in_flight=_run_wide([[f.in_flight for f in each.fragments] for each in learners], num_elements),
        carried=_run_wide([[f.carried for f in each.fragments] for each in learners], num_elements),
        dropped={
            reason: _run_wide([[f.dropped[reason] for f in each.fragments] for each in learners], num_elements)
            for reason in reasons
        },
        learners=tuple(learners),
    )


def _run_wide(tokens: Sequence[Sequence[int]], num_elements: Sequence[int]) -> int:
    weighted = sum(n * t for each in tokens for n, t in zip(num_elements, each, strict=True))
    return weighted // max(1, sum(num_elements))


def _learner_balance(
    tape: Sequence[TapeBoot],
    num_fragments: int,
    merged: Counter[tuple[PeerId, int]],
    consumed: Mapping[ContributionId, Taken],
) -> LearnerBalance | None:
    """None for a tape without a learner's boots."""
    boots = [part for part in tape if part.boot.role == "learner" and _has_trained(part)]
    if not boots:
        return None
    peer = boots[0].boot.peer
    if any(part.boot.peer != peer for part in boots):
        raise TapeError(f"the tape of {peer[:8]} has boots of another peer")
    fragments = tuple(FragmentBalance(merged=merged[peer, p]) for p in range(num_fragments))
    core: Peer | None = None
    for part, following in zip(boots, [*boots[1:], None], strict=True):
        core = _add_boot(part, following, fragments)
    assert core is not None
    _add_end(core, fragments, consumed)
    return LearnerBalance(peer=peer, fragments=fragments)


def _has_trained(part: TapeBoot) -> bool:
    return any(isinstance(record.event, StepDone | Resumed) for record in part.events)


def _add_boot(part: TapeBoot, following: TapeBoot | None, fragments: tuple[FragmentBalance, ...]) -> Peer:
    """What one process trained, and those of its drops that stand; returns the core as it ended."""
    began = next((record.event.tokens for record in part.events if isinstance(record.event, Resumed)), 0)
    last = max((record.event.tokens for record in part.events if isinstance(record.event, StepDone)), default=began)
    for fragment in fragments:
        fragment.trained += last - began
    stands_until = _resumed_at(part, following)
    core = part.boot.fresh_core()
    for index, (record, effects) in enumerate(replay_boot(part, core)):
        if index > stands_until and not isinstance(record.event, Resumed):
            continue
        for effect in effects:
            if isinstance(effect, TokensDropped):
                fragments[effect.fragment].dropped[effect.reason] += effect.tokens
    return core


def _resumed_at(part: TapeBoot, following: TapeBoot | None) -> int:
    """Index of the event whose checkpoint the following boot resumed from; beyond the end if there is no following
    boot, before the beginning if the checkpoint is of an earlier one."""
    if following is None:
        return len(part.events)
    resumed = next((record.event for record in following.events if isinstance(record.event, Resumed)), None)
    if resumed is None:
        return -1
    counts = (resumed.step, resumed.tokens)
    saves = [
        index
        for index, record in enumerate(part.events)
        if isinstance(record.event, Saved) and (record.event.step, record.event.tokens) == counts
    ]
    return saves[-1] if saves else -1


def _add_end(core: Peer, fragments: tuple[FragmentBalance, ...], consumed: Mapping[ContributionId, Taken]) -> None:
    """Books as the last process left them, and what it would book of commits that it did not live to adopt. What they
    took of its work in flight is merged; what was not credited of that is dropped. Where they took work of an earlier
    process, of which this one knows nothing, the fragment would begin anew: see `Account.restart`."""
    undecided = set(core.undecided())
    arrived = {claim.fragment: consumed[claim].tokens for claim in undecided if claim in consumed}
    for p, (balance, books) in enumerate(zip(fragments, core.tokens(), strict=True)):
        credited = arrived.get(FragmentId(p))
        if credited is None:
            balance.in_flight += books.in_flight
        elif credited < books.in_flight:
            balance.dropped["implausible"] += books.in_flight - credited
        forgotten = sum(
            taken.tokens
            for claim, taken in consumed.items()
            if (claim.peer, claim.fragment) == (core.peer, p) and taken.version > books.version
            if claim not in undecided
        )
        if forgotten:
            balance.dropped["crashed"] += books.restored - forgotten
            balance.dropped["restarted"] += books.carried - books.restored
        else:
            balance.carried += books.carried


def tokens_lost_after(path: Path, step: int, tokens: int) -> tuple[int, int]:
    """(steps, tokens) that the last process on this tape trained after the checkpoint of these counts: they died with
    it. Nothing is lost where there is no tape."""
    if not path.exists():
        return 0, 0
    for part in reversed(list(read_tape(path))):
        done = [record.event for record in part.events if isinstance(record.event, StepDone)]
        if done:
            return max(0, done[-1].step - step), max(0, done[-1].tokens - tokens)
        if any(isinstance(record.event, Resumed) for record in part.events):
            return 0, 0
    return 0, 0
